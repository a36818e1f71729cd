"""Times a whole training step with sparse FFNs against the dense one.

    uv run --extra cuda experiments/bench/step.py --profile
    uv run --extra cuda experiments/bench/step.py --profile --rounds 4 \\
        --modes "all six GEMMs 2:4" "V:N:M, true mass, all six" "skip_blocks, all six"
    XLA_PYTHON_CLIENT_MEM_FRACTION=0.95 uv run --extra cuda experiments/bench/step.py \\
        --preset llama-7b --layers 16 --rounds 3 \\
        --modes "V:N:M, true mass, all six" "skip_blocks, all six"
    uv run --extra cuda experiments/bench/step.py --kv-heads 4 --modes --recipes experts
    uv run --extra cuda experiments/bench/step.py --profile --modes \\
        --static-weights diagonal:4 diagonal:2

Everything is in it: embedding, attention (cuDNN), FFN, loss head, backward, gradient
clip, AdamW, and for a sparse step routing and packing. All steps run in turn on real
text, and on the same weights and moments but for those with static weights, which have
their own; where there are experts the neurons have been clustered first. The loss and
the gradient norm of every sparse step are compared with those of the masked dense path
(`xla`) in the same precision before it is timed, those of static weights with whole
ones that are zero where they have no entry; so are those of a dense step whose FFN runs
on kernels (`--backend mosaic_sm90`). The dense step and every other are timed with
8-bit floats too, in attention's four weights and, where it is dense, in the FFN; the
dense one with 8-bit floats is compared with the dense one without. With `--profile` the
time of a step is split by kind of GPU kernel.

The dense steps are timed alone, before the process runs any sparse kernel, which is
what a dense run sees; in turn with the sparse ones; and the first alone again. After a
kernel that uses sparse tensor cores the driver keeps the clock lower for the rest of
the process (experiments/LOG.md, 2026-11-22): the dense row has clock and power of both.

One H200: the first takes about two minutes, most of it compilation; `llama-7b` with two
modes and 8-bit floats beside them took seven and a half. Six steps with remat "dots"
were compiled for four minutes, with training beside them.
"""

import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import tyro
from flax import nnx

from experiments.bench.kernel_times import by_kind, kernel_times
from experiments.bench.power import Draw, PowerSampler
from experiments.bench.references.masked_step import masked_step
from experiments.bench.rows import append_rows
from experiments.bench.sparse_modes import (
    DENSE_FP8_STEP,
    DENSE_STEP,
    choose,
    config_of_run,
    sparse_modes,
    sparsities_of_runs,
    steps_to_time,
)
from sparsejax.config import MeshConfig, PresetName, RecipeName, TrainConfig
from sparsejax.config.config_file import to_plain
from sparsejax.config.presets import PRESETS
from sparsejax.config.schedule import Phase, model_of
from sparsejax.data.corpus import load_corpus
from sparsejax.data.tokenizers import ByteTokenizer
from sparsejax.dtypes import Precision
from sparsejax.feed_forward.packing import rows_of_token
from sparsejax.feed_forward.sparsity import DENSE, FFNSparsity
from sparsejax.models.sparse_ffn import sparse_ffns
from sparsejax.models.transformer import Transformer
from sparsejax.ops.backend import Backend, Decision
from sparsejax.reports import metrics
from sparsejax.reports.provenance import commit
from sparsejax.sparsity.patterns import name_of
from sparsejax.switches.growth import same_size
from sparsejax.training.run import Run
from sparsejax.training.step import TrainState
from sparsejax.tuning.timing import Timing, over_alone, time_interleaved


