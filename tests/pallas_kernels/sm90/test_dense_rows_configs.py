"""Which config the kernel of dense rows takes, and which operands it does not."""

import pytest

from pallas_kernels.sm90.dense_rows import (
    default_config,
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
