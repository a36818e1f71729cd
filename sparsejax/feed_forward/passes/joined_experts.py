"""The passes of an FFN by expert where a token has one row for all of its experts: a
row of A and dY1 has the neurons of g experts side by side, g F / E of them.

The tokens are sorted by the set of their experts (`expert_sets`), so that each is
copied once and has one row of Y and of dX, and GEMMs 2 and 4 sum over its experts
themselves. Nothing is dropped inside the experts, and all GEMMs but the first run on a
set of kernels.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from sparsejax.feed_forward.activation import Hidden
from sparsejax.feed_forward.operands.weights import FFNWeights, ReadWeights
from sparsejax.feed_forward.plan import FFNPlan
from sparsejax.ops.expert_rows import gather_rows, sets_looked_up
from sparsejax.routing.dispatch import combine_rows
from sparsejax.routing.expert_sets import RowsOfSets, rows_of_sets


class JoinedRows(NamedTuple):
    """A of the rows, (rows, g d_hidden / E), and what rows they are: all that the
    backward needs besides X and the weights."""

    a: jax.Array
    rows: RowsOfSets


def forward_of_sets(
    plan: FFNPlan, w: ReadWeights, products: Hidden, expert_index: jax.Array
) -> tuple[jax.Array, JoinedRows]:
    """Returns Y (tokens, d_model), and what the backward needs, from the product Y1
    with all neurons and the experts of each token, (tokens, g)."""
    assert plan.kernels is not None and plan.row_tile is not None
    assert plan.sparsity.experts is not None
    rows = rows_of_sets(expert_index, plan.sparsity.experts, plan.row_tile)
    of_rows = tuple(_own_neurons(product, rows) for product in products)
    a = plan.activation.apply(plan.activation.keep(of_rows))
    # (rows, d) = (rows, g F / E) @ (E, F / E, d)
    y = plan.kernels.dense_rows_matmul(
        a, _down(w, rows), sets_looked_up(rows), expert_axis=0, k_major=False
    )
    # One row of a token, which XLA reads where it adds it to the residual stream.
    return combine_rows(y, rows.of_sets), JoinedRows(a, rows)


def backward_of_sets(
    plan: FFNPlan, x: jax.Array, kept: JoinedRows, w: ReadWeights, dy: jax.Array
) -> tuple[jax.Array, FFNWeights]:
    """Returns dX (tokens, d_model), and the gradients of the weights in float32."""
    kernels, (a, rows) = plan.kernels, kept
    assert kernels is not None and plan.row_tile is not None
    found = sets_looked_up(rows)
    x_rows, dy_rows = (gather_rows(kernels, of, rows.of_sets) for of in (x, dy))
    # (rows, g F / E) = (rows, d) @ (E, F / E, d)^T
    dy_up = kernels.dense_rows_activation_gradient(
        dy_rows, _down(w, rows), a, found, expert_axis=0, k_major=True
    )
    # (rows, d) = (rows, g F / E) @ (d, E, F / E)^T
    dx = kernels.dense_rows_matmul(
        dy_up, _up(w, rows), found, expert_axis=1, k_major=True
    )
    # (d, E, F / E): of each expert (d, rows of e) @ (rows of e, F / E)
    up = kernels.joined_weight_gradient(
        x_rows,
        dy_up,
        found,
        group_tile=plan.row_tile,
        joined="rhs",
        expert_axis=1,
    )
    # (E, F / E, d): of each expert (F / E, rows of e) @ (rows of e, d)
    down = kernels.joined_weight_gradient(
        a, dy_rows, found, group_tile=plan.row_tile, joined="lhs", expert_axis=0
    )
    weights = FFNWeights(up.reshape(w.up.shape), down.reshape(w.down.shape))
    return combine_rows(dx, rows.of_sets), weights


def _own_neurons(hidden: jax.Array, rows: RowsOfSets) -> jax.Array:
    """Returns (rows, g F / E) from (T, F): the token of each row, at the neurons of its
    experts, and zeros in padding rows."""
    by_expert = hidden.reshape(hidden.shape[0], rows.experts, -1)
    experts = jnp.repeat(rows.tile_experts, rows.of_sets.v, axis=0)
    own = by_expert[rows.of_sets.row_token[:, None], experts]
    own = jnp.where(rows.of_sets.row_valid[:, None, None], own, 0)
    return own.reshape(own.shape[0], -1)


def _up(w: ReadWeights, rows: RowsOfSets) -> jax.Array:
    """Returns W1 with the axis of its neurons split by expert, (d, E, F / E)."""
    return w.up.reshape(w.up.shape[0], rows.experts, -1)


def _down(w: ReadWeights, rows: RowsOfSets) -> jax.Array:
    """Returns W2 with the axis of its neurons split by expert, (E, F / E, d)."""
    return w.down.reshape(rows.experts, -1, w.down.shape[1])
