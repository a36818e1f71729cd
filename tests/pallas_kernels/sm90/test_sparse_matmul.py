"""The 2:4 GEMM on Hopper: lowered everywhere, run where there is one."""

import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.sm90 import sparse_matmul
from pallas_kernels.sm90.gemm import wgmma_sp
from pallas_kernels.sm90.sparse_matmul_configs import (
    Config,
    Shape,
    default_config,
    why_invalid,
)
from sparsejax.sparsity.compressed import compress, decompress
from sparsejax.sparsity.packed import pack
from tests.support.devices.emitted import modules

MULTIPROCESSORS = 132
ORDERS = [(True, True), (True, False), (False, True), (False, False)]


def relu_squared(x):
    return jnp.square(jnp.maximum(x, 0))


@partial(jax.jit, static_argnums=(0, 1))
def arguments(shape: Shape, seed: int = 0):
    """A compressed, and B as it is stored."""
    keys = jax.random.split(jax.random.key(seed))
    a = compress(jax.random.normal(keys[0], (shape.m, shape.k), shape.dtype))
    stored = (shape.n, shape.k) if shape.b_k_major else (shape.k, shape.n)
    return a, jax.random.normal(keys[1], stored, shape.dtype)


def product(shape: Shape, a, b, **options):
    packed = pack(a)
    return sparse_matmul.sparse_matmul(
        packed.values,
        packed.metadata,
        b,
        b_k_major=shape.b_k_major,
        transpose_out=shape.transpose_out,
        **{"multiprocessors": MULTIPROCESSORS} | options,
    )


def lowered(shape: Shape, **options):
    a = jax.eval_shape(lambda: arguments(shape)[0])
    b = jax.eval_shape(lambda: arguments(shape)[1])
    function = jax.jit(partial(product, shape, **options))
    return function.trace(a, b).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.newest_jax
@pytest.mark.parametrize(("b_k_major", "transpose_out"), ORDERS)
@pytest.mark.parametrize(
    ("dtype", "out_dtype"),
    [("bfloat16", None), ("float16", None), ("bfloat16", jnp.float32)],
)
def test_lowers_for_hopper(b_k_major, transpose_out, dtype, out_dtype):
    shape = Shape(
        m=192 if transpose_out else 77,
        n=77 if transpose_out and b_k_major else 192,
        k=128,
        dtype=dtype,
        b_k_major=b_k_major,
        transpose_out=transpose_out,
    )
    text = lowered(shape, activation=relu_squared, out_dtype=out_dtype)
    assert "mosaic_gpu" in text


@pytest.mark.newest_jax
@pytest.mark.parametrize(
    "config",
    [
        Config(cluster=1, grid_minor_dim="n"),
        Config(row_blocks=1, tile_n=256, pairs=3),
        Config(tile_n=64, stages=2, pairs=1, warpgroups=1),
        Config(tile_n=176, out_columns=88),
        Config(out_columns=32, out_slots=4, grid_tile_width=4),
    ],
)
def test_every_knob_lowers(config):
    assert "mosaic_gpu" in lowered(Shape(m=256, n=300, k=128), config=config)


@pytest.mark.parametrize(
    ("config", "shape", "message"),
    [
        ({}, {"dtype": "float32"}, "multiplies bfloat16 and float16, not float32"),
        ({}, {"k": 96}, "k=96 is not a multiple of 64"),
        ({}, {"m": 100}, "m=100, .* not a multiple of 64"),
        ({}, {"n": 100, "transpose_out": False}, "n=100, .* not a multiple of 64"),
        ({}, {"n": 100, "b_k_major": False}, "n=100 .* B stored"),
        ({"tile_n": 100}, {}, "tile_n=100 is not a multiple of 16"),
        ({"tile_n": 96}, {"b_k_major": False}, "tile_n=96 .* required of B"),
        ({"warpgroups": 3}, {}, "warpgroups=3 is not 1 or 2"),
        ({"row_blocks": 3}, {}, "row_blocks=3 is not 1 or 2"),
        ({"tile_n": 256}, {}, "row_blocks=2 x tile_n=256 is above 384"),
        ({"cluster": 4}, {}, "cluster=4 is not 1 or 2"),
        ({"out_columns": 36}, {}, "out_columns=36 is not a multiple of 8"),
        ({"out_columns": 128}, {}, "divides tile_n=192"),
        ({"out_columns": 32}, {"transpose_out": False}, "of 2 bytes are not 128"),
        ({}, {"mode": "weight_gradient"}, "is float32 and reads B stored"),
        (
            {},
            {"mode": "sparse_activation", "group_tile": 64},
            "written a row per token",
        ),
        ({"stages": 0}, {}, "must be positive"),
        ({"pairs": 0}, {}, "must be positive"),
        ({"stages": 6}, {}, r"needs \d+ bytes of shared memory of 232448"),
    ],
)
def test_what_cannot_run_is_told(config, shape, message):
    shape = replace(Shape(m=128, n=256, k=128), **shape)
    reason = why_invalid(Config(**config), shape)
    assert reason is not None
    assert re.search(message, reason)


