"""One row for all experts of a token: which tiles, whose, and where."""

from math import comb

import jax.numpy as jnp
import numpy as np
import pytest

from sparsejax.routing.expert_sets import rows_of_sets, set_count


def choices_of(tokens, experts, g, seed=0):
    generator = np.random.default_rng(seed)
    scores = generator.random((tokens, experts)) * np.arange(1, experts + 1)
    return np.argsort(-scores, axis=1)[:, :g].astype(np.int32)


@pytest.mark.parametrize(
    ("tokens", "experts", "g", "v"),
    [(200, 8, 2, 16), (64, 4, 3, 8), (100, 16, 2, 4), (7, 5, 4, 8), (50, 3, 3, 16)],
)
def test_every_token_has_one_row_in_a_tile_of_its_experts(tokens, experts, g, v):
    index = choices_of(tokens, experts, g)
    rows = rows_of_sets(jnp.asarray(index), experts, v)
    assert rows.experts_per_token == g
    assert rows.of_sets.experts == set_count(experts, g) == comb(experts, g)
    row = np.asarray(rows.of_sets.token_rows)[:, 0]
    assert len(set(row)) == tokens
    np.testing.assert_array_equal(rows.of_sets.row_token[row], np.arange(tokens))
    np.testing.assert_array_equal(rows.tile_experts[row // v], np.sort(index, axis=1))
    assert int(rows.of_sets.row_valid.sum()) == tokens


@pytest.mark.parametrize("seed", range(5))
def test_each_experts_places_are_its_tiles_in_order(seed):
    tokens, experts, g, v = 150, 6, 2, 8
    index = choices_of(tokens, experts, g, seed)
    index = index[(index != 3).all(axis=1)]  # one expert without tokens
    rows = rows_of_sets(jnp.asarray(index), experts, v)
    used = int((-(-rows.of_sets.group_sizes // v)).sum())
    tile_experts = np.asarray(rows.tile_experts)[:used]
    first = 0
    for expert, end in enumerate(np.asarray(rows.ends)):
        places = np.asarray(rows.places)[first:end]
        expected = np.flatnonzero((tile_experts == expert).reshape(-1))
        np.testing.assert_array_equal(places, expected)
        assert expert != 3 or end == first
        first = end
    assert first == used * g


def test_the_order_of_a_tokens_choices_does_not_matter():
    index = choices_of(90, 8, 3)
    rows, turned = (
        rows_of_sets(jnp.asarray(chosen), 8, 4) for chosen in (index, index[:, ::-1])
    )
    np.testing.assert_array_equal(rows.of_sets.token_rows, turned.of_sets.token_rows)
    np.testing.assert_array_equal(rows.places, turned.places)


def test_all_tokens_in_one_set_take_as_many_tiles_as_they_fill():
    rows = rows_of_sets(jnp.tile(jnp.array([[4, 1]]), (33, 1)), 6, 8)
    np.testing.assert_array_equal(rows.tile_experts[:5], [[1, 4]] * 5)
    np.testing.assert_array_equal(rows.ends, [0, 5, 5, 5, 10, 10])
