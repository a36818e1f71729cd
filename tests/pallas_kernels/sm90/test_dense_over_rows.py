"""Weight gradients of experts: lowered and interpreted here, run where a GPU is."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.sm90.dense_over_rows import (
    EPI_TILES,
    Joined,
    default_config,
    default_parts,
    dense_over_rows,
    why_unsupported,
)
from pallas_kernels.sm90.gemm.dense_kernel import Config
from pallas_kernels.sm90.gemm.split_k import RowParts
from pallas_kernels.sm90.sparse_matmul_configs import SHARED_MEMORY_BYTES
from tests.support.oracles.expert_groups import GROUP_TILE, UNUSED
from tests.support.oracles.expert_groups import GROUPS as THREE

MULTIPROCESSORS = 132
GROUPS = {**THREE, "sixteen": [1, 0, 2, 1] * 4}
SIZES = {"whole tiles": (256, 512), "parts of tiles": (320, 576), "smallest": (64, 64)}
CONFIGS = [
    Config(),
    Config(cluster=1),
    Config(tile_n=192, cluster=1),
    Config(tile_n=128, cluster=1),
    Config(row_blocks=2, tile_n=128, grid_tile_width=1),
]


def case(counts, m, n, *, group_tile=GROUP_TILE, expert_axis=0, seed=0):
    """Whole numbers: their sums are exact in any order."""
    generator = np.random.default_rng(seed)
    rows = (sum(counts) + UNUSED) * group_tile
    a, b = (generator.integers(-2, 3, (rows, size)) for size in (m, n))
    ends = np.cumsum(counts)
    ranges = zip(group_tile * np.pad(ends[:-1], (1, 0)), group_tile * ends, strict=True)
    expected = np.stack(
        [a[first:end].T @ b[first:end] for first, end in ranges], expert_axis
    )
    a, b = (x.astype(np.float32) for x in (a, b))
    a[group_tile * ends[-1] :] = np.nan  # not read
    run = partial(
        dense_over_rows,
        group_tile=group_tile,
        expert_axis=expert_axis,
        multiprocessors=MULTIPROCESSORS,
    )
    operands = jnp.asarray(a, jnp.bfloat16), jnp.asarray(b, jnp.bfloat16)
    return run, (*operands, jnp.asarray(ends, jnp.int32)), expected


@pytest.mark.newest_jax
@pytest.mark.parametrize("expert_axis", [0, 1])
@pytest.mark.parametrize("config", [None, *CONFIGS])
def test_lowers_for_hopper(config, expert_axis):
    run, operands, expected = case([3, 1, 2], 320, 576, expert_axis=expert_axis)
    traced = jax.jit(partial(run, config=config)).trace(*operands)
    assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()
    assert traced.out_info.shape == expected.shape


@pytest.mark.newest_jax
def test_every_config_and_grid_is_a_kernel_of_its_own():
    """So that those which give the same bits on a GPU are not one."""
    options = [{"config": config} for config in CONFIGS]
    options += [{"group_tile": 64}, {"multiprocessors": 4}, {"parts_of_share": 3}]
    run, operands, _ = case([3, 1, 2], 320, 576)
    kernels = [
        str(jax.jit(partial(run, **chosen)).trace(*operands).jaxpr)
        for chosen in (*options, options[0])
    ]
    assert kernels[-1] == kernels[0]  # Lowered, they differ at every call.
    assert len(set(kernels)) == len(options)


@pytest.mark.parametrize(
    ("sizes", "experts", "tile_n"),
    [
        ((4096, 4096), 4, 256),
        ((2048, 512), 16, 256),
        # Half of the multiprocessors would have no larger tile,
        ((512, 512), 4, 128),
        # and here all have one where the smallest take a second round.
        ((768, 768), 4, 192),
        # Three rounds, all of them nearly full.
        ((768, 1536), 8, 192),
    ],
)
def test_smaller_tiles_where_they_need_no_more_rounds(sizes, experts, tile_n):
    config = default_config(*sizes, experts, MULTIPROCESSORS)
    assert config.tile_n == tile_n


@pytest.mark.parametrize(
    ("sizes", "rows", "experts", "parts"),
    [
        # As timed on an H100.
        ((768, 768), 65536, 8, 2),
        ((2048, 1024), 16384, 8, 1),
        # Two tiles for a multiprocessor in either case, and the same with few rows.
        ((768, 1536), 65536, 8, 1),
        ((768, 768), 16384, 8, 1),
        # One round, which two parts would not fill.
        ((512, 512), 65536, 4, 1),
    ],
)
def test_an_equal_share_has_two_parts_where_they_fill_the_last_round(
    sizes, rows, experts, parts
):
    assert default_parts(*sizes, rows, experts, MULTIPROCESSORS) == parts


@pytest.mark.parametrize("config", [None, *CONFIGS])
def test_without_a_number_there_are_as_many_parts_as_by_default(config):
    """Whatever the config, so that the bits are the same."""
    rows = jax.ShapeDtypeStruct((65536, 768), jnp.bfloat16)
    operands = rows, rows, jax.ShapeDtypeStruct((8,), jnp.int32)
    run = partial(dense_over_rows, group_tile=64, multiprocessors=MULTIPROCESSORS)

    def kernel(**parts):
        return str(jax.jit(partial(run, config=config, **parts)).trace(*operands).jaxpr)

    assert kernel() == kernel(parts_of_share=2) != kernel(parts_of_share=1)


@pytest.mark.parametrize("config", CONFIGS)
def test_every_config_of_these_tests_fits(config):
    assert config.shared_memory_bytes(EPI_TILES) <= SHARED_MEMORY_BYTES
    assert config.why_too_large(EPI_TILES) is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((64,), 128, "float32"), "multiplies bfloat16 and float16, not float32"),
        (((64,), 96, "bfloat16"), "group_tile=96 is not a multiple of 64"),
        (((64, 100), 64, "float16"), "a weight's size of 100 is not a multiple of 64"),
        (((64, 128), 64, "float16"), "None"),
    ],
)
def test_why_unsupported(arguments, message):
    assert message in str(why_unsupported(*arguments))


def test_operands_that_do_not_fit_are_refused():
    run, (a, b, ends), _ = case([1, 1], 64, 64)
    with pytest.raises(ValueError, match="must have equally many rows and one dtype"):
        run(a[1:], b, ends)
    with pytest.raises(ValueError, match="must have equally many rows and one dtype"):
        run(a, b.astype(jnp.float16), ends)
    with pytest.raises(ValueError, match="size of 63 is not a multiple of 64"):
        run(a[:, 1:], b, ends)
    with pytest.raises(ValueError, match="needs .* bytes of shared memory of 232448"):
        run(a, b, ends, config=Config(stages=5))


# Interpreted, without what the interpreter does not know: clusters, and the flags and
# sums of parts.


@pytest.mark.newest_jax
@pytest.mark.parametrize(
    ("counts", "sizes", "expert_axis", "config"),
    [
        ([3, 0, 2], "parts of tiles", 0, Config(cluster=1, stages=2)),
        ([0, 4, 1], "whole tiles", 1, Config(tile_n=128, cluster=1, grid_tile_width=1)),
        ([2, 1, 0], "smallest", 1, Config(row_blocks=2, tile_n=64, cluster=1)),
    ],
)
def test_each_expert_sums_over_its_rows_and_no_block_races(
    monkeypatch, counts, sizes, expert_axis, config
):
    monkeypatch.setattr(RowParts, "may_cut", False)
    run, operands, expected = case(
        counts, *SIZES[sizes], group_tile=64, expert_axis=expert_axis
    )
    run = partial(run, config=config, multiprocessors=3)
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        got = jax.jit(run)(*operands)
    np.testing.assert_array_equal(got, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("expert_axis", [0, 1])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("name", GROUPS)
def test_each_expert_sums_over_its_rows_on_a_gpu(name, sizes, expert_axis):
    run, operands, expected = case(GROUPS[name], *SIZES[sizes], expert_axis=expert_axis)
    got, again = (jax.jit(run)(*operands) for _ in range(2))
    np.testing.assert_array_equal(got, expected)
    np.testing.assert_array_equal(got, again)


@pytest.mark.gpu
@pytest.mark.parametrize("config", CONFIGS)
def test_every_config_gives_the_same_bits_on_a_gpu(config):
    run, (a, b, ends), _ = case([3, 1, 2], 320, 576, group_tile=64)
    random = [
        jax.random.normal(jax.random.key(i), x.shape, x.dtype)
        for i, x in enumerate((a, b))
    ]
    got = jax.jit(partial(run, config=config))(*random, ends)
    np.testing.assert_array_equal(got, jax.jit(run)(*random, ends))


@pytest.mark.gpu
def test_random_groups_on_a_gpu():
    generator = np.random.default_rng(0)
    for seed in range(20):
        counts = generator.integers(0, 6, int(generator.integers(1, 9)))
        m, n = 64 * generator.integers(1, 12, 2)
        run, operands, expected = case(
            list(counts),
            int(m),
            int(n),
            group_tile=64 * int(generator.integers(1, 4)),
            expert_axis=seed % 2,
            seed=seed,
        )
        run = partial(run, parts_of_share=1 + seed % 4)
        np.testing.assert_array_equal(jax.jit(run)(*operands), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("parts_of_share", [1, 4])
@pytest.mark.parametrize("config", CONFIGS)
def test_the_parts_of_an_experts_rows_are_added_in_their_order_on_a_gpu(
    config, parts_of_share
):
    """More tasks than blocks, and each time the blocks come in another order."""
    counts = [1, 61, 0, 2]
    run, (a, b, ends), expected = case(counts, 640, 832, group_tile=64)
    run = jax.jit(partial(run, config=config, parts_of_share=parts_of_share))
    np.testing.assert_array_equal(run(a, b, ends), expected)
    a, b = (
        jax.random.normal(jax.random.key(i), x.shape, x.dtype)
        for i, x in enumerate((a, b))
    )
    once = run(a, b, ends)
    for _ in range(20):
        np.testing.assert_array_equal(run(a, b, ends), once)


# Rows with the neurons of several experts.


def joined_case(
    parts, m, n, operand, *, group_tile=64, expert_axis=0, used_tiles=4, seed=0
):
    """As `case`, where each tile has `parts` of five experts, in any order, and one
    operand their columns side by side."""
    generator = np.random.default_rng(seed)
    experts, tiles = 5, used_tiles + UNUSED
    chosen = np.stack(
        [generator.permutation(experts)[:parts] for _ in range(used_tiles)]
        or [np.zeros(parts, int)]
    )[:used_tiles]
    widths = {"a": m, "b": n} | {operand: parts * {"a": m, "b": n}[operand]}
    a, b = (
        generator.integers(-2, 3, (tiles * group_tile, widths[name])) for name in "ab"
    )
    expected = np.zeros((experts, m, n))
    lists = [[] for _ in range(experts)]
    for tile, part in np.ndindex(used_tiles, parts):
        expert, rows = chosen[tile, part], slice(tile * group_tile, None)
        lists[expert].append(tile * parts + part)
        own_a, own_b = a[rows][:group_tile], b[rows][:group_tile]
        if operand == "a":
            own_a = np.split(own_a, parts, axis=1)[part]
        else:
            own_b = np.split(own_b, parts, axis=1)[part]
        expected[expert] += own_a.T @ own_b
    places = np.full(tiles * parts, -1)  # those after the last are not used
    places[: used_tiles * parts] = [place for own in lists for place in own]
    run = partial(
        dense_over_rows,
        group_tile=group_tile,
        expert_axis=expert_axis,
        multiprocessors=MULTIPROCESSORS,
    )

    def over_joined(a, b, ends, places, **options):
        joined = Joined(places, parts, operand)
        return run(a, b, ends, joined=joined, **options)

    a, b = (jnp.asarray(x, jnp.bfloat16) for x in (a, b))
    ends = jnp.asarray(np.cumsum([len(own) for own in lists]), jnp.int32)
    operands = a, b, ends, jnp.asarray(places, jnp.int32)
    return over_joined, operands, np.moveaxis(expected, 0, expert_axis)


@pytest.mark.parametrize(
    ("parts", "sizes", "operand", "expert_axis", "config"),
    [
        # Parts of tiles: what is read beyond an expert's columns is another's.
        (2, (192, 320), "a", 0, Config(cluster=1, stages=2)),
        (3, (64, 64), "b", 1, Config(tile_n=64, cluster=1)),
        (2, (64, 192), "b", 1, Config(tile_n=128, cluster=1, stages=3)),
    ],
)
def test_each_expert_sums_over_its_part_of_joined_rows_and_no_block_races(
    monkeypatch, parts, sizes, operand, expert_axis, config
):
    monkeypatch.setattr(RowParts, "may_cut", False)
    run, operands, expected = joined_case(
        parts, *sizes, operand, expert_axis=expert_axis
    )
    run = partial(run, config=config, multiprocessors=3)
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        got = jax.jit(run)(*operands)
    np.testing.assert_array_equal(got, expected)


@pytest.mark.newest_jax
@pytest.mark.parametrize("operand", ["a", "b"])
@pytest.mark.parametrize("config", [None, *CONFIGS])
def test_sums_over_joined_rows_lower_for_hopper(config, operand):
    run, operands, expected = joined_case(2, 320, 576, operand)
    traced = jax.jit(partial(run, config=config)).trace(*operands)
    assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()
    assert traced.out_info.shape == expected.shape


def test_columns_that_are_not_those_of_several_experts_are_refused():
    run, (a, *others), _ = joined_case(3, 64, 64, "a")
    with pytest.raises(ValueError, match="191 columns are not those of 3 experts"):
        run(a[:, 1:], *others)


@pytest.mark.gpu
@pytest.mark.parametrize("first", range(0, 200, 10))
def test_ten_random_cases_of_joined_rows_on_a_gpu(first):
    generator = np.random.default_rng(first)
    for seed in range(first, first + 10):
        m, n = 64 * generator.integers(1, 12, 2)
        run, operands, expected = joined_case(
            int(generator.integers(2, 5)),
            int(m),
            int(n),
            "ab"[seed % 2],
            group_tile=64 * int(generator.integers(1, 4)),
            expert_axis=seed // 2 % 2,
            used_tiles=int(generator.integers(0, 30)),
            seed=seed,
        )
        run = partial(run, parts_of_share=1 + seed % 4)
        got, again = (jax.jit(run)(*operands) for _ in range(2))
        np.testing.assert_array_equal(got, expected)
        np.testing.assert_array_equal(got, again)


@pytest.mark.gpu
@pytest.mark.parametrize("operand", ["a", "b"])
@pytest.mark.parametrize("config", CONFIGS)
def test_every_config_sums_over_joined_rows_to_the_same_bits(config, operand):
    run, (a, b, *lookups), _ = joined_case(2, 640, 832, operand, used_tiles=60)
    random = [
        jax.random.normal(jax.random.key(i), x.shape, x.dtype)
        for i, x in enumerate((a, b))
    ]
    got = jax.jit(partial(run, config=config))(*random, *lookups)
    np.testing.assert_array_equal(got, jax.jit(run)(*random, *lookups))
