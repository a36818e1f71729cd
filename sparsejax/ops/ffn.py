"""The feed-forward network with squared ReLU: six GEMMs behind one custom_vjp.

`ffn_spec` states the six equations and what may be sparse in them. The forward and the
backward of a sparse FFN do not read the same matrices: GEMM 1 reads S(W1) and GEMM 4
reads W1, GEMM 2 reads W2 and GEMM 3 reads S(W2^T). The gradient is therefore an
estimator, straight through masks and soft threshold, not the derivative of the output.
With everything dense it is the derivative.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int, Key

from sparsejax.annotations import check_value
from sparsejax.ops import ffn_all_neurons, ffn_by_expert
from sparsejax.ops.backend import Backend
from sparsejax.ops.ffn_choice import warn_if_slower
from sparsejax.ops.ffn_layout import (
    FFNLayout,
    device_spec,
    gather_packed,
    gather_weight,
    on_mesh,
    own_key,
    packed_specs,
    sum_over_neurons,
    sum_over_tokens,
    token_spec,
    weight_spec,
)
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
      backend: None for the first of `PREFERENCE` that can, GEMM by GEMM; a name runs
        everywhere or raises.
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
    decisions = spec.explain(backend)
    if backend is None:
        warn_if_slower(decisions)
    backends = tuple(decision.backend for decision in decisions)
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
    how = _How(sparsity, backends, layout)
    return _ffn(how, x, w_up, w_down, packed, expert_index, key)


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


class _How(NamedTuple):
    """What is static in a call."""

    sparsity: FFNSparsity
    backends: tuple[Backend, ...]
    layout: FFNLayout | None


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ffn(how, x, w_up, w_down, packed, expert_index, key):
    return _fwd(how, x, w_up, w_down, packed, expert_index, key)[0]


def _fwd(how, x, w_up, w_down, packed, expert_index, key):
    tokens = token_spec(how.layout)
    forward = on_mesh(
        how.layout,
        partial(_forward, how),
        in_specs=(tokens, *_weight_specs(how.layout, packed), tokens),
        out_specs=(tokens, device_spec(how.layout)),
    )
    weights = (w_up, w_down)
    y, residuals = forward(x, weights, packed, expert_index)
    kept_x = None if ffn_by_expert.keeps_rows_of_x(how.sparsity) else x
    return y, (kept_x, residuals, weights, packed, key)


def _bwd(how, saved, dy):
    x, residuals, weights, packed, key = saved
    tokens = token_spec(how.layout)
    weight_specs, packed_specs = _weight_specs(how.layout, packed)
    backward = on_mesh(
        how.layout,
        partial(_backward, how),
        in_specs=(
            tokens,
            device_spec(how.layout),
            weight_specs,
            packed_specs,
            tokens,
            PartitionSpec(),
        ),
        out_specs=(tokens, weight_specs),
    )
    dx, dw = backward(x, residuals, weights, packed, dy, key)
    return dx, *dw, None, None, None


_ffn.defvjp(_fwd, _bwd)


def _weight_specs(layout, packed):
    """Of (W1, W2) and of the packed weights."""
    weights = weight_spec(layout, 1), weight_spec(layout, 0)
    return weights, packed_specs(layout, packed)


def _forward(how, x, weights, packed, expert_index):
    """Y and the residuals, of one device's part of the operands."""
    sparsity, backends, layout = how
    w = _as_read(layout, x.dtype, weights, packed)
    if sparsity.experts:
        y, residuals = ffn_by_expert.forward(
            sparsity, backends, x, w, expert_index, layout
        )
    else:
        y, residuals = ffn_all_neurons.forward(sparsity, backends, x, w)
    return sum_over_neurons(layout, y), residuals


def _backward(how, x, residuals, weights, packed, dy, key):
    """dX and (dW1, dW2), of one device's part of the operands."""
    sparsity, backends, layout = how
    w = _as_read(layout, dy.dtype, weights, packed)
    backward = (ffn_by_expert if sparsity.experts else ffn_all_neurons).backward
    key = own_key(layout, key)
    dx, dw_up, dw_down = backward(sparsity, backends, x, residuals, w, dy, key)
    w_up, w_down = weights
    dw_up = sum_over_tokens(layout, dw_up.astype(w_up.dtype), 1)
    dw_down = sum_over_tokens(layout, dw_down.astype(w_down.dtype), 0)
    return sum_over_neurons(layout, dx), (dw_up, dw_down)


def _as_read(layout, dtype, weights, packed) -> FFNWeights:
    """The weights of a device's neurons. Each is gathered wherever it is stored split;
    XLA drops those that no GEMM reads."""
    w_up, w_down = (w.astype(dtype) for w in weights)
    dense = gather_weight(layout, w_up, 1), gather_weight(layout, w_down, 0)
    if packed is None:
        return FFNWeights(*dense)
    in_order = packed.up, packed.down
    return FFNWeights(*dense, *(gather_packed(layout, c) for c in in_order))
