"""A linear layer whose GEMMs multiply 8-bit floats: y = x w, with w float32 or wider
than 8 bits in the parameters.

    y  = q(x) q(w)          e4m3 x e4m3
    dx = q(dy) q(w)^T       e5m2 x e4m3
    dw = x^T dy             in the compute dtype; e4m3 x e5m2 with "fp8_all"

q rounds to 8-bit floats as `fp8_matmul` says. The gradient goes straight through it.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from sparsejax.dtypes import Precision, accumulation_dtype
from sparsejax.ops.fp8_matmul import (
    FORWARD,
    GRADIENT,
    Quantised,
    QuantisedWeight,
    fp8_matmul,
    quantise,
)


def fp8_linear(
    x: Float[Array, "*tokens d_in"],
    w: Float[Array, "d_in d_out"],
    quantised: QuantisedWeight,
    *,
    precision: Precision,
) -> Float[Array, "*tokens d_out"]:
    """Returns x w in the dtype of x, from operands in 8-bit floats.

    Args:
      x: the input, in the compute dtype.
      w: the weight that the gradient belongs to; its numbers are not read.
      quantised: the same weight in 8-bit floats, from `quantise_weight`.
      precision: "fp8", or "fp8_all" where dw is a GEMM of 8-bit floats, too.
    """
    rows = x.reshape(-1, x.shape[-1])
    y = _linear(precision == "fp8_all", rows, w, jax.lax.stop_gradient(quantised))
    return y.reshape(*x.shape[:-1], w.shape[-1])


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _linear(
    quantise_dw: bool, x: jax.Array, w: jax.Array, quantised: QuantisedWeight
) -> jax.Array:
    return _forward(quantise_dw, x, w, quantised)[0]


def _forward(quantise_dw, x, w, quantised):
    weight = Quantised(quantised.transposed, quantised.step)
    y = fp8_matmul(quantise(x, FORWARD), weight, out_dtype=x.dtype)
    return y, (x, w, quantised)


def _backward(quantise_dw, saved, dy):
    x, w, quantised = saved
    weight = Quantised(quantised.values, quantised.step)
    dx = fp8_matmul(quantise(dy, GRADIENT), weight, out_dtype=x.dtype)
    accumulate = accumulation_dtype(x.dtype)
    if quantise_dw:
        left, right = quantise(x.T, FORWARD), quantise(dy.T, GRADIENT)
        dw = fp8_matmul(left, right, out_dtype=accumulate)
    else:
        dw = jnp.matmul(x.T, dy, preferred_element_type=accumulate)
    return dx, dw.astype(w.dtype), None


_linear.defvjp(_forward, _backward)
