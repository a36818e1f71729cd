"""The FFN where a token uses the neurons of its experts only: A is V:N:M.

The clusters of neurons (experts) lie contiguously in F, so V:2:M with M = 4E is a
grouped GEMM over experts whose sparse operand is 2:4. Tokens are sorted by expert and
padded to tiles of V rows; a row is one (token, expert) pair and holds F / E neurons.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from sparsejax.feed_forward.frame import Execution, Static
from sparsejax.feed_forward.layout import FFNLayout, gather_experts, own_experts
from sparsejax.feed_forward.masked import keep_once, weight_gradients
from sparsejax.feed_forward.operands.packed_rows import (
    PackedRows,
    RowGroups,
    counted,
    row_groups,
    weight_gradient_of_experts,
)
from sparsejax.feed_forward.operands.token_sparsity import (
    densest_features,
    fixed_token_order,
    sparsify_tokens,
)
from sparsejax.feed_forward.operands.weights import (
    FFNWeights,
    ReadWeights,
    as_packed,
    multiply_by_weight,
)
from sparsejax.feed_forward.plan import FFNPlan
from sparsejax.feed_forward.spec import FFNSparsity
from sparsejax.ops.backend import Decision
from sparsejax.ops.expert_rows import combine_rows, gather_rows, looked_up, used_tiles
from sparsejax.ops.grouped_matmul import grouped_matmul, grouped_outer
from sparsejax.ops.kernels.base import OverTokens
from sparsejax.routing.dispatch import Dispatch, dispatch, expert_of_row
from sparsejax.routing.routers import NO_STATE, best_experts
from sparsejax.sparsity.compressed import Compressed, decompress
from sparsejax.sparsity.masks import magnitude_mask, nm_mask
from sparsejax.sparsity.packed import Packed, unpack
from sparsejax.sparsity.patterns import NM

IN_CLUSTER = NM(2, 4)
"""The pattern of a row of A inside its expert's neurons: 2:4."""


class Residuals(NamedTuple):
    """The arrays that the backward needs besides the weights and, where `x_rows` is
    None, besides X."""

    hidden_rows: jax.Array
    """The values of relu(Y1) in each row, (rows, d_hidden / E); masked where the
    backward re-uses the mask."""
    hidden: jax.Array | None
    """The values of relu(Y1) for every neuron, (tokens, d_hidden); None unless the
    weight gradients are dense and the forward's mask is not re-used."""
    routed: Dispatch
    x_rows: jax.Array | None
    """The rows of X as GEMM 1 read them, (rows, d_model); None unless
    `FFNPlan.keeps_rows_of_x`."""


def forward(
    static: Static, x: jax.Array, w: ReadWeights, expert_index: jax.Array | None
) -> tuple[jax.Array, Residuals | PackedRows]:
    """Returns Y (tokens, d_model), and the residuals that the backward needs."""
    plan, layout = static.plan, static.layout
    sparsity = plan.sparsity
    if sparsity.skip_blocks:
        return _forward_of_rows(plan, layout, x, w, expert_index)
    # (T, F) = (T, d) @ (d, F)
    y_up = multiply_by_weight(plan.up, x, w.up, w.packed_up)
    if not sparsity.router.before_up:
        assert sparsity.experts is not None
        _, experts = own_experts(layout, sparsity.experts)
        scores = sparsity.router.scores(y_up, experts, NO_STATE)
        scores = gather_experts(layout, scores)
        expert_index = best_experts(scores, sparsity.experts_per_token)
    routed = _dispatch(plan, expert_index, layout)
    if plan.packs_activations:
        assert plan.kernels is not None
        rows = looked_up(routed)
        kept = plan.kernels.keep_features(y_up, rows, by_token=True)
        return _down_of_packed(plan, w, counted(routed, kept, None))
    hidden = None
    if not sparsity.mask_reuse and not _sums_over_rows(sparsity):
        hidden = jax.nn.relu(y_up)
    y_rows = _own_neurons(y_up, routed)
    return _down_of_masked(plan, w, y_rows, routed, hidden, None)


