"""The choice of the experts with the largest scores."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from sparsejax.sparsity.masks import ordered_keys


def best_experts(
    scores: Float[Array, "tokens experts"] | Int[Array, "tokens experts"],
    experts_per_token: int,
) -> Int[Array, "tokens g"]:
    """Returns the experts of the g largest scores, best first; ties go to the lower
    expert. -0.0 equals 0.0, and NaN is the largest score.

    Raises:
      ValueError: g is not in [1, experts].
    """
    experts = scores.shape[-1]
    if not 1 <= experts_per_token <= experts:
        raise ValueError(
            f"experts_per_token={experts_per_token} is not in [1, {experts}], the "
            f"number of experts; choose fewer"
        )
    # Of floats top_k orders -0.0 below 0.0, which argmax takes for equal.
    keys = ordered_keys(lax.stop_gradient(scores))
    if experts_per_token == 1:  # on a GPU top_k sorts
        return jnp.argmax(keys, axis=-1, keepdims=True).astype(jnp.int32)
    _, best = lax.top_k(keys, experts_per_token)
    return best
