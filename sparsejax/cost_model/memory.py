"""The memory that a device needs, by what it is for."""

from dataclasses import dataclass
from math import prod

from sparsejax.config import MeshConfig, ModelConfig, OptimizerName
from sparsejax.cost_model.gathered import (
    bytes_as_read,
    element_bytes,
    gathered_bytes,
    logit_bytes,
)
from sparsejax.cost_model.parameters import parameter_count
from sparsejax.feed_forward.sparsity import DENSE, FFNSparsity

ONE_DEVICE = MeshConfig(data=1)

JAX_SHARE = 0.75
"""The share of a GPU's memory that JAX takes (XLA_PYTHON_CLIENT_MEM_FRACTION)."""


@dataclass(frozen=True, kw_only=True)
class MemoryBytes:
    """The bytes on one device in a training step, by use. The peak is below `total`
    where uses do not overlap, and above it by the compiler's temporaries, among them a
    layer's gradients before they are reduced."""

    parameters: int
    """The float32 master weights."""
    moments: int
    """The optimiser's moments, float32: two of each parameter (AdamW), one (Lion; Muon
    in the blocks), or rows and columns (Adafactor)."""
    gradients: int
    """The gradients of all parameters at once, float32. At `mesh.zero_stage` 1 their
    sums are whole over fsdp, but for the embedding's, beside the part of each
    device."""
    packed: int
    """The weights that are made ready once per optimiser step, `bytes_as_read`; whole
    over fsdp at `mesh.zero_stage` 1 and 2. S(W) of the sparse ones is counted as
    `Compressed` holds it: `Packed`, on Hopper, takes three quarters of that."""
    gathered: int
    """The largest set of weights that is held whole over fsdp at one time, in the
    compute dtype: a layer's, or the head. With remat "none" attention's of all layers
    are added, which the backward reads again. 0 where fsdp is 1, and at
    `mesh.zero_stage` 1 and 2."""
    activations: int
    """The activations that are saved between forward and backward."""
    logits: int
    """The logits of the loss, and their gradient in the compute dtype."""

    @property
    def total(self) -> int:
        state = self.parameters + self.moments + self.gradients + self.packed
        return state + self.gathered + self.activations + self.logits