def _forward_of_rows(
    plan: FFNPlan,
    layout: FFNLayout | None,
    x: jax.Array,
    w: ReadWeights,
    expert_index: jax.Array | None,
) -> tuple[jax.Array, Residuals | PackedRows]:
    """Computes `forward` where GEMM 1 multiplies each row by the neurons of its expert
    alone."""
    routed = _dispatch(plan, expert_index, layout)
    # (rows, F / E) = (rows, d) @ (E, d, F / E)
    x_rows = gather_rows(plan.kernels, x, routed)
    kept_x = x_rows if plan.keeps_rows_of_x else None
    weight = _of_experts(plan.up, w.packed_up)
    rows = looked_up(routed)
    if plan.up_writes_a:
        assert weight is not None and plan.kernels is not None
        kept = plan.kernels.matmul_keep_features(x_rows, weight, rows)
        return _down_of_packed(plan, w, counted(routed, kept, kept_x))
    if weight is not None:
        assert plan.kernels is not None
        y_rows = plan.kernels.rows_by_expert_weight(x_rows, weight, rows)
    else:
        w_up = _weight(w.up, w.packed_up, up=True)
        w_up = _columns_by_expert(w_up, routed.experts)
        y_rows = _grouped(plan.up, x_rows, w_up, routed)
    if plan.packs_activations:
        assert plan.kernels is not None
        kept = plan.kernels.keep_features(y_rows, rows, by_token=False)
        return _down_of_packed(plan, w, counted(routed, kept, kept_x))
    return _down_of_masked(plan, w, y_rows, routed, None, kept_x)


def _down_of_masked(
    plan: FFNPlan,
    w: ReadWeights,
    y_rows: jax.Array,
    routed: Dispatch,
    hidden: jax.Array | None,
    kept_x: jax.Array | None,
) -> tuple[jax.Array, Residuals]:
    """Computes `forward` from Y1 of the rows on, with A masked. `hidden` and `kept_x`
    become `Residuals.hidden` and `Residuals.x_rows`."""
    hidden_rows = jax.nn.relu(y_rows)
    kept = keep_once(jnp.where(nm_mask(y_rows, IN_CLUSTER), hidden_rows, 0))
    # (rows, d) = (rows, F / E) @ (E, F / E, d)
    w_down = _rows_by_expert(w.down, routed.experts)
    y = _grouped(plan.down, kept * kept, w_down, routed)
    y = combine_rows(plan.kernels, y, routed)
    hidden_rows = kept if plan.sparsity.mask_reuse else hidden_rows
    return y, Residuals(hidden_rows, hidden, routed, kept_x)


def _down_of_packed(
    plan: FFNPlan, w: ReadWeights, packed: PackedRows
) -> tuple[jax.Array, PackedRows]:
    """Computes `forward` from A on, with A packed."""
    routed, kernels = packed.routed, plan.kernels
    assert kernels is not None
    # (rows, d) = (rows, F / E) @ (E, F / E, d)
    w_down = _rows_by_expert(w.down, routed.experts)
    rows = looked_up(routed)
    y = kernels.expert_rows_matmul(packed.a, w_down, rows, b_k_major=False)
    return combine_rows(kernels, y, routed), packed


