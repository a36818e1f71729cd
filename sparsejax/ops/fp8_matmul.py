"""GEMMs whose operands are 8-bit floats with one scale for each whole operand.

A matrix x is stored as q = round(x / step), in float8_e4m3fn where it is a weight or an
activation and in float8_e5m2, which reaches further and is coarser, where it is a
gradient. The step is a power of two, the smallest for which no entry overflows:
multiplying by it is exact, so that q differs from x by the rounding of 3 (e4m3) or 2
(e5m2) bits of mantissa alone, and by nothing where x has no more bits. It is taken from
the matrix as it is now, and no state is kept for it. Products are summed in float32 and
rounded once.

A step is that of the whole matrix. Entries smaller than its largest one by a factor of
2^14 (e4m3) or 2^29 (e5m2) have fewer bits, and in that a token's rounding depends on
all other tokens of the call. No gradient passes through a step.

Tensor cores for 8-bit floats read both operands along the axis that is summed over. A
weight is therefore stored twice, as (d_in, d_out) and as (d_out, d_in).

Sources: arXiv 2209.05433 (the two formats); NVIDIA's Transformer Engine has the same
recipe under the name of current scaling.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.device import Device
from sparsejax.ops.backend import Implementation, Implementations, current_device
from sparsejax.ops.gemm_spec import GemmSpec

FORWARD = jnp.dtype(jnp.float8_e4m3fn)
"""The format of weights and activations: 3 bits of mantissa, up to 448."""
GRADIENT = jnp.dtype(jnp.float8_e5m2)
"""The format of gradients: 2 bits of mantissa, up to 57344."""
LEAST_EXPONENT = -126
"""The exponent of the smallest step, that of the smallest normal float32."""


class Quantised(NamedTuple):
    """A matrix in 8-bit floats."""

    values: Float[Array, "*batch rows columns"]
    step: Float[Array, "*batch"]
    """The power of two, float32, that one stands for: the matrix is values * step."""


class QuantisedWeight(NamedTuple):
    """A weight in 8-bit floats, in the two orders that its GEMMs read."""

    values: Float[Array, "*layers d_in d_out"]
    transposed: Float[Array, "*layers d_out d_in"]
    step: Float[Array, "*layers"]

    @property
    def T(self) -> "QuantisedWeight":
        """The transposed weight, (d_out, d_in)."""
        return QuantisedWeight(self.transposed, self.values, self.step)


def quantise(x: Float[Array, "*batch rows columns"], dtype: DTypeLike) -> Quantised:
    """Returns each matrix of `x` in 8-bit floats of `dtype`.

    Inside of a `jax.shard_map` the matrix is the one that all devices of the mesh
    share, and so is its step. A matrix of zeros has the step 1. One with a NaN or an
    infinity has the step 1 too, and keeps them in their places.
    """
    step = _step(_largest(x), jnp.finfo(dtype))
    scaled = x.astype(jnp.float32) * (1 / step)[..., None, None]
    return Quantised(scaled.astype(dtype), step)


def quantise_rows(x: Float[Array, "rows columns"]) -> Quantised:
    """Returns a matrix in float8_e4m3fn with a step for each of its rows, (rows,), so
    that none depends on another."""
    step = _step(jnp.max(jnp.abs(x), axis=1).astype(jnp.float32), jnp.finfo(FORWARD))
    rows = x.astype(jnp.float32) * (1 / step)[:, None]
    return Quantised(rows.astype(FORWARD), step)


def quantise_weight(w: Float[Array, "*layers d_in d_out"]) -> QuantisedWeight:
    """Returns a weight, or a stack of them with a step each, in 8-bit floats. It is to
    be made once per optimiser step, and not for every micro-batch."""
    values, step = quantise(lax.stop_gradient(w), FORWARD)
    return QuantisedWeight(values, values.swapaxes(-1, -2), step)


def dequantise(x: Quantised) -> Float[Array, "*batch rows columns"]:
    """Returns the matrix that the 8-bit floats stand for, in float32."""
    return x.values.astype(jnp.float32) * x.step[..., None, None]


def _largest(x: jax.Array) -> Float[Array, "*batch"]:
    """Returns the largest magnitude of each matrix, float32; NaN where one is NaN."""
    largest = jnp.max(jnp.abs(x), axis=(-2, -1), initial=0).astype(jnp.float32)
    shared = jax.sharding.get_abstract_mesh().manual_axes
    return lax.pmax(largest, shared) if shared else largest


def _step(largest: jax.Array, format: jnp.finfo) -> jax.Array:
    """Returns the smallest power of two that `largest` may be divided by without being
    above the largest number of the format, or 1 where it is zero or not finite."""
    mantissa, exponent = jnp.frexp(largest)
    most, most_exponent = jnp.frexp(jnp.float32(format.max))
    exponent = exponent - most_exponent + (mantissa > most)
    usual = jnp.isfinite(largest) & (largest > 0)
    exponent = jnp.clip(exponent, LEAST_EXPONENT, None)
    return jnp.where(usual, jnp.ldexp(jnp.float32(1), exponent), 1)


def fp8_matmul(
    lhs: Quantised, rhs_transposed: Quantised, *, out_dtype: DTypeLike
) -> Float[Array, "m n"]:
    """Returns lhs @ rhs, accumulated in float32 and rounded to `out_dtype`.

    Args:
      lhs: (m, k).
      rhs_transposed: rhs as (n, k).
      out_dtype: the dtype of the result. In bfloat16 the product of the 8-bit numbers
        is rounded, and the steps are multiplied in afterwards, which is exact.
    """
    out_dtype = jnp.dtype(out_dtype)
    left, right = lhs.values, rhs_transposed.values
    # Where a gradient is multiplied the sums are split and added in float32; tensor
    # cores for 8-bit floats else keep fewer bits of a sum of weights and activations.
    is_gradient = GRADIENT in (left.dtype, right.dtype)
    precision = lax.Precision.HIGHEST if is_gradient else None
    written = out_dtype
    if why_no_tensor_cores(current_device()) is not None:
        # Both formats are exact in bfloat16, which CPUs multiply slowly.
        exact = jnp.float32 if current_device().platform == "cpu" else jnp.bfloat16
        left, right = left.astype(exact), right.astype(exact)
        precision, written = lax.Precision.HIGHEST, jnp.dtype(jnp.float32)
    product = lax.dot_general(
        left,
        right,
        (((left.ndim - 1,), (right.ndim - 1,)), ((), ())),
        precision=precision,
        preferred_element_type=written,
    )
    step = lhs.step * rhs_transposed.step
    return (product * step.astype(product.dtype)).astype(out_dtype)


def rounded_product(
    x: Float[Array, "tokens d_in"], w: QuantisedWeight
) -> Float[Array, "tokens d_out"]:
    """Returns q(x) w, float32, without a gradient, with q that of `quantise_rows`.

    With x in bfloat16 the product of the 8-bit numbers is rounded to it before it is
    multiplied by the steps.
    """
    values, step = quantise_rows(lax.stop_gradient(x))
    whole = Quantised(values, jnp.float32(1))
    transposed = Quantised(w.transposed, w.step)
    # The largest float16 is below a sum of such products.
    is_bfloat16 = x.dtype == jnp.bfloat16
    written = jnp.bfloat16 if is_bfloat16 else jnp.float32
    product = fp8_matmul(whole, transposed, out_dtype=written)
    return product.astype(jnp.float32) * step[:, None]


def why_no_tensor_cores(device: Device) -> str | None:
    """Returns why a device has no tensor cores for 8-bit floats, None where it has."""
    if device.platform != "gpu":
        return f"{device.platform} has no tensor cores for 8-bit floats"
    capability = device.compute_capability
    if capability is None or float(capability) < 8.9:
        return f"{device.kind} has no tensor cores for 8-bit floats"
    return None


def _reference(lhs: Quantised, rhs_transposed: Quantised, *, out_dtype) -> jax.Array:
    product = jnp.matmul(
        dequantise(lhs),
        dequantise(rhs_transposed).swapaxes(-1, -2),
        precision=lax.Precision.HIGHEST,
    )
    return product.astype(out_dtype)


def formats(spec: GemmSpec) -> tuple[jnp.dtype, jnp.dtype]:
    """Returns the formats of a GEMM's left and right operand."""
    if spec.is_weight_gradient:
        # GEMM 6 has the activations on its left as well, A^T dY.
        return FORWARD, GRADIENT
    reads_gradient = spec.role in ("d_hidden", "d_input", "d_input_gate")
    return (GRADIENT if reads_gradient else FORWARD), FORWARD


def _describe(spec: GemmSpec) -> tuple[str, float]:
    first, second = (dtype.name.removeprefix("float8_") for dtype in formats(spec))
    what = f"8-bit floats, {first} x {second}"
    why = why_no_tensor_cores(spec.device)
    if why is None:
        return f"dense GEMM of {what}", 1.0
    return f"dense GEMM of operands rounded to {what}: {why}", 1.0


def implementations() -> Implementations:
    """Returns the implementations of the GEMM of 8-bit floats, by backend."""
    return {
        "reference": Implementation(
            run=_reference,
            why_unsupported=lambda spec: None,
            describe=lambda spec: (
                "float32 GEMM of operands rounded to 8-bit floats",
                1.0,
            ),
        ),
        "xla": Implementation(
            run=fp8_matmul,
            why_unsupported=lambda spec: None,
            describe=_describe,
        ),
    }
