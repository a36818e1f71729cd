"""Balanced clusters of neurons, which are the experts of an FFN.

An expert is a cluster of F / E neurons with similar input weights. Its neurons lie next
to each other: expert e has those from e F / E.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int


def balanced_clusters(
    w_up: Float[Array, "d_model d_hidden"],
    experts: int,
    *,
    iterations: int = 20,
    initial: Int[Array, " d_hidden"] | None = None,
) -> tuple[Int[Array, " d_hidden"], Float[Array, "experts d_model"]]:
    """Returns E clusters of equal size that group neurons with similar input weights.

    This is spherical k-means over the unit columns n_f of `w_up`, with F / E neurons in
    each cluster e:

        maximise  sum_f <n_f, c_e(f)>,   c_e = mean of the members, made unit norm

    Neurons are placed by deferred acceptance: every unplaced neuron proposes to the
    best expert it has not tried, every expert keeps the F / E best of those it holds
    and those that propose. The best assignment seen is returned, so the objective is at
    least that of `initial`. The result is deterministic and computed in float32. Under
    jit `experts` and `iterations` are static.

    Args:
      w_up: the up projection. Columns that are zero or not finite fit everywhere.
      experts: E; F is a multiple of it.
      iterations: the most rounds of k-means; it stops where an assignment repeats.
      initial: a balanced assignment to start from. With None the rounds start from
        centres far from each other, each the column least like those before it. A
        concrete assignment is checked, a traced one is trusted.
    Returns:
      the expert of each neuron, int32, and the centres, float32, of unit norm (zero
      for a cluster whose columns cancel or are all zero).
    Raises:
      ValueError: E is below 1, F is not a multiple of it, or `initial` is not
        balanced.
    Source: the clustering is that of arXiv 2110.01786 (MoEfication) with the warm start
      of arXiv 2410.03440. The placement differs: theirs is a constrained assignment.
    """
    d_hidden = w_up.shape[1]
    if experts < 1:
        raise ValueError(
            f"experts={experts} must be at least 1, the clusters that the neurons are "
            f"grouped in; use a divisor of d_hidden={d_hidden}"
        )
    if d_hidden % experts:
        raise ValueError(
            f"d_hidden={d_hidden} is not a multiple of experts={experts}, required by "
            f"equal clusters; pad to {-(-d_hidden // experts) * experts}"
        )
    if initial is not None and not isinstance(initial, jax.core.Tracer):
        _check_balanced(np.asarray(initial), d_hidden, experts)
    return _clusters(w_up, experts, iterations, initial)


def _check_balanced(initial: np.ndarray, d_hidden: int, experts: int) -> None:
    """Raises ValueError where an assignment does not give every expert as many
    neurons."""
    way_out = "pass what balanced_clusters returned, or None"
    if not np.issubdtype(initial.dtype, np.integer) or initial.shape != (d_hidden,):
        raise ValueError(
            f"initial of shape {initial.shape} and dtype {initial.dtype} must have one "
            f"integer for each of {d_hidden} neurons; {way_out}"
        )
    outside = initial[(initial < 0) | (initial >= experts)]
    if outside.size:
        raise ValueError(
            f"initial has the expert {outside[0]}, which is not in [0, {experts - 1}]; "
            f"{way_out}"
        )
    sizes = np.bincount(initial, minlength=experts)
    if np.any(sizes != d_hidden // experts):
        raise ValueError(
            f"initial has cluster sizes {sizes.tolist()}, not {d_hidden // experts} "
            f"neurons in each of {experts} experts; {way_out}"
        )


@partial(jax.jit, static_argnames=("experts", "iterations"), inline=True)
def _clusters(
    w_up: Float[Array, "d_model d_hidden"],
    experts: int,
    iterations: int,
    initial: Int[Array, " d_hidden"] | None,
) -> tuple[Int[Array, " d_hidden"], Float[Array, "experts d_model"]]:
    """Computes `balanced_clusters` for arguments that it has checked."""
    w_up = w_up.astype(jnp.float32)
    norm = jnp.linalg.norm(w_up, axis=0, keepdims=True)
    usable = jnp.isfinite(norm) & (norm > 0)
    units = jnp.where(usable, w_up / jnp.where(usable, norm, 1.0), 0.0)

    if initial is None:
        initial = _place(_cosines(units, _spread_columns(units, experts)))
    assignment = initial.astype(jnp.int32)
    sums = _member_sums(units, assignment, experts)

    def unfinished(state):
        iteration, moved, *_ = state
        return moved & (iteration < iterations)

    def improve(state):
        iteration, _, assignment, sums, best_objective, best, best_sums = state
        placed = _place(_cosines(units, _unit_rows(sums)))
        moved = jnp.any(placed != assignment)
        sums = _member_sums(units, placed, experts)
        objective = _objective(sums)
        better = objective > best_objective
        return (
            iteration + 1,
            moved,
            placed,
            sums,
            jnp.where(better, objective, best_objective),
            jnp.where(better, placed, best),
            jnp.where(better, sums, best_sums),
        )

    start = (0, True, assignment, sums, _objective(sums), assignment, sums)
    *_, best, best_sums = lax.while_loop(unfinished, improve, start)
    return best, _unit_rows(best_sums)


def contiguous_order(
    assignment: Int[Array, " d_hidden"], experts: int
) -> Int[Array, " d_hidden"]:
    """Returns the indices of the neurons cluster by cluster, int32, in their old order
    inside a cluster.

    Permuting columns and rows alike, `w_up[:, order]` and `w_down[order, :]`, leaves
    the FFN's function unchanged. Expert e then has the neurons from e F / E.

    Raises:
      ValueError: `experts` is below 1, or the number of neurons no multiple of it.
    """
    if experts < 1 or assignment.shape[0] % experts:
        raise ValueError(
            f"assignment has {assignment.shape[0]} neurons, not a multiple of "
            f"experts={experts}; use balanced_clusters"
        )
    return jnp.argsort(assignment, stable=True).astype(jnp.int32)


def _cosines(units, centres):
    """Returns the cosines (F, E) of unit columns (d, F) and centres (E, d)."""
    return jnp.einsum("df,ed->fe", units, centres, precision=lax.Precision.HIGHEST)


def _member_sums(units, assignment, experts: int):
    """Returns the sum of each cluster's unit columns, (E, d)."""
    members = jax.nn.one_hot(assignment, experts, dtype=units.dtype)
    return jnp.einsum("df,fe->ed", units, members, precision=lax.Precision.HIGHEST)


