"""GEMMs with one N:M-sparse operand.

On sparse tensor cores a 2:4 operand halves the multiplications: "mosaic_sm90" is our
kernel for those of Hopper, and reads operands that were packed for it. "xla" has no
such instruction: it multiplies the decompressed operand, which saves nothing, and says
so. "reference" does the same in the highest precision and is the specification.
"""

from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from sparsejax.formats import Compressed, decompress
from sparsejax.ops.backend import (
    Backend,
    Decision,
    GemmSpec,
    Implementation,
    Implementations,
    Times,
    choose_backend,
    current_device,
)
from sparsejax.ops.dense_matmul import dense_matmul
from sparsejax.packing import Packed, in_blocks, pack, unpack
from sparsejax.patterns import TWO_FOUR
from sparsejax.router import row_count


def sparse_matmul(
    lhs: Float[Array, "m k"] | Compressed | Packed,
    rhs: Float[Array, "k n"] | Compressed | Packed,
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
      lhs: (m, k), dense, or compressed or packed along its last axis.
      rhs: (k, n), dense or compressed (either orientation), or packed for tensor cores
        (n, k). The kernel packs a compressed operand at every call: use `packing.pack`
        once for one that is used again.
      backend: None for the first of `PREFERENCE` that can; a name runs or raises.
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
    """The backend that `sparse_matmul` takes for these operands, and why."""
    return choose_backend(_spec(lhs, rhs), backend, IMPLEMENTATIONS)


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
        m=m,
        k=k,
        n=n,
        dtype=str((rhs if sparse is lhs else lhs).dtype),
        sparse_operand="lhs" if sparse is lhs else "rhs",
        pattern=sparse.pattern,
        device=current_device(),
    )


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sparse_matmul(backend, lhs, rhs):
    return IMPLEMENTATIONS[backend].run(lhs, rhs)


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
    """(k, n) from the stored orientation of `like`, and back: its own inverse."""
    return w if like.axis % 2 == 0 else w.T


def _logical(operand: Compressed | Packed) -> Compressed:
    return unpack(operand) if isinstance(operand, Packed) else operand


def _cotangent(
    operand: Compressed | Packed, cotangent: jax.Array
) -> Compressed | Packed:
    """Of the operand: its values' positions of `cotangent`; integers none."""
    like = _logical(operand)

    def dense(values: jax.Array) -> jax.Array:
        return decompress(replace(like, values=values))

    _, pull_back = jax.vjp(dense, like.values)
    (values,) = pull_back(cotangent.astype(like.values.dtype))
    # None is JAX's cotangent of an integer array
    if isinstance(operand, Packed):
        return Packed(values, None)  # pyrefly: ignore[bad-argument-type]
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


# Hopper.


def why_not_packed(rows: int, k: int, dtype: str, out_dtype: jnp.dtype) -> str | None:
    """Why `pack_weight` cannot pack a (rows, k) weight on the device here, or None."""
    if reason := current_device().why_not_hopper():
        return reason
    from pallas_kernels import compress_sm90

    return compress_sm90.why_unsupported(rows, k, dtype, str(jnp.dtype(out_dtype)))


