"""The FFN where a token uses the neurons of its experts only: A is V:N:M.

The clusters of neurons (experts) lie contiguously in F, so V:2:M with M = 4E is a
grouped GEMM over experts whose sparse operand is 2:4. Tokens are sorted by expert and
padded to tiles of V rows; a row is one (token, expert) pair and holds F / E neurons.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from sparsejax.formats import Compressed, decompress
from sparsejax.ops.backend import Backend
from sparsejax.ops.expert_rows import combine_rows, gather_rows
from sparsejax.ops.ffn_all_neurons import keep_once
from sparsejax.ops.ffn_layout import FFNLayout, gather_experts, own_experts
from sparsejax.ops.ffn_spec import (
    FFNSparsity,
    filled_up_to,
    packs_its_result,
    packs_over_tokens,
)
from sparsejax.ops.ffn_weights import FFNWeights, as_packed, multiply_by_weight
from sparsejax.ops.grouped_matmul import grouped_matmul, grouped_outer
from sparsejax.ops.packed_activations import OverTokens
from sparsejax.ops.packed_rows import (
    PackedRows,
    RowGroups,
    keep_rows,
    multiply_and_keep_rows,
    multiply_by_expert_weight,
    multiply_for_row_gradient,
    multiply_rows,
    row_gradient,
    row_gradient_over_tokens,
    row_groups,
    rows_over_tokens,
    used_tiles,
    weight_gradient_of_experts,
)
from sparsejax.ops.token_sparsity import (
    densest_features,
    fixed_token_order,
    sparsify_tokens,
)
from sparsejax.ops.weight_gradients import weight_gradients
from sparsejax.packing import Packed, unpack
from sparsejax.patterns import NM, VNM
from sparsejax.pruning import magnitude_mask, nm_mask
from sparsejax.router import (
    Dispatch,
    best_experts,
    dispatch,
    expert_mass,
    expert_of_row,
)

IN_CLUSTER = NM(2, 4)
"""Inside its expert's neurons a row of A is 2:4."""


class Residuals(NamedTuple):
    """What the backward needs besides the weights, and X where `x_rows` is None."""

    hidden_rows: jax.Array
    """relu(Y1) of each row, (rows, d_hidden / E); masked where the mask is re-used."""
    hidden: jax.Array | None
    """relu(Y1) of every neuron, (tokens, d_hidden): only where the weight gradients
    are dense and the forward's mask is not re-used."""
    routed: Dispatch
    x_rows: jax.Array | None
    """X of the rows: `keeps_rows_of_x`."""


def keeps_rows_of_x(sparsity: FFNSparsity) -> bool:
    """Whether the residuals have X sorted by expert, as GEMM 1 read it, and so need no
    other. With several experts for a token that would be several times X."""
    return sparsity.skip_blocks and sparsity.experts_per_token == 1