def backward(
    static: Static,
    x: jax.Array | None,
    residuals: Residuals | PackedRows,
    w: ReadWeights,
    dy: jax.Array,
    key: jax.Array | None,
) -> tuple[jax.Array, FFNWeights]:
    """Returns dX (tokens, d_model), and dW1 and dW2 in float32; `x` is None where the
    residuals hold its rows."""
    plan = static.plan
    sparsity = plan.sparsity
    routed, by_rows = residuals.routed, _sums_over_rows(sparsity)
    # X as GEMM 5 reads it: of the rows or of the tokens.
    x_read = x if residuals.x_rows is None else residuals.x_rows
    assert x_read is not None
    if by_rows and residuals.x_rows is None:
        x_read = gather_rows(plan.kernels, x_read, routed)
    dy_rows = gather_rows(plan.kernels, dy, routed)
    if isinstance(residuals, PackedRows):
        return _backward_packed(plan, x_read, residuals, w, dy, dy_rows, key)
    da = _dense_da(plan, w, dy, dy_rows, routed)
    da_rows = da if sparsity.da_by_expert else _own_neurons(da, routed)
    hidden_rows, hidden = residuals.hidden_rows, residuals.hidden
    dy_up_rows = selected = da_rows * 2 * hidden_rows
    if not sparsity.mask_reuse:
        selected = jnp.where(magnitude_mask(dy_up_rows, IN_CLUSTER), dy_up_rows, 0)
    # (rows, d) = (rows, F / E) @ (E, F / E, d)
    w_up = _columns_by_expert(w.up, routed.experts).swapaxes(1, 2)
    dx_rows = _grouped(plan.d_input, selected, w_up, routed)
    dx = combine_rows(plan.kernels, dx_rows, routed)

    if by_rows:
        return dx, _weight_gradients_by_expert(
            plan, x_read, dy_up_rows, hidden_rows**2, dy_rows, key, routed
        )
    if hidden is not None:
        dy_up = da * 2 * hidden
    else:
        dy_up = _all_neurons(dy_up_rows, routed)
        hidden = _all_neurons(hidden_rows, routed)
    return dx, weight_gradients(plan, x_read, [dy_up], hidden**2, dy, key)


def _sums_over_rows(sparsity: FFNSparsity) -> bool:
    """Returns whether GEMMs 5 and 6 sum each expert's columns over that expert's rows;
    otherwise they sum all columns over all tokens."""
    return sparsity.weight_gradients == "expert_columns"


def _dense_da(
    plan: FFNPlan,
    w: ReadWeights,
    dy: jax.Array,
    dy_rows: jax.Array,
    routed: Dispatch,
) -> jax.Array:
    """Returns dA, (tokens, d_hidden), or with `da_by_expert` of the rows alone, (rows,
    d_hidden / E)."""
    if not plan.sparsity.da_by_expert:
        # (T, F) = (T, d) @ (d, F)
        return multiply_by_weight(plan.d_hidden, dy, w.down.T, w.packed_down)
    # (rows, F / E) = (rows, d) @ (E, d, F / E)
    weight = _of_experts(plan.d_hidden, w.packed_down)
    if weight is not None:
        assert plan.kernels is not None
        return plan.kernels.rows_by_expert_weight(dy_rows, weight, looked_up(routed))
    w_down = _rows_by_expert(_weight(w.down, w.packed_down, up=False), routed.experts)
    return _grouped(plan.d_hidden, dy_rows, w_down.swapaxes(1, 2), routed)


