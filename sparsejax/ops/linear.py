"""The product of tokens and a weight, whose copy in the compute dtype is read.

Parameters are float32 and GEMMs often read bfloat16, so that every read rounds. A copy
made once serves all calls between two optimiser steps; the gradient belongs to the
parameter all the same, and is never rounded to the dtype of the copy. A GEMM that
writes it in the parameter's dtype can add it to the sum of earlier micro-batches as it
writes, and the sum over devices can follow after the last of them.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from sparsejax.dtypes import accumulation_dtype


def rounded_copy(
    w: Float[Array, "*shape"], dtype: DTypeLike
) -> Float[Array, "*shape"] | None:
    """Returns a copy of a weight in the compute dtype, without a gradient; None where
    the weight has that dtype already."""
    return None if w.dtype == dtype else jax.lax.stop_gradient(w).astype(dtype)


def as_read(
    w: Float[Array, "*shape"], copy: Float[Array, "*shape"] | None, dtype: DTypeLike
) -> Float[Array, "*shape"]:
    """Returns what a GEMM reads of a weight, without a gradient: its copy, or where
    there is none the weight itself in the compute dtype."""
    return jax.lax.stop_gradient(w).astype(dtype) if copy is None else copy


def linear(
    x: Float[Array, "*tokens d_in"],
    w: Float[Array, "rows columns"],
    read: Float[Array, "rows columns"],
    *,
    transposed: bool = False,
    out_dtype: DTypeLike | None = None,
) -> Float[Array, "*tokens d_out"]:
    """Returns x @ read, products summed in float32, or in float64 for float64.

    The gradient of x is in its dtype. That of w is summed and written in float32 and
    then has the dtype of w; the gradient that both are computed from is rounded to the
    dtype of x first, for a GEMM with a float32 operand takes three times as long
    (measured with the head on an H200: a sixth of a step of llama-1b).

    Args:
      x: the tokens, in the compute dtype.
      w: the weight that the gradient belongs to, (d_in, d_out); only its dtype is read.
      read: the same weight in the compute dtype, from `as_read`.
      transposed: whether `w` and `read` are (d_out, d_in).
      out_dtype: the dtype of the result; None for that of x.
    """
    out_dtype = x.dtype if out_dtype is None else jnp.dtype(out_dtype)
    return _linear(transposed, out_dtype, x, w, read)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _linear(transposed, out_dtype, x, w, read):
    return _forward(transposed, out_dtype, x, w, read)[0]


def _forward(transposed, out_dtype, x, w, read):
    summed = (x.ndim - 1,), (int(transposed),)
    y = jax.lax.dot_general(x, read, (summed, ((), ())), None, out_dtype)
    return y, (x, w, read)


def _backward(transposed, out_dtype, saved, dy):
    del out_dtype
    x, w, read = saved
    dy = dy.astype(x.dtype)
    summed = (dy.ndim - 1,), (int(not transposed),)
    dx = jax.lax.dot_general(dy, read, (summed, ((), ())))
    tokens = tuple(range(x.ndim - 1))
    left, right = (dy, x) if transposed else (x, dy)
    dw = jax.lax.dot_general(
        left,
        right,
        ((tokens, tokens), ((), ())),
        preferred_element_type=accumulation_dtype(x.dtype),
    )
    return dx, dw.astype(w.dtype), None


_linear.defvjp(_forward, _backward)
