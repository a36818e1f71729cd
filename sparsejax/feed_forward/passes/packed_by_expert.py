"""The passes of an FFN by expert on a set of kernels: A and dY1 of the rows are packed,
2:4 inside their expert's neurons."""

from functools import partial

import jax

from sparsejax.feed_forward.operands.packed_rows import (
    PackedRows,
    RowGroups,
    row_groups,
    weight_gradient_of_experts,
)
from sparsejax.feed_forward.operands.weights import FFNWeights, ReadWeights
from sparsejax.feed_forward.passes.expert_rows import (
    all_neurons,
    by_neurons_of_experts,
    hidden_gradient,
    of_used_tiles,
    packed_for_kernels,
    weight_gradients_by_expert,
)
from sparsejax.feed_forward.passes.masked import weight_gradients
from sparsejax.feed_forward.plan import FFNPlan
from sparsejax.ops.expert_rows import combine_rows, looked_up
from sparsejax.ops.kernels.base import OverTokens
from sparsejax.sparsity.compressed import decompress
from sparsejax.sparsity.packed import Packed, unpack


def down_of_packed(
    plan: FFNPlan, w: ReadWeights, packed: PackedRows
) -> tuple[jax.Array, PackedRows]:
    """Computes `forward` from A on, with A packed."""
    routed, kernels = packed.routed, plan.kernels
    assert kernels is not None
    # (rows, d) = (rows, F / E) @ (E, F / E, d)
    w_down = by_neurons_of_experts(w.down, routed, axis=0)
    rows = looked_up(routed)
    y = kernels.expert_rows_matmul(packed.a, w_down, rows, b_k_major=False)
    return combine_rows(kernels, y, routed), packed


def backward_of_packed(
    plan: FFNPlan,
    x_read: jax.Array,
    kept: PackedRows,
    w: ReadWeights,
    dy: jax.Array,
    dy_rows: jax.Array,
    key: jax.Array | None,
) -> tuple[jax.Array, FFNWeights]:
    """Computes `backward` where A and dY1 are packed; both are unpacked only where
    GEMMs 5 and 6 are dense. `x_read` is X as GEMM 5 reads it."""
    routed, groups, kernels = kept.routed, None, plan.kernels
    assert kernels is not None
    rows = looked_up(routed)
    if plan.over_tokens:
        groups = row_groups(plan.sparsity, routed.token_rows.shape[0], kept)
    dy_up, over_tokens = _packed_gradient(plan, groups, w, dy, dy_rows, kept)
    if groups is not None and over_tokens is not None:
        gradient = partial(weight_gradient_of_experts, kernels, groups, rows=rows)
        (dy_up_over_tokens,) = over_tokens.gradients
        dw = FFNWeights(
            up=gradient(dy_up_over_tokens, x_read, transpose_out=True),
            down=gradient(over_tokens.a, dy_rows, transpose_out=False),
        )
    else:
        # What the tiles without rows hold is not used, but it must be a number.
        dy_up_rows, a_rows = (
            of_used_tiles(decompress(unpack(packed)), routed)
            for packed in (dy_up, kept.a)
        )
        if plan.sums_over_rows:
            dw = weight_gradients_by_expert(
                plan, x_read, [dy_up_rows], a_rows, dy_rows, key, routed
            )
        else:
            dense_dy_up, a = (all_neurons(r, routed) for r in (dy_up_rows, a_rows))
            dw = weight_gradients(plan, x_read, [dense_dy_up], a, dy, key)
    # (rows, d) = (rows, F / E) @ (F / E, E, d), W1 as it is stored
    w_up = by_neurons_of_experts(w.up, routed, axis=1)
    dx = kernels.expert_rows_matmul(dy_up, w_up, rows, b_k_major=True)
    return combine_rows(kernels, dx, routed), dw


def _packed_gradient(
    plan: FFNPlan,
    groups: RowGroups | None,
    w: ReadWeights,
    dy: jax.Array,
    dy_rows: jax.Array,
    kept: PackedRows,
) -> tuple[Packed, OverTokens | None]:
    """Returns dY1 packed along the features and, where there are groups of rows, A and
    dY1 packed along the rows; else None."""
    kernels, rows = plan.kernels, looked_up(kept.routed)
    assert kernels is not None
    if plan.d_hidden_writes_dy_up:
        weight = packed_for_kernels(plan.d_hidden, w.packed_down)
        assert weight is not None
        # (rows, F / E) = (rows, d) @ (E, d, F / E)
        dy_up = kernels.matmul_activation_gradient(dy_rows, weight, kept.a, rows)
        if groups is None:
            return dy_up, None
        return dy_up, kernels.over_tokens(
            kept.a, dy_up, rows, groups.residual, by_segments=False
        )
    da = hidden_gradient(plan, w, dy, dy_rows, kept.routed)
    by_token = not plan.sparsity.da_by_expert
    if groups is None:
        return kernels.activation_gradient(da, kept.a, rows, by_token=by_token), None
    return kernels.activation_gradient_over_tokens(
        da, kept.a, rows, groups.residual, by_token=by_token, by_segments=False
    )
