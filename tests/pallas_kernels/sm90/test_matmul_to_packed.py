"""GEMMs that write 2:4: the epilogue's threads run on CPU, lowered for CUDA, and held
against the separate kernels where there is a GPU."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.sm90 import activations, grouped_matmul, sparse_matmul
from pallas_kernels.sm90 import matmul_to_packed as to_packed
from pallas_kernels.sm90.sparse_matmul_configs import (
    Config,
    Shape,
    default_config,
    why_invalid,
)
from pallas_kernels.sm90.threads import activation_tiles
from sparsejax.sparsity.compressed import compress
from sparsejax.sparsity.masks import magnitude_mask
from sparsejax.sparsity.packed import Packed, pack
from tests.pallas_kernels.sm90.test_activations import (
    GARBAGE,
    kept_features,
    on_cpu,
    random,
    same,
    unpacked,
)
from tests.support.devices.lanes import Memory, emulated, lanes

FEATURES, MULTIPROCESSORS = 128, 132
keep_features, backward, sparse_matmul, sparse_weights = (
    partial(kernel, multiprocessors=MULTIPROCESSORS)
    for kernel in (
        to_packed.keep_features,
        to_packed.backward,
        sparse_matmul.sparse_matmul,
        grouped_matmul.sparse_weights,
    )
)


def shape_of(tokens: int) -> Shape:
    return Shape(m=FEATURES, n=tokens, k=64, packed_out=True)


def same_activations(got, expected) -> None:
    """Rows that are no tokens have words, which no one reads."""
    for ours, theirs in zip(got[::2], expected[::2], strict=True):
        same(ours, theirs)
    ours, theirs = (unpacked(Packed(*of[:2])).metadata for of in (got, expected))
    np.testing.assert_array_equal(ours, theirs)


def on_epi_tiles(pack_epi_tile, shape: Shape, dense, inputs, like) -> list[jax.Array]:
    """An epilogue's threads on every epilogue tile of C^T, and on those beyond it."""
    rows = [np.ascontiguousarray(array) for array in inputs]
    out = [np.full(o.shape, GARBAGE, np.uint8).astype(o.dtype) for o in like]
    tokens, features = (64 * (-(-size // 64) + 1) for size in dense.shape)
    fill = [(0, tokens - dense.shape[0]), (0, features - dense.shape[1])]
    filled = np.pad(np.asarray(dense), fill)
    swizzled = np.arange(8)[None] ^ (np.arange(64)[:, None] & 7)
    with emulated():
        for token in range(0, tokens, 64):
            for feature in range(0, features, 64):
                tile = filled[token : token + 64, feature : feature + 64]
                eighths = tile.reshape(64, 8, 8)
                epi_tile = np.zeros((1, 64, 64), tile.dtype)
                lines = epi_tile.reshape(64, 8, 8)
                lines[np.arange(64)[:, None], swizzled] = eighths
                stored = []
                pack_epi_tile(
                    shape,
                    Memory(epi_tile),
                    lambda stored=stored: stored.append(True),
                    lanes(np.uint32(feature)),
                    lanes(np.uint32(token)),
                    *(Memory(array) for array in (*rows, *out)),
                )
                assert stored == [True]
    return [jnp.asarray(array) for array in out]


@pytest.fixture
def separate(monkeypatch):
    """The kernels between GEMMs, on CPU."""
    monkeypatch.setattr(activation_tiles, "on_tiles", on_cpu)
    return activations


@pytest.mark.parametrize("tokens", [1, 64, 100])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_an_epi_tile_is_kept_as_the_kernel_between_gemms_keeps_it(
    separate, tokens, dtype
):
    y_up = random((tokens, FEATURES), dtype)
    expected = separate.keep_features(y_up)
    got = on_epi_tiles(to_packed._keep_features, shape_of(tokens), y_up, [], expected)
    same_activations(got, expected)


@pytest.mark.parametrize("tokens", [1, 64, 100])
def test_gradients_of_an_epi_tile_are_those_of_the_kernel_between_gemms(
    separate, tokens
):
    y_up, da = random((tokens, FEATURES)), random((tokens, FEATURES), seed=1)
    a = kept_features(y_up)
    expected = separate.backward(da, a.values, a.metadata)
    inputs = [a.values, a.metadata]
    (got,) = on_epi_tiles(to_packed._backward, shape_of(tokens), da, inputs, [expected])
    same(got, expected)


# The whole kernel.


@partial(jax.jit, static_argnums=(1, 2, 3))
def weight(seed, rows: int, k: int, dtype=jnp.bfloat16) -> Packed:
    w = jax.random.normal(jax.random.key(seed), (rows, k), dtype)
    return pack(compress(w, mask=magnitude_mask(w)))


def experts_of(counts: list[int]) -> to_packed.Experts:
    """Group tiles of each, and one that is not used."""
    expert = np.repeat(np.arange(len(counts)), counts)
    expert = np.pad(expert, (0, 1), constant_values=len(counts) - 1).astype(np.int32)
    used = jnp.int32(sum(counts))
    return to_packed.Experts(jnp.asarray(expert), used, len(counts))


def lowered(function, *operands) -> str:
    traced = jax.jit(function).trace(*operands)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.newest_jax
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("experts", [None, experts_of([2, 1])])
def test_lowers_for_hopper(dtype, experts):
    count, tokens = (1, 100) if experts is None else (experts.count, 4 * 64)
    arrays = (
        ((count * FEATURES, 64), dtype),
        ((count * FEATURES // 64, 2, 128), "uint32"),
        ((tokens, 128), dtype),
        ((tokens, FEATURES // 2), dtype),
        ((-(-tokens // 64), FEATURES // 64, 128), "uint32"),
    )
    operands = [jax.ShapeDtypeStruct(*array) for array in arrays]
    text = lowered(partial(keep_features, experts=experts), *operands[:3])
    assert "mosaic_gpu" in text
    text = lowered(partial(backward, experts=experts), *operands)
    assert "mosaic_gpu" in text


SIZES = [(1, 64, 64), (100, 192, 128), (1000, 1088, 320), (5000, 2048, 512)]


@pytest.mark.gpu
@pytest.mark.parametrize(("tokens", "features", "k"), SIZES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_equals_the_gemm_and_the_kernel_after_it(tokens, features, k, dtype):
    dtype = jnp.dtype(dtype)
    w1, w2 = (weight(seed, features, k, dtype) for seed in range(2))
    x, dy = (jax.random.normal(jax.random.key(i), (tokens, k), dtype) for i in (2, 3))
    expected = activations.keep_features(sparse_matmul(w1.values, w1.metadata, x))
    got = keep_features(w1.values, w1.metadata, x)
    same_activations(got, expected)
    da = sparse_matmul(w2.values, w2.metadata, dy)
    expected_dy = activations.backward(da, *expected[:2])
    for _ in range(2):
        same(backward(w2.values, w2.metadata, dy, *got[:2]), expected_dy)


@pytest.mark.gpu
@pytest.mark.parametrize("counts", [[1, 1, 1], [3, 0, 2], [0, 4, 0], [0, 0, 0]])
@pytest.mark.parametrize(("features", "k", "tile"), [(64, 64, 64), (576, 256, 128)])
def test_rows_of_experts_equal_the_gemm_and_the_kernel_after_it(
    counts, features, k, tile
):
    experts = experts_of(counts)
    rows, used = experts.tile_expert.size * tile, sum(counts) * tile
    w1, w2 = (weight(seed, experts.count * features, k) for seed in range(2))
    x, dy = (
        jax.random.normal(jax.random.key(i), (rows, k), jnp.bfloat16) for i in (2, 3)
    )
    multiply = partial(
        sparse_weights,
        tile_expert=experts.tile_expert,
        used_tiles=experts.used_tiles,
        experts=experts.count,
    )
    y_up = multiply(w1.values, w1.metadata, x)
    expected = activations.keep_features(y_up)
    got = keep_features(w1.values, w1.metadata, x, experts)
    sizes = used, used // 64, used // 16
    for ours, theirs, size in zip(got, expected, sizes, strict=True):
        same(ours[:size], theirs[:size])
    da = multiply(w2.values, w2.metadata, dy)
    expected_dy = activations.backward(da, *expected[:2])
    dy_up = backward(w2.values, w2.metadata, dy, *expected[:2], experts)
    same(dy_up[:used], expected_dy[:used])


def zeros(*shape, dtype=jnp.bfloat16):
    return jnp.zeros(shape, dtype)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda w: keep_features(*w, zeros(8, 32)),
            r"need metadata \(2, 1, 128\).*with k=32",
        ),
        (
            lambda w: keep_features(*w, zeros(128, 64), experts_of([1, 1, 1])),
            "128 rows of W are not 3 experts of equally many",
        ),
        (
            lambda w: keep_features(*w, zeros(100, 64), experts_of([1, 1])),
            "or 100 rows of X not 3 group tiles",
        ),
        (
            lambda w: backward(
                *w, zeros(8, 64), zeros(8, 32), zeros(1, 2, 128, dtype=jnp.uint32)
            ),
            r"A bfloat16\(8, 32\) .* is not the bfloat16\(8, 64\) .* of 8 tokens",
        ),
        (
            lambda w: keep_features(
                *w, zeros(8, 64), config_for=lambda _: Config(out_columns=96)
            ),
            "out_columns=96 and out_slots=2 are not 64 and 2 or more",
        ),
    ],
)
def test_what_does_not_fit_is_refused(call, message):
    w = zeros(128, 32), zeros(2, 1, 128, dtype=jnp.uint32)
    with pytest.raises(ValueError, match=message):
        call(w)


@pytest.mark.parametrize("n", [1, 64, 200, 8192])
def test_the_heuristic_cuts_a_packed_result_into_tiles(n):
    shape = Shape(m=4096, n=n, k=1024, packed_out=True)
    config = default_config(shape, MULTIPROCESSORS)
    assert why_invalid(config, shape) is None and config.tile_n % 64 == 0
    not_transposed = replace(shape, n=64, transpose_out=False)
    assert "packs C^T" in why_invalid(config, not_transposed)
