"""Rows of experts in parts."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.row_parts import RowParts

MULTIPROCESSORS, GROUP_TILE = 132, 128


@partial(jax.jit, static_argnums=0)
def cut(parts: RowParts, ends):
    """All columns of a table, of which so many are used."""
    of = partial(parts.part, ends)
    return jax.vmap(of)(jnp.arange(parts.most)), parts.count(ends)


@pytest.mark.parametrize("size", [1, 3, 9, 1000])
@pytest.mark.parametrize("experts", [1, 5, 16])
def test_parts_of_an_expert_are_about_as_long_and_have_its_rows_in_order(size, experts):
    generator = np.random.default_rng(size + experts)
    most = 40
    parts = RowParts(experts, most * experts, size)
    for _ in range(10):
        own = generator.integers(0, most, experts, endpoint=True)
        own[generator.random(experts) < 0.3] = 0
        table, count = cut(parts, jnp.asarray(np.cumsum(own), jnp.int32))
        assert experts <= count <= parts.most
        of_expert, first, length, number, after = (np.array(x)[:count] for x in table)
        # One after the other, without a gap.
        assert first[0] == 0 and (first[1:] == (first + length)[:-1]).all()
        for expert in range(experts):
            mine = of_expert == expert
            assert length[mine].sum() == own[expert]
            assert list(number[mine]) == list(range(mine.sum()))
            assert list(after[mine]) == list(range(mine.sum()))[::-1]
            assert np.ptp(length[mine]) <= 1
            assert length[mine].max() <= np.ceil(1.5 * size)
            if mine.sum() > 1:
                assert length[mine].min() >= size // 2


def parts_of(own, m: int, n: int) -> list[int]:
    """Of each expert with so many group tiles."""
    parts = RowParts.of(m, n, sum(own), len(own), MULTIPROCESSORS)
    table, count = cut(parts, jnp.asarray(np.cumsum(own), jnp.int32))
    return list(np.bincount(np.asarray(table.expert)[:count]))


@pytest.mark.parametrize(
    ("m", "n", "experts", "parts"),
    [
        # Tiles of 256 x 256 for a quarter of 66 pairs of multiprocessors, and for half,
        (2048, 512, 16, 7),
        (2048, 1024, 8, 4),
        # and for more.
        (2048, 1088, 8, 1),
        (2048, 2048, 4, 1),
        (2176, 2048, 4, 1),
        (4096, 4096, 4, 1),
    ],
)
def test_an_expert_with_most_of_the_rows_is_cut_up_where_that_fills_the_gpu(
    m, n, experts, parts
):
    tiles = 16384 // GROUP_TILE
    most = round(0.9 * tiles)
    own = [0, most, *np.diff(np.linspace(0, tiles - most, experts - 1).astype(int))]
    assert parts_of(own, m, n) == [1, parts] + [1] * (experts - 2)


@pytest.mark.parametrize("experts", [2, 4, 8, 16])
@pytest.mark.parametrize("width", [768, 1024, 2048, 4096])
def test_about_equal_shares_are_not_cut_up(width, experts):
    share = 16384 // GROUP_TILE // experts
    own = [share, share + share // 3, *[share] * (experts - 2)]
    assert parts_of(own, width, 4 * width // experts) == [1] * experts


def test_no_part_is_shorter_than_a_group_tile():
    for tiles in (1, 2, 7):
        assert RowParts.of(64, 64, tiles, 3, MULTIPROCESSORS).size >= 1
