"""A Hopper GPU for the choice of kernels; what those compute, in plain JAX."""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import compress_sm90, sparse_matmul_sm90
from sparsejax.formats import compress, decompress
from sparsejax.ops import ffn_spec, gated_ffn, sparse_matmul
from sparsejax.packing import Packed, pack, unpack
from sparsejax.pruning import magnitude_mask, soft_threshold


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

    def multiply_on_gpu(values, metadata, b, *, config, multiprocessors=132):
        assert multiprocessors >= 1
        calls.append("sparse_matmul")
        shape = sparse_matmul_sm90.Shape(
            m=values.shape[0], n=b.shape[0], k=b.shape[1], dtype=str(b.dtype)
        )
        assert sparse_matmul_sm90.why_invalid(config, shape) is None
        weight = decompress(unpack(Packed(values, metadata)))
        product = jnp.matmul(b, weight.T, preferred_element_type=jnp.float32)
        return product.astype(b.dtype)

    jax.clear_caches()  # of traces made with the real kernels
    patch.setattr(compress_sm90, "compress", compress_on_gpu)
    patch.setattr(sparse_matmul_sm90, "sparse_matmul", multiply_on_gpu)
    for module in (ffn_spec, gated_ffn, sparse_matmul):
        patch.setattr(module, "current_device_kind", lambda: device_kind)
    return calls