def memory_bytes(
    config: ModelConfig,
    *,
    tokens_per_device: int,
    mesh: MeshConfig = ONE_DEVICE,
    sparsity: FFNSparsity = DENSE,
    optimizer: OptimizerName = "adamw",
) -> MemoryBytes:
    """Returns the memory of one device of a mesh.

    Matrices, their gradients, moments and packed values are split over fsdp x tensor,
    norm scales are on every device. Over tensor are split: query, key, value,
    attention's result, the FFN's hidden values, the logits.

    Activations, per token and layer, in elements of the compute dtype, with flash
    attention (scores are never stored):
      remat "none": x, two normed inputs, query, key, value (with qk_norm query and key
        as they were before it, too), attention's result, the residual between the
        branches, and the FFN's hidden values (relu2: relu(Y1), if routed of a token's
        experts only, and without mask_reuse of all neurons besides where the weight
        gradients are dense; gated: gate and up).
      remat "full": x; and one layer's "none" while it is recomputed. Without a loop
        over layers, and where gradients are summed over devices but no weights are
        gathered in the backward, all of "none": XLA puts the weights' gradients off and
        holds what they are computed from. There this is rough: steps of `llama-1b` and
        `llama-7b` compiled for four H100s need 16 % more to 22 % less memory.
      remat "dots": x and the outputs of the plain GEMMs: query and key, which are
        rotated already but with qk_norm, value, attention's projection, and the FFN's
        hidden values as above; attention's result; and one layer's "none". In a
        sparse FFN without experts a GEMM that a kernel of ours runs is recomputed
        instead: there this is an upper bound.
    The embedding's rows and what the head reads are one x each. Logits are float32,
    their gradient is of the compute dtype.

    Args:
      tokens_per_device: of one micro-batch, on one of data x fsdp parts.
      mesh: replicas hold the same, but for remat "full" without a loop.
      optimizer: the name of the optimiser, whose moments are counted.
    """
    d, branches = config.d_model, 2 if config.gated else 1
    element, tensor = element_bytes(config), mesh.tensor
    parameters = parameter_count(config)
    matrices = (parameters.total - parameters.vectors) // (mesh.fsdp * tensor)
    held = matrices + parameters.vectors
    qkv = (config.query_width + 2 * config.kv_width) // tensor
    mixed = config.query_width // tensor
    # Besides what attention reads, what has been normalised and rotated to it.
    normalised = config.qk_norm * (config.query_width + config.kv_width) // tensor
    hidden = branches * config.d_hidden // tensor
    kept_hidden = hidden * sparsity.expert_choices // (sparsity.experts or 1)
    sums_over_rows = sparsity.weight_gradients == "expert_columns"
    if sparsity.experts and not sparsity.mask_reuse and not sums_over_rows:
        kept_hidden += hidden
    everything = element * (4 * d + mixed + qkv + normalised + kept_hidden)
    is_whole = mesh.fsdp > 1 and mesh.zero_stage < 3
    sums_late = is_whole or (mesh.fsdp == 1 and (mesh.data or 1) > 1)
    puts_off = config.remat == "full" and not config.scan_layers and sums_late
    per_layer, recomputed = {
        "none": (everything, 0),
        "full": (element * d, everything),
        "dots": (element * (2 * d + mixed + qkv + kept_hidden), everything),
    }["none" if puts_off else config.remat]
    saved = config.layers * per_layer + recomputed + 2 * d * element
    packed = bytes_as_read(config, sparsity, copied=is_whole)
    gradients = held
    if mesh.fsdp > 1 and mesh.zero_stage == 1:
        blocks = parameters.attention + parameters.ffn
        gradients += (blocks + d * config.vocab_size) // tensor
    return MemoryBytes(
        parameters=4 * held,
        moments=_moments_bytes(config, mesh, optimizer),
        gradients=4 * gradients,
        packed=packed // (tensor if is_whole else mesh.fsdp * tensor),
        gathered=0 if is_whole else _largest_gathered(config, mesh, sparsity),
        activations=tokens_per_device * saved,
        logits=tokens_per_device
        * config.vocab_size
        // tensor
        * (logit_bytes(config) + element),
    )


def _moments_bytes(
    config: ModelConfig, mesh: MeshConfig, optimizer: OptimizerName
) -> int:
    """Returns the bytes of an optimiser's moments on one device."""
    count, shards = parameter_count(config), mesh.fsdp * mesh.tensor
    blocks = (count.attention + count.ffn) // shards
    held = (count.total - count.vectors) // shards + count.vectors
    if optimizer == "adafactor":
        return 4 * _factored(config)
    return {
        "adamw": 8 * held,
        "lion": 4 * held,
        "muon": 8 * held - 4 * blocks,
    }[optimizer]


def _factored(config: ModelConfig) -> int:
    """Returns the number of Adafactor's second moments: a row and a column of each
    matrix, and all of one with a side below 128."""
    d = config.d_model
    in_layer = [(d, config.query_width), (d, config.kv_width)] * 2
    in_layer += [(d, config.d_hidden)] * (3 if config.gated else 2)
    outside = [(d, config.vocab_size)] * (1 if config.tie_embeddings else 2)
    of = lambda sides: sum(sides) if min(sides) >= 128 else prod(sides)
    moments = config.layers * sum(map(of, in_layer)) + sum(map(of, outside))
    return moments + parameter_count(config).vectors


def _largest_gathered(
    config: ModelConfig, mesh: MeshConfig, sparsity: FFNSparsity
) -> int:
    if mesh.fsdp == 1:
        return 0
    whole = gathered_bytes(config, sparsity)
    ffn = max(whole.ffn_forward, whole.ffn_backward)
    if config.remat == "none":
        kept = config.layers * whole.attention
        return (kept + max(ffn, whole.head)) // mesh.tensor
    return max(whole.attention + ffn, whole.head) // mesh.tensor
