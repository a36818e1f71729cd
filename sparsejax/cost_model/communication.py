"""The bytes that the devices of a mesh send each other in a step."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, get_args

from sparsejax.config import MeshConfig, ModelConfig
from sparsejax.cost_model.gathered import (
    bytes_as_read,
    element_bytes,
    gathered_bytes,
)
from sparsejax.cost_model.parameters import parameter_count
from sparsejax.feed_forward.sparsity import FFNSparsity

Purpose = Literal[
    "gathered_weights", "reduced_gradients", "reduced_activations", "exchanged_tokens"
]


@dataclass(frozen=True, kw_only=True)
class Exchanged:
    """What the devices along one axis of the mesh, or two, exchange for one purpose in
    an optimiser step."""

    purpose: Purpose
    axis: Literal["data", "fsdp", "tensor", "batch"]
    """The axis of the mesh, or "batch" for data and fsdp together."""
    kind: Literal["all-gather", "reduce-scatter", "all-reduce", "all-to-all"]
    received: int
    """The bytes that one device receives per optimiser step."""
    collectives: int
    """The number of collectives that move them per optimiser step, with one for all
    weights of a layer that are read in the same pass."""
    once: bool = False
    """Whether they are moved once per optimiser step, before its first micro-batch or
    after its last, and not in each of them."""


@dataclass(frozen=True, kw_only=True)
class CommunicationBytes:
    """The bytes that one device receives per optimiser step, by purpose."""

    gathered_weights: int
    """The bytes of all-gathers of weights over fsdp."""
    reduced_gradients: int
    """The bytes of reduce-scatters of gradients over fsdp and of their all-reduces over
    data, float32."""
    reduced_activations: int
    """The bytes of all-reduces of activations over tensor, in the compute dtype."""
    exchanged_tokens: int
    """The bytes of all-to-alls over fsdp: a device has columns of the embedding, not
    tokens."""

    @property
    def total(self) -> int:
        weights = self.gathered_weights + self.reduced_gradients
        return weights + self.reduced_activations + self.exchanged_tokens


def communication_bytes(
    config: ModelConfig,
    mesh: MeshConfig,
    sparsity: FFNSparsity,
    micro_batches: int,
    tokens_per_device: int,
) -> CommunicationBytes:
    """Returns the bytes that a device receives in one optimiser step on a mesh with
    `data` set: those of `exchanges`, by purpose."""
    received: dict[Purpose, int] = dict.fromkeys(get_args(Purpose), 0)
    for of in exchanges(config, mesh, sparsity, micro_batches, tokens_per_device):
        received[of.purpose] += of.received
    return CommunicationBytes(**received)


def exchanges(
    config: ModelConfig,
    mesh: MeshConfig,
    sparsity: FFNSparsity,
    micro_batches: int,
    tokens_per_device: int,
) -> tuple[Exchanged, ...]:
    """Returns what a device receives in one optimiser step on a mesh with `data` set,
    by axis and purpose; nothing for an axis of one device.

    Of n devices and a whole of S bytes, each receives S (n - 1) / n in an all-gather
    and in a reduce-scatter, and twice that in a ring all-reduce.

    Assumed, in every micro-batch, but for gradients over data without a loop over the
    layers: XLA on GPUs sums those after the last one. At `mesh.zero_stage` 1 and 2 all
    weights are gathered once per step, `bytes_as_read`, and at 1 gradients are reduced
    over fsdp once as well; where there are replicas too, XLA makes one all-reduce over
    data and fsdp of it. An embedding that is the head, too, has two gradients, as two
    weights would.
      weights: a layer's are gathered in the forward and again in the backward, as
        `gathered_bytes` says, attention's with remat "none" only once unless they are
        in 8-bit floats, and then once more; the head once, since its backward follows
        its forward.
      gradients: reduce-scattered over fsdp, then all-reduced over data; those of the
        embedding, complete for its columns, only over data; of norm scales and biases
        over both.
      activations: per layer, attention's and the FFN's output in the forward, and the
        gradients of their inputs in the backward; with remat "full" attention's output
        once more. Also the gradient of what the head reads, and in float32 the
        embedding's rows.
      tokens: the embedding's rows, and their gradients.
    These bytes were read from compiled steps, except where XLA on CPUs does more than
    it must: it sums what could be scattered, and what query, key and value give back
    one by one. Where it finds two gathers of one weight, or one in each micro-batch,
    alike, it may keep the first: without a loop over layers XLA on CPUs gathers once
    for the forwards of all micro-batches, and with remat "none" for the backwards too,
    which is fewer bytes and more memory than is counted. No bytes were measured on
    GPUs. Not counted are scalars, and a few numbers per token for the softmax over a
    split vocabulary and for experts chosen by activation energy.

    Args:
      tokens_per_device: tokens of one micro-batch on one of data x fsdp parts.
    """
    tokens = (config, mesh, tokens_per_device)
    of_step = (
        _gathered_weights(config, mesh, sparsity),
        *_reduced_gradients(config, mesh),
        _reduced_activations(*tokens),
        _exchanged_tokens(*tokens),
    )
    times = lambda of: 1 if of.once else micro_batches
    return tuple(
        replace(
            of,
            received=times(of) * of.received,
            collectives=times(of) * of.collectives,
        )
        for of in of_step
        if of.received
    )


def _gathered_weights(
    config: ModelConfig, mesh: MeshConfig, sparsity: FFNSparsity
) -> Exchanged:
    """Returns what is gathered of weights over fsdp in a micro-batch, or once."""
    whole = gathered_bytes(config, sparsity)
    layer = whole.ffn_forward + whole.ffn_backward + whole.ffn_recomputed
    times = (1 if config.remat == "none" else 2) + (config.precision != "dtype")
    layer += whole.attention * times
    weights = (config.layers * layer + whole.head) // mesh.tensor
    reads = 2 * config.layers + 1
    if mesh.zero_stage < 3:
        weights = bytes_as_read(config, sparsity, copied=True) // mesh.tensor
        reads = 7  # about: each weight of all layers in one piece, and the head
    return Exchanged(
        purpose="gathered_weights",
        axis="fsdp",
        kind="all-gather",
        received=_received(weights, mesh.fsdp),
        collectives=reads,
        once=mesh.zero_stage < 3,
    )


def _reduced_gradients(config: ModelConfig, mesh: MeshConfig) -> tuple[Exchanged, ...]:
    """Returns what is summed of gradients in a micro-batch, or once, over fsdp, over
    data, and over both together."""
    parameters = parameter_count(config)
    embedding = 4 * parameters.embedding // mesh.tensor
    scattered = 4 * (parameters.attention + parameters.ffn) // mesh.tensor + embedding
    over_fsdp = _received(scattered, mesh.fsdp)
    over_data = 2 * _received((scattered + embedding) // mesh.fsdp, mesh.data)
    over_batch, of_vectors = 0, 2 * _received(4 * parameters.vectors, mesh.token_shards)
    # One sum over both axes: counted with data, where there are replicas.
    if mesh.data > 1 and mesh.fsdp > 1 and mesh.zero_stage == 1:
        over_batch = 2 * _received(scattered, mesh.token_shards) + of_vectors
        over_data, over_fsdp = 2 * _received(embedding // mesh.fsdp, mesh.data), 0
    elif mesh.data > 1:
        over_data += of_vectors
    else:
        over_fsdp += of_vectors
    summed = partial(
        Exchanged, purpose="reduced_gradients", collectives=config.layers + 1
    )
    return (
        summed(
            axis="fsdp",
            kind="reduce-scatter",
            received=over_fsdp,
            once=mesh.zero_stage == 1,
        ),
        summed(
            axis="data",
            kind="all-reduce",
            received=over_data,
            once=not config.scan_layers,
        ),
        summed(axis="batch", kind="all-reduce", received=over_batch, once=True),
    )


def _reduced_activations(
    config: ModelConfig, mesh: MeshConfig, tokens_per_device: int
) -> Exchanged:
    """Returns what is summed of activations over tensor in a micro-batch."""
    sums = config.layers * (5 if config.remat == "full" else 4) + 1
    of_token = sums * element_bytes(config) + 4
    activations = tokens_per_device * config.d_model * of_token
    return Exchanged(
        purpose="reduced_activations",
        axis="tensor",
        kind="all-reduce",
        received=2 * _received(activations, mesh.tensor),
        collectives=sums + 1,
    )


def _exchanged_tokens(
    config: ModelConfig, mesh: MeshConfig, tokens_per_device: int
) -> Exchanged:
    """Returns what is exchanged of the embedding's rows over fsdp in a micro-batch."""
    rows = tokens_per_device * config.d_model * element_bytes(config)
    return Exchanged(
        purpose="exchanged_tokens",
        axis="fsdp",
        kind="all-to-all",
        received=2 * _received(rows, mesh.fsdp),
        collectives=2,
    )


def _received(whole: int, devices: int) -> int:
    return whole * (devices - 1) // devices
