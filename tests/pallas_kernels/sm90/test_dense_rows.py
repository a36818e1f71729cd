"""Dense rows by their experts' weights: lowered and interpreted here, run where a GPU
is."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.sm90.dense_rows import (
    OtherRows,
    dense_rows,
)
from pallas_kernels.sm90.gemm.dense_kernel import Config
from tests.support.devices.emitted import modules
from tests.support.oracles.expert_groups import GROUP_TILE, GROUPS, UNUSED

MULTIPROCESSORS = 132
CONFIGS = [
    Config(cluster_axis="n"),
    Config(cluster=1, stages=3),
    Config(tile_n=128, cluster=1, grid_tile_width=1),
]
WIDE = [Config(), Config(row_blocks=2, tile_n=128, cluster=1)]
"""The configs that need group tiles of 256 rows."""
ORDERS = [(0, False), (0, True), (1, False), (1, True)]


def relu2(x):
    return jnp.square(jnp.maximum(x, 0.0))


def gradient(da, a):
    return da * 2 * jnp.sqrt(a)


def case(
    counts, k, n, *, expert_axis=0, b_k_major=False, group_tile=GROUP_TILE, seed=0
):
    """Whole numbers: their sums are exact in any order. Returns the function, its
    operands, and the product of the rows that are used."""
    generator = np.random.default_rng(seed)
    experts = len(counts)
    tile_expert = np.repeat(np.arange(experts), counts)
    tile_expert = np.concatenate([tile_expert, np.full(UNUSED, experts - 1)])
    rows = len(tile_expert) * group_tile
    a = generator.integers(-2, 3, (rows, k)).astype(np.float32)
    b = generator.integers(-2, 3, (experts, k, n)).astype(np.float32)
    expected = np.zeros((sum(counts) * group_tile, n), np.float32)
    for tile in range(sum(counts)):
        own = slice(tile * group_tile, (tile + 1) * group_tile)
        expected[own] = a[own] @ b[tile_expert[tile]]
    stored = b.swapaxes(1, 2) if b_k_major else b
    run = partial(
        dense_rows,
        expert_axis=expert_axis,
        b_k_major=b_k_major,
        multiprocessors=MULTIPROCESSORS,
    )
    operands = (
        jnp.asarray(a, jnp.bfloat16),
        jnp.asarray(np.moveaxis(stored, 0, expert_axis), jnp.bfloat16),
        jnp.asarray(tile_expert, jnp.int32),
        jnp.int32(sum(counts)),
    )
    return run, operands, expected


def used(got, expected):
    """Returns the rows of a result that belong to used tiles, in float32."""
    return np.asarray(got[: len(expected)], np.float32)


def rounded(x):
    return np.asarray(jnp.asarray(x, jnp.bfloat16), np.float32)


@pytest.mark.newest_jax
@pytest.mark.parametrize(("expert_axis", "b_k_major"), ORDERS)
@pytest.mark.parametrize("config", [None, *CONFIGS])
def test_lowers_for_hopper(config, expert_axis, b_k_major):
    run, operands, _ = case(
        [3, 1, 2], 320, 576, expert_axis=expert_axis, b_k_major=b_k_major
    )
    traced = jax.jit(partial(run, config=config)).trace(*operands)
    assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()
    assert traced.out_info.shape == (len(operands[0]), 576)


@pytest.mark.newest_jax
@pytest.mark.parametrize("config", [None, *WIDE])
@pytest.mark.parametrize("reads", [False, True])
def test_epilogues_and_wide_tiles_lower_for_hopper(config, reads):
    run, operands, _ = case([1, 2], 256, 512, group_tile=256)
    if reads and config is not None:
        config = Config(cluster=1, stages=3)
    entries = jnp.ones((len(operands[0]), 512), jnp.bfloat16)
    what = {"activation": relu2}
    if reads:
        what = {"other": OtherRows(entries, gradient)}
    traced = jax.jit(partial(run, config=config, **what)).trace(*operands)
    assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()


def test_the_gradient_takes_approximate_roots():
    run, operands, _ = case([3, 1, 2], 256, 256)
    entries = jnp.ones((len(operands[0]), 256), jnp.bfloat16)
    (module,) = modules(partial(run, other=OtherRows(entries, gradient)), *operands)
    assert "sqrt.approx.f32" in module and "math.sqrt" not in module


@pytest.mark.newest_jax
def test_every_config_order_and_epilogue_is_a_kernel_of_its_own():
    """So that those which give the same bits on a GPU are not one."""
    run, operands, _ = case([3, 1, 2], 256, 256)
    options = [{"config": config} for config in CONFIGS]
    options += [{"activation": relu2}, {"multiprocessors": 4}, {"b_k_major": True}]
    entries = jnp.ones((len(operands[0]), 256), jnp.bfloat16)
    options += [{"other": OtherRows(entries, gradient)}, {"out_dtype": jnp.float32}]
    kernels = [
        str(jax.jit(partial(run, **chosen)).trace(*operands).jaxpr)
        for chosen in (*options, options[0])
    ]
    assert kernels[-1] == kernels[0]  # Lowered, they differ at every call.
    assert len(set(kernels)) == len(options)


def test_operands_that_do_not_fit_are_refused():
    run, (a, b, tile_expert, count), _ = case([1, 1], 128, 256)
    with pytest.raises(ValueError, match="they need whole tiles, equal k and"):
        run(a[:, 64:], b, tile_expert, count)
    with pytest.raises(ValueError, match="they need whole tiles, equal k and"):
        run(a.astype(jnp.float16), b, tile_expert, count)
    with pytest.raises(ValueError, match="they need whole tiles, equal k and"):
        run(a[1:], b, tile_expert, count)
    with pytest.raises(ValueError, match="size of 100 is not a multiple of 64"):
        run(a, b[..., :100], tile_expert, count)
    with pytest.raises(ValueError, match="does not divide group_tile=128"):
        run(a, b, tile_expert, count, config=WIDE[0])
    with pytest.raises(ValueError, match="needs .* bytes of shared memory of 232448"):
        run(a, b, tile_expert, count, config=Config(stages=5, cluster=1))
    with pytest.raises(ValueError, match="has 3 epilogue tiles, no multiple of 2"):
        run(a, b, tile_expert, count, config=Config(tile_n=192, cluster=1))
    entries = jnp.ones((len(a), 128), jnp.bfloat16)
    with pytest.raises(ValueError, match="the epilogue reads bfloat16.* must be equal"):
        run(a, b, tile_expert, count, other=OtherRows(entries, gradient))
    entries = jnp.ones((len(a), 256), jnp.bfloat16)
    with pytest.raises(ValueError, match="result is float32.* as the rows bfloat16"):
        other = OtherRows(entries, gradient)
        run(a, b, tile_expert, count, other=other, out_dtype=jnp.float32)
    with pytest.raises(ValueError, match="out_dtype=float16 is neither float32 nor"):
        run(a, b, tile_expert, count, out_dtype=jnp.float16)


# Interpreted, without clusters, which the interpreter does not know.


@pytest.mark.newest_jax
@pytest.mark.parametrize(
    ("counts", "order", "sizes", "config"),
    [
        ([2, 0, 1], (0, False), (192, 320), Config(cluster=1, stages=2)),
        ([1, 2, 0], (1, False), (128, 128), Config(tile_n=128, cluster=1)),
        ([0, 1, 1], (0, True), (128, 320), Config(tile_n=128, cluster=1, stages=2)),
        ([1, 1, 0], (1, True), (320, 192), Config(cluster=1, grid_tile_width=1)),
    ],
)
def test_each_row_meets_its_experts_weight_and_no_block_races(
    counts, order, sizes, config
):
    expert_axis, b_k_major = order
    run, operands, expected = case(
        counts, *sizes, expert_axis=expert_axis, b_k_major=b_k_major
    )
    run = partial(run, config=config, multiprocessors=3)
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        got = jax.jit(run)(*operands)
    np.testing.assert_array_equal(used(got, expected), expected)


@pytest.mark.newest_jax
@pytest.mark.parametrize("config", [None, *CONFIGS])
def test_float32_results_lower_for_hopper(config):
    run, operands, _ = case([3, 1, 2], 320, 576)
    run = partial(run, config=config, out_dtype=jnp.float32)
    traced = jax.jit(run).trace(*operands)
    assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()
    assert traced.out_info.dtype == jnp.float32


@pytest.mark.newest_jax
def test_float32_results_are_not_rounded_to_bfloat16():
    run, operands, expected = case([1, 2], 320, 192)
    operands = (8 * operands[0] + 1, *operands[1:])
    a, b = (np.asarray(x, np.float32) for x in operands[:2])
    expected = np.concatenate(
        [a[r : r + 128] @ b[e] for r, e in ((0, 0), (128, 1), (256, 1))]
    )
    assert (rounded(expected) != expected).any()
    config = Config(cluster=1, stages=2)
    run = partial(run, config=config, out_dtype=jnp.float32, multiprocessors=3)
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        got = jax.jit(run)(*operands)
    np.testing.assert_array_equal(used(got, expected), expected)


@pytest.mark.newest_jax
@pytest.mark.parametrize("k", [128, 384])
def test_epilogues_without_races(k):
    run, operands, expected = case([1, 2], k, 320)
    config = Config(cluster=1, stages=2)
    run = partial(run, config=config, multiprocessors=2)
    a = np.random.default_rng(1).integers(0, 5, (len(operands[0]), 320)) ** 2
    other = OtherRows(jnp.asarray(a, jnp.bfloat16), gradient)
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        squared = jax.jit(partial(run, activation=relu2))(*operands)
        dy_up = jax.jit(lambda *operands: run(*operands, other=other))(*operands)
    np.testing.assert_array_equal(
        used(squared, expected), rounded(np.maximum(expected, 0) ** 2)
    )
    np.testing.assert_array_equal(
        used(dy_up, expected), rounded(expected * 2 * np.sqrt(a[: len(expected)]))
    )


@pytest.mark.gpu
@pytest.mark.parametrize(("expert_axis", "b_k_major"), ORDERS)
@pytest.mark.parametrize("name", GROUPS)
@pytest.mark.parametrize("group_tile", [128, 256])
def test_each_row_meets_its_experts_weight_on_a_gpu(
    name, expert_axis, b_k_major, group_tile
):
    run, operands, expected = case(
        GROUPS[name],
        320,
        576,
        expert_axis=expert_axis,
        b_k_major=b_k_major,
        group_tile=group_tile,
    )
    got, again = (jax.jit(run)(*operands) for _ in range(2))
    np.testing.assert_array_equal(used(got, expected), expected)
    np.testing.assert_array_equal(used(got, expected), used(again, expected))


@pytest.mark.gpu
@pytest.mark.parametrize("config", [*CONFIGS, *WIDE])
def test_every_config_gives_the_same_bits_on_a_gpu(config):
    run, (a, b, *lookups), expected = case([3, 1, 2], 320, 576, group_tile=256)
    a, b = (
        jax.random.normal(jax.random.key(i), x.shape, x.dtype)
        for i, x in enumerate((a, b))
    )
    got = jax.jit(partial(run, config=config))(a, b, *lookups)
    np.testing.assert_array_equal(
        used(got, expected), used(jax.jit(run)(a, b, *lookups), expected)
    )


@pytest.mark.gpu
@pytest.mark.parametrize("first", range(0, 200, 10))
def test_ten_random_shapes_and_epilogues_on_a_gpu(first):
    generator = np.random.default_rng(first)
    for seed in range(first, first + 10):
        counts = list(generator.integers(0, 6, int(generator.integers(1, 9))))
        k, n = (int(64 * size) for size in generator.integers(2, 12, 2))
        expert_axis, b_k_major = ORDERS[seed % 4]
        run, operands, expected = case(
            counts,
            k,
            n,
            expert_axis=expert_axis,
            b_k_major=b_k_major,
            group_tile=128 * int(generator.integers(1, 3)),
            seed=seed,
        )
        entries = generator.integers(0, 5, (len(operands[0]), n)) ** 2
        other = OtherRows(jnp.asarray(entries, jnp.bfloat16), gradient)
        plain, wide, squared, dy_up = jax.jit(
            lambda *operands, run=run, other=other: (
                run(*operands),
                run(*operands, out_dtype=jnp.float32),
                run(*operands, activation=relu2),
                run(*operands, other=other),
            )
        )(*operands)
        of_gradient = expected * 2 * np.sqrt(entries[: len(expected)])
        np.testing.assert_array_equal(used(plain, expected), rounded(expected))
        np.testing.assert_array_equal(used(wide, expected), expected)
        np.testing.assert_array_equal(
            used(squared, expected), rounded(np.maximum(expected, 0) ** 2)
        )
        np.testing.assert_array_equal(used(dy_up, expected), rounded(of_gradient))


# Rows with the neurons of several experts.


def joined_case(parts, sizes, order, *, along_k, used_tiles=3, seed=0):
    """Returns the function, its operands, and the product of the rows that are used:
    `sizes` are k and n of one expert's weight, whole numbers as in `case`."""
    generator = np.random.default_rng(seed)
    expert_axis, b_k_major = order
    experts, (k, n) = 5, sizes
    chosen = np.stack(
        [generator.permutation(experts)[:parts] for _ in range(used_tiles + UNUSED)]
    )
    rows = len(chosen) * GROUP_TILE
    a = generator.integers(-2, 3, (rows, k * (parts if along_k else 1)))
    b = generator.integers(-2, 3, (experts, k, n))
    blocks = []
    for tile in range(used_tiles):
        own = a[tile * GROUP_TILE : (tile + 1) * GROUP_TILE]
        of_parts = np.split(own, parts, axis=1) if along_k else [own] * parts
        products = [x @ b[e] for x, e in zip(of_parts, chosen[tile], strict=True)]
        blocks.append(sum(products) if along_k else np.concatenate(products, axis=1))
    stored = b.swapaxes(1, 2) if b_k_major else b
    run = partial(
        dense_rows,
        expert_axis=expert_axis,
        b_k_major=b_k_major,
        multiprocessors=MULTIPROCESSORS,
    )
    operands = (
        jnp.asarray(a, jnp.bfloat16),
        jnp.asarray(np.moveaxis(stored, 0, expert_axis), jnp.bfloat16),
        jnp.asarray(chosen, jnp.int32),
        jnp.int32(used_tiles),
    )
    n_of_all = n * (1 if along_k else parts)
    expected = np.concatenate([np.zeros((0, n_of_all)), *blocks])
    return run, operands, expected.astype(np.float32)


