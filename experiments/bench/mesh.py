"""Times a training step on meshes of several devices against the step of one.

    uv run --extra cuda experiments/bench/mesh.py                    # two GPUs
    uv run --extra cuda experiments/bench/mesh.py --recipe paper --phases.skip-blocks \\
        --backend mosaic_sm90
    XLA_PYTHON_CLIENT_MEM_FRACTION=0.95 uv run --extra cuda experiments/bench/mesh.py \\
        --preset llama-1b --layers 10 --recipe dense --batch-size 32 \\
        --micro-batches 8 --per-device --meshes 2 1 1 1 2 1 4 1 1 1 4 1 --rounds 3 \\
        --steps 1 --saves 0

The step is that of the recipe's sparse phase, or of the dense recipe, on real text,
with attention, optimiser and everything else. Every mesh takes the same batch; with
`--per-device` that batch is one device's, and a mesh takes one for each of its devices.
The losses and gradient norms of two steps are compared with those of one device on the
same batch before anything is timed. Unless `--saves 0` is given, each mesh also writes
checkpoints in the background, to see for how long a save holds the loop.

Two H200s: about 80 seconds. Expected: data and fsdp 1.75 times one GPU's tokens per
second, tensor 1.55; a save holds the loop for about 40 ms, a third of a step.
"""

import argparse
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path
from statistics import median
from typing import Literal

import jax
import tyro

from experiments.bench.rows import append_rows
from sparsejax.checkpoints.checkpoint import Checkpoints
from sparsejax.config import (
    RECIPES,
    MeshConfig,
    PresetName,
    RecipeConfig,
    RecipeName,
    TrainConfig,
)
from sparsejax.config.config_file import to_json
from sparsejax.config.presets import PRESETS
from sparsejax.data.corpus import load_corpus
from sparsejax.data.tokenizers import ByteTokenizer
from sparsejax.launch.flags import (
    REGISTRY,
    check_flags,
    flags_of,
    settings_of,
)
from sparsejax.ops.backend import Backend
from sparsejax.reports.provenance import commit
from sparsejax.sparsity.patterns import name_of
from sparsejax.training.run import Run
from sparsejax.training.step import TrainState
from sparsejax.tuning.timing import time_interleaved

ONE = "one device"
COLLECTIVES = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all")


@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of the benchmark: which run on which meshes, and where the rows are
    written."""

    preset: PresetName = "gpt-124m"
    recipe: RecipeName = "experts"
    phases: RecipeConfig = field(default_factory=RecipeConfig)
    backend: Backend | None = None
    """The backend that runs the sparse GEMMs; None: the fastest for each."""
    meshes: tuple[tuple[int, int, int], ...] = ((2, 1, 1), (1, 2, 1), (1, 1, 2))
    """Sizes (data, fsdp, tensor) of each mesh; none larger than the devices there
    are."""
    zero_stages: tuple[Literal[1, 2, 3], ...] = (3,)
    """The `mesh.zero_stage` that each mesh with fsdp above 1 is timed with, each one in
    its turn."""
    layers: int | None = None
    """Number of layers; None: the preset's."""
    batch_size: int = 64
    micro_batches: int = 2
    per_device: bool = False
    """Whether `batch_size` is for one device, and a mesh takes that times the number of
    its devices (weak scaling)."""
    text: str | None = None
    """Glob of text files; None: the Python standard library's source."""
    rounds: int = 5
    steps: int = 4
    """Optimiser steps per timed round."""
    saves: int = 3
    """Checkpoints that are timed on each mesh, beside a first one; 0 writes none."""
    trace: Path | None = None
    """Folder in which a trace of a step on each mesh is written, after the timing, for
    XProf and Perfetto; None writes none."""
    results: Path | None = Path("runs/bench_mesh.jsonl")
    """File to which one JSON line per mesh is appended; None writes nothing. Rows that
    are to stay: experiments/results/bench_mesh.jsonl."""


