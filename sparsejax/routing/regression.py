"""Scores of experts that are linear in the token, and their regression."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jaxtyping import Array, Float

SQUARES_DECAY = 0.99
"""The decay of Adam's mean of squares: about a hundred steps, since the neurons whose
energy is predicted are trained at the same time."""


def linear_scores(
    x: Float[Array, "tokens d_model"], weights: Float[Array, "experts d_model"]
) -> Float[Array, "tokens experts"]:
    """Returns <x, w_e>, the products of float32 whatever the dtype of the tokens."""
    weights = weights.astype(jnp.float32)
    if x.dtype == jnp.bfloat16:
        # Three bfloat16 parts hold a float32, and products of two are exact: one pass
        # over x on tensor cores.
        parts = jnp.concatenate(_bfloat16_parts(weights))
        products = jnp.einsum("td,ed->te", x, parts, preferred_element_type=jnp.float32)
        large, middle, small = jnp.split(products, 3, axis=1)
        return large + (middle + small)
    return jnp.einsum(
        "td,ed->te", x.astype(jnp.float32), weights, precision=lax.Precision.HIGHEST
    )


def regression_at(weights: Float[Array, "experts d_model"]) -> dict[str, Array]:
    """Returns a regression that begins at some weights: its coefficients w (experts,
    d_model + 1), of which the last of each expert is its bias, zero, and Adam's first
    and second moments of them and its count, zeros."""
    w = jnp.pad(weights.astype(jnp.float32), ((0, 0), (0, 1)))
    zeros = jnp.zeros_like(w)
    count = jnp.zeros((), jnp.int32)
    return {"w": w, "first": zeros, "second": zeros, "count": count}


def regression_step(
    state: Mapping[str, Array],
    x: Float[Array, "tokens d_model"],
    error: Float[Array, "tokens experts"],
    rate: float,
) -> dict[str, Array]:
    """Returns the regression after a step of Adam, of this rate, on half the mean
    squared error of its scores for some tokens. Where the gradient is not finite, as
    with a token that is not, the regression stays as it is: a step that an optimiser
    leaves out must not end in its coefficients."""
    features = jnp.pad(x.astype(jnp.float32), ((0, 0), (0, 1)), constant_values=1)
    gradient = error.T @ features / x.shape[0]
    before = optax.ScaleByAdamState(state["count"], state["first"], state["second"])
    adam = optax.scale_by_adam(b2=SQUARES_DECAY)
    update, after = adam.update(gradient, before)
    assert isinstance(after, optax.ScaleByAdamState)
    moved = {
        "w": state["w"] - rate * jnp.asarray(update),
        "first": jnp.asarray(after.mu),
        "second": jnp.asarray(after.nu),
        "count": jnp.asarray(after.count),
    }
    # A finite gradient may have squares that are not.
    is_finite = jnp.isfinite(moved["w"]).all() & jnp.isfinite(moved["second"]).all()
    return {name: jnp.where(is_finite, of, state[name]) for name, of in moved.items()}


def _bfloat16_parts(x: jax.Array) -> list[jax.Array]:
    """Returns three bfloat16 arrays that sum to x, the largest first."""
    parts = []
    for _ in range(3):
        # XLA must not take the rounding for the identity.
        part = lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
        parts.append(part.astype(jnp.bfloat16))
        x = x - part
    return parts
