"""The time of a training step on a mesh, predicted and never measured.

A step is split into GEMMs, attention, the bytes of everything else, and what devices
wait for each other. The speeds are `hardware.Speeds` and `hardware.Links`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sparsejax.config import MeshConfig, ModelConfig, OptimizerName
from sparsejax.cost_model.communication import Exchanged, exchanges
from sparsejax.cost_model.gathered import element_bytes, logit_bytes
from sparsejax.cost_model.hardware import (
    FP8_GAIN,
    SLOWED_BESIDE,
    SQUARES_SLOWER,
    Links,
    Speeds,
)
from sparsejax.cost_model.memory import memory_bytes
from sparsejax.cost_model.parameters import parameter_count
from sparsejax.cost_model.speed import LOWER_CLOCK, KernelFactors, flops_per_token
from sparsejax.feed_forward.experts.sample import sampling_stride
from sparsejax.feed_forward.packing import rows_of_token, sums_energies
from sparsejax.feed_forward.sparsity import FFNSparsity
from sparsejax.ops.backend import Decision
from sparsejax.ops.gemm_spec import INTO_HIDDEN
from sparsejax.routing.regression import feature_count

HIDEABLE = ("gathered_weights", "reduced_gradients")
"""The purposes of communication that a later or earlier layer's computation can hide.
What is summed over tensor, and tokens that are exchanged, are read at once."""


@dataclass(frozen=True, kw_only=True)
class PredictedStep:
    """The seconds of one optimiser step on one device, predicted."""

    gemms: float
    """The seconds in GEMMs: the FFN's, attention's projections and the head's."""
    attention: float
    """The seconds in attention's scores and mixing."""
    elementwise: float
    """The seconds for the bytes of everything else, the optimiser's among them."""
    slowed: float
    """The seconds by which these three take longer beside communication."""
    communication: Mapping[str, float]
    """The seconds in collectives by axis of the mesh, "batch" for data and fsdp
    together, whether they are hidden or not."""
    exposed: float
    """The seconds of communication in which nothing is computed."""

    @property
    def computation(self) -> float:
        """The seconds in which the device computes."""
        return self.gemms + self.attention + self.elementwise + self.slowed

    @property
    def total(self) -> float:
        """The seconds of the whole step: computation, and waiting for others."""
        return self.computation + self.exposed

    @property
    def exposed_share(self) -> float:
        """The share of the step in which a device only waits for others."""
        return self.exposed / self.total


def predicted_step(
    config: ModelConfig,
    *,
    sequence_length: int,
    tokens_per_device: int,
    micro_batches: int,
    sparsity: FFNSparsity,
    decisions: Sequence[Decision],
    speeds: Speeds,
    mesh: MeshConfig,
    links: Links,
    optimizer: OptimizerName = "adamw",
    share_of_step: float | None = None,
) -> PredictedStep:
    """Returns the predicted time of a step on a mesh with `data` set.

    GEMMs run at `speeds`, or take the time that was measured for their kernel. Once a
    GEMM runs on sparse tensor cores all other computation has the lower clock. With
    remat "full" the backward computes again what attention and the GEMMs into the
    hidden layer gave; with "dots", in a sparse FFN without experts, those GEMMs that
    run on kernels of ours.

    Where layers are compiled one by one, gathers of weights hide behind computation:
    those of the forward, taken as half of them, behind a third of it, the others, and
    the reduction of gradients, behind the rest; but for the first layer and the last
    one, whose share is exposed. What hides takes its time all the same, for it slows
    what it hides behind: `SLOWED_BESIDE`. Sums that follow the last of several
    micro-batches are exposed whole, as are weights that are gathered before the first,
    sums over tensor and exchanged tokens. In a loop over layers nothing hides.

    Args:
      sequence_length: tokens of a sequence, which attention mixes.
      tokens_per_device: tokens of one micro-batch on one of data x fsdp parts.
      decisions: what runs the GEMMs of one device's FFN for these tokens.
      share_of_step: the share of a step that FFNs take a micro-batch for, which says
        how many tokens they look at (`experts.sample`); None for what it is, one over
        the micro-batches.
    """
    share_of_step = share_of_step or 1 / micro_batches
    slowed = 1 + LOWER_CLOCK * any(of.on_sparse_cores for of in decisions)
    tokens = micro_batches * tokens_per_device
    flops = flops_per_token(config, sequence_length)
    again = config.remat == "full"
    projections = flops.attention_projections
    if config.precision != "dtype":
        # Weight gradients, a third, stay in the compute dtype unless all are asked for.
        narrow = 1.0 if config.precision == "fp8_all" else 2 / 3
        projections *= 1 - narrow + narrow / FP8_GAIN
    dense = tokens * (projections * (1 + again / 3) + flops.head) / mesh.tensor
    ffn = sum(
        _ffn_gemm_seconds(
            of, config, speeds, micro_batches, slowed, by_expert=bool(sparsity.experts)
        )
        for of in decisions
    )
    stride = sampling_stride(tokens_per_device * mesh.token_shards, share_of_step)
    dense += tokens * observed_flops(config, sparsity) / stride / mesh.tensor
    dense += tokens * router_flops(config, sparsity) / FP8_GAIN / mesh.tensor
    dense += tokens * regression_flops(config, sparsity)
    gemms = slowed * speeds.gemm_seconds(dense, config.d_model)
    gemms += micro_batches * config.layers * config.groups * ffn
    mixing = flops.sdpa_causal * (1 + again / 3)
    mixed = tokens * mixing / mesh.tensor
    attention = slowed * speeds.attention_seconds(mixed, config.head_width)
    moved = elementwise_bytes(
        config,
        tokens_per_device=tokens_per_device,
        micro_batches=micro_batches,
        sparsity=sparsity,
        mesh=mesh,
        rows_of_token=rows_of_token(sparsity, decisions),
        sums_energies=sums_energies(sparsity, decisions),
        passes_of_activation=not any(of.squares for of in decisions),
        optimizer=optimizer,
        share_of_step=share_of_step,
    )
    elementwise = moved / speeds.memory_bytes_per_s
    received = exchanges(config, mesh, sparsity, micro_batches, tokens_per_device)
    seconds = [(of, links.seconds(of, mesh)) for of in received]
    by_axis: dict[str, float] = {}
    for of, taken in seconds:
        by_axis[of.axis] = by_axis.get(of.axis, 0.0) + taken
    alone = gemms + attention + elementwise
    exposed = _exposed(config, seconds, alone, micro_batches)
    return PredictedStep(
        gemms=gemms,
        attention=attention,
        elementwise=elementwise,
        communication=by_axis,
        slowed=SLOWED_BESIDE * (sum(by_axis.values()) - exposed),
        exposed=exposed,
    )


