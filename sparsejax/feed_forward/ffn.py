"""The feed-forward network with squared ReLU: six GEMMs behind one custom_vjp.

`spec` states the six equations, and `sparsity` what may be sparse in them. The forward
and the backward of a sparse FFN do not read the same matrices: GEMM 1 reads S(W1) and
GEMM 4 reads W1, GEMM 2 reads W2 and GEMM 3 reads S(W2^T). The gradient is therefore an
estimator, straight through masks and soft threshold, not the derivative of the output.
With everything dense it is the derivative. With `exact_gradients` GEMM 3 reads W2^T and
GEMM 4 reads S(W1)^T: the derivative of the output with its masks held constant, by
S(W1) in the place of W1.
"""

import jax
from jaxtyping import Array, Float, Int, Key

from sparsejax.annotations import check_value
from sparsejax.dtypes import Precision
from sparsejax.feed_forward.call import call_ffn
from sparsejax.feed_forward.experts.sample import Sample
from sparsejax.feed_forward.layout import FFNLayout
from sparsejax.feed_forward.operands.experts import ExpertOperands
from sparsejax.feed_forward.operands.weights import FFNWeights, PackedFFN
from sparsejax.feed_forward.sparsity import DENSE, FFNSparsity
from sparsejax.feed_forward.spec import FFNSpec
from sparsejax.ops.backend import Backend


def ffn(
    x: Float[Array, "tokens d_model"],
    w_up: Float[Array, "d_model d_hidden"],
    w_down: Float[Array, "d_hidden d_model"],
    *,
    sparsity: FFNSparsity = DENSE,
    precision: Precision = "dtype",
    packed: PackedFFN | None = None,
    scales: Float[Array, "2"] | None = None,
    expert_index: Int[Array, "tokens experts_per_token"] | None = None,
    distinct_experts: bool = False,
    energy_threshold: Float[Array, ""] | None = None,
    key: Key[Array, ""] | None = None,
    layout: FFNLayout | None = None,
    backend: Backend | None = None,
) -> Float[Array, "tokens d_model"]:
    """Computes `relu(x S(W1))^2 W2` with the sparsity of `sparsity`, forward and
    backward.

    With A = relu(Y1)^2 masked to its pattern, Y = A W2; the backward is that of the
    six equations in `spec`. GEMMs accumulate in float32 and round once to the
    dtype of x, weight gradients to the dtype of the weights. Masks, routing and soft
    threshold are constants in the backward (straight through). A token's output
    depends on no other token, but for the scale of 8-bit floats, which the tokens of a
    call share. Of no tokens at all Y is empty and the gradients of the weights are
    zero.

    Args:
      x: activations, float32 or bfloat16: the compute dtype. float16 is refused: the
        squares of numbers above 256 are beyond it.
      w_up, w_down: W1 and W2, usually float32 masters. Where experts are used, the
        neurons of expert e are columns e F / E to (e + 1) F / E.
      precision: "fp8" and "fp8_all" round the operands of a dense FFN's GEMMs to 8-bit
        floats (`ops.fp8_matmul`). In a sparse FFN they round those of GEMM 1, where it
        multiplies every token by dense weights of all neurons, and no others.
      packed: S(W1) and S(W2^T), or W1 and W2 in 8-bit floats or in the dtype of x, from
        `pack_ffn`, made once per optimiser step. They must belong to w_up and w_down,
        which the gradients refer to.
      scales: the frozen beta of W1 and W2^T, for packing here if `packed` is None.
      expert_index: V:N:M with a router before GEMM 1: the experts of each token,
        integers. An expert counts once for a token however often it is named, and a
        choice outside [0, experts) is none: a token without any has Y = 0.
      distinct_experts: whether every token has `experts_per_token` different experts in
        [0, experts), as a router's `choose` returns them. Where kernels can, a token
        then has one row for all of them, which is faster. Under `jax.jit` it is not
        checked, and with other choices the result is wrong.
      energy_threshold: with `most_experts_per_token`, the share of a token's energy
        above which it uses an expert; not read with a router before GEMM 1, whose
        choice is in `expert_index`.
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
    Source: arXiv 2602.06183, 2503.16672, 2409.09099. Differences: routing by activation
      energy and several experts per token are ours.
    """
    y, _ = call_ffn(
        _spec(x, w_up, w_down, sparsity, precision, layout, distinct_experts),
        x,
        FFNWeights(w_up, w_down),
        packed=packed,
        scales=scales,
        experts=ExpertOperands(expert_index, energy_threshold),
        key=key,
        layout=layout,
        backend=backend,
    )
    return y


def observed_ffn(
    x: Float[Array, "tokens d_model"],
    w_up: Float[Array, "d_model d_hidden"],
    w_down: Float[Array, "d_hidden d_model"],
    *,
    sparsity: FFNSparsity,
    precision: Precision = "dtype",
    packed: PackedFFN | None = None,
    scales: Float[Array, "2"] | None = None,
    expert_index: Int[Array, "tokens experts_per_token"] | None = None,
    distinct_experts: bool = False,
    energy_threshold: Float[Array, ""] | None = None,
    penalty_strength: Float[Array, ""] | None = None,
    share_of_step: float = 1.0,
    key: Key[Array, ""] | None = None,
    layout: FFNLayout | None = None,
    backend: Backend | None = None,
) -> tuple[Float[Array, "tokens d_model"], Sample]:
    """Returns the result of `ffn`, and a sample of the tokens with what they use of the
    experts, which a training step moves its observed state by.

    Args:
      sparsity: a sparsity with experts; it and the arguments that are not listed are
        those of `ffn`.
      penalty_strength: the norm of what the penalty on skipped neurons adds to dW1
        (`experts.penalty`), as a share of that of dW1; None adds nothing.
      share_of_step: the share of an optimiser step that the call is, one over the
        number of micro-batches: a smaller share has a smaller sample.
    Raises:
      ValueError: as `ffn`, or there are no experts or no tokens to observe.
      NotImplementedError: as `ffn`.
    """
    check_value("sparsity", sparsity, FFNSparsity)
    if sparsity.experts is None or not len(x):
        raise ValueError(
            f"{len(x)} tokens of an FFN with {sparsity.experts or 'no'} experts give "
            f"nothing to observe; call ffn, or give it tokens and V:N:M activations"
        )
    y, sample = call_ffn(
        _spec(x, w_up, w_down, sparsity, precision, layout, distinct_experts),
        x,
        FFNWeights(w_up, w_down),
        packed=packed,
        scales=scales,
        experts=ExpertOperands(expert_index, energy_threshold, penalty_strength),
        key=key,
        layout=layout,
        backend=backend,
        observed_share=share_of_step,
    )
    assert sample is not None
    return y, sample


def _spec(
    x: jax.Array,
    w_up: jax.Array,
    w_down: jax.Array,
    sparsity: FFNSparsity,
    precision: Precision,
    layout: FFNLayout | None,
    distinct_experts: bool,
) -> FFNSpec:
    """Returns the static facts of a call. Raises ValueError where they do not fit."""
    check_value("layout", layout, FFNLayout | None)
    shards = {}
    if layout is not None:
        layout.check(x.shape[0], w_up.shape[1], sparsity)
        shards = layout.shards
    return FFNSpec.of(
        x,
        w_up,
        w_down,
        sparsity,
        precision=precision,
        # Such a router chooses inside the call.
        distinct_experts=distinct_experts or sparsity.router.inside,
        **shards,
    )
