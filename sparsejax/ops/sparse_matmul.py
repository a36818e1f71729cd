"""GEMMs with one N:M-sparse operand.

On sparse tensor cores a 2:4 operand halves the multiplications: a set of kernels
(`ops.kernels`) reads operands that were packed for it. "xla" has no such instruction:
it multiplies the decompressed operand, which saves nothing, and says so. "reference"
does the same in the highest precision and is the specification.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from sparsejax.ops.backend import (
    Backend,
    Decision,
    Implementation,
    Implementations,
    choose_backend,
    current_device,
    of_kernels,
)
from sparsejax.ops.dense_matmul import dense_matmul
from sparsejax.ops.gemm_spec import GemmSpec
from sparsejax.ops.kernels import registry
from sparsejax.ops.kernels.base import KernelSet
from sparsejax.ops.kernels.registry import KernelSetName
from sparsejax.sparsity.compressed import Compressed, decompress
from sparsejax.sparsity.packed import Packed, pack, unpack


def sparse_matmul(
    lhs: Float[Array, "m k"] | Compressed | Packed,
    rhs: Float[Array, "k n"] | Compressed | Packed,
    *,
    backend: Backend | None = None,
) -> Float[Array, "m n"]:
    """Returns `lhs @ rhs` where exactly one operand is compressed.

    out[i, j] = sum_k lhs[i, k] rhs[k, j], accumulated in float32 and rounded once to
    the dtype of the dense operand. A compressed operand is contracted along its own
    sparse axis, whichever of its two axes that is: a weight stored (k, n) and sparse
    along axis 0, or stored (n, k) and sparse along axis 1, give the same product.
    The gradient is exact: of the dense operand, and of the kept values.

    Args:
      lhs: (m, k), dense, or compressed or packed along its last axis.
      rhs: (k, n), dense or compressed (either orientation), or packed for tensor cores
        (n, k). The kernel packs a compressed operand at every call: use `packed.pack`
        once for one that is used again.
      backend: None for the fastest that can; a name runs or raises.
    Raises:
      ValueError: not exactly one operand is compressed, or the shapes do not fit.
      NotImplementedError: the named backend cannot run this GEMM; says why.
    """
    decision = explain_sparse_matmul(lhs, rhs, backend=backend)
    return _sparse_matmul(decision.backend, lhs, rhs)


def explain_sparse_matmul(
    lhs: Float[Array, "m k"] | Compressed | Packed,
    rhs: Float[Array, "k n"] | Compressed | Packed,
    *,
    backend: Backend | None = None,
) -> Decision:
    """Returns the backend that `sparse_matmul` takes for these operands, and why."""
    return choose_backend(_spec(lhs, rhs), backend, implementations())


def _spec(lhs, rhs) -> GemmSpec:
    if isinstance(lhs, Compressed | Packed) == isinstance(rhs, Compressed | Packed):
        raise ValueError(
            f"sparse_matmul takes exactly one compressed operand, got "
            f"{type(lhs).__name__} @ {type(rhs).__name__}; sparse tensor cores accept "
            f"sparsity in one operand only, decompress the other"
        )
    sparse = lhs if isinstance(lhs, Compressed | Packed) else rhs
    if len(lhs.shape) != 2 or len(rhs.shape) != 2:
        raise ValueError(
            f"sparse_matmul takes matrices, got shapes {lhs.shape} @ {rhs.shape}; "
            f"flatten leading axes or use jax.vmap"
        )
    axis = sparse.axis % 2
    if sparse is lhs:
        if axis != 1:
            raise ValueError(
                f"lhs is sparse along axis {axis}; it is contracted along axis 1, "
                f"compress it with axis=-1"
            )
        m, k, (k_rhs, n) = *lhs.shape, rhs.shape
    else:
        (m, k), k_rhs, n = lhs.shape, rhs.shape[axis], rhs.shape[1 - axis]
    if k != k_rhs:
        raise ValueError(
            f"the contracted sizes differ: {k} in lhs {tuple(lhs.shape)}, {k_rhs} in "
            f"rhs {tuple(rhs.shape)}"
            + ("" if sparse is lhs else f" along its sparse axis {axis}")
        )
    return GemmSpec(
        name="lhs @ rhs",
        tokens=m,
        d_in=k,
        d_out=n,
        dtype=str((rhs if sparse is lhs else lhs).dtype),
        sparse_operand="input" if sparse is lhs else "weight",
        pattern=sparse.pattern,
        device=current_device(),
    )


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sparse_matmul(backend, lhs, rhs):
    return implementations()[backend].run(lhs, rhs)


def _fwd(backend, lhs, rhs):
    return _sparse_matmul(backend, lhs, rhs), (lhs, rhs)


def _bwd(backend, residuals, dout):
    lhs, rhs = residuals
    if isinstance(lhs, Compressed | Packed):
        like = _logical(lhs)
        # (m, k) = (m, n) @ (n, k), then only the kept positions
        dlhs = _cotangent(lhs, dense_matmul(dout, rhs.T))
        # (k, n) = (k, m) @ (m, n)
        drhs = dense_matmul(decompress(like).T, dout, out_dtype=rhs.dtype)
        return dlhs, drhs
    like = _logical(rhs)
    w = _oriented(decompress(like), like)
    # (m, k) = (m, n) @ (n, k)
    dlhs = dense_matmul(dout, w.T, out_dtype=lhs.dtype)
    # (k, n) = (k, m) @ (m, n), then only the kept positions
    drhs = _cotangent(rhs, _oriented(dense_matmul(lhs.T, dout), like))
    return dlhs, drhs


_sparse_matmul.defvjp(_fwd, _bwd)


def _oriented(w: jax.Array, like: Compressed) -> jax.Array:
    """Returns `w` turned from the stored orientation of `like` to (k, n), or from (k,
    n) back: the function is its own inverse."""
    return w if like.axis % 2 == 0 else w.T


def _logical(operand: Compressed | Packed) -> Compressed:
    return unpack(operand) if isinstance(operand, Packed) else operand


def _cotangent(
    operand: Compressed | Packed, cotangent: jax.Array
) -> Compressed | Packed:
    """Returns the cotangent of the operand: `cotangent` at the positions of its values,
    and None for its integer arrays."""
    like = _logical(operand)

    def dense(values: jax.Array) -> jax.Array:
        return decompress(replace(like, values=values))

    _, pull_back = jax.vjp(dense, like.values)
    (values,) = pull_back(cotangent.astype(like.values.dtype))
    # None is JAX's cotangent of an integer array
    if isinstance(operand, Packed):
        return Packed(values, None, operand.layout)  # pyrefly: ignore[bad-argument-type]
    return Compressed(values, None, None, like.pattern, like.axis)  # pyrefly: ignore[bad-argument-type]


def _multiply(lhs, rhs, *, precision: lax.Precision | None = None) -> jax.Array:
    if isinstance(lhs, Compressed | Packed):
        dense = decompress(_logical(lhs)).astype(rhs.dtype)
        return dense_matmul(dense, rhs, precision=precision)
    like = _logical(rhs)
    w = _oriented(decompress(like), like).astype(lhs.dtype)
    return dense_matmul(lhs, w, precision=precision)


def _describe(spec: GemmSpec) -> tuple[str, float]:
    operand = "weight" if spec.sparse_weight else "activation"
    return f"dense GEMM over the masked {operand}; skips nothing", 1.0


# Sparse tensor cores.


def why_not_packed(
    rows: int,
    k: int,
    dtype: str,
    out_dtype: jnp.dtype,
    kernels: KernelSetName | None = None,
) -> str | None:
    """Returns why `pack_weight` cannot pack a (rows, k) weight on the current device,
    for the set of kernels that is named or the preferred one, or None where it can."""
    device = current_device()
    found = registry.kernels_of(device, kernels)
    if found is None:
        return registry.why_none(device)
    return found.why_not_packed(rows, k, dtype, out_dtype)


def pack_weight(
    w: Float[Array, "*layers _ _"],
    scale: Float[Array, "*layers 1 1"],
    *,
    axis: int,
    dtype: jnp.dtype,
    kernels: KernelSetName | None = None,
) -> Packed:
    """Returns beta S(w), 2:4 along `axis`, packed for sparse tensor cores in one read
    of `w`.

    It holds the same values as `compress(scale * soft_threshold(w))` with the magnitude
    mask, and is a constant where it is differentiated.

    Args:
      w: the weights, (*layers, rows, k) with axis=-1, or (*layers, k, rows) with
        axis=-2.
      scale: beta of each matrix, float32.
      axis: the axis of w, -1 or -2, that the groups of four run along.
      dtype: dtype of the packed values.
      kernels: the set of kernels whose order it is packed in; None stands for the
        preferred one of the current device.
    """
    *layers, first, second = w.shape
    rows, k = (first, second) if axis == -1 else (second, first)
    flat, scales = lax.stop_gradient((w.reshape(-1, first, second), scale.reshape(-1)))
    found = registry.kernels_of(current_device(), kernels)
    assert found is not None, "asked of `why_not_packed` before"
    packed = found.pack_weight(flat, scales, axis=axis, dtype=dtype)
    return replace(
        packed,
        values=packed.values.reshape(*layers, rows, k // 2),
        metadata=packed.metadata.reshape(*layers, *packed.metadata.shape[1:]),
    )


def as_packed(operand: Compressed | Packed, kernel_set: KernelSet) -> Packed:
    """Returns a 2:4 operand in the order that a set of kernels reads; what is packed in
    another one is left to the set to refuse."""
    if isinstance(operand, Packed):
        return operand
    return pack(operand, kernel_set.layout)


def _multiply_on(kernel_set: KernelSet, lhs: Any, rhs: Any) -> jax.Array:
    if isinstance(lhs, Compressed | Packed):
        packed = as_packed(lhs, kernel_set)
        return kernel_set.matmul(packed, rhs, b_k_major=False, transpose_out=False)
    packed = as_packed(rhs, kernel_set)
    return kernel_set.matmul(packed, lhs, b_k_major=True, transpose_out=True)


def on_kernels() -> dict[Backend, Implementation]:
    """Returns every registered set of kernels as an implementation of a GEMM with a 2:4
    operand, by backend."""
    return {
        each.name: of_kernels(
            each,
            _multiply_on,
            why_unsupported=lambda found, s: found.why_unsupported(s),
        )
        for each in registry.REGISTERED
    }


def implementations() -> Implementations:
    """Returns the implementations of `sparse_matmul`, by backend."""
    reference = "decompress, then a GEMM at the highest precision"
    return {
        **on_kernels(),
        "reference": Implementation(
            run=partial(_multiply, precision=lax.Precision.HIGHEST),
            why_unsupported=lambda spec: None,
            describe=lambda spec: (reference, 1.0),
        ),
        "xla": Implementation(
            run=_multiply,
            why_unsupported=lambda spec: None,
            describe=_describe,
        ),
    }
