"""Initial values of a model's weights."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key


def fan_in_normal(
    key: Key[Array, ""], shape: tuple[int, int], scale: float = 1.0, *, groups: int = 1
) -> Float[Array, "*groups d_in d_out"]:
    """Returns a float32 weight, truncated normal with deviation scale / sqrt(d_in).

    Args:
      shape: (d_in, d_out) of the whole weight.
      groups: with two or more the weight is as many blocks on a diagonal, (groups,
        d_in / groups, d_out / groups), and an output reads d_in / groups inputs alone,
        which take the place of d_in in its deviation.
    """
    d_in, d_out = shape
    blocks = (groups, d_in // groups, d_out // groups) if groups > 1 else shape
    initialise = jax.nn.initializers.variance_scaling(
        scale**2, "fan_in", "truncated_normal", batch_axis=tuple(range(len(blocks) - 2))
    )
    return initialise(key, blocks, jnp.float32)