@pytest.mark.parametrize(
    ("parts", "sizes", "order", "along_k", "config"),
    [
        (2, (128, 320), (0, False), True, Config(cluster=1, stages=2)),
        (3, (256, 192), (1, True), True, Config(tile_n=128, cluster=1, stages=2)),
        (2, (128, 256), (0, True), False, Config(cluster=1, stages=2)),
        (3, (192, 128), (1, False), False, Config(tile_n=128, cluster=1)),
    ],
)
def test_rows_of_several_experts_meet_the_weights_of_all_and_no_block_races(
    parts, sizes, order, along_k, config
):
    run, operands, expected = joined_case(parts, sizes, order, along_k=along_k)
    run = partial(run, config=config, multiprocessors=3)
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        got = jax.jit(run)(*operands)
    assert got.shape[1] == expected.shape[1]
    np.testing.assert_array_equal(used(got, expected), rounded(expected))


@pytest.mark.parametrize("along_k", [True, False])
def test_the_epilogue_reads_rows_of_several_experts_without_races(along_k):
    run, operands, expected = joined_case(
        2, (128, 128), (0, True), along_k=along_k, used_tiles=2
    )
    run = partial(run, config=Config(tile_n=128, cluster=1), multiprocessors=2)
    shape = len(operands[0]), expected.shape[1]
    a = np.random.default_rng(1).integers(0, 5, shape) ** 2
    other = OtherRows(jnp.asarray(a, jnp.bfloat16), gradient)
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        dy_up = jax.jit(lambda *operands: run(*operands, other=other))(*operands)
    np.testing.assert_array_equal(
        used(dy_up, expected), rounded(expected * 2 * np.sqrt(a[: len(expected)]))
    )