def _exposed(
    config: ModelConfig,
    seconds: Sequence[tuple[Exchanged, float]],
    computation: float,
    micro_batches: int,
) -> float:
    """Returns the seconds of communication that no computation hides."""
    if config.scan_layers:
        return sum(taken for _, taken in seconds)

    def hides(of: Exchanged) -> bool:
        # One micro-batch's sums hide behind it; gathers before it hide behind nothing.
        waits = of.once and (micro_batches > 1 or of.purpose == HIDEABLE[0])
        return of.purpose in HIDEABLE and not waits

    waited = sum(taken for of, taken in seconds if not hides(of))
    gathered, reduced = (
        sum(taken for of, taken in seconds if hides(of) and of.purpose == purpose)
        for purpose in HIDEABLE
    )
    passes = ((gathered / 2, 1 / 3), (gathered / 2 + reduced, 2 / 3))
    for taken, share in passes:
        of_one_layer = taken / config.layers
        left = taken - of_one_layer
        waited += of_one_layer + max(0.0, left - share * computation)
    return waited


def _ffn_gemm_seconds(
    decision: Decision,
    config: ModelConfig,
    speeds: Speeds,
    micro_batches: int,
    slowed: float,
    *,
    by_expert: bool,
) -> float:
    """Returns the seconds of one of the FFN's GEMMs in a micro-batch, run again where
    the backward needs what it gave."""
    spec, times = decision.spec, decision.times
    runs = 1
    if spec.role in INTO_HIDDEN:
        # Dense FFNs and those by expert keep what a kernel writes as they do XLA's.
        keeps = spec.squares or by_expert
        kernel_again = config.remat == "dots" and decision.on_kernels and not keeps
        runs += config.remat == "full" or kernel_again
    if decision.on_kernels and times is not None:
        # A weight is packed once for all micro-batches of a step.
        packing = times.packing_us / (micro_batches if spec.sparse_weight else 1)
        return 1e-6 * (runs * times.kernel_us + packing)
    executed = decision.executed_share * spec.dense_flops
    if decision.on_sparse_cores:
        executed *= 2 / KernelFactors().two_four
    if decision.squares:
        executed *= SQUARES_SLOWER
    gain = FP8_GAIN if spec.fp8 else 1
    narrowest = min(config.d_model, *spec.widths_of_expert)
    return slowed * runs * speeds.gemm_seconds(executed, narrowest) / gain


def observed_flops(config: ModelConfig, sparsity: FFNSparsity) -> int:
    """Returns the FLOPs of a token that training looks at with all its neurons: those
    of GEMM 1, and for the penalty those of GEMM 5."""
    if not sparsity.samples_tokens:
        return 0
    gemms = 1 + (sparsity.skipped_energy is not None)
    return 2 * config.d_model * config.d_hidden * gemms * config.layers * config.groups


def router_flops(config: ModelConfig, sparsity: FFNSparsity) -> int:
    """Returns the FLOPs of a token in the GEMM of 8-bit floats whose product the router
    reads, one as large as GEMM 1."""
    if not sparsity.chooses_in_fp8:
        return 0
    gemms = (2 if config.gated else 1) * config.layers * config.groups
    return 2 * config.d_model * config.d_hidden * gemms


