"""Rows of experts in parts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.row_parts import cut_rows, part_size

MULTIPROCESSORS, GROUP_TILE = 132, 128
cut = jax.jit(cut_rows, static_argnums=(1, 2))


@pytest.mark.parametrize("size", [1, 3, 9, 1000])
@pytest.mark.parametrize("experts", [1, 5, 16])
def test_parts_of_an_expert_are_about_as_long_and_have_its_rows_in_order(size, experts):
    generator = np.random.default_rng(size + experts)
    most = 40
    for _ in range(10):
        own = generator.integers(0, most, experts, endpoint=True)
        own[generator.random(experts) < 0.3] = 0
        ends = jnp.asarray(np.cumsum(own), jnp.int32)
        table, used = cut(ends, most * experts, size)
        parts = np.asarray(table).T[: int(used[0])]
        assert experts <= len(parts) <= table.shape[1]
        of_expert, first, length, number, after = parts.T
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
    tiles = sum(own)
    size = part_size(m, n, tiles, GROUP_TILE, len(own), MULTIPROCESSORS)
    table, used = cut(jnp.asarray(np.cumsum(own), jnp.int32), tiles, size)
    return list(np.bincount(np.asarray(table)[0, : int(used[0])]))


@pytest.mark.parametrize(
    ("m", "n", "experts", "parts"),
    [
        # Tiles of 256 x 256 for a quarter of 66 pairs of multiprocessors, for half,
        (2048, 512, 16, 7),
        (2048, 1024, 8, 4),
        # for all, and for all and some.
        (2048, 2048, 4, 1),
        (2176, 2048, 4, 4),
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
        assert part_size(64, 64, tiles, GROUP_TILE, 3, MULTIPROCESSORS) >= 1
