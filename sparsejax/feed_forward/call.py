"""One call of an FFN whose operands have been checked: planned, packed and run."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key

from sparsejax.explicit_axes import automatically, spec_of
from sparsejax.feed_forward.choice import warn_if_slower
from sparsejax.feed_forward.experts.sample import Sample
from sparsejax.feed_forward.frame import Execution, Static, run
from sparsejax.feed_forward.layout import FFNLayout, check_placed
from sparsejax.feed_forward.operands.experts import ExpertOperands
from sparsejax.feed_forward.operands.weights import (
    FFNWeights,
    PackedFFN,
    check_packed,
    pack_ffn,
)
from sparsejax.feed_forward.passes.by_expert import BY_EXPERT
from sparsejax.feed_forward.passes.dense_on_kernels import DENSE_ON_KERNELS
from sparsejax.feed_forward.passes.masked import MASKED
from sparsejax.feed_forward.passes.packed import PACKED
from sparsejax.feed_forward.plan import FFNPlan
from sparsejax.feed_forward.sparsity import DENSE
from sparsejax.feed_forward.spec import FFNCall
from sparsejax.ops.backend import Backend


def call_ffn(
    spec: FFNCall,
    x: Float[Array, "tokens d_model"],
    weights: FFNWeights,
    *,
    packed: PackedFFN | None,
    scales: Float[Array, " matrices"] | None,
    experts: ExpertOperands[jax.Array] | None,
    key: Key[Array, ""] | None,
    layout: FFNLayout | None,
    backend: Backend | None,
    observed_share: float | None = None,
) -> tuple[Float[Array, "tokens d_model"], Sample | None]:
    """Returns Y of an FFN, and what it observes: decides what runs its GEMMs, packs its
    weights where the caller has not, and runs it.

    Args:
      spec: the static facts of the call; `ffn` and `gated_ffn` describe the other
        arguments.
      observed_share: the share of an optimiser step that the call is, to return a
        sample of the tokens, of which there must be some; then the sparsity has
        experts. The penalty is added where `experts` has its strength. None: no sample
        is returned.
    Raises:
      ValueError: an argument that the sparsity needs is missing or does not fit.
      NotImplementedError: the named backend cannot run a GEMM; says why.
    """
    _check_needed(spec, scales, packed, key)
    if packed is not None:
        check_packed(
            packed,
            weights,
            sparsity=spec.sparsity,
            quantises=spec.sparsity.rounds_up_weight(spec.precision),
            dtype=jnp.dtype(spec.dtype),
        )
    named = {f"w_{name}": weight for name, weight in weights._asdict().items()}
    check_placed(layout, x=x, **named)
    experts = _operands_of_experts(spec, experts)
    if spec.tokens == 0:
        # Without tokens any FFN is the dense one, and there are no rows to make tiles
        # of.
        spec, experts = replace(spec, sparsity=DENSE), None
    sparsity = spec.sparsity
    plan = FFNPlan.of(spec, backend)
    if backend is None:
        warn_if_slower(plan.gemms)
    rounds = sparsity.rounds_up_weight(spec.precision)
    if sparsity.weights is None and not rounds:
        packed = None if packed is None else PackedFFN(dense=packed.dense)
    elif packed is None:
        packed = pack_ffn(
            weights.up,
            weights.down,
            w_gate=weights.gate,
            sparsity=sparsity,
            precision=spec.precision,
            scales=scales,
            dtype=jnp.dtype(spec.dtype),
            layout=layout,
            backend=backend,
        )
    static = Static(plan, layout, _execution(plan), observed_share)
    key = key if sparsity.needs_key else None
    packed, experts = jax.lax.stop_gradient((packed, experts))
    operands = x, weights, packed, experts, key
    split = spec_of(x)
    return automatically(partial(run, static), *operands, out=(split, split))


def _execution(plan: FFNPlan) -> Execution:
    if plan.sparsity.experts:
        return BY_EXPERT
    if plan.fuses_activation:
        return DENSE_ON_KERNELS
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


def _operands_of_experts(
    spec: FFNCall, given: ExpertOperands[jax.Array] | None
) -> ExpertOperands[jax.Array] | None:
    """Returns the operands that a call reads, None without experts. Raises ValueError
    where one is missing or does not fit."""
    sparsity = spec.sparsity
    if not sparsity.experts:
        return None
    given = given or ExpertOperands()
    index, threshold = given.index, given.energy_threshold
    if sparsity.router.inside:
        index = None
    else:
        _check_index(spec, index)
    operands = given._replace(index=index, energy_threshold=None)
    if sparsity.most_experts_per_token is None or not sparsity.router.inside:
        return operands
    if threshold is None:
        raise ValueError(
            f"most_experts_per_token={sparsity.most_experts_per_token} needs "
            f"energy_threshold, the share of a token's energy above which it uses an "
            f"expert; a SparseFFN keeps one that moves in training"
        )
    return operands._replace(energy_threshold=jnp.asarray(threshold, jnp.float32))


def _check_index(spec: FFNCall, index: Array | None) -> None:
    """Raises ValueError where `expert_index` does not hold integers, `expert_choices`
    for each token; outside of traces also where these are said to differ, and do
    not."""
    expected = (spec.tokens, spec.sparsity.expert_choices)
    router = spec.sparsity.router
    if index is None or index.shape != expected:
        got = None if index is None else index.shape
        raise ValueError(
            f"router={router.name!r} needs expert_index of shape {expected}, got "
            f"{got}; make it with {type(router).__name__}.choose"
        )
    if not jnp.issubdtype(index.dtype, jnp.integer):
        raise ValueError(
            f"expert_index has dtype {index.dtype} and must have integers, the "
            f"numbers of experts; make it with {type(router).__name__}.choose"
        )
    adaptive = spec.sparsity.most_experts_per_token is not None
    is_promised = spec.distinct_experts and router.chooses_different
    if adaptive or not is_promised or isinstance(index, jax.core.Tracer):
        return
    if isinstance(index, jax.Array) and not index.is_fully_addressable:
        return
    found = np.sort(np.asarray(index), axis=1)
    same = (found[:, 1:] == found[:, :-1]).any(axis=1)
    outside = ((found < 0) | (found >= spec.sparsity.experts)).any(axis=1)
    if (wrong := same | outside).any():
        token = int(np.argmax(wrong))
        raise ValueError(
            f"distinct_experts says that each token has {expected[1]} different "
            f"experts in [0, {spec.sparsity.experts}), and expert_index[{token}] is "
            f"{np.asarray(index)[token].tolist()}; leave distinct_experts out, or make "
            f"expert_index with {type(router).__name__}.choose"
        )
