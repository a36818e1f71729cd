"""The feed-forward network with squared ReLU: six GEMMs behind one custom_vjp.

`ffn_spec` states the six equations and what may be sparse in them. The forward and the
backward of a sparse FFN do not read the same matrices: GEMM 1 reads S(W1) and GEMM 4
reads W1, GEMM 2 reads W2 and GEMM 3 reads S(W2^T). The gradient is therefore an
estimator, straight through masks and soft threshold, not the derivative of the output.
With everything dense it is the derivative.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from sparsejax.annotations import check_value
from sparsejax.ops.backend import Backend
from sparsejax.ops.ffn_all_neurons import ALL_NEURONS
from sparsejax.ops.ffn_by_expert import BY_EXPERT
from sparsejax.ops.ffn_choice import warn_if_slower
from sparsejax.ops.ffn_frame import Static, run
from sparsejax.ops.ffn_layout import FFNLayout
from sparsejax.ops.ffn_plan import FFNPlan
from sparsejax.ops.ffn_spec import DENSE, FFNSparsity, FFNSpec
from sparsejax.ops.ffn_weights import FFNWeights, PackedFFN, pack_ffn


def ffn(
    x: Float[Array, "tokens d_model"],
    w_up: Float[Array, "d_model d_hidden"],
    w_down: Float[Array, "d_hidden d_model"],
    *,
    sparsity: FFNSparsity = DENSE,
    packed: PackedFFN | None = None,
    scales: Float[Array, "2"] | None = None,
    expert_index: Int[Array, "tokens experts_per_token"] | None = None,
    key: Key[Array, ""] | None = None,
    layout: FFNLayout | None = None,
    backend: Backend | None = None,
) -> Float[Array, "tokens d_model"]:
    """`relu(x S(W1))^2 W2` with the sparsity of `sparsity`, forward and backward.

    With A = relu(Y1)^2 masked to its pattern, Y = A W2; the backward is that of the
    six equations in `ffn_spec`. GEMMs accumulate in float32 and round once to the
    dtype of x, weight gradients to the dtype of the weights. Masks, routing and soft
    threshold are constants in the backward (straight through). A token's output
    depends on no other token; of no tokens at all Y is empty and the gradients of the
    weights are zero.

    Args:
      x: activations, float32 or bfloat16: the compute dtype. float16 is refused: the
        squares of numbers above 256 are beyond it.
      w_up, w_down: W1 and W2, usually float32 masters. Where experts are used, the
        neurons of expert e are columns e F / E to (e + 1) F / E.
      packed: S(W1) and S(W2^T) from `pack_ffn`, made once per optimiser step. They
        must belong to w_up and w_down, which the gradients refer to.
      scales: the frozen beta of W1 and W2^T, for packing here if `packed` is None.
      expert_index: V:N:M with a router before GEMM 1: the experts of each token,
        integers. An expert counts once for a token however often it is named, and a
        choice outside [0, experts) is none: a token without any has Y = 0.
      key: for `token_sparsity` "mvue" and "mvue_approximate".
      layout: on a mesh of several devices, how the operands lie on it; called under jit
        with arrays of their whole shapes. The result is that of one device within
        rounding, except that `token_sparsity` takes its groups of four and its dense
        features from what a device has, its tokens of one call and its neurons.
      backend: None for the fastest that can, GEMM by GEMM; a name runs everywhere or
        raises.
    Raises:
      ValueError: shapes or dtypes do not fit, an argument that `sparsity` needs is
        missing, or the layout would cut a group or an expert apart.
      NotImplementedError: the named backend cannot run a GEMM; says why.
    Source: arXiv 2602.06183, 2503.16672, 2409.09099. Differences: `true_mass` routing
      and several experts per token are ours.
    """
    check_value("layout", layout, FFNLayout | None)
    shards = {}
    if layout is not None:
        layout.check(x.shape[0], w_up.shape[1], sparsity)
        shards = layout.shards
    spec = FFNSpec.of(x, w_up, w_down, sparsity, **shards)
    _check_arguments(spec, scales, packed, expert_index, key)
    if spec.tokens == 0 and not sparsity.is_dense:
        # Without tokens any FFN is the dense one, and there are no rows to make tiles
        # of.
        return ffn(x, w_up, w_down, layout=layout, backend=backend)
    plan = FFNPlan.of(spec, backend)
    if backend is None:
        warn_if_slower(plan.gemms)
    if sparsity.weights is None:
        packed = None
    elif packed is None and scales is not None:
        packed = pack_ffn(
            w_up,
            w_down,
            sparsity=sparsity,
            scales=scales,
            dtype=jnp.dtype(spec.dtype),
            layout=layout,
            backend=backend,
        )
    if not sparsity.experts or sparsity.router == "true_mass":
        expert_index = None
    key = key if sparsity.needs_key else None
    packed = jax.lax.stop_gradient(packed)
    static = Static(plan, layout, BY_EXPERT if sparsity.experts else ALL_NEURONS)
    return run(static, x, FFNWeights(w_up, w_down), packed, expert_index, key)


def _check_arguments(spec: FFNSpec, scales, packed, expert_index, key) -> None:
    sparsity = spec.sparsity
    if sparsity.weights and packed is None and scales is None:
        raise ValueError(
            f"weights={sparsity.weights} needs scales, the frozen beta of each weight "
            f"(or packed weights): compute it once with pruning.soft_threshold_scale "
            f"and keep it, since a beta that follows the weights runs away "
            f"(arXiv 2409.09099)"
        )
    if sparsity.experts and sparsity.router != "true_mass":
        expected = (spec.tokens, sparsity.experts_per_token)
        if expert_index is None or expert_index.shape != expected:
            got = None if expert_index is None else expert_index.shape
            raise ValueError(
                f"router={sparsity.router!r} needs expert_index of shape {expected}, "
                f"got {got}; make it with router.{sparsity.router}"
            )
        if not jnp.issubdtype(expert_index.dtype, jnp.integer):
            raise ValueError(
                f"expert_index has dtype {expert_index.dtype} and must have integers, "
                f"the numbers of experts; make it with router.{sparsity.router}"
            )
    if sparsity.needs_key and key is None:
        raise ValueError(
            f"token_sparsity={sparsity.token_sparsity!r} draws random numbers; pass "
            f"key, a new one at every step"
        )
