"""A Hopper GPU for the choice of kernels; what those compute, in plain JAX."""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import (
    activations_sm90,
    compress_sm90,
    over_tokens_sm90,
    sparse_matmul_sm90,
)
from sparsejax.formats import Compressed, compress, decompress
from sparsejax.ops import ffn_spec, gated_ffn, sparse_matmul
from sparsejax.packing import Packed, pack, unpack
from sparsejax.patterns import TWO_FOUR
from sparsejax.pruning import magnitude_mask, nm_mask, soft_threshold


def pretend(patch: pytest.MonkeyPatch, device_kind: str = "NVIDIA H200") -> list[str]:
    """Every module sees `device_kind`; returns the list of kernels called from now."""
    calls: list[str] = []

    def compress_on_gpu(w, scales, *, k_major, dtype):
        calls.append("compress")
        assert w.shape[1] % 64 == 0 and w.shape[2] % 64 == 0
        axis = -1 if k_major else -2
        pruned = scales[:, None, None] * soft_threshold(w, axis=axis)
        mask = magnitude_mask(w, axis=axis)
        packed = pack(compress(pruned.astype(dtype), mask=mask, axis=axis))
        return packed.values, packed.metadata

    def multiply_on_gpu(
        values,
        metadata,
        b,
        *,
        b_k_major=True,
        transpose_out=True,
        out_dtype=None,
        rows_apart=0,
        config,
        multiprocessors=132,
    ):
        assert multiprocessors >= 1
        calls.append("sparse_matmul")
        out_dtype = jnp.dtype(b.dtype if out_dtype is None else out_dtype)
        if b.ndim == 3:
            assert not b_k_major and len(b) == 64
            b = b.swapaxes(0, 1).reshape(-1, b.shape[2])
        n, k = b.shape if b_k_major else b.shape[::-1]
        shape = sparse_matmul_sm90.Shape(
            m=values.shape[0],
            n=n,
            k=k,
            dtype=str(b.dtype),
            b_k_major=b_k_major,
            transpose_out=transpose_out,
            float32_out=out_dtype == jnp.float32,
        )
        assert sparse_matmul_sm90.why_invalid(config, shape) is None
        # In float32: XLA on CPUs lacks the product of bfloat16 in some orders.
        a = decompress(unpack(Packed(values, metadata))).astype(jnp.float32)
        b = (b.T if b_k_major else b).astype(jnp.float32)
        product = jnp.matmul(a, b)
        parts = jnp.split(product, [len(product) - rows_apart] if rows_apart else 1)
        parts = tuple(
            (part.T if transpose_out else part).astype(out_dtype) for part in parts
        )
        return parts if rows_apart else parts[0]

    def keep_features_on_gpu(y_up):
        calls.append("keep_features")
        assert y_up.shape[1] % 64 == 0
        hidden = jax.nn.relu(y_up)
        a = compress(hidden * hidden, mask=nm_mask(hidden, TWO_FOUR))
        packed, tail = pack(a), -y_up.shape[0] % 16
        nonzero = jnp.pad(decompress(a) != 0, ((0, tail), (0, 0)))
        counts = nonzero.reshape(-1, 16, y_up.shape[1]).sum(axis=1, dtype=jnp.uint8)
        return packed.values, packed.metadata, counts

    def backward_on_gpu(da, values, metadata):
        calls.append("backward")
        root = jnp.sqrt(decompress(unpack(Packed(values, metadata))))
        positions = unpack(Packed(values, metadata))
        return _at(positions, (da * 2 * root).astype(da.dtype))

    def keep_gated_on_gpu(gate, up):
        calls.append("keep_gated_features")
        assert gate.shape == up.shape and up.shape[1] % 64 == 0
        hidden = jax.nn.relu(gate)
        a = hidden * hidden * up
        mask = magnitude_mask(a)
        packed = [pack(compress(of, mask=mask)) for of in (a, hidden, up)]
        nonzero = jnp.pad(jnp.where(mask, a, 0) != 0, ((0, -len(a) % 16), (0, 0)))
        counts = nonzero.reshape(-1, 16, a.shape[1]).sum(axis=1, dtype=jnp.uint8)
        first, *others = packed
        return first.values, first.metadata, counts, *(p.values for p in others)

    def gated_backward_on_gpu(da, hidden, up, metadata):
        calls.append("gated_backward")
        positions = unpack(Packed(hidden, metadata))
        da, hidden, up = (x.astype(jnp.float32) for x in (da, hidden, up))
        da = _at(positions, da)
        pair = 2 * da * hidden * up, da * hidden * hidden
        return tuple(x.astype(positions.values.dtype) for x in pair)

    def keep_tokens_on_gpu(values, metadata, whole=None, *, by_segments):
        calls.append("keep_tokens")
        x = decompress(unpack(Packed(values, metadata)))
        x = jnp.pad(x, ((0, -len(x) % 64), (0, 0)))
        if by_segments:
            x = x.reshape(64, -1, x.shape[1]).swapaxes(0, 1).reshape(x.shape)
        mask = magnitude_mask(x, axis=0)
        x, mask = x.T, mask.T
        if whole is not None:
            assert whole.rows % 64 == 0
            rows = jnp.argsort(whole.slots)[-whole.rows :]
            x = jnp.concatenate([x, x[rows]])
            mask = jnp.concatenate([mask, ~mask[rows]])
        packed = pack(compress(x, mask=mask))
        return packed.values, packed.metadata

    def backward_over_tokens_on_gpu(da, values, metadata, *whole, by_segments):
        dy = backward_on_gpu(da, values, metadata)
        over_tokens = (
            keep_tokens_on_gpu(kept, metadata, *whole, by_segments=by_segments)
            for kept in (values, dy)
        )
        return dy, *over_tokens

    def gated_over_tokens_on_gpu(da, hidden, up, metadata, *whole, by_segments):
        gradients = gated_backward_on_gpu(da, hidden, up, metadata)
        over_tokens = (
            keep_tokens_on_gpu(kept, metadata, *whole, by_segments=by_segments)
            for kept in (hidden * hidden * up, *gradients)
        )
        return *gradients, *over_tokens

    jax.clear_caches()  # of traces made with the real kernels
    patch.setattr(activations_sm90, "keep_features", keep_features_on_gpu)
    patch.setattr(activations_sm90, "backward", backward_on_gpu)
    patch.setattr(activations_sm90, "keep_gated_features", keep_gated_on_gpu)
    patch.setattr(activations_sm90, "gated_backward", gated_backward_on_gpu)
    patch.setattr(over_tokens_sm90, "keep_tokens", keep_tokens_on_gpu)
    patch.setattr(over_tokens_sm90, "backward", backward_over_tokens_on_gpu)
    patch.setattr(over_tokens_sm90, "gated_backward", gated_over_tokens_on_gpu)
    patch.setattr(compress_sm90, "compress", compress_on_gpu)
    patch.setattr(sparse_matmul_sm90, "sparse_matmul", multiply_on_gpu)
    for module in (ffn_spec, gated_ffn, sparse_matmul):
        patch.setattr(module, "current_device_kind", lambda: device_kind)
    return calls


def _at(positions: Compressed, dense: jax.Array) -> jax.Array:
    """The entries of `dense` that are kept."""
    groups = dense.reshape(dense.shape[0], -1, 4)
    index = positions.metadata.reshape(dense.shape[0], -1, 2).astype(jnp.int32)
    kept = jnp.take_along_axis(groups, index, axis=-1)
    return kept.reshape(dense.shape[0], -1)
