"""The meshes that a run could have on a number of devices, ranked by predicted time.

Nothing is measured here: see `sparsejax.cost_model.step_time`.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from pallas_kernels.device import Device
from sparsejax.config import MeshConfig, ModelConfig, TrainConfig
from sparsejax.config.optimizer_limits import check_optimizer
from sparsejax.config.schedule import Phase, model_of, phases
from sparsejax.cost_model import (
    JAX_SHARE,
    Links,
    PredictedStep,
    Speeds,
    memory_bytes,
    predicted_step,
)
from sparsejax.distributed.mesh import check_shardable
from sparsejax.feed_forward.sparsity import FFNSparsity
from sparsejax.ops.backend import Decision
from sparsejax.reports.metrics import ffn_decisions


@dataclass(frozen=True, kw_only=True)
class PlannedMesh:
    """A mesh that a run could have, and what it is predicted to cost there."""

    mesh: MeshConfig
    """The mesh, with `data` set."""
    micro_batches: int
    """The fewest micro-batches of a step that fit the memory, or those that the
    settings name."""
    steps: Mapping[tuple[ModelConfig, FFNSparsity], PredictedStep]
    """The step of each way in which the run computes."""
    step_seconds: float
    """The mean over the steps of the run."""
    exposed_seconds: float
    """The part of `step_seconds` in which a device only waits for others."""
    memory_bytes: int
    """The bytes on one device, in the phase that needs most."""

    @property
    def exposed_share(self) -> float:
        return self.exposed_seconds / self.step_seconds


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """The meshes of a number of devices, and why the others cannot be."""

    device: Device
    devices: int
    tokens_per_step: int
    planned: tuple[PlannedMesh, ...]
    """The meshes that can be, the fastest first."""
    refused: Mapping[str, tuple[tuple[MeshConfig, str], ...]]
    """The meshes that cannot be, each with its reason, by what does not fit."""

    def has(self, mesh: MeshConfig) -> bool:
        """Returns whether a mesh is among those that can be."""
        return any(of.mesh == mesh for of in self.planned)


def rank_meshes(
    config: TrainConfig, device: Device, devices: int, links: Links
) -> Ranking | None:
    """Returns all meshes of `devices` devices of one kind, the fastest first; None for
    a device whose speeds are not in the tables.

    A mesh is refused where the batch, the model, the optimiser or an FFN's sparsity
    cannot be split as it says, and where a device has too little memory for the
    smallest micro-batch. Stage 1 of ZeRO is left out where it gains nothing: with a
    loop over layers, and with a single micro-batch.

    Raises:
      NotImplementedError: the named backend cannot run a GEMM; says why.
    """
    speeds = Speeds.of(device, config.model.dtype)
    if speeds is None:
        return None
    run = _PlannedRun(config, device, speeds, links)
    planned: list[PlannedMesh] = []
    refused: dict[str, list[tuple[MeshConfig, str]]] = {}
    for mesh in meshes_of(devices):
        if mesh.zero_stage == 1 and config.model.scan_layers:
            continue
        try:
            of = run.on(mesh)
        except ValueError as error:
            what = re.split("[=:]", str(error))[0]
            others = refused.setdefault(what, [])
            # What is too much at stage 3 is so at the others, too.
            if replace(mesh, zero_stage=3) not in [of for of, _ in others]:
                others.append((mesh, str(error)))
        else:
            # Of one micro-batch stage 1 holds and sums what stage 2 does, or more.
            if mesh.zero_stage > 1 or of.micro_batches > 1:
                planned.append(of)
    planned.sort(key=lambda of: of.step_seconds)
    return Ranking(
        device=device,
        devices=devices,
        tokens_per_step=config.tokens_per_step,
        planned=tuple(planned),
        refused={what: tuple(meshes) for what, meshes in refused.items()},
    )


def meshes_of(devices: int) -> Iterator[MeshConfig]:
    """Yields every mesh of so many devices, one with fsdp at each stage of ZeRO."""
    for tensor in _divisors(devices):
        for fsdp in _divisors(devices // tensor):
            data = devices // (tensor * fsdp)
            mesh = MeshConfig(data=data, fsdp=fsdp, tensor=tensor)
            yield mesh
            if fsdp > 1:
                yield replace(mesh, zero_stage=2)
                yield replace(mesh, zero_stage=1)


def _divisors(number: int) -> list[int]:
    return [of for of in range(1, number + 1) if number % of == 0]


class _PlannedRun:
    """A run, and what is predicted of it on one mesh after the other."""

    def __init__(
        self, config: TrainConfig, device: Device, speeds: Speeds, links: Links
    ) -> None:
        self.config = config
        self.device = device
        self.speeds = speeds
        self.links = links
        self.phases: Sequence[Phase] = phases(config)
        # Meshes share them: they depend on what one device computes.
        self.decisions = cache(self._decisions)

    def on(self, mesh: MeshConfig) -> PlannedMesh:
        """Returns what the run costs on a mesh. Raises ValueError where it cannot be
        there, beginning with what does not fit."""
        config = self.config
        fewest = config.micro_batches_on(mesh)
        micro_batch = config.batch_size // fewest
        for phase in self.phases:
            model = model_of(phase, config.model)
            check_shardable(model, phase.sparsities, mesh, micro_batch=micro_batch)
        check_optimizer(config, self.phases, mesh)
        micro_batches, memory = self._micro_batches(mesh, fewest)
        sequences = config.batch_size // (micro_batches * mesh.token_shards)
        tokens = sequences * config.data.sequence_length
        steps: dict[tuple[ModelConfig, FFNSparsity], PredictedStep] = {}
        mean = exposed = 0.0
        for phase in self.phases:
            model = model_of(phase, config.model)
            for share, sparsity in zip(phase.shares, phase.sparsities, strict=True):
                step = predicted_step(
                    model,
                    sequence_length=config.data.sequence_length,
                    tokens_per_device=tokens,
                    micro_batches=micro_batches,
                    sparsity=sparsity,
                    decisions=self.decisions(model, sparsity, tokens, mesh.tensor),
                    speeds=self.speeds,
                    mesh=mesh,
                    links=self.links,
                    optimizer=config.optimizer.name,
                )
                steps[model, sparsity] = step
                of_run = share * phase.steps / config.steps
                mean += of_run * step.total
                exposed += of_run * step.exposed
        return PlannedMesh(
            mesh=mesh,
            micro_batches=micro_batches,
            steps=steps,
            step_seconds=mean,
            exposed_seconds=exposed,
            memory_bytes=memory,
        )

    def _micro_batches(self, mesh: MeshConfig, fewest: int) -> tuple[int, int]:
        """Returns the fewest micro-batches, from `fewest` on, whose memory a device
        has, and those bytes. Raises ValueError where it has too little for any."""
        config, has = self.config, self.device.memory_bytes
        on_each = config.batch_size // mesh.token_shards
        counts = [config.micro_batches or fewest]
        if config.micro_batches is None:
            counts = [of for of in _divisors(on_each) if of >= fewest]
        needed = 0
        for count in counts:
            needed = self._memory(mesh, on_each // count)
            if has is None or needed <= JAX_SHARE * has:
                return count, needed
        assert has is not None
        least = on_each // counts[-1]
        stage = ", or mesh.zero_stage 3" if mesh.zero_stage < 3 else ""
        least_words = "one sequence" if least == 1 else f"{least} sequences"
        raise ValueError(
            f"too little memory: {needed / 2**30:,.1f} GiB for micro-batches of "
            f"{least_words} on a device, and JAX takes {JAX_SHARE:.0%} of "
            f"{has / 2**30:,.0f}; use a larger mesh.fsdp or mesh.tensor{stage}"
        )

    def _memory(self, mesh: MeshConfig, sequences: int) -> int:
        config = self.config
        return max(
            memory_bytes(
                model_of(phase, config.model),
                tokens_per_device=sequences * config.data.sequence_length,
                mesh=mesh,
                sparsity=sparsity,
                optimizer=config.optimizer.name,
            ).total
            for phase in self.phases
            for sparsity in phase.sparsities
        )

    def _decisions(
        self, model: ModelConfig, sparsity: FFNSparsity, tokens: int, tensor: int
    ) -> tuple[Decision, ...]:
        return ffn_decisions(
            model,
            sparsity,
            tokens,
            self.config.backend,
            mesh=replace(MeshConfig(data=1), tensor=tensor),
            device=self.device,
        )
