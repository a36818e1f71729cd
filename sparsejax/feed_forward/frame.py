"""One custom_vjp and one frame on the mesh, for every FFN.

A plan says what runs; an `Execution` runs it on one device's part of the operands. This
file gathers the weights that a device reads, and sums what devices share.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Key

from sparsejax.feed_forward.experts.sample import Sample
from sparsejax.feed_forward.layout import (
    FFNLayout,
    device_spec,
    gather_packed,
    gather_quantised,
    gather_weight,
    on_mesh,
    own_key,
    packed_specs,
    sum_over_neurons,
    sum_over_tokens,
    token_spec,
    weight_spec,
)
from sparsejax.feed_forward.operands.experts import ExpertOperands, expert_specs
from sparsejax.feed_forward.operands.weights import (
    FFNWeights,
    PackedFFN,
    ReadWeights,
    as_dense,
)
from sparsejax.feed_forward.plan import FFNPlan
from sparsejax.ops.fp8_matmul import QuantisedWeight
from sparsejax.sparsity.compressed import Compressed
from sparsejax.sparsity.packed import Packed


class Execution(NamedTuple):
    """The forward and the backward of one kind of FFN on a device: its GEMMs in
    order."""

    forward: Callable[..., tuple[jax.Array, Any, Sample | None]]
    """Takes (static, x, weights as read, the operands of the experts or None); returns
    Y, the residuals, a pytree, and what is observed, None where nothing is."""
    backward: Callable[..., tuple[jax.Array, FFNWeights]]
    """Takes (static, x or None, residuals, weights as read, dy, key); returns dX, and
    the gradients of the weights in float32."""


class Static(NamedTuple):
    """The part of a call that is static under jit."""

    plan: FFNPlan
    layout: FFNLayout | None
    execution: Execution
    observed_share: float | None = None
    """The share of an optimiser step that the call is, where some tokens are looked at
    with all of their neurons; None where none are."""


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def run(
    static: Static,
    x: Float[Array, "tokens d_model"],
    weights: FFNWeights,
    packed: PackedFFN | None,
    experts: ExpertOperands[jax.Array] | None,
    key: Key[Array, ""] | None,
) -> tuple[Float[Array, "tokens d_model"], Sample | None]:
    """Returns Y of an FFN, differentiable by its six (or nine) equations, and what is
    observed, which has no gradient."""
    return _fwd(static, x, weights, packed, experts, key)[0]


def _fwd(static, x, weights, packed, experts, key):
    layout, tokens = static.layout, token_spec(static.layout)
    forward = on_mesh(
        layout,
        partial(_forward, static),
        in_specs=(
            tokens,
            _weight_specs(layout, weights),
            packed_specs(layout, packed),
            expert_specs(layout, experts),
        ),
        out_specs=(tokens, device_spec(layout), tokens),
    )
    y, residuals, sample = forward(x, weights, packed, experts)
    kept_x = None if static.plan.keeps_rows_of_x else x
    return (y, sample), (kept_x, residuals, weights, packed, key)


def _bwd(static, saved, cotangents):
    x, residuals, weights, packed, key = saved
    dy, _ = cotangents
    layout, tokens = static.layout, token_spec(static.layout)
    weight_specs = _weight_specs(layout, weights)
    backward = on_mesh(
        layout,
        partial(_backward, static),
        in_specs=(
            tokens,
            device_spec(layout),
            weight_specs,
            packed_specs(layout, packed),
            tokens,
            PartitionSpec(),
        ),
        out_specs=(tokens, weight_specs),
    )
    dx, dw = backward(x, residuals, weights, packed, dy, key)
    return dx, dw, None, None, None


run.defvjp(_fwd, _bwd)


def _weight_specs(layout: FFNLayout | None, weights: FFNWeights) -> FFNWeights:
    into = weight_spec(layout, 1)
    gate = None if weights.gate is None else into
    return FFNWeights(up=into, down=weight_spec(layout, 0), gate=gate)


def _forward(static, x, weights, packed, experts):
    """Returns Y, the residuals, and what is observed, for one device's part of the
    operands."""
    read = _as_read(static.layout, x.dtype, weights, packed)
    y, residuals, sample = static.execution.forward(static, x, read, experts)
    return sum_over_neurons(static.layout, y), residuals, sample


def _backward(static, x, residuals, weights, packed, dy, key):
    """Returns dX and the gradients of the weights for one device's part of the
    operands."""
    layout = static.layout
    read = _as_read(layout, dy.dtype, weights, packed)
    if static.plan.sparsity.d_input_weights is not None:
        read = _with_forward_weights(read)
    key = own_key(layout, key)
    dx, dw = static.execution.backward(static, x, residuals, read, dy, key)

    def summed(gradient, weight, hidden_axis):
        if weight is None:
            return None
        return sum_over_tokens(layout, gradient.astype(weight.dtype), hidden_axis)

    return sum_over_neurons(layout, dx), FFNWeights(
        up=summed(dw.up, weights.up, 1),
        down=summed(dw.down, weights.down, 0),
        gate=summed(dw.gate, weights.gate, 1),
    )


def _with_forward_weights(read: ReadWeights) -> ReadWeights:
    """Returns the weights with beta S(W), which GEMM 1 has read, in the place of those
    into the hidden layer that GEMM 4 reads."""
    up = as_dense(read.up, read.packed_up, up=True)
    gate = read.gate
    if gate is not None:
        gate = as_dense(gate, read.packed_gate, up=True)
    return read._replace(up=up, gate=gate)


def _as_read(
    layout: FFNLayout | None,
    dtype: Any,
    weights: FFNWeights,
    packed: PackedFFN | None,
) -> ReadWeights:
    """Returns the weights of this device's neurons as its GEMMs read them. Each weight
    is gathered where it is stored split; XLA drops those that no GEMM reads."""
    copies = None if packed is None else packed.dense
    stored = weights if copies is None else copies

    def dense(weight: jax.Array, hidden_axis: int) -> jax.Array:
        return gather_weight(layout, weight.astype(dtype), hidden_axis)

    def compressed(name: str) -> Compressed | Packed | None:
        weight = None if packed is None else getattr(packed, name)
        is_sparse = isinstance(weight, Compressed | Packed)
        return gather_packed(layout, weight) if is_sparse else None

    return ReadWeights(
        quantised=_quantised(layout, packed),
        up=dense(stored.up, 1),
        down=dense(stored.down, 0),
        gate=None if stored.gate is None else dense(stored.gate, 1),
        packed_up=compressed("up"),
        packed_down=compressed("down"),
        packed_gate=compressed("gate"),
    )


def _quantised(
    layout: FFNLayout | None, packed: PackedFFN | None
) -> FFNWeights[QuantisedWeight | None]:
    """Returns the weights in 8-bit floats, those of this device's neurons; None each
    where there is none."""

    def of(name: str, hidden_axis: int) -> QuantisedWeight | None:
        weight = None if packed is None else getattr(packed, name)
        if not isinstance(weight, QuantisedWeight):
            return None
        return gather_quantised(layout, weight, hidden_axis)

    return FFNWeights(up=of("up", 1), down=of("down", 0), gate=of("gate", 1))
