"""One call of an FFN whose operands have been checked: planned, packed and run."""

from dataclasses import replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from sparsejax.feed_forward.by_expert import BY_EXPERT
from sparsejax.feed_forward.choice import warn_if_slower
from sparsejax.feed_forward.frame import Execution, Static, run
from sparsejax.feed_forward.layout import FFNLayout
from sparsejax.feed_forward.masked import MASKED
from sparsejax.feed_forward.operands.weights import FFNWeights, PackedFFN, pack_ffn
from sparsejax.feed_forward.packed import PACKED
from sparsejax.feed_forward.plan import FFNPlan
from sparsejax.feed_forward.spec import DENSE, FFNCall
from sparsejax.ops.backend import Backend


def call_ffn(
    spec: FFNCall,
    x: Float[Array, "tokens d_model"],
    weights: FFNWeights,
    *,
    packed: PackedFFN | None,
    scales: Float[Array, " matrices"] | None,
    expert_index: Int[Array, "tokens experts_per_token"] | None,
    key: Key[Array, ""] | None,
    layout: FFNLayout | None,
    backend: Backend | None,
) -> Float[Array, "tokens d_model"]:
    """Returns Y of an FFN: decides what runs its GEMMs, packs its weights where the
    caller has not, and runs it.

    Args:
      spec: the static facts of the call; `ffn` and `gated_ffn` describe the other
        arguments.
    Raises:
      ValueError: an argument that the sparsity needs is missing.
      NotImplementedError: the named backend cannot run a GEMM; says why.
    """
    _check_needed(spec, scales, packed, key)
    if spec.tokens == 0:
        # Without tokens any FFN is the dense one, and there are no rows to make tiles
        # of.
        spec, expert_index = replace(spec, sparsity=DENSE), None
    sparsity = spec.sparsity
    plan = FFNPlan.of(spec, backend)
    if backend is None:
        warn_if_slower(plan.gemms)
    if sparsity.weights is None:
        packed = None
    elif packed is None and scales is not None:
        packed = pack_ffn(
            weights.up,
            weights.down,
            w_gate=weights.gate,
            sparsity=sparsity,
            scales=scales,
            dtype=jnp.dtype(spec.dtype),
            layout=layout,
            backend=backend,
        )
    static = Static(plan, layout, _execution(plan))
    key = key if sparsity.needs_key else None
    return run(static, x, weights, jax.lax.stop_gradient(packed), expert_index, key)


def _execution(plan: FFNPlan) -> Execution:
    if plan.sparsity.experts:
        return BY_EXPERT
    return PACKED if plan.packs_activations else MASKED


def _check_needed(
    spec: FFNCall,
    scales: Array | None,
    packed: PackedFFN | None,
    key: Array | None,
) -> None:
    sparsity = spec.sparsity
    if sparsity.weights and packed is None and scales is None:
        raise ValueError(
            f"weights={sparsity.weights} needs scales, the frozen beta of each of the "
            f"{'three' if spec.kind.gated else 'two'} weights (or packed weights): "
            f"compute it once with masks.soft_threshold_scale and keep it, since a "
            f"beta that follows the weights runs away (arXiv 2409.09099)"
        )
    if sparsity.needs_key and key is None:
        raise ValueError(
            f"token_sparsity={sparsity.token_sparsity!r} draws random numbers; pass "
            f"key, a new one at every step"
        )