def pack_weight(
    w: Float[Array, "*layers _ _"],
    scale: Float[Array, "*layers 1 1"],
    *,
    axis: int,
    dtype: jnp.dtype,
) -> Packed:
    """beta S(w), 2:4 along `axis`, in one read of `w`, packed for sparse tensor cores.

    The same values as `compress(scale * soft_threshold(w))` with the magnitude mask,
    and a constant where it is differentiated.

    Args:
      w: (*layers, rows, k) with axis=-1, or (*layers, k, rows) with axis=-2.
      scale: beta of each matrix, float32.
      dtype: of the values.
    """
    *layers, first, second = w.shape
    rows, k = (first, second) if axis == -1 else (second, first)
    flat, scales = lax.stop_gradient((w.reshape(-1, first, second), scale.reshape(-1)))

    # The kernel has no batching rule.
    @jax.custom_batching.sequential_vmap
    def run(flat, scales):
        from pallas_kernels import compress_sm90

        return compress_sm90.compress(flat, scales, k_major=axis == -1, dtype=dtype)

    values, metadata = run(flat, scales)
    return Packed(
        values.reshape(*layers, rows, k // 2),
        metadata.reshape(*layers, *metadata.shape[1:]),
    )


def shape_on_sm90(spec: GemmSpec):
    """The kernel's view of `spec`: the sparse operand is its left one, so where that is
    our right one both are transposed, and so is the product that it writes. Features
    that stay whole have a second row."""
    from pallas_kernels.sparse_matmul_configs import Shape

    if spec.experts is not None:
        return _grouped_shape_on_sm90(spec)
    transposed = spec.sparse_operand == "rhs"
    m, n = (spec.n, spec.m) if transposed else (spec.m, spec.n)
    return Shape(
        m=m + _whole_rows(spec),
        n=n,
        # Tokens are filled up with rows of zeros.
        k=in_blocks(spec.k) if spec.over_tokens else spec.k,
        dtype=spec.dtype,
        b_k_major=not spec.over_tokens and (transposed or spec.rhs_transposed),
        transpose_out=transposed,
        float32_out=spec.over_tokens or spec.float32_out,
    )


def _grouped_shape_on_sm90(spec: GemmSpec):
    """The same over experts, of this device's: rows instead of tokens, and one expert's
    neurons instead of all."""
    from pallas_kernels.sparse_matmul_configs import Shape

    tokens, neurons = _tokens(spec), spec.expert_features
    experts = _all_neurons(spec) // neurons
    rows = row_count(tokens, spec.experts_per_token, experts, spec.group_tile)
    grouped = partial(
        Shape, dtype=spec.dtype, experts=experts, group_tile=spec.group_tile
    )
    if spec.over_tokens:
        weight_up = spec.sparse_operand == "rhs"
        return grouped(
            m=neurons + _whole_rows(spec),
            n=spec.m if weight_up else spec.n,
            k=rows,
            b_k_major=False,
            transpose_out=weight_up,
            float32_out=True,
        )
    if spec.sparse_weight:
        return grouped(m=neurons, n=rows, k=spec.k)
    return grouped(
        m=rows,
        n=spec.n,
        k=neurons,
        b_k_major=spec.rhs_transposed,
        transpose_out=False,
    )


def _tokens(spec: GemmSpec) -> int:
    return spec.k if spec.over_tokens else spec.m


def _all_neurons(spec: GemmSpec) -> int:
    """The size of an FFN's GEMM that counts neurons."""
    if spec.over_tokens:
        return spec.n if spec.sparse_operand == "rhs" else spec.m
    return spec.n if spec.sparse_weight else spec.k


def _whole_rows(spec: GemmSpec) -> int:
    return in_blocks(spec.whole_features) if spec.over_tokens else 0


def _why_unsupported_on_sm90(spec: GemmSpec) -> str | None:
    if reason := spec.device.why_not_hopper():
        return reason
    if spec.pattern != TWO_FOUR:
        return f"multiplies by 2:4 operands, not {spec.pattern or 'dense ones'}"
    if spec.why_not_packed is not None:
        return f"the activations are not packed: {spec.why_not_packed}"
    if not spec.sparse_weight:
        from pallas_kernels import activation_tiles

        features = spec.expert_features or _all_neurons(spec)
        if reason := activation_tiles.why_unsupported(features, spec.dtype):
            return reason
    from pallas_kernels.sparse_matmul_configs import (
        default_config,
        why_invalid,
        why_unsupported,
    )

    shape, count = shape_on_sm90(spec), spec.device.count_multiprocessors()
    return why_unsupported(shape) or why_invalid(default_config(shape, count), shape)


def _why_slower_on_sm90(spec: GemmSpec) -> str | None:
    from pallas_kernels import tuning

    shape = shape_on_sm90(spec)
    if not spec.sparse_weight and _times_on_sm90(spec) is None:
        # Packing them costs time at every call, so that no rule can be trusted.
        return (
            "2:4 activations of this size have not been measured on this GPU, nor any "
            "smaller to estimate it from"
        )
    return tuning.why_slower(spec.device, shape)


def _times_on_sm90(spec: GemmSpec) -> Times | None:
    from pallas_kernels import tuning

    shape = shape_on_sm90(spec)
    known = tuning.times(spec.device, shape, spec.experts_per_token)
    if known is None:
        return None
    source = None
    if known.estimated:
        at = known.entry.shape
        source = f"{at.m} x {at.n} x {at.k}" + (
            f" of {at.experts} experts" if spec.experts is not None else ""
        )
    if known.measured_on is not None:
        source = f"{source} on {known.measured_on}"
    us = {
        "mosaic_sm90": known.sparse_us,
        "dense": known.dense_us,
        "packing": known.pack_us,
    }
    return Times(
        us=us,
        estimated_from=source,
        measured_on=known.measured_on,
        least_gain=known.least_gain,
    )


def _describe_on_sm90(spec: GemmSpec) -> tuple[str, float]:
    operand = "weight" if spec.sparse_weight else "activation"
    features = spec.expert_features or _all_neurons(spec)
    share = 0.5 * (1 + _whole_rows(spec) / features)
    cores = f"the sparse tensor cores{_cut_up_as_on(spec)}"
    if spec.experts is None:
        return f"2:4 {operand} on {cores}", share
    share *= spec.experts_per_token / spec.experts
    return f"2:4 {operand} of {spec.experts} experts on {cores}", share


def _cut_up_as_on(spec: GemmSpec) -> str:
    """Where the kernel's config comes from, if from another GPU."""
    known = _times_on_sm90(spec)
    if known is None or known.measured_on is None:
        return ""
    return f", cut up as on {known.measured_on}"


def _multiply_on_sm90(lhs, rhs) -> jax.Array:
    if isinstance(lhs, Compressed | Packed):
        packed = lhs if isinstance(lhs, Packed) else pack(lhs)
        return multiply_packed(packed, rhs, b_k_major=False, transpose_out=False)
    packed = rhs if isinstance(rhs, Packed) else pack(rhs)
    return multiply_packed(packed, lhs, b_k_major=True, transpose_out=True)


def multiply_packed(
    a: Packed,
    b: Float[Array, "..."],
    *,
    b_k_major: bool,
    transpose_out: bool,
    out_dtype: jnp.dtype | None = None,
    rows_apart: int = 0,
) -> Any:
    """A B on Hopper's sparse tensor cores, in any order of what is in memory.

    Args:
      a: (m, k), packed along k; its values are taken in the dtype of `b`.
      b: (n, k) if `b_k_major`, else (k, n), or in segments (64, k / 64, n): row i of
        B is then b[i % 64, i // 64].
      transpose_out: return (A B)^T, (n, m).
      out_dtype: None for the dtype of `b`.
      rows_apart: the product of the last rows of A comes as a second result. 0: one
        result.
    """
    out_dtype = jnp.dtype(b.dtype if out_dtype is None else out_dtype)
    run = _kernel_on_sm90(b_k_major, transpose_out, out_dtype, rows_apart)
    return run(a.values.astype(b.dtype), a.metadata, b)


def tuned_config(shape):
    """How the kernel cuts up a GEMM on the device here: what was tuned, or the
    heuristic's."""
    from pallas_kernels import tuning

    return tuning.config_for(current_device(), shape)


@lru_cache
def _kernel_on_sm90(
    b_k_major: bool, transpose_out: bool, out_dtype: jnp.dtype, rows_apart: int
):
    # The kernel has no batching rule: under vmap one matrix follows the other.
    @jax.custom_batching.sequential_vmap
    def run(values, metadata, b):
        from pallas_kernels import sparse_matmul_configs, sparse_matmul_sm90

        shape = sparse_matmul_configs.Shape(
            m=values.shape[0],
            n=b.shape[0] if b_k_major else b.shape[-1],
            k=2 * values.shape[1],
            dtype=str(b.dtype),
            b_k_major=b_k_major,
            transpose_out=transpose_out,
            float32_out=out_dtype == jnp.float32,
        )
        return sparse_matmul_sm90.sparse_matmul(
            values,
            metadata,
            b,
            b_k_major=b_k_major,
            transpose_out=transpose_out,
            out_dtype=out_dtype,
            rows_apart=rows_apart,
            config=tuned_config(shape),
            multiprocessors=current_device().count_multiprocessors(),
        )

    return run


IMPLEMENTATIONS: Implementations = {
    "mosaic_sm90": Implementation(
        run=_multiply_on_sm90,
        why_unsupported=_why_unsupported_on_sm90,
        describe=_describe_on_sm90,
        why_slower=_why_slower_on_sm90,
        times=_times_on_sm90,
    ),
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
