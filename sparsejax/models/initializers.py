"""Initial values of a model's weights."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key


def fan_in_normal(
    key: Key[Array, ""], shape: tuple[int, int], scale: float = 1.0
) -> Float[Array, "d_in d_out"]:
    """Returns a float32 weight, truncated normal with deviation scale / sqrt(d_in)."""
    initialise = jax.nn.initializers.variance_scaling(
        scale**2, "fan_in", "truncated_normal"
    )
    return initialise(key, shape, jnp.float32)
