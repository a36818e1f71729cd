"""The dense GEMM: what every sparse one stands for, and is measured against."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from sparsejax.dtypes import accumulation_dtype, widest
from sparsejax.ops.backend import (
    Implementation,
    Implementations,
    dense_of_each_set,
)
from sparsejax.ops.gemm_spec import GemmSpec


def dense_matmul(
    lhs: Float[Array, "m k"],
    rhs: Float[Array, "k n"],
    *,
    precision: lax.Precision | None = None,
    out_dtype: jnp.dtype | None = None,
) -> Float[Array, "m n"]:
    """Returns `lhs @ rhs`, accumulated in float32, rounded once to `out_dtype`.

    `out_dtype` defaults to the dtype of `lhs`.
    """
    out_dtype = jnp.dtype(lhs.dtype if out_dtype is None else out_dtype)
    # XLA accumulates products of 16-bit floats in float32 whatever it then writes, and
    # asked for float32 it writes that, to be read again and rounded.
    written = widest(lhs.dtype, rhs.dtype, out_dtype)
    if written.itemsize == 1:
        # On a CPU it would be rounded twice.
        written = accumulation_dtype(written)
    out = jnp.matmul(lhs, rhs, precision=precision, preferred_element_type=written)
    return out.astype(out_dtype)


def _reference(lhs: jax.Array, rhs: jax.Array, **kwargs) -> jax.Array:
    return dense_matmul(lhs, rhs, precision=lax.Precision.HIGHEST, **kwargs)


def _describe(spec: GemmSpec) -> tuple[str, float]:
    library = "cuBLAS" if spec.device.platform == "gpu" else "XLA"
    return f"dense GEMM by {library}", 1.0


FUSED_FASTER_ON = "NVIDIA H100 80GB HBM3"
"""The GPU on which whole dense steps were timed with and without fused activations."""

FUSED_FROM = 2**27
"""The least product of tokens and neurons with which such steps were timed."""

FUSED_WIDTHS = 768, 2048
"""The least and the greatest d_model with which such steps were timed."""


def fused_implementations() -> Implementations:
    """Returns the implementations of a dense GEMM that a squared ReLU, or its gradient,
    follows (`GemmSpec.squares`), by backend. A set of kernels applies it before it
    writes. The FFN calls it itself."""
    fused = dense_of_each_set(
        _not_called,
        why_unsupported=lambda found, spec: found.why_no_squared_relu(spec),
        describe=_describe_fused,
        why_slower=_why_fused_slower,
    )
    return {**fused, **implementations()}


def _why_fused_slower(spec: GemmSpec) -> str | None:
    """Returns why a GEMM with a fused activation is not to be chosen unasked, or None
    where whole steps were faster with it. On an H100 they took 0.95 to 0.98 of the time
    at d_model 768 with 65,536 tokens, and 0.99 at 2,048 with 16,384; loss and gradient
    norm were those of XLA's steps within 2e-5 and 2.1e-4 (experiments/LOG.md,
    2026-11-27)."""
    if spec.device.kind != FUSED_FASTER_ON:
        return f"its dense steps were timed on {FUSED_FASTER_ON} alone"
    least, greatest = FUSED_WIDTHS
    if not least <= spec.d_in <= greatest:
        return (
            f"its dense steps were timed with d_model {least} to {greatest}, not "
            f"{spec.d_in}"
        )
    if spec.tokens * spec.d_out < FUSED_FROM:
        return (
            f"its dense steps were timed with {FUSED_FROM} activations and more, not "
            f"{spec.tokens * spec.d_out}"
        )
    return None


def _describe_fused(spec: GemmSpec) -> tuple[str, float]:
    written = "A" if spec.role == "up" else "dY1"
    return f"dense GEMM on the tensor cores, writes {written}", 1.0


def _not_called(*operands: Any) -> Any:
    raise NotImplementedError("an FFN calls the kernels of a squared ReLU itself")


def implementations() -> Implementations:
    """Returns the implementations of the dense GEMM, by backend."""
    return {
        "reference": Implementation(
            run=_reference,
            why_unsupported=lambda spec: None,
            describe=lambda spec: ("dense GEMM at the highest precision", 1.0),
        ),
        "xla": Implementation(
            run=dense_matmul,
            why_unsupported=lambda spec: None,
            describe=_describe,
        ),
    }
