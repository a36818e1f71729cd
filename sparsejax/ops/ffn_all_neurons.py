"""The FFN where every token may use every neuron: A is dense or 2:4 along F."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sparsejax.formats import decompress
from sparsejax.ops.ffn_frame import Execution, Static
from sparsejax.ops.ffn_plan import FFNPlan
from sparsejax.ops.ffn_weights import (
    FFNWeights,
    ReadWeights,
    as_packed,
    multiply,
    multiply_by_weight,
)
from sparsejax.ops.kernels.base import OverTokens
from sparsejax.ops.packed_activations import (
    Activations,
    TokenGroups,
    counted,
    token_groups,
    weight_gradient_down,
    weight_gradient_up,
)
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
    static: Static, x: jax.Array, w: ReadWeights, expert_index: None
) -> tuple[jax.Array, Residuals | Activations]:
    """Y (tokens, d_model), and what the backward needs."""
    plan = static.plan
    if plan.packs_activations:
        return _forward_packed(plan, x, w)
    # (T, F) = (T, d) @ (d, F)
    y_up = multiply_by_weight(plan.up, x, w.up, w.packed_up)
    pattern = plan.sparsity.activations
    hidden = kept = jax.nn.relu(y_up)
    if isinstance(pattern, NM):
        # by the signed value of Y1, which orders relu(Y1)^2 as well
        kept = keep_once(jnp.where(nm_mask(y_up, pattern), hidden, 0))
    # (T, d) = (T, F) @ (F, d)
    y = multiply(plan.down, kept * kept, w.down)
    return y, Residuals(kept if plan.sparsity.mask_reuse else hidden)


def keep_once(kept: jax.Array) -> jax.Array:
    """`kept`, computed once: XLA would otherwise repeat the selection in each of the
    three fusions that read it (measured on CPU: 10 % of a sparse FFN step)."""
    return lax.optimization_barrier(kept)


def _forward_packed(
    plan: FFNPlan, x: jax.Array, w: ReadWeights
) -> tuple[jax.Array, Activations]:
    """`forward` where A is packed."""
    kernels = plan.kernels
    assert kernels is not None
    # (T, F) = (T, d) @ (d, F)
    if plan.up_writes_a:
        assert w.packed_up is not None
        kept = kernels.matmul_keep_features(x, as_packed(w.packed_up), None)
    else:
        y_up = multiply_by_weight(plan.up, x, w.up, w.packed_up)
        kept = kernels.keep_features(y_up, None, by_token=False)
    # (T, d) = (T, F) @ (F, d)
    y = kernels.matmul(kept.a, w.down, b_k_major=False, transpose_out=False)
    return y, counted(kept)


def backward(
    static: Static,
    x: jax.Array,
    residuals: Residuals | Activations,
    w: ReadWeights,
    dy: jax.Array,
    key: jax.Array | None,
) -> tuple[jax.Array, FFNWeights]:
    """dX (tokens, d_model), and dW1 and dW2 in float32."""
    plan = static.plan
    if isinstance(residuals, Activations):
        return _backward_packed(plan, x, residuals, w, dy, key)
    # (T, F) = (T, d) @ (d, F)
    da = multiply_by_weight(plan.d_hidden, dy, w.down.T, w.packed_down)
    hidden, pattern = residuals.hidden, plan.sparsity.activations
    dy_up = selected = da * 2 * hidden
    if isinstance(pattern, NM) and not plan.sparsity.mask_reuse:
        selected = jnp.where(magnitude_mask(dy_up, pattern), dy_up, 0)
    # (T, d) = (T, F) @ (F, d)
    dx = multiply(plan.d_input, selected, w.up.T)
    return dx, weight_gradients(plan, x, [dy_up], hidden * hidden, dy, key)


def _backward_packed(
    plan: FFNPlan,
    x: jax.Array,
    kept: Activations,
    w: ReadWeights,
    dy: jax.Array,
    key: jax.Array | None,
) -> tuple[jax.Array, FFNWeights]:
    """`backward` where A and dY1 are packed: dense only for dense GEMMs 5 and 6."""
    kernels, groups = plan.kernels, None
    assert kernels is not None
    if plan.over_tokens:
        groups = token_groups(plan.sparsity, x.shape[0], kept.nonzeros)
    dy_up, over_tokens = _packed_gradient(plan, groups, w, dy, kept.a)
    if groups is not None and over_tokens is not None:
        (dy_up_over_tokens,) = over_tokens.gradients
        dw = FFNWeights(
            up=weight_gradient_up(kernels, groups, x, dy_up_over_tokens),
            down=weight_gradient_down(kernels, groups, over_tokens.a, dy),
        )
    else:
        dense_dy_up, a = (decompress(unpack(packed)) for packed in (dy_up, kept.a))
        dw = weight_gradients(plan, x, [dense_dy_up], a, dy, key)
    # (T, d) = (T, F) @ (F, d), W1 as it is stored
    dx = kernels.matmul(dy_up, w.up, b_k_major=True, transpose_out=False)
    return dx, dw


def _packed_gradient(
    plan: FFNPlan,
    groups: TokenGroups | None,
    w: ReadWeights,
    dy: jax.Array,
    a: Packed,
) -> tuple[Packed, OverTokens | None]:
    """dY1 along the features; and A and dY1 over tokens where there are groups."""
    kernels = plan.kernels
    assert kernels is not None
    # (T, F) = (T, d) @ (d, F)
    if plan.d_hidden_writes_dy_up:
        assert w.packed_down is not None
        weight = as_packed(w.packed_down)
        dy_up = kernels.matmul_activation_gradient(dy, weight, a, None)
        if groups is None:
            return dy_up, None
        return dy_up, kernels.over_tokens(
            a, dy_up, None, groups.residual, by_segments=groups.by_segments
        )
    da = multiply_by_weight(plan.d_hidden, dy, w.down.T, w.packed_down)
    if groups is None:
        return kernels.activation_gradient(da, a, None, by_token=False), None
    return kernels.activation_gradient_over_tokens(
        da, a, None, groups.residual, by_token=False, by_segments=groups.by_segments
    )


ALL_NEURONS = Execution(forward, backward)
