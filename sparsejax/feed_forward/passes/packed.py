"""An FFN on a set of kernels: A and the gradients before it are packed, 2:4 along F.

Every token may use every neuron.
"""

from functools import partial

import jax
import jax.numpy as jnp

from sparsejax.feed_forward.frame import Execution, Static
from sparsejax.feed_forward.operands.packed_activations import (
    Activations,
    GatedActivations,
    TokenGroups,
    counted,
    counted_gated,
    token_groups,
    weight_gradient_down,
    weight_gradient_up,
)
from sparsejax.feed_forward.operands.weights import (
    FFNWeights,
    ReadWeights,
    multiply_by_weight,
)
from sparsejax.feed_forward.passes.masked import into_hidden, weight_gradients
from sparsejax.feed_forward.plan import FFNPlan
from sparsejax.ops.kernels.base import OverTokens
from sparsejax.ops.sparse_matmul import as_packed
from sparsejax.sparsity.compressed import decompress
from sparsejax.sparsity.packed import Packed, unpack


def forward(
    static: Static, x: jax.Array, w: ReadWeights, experts: None
) -> tuple[jax.Array, Activations | GatedActivations, None]:
    """Returns Y (tokens, d_model), and the packed activations that the backward needs.
    Nothing is observed."""
    plan = static.plan
    kernels = plan.kernels
    assert kernels is not None
    if plan.activation.gated:
        # Nothing keeps this A for the backward: it is read here alone.
        written = kernels.keep_gated_features(*into_hidden(plan, x, w))
        a, kept = written.a, counted_gated(written)
    elif plan.up_writes_a:
        assert w.packed_up is not None
        packed_up = as_packed(w.packed_up, kernels)
        # (T, F) = (T, d) @ (d, F)
        kept = counted(kernels.matmul_keep_features(x, packed_up, None))
        a = kept.a
    else:
        (y_up,) = into_hidden(plan, x, w)
        kept = counted(kernels.keep_features(y_up, None, by_token=False))
        a = kept.a
    # (T, d) = (T, F) @ (F, d)
    y = kernels.matmul(a, w.down, b_k_major=False, transpose_out=False)
    return y, kept, None


def backward(
    static: Static,
    x: jax.Array,
    kept: Activations | GatedActivations,
    w: ReadWeights,
    dy: jax.Array,
    key: jax.Array | None,
) -> tuple[jax.Array, FFNWeights]:
    """Returns dX (tokens, d_model), and the gradients of the weights in float32. GEMMs
    5 and 6 read operands packed along the tokens, or unpacked ones where they are
    dense."""
    plan = static.plan
    kernels, groups = plan.kernels, None
    assert kernels is not None
    if plan.over_tokens:
        groups = token_groups(plan.sparsity, x.shape[0], kept.nonzeros)
    if isinstance(kept, GatedActivations):
        gradients, over_tokens = _gated_gradients(plan, groups, w, dy, kept)
    else:
        dy_up, over_tokens = _gradient(plan, groups, w, dy, kept.a)
        gradients = (dy_up,)
    if groups is not None and over_tokens is not None:
        *gate, up = (
            weight_gradient_up(kernels, groups, x, g) for g in over_tokens.gradients
        )
        down = weight_gradient_down(kernels, groups, over_tokens.a, dy)
        dw = FFNWeights(up=up, down=down, gate=gate[0] if gate else None)
    else:
        *dense, a = (decompress(unpack(packed)) for packed in (*gradients, kept.a))
        dw = weight_gradients(plan, x, dense, a, dy, key)
    return _input_gradient(plan, x, gradients, w), dw


def _input_gradient(
    plan: FFNPlan, x: jax.Array, gradients: tuple[Packed, ...], w: ReadWeights
) -> jax.Array:
    """Returns dX (tokens, d_model). In a gated FFN it is the sum of two products in
    float32."""
    assert plan.kernels is not None
    # (T, d) = (T, F) @ (F, d), the weights as they are stored
    multiply_by = partial(plan.kernels.matmul, b_k_major=True, transpose_out=False)
    if w.gate is None:
        (dy_up,) = gradients
        return multiply_by(dy_up, w.up)
    in_float32 = partial(multiply_by, out_dtype=jnp.dtype(jnp.float32))
    dgate, dup = gradients
    return (in_float32(dgate, w.gate) + in_float32(dup, w.up)).astype(x.dtype)


def _gradient(
    plan: FFNPlan,
    groups: TokenGroups | None,
    w: ReadWeights,
    dy: jax.Array,
    a: Packed,
) -> tuple[Packed, OverTokens | None]:
    """Returns dY1 packed along the features and, where there are groups of tokens, A
    and dY1 packed along the tokens; else None."""
    kernels = plan.kernels
    assert kernels is not None
    # (T, F) = (T, d) @ (d, F)
    if plan.d_hidden_writes_dy_up:
        assert w.packed_down is not None
        weight = as_packed(w.packed_down, kernels)
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


def _gated_gradients(
    plan: FFNPlan,
    groups: TokenGroups | None,
    w: ReadWeights,
    dy: jax.Array,
    kept: GatedActivations,
) -> tuple[tuple[Packed, Packed], OverTokens | None]:
    """Returns dG and dU packed along the features and, where there are groups of
    tokens, A, dG and dU packed along the tokens; else None."""
    kernels = plan.kernels
    assert kernels is not None
    # (T, F) = (T, d) @ (d, F)
    da = multiply_by_weight(plan.d_hidden, dy, w.down.T, w.packed_down)
    if groups is None:
        return kernels.gated_gradients(da, kept.hidden, kept.up), None
    return kernels.gated_gradients_over_tokens(
        da, kept.hidden, kept.up, groups.residual, by_segments=groups.by_segments
    )


PACKED = Execution(forward, backward)
