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
        parts = jnp.concatenate(_bfloat16_parts(weights))
        products = jnp.einsum("td,ed->te", x, parts, preferred_element_type=jnp.float32)
        return _sum_of_parts(products, axis=1)
    return jnp.einsum(
        "td,ed->te", x.astype(jnp.float32), weights, precision=lax.Precision.HIGHEST
    )


@jax.custom_vjp
def _fitted_products(x: jax.Array, weights: jax.Array) -> jax.Array:
    """Returns `linear_scores`. The gradient with respect to the weights is of float32's
    products, too, and that with respect to the tokens zero: a fit takes them as given.
    Left to itself, the gradient of products of bfloat16 is rounded to bfloat16."""
    return linear_scores(x, weights)


def _fitted_products_forward(x: jax.Array, weights: jax.Array) -> tuple:
    return linear_scores(x, weights), x


def _fitted_products_backward(x: jax.Array, gradient: jax.Array) -> tuple:
    """Returns the gradients with respect to (x, weights)."""
    if x.dtype != jnp.bfloat16:
        precision = lax.Precision.HIGHEST
        x32 = x.astype(jnp.float32)
        return None, jnp.einsum("te,td->ed", gradient, x32, precision=precision)
    parts = jnp.concatenate(_bfloat16_parts(gradient), axis=1)
    products = jnp.einsum("tp,td->pd", parts, x, preferred_element_type=jnp.float32)
    return None, _sum_of_parts(products, axis=0)


_fitted_products.defvjp(_fitted_products_forward, _fitted_products_backward)


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
    products = jnp.einsum(
        "td,jd->tj",
        x,
        state["directions"][:, :-1].astype(x.dtype),
        preferred_element_type=jnp.float32,
        precision=lax.Precision.HIGHEST,
    )
    of_token = linear_scores(x, state["w"][:, : x.shape[1]])
    return of_token + _scores_of_features(products, state)


def _scores_of_features(
    products: Float[Array, "tokens features"], state: Mapping[str, Array]
) -> Float[Array, "tokens experts"]:
    """Returns the part of the scores that comes from the features and the constants.

    Args:
      products: <x, a_j>.
    """
    directions, w = state["directions"], state["w"]
    features = jnp.square(jnp.maximum(products + directions[None, :, -1], 0.0))
    of_features = w[:, -1 - len(directions) : -1]
    scores = jnp.einsum(
        "tj,ej->te", features, of_features, precision=lax.Precision.HIGHEST
    )
    return scores + w[None, :, -1]


def regression_step(
    state: Mapping[str, Array],
    x: Float[Array, "tokens d_model"],
    shares: Float[Array, "tokens experts"],
    rate: float,
) -> dict[str, Array]:
    """Returns the regression after a step of Adam, of this rate, on the mean cross
    entropy of the softmax of its scores to some tokens' `shares`, which sum to one or
    are all zero. Where the sum of Adam's mean squares is not finite, as with a token
    that is not, the regression stays as it is: a step that an optimiser leaves out must
    not end in its coefficients. All products are of float32, those with a_j too."""

    def cross_entropy(coefficients: Mapping[str, Array]) -> Array:
        of_token = _fitted_products(x, coefficients["w"][:, : x.shape[1]])
        products = _fitted_products(x, coefficients["directions"][:, :-1])
        scores = of_token + _scores_of_features(products, coefficients)
        logs = jax.nn.log_softmax(scores)
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
    # Squares are finite only if the gradient is, and may be infinite even then. To sum
    # them takes a few kernels, and to look at all arrays a dozen.
    squares = cast(Mapping[str, Array], after.nu)
    is_finite = jnp.isfinite(sum(jnp.sum(squares[name]) for name in names))
    return {
        name: jnp.where(is_finite, array, state[name]) for name, array in moved.items()
    }


def _bfloat16_parts(x: jax.Array) -> list[jax.Array]:
    """Returns three bfloat16 arrays that sum to x, the largest first. Products of two
    bfloat16 are exact in float32, so that one pass over the other operand on tensor
    cores gives float32's product with x (`_sum_of_parts`)."""
    parts = []
    for _ in range(3):
        # XLA must not take the rounding for the identity.
        part = lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
        parts.append(part.astype(jnp.bfloat16))
        x = x - part
    return parts


def _sum_of_parts(products: jax.Array, axis: int) -> jax.Array:
    """Returns the sum of the products with `_bfloat16_parts`, which lie behind each
    other along the axis."""
    large, middle, small = jnp.split(products, 3, axis=axis)
    return large + (middle + small)