class Stepper:
    """A run in its sparse phase, on some of the devices."""

    def __init__(self, config: TrainConfig) -> None:
        devices = jax.devices()[: config.mesh.devices]
        # Bytes, under the preset's vocabulary: its head is part of the step.
        corpus = load_corpus(config.data, vocab_size=ByteTokenizer.vocab_size)
        self.run = Run(config, devices=devices, corpus=corpus)
        first, *later = self.run.phases
        timed = later[0] if later and first.static_weights is None else first
        static = timed.static_weights
        self.static_weights = None if static is None else name_of(static)
        of_phase = self.run.of_phase(timed)
        state = self.run.of_phase(first).initial_state(first.held)
        self.state: TrainState = self.run.switch_phase(state, first, timed)
        self.batches = self.run.batches()
        tokens = self.run.place(next(self.batches)["tokens"])
        step = of_phase.step(timed.sparsity, timed.held)
        self.step = step.lower(self.state, tokens).compile()

    def steps(self, count: int) -> list[dict[str, float]]:
        """Returns the losses and gradient norms of the next steps, after waiting for
        the last one."""
        reports = []
        for _ in range(count):
            tokens = self.run.place(next(self.batches)["tokens"])
            self.state, report = self.step(self.state, tokens)
            reports.append(report)
        jax.block_until_ready(self.state.params)
        return [{name: float(x) for name, x in report.items()} for report in reports]

    def collectives(self) -> dict[str, int]:
        """Returns how often each kind of collective stands in the compiled step."""
        pattern = rf" ({'|'.join(COLLECTIVES)})(?:-start)?\("
        return dict(Counter(re.findall(pattern, self.step.as_text() or "")))

    def save(self, times: int) -> dict[str, float]:
        """Returns the times of checkpoints that are written in the background while
        steps go on: milliseconds for which a save holds the loop, and seconds until it
        is complete; medians, but for the first save. Returns nothing for no `times`."""
        if not times:
            return {}
        held, total = [], []
        with tempfile.TemporaryDirectory() as folder, Checkpoints(folder) as kept:
            # The first save allocates the host's buffers.
            for index in range(times + 1):
                start = time.perf_counter()
                state = self.batches.get_state()
                kept.save(index, self.state, data_state=state)
                held.append(1e3 * (time.perf_counter() - start))
                self.steps(1)
                kept.wait()
                total.append(time.perf_counter() - start)
        return {
            "first_save_held_ms": held[0],
            "save_held_ms": median(held[1:]),
            "save_total_s": median(total[1:]),
        }


def main(config: Config) -> list[dict]:
    """Checks, times, prints and records every mesh; returns the rows."""
    meshes = {ONE: MeshConfig(data=1)} | _meshes(config)
    most = max(mesh.devices for mesh in meshes.values())
    if most > jax.device_count():
        raise ValueError(
            f"meshes={config.meshes} need {most} devices, and there are "
            f"{jax.device_count()}; leave the larger ones out"
        )
    if not config.zero_stages:
        raise ValueError("zero_stages is empty; give one of 1, 2, 3 or more of them")
    of_one = _first_steps_of_one(config, meshes.values())
    # What XLA found out about the GEMMs of one device holds for the others.
    steppers = {ONE: Stepper(_train_config(config, meshes.pop(ONE)))}
    settings = [_train_config(config, mesh) for mesh in meshes.values()]
    with ThreadPoolExecutor() as pool:
        steppers |= zip(meshes, pool.map(Stepper, settings), strict=True)
    first = {name: stepper.steps(2) for name, stepper in steppers.items()}
    of_one[config.batch_size] = first[ONE]
    for name, reports in first.items():
        _check(name, reports, of_one[steppers[name].run.config.batch_size])
    calls = {
        name: lambda stepper=stepper: stepper.steps(config.steps)
        for name, stepper in steppers.items()
    }
    rows = []
    for timing in time_interleaved(calls, baseline=ONE, rounds=config.rounds):
        stepper = steppers[timing.name]
        if config.trace is not None:
            with jax.profiler.trace(config.trace / timing.name.replace(" ", "-")):
                stepper.steps(1)
        tokens = config.steps * stepper.run.config.tokens_per_step
        times = stepper.run.config.batch_size / config.batch_size
        memory = stepper.step.memory_analysis()
        assert memory is not None
        row = {
            "name": timing.name,
            "zero_stage": stepper.run.config.mesh.zero_stage,
            "preset": config.preset,
            "recipe": config.recipe,
            "phases": to_json(stepper.run.config)["phases"],
            "backend": config.backend,
            "layers": stepper.run.config.model.layers,
            "static_weights": stepper.static_weights,
            "scan_layers": stepper.run.config.model.scan_layers,
            "batch_size": stepper.run.config.batch_size,
            "micro_batches": config.micro_batches,
            "per_device": config.per_device,
            "tokens_per_second": 1e3 * tokens / timing.time_ms,
            "speedup": times / timing.ratio,
            "speedup_min": times / timing.ratio_max,
            "speedup_max": times / timing.ratio_min,
            "step_ms": timing.time_ms / config.steps,
            "arguments_gib": memory.argument_size_in_bytes / 2**30,
            "temporaries_gib": memory.temp_size_in_bytes / 2**30,
            "first_steps": first[timing.name],
            "collectives": stepper.collectives(),
            **stepper.save(config.saves),
            "rounds": config.rounds,
            "device": jax.devices()[0].device_kind,
            "jax": jax.__version__,
            "commit": commit(),
            "date": date.today().isoformat(),
        }
        rows.append(row)
        print(
            f"{row['name']:<28} {row['tokens_per_second']:>10,.0f} tokens/s, "
            f"{row['speedup']:.2f} ({row['speedup_min']:.2f} to "
            f"{row['speedup_max']:.2f}) x one; step {row['step_ms']:.0f} ms; "
            f"{row['collectives']}"
        )
        if config.saves:
            print(
                f"{'':<28} a save holds {row['save_held_ms']:.0f} ms of "
                f"{row['save_total_s']:.1f} s"
            )
    append_rows(rows, config.results)
    return rows


