"""The plan that is printed before a run: what it will train, on what, at which cost."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import partial

import jax
from rich.table import Table

from pallas_kernels.device import Device
from sparsejax import cost_model
from sparsejax.config import MeshConfig, ModelConfig, TrainConfig
from sparsejax.config.optimizer_limits import check_optimizer
from sparsejax.config.schedule import Phase, model_of, phases, steps_left
from sparsejax.cost_model import JAX_SHARE, parameter_count
from sparsejax.distributed.mesh import check_shardable
from sparsejax.feed_forward.sparsity import FFNSparsity
from sparsejax.interchange.architectures import why_no_architecture
from sparsejax.interchange.pretrained import Pretrained
from sparsejax.models.attention import attention_implementation
from sparsejax.models.repeatable_attention import bits_repeat
from sparsejax.ops.backend import Decision, current_device
from sparsejax.reports.metrics import ffn_decisions
from sparsejax.sparsity.patterns import Pattern, name_of
from sparsejax.terminal import console
from sparsejax.terminal.console import say
from sparsejax.terminal.printed_gemms import (
    say_attention,
    say_gemms,
    ways_to_compute,
)
from sparsejax.terminal.printed_meshes import in_words
from sparsejax.terminal.printed_shares import (
    break_even_speeds,
    say_assumed,
    say_shares,
)
from sparsejax.training.branch import Branch
from sparsejax.training.step_times import StepTimes, phases_run_dense


def announce(
    config: TrainConfig,
    *,
    predicted: bool = False,
    assumed: bool = False,
    absent: "Absent | None" = None,
    step_times: StepTimes | None = None,
    branch: Branch | None = None,
    init_from: Pretrained | None = None,
) -> None:
    """Prints devices, mesh, size, FLOPs, phases and the path of each GEMM; with
    `predicted` also memory and communication, for a mesh whose devices need not exist;
    with `assumed` the speed-up that kernels without overhead would give; with
    `step_times` how fast the steps were, and what follows from it; with `branch` or
    `init_from` where the run begins.

    Args:
      absent: with `predicted`, the GPUs that are planned for; None: those here.
    Raises:
      ValueError: before anything is printed, for phases, patterns or a mesh that do not
        fit the model, the batch or, unless `predicted`, the devices.
      NotImplementedError: the named backend cannot run a GEMM; says why.
    """
    model = config.model
    planned = phases(config)
    begin = 0 if branch is None else branch.first_step()
    ways = ways_to_compute(planned, model)
    device = current_device() if absent is None else absent.device
    mesh = _mesh_of(config, predicted=predicted)
    if absent is not None:
        mesh = absent.mesh(config.mesh)
    micro_batches = config.micro_batches_on(mesh)
    micro_batch = config.batch_size // micro_batches
    whole = [sparsity for _, sparsity in ways]
    check_shardable(model, whole, mesh, micro_batch=micro_batch)
    for phase in planned:
        of_phase = model_of(phase, model)
        check_shardable(of_phase, phase.sparsities, mesh, micro_batch=micro_batch)
    check_optimizer(config, planned, mesh)
    tokens = micro_batch * config.data.sequence_length
    tokens_per_device = tokens // mesh.token_shards
    decisions = {
        (name, sparsity): ffn_decisions(
            of_phase, sparsity, tokens, config.backend, mesh=mesh, device=device
        )
        for (of_phase, sparsity), name in ways.items()
    }

    if absent is None:
        _say_devices(config, mesh)
    else:
        absent.say(config, mesh)
    how = "as named" if config.micro_batches else "chosen for this mesh"
    say(
        f"micro-batches: {micro_batches} of {micro_batch} sequences, "
        f"{micro_batch // mesh.token_shards} on a device ({how})"
    )
    count = parameter_count(model)
    say(
        f"parameters: {count.total:,} (embedding {count.embedding:,}, attention "
        f"{count.attention:,}, FFN {count.ffn:,}, norms {count.norms:,}, "
        f"{f'biases {count.biases:,}, ' if count.biases else ''}head {count.head:,})"
    )
    if (reason := why_no_architecture(model)) is not None:
        say(f"no architecture of transformers is this model's: {reason}")
    console.STDOUT.print(_flops_table(config))
    console.STDOUT.print(_phase_table(config, planned))
    if branch is not None:
        say(f"a branch: begins with step {begin:,} of {branch.folder}")
    if init_from is not None:
        say(f"begins with the weights of {init_from.in_words()}, and a fresh optimiser")
    for phase in planned:
        _say_static_weights(phase.kind, model_of(phase, model))
    say_attention(planned, model, device)
    for (name, sparsity), of_gemms in decisions.items():
        say_gemms(config, name, sparsity, of_gemms, micro_batches)
    if predicted:
        table = _memory_table(config, mesh, tokens_per_device, ways, absent)
        console.STDOUT.print(table)
        if mesh.devices > 1:
            _say_communication(mesh, tokens_per_device, ways, micro_batches)
        say_shares(config, planned)
    if assumed:
        say_assumed(config, planned)
    if step_times is not None:
        left = steps_left(planned, begin)
        _say_step_times(config, left, step_times, decisions)


def _say_step_times(
    config: TrainConfig,
    planned: tuple[Phase, ...],
    times: StepTimes,
    decisions: Mapping[tuple[str, FFNSparsity], tuple[Decision, ...]],
) -> None:
    say(
        f"steps timed on {_count(times.devices, 'device')} ({times.device}) in "
        f"{times.seconds:.0f} s: dense {times.dense_ms:.1f} ms "
        f"({times.fastest_dense_ms:.1f}-{times.slowest_dense_ms:.1f})"
    )
    run_dense = phases_run_dense(
        times, planned, new_process_minutes=config.new_process_minutes
    )
    for of in times.sparse:
        kind = planned[of.phase].kind
        say(
            f"  {kind} phase: {of.step_ms:.1f} ms "
            f"({of.fastest_ms:.1f}-{of.slowest_ms:.1f}), "
            f"{times.speedup(of.phase):.2f} times as fast as dense; a dense step after "
            f"it {of.dense_after_ms:.1f} ms"
        )
        if of.phase in run_dense and config.keep_slower:
            say(f"  the {kind} phase loses time here, and is kept (--keep-slower)")
        elif of.phase in run_dense:
            why = "would lose time here"
            own = planned[of.phase].sparsities
            chosen = [d for (_, of), ds in decisions.items() if of in own for d in ds]
            if all(of.executed_share >= 1 for of in chosen):
                why = f"skips nothing on {times.device}, would lose time"
            say(
                f"  the {kind} phase {why} and is trained dense; --keep-slower trains "
                f"it sparse",
                style="yellow",
            )
        elif (needed := break_even_speeds(config)) is not None:
            least, _ = needed
            speed = times.speedup(of.phase)
            if speed is not None and speed < least:
                say(
                    f"  runs with this recipe had the loss of the best dense one as "
                    f"soon only where sparse steps were {least} times as fast or more "
                    f"(docs/results.md): --recipe dense may end lower in this time",
                    style="yellow",
                )


@dataclass(frozen=True, kw_only=True)
class Absent:
    """GPUs that a run is planned for and that need not be here."""

    device: Device
    """The facts about each of the GPUs, which are alike."""
    count: int | None = None
    """The number of GPUs; None: as many as the mesh says, one where it leaves that
    open."""

    def mesh(self, given: MeshConfig) -> MeshConfig:
        """Returns the mesh on all of them. Raises ValueError where its axes do not
        multiply to their number."""
        least = (given.data or 1) * given.fsdp * given.tensor
        return given.resolve(least if self.count is None else self.count)

    def say(self, config: TrainConfig, mesh: MeshConfig) -> None:
        """Prints which GPUs these are, and the mesh on them."""
        model, device = config.model, self.device
        attention, why = attention_implementation(model.head_width, model.dtype, device)
        say(
            f"device: {device.kind}, {mesh.devices} that need not be here; compute "
            f"{model.dtype}, masters float32; attention: {attention} ({why})"
        )
        devices = _count(mesh.devices, "device")
        say(f"mesh: {in_words(mesh)} = {devices}, planned from tables")


def _mesh_of(config: TrainConfig, *, predicted: bool) -> MeshConfig:
    """Returns the mesh with `data` set by the devices here; a plan (`predicted`) needs
    none of them."""
    if not predicted:
        return config.mesh.resolve(jax.device_count())
    left = jax.device_count() // (config.mesh.fsdp * config.mesh.tensor)
    return replace(config.mesh, data=config.mesh.data or max(1, left))


def _say_devices(config: TrainConfig, mesh: MeshConfig) -> None:
    device = jax.devices()[0]
    model = config.model
    attention, why = attention_implementation(model.head_width, model.dtype)
    here = jax.device_count()
    how_many = f"{here} of {here}"
    what_for = _count(jax.process_count(), "process")
    if mesh.devices != here:
        how_many, what_for = f"{here} here", "planned as if all were like this one"
    say(
        f"device: {device.device_kind}, {how_many}; compute {model.dtype}, masters "
        f"float32; attention: {attention} ({why})"
    )
    say(f"mesh: {in_words(mesh)} = {_count(mesh.devices, 'device')}, {what_for}")
    if device.platform == "gpu":
        rounding = "within rounding (--deterministic)"
        how = "with the same bits" if bits_repeat() else rounding
        say(f"a resumed run continues {how}")


def _flops_table(config: TrainConfig) -> Table:
    flops = cost_model.flops_per_token(config.model, config.data.sequence_length)
    table = Table(title="FLOPs per token, forward + backward, dense")
    table.add_column("component")
    table.add_column("MFLOP", justify="right")
    table.add_column("share", justify="right")
    components = {
        "attention projections": flops.attention_projections,
        "attention scores (causal half)": flops.sdpa_causal,
        "FFN": flops.ffn,
        "head": flops.head,
    }
    total = flops.total()
    for name, value in (components | {"total": total}).items():
        table.add_row(name, f"{value / 1e6:,.2f}", f"{value / total:.1%}")
    return table


def _phase_table(config: TrainConfig, planned: tuple[Phase, ...]) -> Table:
    what = "schedule" if config.phases.schedule else f"recipe {config.recipe}"
    length = config.data.sequence_length
    table = Table(
        title=f"{what}: {config.steps:,} steps x {config.tokens_per_step:,} tokens"
    )
    for name in ("phase", "steps", "weights", "activations", "GEMMs 5, 6"):
        table.add_column(name)
    first = 0
    for phase in planned:
        steps = f"{first + 1:,} - {first + phase.steps:,}"
        if phase.learning_rate_scale != 1:
            steps += f", learning rate x {phase.learning_rate_scale:g}"
        size = model_of(phase, config.model)
        weights, *others = _described(phase.sparsity)
        table.add_row(phase.kind, steps, _static_weights(size) or weights, *others)
        if size != config.model:
            cost = cost_model.relative_flops(size, config.model, length)
            own = f"d_hidden {size.d_hidden:,}, {size.layers} layers: {cost:.2f} of"
            table.add_row("", f"{own} the FLOPs", *[""] * 3)
        if phase.every is not None:
            each = f"one in {phase.every.steps:,} of them"
            table.add_row("", each, *_described(phase.every.sparsity))
        first += phase.steps
    return table


def _static_weights(model: ModelConfig) -> str:
    """Returns which entries the weights of a model have, in words; nothing where they
    have all."""
    static = model.static_weights
    if static is None:
        return ""
    how = "batched dense GEMMs" if model.groups > 1 else "by masks"
    return f"{name_of(static)} in all linear layers, {static.density:.0%} ({how})"


def _say_static_weights(kind: str, model: ModelConfig) -> None:
    """Prints what runs the linear layers of a phase whose weights are static."""
    if model.static_weights is None:
        return
    if model.groups == 1:
        say(
            f"linear layers, {kind} phase: whole weights that are zero outside of the "
            f"masks; the GEMMs are dense ones and save no time"
        )
        return
    groups = model.groups
    d, f = model.d_model // groups, model.d_hidden // groups
    say(
        f"linear layers, {kind} phase: each is a batch of {groups} dense GEMMs by XLA, "
        f"weights of {d:,} x {f:,} and {f:,} x {d:,} in the FFN, of {d:,} x {d:,} in "
        f"attention (query, out)"
    )


def _described(sparsity: FFNSparsity) -> tuple[str, str, str]:
    """Returns words for the weights, the activations and the weight gradients of a
    sparsity."""
    return (
        _name(sparsity.weights),
        _describe_activations(sparsity),
        _describe_gradients(sparsity),
    )


def _name(pattern: Pattern | None) -> str:
    return "dense" if pattern is None else name_of(pattern)


def _describe_activations(sparsity: FFNSparsity) -> str:
    anew = "" if sparsity.mask_reuse else ", selected anew in the backward"
    if not sparsity.experts:
        return _name(sparsity.activations) + anew
    skip = ", skip_blocks" if sparsity.skip_blocks else ""
    most = sparsity.most_experts_per_token
    mean = "" if most is None else f" on average, at most {most},"
    chosen = f"{sparsity.experts_per_token}{mean} of {sparsity.experts} experts"
    target = sparsity.skipped_energy
    penalty = "" if target is None else f", {target:.0%} of the energy outside asked"
    how = f"{chosen} by {sparsity.router.name}{skip}{anew}{penalty}"
    return f"{_name(sparsity.activations)}: {how}"


def _describe_gradients(sparsity: FFNSparsity) -> str:
    if sparsity.token_sparsity is None:
        exact = ", exact" if sparsity.exact_gradients else ""
        return sparsity.weight_gradients + exact
    order = "permuted" if sparsity.permute_tokens else "in order"
    return (
        f"{sparsity.weight_gradients}, 2:4 along tokens ({sparsity.token_sparsity}, "
        f"{order}, {sparsity.dense_features:.0%} of the features dense)"
    )


def _memory_table(
    config: TrainConfig,
    mesh: MeshConfig,
    tokens_per_device: int,
    ways: Mapping[tuple[ModelConfig, FFNSparsity], str],
    absent: Absent | None,
) -> Table:
    table = Table(title="memory, GiB per device")
    table.add_column("use")
    memories = []
    for (model, sparsity), name in ways.items():
        table.add_column(name, justify="right")
        memories.append(
            cost_model.memory_bytes(
                model,
                tokens_per_device=tokens_per_device,
                mesh=mesh,
                sparsity=sparsity,
                optimizer=config.optimizer.name,
            )
        )
    uses = [field.name for field in fields(cost_model.MemoryBytes)]
    for use in (*uses, "total"):
        values = (getattr(memory, use) / 2**30 for memory in memories)
        table.add_row(use, *(f"{value:,.2f}" for value in values))
    if absent is not None and absent.device.memory_bytes is not None:
        has = absent.device.memory_bytes
        taken = JAX_SHARE * has
        for use, of_each in (("the GPU has", has), ("of which JAX takes", taken)):
            table.add_row(use, *[f"{of_each / 2**30:,.2f}"] * len(memories))
        fits = ("yes" if memory.total <= taken else "no" for memory in memories)
        table.add_row("fits", *fits)
    return table


def _say_communication(
    mesh: MeshConfig,
    tokens_per_device: int,
    ways: Mapping[tuple[ModelConfig, FFNSparsity], str],
    micro_batches: int,
) -> None:
    say("communication, GiB that a device receives per step:")
    for (model, sparsity), name in ways.items():
        received = partial(
            cost_model.communication_bytes,
            model,
            sparsity=sparsity,
            micro_batches=micro_batches,
            tokens_per_device=tokens_per_device,
        )
        sent = received(mesh=mesh)
        parts = (
            f"{field.name.replace('_', ' ')} {getattr(sent, field.name) / 2**30:,.2f}"
            for field in fields(sent)
        )
        total = f"total {sent.total / 2**30:,.2f}"
        # The lowest stage that the model may have: see `TrainConfig`.
        stage = 2 if model.scan_layers else 1
        if mesh.fsdp > 1 and stage < mesh.zero_stage:
            fewer = received(mesh=replace(mesh, zero_stage=stage)).total / 2**30
            total += f"; at --mesh.zero-stage {stage} {fewer:,.2f}"
        say(f"  {name}: {', '.join(parts)}, {total}")


def _count(number: int, noun: str) -> str:
    plural = noun + ("es" if noun.endswith("s") else "s")
    return f"{number} {noun if number == 1 else plural}"