@pytest.mark.newest_jax
@pytest.mark.parametrize("config", [None, *CONFIGS])
@pytest.mark.parametrize("along_k", [True, False])
def test_rows_of_several_experts_lower_for_hopper(along_k, config):
    run, operands, _ = joined_case(2, (256, 256), (0, along_k), along_k=along_k)
    traced = jax.jit(partial(run, config=config)).trace(*operands)
    assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()
    assert traced.out_info.shape[1] == 256 * (1 if along_k else 2)


def test_rows_of_several_experts_that_do_not_fit_are_refused():
    run, operands, _ = joined_case(2, (128, 384), (0, False), along_k=False)
    with pytest.raises(ValueError, match="256 columns does not divide the 384 of an"):
        run(*operands, config=Config(cluster=1))
    run, operands, _ = joined_case(2, (128, 192), (0, False), along_k=False)
    with pytest.raises(ValueError, match="192 neurons of an expert are no multiple"):
        run(*operands)
    a, *others = operands
    with pytest.raises(ValueError, match="tiles, 2 experts each, do not fit weights"):
        run(jnp.tile(a, 3), *others)


@pytest.mark.gpu
@pytest.mark.parametrize("first", range(0, 200, 10))
def test_ten_random_shapes_of_several_experts_on_a_gpu(first):
    generator = np.random.default_rng(first)
    for seed in range(first, first + 10):
        parts, along_k = int(generator.integers(2, 5)), bool(seed % 2)
        of_expert = int(128 * generator.integers(1, 6))
        whole = int(64 * generator.integers(2, 12))
        sizes = (of_expert, whole) if along_k else (whole, of_expert)
        run, operands, expected = joined_case(
            parts,
            sizes,
            ORDERS[seed // 2 % 4],
            along_k=along_k,
            used_tiles=int(generator.integers(0, 12)),
            seed=seed,
        )
        n = sizes[1] * (1 if along_k else parts)
        entries = generator.integers(0, 5, (len(operands[0]), n)) ** 2
        other = OtherRows(jnp.asarray(entries, jnp.bfloat16), gradient)
        plain, wide, dy_up = jax.jit(
            lambda *operands, run=run, other=other: (
                run(*operands),
                run(*operands, out_dtype=jnp.float32),
                run(*operands, other=other),
            )
        )(*operands)
        of_gradient = expected * 2 * np.sqrt(entries[: len(expected)])
        np.testing.assert_array_equal(used(plain, expected), rounded(expected))
        np.testing.assert_array_equal(used(wide, expected), expected)
        np.testing.assert_array_equal(used(dy_up, expected), rounded(of_gradient))


@pytest.mark.gpu
@pytest.mark.parametrize("along_k", [True, False])
@pytest.mark.parametrize("config", CONFIGS)
def test_every_config_gives_rows_of_several_experts_the_same_bits(config, along_k):
    run, (a, b, *lookups), expected = joined_case(
        2, (256, 256), (0, along_k), along_k=along_k, used_tiles=9
    )
    a, b = (
        jax.random.normal(jax.random.key(i), x.shape, x.dtype)
        for i, x in enumerate((a, b))
    )
    got, again = (jax.jit(partial(run, config=config))(a, b, *lookups) for _ in "12")
    np.testing.assert_array_equal(used(got, expected), used(again, expected))
    np.testing.assert_array_equal(
        used(got, expected), used(jax.jit(run)(a, b, *lookups), expected)
    )
