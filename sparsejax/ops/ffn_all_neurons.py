"""The FFN where every token may use every neuron: A is dense or 2:4 along F."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sparsejax.formats import decompress
from sparsejax.ops import packed_activations
from sparsejax.ops.ffn_spec import (
    FFNSparsity,
    packs_its_result,
    packs_over_tokens,
)
from sparsejax.ops.ffn_weights import (
    FFNWeights,
    as_packed,
    multiply,
    multiply_by_weight,
)
from sparsejax.ops.packed_activations import (
    Activations,
    OverTokens,
    TokenGroups,
    token_groups,
    weight_gradient_down,
    weight_gradient_up,
)
from sparsejax.ops.sparse_matmul import multiply_packed, sparse_matmul
from sparsejax.ops.weight_gradients import weight_gradients
from sparsejax.packing import Packed, unpack
from sparsejax.patterns import NM
from sparsejax.pruning import magnitude_mask, nm_mask


class Residuals(NamedTuple):
    """What the backward needs besides X and the weights."""

    hidden: jax.Array
    """relu(Y1), (tokens, d_hidden); masked where the backward re-uses the mask. Its
    zeros are all that the backward needs of the mask: dY1 is zero there anyway."""


def forward(
    sparsity: FFNSparsity, backends: tuple, x: jax.Array, w: FFNWeights
) -> tuple[jax.Array, Residuals | Activations]:
    """Y (tokens, d_model), and what the backward needs."""
    # (T, F) = (T, d) @ (d, F)
    if packs_its_result(sparsity, backends, 0):
        assert w.packed_up is not None
        kept = packed_activations.multiply_and_keep(x, as_packed(w.packed_up))
        return sparse_matmul(kept.a, w.down, backend=backends[1]), kept
    y_up = multiply_by_weight(backends[0], x, w.up, w.packed_up)
    if backends[1] == "mosaic_sm90":
        kept = packed_activations.keep_features(y_up)
        # (T, d) = (T, F) @ (F, d)
        return sparse_matmul(kept.a, w.down, backend=backends[1]), kept
    hidden = kept = jax.nn.relu(y_up)
    if isinstance(sparsity.activations, NM):
        # by the signed value of Y1, which orders relu(Y1)^2 as well
        kept = keep_once(jnp.where(nm_mask(y_up, sparsity.activations), hidden, 0))
    # (T, d) = (T, F) @ (F, d)
    y = multiply(backends[1], kept * kept, w.down)
    return y, Residuals(kept if sparsity.mask_reuse else hidden)


def keep_once(kept: jax.Array) -> jax.Array:
    """`kept`, computed once: XLA would otherwise repeat the selection in each of the
    three fusions that read it (measured on CPU: 10 % of a sparse FFN step)."""
    return lax.optimization_barrier(kept)


def backward(
    sparsity: FFNSparsity,
    backends: tuple,
    x: jax.Array,
    residuals: Residuals | Activations,
    w: FFNWeights,
    dy: jax.Array,
    key: jax.Array | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """dX (tokens, d_model), dW1 and dW2 in float32."""
    if isinstance(residuals, Activations):
        return _backward_packed(sparsity, backends, x, residuals, w, dy, key)
    # (T, F) = (T, d) @ (d, F)
    da = multiply_by_weight(backends[2], dy, w.down.T, w.packed_down)
    hidden = residuals.hidden
    dy_up = selected = da * 2 * hidden
    if isinstance(sparsity.activations, NM) and not sparsity.mask_reuse:
        mask = magnitude_mask(dy_up, sparsity.activations)
        selected = jnp.where(mask, dy_up, 0)
    # (T, d) = (T, F) @ (F, d)
    dx = multiply(backends[3], selected, w.up.T)
    (dw_up,), dw_down = weight_gradients(
        sparsity, backends[4:], x, [dy_up], hidden * hidden, dy, key
    )
    return dx, dw_up, dw_down


def _backward_packed(
    sparsity: FFNSparsity,
    backends: tuple,
    x: jax.Array,
    kept: Activations,
    w: FFNWeights,
    dy: jax.Array,
    key: jax.Array | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`backward` where A and dY1 are packed: dense only for dense GEMMs 5 and 6."""
    groups = None
    if packs_over_tokens(sparsity, backends):
        groups = token_groups(sparsity, x.shape[0], kept.nonzeros)
    dy_up, over_tokens = _packed_gradient(sparsity, backends, groups, w, dy, kept.a)
    if groups is not None and over_tokens is not None:
        (dy_up_over_tokens,) = over_tokens.gradients
        dw_up = weight_gradient_up(groups, x, dy_up_over_tokens)
        dw_down = weight_gradient_down(groups, over_tokens.a, dy)
    else:
        dense_dy_up, a = (decompress(unpack(packed)) for packed in (dy_up, kept.a))
        (dw_up,), dw_down = weight_gradients(
            sparsity, backends[4:], x, [dense_dy_up], a, dy, key
        )
    # (T, d) = (T, F) @ (F, d), W1 as it is stored
    dx = multiply_packed(dy_up, w.up, b_k_major=True, transpose_out=False)
    return dx, dw_up, dw_down


def _packed_gradient(
    sparsity: FFNSparsity,
    backends: tuple,
    groups: TokenGroups | None,
    w: FFNWeights,
    dy: jax.Array,
    a: Packed,
) -> tuple[Packed, OverTokens | None]:
    """dY1 along the features; and A and dY1 over tokens where there are groups."""
    # (T, F) = (T, d) @ (d, F)
    if packs_its_result(sparsity, backends, 2):
        assert w.packed_down is not None
        weight = as_packed(w.packed_down)
        dy_up = packed_activations.multiply_for_gradient(dy, weight, a)
        if groups is None:
            return dy_up, None
        return dy_up, packed_activations.over_tokens(groups, a, dy_up)
    da = multiply_by_weight(backends[2], dy, w.down.T, w.packed_down)
    if groups is None:
        return packed_activations.gradient(da, a), None
    return packed_activations.gradient_over_tokens(groups, da, a)
