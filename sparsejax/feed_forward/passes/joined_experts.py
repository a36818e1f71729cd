"""The passes of an FFN by expert where a token has one row for all of its experts: a
row of A and of the gradients before the activation has the neurons of g experts side by
side, g F / E of them.

The tokens are sorted by the set of their experts (`expert_sets`), so that each is
copied once and has one row of Y and of dX, and GEMMs 2 and 4 sum over its experts
themselves. Nothing is dropped inside the experts. All GEMMs run on a set of kernels,
but for those into the hidden layer where the experts are known only after them.
"""

from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from sparsejax.dtypes import accumulation_dtype
from sparsejax.feed_forward.activation import Hidden
from sparsejax.feed_forward.operands.weights import FFNWeights, ReadWeights
from sparsejax.feed_forward.plan import FFNPlan
from sparsejax.ops.expert_rows import gather_rows, sets_looked_up
from sparsejax.ops.kernels.base import ExpertRows, KernelSet
from sparsejax.routing.dispatch import combine_rows
from sparsejax.routing.expert_sets import RowsOfSets, rows_of_sets


class JoinedRows(NamedTuple):
    """All that the backward needs besides X and the weights."""

    kept: Hidden
    """A = relu(Y1)^2 of the rows, (rows, g d_hidden / E); of a gated FFN what its
    activation keeps of them, two such arrays."""
    rows: RowsOfSets
    """The rows, and which experts they have."""


def forward_of_sets(
    plan: FFNPlan, w: ReadWeights, products: Hidden, expert_index: jax.Array
) -> tuple[jax.Array, JoinedRows]:
    """Returns Y (tokens, d_model), and what the backward needs, from the products of X
    with all neurons, (tokens, d_hidden) each, and the experts of each token, (tokens,
    g)."""
    rows = _rows_of_sets(plan, expert_index)
    of_rows = tuple(_own_neurons(product, rows) for product in products)
    kept = plan.activation.keep(of_rows)
    a = plan.activation.apply(kept)
    return _down_of_sets(plan, w, a, kept, rows)


def forward_by_sets(
    plan: FFNPlan, x: jax.Array, w: ReadWeights, expert_index: jax.Array
) -> tuple[jax.Array, JoinedRows]:
    """Returns what `forward_of_sets` does where the experts of each token are known
    before the GEMMs into the hidden layer, which compute those experts' neurons
    alone."""
    rows = _rows_of_sets(plan, expert_index)
    kernels, found = plan.kernels, sets_looked_up(rows)
    assert kernels is not None
    x_rows = gather_rows(kernels, x, rows.of_sets)
    # (rows, g F / E) = (rows, d) @ (d, E, F / E)
    how = {"rows": found, "expert_axis": 1, "k_major": False}
    if plan.gate is None:
        a = kernels.dense_rows_squared_relu(x_rows, _into_hidden(w.up, rows), **how)
        return _down_of_sets(plan, w, a, (a,), rows)
    assert w.gate is not None
    kept = plan.activation.keep(
        tuple(
            kernels.dense_rows_matmul(x_rows, _into_hidden(weight, rows), **how)
            for weight in (w.gate, w.up)
        )
    )
    return _down_of_sets(plan, w, plan.activation.apply(kept), kept, rows)


def _rows_of_sets(plan: FFNPlan, expert_index: jax.Array) -> RowsOfSets:
    assert plan.sparsity.experts is not None and plan.row_tile is not None
    return rows_of_sets(expert_index, plan.sparsity.experts, plan.row_tile)


def _down_of_sets(
    plan: FFNPlan, w: ReadWeights, a: jax.Array, kept: Hidden, rows: RowsOfSets
) -> tuple[jax.Array, JoinedRows]:
    """Returns Y (tokens, d_model) from A of the rows, and what the backward needs;
    `kept` is what the activation keeps of the rows."""
    assert plan.kernels is not None
    # (rows, d) = (rows, g F / E) @ (E, F / E, d)
    y = plan.kernels.dense_rows_matmul(
        a, _down(w, rows), sets_looked_up(rows), expert_axis=0, k_major=False
    )
    # One row of a token, which XLA reads where it adds it to the residual stream.
    kept = (a,) if plan.gate is None else kept
    return combine_rows(y, rows.of_sets), JoinedRows(kept, rows)


