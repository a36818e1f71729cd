"""An FFN without kernels: XLA multiplies dense operands that masks have zeroed.

Every token may use every neuron: A is dense or 2:4 along F.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from sparsejax.dtypes import accumulation_dtype
from sparsejax.feed_forward.activation import Activation, Hidden
from sparsejax.feed_forward.frame import Execution, Static
from sparsejax.feed_forward.operands.token_sparsity import (
    densest_features,
    in_fixed_order,
    sparsify_tokens,
)
from sparsejax.feed_forward.operands.weights import (
    FFNWeights,
    ReadWeights,
    multiply,
    multiply_by_weight,
)
from sparsejax.feed_forward.plan import FFNPlan
from sparsejax.sparsity.masks import magnitude_mask, nm_mask
from sparsejax.sparsity.patterns import NM


def into_hidden(plan: FFNPlan, x: jax.Array, w: ReadWeights) -> Hidden:
    """Returns the products of X with the weights into the hidden layer, each (tokens,
    d_hidden): (Y1,), or (G, U) of a gated FFN."""
    # (T, F) = (T, d) @ (d, F)
    up = multiply_by_weight(plan.up, x, w.dense(plan.up, "up"), w.packed_up)
    if plan.gate is None:
        return (up,)
    w_gate = w.dense(plan.gate, "gate")
    return multiply_by_weight(plan.gate, x, w_gate, w.packed_gate), up


def kept_where_masked(
    activation: Activation, products: Hidden, pattern: NM | None
) -> Hidden:
    """Returns what the activation keeps of the products, its first array masked to the
    pattern along the neurons; with None it is not masked."""
    kept = activation.keep(products)
    if pattern is None:
        return kept
    first, *others = kept
    mask = nm_mask(activation.scores(products), pattern)
    # Computed once: XLA would otherwise repeat the selection in each of the fusions
    # that read it (measured on CPU: 10 % of a sparse FFN step).
    return (lax.optimization_barrier(jnp.where(mask, first, 0)), *others)


def forward(
    static: Static, x: jax.Array, w: ReadWeights, experts: None
) -> tuple[jax.Array, Hidden, None]:
    """Returns Y (tokens, d_model), and what the activation keeps for the backward.
    Where the backward re-uses the mask, this is masked: its zeros are all that the
    backward needs of the mask. Nothing is observed."""
    plan, activation = static.plan, static.plan.activation
    products = into_hidden(plan, x, w)
    kept = kept_where_masked(activation, products, plan.sparsity.in_expert)
    # (T, d) = (T, F) @ (F, d)
    y = multiply(plan.down, activation.apply(kept), w.dense(plan.down, "down"))
    return y, kept if plan.sparsity.mask_reuse else activation.keep(products), None


def backward(
    static: Static,
    x: jax.Array,
    kept: Hidden,
    w: ReadWeights,
    dy: jax.Array,
    key: jax.Array | None,
) -> tuple[jax.Array, FFNWeights]:
    """Returns dX (tokens, d_model), and the gradients of the weights in float32."""
    plan, pattern = static.plan, static.plan.sparsity.in_expert
    # (T, F) = (T, d) @ (d, F)
    w_down = w.dense(plan.d_hidden, "down")
    da = multiply_by_weight(plan.d_hidden, dy, w_down.T, w.packed_down)
    a, gradients = plan.activation.with_gradients(da, kept)
    selected = gradients
    if pattern is not None and not plan.sparsity.mask_reuse:
        selected = tuple(jnp.where(magnitude_mask(g, pattern), g, 0) for g in gradients)
    dx = _input_gradient(plan, x, selected, w)
    return dx, weight_gradients(plan, x, gradients, a, dy, key)


def _input_gradient(
    plan: FFNPlan, x: jax.Array, gradients: Hidden, w: ReadWeights
) -> jax.Array:
    """Returns dX (tokens, d_model). In a gated FFN it is the sum of two products in
    float32."""
    # (T, d) = (T, F) @ (F, d)
    w_up = w.dense(plan.d_input, "up")
    if plan.d_input_gate is None:
        (dy_up,) = gradients
        return multiply(plan.d_input, dy_up, w_up.T)
    w_gate = w.dense(plan.d_input_gate, "gate")
    accumulate = accumulation_dtype(x.dtype)
    dgate, dup = gradients
    dx = multiply(plan.d_input_gate, dgate, w_gate.T, out_dtype=accumulate)
    more = multiply(plan.d_input, dup, w_up.T, out_dtype=accumulate)
    return (dx + more).astype(x.dtype)


def weight_gradients(
    plan: FFNPlan,
    x: jax.Array,
    into_hidden: Sequence[jax.Array],
    a: jax.Array,
    dy: jax.Array,
    key: jax.Array | None,
) -> FFNWeights:
    """Returns x^T g for each g of `into_hidden`, and a^T dy, summed over all tokens, in
    float32.

    With `token_sparsity` every g and a are 2:4 along the tokens, but for the features
    with most non-zeros in a.

    Args:
      into_hidden: the gradients before the activation, (tokens, d_hidden) each: dY1, or
        dG and dU of a gated FFN.
      a: A, the result of the activation, (tokens, d_hidden).
      key: a random key where `token_sparsity` draws; else None.
    """
    sparsity = plan.sparsity
    if sparsity.token_sparsity is not None:
        method = sparsity.token_sparsity
        ordered = in_fixed_order if sparsity.permute_tokens else _by_fours
        dense = densest_features(
            jnp.sum(a != 0, axis=0), sparsity.dense_features, x.shape[0]
        )
        x, *sparse, dy = (ordered(m) for m in (x, *into_hidden, a, dy))
        keys = [None] * len(sparse)
        if key is not None:
            keys = list(jax.random.split(key, len(sparse)))
        *into_hidden, a = (
            sparsify_tokens(matrix, dense[None], method, key)
            for matrix, key in zip(sparse, keys, strict=True)
        )
    accumulate = accumulation_dtype(x.dtype)
    into = [gemm for gemm in (plan.d_gate, plan.d_up) if gemm is not None]
    # (d, F) = (d, T) @ (T, F)
    *gate, up = (
        multiply(gemm, x.T, g, out_dtype=accumulate)
        for gemm, g in zip(into, into_hidden, strict=True)
    )
    # (F, d) = (F, T) @ (T, d)
    down = multiply(plan.d_down, a.T, dy, out_dtype=accumulate)
    return FFNWeights(up=up, down=down, gate=gate[0] if gate else None)


def _by_fours(x: jax.Array) -> jax.Array:
    """Returns x with rows of zeros appended up to a whole number of groups of four."""
    return jnp.pad(x, ((0, -x.shape[0] % 4), (0, 0)))


MASKED = Execution(forward, backward)
