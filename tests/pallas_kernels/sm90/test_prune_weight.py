"""Pruning and packing on Hopper: lowered everywhere, run where there is one."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.sm90 import prune_weight
from sparsejax.sparsity.compressed import compress
from sparsejax.sparsity.masks import magnitude_mask, soft_threshold
from sparsejax.sparsity.packed import pack
from tests.support.devices.lanes import Memory, emulated, lanes

SHAPES = [(1, 64, 64), (2, 192, 128)]  # layers, rows, k


def stored(shape, k_major: bool):
    layers, rows, k = shape
    return shape if k_major else (layers, k, rows)


@pytest.mark.newest_jax
@pytest.mark.parametrize("k_major", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("with_scales", [True, False])
def test_lowers_for_hopper(k_major, dtype, with_scales):
    w = jax.ShapeDtypeStruct(stored(SHAPES[1], k_major), dtype)
    scales = jax.ShapeDtypeStruct((2,), jnp.float32) if with_scales else None
    function = partial(prune_weight.prune_weight, k_major=k_major, dtype=jnp.bfloat16)
    traced = jax.jit(function).trace(w, scales)
    assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(
    ("shape", "dtype", "out_dtype", "message"),
    [
        ((1, 96, 64), "float32", "bfloat16", "rows=96 is not a multiple of 64"),
        ((1, 64, 32), "float32", "bfloat16", "k=32 is not a multiple of 64"),
        ((1, 64, 64), "int32", "bfloat16", "packs float32, .* not int32"),
        ((1, 64, 64), "float32", "float32", "packs into bfloat16 .* not float32"),
    ],
)
def test_what_cannot_be_packed_is_refused(shape, dtype, out_dtype, message):
    w = jnp.zeros(shape, dtype)
    with pytest.raises(ValueError, match=message):
        prune_weight.prune_weight(w, None, k_major=True, dtype=jnp.dtype(out_dtype))


# Computed: by the kernel's body on CPU, and on a GPU.


@partial(jax.jit, static_argnums=(0, 1, 2))
def weights(shape, dtype, smallest):
    """Random, with all that pruning must decide: ties, zeros, signs, infinities."""
    w = jax.random.normal(jax.random.key(0), shape, jnp.float32)
    flat = w.reshape(-1)
    special = jnp.array([0.0, -0.0, 1.5, -1.5, jnp.inf, -jnp.inf, jnp.nan, smallest])
    chosen = jax.random.randint(jax.random.key(1), flat.shape, 0, 8 * len(special))
    flat = jnp.where(
        chosen < len(special), special[jnp.minimum(chosen, len(special) - 1)], flat
    )
    return flat.reshape(shape).astype(dtype)


@partial(jax.jit, static_argnums=(2, 3))
def expected(w, scales, k_major: bool, dtype):
    axis = -1 if k_major else -2
    pruned = w
    if scales is not None:
        pruned = scales[:, None, None] * soft_threshold(
            w.astype(jnp.float32), axis=axis
        )
    mask = magnitude_mask(w, axis=axis)
    return pack(compress(pruned.astype(dtype), mask=mask, axis=axis))


def compress_on_cpu(w, scales, *, k_major: bool, dtype):
    """`prune_weight.prune_weight`, its body run here, tile after tile."""
    layers, rows, k = w.shape if k_major else (w.shape[0], w.shape[2], w.shape[1])
    w = np.ascontiguousarray(w)
    values = np.zeros((layers, rows, k // 2), dtype)
    metadata = np.zeros((layers, rows // 64, k // 64, 128), np.uint32)
    pack_tile = prune_weight._pack_rows if k_major else prune_weight._pack_columns
    with emulated():
        for layer, r, c in np.ndindex(layers, rows // 64, k // 64):
            rows_, along_k = slice(64 * r, 64 * r + 64), slice(64 * c, 64 * c + 64)
            tile = (layer, rows_, along_k) if k_major else (layer, along_k, rows_)
            kept = (layer, rows_, slice(32 * c, 32 * c + 32))
            beta = None if scales is None else lanes(np.float32(scales[layer]))
            pack_tile(
                Memory(w[tile], w),
                Memory(values[kept], values),
                Memory(metadata[layer, r, c], metadata),
                beta,
            )
    return jnp.asarray(values), jnp.asarray(metadata)


ON_CPU = [("float32", "bfloat16"), ("float16", "float16")]
DTYPES = ("float32", "bfloat16", "float16")


@pytest.mark.parametrize("k_major", [True, False])
@pytest.mark.parametrize(("dtype", "out_dtype"), ON_CPU)
def test_packs_as_the_reference_does(k_major, dtype, out_dtype):
    # XLA takes subnormals for zeros on CPU.
    check(compress_on_cpu, SHAPES[1], k_major, dtype, out_dtype, smallest=1e-30)


@pytest.mark.gpu
@pytest.mark.parametrize("k_major", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("out_dtype", DTYPES[1:])
def test_packs_as_the_reference_does_on_a_gpu(k_major, dtype, out_dtype):
    for shape in [*SHAPES, (3, 1088, 640)]:
        check(prune_weight.prune_weight, shape, k_major, dtype, out_dtype)


def check(run, shape, k_major: bool, dtype, out_dtype, *, smallest=1e-40) -> None:
    w = weights(stored(shape, k_major), dtype, smallest)
    for scales in (None, jnp.linspace(0.5, 1.7, shape[0])):
        values, metadata = run(w, scales, k_major=k_major, dtype=jnp.dtype(out_dtype))
        reference = expected(w, scales, k_major, jnp.dtype(out_dtype))
        np.testing.assert_array_equal(metadata, reference.metadata)
        got, want = (
            np.asarray(v.astype(jnp.float32)) for v in (values, reference.values)
        )
        np.testing.assert_array_equal(got, want)
        number = ~np.isnan(want)
        np.testing.assert_array_equal(np.signbit(got)[number], np.signbit(want)[number])