def _meshes(config: Config) -> dict[str, MeshConfig]:
    """Returns the meshes that are timed beside one device, by name."""
    meshes = {}
    for data, fsdp, tensor in config.meshes:
        name = f"data {data} x fsdp {fsdp} x tensor {tensor}"
        for stage in config.zero_stages if fsdp > 1 else (3,):
            said = name if stage == 3 else f"{name}, ZeRO {stage}"
            meshes[said] = MeshConfig(
                data=data, fsdp=fsdp, tensor=tensor, zero_stage=stage
            )
    return meshes


def _first_steps_of_one(
    config: Config, meshes: Iterable[MeshConfig]
) -> dict[int, list[dict[str, float]]]:
    """Returns the reports of one device's first two steps, by the size of the batch,
    for every batch of a mesh that is not one device's own. Nothing of them stays in
    memory."""
    sizes = {_train_config(config, mesh).batch_size for mesh in meshes}
    sizes = sorted(sizes - {config.batch_size})
    return {size: Stepper(_on_one_device(config, size)).steps(2) for size in sizes}


def _train_config(config: Config, mesh: MeshConfig) -> TrainConfig:
    preset = PRESETS[config.preset]()
    layers = preset.model.layers if config.layers is None else config.layers
    times = mesh.devices if config.per_device else 1
    return replace(
        preset,
        recipe=config.recipe,
        phases=config.phases,
        backend=config.backend,
        model=replace(preset.model, layers=layers),
        data=replace(preset.data, text=config.text),
        mesh=mesh,
        batch_size=times * config.batch_size,
        micro_batches=config.micro_batches,
        eval_batches=1,
    )


def _on_one_device(config: Config, batch_size: int) -> TrainConfig:
    """Returns the settings of one device that takes a larger batch, in more
    micro-batches of the same size."""
    times = batch_size // config.batch_size
    return replace(
        _train_config(config, MeshConfig(data=1)),
        batch_size=batch_size,
        micro_batches=times * config.micro_batches,
    )


def _check(name: str, reports: list[dict], expected: list[dict]) -> None:
    # bfloat16 sums in another order, averaged over a batch: 3e-5 and 2e-4 were the most
    # seen on GPUs. A lost or doubled part of a gradient is far outside.
    for got, want in zip(reports, expected, strict=True):
        for value, tolerance in (("loss", 1e-3), ("gradient_norm", 5e-3)):
            error = abs(got[value] - want[value]) / want[value]
            assert error < tolerance, f"{name}: {value} {got[value]}, not {want[value]}"


def parse(arguments: list[str]) -> Config:
    """Returns the settings of a command line, with the phases of its recipe where no
    flag says otherwise.

    Raises:
      ValueError: a setting is out of its range, or some do not fit together.
    """
    check_flags(arguments)
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--recipe", choices=list(RECIPES), default=Config.recipe)
    recipe = first.parse_known_args(arguments)[0].recipe
    config = tyro.cli(
        Config,
        args=arguments,
        default=Config(recipe=recipe, phases=flags_of(RecipeConfig(), recipe)),
        description=__doc__,
        prog="experiments/bench/mesh.py",
        registry=REGISTRY,
    )
    return replace(config, phases=settings_of(config.phases, recipe))


if __name__ == "__main__":
    main(parse(sys.argv[1:]))