def _backward_packed(
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
        used = jnp.arange(len(dy_rows)) < routed.v * rows.used_tiles
        dy_up_rows, a_rows = (
            jnp.where(used[:, None], decompress(unpack(packed)), 0)
            for packed in (dy_up, kept.a)
        )
        if _sums_over_rows(plan.sparsity):
            dw = _weight_gradients_by_expert(
                plan, x_read, dy_up_rows, a_rows, dy_rows, key, routed
            )
        else:
            dense_dy_up, a = (_all_neurons(r, routed) for r in (dy_up_rows, a_rows))
            dw = weight_gradients(plan, x_read, [dense_dy_up], a, dy, key)
    # (rows, d) = (rows, F / E) @ (F / E, E, d), W1 as it is stored
    w_up = w.up.reshape(w.up.shape[0], routed.experts, -1)
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
        weight = _of_experts(plan.d_hidden, w.packed_down)
        assert weight is not None
        # (rows, F / E) = (rows, d) @ (E, d, F / E)
        dy_up = kernels.matmul_activation_gradient(dy_rows, weight, kept.a, rows)
        if groups is None:
            return dy_up, None
        return dy_up, kernels.over_tokens(
            kept.a, dy_up, rows, groups.residual, by_segments=False
        )
    da = _dense_da(plan, w, dy, dy_rows, kept.routed)
    by_token = not plan.sparsity.da_by_expert
    if groups is None:
        return kernels.activation_gradient(da, kept.a, rows, by_token=by_token), None
    return kernels.activation_gradient_over_tokens(
        da, kept.a, rows, groups.residual, by_token=by_token, by_segments=False
    )


def _weight_gradients_by_expert(
    plan: FFNPlan,
    x_rows: jax.Array,
    dy_up_rows: jax.Array,
    a_rows: jax.Array,
    dy_rows: jax.Array,
    key: jax.Array | None,
    routed: Dispatch,
) -> FFNWeights:
    """Returns dW1 and dW2 by GEMMs 5 and 6, each expert's columns summed over that
    expert's rows, 2:4 along the rows with `token_sparsity`. Padding rows are zero in A
    and dY1."""
    sparsity = plan.sparsity
    if sparsity.token_sparsity is not None:
        expert = expert_of_row(routed)
        nonzeros = jax.ops.segment_sum(
            (a_rows != 0).astype(jnp.int32), expert, routed.experts
        )
        dense = densest_features(
            nonzeros, sparsity.dense_features, routed.token_rows.shape[0]
        )[expert]
        key_up, key_down = (None, None) if key is None else jax.random.split(key)
        method = sparsity.token_sparsity
        dy_up_rows = sparsify_tokens(dy_up_rows, dense, method, key_up)
        a_rows = sparsify_tokens(a_rows, dense, method, key_down)
    tiles = (routed.tile_expert, used_tiles(routed), routed.experts)
    # (d, E, F / E): of each expert (d, rows of e) @ (rows of e, F / E)
    dw_up = grouped_outer(
        x_rows, dy_up_rows, *tiles, expert_axis=1, backend=plan.d_up.backend
    )
    # (E, F / E, d): of each expert (F / E, rows of e) @ (rows of e, d)
    dw_down = grouped_outer(a_rows, dy_rows, *tiles, backend=plan.d_down.backend)
    d_model = x_rows.shape[1]
    return FFNWeights(up=dw_up.reshape(d_model, -1), down=dw_down.reshape(-1, d_model))


def _dispatch(
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


def _grouped(gemm: Decision, rows, weights, routed: Dispatch) -> jax.Array:
    tiles = routed.tile_expert, used_tiles(routed)
    return grouped_matmul(rows, weights, *tiles, backend=gemm.backend)


def _of_experts(gemm: Decision, weight: Compressed | Packed | None) -> Packed | None:
    """Returns the packed weight for a kernel that multiplies each row by its expert's
    matrix, or None where no kernel runs the GEMM."""
    if not gemm.on_kernels or weight is None:
        return None
    return as_packed(weight)


def _weight(w: jax.Array, packed: Compressed | Packed | None, *, up: bool) -> jax.Array:
    """Returns W1 (`up`) or W2 as a dense GEMM reads it: masked where the weight is
    sparse."""
    if packed is None:
        return w
    if isinstance(packed, Packed):
        masked = decompress(unpack(packed))
        masked = masked.T if up else masked
    else:
        masked = decompress(packed)
    return masked.astype(w.dtype)


def _columns_by_expert(w_up: jax.Array, experts: int) -> jax.Array:
    """Reshapes (d, F) to (E, d, F / E)."""
    return w_up.reshape(w_up.shape[0], experts, -1).swapaxes(0, 1)


def _rows_by_expert(w_down: jax.Array, experts: int) -> jax.Array:
    """Reshapes (F, d) to (E, F / E, d)."""
    return w_down.reshape(experts, -1, w_down.shape[1])


def _own_neurons(hidden: jax.Array, routed: Dispatch) -> jax.Array:
    """Returns (rows, F / E) from (T, F): the token of each row, at the neurons of the
    row's expert."""
    by_expert = hidden.reshape(hidden.shape[0], routed.experts, -1)
    own = by_expert[routed.row_token, expert_of_row(routed)]
    return jnp.where(routed.row_valid[:, None], own, 0)


def _all_neurons(rows: jax.Array, routed: Dispatch) -> jax.Array:
    """Returns (T, F) from (rows, F / E), zero outside a token's experts."""
    tokens = routed.token_rows.shape[0]
    out = jnp.zeros((tokens, routed.experts, rows.shape[1]), rows.dtype)
    # each (token, expert) pair occurs once: padding rows, which do not, are dropped
    token = jnp.where(routed.row_valid, routed.row_token, tokens)
    out = out.at[token, expert_of_row(routed)].set(rows, mode="drop")
    return out.reshape(tokens, -1)


BY_EXPERT = Execution(forward, backward)
