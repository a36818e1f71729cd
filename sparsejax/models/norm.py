"""RMS normalisation, as a Flax NNX module."""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float


class RMSNorm(nnx.Module):
    """Root-mean-square normalisation, x / sqrt(mean(x^2) + epsilon) * scale, computed
    in float32 and returned in `dtype`.

    Source: Zhang and Sennrich 2019, arXiv 1910.07467.
    """

    def __init__(self, d: int, epsilon: float, dtype: DTypeLike) -> None:
        self.scale = nnx.Param(jnp.ones((d,), jnp.float32))
        self.epsilon = epsilon
        self.dtype = jnp.dtype(dtype)

    def __call__(self, x: Float[Array, "*batch d"]) -> Float[Array, "*batch d"]:
        return _rms_norm(x, self.scale[...], self.epsilon, self.dtype)


# Recomputed in the backward, from x: autodiff would save two float32 copies of x.
@partial(jax.checkpoint, static_argnums=(2, 3), prevent_cse=False)
def _rms_norm(
    x: jax.Array, scale: jax.Array, epsilon: float, dtype: jnp.dtype
) -> jax.Array:
    x = x.astype(jnp.float32)
    mean_square = jnp.mean(x * x, axis=-1, keepdims=True)
    scale = jnp.expand_dims(scale, range(x.ndim - 1))
    return (x * jax.lax.rsqrt(mean_square + epsilon) * scale).astype(dtype)
