"""2:4 along the tokens: the fixed order, the dense features, what is kept."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsejax.feed_forward.operands.token_sparsity import (
    densest,
    densest_features,
    fixed_token_order,
    in_fixed_order,
    sparsify_tokens,
)
from sparsejax.feed_forward.tiles import FEATURE_TILE, dense_feature_count


@pytest.mark.parametrize("tokens", [1, 4, 37, 1000])
def test_the_fixed_order_has_every_token_once(tokens):
    order = fixed_token_order(tokens)
    np.testing.assert_array_equal(np.sort(order[order >= 0]), np.arange(tokens))
    assert order.size == 64 * math.ceil(tokens / 64)
    assert order.dtype == np.int32
    x = jax.random.normal(jax.random.key(0), (tokens, 3))
    expected = np.where(order[:, None] < 0, 0, np.asarray(x)[order])
    np.testing.assert_array_equal(in_fixed_order(x), expected)


@pytest.mark.parametrize("tokens", [4096, 8192, 5000])
def test_the_fixed_order_parts_neighbours(tokens):
    fours = fixed_token_order(tokens).reshape(-1, 4)
    apart = np.diff(fours, axis=1)[(fours >= 0).all(axis=1)]
    assert (apart == math.ceil(tokens / 64)).all()


def test_the_fixed_order_never_changes():
    """A checkpoint resumed elsewhere must group the same tokens."""
    order = fixed_token_order(130)
    assert list(order[:6]) == [0, 3, 6, 9, 12, 15]
    assert list(order[40:46]) == [120, 123, 126, 129, -1, -1]


@pytest.mark.parametrize("count", [1, 16, 99, 200])
@pytest.mark.parametrize(
    "most", [1, 9, 300, 70_000, 2**24 - 1, 2**24, 2**30 + 3, 2**31 - 1, 2**31]
)
def test_the_densest_are_the_first_of_a_stable_sort(count, most):
    """Counts as of any number of tokens: a token's index is an int32, and so is how
    many tokens there are."""
    rng, largest = np.random.default_rng(count), min(most, 2**31 - 1)
    nonzeros = rng.integers(0, largest, 200, np.int32, endpoint=True)
    # Many that differ in the lowest bits alone, and the most that there can be.
    nonzeros[::3] = np.minimum(nonzeros[0] // 4 * 4 + rng.integers(0, 4, 67), largest)
    nonzeros[7] = nonzeros[150] = largest
    found = jax.jit(densest, static_argnums=(1, 2))(nonzeros, count, most)
    first = np.argsort(-np.asarray(nonzeros), kind="stable")[:count]
    np.testing.assert_array_equal(np.flatnonzero(found.chosen), np.sort(first))
    before = np.cumsum(found.chosen) - found.chosen
    np.testing.assert_array_equal(found.before, before)


@pytest.mark.parametrize(
    ("features", "share", "count"),
    [
        (128, 0.0, 0),
        (128, 0.05, 16),
        (128, 0.125, 16),
        (128, 0.126, 32),
        (2048, 0.05, 112),
        (8, 0.05, 8),
        (128, 0.99, 128),
    ],
)
def test_dense_features_come_in_tiles(features, share, count):
    assert dense_feature_count(features, share) == count
    chosen = densest_features(jnp.arange(features), share, features)
    # most non-zeros: the last ones
    np.testing.assert_array_equal(chosen, np.arange(features) >= features - count)


def test_dense_feature_ties_go_to_the_lower_index():
    chosen = densest_features(jnp.ones((2, 64), jnp.int32), 0.3, 1)
    np.testing.assert_array_equal(chosen, np.tile(np.arange(64) < 32, (2, 1)))


def test_dense_features_per_expert():
    nonzeros = np.random.default_rng(0).integers(0, 5, size=(3, 40))
    chosen = np.asarray(densest_features(jnp.asarray(nonzeros), 0.2, 4))
    for row, counts in zip(chosen, nonzeros, strict=True):
        ranked = sorted(range(40), key=lambda f: (-counts[f], f))
        assert set(np.flatnonzero(row)) == set(ranked[:FEATURE_TILE])


@settings(max_examples=60, deadline=None)
@given(
    fours=st.lists(
        st.lists(
            st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, -3.0, np.inf, np.nan]),
            min_size=4,
            max_size=4,
        ),
        min_size=6,
        max_size=6,
    )
)
def test_magnitude_keeps_two_of_four_tokens_bit_for_bit(fours):
    x = np.array(fours, np.float32).reshape(2, 3, 4).swapaxes(1, 2).reshape(8, 3)
    dense = np.array([[False, True, False]])
    got = np.asarray(sparsify_tokens(jnp.asarray(x), dense, "magnitude", None))
    expected = np.zeros_like(x)
    for feature in range(3):
        for start in (0, 4):
            group = x[start : start + 4, feature]
            size = [np.inf if np.isnan(a) else min(abs(a), 1e30) for a in group]
            kept = sorted(range(4), key=lambda i: (-size[i], i))[:2]
            for i in range(4) if feature == 1 else kept:
                expected[start + i, feature] = group[i]
    np.testing.assert_array_equal(got.view(np.int32), expected.view(np.int32))


@pytest.mark.parametrize("method", ["mvue", "mvue_approximate"])
def test_estimators_keep_at_most_two_and_leave_dense_features(method):
    x = np.random.default_rng(0).normal(size=(64, 6)).astype(np.float32)
    dense = np.arange(6)[None] == 2
    key = jax.random.key(0)
    got = np.asarray(sparsify_tokens(jnp.asarray(x), dense, method, key))
    np.testing.assert_array_equal(got[:, 2], x[:, 2])
    others = np.delete(got, 2, axis=1).reshape(16, 4, 5)
    np.testing.assert_array_equal(np.sum(others != 0, axis=1), np.full((16, 5), 2))
    # not merely masked: rescaled, for the mean's sake
    assert (
        np.mean(
            others[others != 0]
            != np.delete(x, 2, axis=1).reshape(16, 4, 5)[others != 0]
        )
        > 0.5
    )


def test_an_unknown_method_and_a_missing_key_are_named():
    x, dense = jnp.ones((8, 2)), np.zeros((1, 2), bool)
    with pytest.raises(ValueError, match="method='mag' must be one of 'magnitude', "):
        sparsify_tokens(x, dense, "mag", jax.random.key(0))
    with pytest.raises(ValueError, match="method='mvue' draws random numbers; pass ke"):
        sparsify_tokens(x, dense, "mvue", None)