def forward(
    sparsity: FFNSparsity,
    backends: tuple,
    x: jax.Array,
    w: FFNWeights,
    expert_index: jax.Array | None,
    layout: FFNLayout | None,
) -> tuple[jax.Array, Residuals | PackedRows]:
    """Y (tokens, d_model), and what the backward needs."""
    hidden = kept_x = None
    if sparsity.skip_blocks:
        routed = _dispatch(sparsity, backends, expert_index, layout)
        # (rows, F / E) = (rows, d) @ (E, d, F / E)
        x_rows = gather_rows(backends, x, routed)
        kept_x = x_rows if keeps_rows_of_x(sparsity) else None
        weight = _of_experts(backends[0], w.packed_up)
        if packs_its_result(sparsity, backends, 0):
            assert weight is not None
            packed = multiply_and_keep_rows(x_rows, weight, routed)
            return _down_of_packed(backends, w, packed, kept_x)
        if weight is not None:
            y_up = multiply_by_expert_weight(x_rows, weight, routed)
        else:
            w_up = _weight(w.up, w.packed_up, up=True)
            w_up = _columns_by_expert(w_up, routed.experts)
            y_up = _grouped(backends[0], x_rows, w_up, routed)
    else:
        # (T, F) = (T, d) @ (d, F)
        y_up = multiply_by_weight(backends[0], x, w.up, w.packed_up)
        if sparsity.router == "true_mass":
            assert sparsity.experts is not None
            _, experts = own_experts(layout, sparsity.experts)
            mass = gather_experts(layout, expert_mass(y_up, experts))
            expert_index = best_experts(mass, sparsity.experts_per_token)
        routed = _dispatch(sparsity, backends, expert_index, layout)
        if not sparsity.mask_reuse and not _sums_over_rows(sparsity):
            hidden = jax.nn.relu(y_up)
    if backends[1] == "mosaic_sm90":
        packed = keep_rows(y_up, routed, by_token=not sparsity.skip_blocks)
        return _down_of_packed(backends, w, packed, kept_x)
    y_rows = y_up if sparsity.skip_blocks else _own_neurons(y_up, routed)
    hidden_rows = jax.nn.relu(y_rows)
    kept = keep_once(jnp.where(nm_mask(y_rows, IN_CLUSTER), hidden_rows, 0))
    # (rows, d) = (rows, F / E) @ (E, F / E, d)
    w_down = _rows_by_expert(w.down, routed.experts)
    y_rows = _grouped(backends[1], kept * kept, w_down, routed)
    y = combine_rows(backends, y_rows, routed)
    hidden_rows = kept if sparsity.mask_reuse else hidden_rows
    return y, Residuals(hidden_rows, hidden, routed, kept_x)


def _down_of_packed(
    backends: tuple,
    w: FFNWeights,
    packed: PackedRows,
    kept_x: jax.Array | None,
) -> tuple[jax.Array, PackedRows]:
    """`forward` from A on."""
    # (rows, d) = (rows, F / E) @ (E, F / E, d)
    w_down = _rows_by_expert(w.down, packed.routed.experts)
    y = multiply_rows(packed.a, w_down, packed.routed, b_k_major=False)
    y = combine_rows(backends, y, packed.routed)
    return y, packed._replace(x_rows=kept_x)


