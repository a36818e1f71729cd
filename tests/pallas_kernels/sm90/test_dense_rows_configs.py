"""Which config the kernel of dense rows takes, and which operands it does not."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.sm90.dense_rows import (
    default_config,
    dense_rows,
    why_invalid,
    why_unsupported,
)

MULTIPROCESSORS = 132


@pytest.mark.parametrize(
    ("rows", "n", "group_tile", "axis", "cluster", "tile_n"),
    [
        # Tiles of 256 rows have one expert: two blocks load its weight together.
        (32768, 2048, 256, "m", 2, 256),
        (32768, 2048, 128, "n", 2, 256),
        # Half of the multiprocessors would have no larger tile.
        (1024, 1024, 128, "n", 2, 128),
    ],
)
def test_the_default_config_follows_the_size(
    rows, n, group_tile, axis, cluster, tile_n
):
    config = default_config(rows, n, group_tile, MULTIPROCESSORS)
    assert (config.cluster_axis, config.cluster, config.tile_n) == (
        axis,
        cluster,
        tile_n,
    )


@pytest.mark.parametrize(
    ("groups", "tile_n"),
    [
        # 132 group tiles are whole rounds of either tile; 135 begin one more, which
        # is the shorter one of small tiles.
        (1, 128),
        # Of 128 to 135 most fit the whole rounds, which large tiles need less time for.
        (8, 256),
    ],
)
def test_tiles_that_may_stay_empty_are_not_all_counted(groups, tile_n):
    tokens, experts, d_hidden = 16384, 8, 8192
    rows = (tokens + experts * 127) // 128 * 128
    assert rows == 135 * 128
    config = default_config(
        rows, d_hidden // experts, 128, MULTIPROCESSORS, groups=groups
    )
    assert config.tile_n == tile_n


def test_small_tiles_cost_more_than_their_share_of_columns():
    # 8,192 tokens with two of eight experts: by columns and reads alone 9.9 rounds of
    # tiles of 128 would cost 1 % less than 5.2 rounds of tiles of 256.
    tokens, pairs, group_tile = 8192, 28, 128
    rows = (tokens + pairs * 127) // group_tile * group_tile
    config = default_config(rows, 2048, group_tile, MULTIPROCESSORS, groups=pairs)
    assert config.tile_n == 256


@pytest.mark.parametrize("parts", [1, 2])
def test_the_kernel_counts_a_group_for_each_set_of_experts(parts, monkeypatch):
    asked = []
    monkeypatch.setattr(
        "pallas_kernels.sm90.dense_rows.default_config",
        lambda *sizes, **how: asked.append(how) or default_config(*sizes, **how),
    )
    tiles, experts, own = 31, 8, 128
    run = partial(dense_rows, expert_axis=0, b_k_major=False, multiprocessors=132)
    of = partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    jax.eval_shape(
        run,
        of((tiles * 128, parts * own)),
        of((experts, own, 256)),
        jax.ShapeDtypeStruct((tiles, parts)[: 1 + (parts > 1)], jnp.int32),
        jax.ShapeDtypeStruct((), jnp.int32),
    )
    assert [how["groups"] for how in asked] == [{1: 8, 2: 28}[parts]]


@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize("group_tile", [128, 256, 384])
@pytest.mark.parametrize("rows", [384, 3072, 98304])
def test_the_default_config_is_valid(rows, group_tile, reads):
    config = default_config(rows, 1024, group_tile, MULTIPROCESSORS, reads=reads)
    assert why_invalid(config, group_tile, reads=reads) is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((128, 128), 128, "float32"), "multiplies bfloat16 and float16, not float32"),
        (((128, 128), 64, "bfloat16"), "group_tile=64 is not a multiple of 128"),
        (((128, 200), 128, "float16"), "size of 200 is not a multiple of 64 from 128"),
        (((64, 128), 128, "float16"), "size of 64 is not a multiple of 64 from 128"),
        (((128, 192), 256, "float16"), "None"),
    ],
)
def test_why_unsupported(arguments, message):
    assert message in str(why_unsupported(*arguments))