def test_operands_that_do_not_fit_are_refused():
    a, b = arguments(Shape(m=64, n=8, k=64))
    with pytest.raises(ValueError, match=r"need metadata \(1, 1, 128\).*with k=8"):
        product(Shape(m=64, n=64, k=8, b_k_major=False), a, b)
    with pytest.raises(ValueError, match="out_dtype=int32 is not"):
        product(Shape(m=64, n=8, k=64), a, b, out_dtype=jnp.int32)


@pytest.mark.newest_jax
@pytest.mark.parametrize("transpose_out", [True, False])
def test_split_rows_lower_to_a_result_of_their_own(transpose_out):
    shape = Shape(m=448, n=192, k=128, b_k_major=False, transpose_out=transpose_out)
    operands = jax.eval_shape(lambda: arguments(shape))
    run = partial(product, shape, split_rows=64, out_dtype=jnp.float32)
    first, apart = jax.eval_shape(run, *operands)
    sizes = [(192, 384), (192, 64)] if transpose_out else [(384, 192), (64, 192)]
    assert [first.shape, apart.shape] == sizes
    assert "mosaic_gpu" in lowered(shape, split_rows=64, out_dtype=jnp.float32)


@pytest.mark.parametrize(("m", "split_rows"), [(256, 100), (200, 64), (128, 128)])
def test_split_rows_that_no_tile_ends_at_are_refused(m, split_rows):
    shape = Shape(m=m, n=64, k=64, transpose_out=False)
    with pytest.raises(ValueError, match=f"split_rows={split_rows} of {m} rows of A"):
        jax.eval_shape(
            partial(product, shape, split_rows=split_rows),
            *jax.eval_shape(lambda: arguments(shape)),
        )


def test_the_heuristic_is_always_valid():
    generator = np.random.default_rng(0)
    for _ in range(200):
        m, n, k = (64 * int(i) for i in generator.integers(1, 300, 3))
        shape = Shape(m=m, n=int(generator.integers(1, n + 1)), k=k)
        for order in ORDERS:
            b_k_major, transpose_out = order
            ordered = replace(
                shape,
                n=shape.n if all(order) else n,
                b_k_major=b_k_major,
                transpose_out=transpose_out,
                float32_out=bool(m % 128),
            )
            assert (
                why_invalid(default_config(ordered, MULTIPROCESSORS), ordered) is None
            ), ordered


@pytest.mark.parametrize(
    ("m", "k", "replaced"),
    [
        (1024, 128, 0),  # whole tiles of a cluster, whole pairs of steps
        (1024, 192, 1),  # the second half of the last pair is beyond k
        (1024, 64, 1),
        (1088, 128, 2),  # rows of the last tile are beyond m, in both halves
        (1000, 192, 2),
    ],
)
def test_words_beyond_the_metadata_are_replaced_by_legal_ones(m, k, replaced):
    """A copy fills what is beyond with zeros, and 0000 names one position twice. Where
    nothing is beyond, the loop has no instruction more."""
    shape, config = Shape(m=m, n=256, k=k, transpose_out=False), Config(row_blocks=2)
    a, b = jax.eval_shape(lambda: arguments(shape))
    (text,) = modules(partial(product, shape, config=config), a, b)
    # Each of the two blocks of 64 rows has its word.
    assert text.count("arith.maxui") == config.row_blocks * replaced
    constant = "value = 1145324612 : i32"  # 0x44444444
    assert (constant in text) == bool(replaced)


def test_no_word_of_legal_positions_is_below_what_stands_for_none():
    legal = [first | second << 2 for second in range(4) for first in range(second)]
    assert min(legal) == 0b0100 and 0 not in legal
    lowest = sum(min(legal) << 4 * i for i in range(8))
    assert lowest == wgmma_sp.FIRST_TWO
    # Rows that fill the last block have such positions too.
    words = pack(compress(jnp.ones((72, 64)))).metadata
    nibbles = np.asarray(words)[..., None] >> np.arange(0, 32, 4, dtype=np.uint32) & 15
    assert set(np.unique(nibbles)) <= set(legal)


@pytest.mark.newest_jax
def test_the_grid_fills_the_gpu_it_is_told_of(monkeypatch):
    grids = []
    kernel = plgpu.kernel

    def remember(*arguments, grid, **options):
        grids.append(grid)
        return kernel(*arguments, grid=grid, **options)

    monkeypatch.setattr(plgpu, "kernel", remember)
    for count in (4, 5, 78, 132):
        options = {"config": Config(), "multiprocessors": count}
        lowered(Shape(m=1024, n=2048, k=64), **options)
    # Clusters of two blocks, and no more of them than the 2 x 11 tiles.
    assert grids == [(2,), (2,), (22,), (22,)]


# On a GPU.


def relative_error(got, exact) -> float:
    got, exact = np.asarray(got, np.float64), np.asarray(exact, np.float64)
    return float(np.linalg.norm(got - exact) / np.linalg.norm(exact))