def backward_of_sets(
    plan: FFNPlan, x: jax.Array, kept: JoinedRows, w: ReadWeights, dy: jax.Array
) -> tuple[jax.Array, FFNWeights]:
    """Returns dX (tokens, d_model), and the gradients of the weights in float32."""
    kernels, rows = plan.kernels, kept.rows
    assert kernels is not None
    found = sets_looked_up(rows)
    x_rows, dy_rows = (gather_rows(kernels, of, rows.of_sets) for of in (x, dy))
    # (rows, g F / E) = (rows, d) @ (E, F / E, d)^T
    of_down = {"rows": found, "expert_axis": 0, "k_major": True}
    into: Hidden
    if plan.gate is None:
        (a,) = kept.kept
        into = (
            kernels.dense_rows_activation_gradient(
                dy_rows, _down(w, rows), a, **of_down
            ),
        )
    else:
        da = kernels.dense_rows_matmul(dy_rows, _down(w, rows), **of_down)
        a, into = plan.activation.with_gradients(da, kept.kept)

    def weight_gradient(
        lhs: jax.Array, rhs: jax.Array, joined: Literal["lhs", "rhs"]
    ) -> jax.Array:
        gradient = kernels.joined_weight_gradient(
            lhs, rhs, found, joined=joined, expert_axis=int(joined == "rhs")
        )
        return gradient.reshape(w.up.shape if joined == "rhs" else w.down.shape)

    # Of each expert (d, rows of e) @ (rows of e, F / E), and (F / E, rows of e) @ (rows
    # of e, d)
    *gate, up = (weight_gradient(x_rows, of, "rhs") for of in into)
    down = weight_gradient(a, dy_rows, "lhs")
    dx = combine_rows(_input_gradient(kernels, w, into, found), rows.of_sets)
    return dx, FFNWeights(up, down, gate[0] if gate else None)


def _input_gradient(
    kernels: KernelSet, w: ReadWeights, into: Hidden, rows: ExpertRows
) -> jax.Array:
    """Returns dX of the rows, (rows, d_model). In a gated FFN it is the sum of two
    products in float32."""
    *gate, up = into
    # (rows, d) = (rows, g F / E) @ (d, E, F / E)^T
    product = partial(kernels.dense_rows_matmul, rows=rows, expert_axis=1, k_major=True)
    if not gate:
        return product(up, _into_hidden(w.up, rows))
    assert w.gate is not None
    dtype = accumulation_dtype(up.dtype)
    of_gate = product(gate[0], _into_hidden(w.gate, rows), out_dtype=dtype)
    of_up = product(up, _into_hidden(w.up, rows), out_dtype=dtype)
    return (of_gate + of_up).astype(up.dtype)


def _own_neurons(hidden: jax.Array, rows: RowsOfSets) -> jax.Array:
    """Returns (rows, g F / E) from (T, F): the token of each row, at the neurons of its
    experts, and zeros in padding rows."""
    by_expert = hidden.reshape(hidden.shape[0], rows.experts, -1)
    experts = jnp.repeat(rows.tile_experts, rows.of_sets.v, axis=0)
    own = by_expert[rows.of_sets.row_token[:, None], experts]
    own = jnp.where(rows.of_sets.row_valid[:, None, None], own, 0)
    return own.reshape(own.shape[0], -1)


def _into_hidden(w: jax.Array, rows: ExpertRows | RowsOfSets) -> jax.Array:
    """Returns a weight into the hidden layer with the axis of its neurons split by
    expert, (d, E, F / E)."""
    return w.reshape(w.shape[0], rows.experts, -1)


def _down(w: ReadWeights, rows: RowsOfSets) -> jax.Array:
    """Returns W2 with the axis of its neurons split by expert, (E, F / E, d)."""
    return w.down.reshape(rows.experts, -1, w.down.shape[1])
