"""Estimators of gradients that are biased or stochastic, and named as such."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Key

from sparsejax.annotations import check_value
from sparsejax.sparsity.masks import group_ranks, split_groups
from sparsejax.sparsity.patterns import TWO_FOUR

# Descending ranks (0 = largest) of the pairs that the exact estimator may keep, in the
# order of its table: 1,3  1,4  2,3  2,4  3,4 with magnitudes a1 <= a2 <= a3 <= a4.
_PAIRS = ((3, 1), (3, 0), (2, 1), (2, 0), (1, 0))


def straight_through(fn: Callable[..., Array]) -> Callable[..., Array]:
    """Returns `fn` with a biased gradient: that of the identity in its first argument.

    The value is `fn(w, *args, **kwargs)`, bit for bit; the cotangent goes to `w`
    unchanged; the other arguments get none. It works in forward and reverse mode.

    Raises:
      ValueError: when called, where the result has another shape than `w`.
    Example: `straight_through(soft_threshold)(w, axis=0)`.
    """

    @functools.wraps(fn)
    def with_identity_gradient(w, *args, **kwargs):
        value = lax.stop_gradient(fn(w, *args, **kwargs))
        if value.shape != w.shape:
            raise ValueError(
                f"{getattr(fn, '__name__', fn)} maps shape {w.shape} to {value.shape}; "
                f"a straight-through gradient needs the same shape"
            )
        return _value_with_gradient_of(value, w)

    return with_identity_gradient


def mvue(
    key: Key[Array, ""] | Array,
    x: Float[Array, "..."],
    *,
    axis: int = -1,
    exact: bool = True,
) -> Float[Array, "..."]:
    """Returns a random 2:4 array whose mean is `x`.

    Of each four entries along `axis` two are kept, and scaled so that the mean is
    right. The exact estimator has the least variance; it draws by a table of
    probabilities over the pairs. The other one draws two without replacement, in
    proportion to their magnitude, and divides them by the probability of being drawn:
    it is cheaper to describe, with about 1.3 times the variance. Both are computed in
    float32, relative to the largest magnitude of the group (below the smallest normal
    float32: zeros); rounding to x.dtype is not stochastic.

    Args:
      key: a random key; each key gives one draw.
      x: any shape; the size of `axis` is a multiple of four.
      axis: the axis that the groups of four lie along.
      exact: whether to draw by the exact estimator.
    Returns:
      shape and dtype of `x`; +0.0 where not kept. A group with NaN keeps a NaN.
    Raises:
      ValueError: the size of the axis is not a multiple of four, or `exact` is neither
        True nor False.
    Source: arXiv 2203.10991; the sampler without replacement as in arXiv 2404.01847.
    """
    check_value("exact", exact, bool)
    grouped, group_axis = split_groups(x, TWO_FOUR, axis)
    ranks = _members(group_ranks(jnp.abs(grouped), group_axis), group_axis)
    entries = _members(grouped.astype(jnp.float32), group_axis)
    magnitudes = [jnp.abs(entry) for entry in entries]
    largest = functools.reduce(jnp.maximum, magnitudes)
    # Subnormals are zeros on some backends: treat them so on all.
    empty = largest < jnp.finfo(jnp.float32).tiny
    unit = jnp.where(empty, 1.0, largest)
    magnitudes = [jnp.where(empty, 0.0, a / unit) for a in magnitudes]
    if exact:
        draw = jax.random.uniform(key, largest.shape)
        estimates = _draw_exact(draw, magnitudes, ranks)
    else:
        draw = jax.random.uniform(key, (2, *largest.shape))
        estimates = _draw_without_replacement(draw, magnitudes)
    signed = [
        jnp.where(estimate == 0, 0.0, jnp.sign(entry) * (estimate * unit))
        for estimate, entry in zip(estimates, entries, strict=True)
    ]
    return jnp.stack(signed, axis=group_axis).reshape(x.shape).astype(x.dtype)


@jax.custom_jvp
def _value_with_gradient_of(value, w):
    return value


@_value_with_gradient_of.defjvp
def _(primals, tangents):
    value, _ = primals
    return value, tangents[1].astype(value.dtype)


def _members(grouped, axis: int) -> list[Array]:
    """Returns the four entries of each group, one array per position."""
    return [lax.index_in_dim(grouped, i, axis, keepdims=False) for i in range(4)]


def _draw_exact(draw, magnitudes, ranks):
    """Returns the magnitudes of the exact estimate: two of each four, the other two
    zero."""
    ascending = [_at_rank(magnitudes, ranks, rank) for rank in (3, 2, 1, 0)]
    probabilities, shared, dominant = _pair_table(*ascending)
    pair = _first_above(draw, probabilities)
    value = jnp.where(dominant, ascending[0] + ascending[1] + ascending[2], shared)
    largest = jnp.where(dominant, ascending[3], value)
    estimates = []
    for rank in ranks:
        chosen = functools.reduce(
            jnp.logical_or,
            [
                (pair == i) & ((rank == p) | (rank == q))
                for i, (p, q) in enumerate(_PAIRS)
            ],
        )
        estimates.append(jnp.where(chosen, jnp.where(rank == 0, largest, value), 0.0))
    return estimates


def _pair_table(a1, a2, a3, a4):
    """Returns the probability of each pair, the value that both its members get, and
    whether a4 dominates.

    Where a4 dominates, it is always kept at its own value and the other of the pair
    gets a1 + a2 + a3 (the pairs 1,4 2,4 3,4); otherwise both get half of the sum.
    """
    rest = a1 + a2 + a3
    total = rest + a4
    dominant = a4 > rest
    low = 2 * a1 + a3 - a4 > 0
    none = jnp.zeros_like(a1)
    # The guards are for groups of zeros, whose kept values are zero anyway.
    total_or_one = jnp.where(total == 0, 1.0, total)
    rest_or_one = jnp.where(rest == 0, 1.0, rest)
    half = 2 * total_or_one
    balanced = (
        jnp.where(low, (2 * a1 + a3 - a4) / half, none),
        jnp.where(low, (2 * a1 - a3 + a4) / half, 2 * a1 / total_or_one),
        jnp.where(low, (2 * a2 + a3 - a4) / half, (rest - a4) / total_or_one),
        jnp.where(low, (2 * a2 - a3 + a4) / half, (a4 - a1 + a2 - a3) / total_or_one),
        (a3 + a4 - a1 - a2) / total_or_one,
    )
    skewed = (none, a1 / rest_or_one, none, a2 / rest_or_one, a3 / rest_or_one)
    probabilities = [
        jnp.where(dominant, s, b) for s, b in zip(skewed, balanced, strict=True)
    ]
    return probabilities, total / 2, dominant


def _draw_without_replacement(draw, magnitudes):
    """Returns the magnitudes of the other estimate: two of each four, drawn without
    replacement and divided by their inclusion probability."""
    others = [sum(magnitudes[:i] + magnitudes[i + 1 :]) for i in range(4)]
    total = magnitudes[0] + others[0]
    first = _first_above(draw[0] * total, magnitudes)
    left = [jnp.where(first == i, 0.0, a) for i, a in enumerate(magnitudes)]
    second = _first_above(draw[1] * sum(left), left)
    total_or_one = jnp.where(total == 0, 1.0, total)
    # a_j / (S - a_j), the odds that j is drawn first; without others j is all there is.
    odds = [
        a / jnp.where(rest == 0, 1.0, rest)
        for a, rest in zip(magnitudes, others, strict=True)
    ]
    estimates = []
    for i, a in enumerate(magnitudes):
        # p_i = a_i / S (1 + sum of the others' odds), hence a_i / p_i:
        value = total_or_one / (1 + sum(odds[:i] + odds[i + 1 :]))
        chosen = ((first == i) | (second == i)) & (a != 0)
        estimates.append(jnp.where(chosen, value, 0.0))
    return estimates


def _at_rank(members, ranks, rank: int):
    """Returns the member of each group that has the rank `rank`."""
    picked = members[0]
    for member, its_rank in zip(members[1:], ranks[1:], strict=True):
        picked = jnp.where(its_rank == rank, member, picked)
    return picked


def _first_above(draw, weights):
    """Returns the index of the first weight whose running sum exceeds `draw`, or of the
    last weight where none does."""
    index = jnp.zeros(draw.shape, jnp.int32)
    running = jnp.zeros_like(draw)
    for weight in weights[:-1]:
        running = running + weight
        index += draw >= running
    return index