def exact_product(shape: Shape, a, b):
    """In float32, and by the dense GEMM in the dtype, of the same masked operands."""
    dense = decompress(a)
    b = b.T if shape.b_k_major else b
    products = (
        jnp.matmul(dense.astype(jnp.float32), b.astype(jnp.float32)),
        jnp.matmul(dense, b, preferred_element_type=jnp.float32).astype(shape.dtype),
    )
    return [p.T if shape.transpose_out else p for p in products]


def check(cases: list[tuple[Shape, dict]]) -> None:
    """No less exact than the dense GEMM, and the same bits twice."""

    def compiled(case):
        shape, options = case
        operands = arguments(shape)
        run = jax.jit(partial(product, shape, **options)).lower(*operands).compile()
        return shape, options, operands, run

    with ThreadPoolExecutor(8) as pool:
        for shape, options, operands, run in pool.map(compiled, cases):
            got, again = run(*operands), run(*operands)
            np.testing.assert_array_equal(got, again)
            exact, dense = exact_product(shape, *operands)
            # 1.1: the sums are taken in another order than the library's.
            bound = 1.1 * relative_error(dense, exact)
            assert relative_error(got, exact) <= bound, (shape, options)


@pytest.mark.gpu
@pytest.mark.parametrize("transpose_out", [True, False])
@pytest.mark.parametrize("apart", [64, 192, 1024])
def test_split_rows_are_those_of_the_whole_product_on_a_gpu(transpose_out, apart):
    shape = Shape(m=1088, n=640, k=448, b_k_major=False, transpose_out=transpose_out)
    operands = arguments(shape)
    axis = int(transpose_out)
    for out_dtype in (None, jnp.float32):
        run = partial(product, shape, out_dtype=out_dtype)
        expected = jnp.split(run(*operands), [shape.m - apart], axis=axis)
        got = run(*operands, split_rows=apart)
        for ours, theirs in zip(got, expected, strict=True):
            np.testing.assert_array_equal(ours, theirs)


@pytest.mark.gpu
@pytest.mark.parametrize(("b_k_major", "transpose_out"), ORDERS)
def test_every_order_on_a_gpu(b_k_major, transpose_out):
    shape = Shape(
        m=1088,
        n=1984,
        k=640,
        b_k_major=b_k_major,
        transpose_out=transpose_out,
    )
    cases = [(shape, {}), (replace(shape, dtype="float16"), {})]
    cases.append((shape, {"out_dtype": jnp.float32}))
    if transpose_out and b_k_major:
        cases += [(replace(shape, n=n), {}) for n in (1, 7, 63, 65, 1999)]
    if not transpose_out:
        cases += [(replace(shape, m=m), {}) for m in (1, 7, 63, 65, 1999)]
    # One tile wide, so that other tiles of a cluster lie beyond the matrix.
    cases += [(replace(shape, **{size: 64}), {}) for size in ("m", "n", "k")]
    check(cases)


@pytest.mark.gpu
@pytest.mark.parametrize("k", [64, 192])
def test_what_is_beyond_k_is_not_read_on_a_gpu(k):
    shape = Shape(m=128, n=300, k=k)
    a, b = arguments(shape)
    b = b.at[:, k - 2].set(jnp.inf)
    got = np.asarray(product(shape, a, b), np.float32)
    # Infinite where A keeps that column; zero times infinity would be NaN.
    kept = np.asarray(decompress(a)[:, k - 2] != 0)
    np.testing.assert_array_equal(np.isinf(got), np.broadcast_to(kept, got.shape))
    assert not np.isnan(got).any()


@pytest.mark.gpu
@pytest.mark.parametrize("tile_n", [64, 80, 128, 144, 176, 192, 240, 256])
def test_every_knob_on_a_gpu(tile_n):
    shape = Shape(m=1088, n=1999, k=640)
    most = 1 if tile_n > 192 else 2
    base = Config(tile_n=tile_n, row_blocks=most, out_columns=tile_n // 2)
    configs = [
        replace(base, cluster=cluster, warpgroups=warpgroups, out_columns=16)
        for cluster in (1, 2)
        for warpgroups in (1, 2)
    ]
    configs += [replace(base, row_blocks=blocks) for blocks in range(1, most)]
    configs.append(replace(base, stages=2, pairs=1, out_slots=1))
    configs.append(replace(base, stages=3, grid_minor_dim="n", grid_tile_width=3))
    check([(shape, {"config": config}) for config in configs])


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(20))
def test_ten_random_shapes_on_a_gpu(seed):
    generator = np.random.default_rng(seed)
    cases = []
    for _ in range(10):
        m, k = (64 * int(i) for i in generator.integers(1, 40, 2))
        cases.append((Shape(m=m, n=int(generator.integers(1, 5001)), k=k), {}))
    check(cases)


@pytest.mark.gpu
def test_the_activation_is_applied_before_rounding_on_a_gpu():
    shape = Shape(m=256, n=300, k=256)
    a, b = arguments(shape)
    exact, _ = exact_product(shape, a, b)
    got = product(shape, a, b, activation=relu_squared, out_dtype=jnp.float16)
    assert got.dtype == jnp.float16
    assert relative_error(got, relu_squared(exact)) < 2**-11  # half a unit of float16
