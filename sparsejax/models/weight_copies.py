"""Copies of weights in the compute dtype, made once for the micro-batches of a step."""

import jax
from jax.typing import DTypeLike
from jaxtyping import Array, Float


def rounded(
    w: Float[Array, "*shape"], dtype: DTypeLike
) -> Float[Array, "*shape"] | None:
    """Returns a weight in the compute dtype, None where it has that already."""
    return None if w.dtype == dtype else jax.lax.stop_gradient(w).astype(dtype)


def read(
    w: Float[Array, "*shape"], copy: Float[Array, "*shape"] | None, dtype: DTypeLike
) -> Float[Array, "*shape"]:
    """Returns a weight in the compute dtype: its copy, where there is one. The gradient
    is that of the weight itself, in its own dtype."""
    return w.astype(dtype) if copy is None else _copy_of(w, copy)


@jax.custom_vjp
def _copy_of(w: jax.Array, copy: jax.Array) -> jax.Array:
    return copy


def _forward(w: jax.Array, copy: jax.Array) -> tuple[jax.Array, jax.Array]:
    return copy, w


def _backward(w: jax.Array, gradient: jax.Array) -> tuple[jax.Array, None]:
    return gradient.astype(w.dtype), None


_copy_of.defvjp(_forward, _backward)
