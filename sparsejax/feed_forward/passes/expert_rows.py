"""The rows of experts, as the passes of an FFN by expert read and multiply them.

A row is one (token, expert) pair of a `dispatch.Dispatch` and holds the F / E neurons
of its expert.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from sparsejax.feed_forward.layout import FFNLayout, own_experts
from sparsejax.feed_forward.operands.token_sparsity import (
    densest_features,
    fixed_token_order,
    sparsify_tokens,
)
from sparsejax.feed_forward.operands.weights import (
    FFNWeights,
    ReadWeights,
    as_dense,
    multiply,
    multiply_by_weight,
)
from sparsejax.feed_forward.plan import FFNPlan
from sparsejax.ops.backend import Decision
from sparsejax.ops.expert_rows import combine_rows, looked_up
from sparsejax.ops.grouped_matmul import grouped_matmul, grouped_outer
from sparsejax.ops.sparse_matmul import as_packed
from sparsejax.routing.dispatch import Dispatch, dispatch, expert_of_row, used_tiles
from sparsejax.sparsity.compressed import Compressed
from sparsejax.sparsity.packed import Packed


def rows_of_tokens(
    plan: FFNPlan, expert_index: jax.Array | None, layout: FFNLayout | None
) -> Dispatch:
    """Returns the rows of this device: a row for each of its tokens and each of its
    experts that the token chose."""
    sparsity = plan.sparsity
    assert sparsity.experts and expert_index is not None and plan.row_tile is not None
    order = None
    if sparsity.token_sparsity and sparsity.permute_tokens:
        # inside an expert the tokens follow the fixed order: no second permutation
        order = fixed_token_order(expert_index.shape[0])
        order = jnp.asarray(order[order >= 0])
    first, experts = own_experts(layout, sparsity.experts)
    return dispatch(expert_index - first, experts, plan.row_tile, token_order=order)


# GEMMs of rows.


def grouped(
    plan: FFNPlan,
    gemm: Decision,
    rows: jax.Array,
    w: jax.Array,
    routed: Dispatch,
    *,
    expert_axis: int,
    transposed: bool = False,
    out_dtype: jnp.dtype | None = None,
) -> jax.Array:
    """Returns each row times the matrix of its expert. What a kernel leaves in the rows
    beyond the used tiles is not defined.

    Args:
      w: the weight of all experts as it is stored, `by_neurons_of_experts`.
      expert_axis: the axis of `w` that counts the experts.
      transposed: whether the matrices are transposed, as in GEMMs 3 and 4.
      out_dtype: the dtype of the result; None for that of the rows.
    """
    if gemm.on_kernels:
        assert plan.kernels is not None
        return plan.kernels.dense_rows_matmul(
            rows,
            w,
            looked_up(routed),
            expert_axis=expert_axis,
            k_major=transposed,
            out_dtype=out_dtype,
        )
    weights = jnp.moveaxis(w, expert_axis, 0)
    weights = weights.swapaxes(1, 2) if transposed else weights
    tiles = routed.tile_expert, used_tiles(routed)
    return grouped_matmul(
        rows, weights, *tiles, out_dtype=out_dtype, backend=gemm.backend
    )


def rows_into_hidden(
    plan: FFNPlan,
    gemm: Decision,
    x_rows: jax.Array,
    w: jax.Array,
    packed: Compressed | Packed | None,
    routed: Dispatch,
) -> jax.Array:
    """Returns each row of X times its expert's columns of a weight into the hidden
    layer, (rows, d_hidden / E)."""
    # (rows, F / E) = (rows, d) @ (d, E, F / E)
    weight = packed_for_kernels(gemm, packed)
    if weight is not None:
        assert plan.kernels is not None
        product = plan.kernels.rows_by_expert_weight(x_rows, weight, looked_up(routed))
    else:
        columns = by_neurons_of_experts(as_dense(w, packed, up=True), routed, axis=1)
        product = grouped(plan, gemm, x_rows, columns, routed, expert_axis=1)
    return _defined(plan, gemm, product, routed)


def hidden_gradient(
    plan: FFNPlan,
    w: ReadWeights,
    dy: jax.Array,
    dy_rows: jax.Array,
    routed: Dispatch,
) -> jax.Array:
    """Returns dA, (tokens, d_hidden), or where GEMM 3 is by expert of the rows alone,
    (rows, d_hidden / E)."""
    gemm = plan.d_hidden
    if gemm.spec.experts is None:
        # (T, F) = (T, d) @ (d, F)
        return multiply_by_weight(gemm, dy, w.down.T, w.packed_down)
    # (rows, F / E) = (rows, d) @ (E, F / E, d)^T
    weight = packed_for_kernels(gemm, w.packed_down)
    if weight is not None:
        assert plan.kernels is not None
        da = plan.kernels.rows_by_expert_weight(dy_rows, weight, looked_up(routed))
    else:
        w_down = as_dense(w.down, w.packed_down, up=False)
        w_down = by_neurons_of_experts(w_down, routed, axis=0)
        da = grouped(
            plan, gemm, dy_rows, w_down, routed, expert_axis=0, transposed=True
        )
    return _defined(plan, gemm, da, routed)


def from_hidden(
    plan: FFNPlan,
    gemm: Decision,
    rows: jax.Array,
    w: jax.Array,
    routed: Dispatch,
    *,
    transposed: bool = False,
    out_dtype: jnp.dtype | None = None,
) -> jax.Array:
    """Returns the product of each row (rows, d_hidden / E) with its expert's neurons of
    W2 (d_hidden, d), or where it is `transposed` of W1 (d, d_hidden): (rows, d). Where
    the GEMM is one of all neurons, the rows of each token come summed, (tokens, d)."""
    if gemm.spec.experts is None:
        # (T, d) = (T, F) @ (F, d)
        hidden = all_neurons(rows, routed)
        return multiply(gemm, hidden, w.T if transposed else w, out_dtype=out_dtype)
    # (rows, d) = (rows, F / E) @ (E, F / E, d), or (d, E, F / E)^T
    axis = int(transposed)
    return grouped(
        plan,
        gemm,
        rows,
        by_neurons_of_experts(w, routed, axis=axis),
        routed,
        expert_axis=axis,
        transposed=transposed,
        out_dtype=out_dtype,
    )


def into_tokens(
    plan: FFNPlan, gemm: Decision, product: jax.Array, routed: Dispatch
) -> jax.Array:
    """Returns what `from_hidden` has computed with the rows of each token summed,
    (tokens, d)."""
    if gemm.spec.experts is None:
        return product
    return combine_rows(plan.kernels, product, routed)


def _defined(
    plan: FFNPlan, gemm: Decision, rows: jax.Array, routed: Dispatch
) -> jax.Array:
    """Returns the result of a GEMM with all of its rows defined, where XLA reads it."""
    if gemm.on_kernels and not plan.packs_activations:
        return of_used_tiles(rows, routed)
    return rows


def weight_gradients_by_expert(
    plan: FFNPlan,
    x_rows: jax.Array,
    into_hidden: Sequence[jax.Array],
    a_rows: jax.Array,
    dy_rows: jax.Array,
    key: jax.Array | None,
    routed: Dispatch,
) -> FFNWeights:
    """Returns the gradients of the weights by GEMMs 5 and 6, each expert's columns
    summed over that expert's rows, 2:4 along the rows with `token_sparsity`. Padding
    rows are zero in A and in the gradients before the activation.

    Args:
      into_hidden: the gradients before the activation, (rows, d_hidden / E) each: dY1,
        or dG and dU of a gated FFN.
      a_rows: A of the rows, (rows, d_hidden / E).
      key: a random key where `token_sparsity` draws; else None.
    """
    sparsity = plan.sparsity
    if sparsity.token_sparsity is not None:
        expert = expert_of_row(routed)
        nonzeros = jax.ops.segment_sum(
            (a_rows != 0).astype(jnp.int32), expert, routed.experts
        )
        dense = densest_features(
            nonzeros, sparsity.dense_features, routed.token_rows.shape[0]
        )[expert]
        matrices = [*into_hidden, a_rows]
        keys = [None] * len(matrices)
        if key is not None:
            keys = list(jax.random.split(key, len(matrices)))
        *into_hidden, a_rows = (
            sparsify_tokens(matrix, dense, sparsity.token_sparsity, key)
            for matrix, key in zip(matrices, keys, strict=True)
        )
    tiles = (routed.tile_expert, used_tiles(routed), routed.experts)
    into = [gemm for gemm in (plan.d_gate, plan.d_up) if gemm is not None]
    # (d, E, F / E): of each expert (d, rows of e) @ (rows of e, F / E)
    *gate, up = (
        grouped_outer(x_rows, g, *tiles, expert_axis=1, backend=gemm.backend).reshape(
            x_rows.shape[1], -1
        )
        for gemm, g in zip(into, into_hidden, strict=True)
    )
    # (E, F / E, d): of each expert (F / E, rows of e) @ (rows of e, d)
    down = grouped_outer(a_rows, dy_rows, *tiles, backend=plan.d_down.backend)
    return FFNWeights(
        up=up, down=down.reshape(-1, down.shape[2]), gate=gate[0] if gate else None
    )


# Weights of experts.


def packed_for_kernels(
    gemm: Decision, weight: Compressed | Packed | None
) -> Packed | None:
    """Returns the packed weight for a kernel that multiplies each row by its expert's
    matrix, or None where no kernel runs the GEMM of a 2:4 weight."""
    kernels = gemm.kernels
    if kernels is None or weight is None:
        return None
    return as_packed(weight, kernels)


def by_neurons_of_experts(w: jax.Array, routed: Dispatch, *, axis: int) -> jax.Array:
    """Returns a weight with the axis of its neurons split by expert: (d, E, F / E) of
    W1, axis 1, and (E, F / E, d) of W2, axis 0."""
    split = routed.experts, w.shape[axis] // routed.experts
    return w.reshape(*w.shape[:axis], *split, *w.shape[axis + 1 :])


# From all neurons of a token to its rows, and back.


def own_neurons(hidden: jax.Array, routed: Dispatch) -> jax.Array:
    """Returns (rows, F / E) from (T, F): the token of each row, at the neurons of the
    row's expert."""
    by_expert = hidden.reshape(hidden.shape[0], routed.experts, -1)
    own = by_expert[routed.row_token, expert_of_row(routed)]
    return jnp.where(routed.row_valid[:, None], own, 0)


def all_neurons(rows: jax.Array, routed: Dispatch) -> jax.Array:
    """Returns (T, F) from (rows, F / E), zero outside a token's experts."""
    tokens = routed.token_rows.shape[0]
    out = jnp.zeros((tokens, routed.experts, rows.shape[1]), rows.dtype)
    # each (token, expert) pair occurs once: padding rows, which do not, are dropped
    token = jnp.where(routed.row_valid, routed.row_token, tokens)
    out = out.at[token, expert_of_row(routed)].set(rows, mode="drop")
    return out.reshape(tokens, -1)


def of_used_tiles(rows: jax.Array, routed: Dispatch) -> jax.Array:
    """Returns the rows that a kernel has written, with zeros in place of those beyond
    the used tiles, which it has not."""
    written = jnp.arange(rows.shape[0]) < routed.v * used_tiles(routed)
    return jnp.where(written[:, None], rows, 0)