@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of the benchmark: which model, modes and recipes, and where the rows are
    written."""

    preset: PresetName = "llama-1b"
    modes: tuple[str, ...] = ("2:4 weights",)
    """Names of `sparse_modes`, each timed against the dense step."""
    recipes: tuple[RecipeName, ...] = ()
    """Recipes whose sparse phases, as the preset has them, are timed after the
    modes."""
    static_weights: tuple[str, ...] = ()
    """Patterns of static weights in all linear layers, after those."""
    comparison: Path | None = None
    """A comparison file, such as `experiments/comparisons/changes-5m.toml`."""
    runs: tuple[str, ...] = ()
    """Runs of that file whose sparse phases are timed, after the modes, in the model of
    this benchmark."""
    model_of: str | None = None
    """A run of that file whose model and sequence length are taken in place of the
    preset's."""
    precisions: tuple[Precision, ...] = ("fp8",)
    """Precisions besides the compute dtype in which every step is timed, too; those of
    static weights are not."""
    experts: int = 4
    """Number of experts E of the modes, clusters of neurons; a token uses 1 of E (or 2
    of 2 E)."""
    v: int = 128
    """Rows of a V:N:M block in the modes."""
    backend: Backend | None = None
    """The backend that runs the FFN's GEMMs, those of dense steps included where it has
    them; None: the fastest for each."""
    layers: int | None = None
    """Number of layers; None: the preset's."""
    d_hidden: int | None = None
    """Number of neurons F of an FFN; None: the preset's."""
    kv_heads: int | None = None
    """Number of key and value heads; None: the preset's, as many as of queries."""
    vocab_size: int | None = None
    """Number of ids in the vocabulary; None: the preset's."""
    batch_size: int = 8
    micro_batches: int = 2
    remat: Literal["none", "full", "dots"] = "none"
    """The part that a block recomputes in the backward. Recomputing is work that the
    dense step need not do: only where memory ends."""
    scan_layers: bool = False
    """Whether a loop runs over the layers: compiling takes less time then, and a step
    more."""
    logits_of_loss: Literal["float32", "dtype"] = "float32"
    """The dtype of the logits that the loss is computed from, as in `ModelConfig`."""
    text: str | None = None
    """Glob of text files; None: the Python standard library's source."""
    rounds: int = 5
    steps: int = 2
    """Optimiser steps per timed round."""
    profile: bool = False
    """Whether the time of each step is split by kind of kernel, and printed."""
    results: Path | None = Path("runs/bench_step.jsonl")
    """File to which one JSON line per step is appended; None writes nothing. Rows that
    are to stay: experiments/results/bench_step.jsonl."""


class Steps:
    """The dense step and the sparse ones, on the same weights where they have all."""

    def __init__(self, config: TrainConfig, modes: dict[str, Phase]) -> None:
        # Bytes, under the preset's vocabulary: its head is part of the step.
        corpus = load_corpus(config.data, vocab_size=ByteTokenizer.vocab_size)
        self.run = Run(config, devices=jax.devices()[:1], corpus=corpus)
        self.modes = {DENSE_STEP: Phase(kind=DENSE_STEP, steps=1, sparsity=DENSE)}
        self.modes |= modes
        state, self.switch_seconds = self._clustered(self.run.initial_state())
        self.states = {self.run: state}
        self.buffers = {}
        for name, phase in self.modes.items():
            run = self._run_with_state(name)
            if run not in self.states:
                self.states[run] = run.initial_state(DENSE)
            model = run.model(self.states[run], DENSE)
            self.buffers[name] = _buffers_of(model, phase.sparsity)
        self.tokens = self.run.place(next(self.run.batches())["tokens"])
        self.compiled = self._compiled(
            lambda phase: self.run.of_phase(phase).step(phase.sparsity)
        )
        masked = partial(masked_step, self.run)
        apart = None if self.on_kernels(DENSE_STEP) else DENSE_STEP
        self.compiled_masked = self._compiled(masked, without=apart)

    def decisions(self, name: str) -> tuple[Decision, ...]:
        """Returns what runs the GEMMs of the FFN in a step."""
        config, phase = self.run.config, self.modes[name]
        return metrics.ffn_decisions(
            model_of(phase, config.model),
            phase.sparsity,
            config.tokens_per_step // self.run.micro_batches,
            config.backend,
        )

    def on_kernels(self, name: str) -> bool:
        """Returns whether a set of kernels runs a GEMM of the FFN in a step."""
        return any(decision.on_kernels for decision in self.decisions(name))

    def _run_with_state(self, name: str) -> Run:
        """Returns the run whose state a step reads: steps that differ in their
        precision have one in common."""
        run = self.run.of_phase(self.modes[name])
        shared = same_size(run.config.model, self.run.config.model)
        return self.run if shared else run

    def _compiled(
        self, step: Callable[[Phase], Any], *, without: str | None = None
    ) -> dict[str, jax.stages.Compiled]:
        """Returns the steps of all modes by name, traced one by one and compiled side
        by side, and prints how long both took: they are most of the benchmark."""
        start = time.perf_counter()
        lowered = {
            name: step(phase).lower(self._of(name), self.tokens)
            for name, phase in self.modes.items()
            if name != without
        }
        traced = time.perf_counter()
        with ThreadPoolExecutor(8) as pool:
            programs = pool.map(lambda program: program.compile(), lowered.values())
            compiled = dict(zip(lowered, programs, strict=True))
        tracing, compiling = traced - start, time.perf_counter() - traced
        steps = f"{len(compiled)} steps traced in {tracing:.0f} s"
        print(f"{steps}, compiled in {compiling:.0f} s", flush=True)
        return compiled

    def _clustered(self, state: TrainState) -> tuple[TrainState, float | None]:
        """Returns a dense state whose neurons lie cluster by cluster, as the first
        sparsity with experts has them, and the seconds that the switch took to compile
        and run, or None without experts."""
        sparsities = [phase.sparsity for phase in self.modes.values()]
        with_experts = [sparsity for sparsity in sparsities if sparsity.experts]
        if not with_experts:
            return state, None
        start = time.perf_counter()
        switched = self.run.switch(state, DENSE, with_experts[0])
        jax.block_until_ready(switched.params)
        seconds = time.perf_counter() - start
        model = self.run.model(switched, with_experts[0])
        return replace(switched, buffers=_buffers_of(model, DENSE)), seconds

    def _of(self, name: str) -> TrainState:
        run = self._run_with_state(name)
        return replace(self.states[run], buffers=self.buffers[name])

    def call(self, name: str, times: int = 1) -> dict[str, float]:
        """Runs some steps, waits for them, and returns the report of the last one."""
        report, run = {}, self._run_with_state(name)
        for _ in range(times):
            state, report = self.compiled[name](self._of(name), self.tokens)
            self.states[run], self.buffers[name] = state, state.buffers
        jax.block_until_ready(self.states[run].params)
        return {quantity: float(value) for quantity, value in report.items()}

    def masked(self, name: str) -> dict[str, float]:
        """Returns the report of a sparse step on this state, computed by dense GEMMs
        over masked operands."""
        values = self.compiled_masked[name](self._of(name), self.tokens)
        return {quantity: float(value) for quantity, value in values.items()}