def regression_flops(config: ModelConfig, sparsity: FFNSparsity) -> int:
    """Returns the FLOPs of a token in the GEMM of the features that a learned router
    scores by; every device of a tensor axis computes them all."""
    if not sparsity.learns:
        return 0
    features = feature_count(config.d_model, config.d_hidden)
    return 2 * config.d_model * features * config.layers * config.groups


def elementwise_bytes(
    config: ModelConfig,
    *,
    tokens_per_device: int,
    micro_batches: int,
    sparsity: FFNSparsity,
    mesh: MeshConfig,
    rows_of_token: int,
    sums_energies: bool = False,
    passes_of_activation: bool = True,
    optimizer: OptimizerName = "adamw",
    share_of_step: float | None = None,
) -> int:
    """Returns the bytes that one device reads and writes in a step outside of GEMMs and
    attention.

    Per token and layer, in elements of the compute dtype: 10 d_model in the forward (a
    residual sum, and a norm that reads twice, for each branch) and 12 in the backward;
    the rotation of queries and keys, 2 each way; the activation, read and written, 2 of
    its hidden values, and 5 in the backward, which computes it again, unless kernels
    apply it before they write (`passes_of_activation` is False). For an FFN by
    expert, where a token has k rows, (6 k + 2) d_model: the k rows of Y and of dX are
    read and summed, and those of X and of dY are read, and written in the order of the
    experts; and all hidden values once more where the router reads them, or their
    estimate, which it does not where a kernel sums their energies (`sums_energies`).
    With remat the forward's come twice, with "dots" but for the activation, which the
    backward computes again in any case, and for the rotation, unless it follows a norm,
    and in any case but for what the router reads: today that comes once, and is still
    counted as in the steps that were measured. In 8-bit floats 5
    bytes for each operand that is rounded, X for the router among them: it is read
    twice and written once. Where training observes a sample of the tokens, 24 bytes for
    each of their hidden values, as in the steps that these bytes were taken from; the
    penalty has moved less since.
    Per token: the logits, written once and read twice, and their gradient.
    Per parameter: 6 bytes to round it once, 12 for each of several micro-batches whose
    gradients are summed, and what the optimiser reads and writes: gradient twice (for
    its norm, too), parameter and moments. The 12 are those of the steps that the speeds
    were taken from, which added gradients in a kernel of its own; without a loop over
    layers GEMMs add theirs as they write now, which is fewer bytes. Of the steps of
    `llama-1b` that have been measured since, dense ones took 2 to 4 % less than
    predicted, and sparse ones 2 % less to 1.5 % more (`experiments/predict_step.py`).
    In a loop over layers what the backward reads is copied into stacks and out of them,
    4 times its bytes; and 16 bytes for each parameter of the layers.
    """
    d, element, tensor = config.d_model, element_bytes(config), mesh.tensor
    heads = (config.query_width + config.kv_width) // tensor
    hidden = (2 if config.gated else 1) * config.d_hidden // tensor
    computed = hidden * sparsity.expert_choices // (sparsity.experts or 1)
    if not passes_of_activation:
        computed = 0
    forward = 10 * d + 2 * heads + 2 * computed
    backward = 12 * d + 2 * heads + 5 * computed
    if sparsity.experts:
        forward += (rows_of_token + 1) * d
        backward += (5 * rows_of_token + 1) * d
        if sparsity.router.inside and not sums_energies:
            forward += hidden
    again = forward * (config.remat != "none")
    if config.remat == "dots":
        again -= 2 * computed + (0 if config.qk_norm else 2 * heads)
    per_token = element * (forward + again + backward)
    per_token += 5 * d * sparsity.chooses_in_fp8
    if sparsity.samples_tokens:
        in_call = tokens_per_device * mesh.token_shards
        stride = sampling_stride(in_call, share_of_step or 1 / micro_batches)
        per_token += 24 * hidden // stride
    if config.precision != "dtype":
        rounded = (
            2 * d + config.query_width // tensor + heads + config.kv_width // tensor
        )
        if sparsity.is_dense:
            rounded += 2 * d + hidden * 2
        elif sparsity.up_is_dense:
            rounded += d
        per_token += 5 * rounded
    per_token = config.layers * per_token
    per_token += config.vocab_size // tensor * (3 * logit_bytes(config) + element)

    held = memory_bytes(
        config,
        tokens_per_device=tokens_per_device,
        mesh=mesh,
        sparsity=sparsity,
        optimizer=optimizer,
    )
    parameters = held.parameters // 4
    per_step = 6 * parameters + 16 * parameters + 2 * held.moments
    count = parameter_count(config)
    blocks = (count.attention + count.ffn) // (mesh.fsdp * tensor)
    per_micro_batch = tokens_per_device * per_token
    if micro_batches > 1:
        per_micro_batch += 12 * parameters
    if config.scan_layers:
        per_micro_batch += 4 * held.activations + 16 * blocks
    return per_step + micro_batches * per_micro_batch
