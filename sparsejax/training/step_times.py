"""The times of a run's steps, dense and sparse, measured before the first of them.

Whether a sparse phase is worth running is a question about whole steps on the GPU at
hand: kernels timed one by one leave out packing, routing, and the driver, which lowers
the clock of a process that has used sparse tensor cores. So the steps are timed as they
will run, and a phase whose steps are slower than dense ones is trained dense.
"""

import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import takewhile
from typing import Any

import jax

from sparsejax.config import TrainConfig
from sparsejax.config.config_file import from_plain
from sparsejax.config.schedule import Phase, with_dense
from sparsejax.data.corpus import Corpus
from sparsejax.distributed.processes import Exchange
from sparsejax.feed_forward.sparsity import FFNSparsity
from sparsejax.training.run import Run
from sparsejax.training.step import TrainState

WARM_SECONDS = 1.5
"""The seconds that steps run before they are timed: compilation aside, the first steps
of a process find the GPU at another clock than later ones."""

ROUND_SECONDS = 1.0
"""The seconds that each round of timed steps runs at least."""

ROUNDS = 3

NEW_PROCESS_SECONDS = 40.0
"""The seconds that it takes to begin a dense phase in a process of its own
(experiments/LOG.md, 2026-11-22)."""


@dataclass(frozen=True, kw_only=True)
class PhaseTime:
    """The time of a step of one sparse phase: the mean over its steps where some of
    them have another sparsity."""

    phase: int
    """The number of the phase in the run, from 0."""
    step_ms: float
    """The time of one step in milliseconds, the median over the rounds."""
    fastest_ms: float
    slowest_ms: float
    dense_ms: float
    """The time of a dense step of the phase's precision before any sparse one, in
    milliseconds, the median over the rounds."""
    dense_after_ms: float
    """The time of a dense step right after, in milliseconds, in the same process and so
    at its clock."""


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """The times of a run's steps on the devices that will run it."""

    device: str
    """The model of the devices, as in `jax.Device.device_kind`."""
    devices: int
    dense_ms: float
    """The time of a dense step before any sparse one, in milliseconds, the median over
    the rounds; in the precision of the first sparse phase."""
    fastest_dense_ms: float
    slowest_dense_ms: float
    sparse: tuple[PhaseTime, ...]
    """The times of the sparse phases, in the order of the phases."""
    seconds: float
    """The seconds that the timing took, compilation included."""

    def speedup(self, phase: int) -> float | None:
        """Returns how many times as fast as a dense step a step of the phase is; None
        where the phase was not timed."""
        found = [of.dense_ms / of.step_ms for of in self.sparse if of.phase == phase]
        return found[0] if found else None


def to_json(times: StepTimes) -> dict[str, Any]:
    """Returns the times as plain values."""
    return asdict(times)


def from_json(values: Any) -> StepTimes:
    """Returns the times that `to_json` wrote. Raises ValueError where the values are
    not of that form."""
    return from_plain(StepTimes, values)


def phases_run_dense(
    times: StepTimes, phases: Sequence[Phase], *, new_process_minutes: float | None
) -> tuple[int, ...]:
    """Returns the numbers of the sparse phases to train dense, since sparse they would
    lose time.

    A phase of n steps saves n (dense - sparse). What follows it in the same process
    before the next phase that stays sparse, m dense steps, takes m (dense after -
    dense) longer; a new process for them spares that and costs `NEW_PROCESS_SECONDS`. A
    phase that saves no more than it costs is trained dense. A phase without a step left
    is never returned.

    Args:
      times: the times of the run's steps.
      phases: the phases of the run, each as long as what is left of it.
      new_process_minutes: dense phases that take as long begin a process of their own;
        None where none does.
    """
    slower: list[int] = []
    # From the last on: what follows a phase is then known.
    for of in sorted(times.sparse, key=lambda of: -of.phase):
        own, later = phases[of.phase].steps, with_dense(phases, slower)[of.phase + 1 :]
        dense_later = sum(
            phase.steps for phase in takewhile(lambda phase: phase.is_dense, later)
        )
        saved = own * (of.dense_ms - of.step_ms)
        lost = dense_later * max(0.0, of.dense_after_ms - of.dense_ms)
        tail_minutes = dense_later * of.dense_ms / 60_000
        if new_process_minutes is not None and tail_minutes >= new_process_minutes:
            lost = min(lost, 1e3 * NEW_PROCESS_SECONDS)
        if own and saved <= lost:
            slower.append(of.phase)
    return tuple(sorted(slower))