def _buffers_of(model: Transformer, sparsity: FFNSparsity) -> nnx.State:
    """Returns the buffers of the dense model under another sparsity: its centres are
    the mean directions of its clusters, or of their halves."""
    for ffn in sparse_ffns(model):
        ffn.compute_as(sparsity)
    # Copies: a step donates its own.
    return jax.tree.map(jnp.copy, nnx.split(model, nnx.Param, ...)[2])


def main(config: Config) -> list[dict]:
    """Checks, times, prints and records the dense step and every sparse one; returns
    the rows."""
    modes = steps_to_time(
        choose(config.modes, sparse_modes(experts=config.experts, v=config.v))
        | sparsities_of_runs(config.comparison, config.runs),
        preset=config.preset,
        recipes=config.recipes,
        static_weights=config.static_weights,
        precisions=config.precisions,
    )
    steps = Steps(_train_config(config), modes)
    in_turn = partial(time_interleaved, baseline=DENSE_STEP, rounds=config.rounds)
    calls = {
        name: partial(steps.call, name, config.steps) for name in (DENSE_STEP, *modes)
    }
    alone_fp8 = None
    with PowerSampler() as power:
        alone, before = _by_itself(in_turn, calls[DENSE_STEP], power)
        if DENSE_FP8_STEP in calls:
            alone_fp8, _ = _by_itself(in_turn, calls[DENSE_FP8_STEP], power)
        errors = {name: _check(steps, name) for name in steps.compiled_masked}
        timings = in_turn(calls)
        again, after = _by_itself(in_turn, calls[DENSE_STEP], power)
    rows = []
    for timing in timings:
        row = _row(config, steps, timing, alone)
        if alone_fp8 is not None:
            over = over_alone(timing, alone_fp8)
            row["over_fp8_dense"] = over["over_dense_alone"]
            row["spread_fp8"] = over["spread_alone"]
        if timing.name == DENSE_STEP:
            row |= {
                "alone": _of(config, alone, before),
                "alone_after_sparse": _of(config, again, after),
            }
        if timing.name in errors:
            row |= {"error": errors[timing.name]}
        if config.profile:
            by_name = kernel_times(partial(steps.call, timing.name))
            row["kernel_ms"] = by_kind(by_name)
        rows.append(row)
        print(_line(row), flush=True)
    append_rows(rows, config.results)
    return rows


def _by_itself(
    timed: Callable[[dict[str, Callable]], list[Timing]],
    dense: Callable[[], object],
    power: PowerSampler,
) -> tuple[Timing, Draw | None]:
    start = time.perf_counter()
    (timing,) = timed({DENSE_STEP: dense})
    return timing, power.between(start, time.perf_counter())


def _of(config: Config, timing: Timing, draw: Draw | None) -> dict:
    return {
        "step_ms": timing.time_ms / config.steps,
        "clock_mhz": None if draw is None else draw.clock_mhz,
        "watts": None if draw is None else draw.watts,
    }


def _train_config(config: Config) -> TrainConfig:
    given = PRESETS[config.preset]()
    if config.model_of is not None:
        of_run = config_of_run(config.comparison, config.model_of)
        given = replace(given, model=of_run.model, data=of_run.data)
    sizes: dict[str, Any] = {
        "layers": config.layers,
        "d_hidden": config.d_hidden,
        "kv_heads": config.kv_heads,
        "vocab_size": config.vocab_size,
    }
    return replace(
        given.with_recipe("dense"),
        backend=config.backend,
        model=replace(
            given.model,
            **{name: size for name, size in sizes.items() if size is not None},
            remat=config.remat,
            scan_layers=config.scan_layers,
            logits_of_loss=config.logits_of_loss,
        ),
        data=replace(given.data, text=config.text),
        mesh=MeshConfig(data=1),
        batch_size=config.batch_size,
        micro_batches=config.micro_batches,
        eval_batches=1,
    )