def _objective(sums):
    # The cosines of the members with their own centre add up to the norm of their sum.
    return jnp.sum(jnp.linalg.norm(sums, axis=1))


def _unit_rows(sums):
    norm = jnp.linalg.norm(sums, axis=1, keepdims=True)
    return sums / jnp.where(norm == 0, 1.0, norm)


def _spread_columns(units, experts: int):
    """Returns E columns that are far from each other, (E, d), starting far from the
    mean."""
    mean = jnp.mean(units, axis=1)
    likeness = jnp.einsum("df,d->f", units, mean, precision=lax.Precision.HIGHEST)
    zero = jnp.all(units == 0, axis=0)
    chosen = []
    for _ in range(experts):
        column = units[:, jnp.argmin(jnp.where(zero, jnp.inf, likeness))]
        cosine = jnp.einsum("df,d->f", units, column, precision=lax.Precision.HIGHEST)
        likeness = jnp.maximum(likeness, cosine) if chosen else cosine
        chosen.append(column)
    return jnp.stack(chosen)


def _place(cosines):
    """Returns a balanced assignment of neurons to experts by deferred acceptance, (F,)
    int32."""
    d_hidden, experts = cosines.shape
    capacity = d_hidden // experts
    preference = jnp.argsort(-cosines, axis=1, stable=True).astype(jnp.int32)
    every_expert = jnp.arange(experts)

    def unplaced(state):
        return jnp.any(state[0] < 0)

    def propose(state):
        held_by, tried = state
        # The experts together have room for all, so nobody runs out of experts.
        next_choice = jnp.take_along_axis(preference, tried[:, None], axis=1)[:, 0]
        asked = jnp.where(held_by < 0, next_choice, held_by)
        candidate = asked[:, None] == every_expert[None, :]
        order = jnp.argsort(
            jnp.where(candidate, -cosines, jnp.inf), axis=0, stable=True
        )
        kept = jnp.zeros((d_hidden, experts), bool)
        kept = kept.at[order[:capacity], every_expert[None, :]].set(True)
        accepted = jnp.any(kept & candidate, axis=1)
        return jnp.where(accepted, asked, -1), tried + ~accepted

    start = (jnp.full(d_hidden, -1, jnp.int32), jnp.zeros(d_hidden, jnp.int32))
    held_by, _ = lax.while_loop(unplaced, propose, start)
    return held_by
