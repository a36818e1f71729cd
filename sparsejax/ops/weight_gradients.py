"""GEMMs 5 and 6 over all tokens and neurons, dense or 2:4 along the tokens."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from sparsejax.ops.ffn_plan import FFNPlan
from sparsejax.ops.ffn_weights import FFNWeights, multiply
from sparsejax.ops.token_sparsity import (
    densest_features,
    in_fixed_order,
    sparsify_tokens,
)


def weight_gradients(
    plan: FFNPlan,
    x: jax.Array,
    into_hidden: Sequence[jax.Array],
    a: jax.Array,
    dy: jax.Array,
    key: jax.Array | None,
) -> FFNWeights:
    """x^T g for each g of `into_hidden`, and a^T dy, over all tokens; in float32.

    With `token_sparsity` every g and a are 2:4 along the tokens, but for the features
    with most non-zeros in a.

    Args:
      into_hidden: gradients before the activation, (tokens, d_hidden) each: dY1, or of
        a gated FFN dG and dU.
      a: after it, (tokens, d_hidden).
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
    accumulate = jnp.promote_types(x.dtype, jnp.float32)
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
    """Zero rows appended up to a whole number of groups of four."""
    return jnp.pad(x, ((0, -x.shape[0] % 4), (0, 0)))
