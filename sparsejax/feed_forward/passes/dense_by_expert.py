"""The passes of an FFN by expert on a set of kernels where nothing is dropped inside
the experts: A and dY1 are dense rows, which GEMMs 1 and 3 write in their epilogues."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from sparsejax.feed_forward.operands.weights import FFNWeights, ReadWeights
from sparsejax.feed_forward.passes.expert_rows import (
    all_neurons,
    by_neurons_of_experts,
    grouped,
    hidden_gradient,
    of_used_tiles,
    own_neurons,
    rows_into_hidden,
    weight_gradients_by_expert,
)
from sparsejax.feed_forward.passes.masked import weight_gradients
from sparsejax.feed_forward.plan import FFNPlan
from sparsejax.ops.expert_rows import combine_rows, looked_up
from sparsejax.routing.dispatch import Dispatch


class DenseRows(NamedTuple):
    """A = relu(Y1)^2 of the rows: all that the backward needs of Y1, with the rows'
    dispatch, and X where `x_rows` is None."""

    a: jax.Array
    """A, (rows, d_hidden / E); what it holds beyond the used tiles is not defined."""
    routed: Dispatch
    x_rows: jax.Array | None
    """The rows of X as GEMM 1 read them, (rows, d_model); None unless
    `FFNPlan.keeps_rows_of_x`."""


def rows_of_a(
    plan: FFNPlan, w: ReadWeights, x_rows: jax.Array, routed: Dispatch
) -> jax.Array:
    """Returns A of the rows, (rows, d_hidden / E), from those of X."""
    if not plan.up_writes_rows_of_a:
        y_rows = rows_into_hidden(plan, plan.up, x_rows, w.up, w.packed_up, routed)
        return plan.activation.apply(plan.activation.keep((y_rows,)))
    assert plan.kernels is not None
    # (rows, F / E) = (rows, d) @ (d, E, F / E)
    w_up = by_neurons_of_experts(w.up, routed, axis=1)
    return plan.kernels.dense_rows_squared_relu(
        x_rows, w_up, looked_up(routed), expert_axis=1, k_major=False
    )


def down_of_dense_rows(
    plan: FFNPlan,
    w: ReadWeights,
    a: jax.Array,
    routed: Dispatch,
    kept_x: jax.Array | None,
) -> tuple[jax.Array, DenseRows]:
    """Computes the forward from A of the rows on. `kept_x` becomes
    `DenseRows.x_rows`."""
    # (rows, d) = (rows, F / E) @ (E, F / E, d)
    w_down = by_neurons_of_experts(w.down, routed, axis=0)
    y = grouped(plan, plan.down, a, w_down, routed, expert_axis=0)
    return combine_rows(plan.kernels, y, routed), DenseRows(a, routed, kept_x)


def backward_of_dense_rows(
    plan: FFNPlan,
    x_read: jax.Array,
    kept: DenseRows,
    w: ReadWeights,
    dy: jax.Array,
    dy_rows: jax.Array,
    key: jax.Array | None,
) -> tuple[jax.Array, FFNWeights]:
    """Computes the backward where the residuals are A of dense rows. `x_read` is X as
    GEMM 5 reads it."""
    routed, a = kept.routed, kept.a
    dy_up = _hidden_gradient(plan, w, a, dy, dy_rows, routed)
    # (rows, d) = (rows, F / E) @ (d, E, F / E)^T
    w_up = by_neurons_of_experts(w.up, routed, axis=1)
    dx = grouped(
        plan, plan.d_input, dy_up, w_up, routed, expert_axis=1, transposed=True
    )
    dx = combine_rows(plan.kernels, dx, routed)
    if not plan.sums_over_rows:
        into, a = (all_neurons(rows, routed) for rows in (dy_up, a))
        return dx, weight_gradients(plan, x_read, [into], a, dy, key)
    if plan.sparsity.token_sparsity is not None:
        # XLA counts and selects in all rows.
        dy_up, a = (of_used_tiles(rows, routed) for rows in (dy_up, a))
    return dx, weight_gradients_by_expert(
        plan, x_read, [dy_up], a, dy_rows, key, routed
    )


def _hidden_gradient(
    plan: FFNPlan,
    w: ReadWeights,
    a: jax.Array,
    dy: jax.Array,
    dy_rows: jax.Array,
    routed: Dispatch,
) -> jax.Array:
    """Returns dY1 = dA 2 sqrt(A) of the rows, (rows, d_hidden / E)."""
    if plan.d_hidden_writes_rows_of_dy_up:
        assert plan.kernels is not None
        # (rows, F / E) = (rows, d) @ (E, F / E, d)^T
        w_down = by_neurons_of_experts(w.down, routed, axis=0)
        return plan.kernels.dense_rows_activation_gradient(
            dy_rows, w_down, a, looked_up(routed), expert_axis=0, k_major=True
        )
    da = hidden_gradient(plan, w, dy, dy_rows, routed)
    da_rows = da if plan.sparsity.da_by_expert else own_neurons(da, routed)
    return da_rows * 2 * jnp.sqrt(a)
