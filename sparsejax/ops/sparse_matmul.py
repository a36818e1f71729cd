"""GEMMs with one N:M-sparse operand.

On sparse tensor cores a 2:4 operand halves the multiplications. The "xla" backend has
no such instruction: it multiplies the decompressed operand, which saves nothing, and
says so. "reference" does the same in the highest precision and is the specification.
"""

from dataclasses import replace
from functools import partial

import jax
from jax import lax
from jaxtyping import Array, Float

from sparsejax.formats import Compressed, decompress
from sparsejax.ops.backend import (
    Backend,
    Decision,
    GemmSpec,
    Implementation,
    Implementations,
    choose_backend,
    current_platform,
)
from sparsejax.ops.dense_matmul import dense_matmul


def sparse_matmul(
    lhs: Float[Array, "m k"] | Compressed,
    rhs: Float[Array, "k n"] | Compressed,
    *,
    backend: Backend | None = None,
) -> Float[Array, "m n"]:
    """`lhs @ rhs` where exactly one operand is compressed.

    out[i, j] = sum_k lhs[i, k] rhs[k, j], accumulated in float32 and rounded once to
    the dtype of the dense operand. A compressed operand is contracted along its own
    sparse axis, whichever of its two axes that is: a weight stored (k, n) and sparse
    along axis 0, or stored (n, k) and sparse along axis 1, give the same product.
    The gradient is exact: of the dense operand, and of the kept values.

    Args:
      lhs: (m, k), dense or compressed along its last axis.
      rhs: (k, n), dense or compressed (either orientation).
      backend: None for the first of `PREFERENCE` that can; a name runs or raises.
    Raises:
      ValueError: not exactly one operand is compressed, or the shapes do not fit.
      NotImplementedError: the named backend cannot run this GEMM; says why.
    """
    decision = explain_sparse_matmul(lhs, rhs, backend=backend)
    return _sparse_matmul(decision.backend, lhs, rhs)


def explain_sparse_matmul(
    lhs: Float[Array, "m k"] | Compressed,
    rhs: Float[Array, "k n"] | Compressed,
    *,
    backend: Backend | None = None,
) -> Decision:
    """The backend that `sparse_matmul` takes for these operands, and why."""
    return choose_backend(_spec(lhs, rhs), backend, IMPLEMENTATIONS)


def _spec(lhs, rhs) -> GemmSpec:
    if isinstance(lhs, Compressed) == isinstance(rhs, Compressed):
        raise ValueError(
            f"sparse_matmul takes exactly one compressed operand, got "
            f"{type(lhs).__name__} @ {type(rhs).__name__}; sparse tensor cores accept "
            f"sparsity in one operand only, decompress the other"
        )
    sparse = lhs if isinstance(lhs, Compressed) else rhs
    if len(lhs.shape) != 2 or len(rhs.shape) != 2:
        raise ValueError(
            f"sparse_matmul takes matrices, got shapes {lhs.shape} @ {rhs.shape}; "
            f"flatten leading axes or use jax.vmap"
        )
    axis = sparse.axis % 2
    if isinstance(lhs, Compressed):
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
        m=m,
        k=k,
        n=n,
        dtype=str((rhs if sparse is lhs else lhs).dtype),
        sparse_operand="lhs" if sparse is lhs else "rhs",
        pattern=sparse.pattern,
        device=current_platform(),
    )


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sparse_matmul(backend, lhs, rhs):
    return IMPLEMENTATIONS[backend].run(lhs, rhs)


def _fwd(backend, lhs, rhs):
    return _sparse_matmul(backend, lhs, rhs), (lhs, rhs)


def _bwd(backend, residuals, dout):
    lhs, rhs = residuals
    if isinstance(lhs, Compressed):
        # (m, k) = (m, n) @ (n, k), then only the kept positions
        dlhs = _kept(dense_matmul(dout, rhs.T), lhs)
        # (k, n) = (k, m) @ (m, n)
        drhs = dense_matmul(decompress(lhs).T, dout, out_dtype=rhs.dtype)
        return dlhs, drhs
    w = _oriented(decompress(rhs), rhs)
    # (m, k) = (m, n) @ (n, k)
    dlhs = dense_matmul(dout, w.T, out_dtype=lhs.dtype)
    # (k, n) = (k, m) @ (m, n), then only the kept positions
    drhs = _kept(_oriented(dense_matmul(lhs.T, dout), rhs), rhs)
    return dlhs, drhs


_sparse_matmul.defvjp(_fwd, _bwd)


def _oriented(w: jax.Array, like: Compressed) -> jax.Array:
    """(k, n) from the stored orientation of `like`, and back: its own inverse."""
    return w if like.axis % 2 == 0 else w.T


def _kept(cotangent: jax.Array, like: Compressed) -> Compressed:
    """The cotangent of `like`: its values' positions of `cotangent`; integers none."""

    def dense(values: jax.Array) -> jax.Array:
        return decompress(replace(like, values=values))

    _, pull_back = jax.vjp(dense, like.values)
    (values,) = pull_back(cotangent.astype(like.values.dtype))
    # None is JAX's cotangent of an integer array
    return Compressed(values, None, None, like.pattern, like.axis)  # pyrefly: ignore[bad-argument-type]


def _multiply(lhs, rhs, *, precision: lax.Precision | None = None) -> jax.Array:
    if isinstance(lhs, Compressed):
        return dense_matmul(decompress(lhs).astype(rhs.dtype), rhs, precision=precision)
    w = _oriented(decompress(rhs), rhs).astype(lhs.dtype)
    return dense_matmul(lhs, w, precision=precision)


def _describe(spec: GemmSpec) -> tuple[str, float]:
    operand = "weight" if spec.sparse_operand == "rhs" else "activation"
    return f"dense GEMM over the masked {operand}; skips nothing", 1.0


IMPLEMENTATIONS: Implementations = {
    "reference": Implementation(
        run=partial(_multiply, precision=lax.Precision.HIGHEST),
        why_unsupported=lambda spec: None,
        describe=lambda spec: ("decompress, then a GEMM at the highest precision", 1.0),
    ),
    "xla": Implementation(
        run=_multiply,
        why_unsupported=lambda spec: None,
        describe=_describe,
    ),
}
