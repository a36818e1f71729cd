"""The feed-forward network with squared ReLU: six GEMMs behind one custom_vjp.

`ffn_spec` states the six equations and what may be sparse in them. The forward and the
backward of a sparse FFN do not read the same matrices: GEMM 1 reads S(W1) and GEMM 4
reads W1, GEMM 2 reads W2 and GEMM 3 reads S(W2^T). The gradient is therefore an
estimator, straight through masks and soft threshold, not the derivative of the output.
With everything dense it is the derivative.
"""

from functools import partial

import jax
from jaxtyping import Array, Float, Int, Key

from sparsejax.ops import ffn_all_neurons, ffn_by_expert
from sparsejax.ops.backend import Backend
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
    backend: Backend | None = None,
) -> Float[Array, "tokens d_model"]:
    """`relu(x S(W1))^2 W2` with the sparsity of `sparsity`, forward and backward.

    With A = relu(Y1)^2 masked to its pattern, Y = A W2; the backward is that of the
    six equations in `ffn_spec`. GEMMs accumulate in float32 and round once to the
    dtype of x, weight gradients to the dtype of the weights. Masks, routing and soft
    threshold are constants in the backward (straight through). A token's output
    depends on no other token.

    Args:
      x: activations, float32 or bfloat16: the compute dtype.
      w_up, w_down: W1 and W2, usually float32 masters. Where experts are used, the
        neurons of expert e are columns e F / E to (e + 1) F / E.
      packed: S(W1) and S(W2^T) from `pack_ffn`, made once per optimiser step. They
        must belong to w_up and w_down, which the gradients refer to.
      scales: the frozen beta of W1 and W2^T, for packing here if `packed` is None.
      expert_index: V:N:M with a router before GEMM 1: the experts of each token.
      key: for `token_sparsity` "mvue" and "mvue_approximate".
      backend: None for the first of `PREFERENCE` that can, GEMM by GEMM; a name runs
        everywhere or raises.
    Raises:
      ValueError: shapes do not fit, or an argument that `sparsity` needs is missing.
      NotImplementedError: the named backend cannot run a GEMM; says why.
    Source: arXiv 2602.06183, 2503.16672, 2409.09099. Differences: `true_mass` routing
      and several experts per token are ours.
    """
    spec = FFNSpec.of(x, w_up, w_down, sparsity)
    _check_arguments(spec, scales, packed, expert_index, key)
    backends = tuple(decision.backend for decision in spec.explain(backend))
    if sparsity.weights is None:
        packed = None
    elif packed is None and scales is not None:
        packed = pack_ffn(w_up, w_down, sparsity=sparsity, scales=scales, dtype=x.dtype)
    if not sparsity.experts or sparsity.router == "true_mass":
        expert_index = None
    key = key if sparsity.needs_key else None
    packed = jax.lax.stop_gradient(packed)
    return _ffn(sparsity, backends, x, w_up, w_down, packed, expert_index, key)


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
    if sparsity.needs_key and key is None:
        raise ValueError(
            f"token_sparsity={sparsity.token_sparsity!r} draws random numbers; pass "
            f"key, a new one at every step"
        )


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _ffn(sparsity, backends, x, w_up, w_down, packed, expert_index, key):
    y, _ = _forward(sparsity, backends, x, w_up, w_down, packed, expert_index)
    return y


def _forward(sparsity, backends, x, w_up, w_down, packed, expert_index):
    w = _as_read(x.dtype, w_up, w_down, packed)
    if sparsity.experts:
        return ffn_by_expert.forward(sparsity, backends, x, w, expert_index)
    return ffn_all_neurons.forward(sparsity, backends, x, w)


def _as_read(dtype, w_up, w_down, packed) -> FFNWeights:
    w_up, w_down = w_up.astype(dtype), w_down.astype(dtype)
    if packed is None:
        return FFNWeights(w_up, w_down)
    return FFNWeights(w_up, w_down, packed.up, packed.down)


def _fwd(sparsity, backends, x, w_up, w_down, packed, expert_index, key):
    y, residuals = _forward(sparsity, backends, x, w_up, w_down, packed, expert_index)
    return y, (residuals, w_up, w_down, packed, key)


def _bwd(sparsity, backends, saved, dy):
    residuals, w_up, w_down, packed, key = saved
    w = _as_read(dy.dtype, w_up, w_down, packed)
    backward = (ffn_by_expert if sparsity.experts else ffn_all_neurons).backward
    dx, dw_up, dw_down = backward(sparsity, backends, residuals, w, dy, key)
    dw_up, dw_down = dw_up.astype(w_up.dtype), dw_down.astype(w_down.dtype)
    return dx, dw_up, dw_down, None, None, None


_ffn.defvjp(_fwd, _bwd)