def _check(steps: Steps, mode: str) -> dict[str, float]:
    """Returns the relative differences in loss and gradient norm between a sparse step
    and the masked dense one, or between the dense steps with 8-bit floats and without.
    Raises AssertionError where one is too large."""
    steps.call(DENSE_STEP)
    masked, sparse = steps.masked(mode), steps.call(mode)
    errors, tolerances = {}, {"loss": 1e-3, "gradient_norm": 5e-3}
    # bfloat16 sums in another order, averaged over a batch, as in `mesh`. 8-bit floats
    # round up to 6 and 12 % of an entry away: early in training norms differed by 12 %.
    if steps.modes[mode].sparsity.is_dense and steps.modes[mode].precision:
        tolerances = {"loss": 2e-2, "gradient_norm": 0.3}
    for name, tolerance in tolerances.items():
        errors[name] = abs(sparse[name] - masked[name]) / masked[name]
        found = f"{mode}: {name} {sparse[name]}, not {masked[name]}"
        assert errors[name] < tolerance, found
    return errors


def _row(config: Config, steps: Steps, timing: Timing, alone: Timing) -> dict:
    train = steps.run.config
    step_ms = timing.time_ms / config.steps
    sequence = train.data.sequence_length
    phase = steps.modes[timing.name]
    sparsity, model = phase.sparsity, model_of(phase, train.model)
    decisions = steps.decisions(timing.name)
    memory = steps.compiled[timing.name].memory_analysis()
    assert memory is not None
    static = model.static_weights
    return {
        "name": timing.name,
        "preset": None if config.model_of else config.preset,
        "model_of": config.model_of,
        "comparison": config.comparison and config.comparison.stem,
        "layers": model.layers,
        "vocab_size": model.vocab_size,
        "d_model": model.d_model,
        "d_hidden": model.d_hidden,
        "kv_heads": model.kv_heads,
        "tokens_per_micro_batch": decisions[0].spec.tokens,
        "micro_batches": config.micro_batches,
        "remat": model.remat,
        "scan_layers": model.scan_layers,
        "logits_of_loss": model.logits_of_loss,
        "precision": model.precision,
        "static_weights": None if static is None else name_of(static),
        "sparsity": to_plain(sparsity),
        "experts": sparsity.experts,
        "experts_per_token": sparsity.experts_per_token if sparsity.experts else None,
        "v": getattr(sparsity.activations, "v", None),
        "switch_seconds": steps.switch_seconds if sparsity.experts else None,
        "step_ms": step_ms,
        "speedup": 1 / timing.ratio,
        "spread": [1 / timing.ratio_max, 1 / timing.ratio_min],
        **over_alone(timing, alone),
        **metrics.speed(
            model,
            sequence,
            decisions,
            1e3 * train.tokens_per_step / step_ms,
            metrics.dense_peak(model.dtype),
        ),
        "state_gib": memory.argument_size_in_bytes / 2**30,
        "temporaries_gib": memory.temp_size_in_bytes / 2**30,
        "rows_of_token": rows_of_token(sparsity, decisions),
        "gemms": [f"{d.spec.name}: {d.backend}" for d in decisions],
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "commit": commit(),
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
    }


def _line(row: dict) -> str:
    text = (
        f"{row['name']}: {row['model_of'] or row['preset']}, {row['layers']} layers: "
        f"{row['step_ms']:.0f} ms a step, {row['speedup']:.3f} "
        f"({row['spread'][0]:.3f}-{row['spread'][1]:.3f}) x dense in turn, "
        f"{row['over_dense_alone']:.3f} "
        f"({row['spread_alone'][0]:.3f}-{row['spread_alone'][1]:.3f}) x dense alone, "
        f"{row.get('over_fp8_dense', math.nan):.3f} x dense fp8 alone; "
        f"{row['tokens_per_second']:,.0f} tokens/s; MFU of the dense FLOPs "
        f"{row['mfu_dense_equivalent']:.3f}, executed {row['mfu_executed']:.3f}; "
        f"state {row['state_gib']:.1f} GiB, temporaries {row['temporaries_gib']:.1f}"
    )
    for name in ("alone", "alone_after_sparse"):
        if name in row:
            text += f"; {name.replace('_', ' ')} {row[name]}"
    if "error" in row:
        text += f"; to the masked step {row['error']}"
    for kind, ms in row.get("kernel_ms", {}).items():
        text += f"\n  {ms:9.2f} ms  {kind}"
    return text


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