def time_steps(config: TrainConfig, corpus: Corpus) -> StepTimes:
    """Returns the times of a run's steps on all devices, on the first tokens of a
    corpus.

    First come dense steps, in each precision of a sparse phase, then those of each
    sparse phase, entered by the switch that the run will make, each followed by dense
    ones again. The state is dropped afterwards, but what the driver does to the clock
    stays with the process: call this in one of its own.

    Args:
      config: the settings of the run.
      corpus: the corpus of the run, or a piece of it that holds some steps.
    """
    begin = time.perf_counter()
    run = Run(config, corpus=corpus)
    batches = run.batches()
    tokens = run.place(next(batches)["tokens"])
    # Sparse phases have the whole model, whatever the first of all has; trained dense
    # each of them would keep its precision.
    whole = {"d_hidden": None, "layers": None, "static_weights": None}
    first = replace(run.phases[0], **whole)
    stepper = _Stepper(run, run.initial_state(), first, tokens)
    all_dense = {
        of.precision: replace(first.as_dense(), precision=of.precision)
        for of in run.phases
        if not of.is_dense
    } or {first.precision: first.as_dense()}
    dense = {}
    for precision, phase in all_dense.items():
        stepper.switch(phase)
        dense[precision] = stepper.time()
    sparse = []
    for number, phase in enumerate(run.phases):
        if phase.is_dense:
            continue
        stepper.switch(phase)
        own = stepper.time()
        stepper.switch(all_dense[phase.precision])
        sparse.append(
            PhaseTime(
                phase=number,
                step_ms=statistics.median(own),
                fastest_ms=min(own),
                slowest_ms=max(own),
                dense_ms=statistics.median(dense[phase.precision]),
                dense_after_ms=statistics.median(stepper.time()),
            )
        )
    of_first = next(iter(dense.values()))
    return StepTimes(
        device=jax.devices()[0].device_kind,
        devices=run.mesh.size,
        dense_ms=statistics.median(of_first),
        fastest_dense_ms=min(of_first),
        slowest_dense_ms=max(of_first),
        sparse=tuple(sparse),
        seconds=time.perf_counter() - begin,
    )


class _Stepper:
    """A state that steps on the same tokens, in one phase after another."""

    def __init__(
        self, run: Run, state: TrainState, phase: Phase, tokens: jax.Array
    ) -> None:
        self.run, self.state, self.phase = run, state, phase
        self.tokens = tokens
        self.exchange, self.timed = Exchange("time steps"), 0

    def switch(self, phase: Phase) -> None:
        if phase.sparsities != self.phase.sparsities:
            self.state = self.run.switch_phase(self.state, self.phase, phase)
        self.phase = phase

    def steps(self, count: int, sparsity: FFNSparsity) -> float:
        """Runs `count` steps of one sparsity, and returns the seconds that they
        took."""
        run = self.run.of_phase(self.phase)
        step = run.step(sparsity, self.phase.held)
        begin = time.perf_counter()
        for _ in range(count):
            self.state, _ = step(self.state, self.tokens)
        jax.block_until_ready(self.state)
        return time.perf_counter() - begin

    def time(self) -> list[float]:
        """Returns the milliseconds of a step in each round. Each sparsity of the phase
        is timed by itself, and the times are averaged by its share of the phase's
        steps."""
        rounds = [self.time_one(sparsity) for sparsity in self.phase.sparsities]
        shares = self.phase.shares
        return [
            sum(share * ms for share, ms in zip(shares, each, strict=True))
            for each in zip(*rounds, strict=True)
        ]

    def time_one(self, sparsity: FFNSparsity) -> list[float]:
        """Returns the milliseconds of a step of one sparsity in each round."""
        steps = partial(self.steps, sparsity=sparsity)
        steps(1)  # compiles
        # Steps are taken by all processes together: they have to agree on how many.
        self.timed += 1
        seconds = self.exchange.gather(
            str(self.timed), str(steps(1)), timeout_seconds=600
        )
        one = float(seconds[0])
        steps(_within(WARM_SECONDS, one))
        count = _within(ROUND_SECONDS, one)
        return [1e3 * steps(count) / count for _ in range(ROUNDS)]


def _within(seconds: float, one: float) -> int:
    """Returns how many steps of `one` seconds take `seconds` together, at least 1 and
    at most 1,000."""
    return min(max(1, round(seconds / max(one, 1e-6))), 1000)
