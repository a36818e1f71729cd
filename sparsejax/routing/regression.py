"""Scores of experts that are linear in the token, or in it and in features of it that
are learned, and the regression that fits them."""

from collections.abc import Mapping
from typing import cast

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jaxtyping import Array, Float

SQUARES_DECAY = 0.99
"""The decay of Adam's mean of squares: about a hundred steps, since the neurons whose
energy is predicted are trained at the same time."""
MOST_FEATURES = 512
"""The most features of a token that a regression learns."""


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


def feature_count(d_model: int, d_hidden: int) -> int:
    """Returns the number of features that a regression learns: d_model / 4, at most 512
    and no more than there are neurons."""
    return min(max(d_model // 4, 1), MOST_FEATURES, d_hidden)


def regression_at(
    weights: Float[Array, "experts d_model"], w_up: Float[Array, "d_model d_hidden"]
) -> dict[str, Array]:
    """Returns a regression that begins at some weights: its coefficients, and Adam's
    first and second moments of them and its count, zeros.

    Args:
      weights: the first coefficients of the token's own numbers.
      w_up: W1, whose columns at equal distances, made unit norm, are the first
        directions of the features; their first coefficients are zero.
    """
    features = feature_count(*w_up.shape)
    columns = w_up[:, :: w_up.shape[1] // features][:, :features].astype(jnp.float32)
    norm = jnp.linalg.norm(columns, axis=0, keepdims=True)
    unit = columns / jnp.maximum(norm, jnp.finfo(jnp.float32).tiny)
    begin = {
        "directions": jnp.pad(unit.T, ((0, 0), (0, 1))),
        "w": jnp.pad(weights.astype(jnp.float32), ((0, 0), (0, features + 1))),
    }
    moments = {
        f"{moment}_{name}": jnp.zeros_like(array)
        for moment in ("first", "second")
        for name, array in begin.items()
    }
    return begin | moments | {"count": jnp.zeros((), jnp.int32)}


def regression_scores(
    x: Float[Array, "tokens d_model"], state: Mapping[str, Array]
) -> Float[Array, "tokens experts"]:
    """Returns the scores of a regression, float32:

        s_e = <x, w_e> + b_e + sum over the features j of v_ej relu(<x, a_j> + c_j)^2

    (a_j, c_j) are the rows of `directions` and (w_e, v_e, b_e) those of `w`. The
    products with a_j are of x's dtype, and all sums are float32's.
    """
    d_model = x.shape[1]
    directions, w = state["directions"], state["w"]
    products = jnp.einsum(
        "td,jd->tj",
        x,
        directions[:, :-1].astype(x.dtype),
        preferred_element_type=jnp.float32,
        precision=lax.Precision.HIGHEST,
    )
    features = jnp.square(jnp.maximum(products + directions[None, :, -1], 0.0))
    of_features = jnp.einsum(
        "tj,ej->te", features, w[:, d_model:-1], precision=lax.Precision.HIGHEST
    )
    return linear_scores(x, w[:, :d_model]) + of_features + w[None, :, -1]


def regression_step(
    state: Mapping[str, Array],
    x: Float[Array, "tokens d_model"],
    shares: Float[Array, "tokens experts"],
    rate: float,
) -> dict[str, Array]:
    """Returns the regression after a step of Adam, of this rate, on the mean cross
    entropy of the softmax of its scores to some tokens' `shares`, which sum to one or
    are all zero. Where the gradient is not finite, as with a token that is not, the
    regression stays as it is: a step that an optimiser leaves out must not end in its
    coefficients."""
    x = x.astype(jnp.float32)

    def cross_entropy(coefficients: Mapping[str, Array]) -> Array:
        logs = jax.nn.log_softmax(regression_scores(x, coefficients))
        return -jnp.mean(jnp.sum(shares * logs, axis=1))

    names = ("directions", "w")
    of = lambda moment: {name: state[f"{moment}_{name}"] for name in names}
    coefficients = {name: state[name] for name in names}
    gradient = jax.grad(cross_entropy)(coefficients)
    before = optax.ScaleByAdamState(state["count"], of("first"), of("second"))
    adam = optax.scale_by_adam(b2=SQUARES_DECAY)
    update, after = adam.update(gradient, before)
    assert isinstance(after, optax.ScaleByAdamState)
    moved = jax.tree.map(lambda w, step: w - rate * step, coefficients, update)
    for moment, of_names in (("first", after.mu), ("second", after.nu)):
        arrays = cast(Mapping[str, Array], of_names)
        moved |= {f"{moment}_{name}": arrays[name] for name in names}
    moved["count"] = jnp.asarray(after.count)
    # A finite gradient may have squares that are not.
    is_finite = jnp.stack([jnp.isfinite(array).all() for array in moved.values()]).all()
    return {
        name: jnp.where(is_finite, array, state[name]) for name, array in moved.items()
    }


def _bfloat16_parts(x: jax.Array) -> list[jax.Array]:
    """Returns three bfloat16 arrays that sum to x, the largest first."""
    parts = []
    for _ in range(3):
        # XLA must not take the rounding for the identity.
        part = lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
        parts.append(part.astype(jnp.bfloat16))
        x = x - part
    return parts