def backward(
    sparsity: FFNSparsity,
    backends: tuple,
    x: jax.Array | None,
    residuals: Residuals | PackedRows,
    w: FFNWeights,
    dy: jax.Array,
    key: jax.Array | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """dX (tokens, d_model), dW1 and dW2 in float32; `x` is None where the residuals
    have its rows."""
    routed, by_rows = residuals.routed, _sums_over_rows(sparsity)
    # X as GEMM 5 reads it: of the rows or of the tokens.
    x_read = x if residuals.x_rows is None else residuals.x_rows
    assert x_read is not None
    if by_rows and residuals.x_rows is None:
        x_read = gather_rows(backends, x_read, routed)
    dy_rows = gather_rows(backends, dy, routed)
    if isinstance(residuals, PackedRows):
        return _backward_packed(
            sparsity, backends, x_read, residuals, w, dy, dy_rows, key
        )
    da = _dense_da(sparsity, backends[2], w, dy, dy_rows, routed)
    da_rows = da if sparsity.da_by_expert else _own_neurons(da, routed)
    hidden_rows, hidden = residuals.hidden_rows, residuals.hidden
    dy_up_rows = selected = da_rows * 2 * hidden_rows
    if not sparsity.mask_reuse:
        selected = jnp.where(magnitude_mask(dy_up_rows, IN_CLUSTER), dy_up_rows, 0)
    # (rows, d) = (rows, F / E) @ (E, F / E, d)
    w_up = _columns_by_expert(w.up, routed.experts).swapaxes(1, 2)
    dx_rows = _grouped(backends[3], selected, w_up, routed)
    dx = combine_rows(backends, dx_rows, routed)

    if by_rows:
        dw_up, dw_down = _weight_gradients_by_expert(
            sparsity, backends, x_read, dy_up_rows, hidden_rows**2, dy_rows, key, routed
        )
        return dx, dw_up, dw_down
    if hidden is not None:
        dy_up = da * 2 * hidden
    else:
        dy_up = _all_neurons(dy_up_rows, routed)
        hidden = _all_neurons(hidden_rows, routed)
    (dw_up,), dw_down = weight_gradients(
        sparsity, backends[4:], x_read, [dy_up], hidden**2, dy, key
    )
    return dx, dw_up, dw_down


def _sums_over_rows(sparsity: FFNSparsity) -> bool:
    """Whether GEMMs 5 and 6 sum each expert's columns over its own rows, else those of
    all neurons over all tokens."""
    return sparsity.weight_gradients == "expert_columns"


def _dense_da(
    sparsity: FFNSparsity,
    backend: Backend,
    w: FFNWeights,
    dy: jax.Array,
    dy_rows: jax.Array,
    routed: Dispatch,
) -> jax.Array:
    """dA of all tokens and neurons, or with `da_by_expert` of the rows."""
    if not sparsity.da_by_expert:
        # (T, F) = (T, d) @ (d, F)
        return multiply_by_weight(backend, dy, w.down.T, w.packed_down)
    # (rows, F / E) = (rows, d) @ (E, d, F / E)
    weight = _of_experts(backend, w.packed_down)
    if weight is not None:
        return multiply_by_expert_weight(dy_rows, weight, routed)
    w_down = _rows_by_expert(_weight(w.down, w.packed_down, up=False), routed.experts)
    return _grouped(backend, dy_rows, w_down.swapaxes(1, 2), routed)


def _backward_packed(
    sparsity: FFNSparsity,
    backends: tuple,
    x_read: jax.Array,
    kept: PackedRows,
    w: FFNWeights,
    dy: jax.Array,
    dy_rows: jax.Array,
    key: jax.Array | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`backward` where A and dY1 are packed: dense only for dense GEMMs 5 and 6.
    `x_read` is X as GEMM 5 reads it."""
    routed, groups = kept.routed, None
    if packs_over_tokens(sparsity, backends):
        groups = row_groups(sparsity, routed.token_rows.shape[0], kept)
    dy_up, over_tokens = _packed_gradient(
        sparsity, backends, groups, w, dy, dy_rows, kept
    )
    if groups is not None and over_tokens is not None:
        gradient = partial(weight_gradient_of_experts, groups, routed=routed)
        (dy_up_over_tokens,) = over_tokens.gradients
        dw_up = gradient(dy_up_over_tokens, x_read, transpose_out=True)
        dw_down = gradient(over_tokens.a, dy_rows, transpose_out=False)
    else:
        # What the tiles without rows hold is not used, but it must be a number.
        used = jnp.arange(len(dy_rows)) < routed.v * used_tiles(routed)
        dy_up_rows, a_rows = (
            jnp.where(used[:, None], decompress(unpack(packed)), 0)
            for packed in (dy_up, kept.a)
        )
        if _sums_over_rows(sparsity):
            dw_up, dw_down = _weight_gradients_by_expert(
                sparsity, backends, x_read, dy_up_rows, a_rows, dy_rows, key, routed
            )
        else:
            dense_dy_up, a = (_all_neurons(r, routed) for r in (dy_up_rows, a_rows))
            (dw_up,), dw_down = weight_gradients(
                sparsity, backends[4:], x_read, [dense_dy_up], a, dy, key
            )
    # (rows, d) = (rows, F / E) @ (F / E, E, d), W1 as it is stored
    w_up = w.up.reshape(w.up.shape[0], routed.experts, -1)
    dx = multiply_rows(dy_up, w_up, routed, b_k_major=True)
    return combine_rows(backends, dx, routed), dw_up, dw_down


def _packed_gradient(
    sparsity: FFNSparsity,
    backends: tuple,
    groups: RowGroups | None,
    w: FFNWeights,
    dy: jax.Array,
    dy_rows: jax.Array,
    kept: PackedRows,
) -> tuple[Packed, OverTokens | None]:
    """dY1 along the features; and A and dY1 over the rows where there are groups."""
    if packs_its_result(sparsity, backends, 2):
        weight = _of_experts(backends[2], w.packed_down)
        assert weight is not None
        # (rows, F / E) = (rows, d) @ (E, d, F / E)
        dy_up = multiply_for_row_gradient(dy_rows, weight, kept)
        if groups is None:
            return dy_up, None
        return dy_up, rows_over_tokens(groups, dy_up, kept)
    da = _dense_da(sparsity, backends[2], w, dy, dy_rows, kept.routed)
    by_token = not sparsity.da_by_expert
    if groups is None:
        return row_gradient(da, kept, by_token=by_token), None
    return row_gradient_over_tokens(groups, da, kept, by_token=by_token)


def _weight_gradients_by_expert(
    sparsity: FFNSparsity,
    backends: tuple,
    x_rows: jax.Array,
    dy_up_rows: jax.Array,
    a_rows: jax.Array,
    dy_rows: jax.Array,
    key: jax.Array | None,
    routed: Dispatch,
) -> tuple[jax.Array, jax.Array]:
    """GEMMs 5 and 6, each expert's columns over the expert's rows, 2:4 along these
    rows where asked. Padding rows are zero in A and dY1."""
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
        x_rows, dy_up_rows, *tiles, expert_axis=1, backend=backends[4]
    )
    # (E, F / E, d): of each expert (F / E, rows of e) @ (rows of e, d)
    dw_down = grouped_outer(a_rows, dy_rows, *tiles, backend=backends[5])
    d_model = x_rows.shape[1]
    return dw_up.reshape(d_model, -1), dw_down.reshape(-1, d_model)


def _dispatch(
    sparsity: FFNSparsity,
    backends: tuple,
    expert_index: jax.Array | None,
    layout: FFNLayout | None,
) -> Dispatch:
    """The rows of this device: its tokens, for those of its experts that they chose."""
    assert isinstance(sparsity.activations, VNM) and expert_index is not None
    order = None
    if sparsity.token_sparsity and sparsity.permute_tokens:
        # inside an expert the tokens follow the fixed order: no second permutation
        order = fixed_token_order(expert_index.shape[0])
        order = jnp.asarray(order[order >= 0])
    pattern = sparsity.activations
    v = filled_up_to(pattern, backends)
    first, experts = own_experts(layout, pattern.experts)
    return dispatch(expert_index - first, experts, v, token_order=order)


def _grouped(backend, rows, weights, routed: Dispatch) -> jax.Array:
    return grouped_matmul(
        rows, weights, routed.tile_expert, used_tiles(routed), backend=backend
    )


def _of_experts(backend: Backend, weight: Compressed | Packed | None) -> Packed | None:
    """The weight for kernels that multiply a row by its own expert's, if one does."""
    if backend != "mosaic_sm90" or weight is None:
        return None
    return as_packed(weight)


def _weight(w: jax.Array, packed: Compressed | Packed | None, *, up: bool) -> jax.Array:
    """W1 (`up`) or W2 as a dense GEMM reads it, masked where it is sparse."""
    if packed is None:
        return w
    if isinstance(packed, Packed):
        masked = decompress(unpack(packed))
        masked = masked.T if up else masked
    else:
        masked = decompress(packed)
    return masked.astype(w.dtype)


def _columns_by_expert(w_up: jax.Array, experts: int) -> jax.Array:
    """(d, F) -> (E, d, F / E)"""
    return w_up.reshape(w_up.shape[0], experts, -1).swapaxes(0, 1)


def _rows_by_expert(w_down: jax.Array, experts: int) -> jax.Array:
    """(F, d) -> (E, F / E, d)"""
    return w_down.reshape(experts, -1, w_down.shape[1])


def _own_neurons(hidden: jax.Array, routed: Dispatch) -> jax.Array:
    """(T, F) -> (rows, F / E): of each row's token the neurons of its expert."""
    by_expert = hidden.reshape(hidden.shape[0], routed.experts, -1)
    own = by_expert[routed.row_token, expert_of_row(routed)]
    return jnp.where(routed.row_valid[:, None], own, 0)


def _all_neurons(rows: jax.Array, routed: Dispatch) -> jax.Array:
    """(rows, F / E) -> (T, F), zero outside a token's experts."""
    tokens = routed.token_rows.shape[0]
    out = jnp.zeros((tokens, routed.experts, rows.shape[1]), rows.dtype)
    # each (token, expert) pair occurs once: padding rows, which do not, are dropped
    token = jnp.where(routed.row_valid, routed.row_token, tokens)
    out = out.at[token, expert_of_row(routed)].set(rows, mode="drop")
    return out.reshape(tokens, -1)
