"""Initial values of a model's weights."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Key


def initial_weight(
    key: Key[Array, ""],
    shape: tuple[int, int],
    scale: float = 1.0,
    *,
    groups: int = 1,
    kernel_init: jax.nn.initializers.Initializer | None = None,
    dtype: DTypeLike = jnp.float32,
) -> Float[Array, "*groups d_in d_out"]:
    """Returns a weight, whole or as the blocks of a diagonal.

    Args:
      shape: (d_in, d_out) of the whole weight.
      scale: a factor of its initial values.
      groups: with two or more the weight is as many blocks, each made by itself.
      kernel_init: makes a weight from a key, a shape and a dtype; None for
        `fan_in_normal`.
      dtype: the dtype of the weight.
    """
    if kernel_init is None:
        return fan_in_normal(key, shape, scale, groups=groups).astype(dtype)
    if groups == 1:
        return kernel_init(key, shape, dtype) * scale
    d_in, d_out = shape
    block = d_in // groups, d_out // groups
    keys = jax.random.split(key, groups)
    return jax.vmap(lambda key: kernel_init(key, block, dtype))(keys) * scale


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
