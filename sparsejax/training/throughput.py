"""Training throughput, without compilation, evaluation and saving."""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

from sparsejax.config.schedule import Phase, model_of
from sparsejax.feed_forward.sparsity import FFNSparsity
from sparsejax.ops.backend import Decision
from sparsejax.reports import metrics
from sparsejax.training.run import Run


class Pace:
    """The speed of a run's steps, phase by phase."""

    def __init__(self, run: Run) -> None:
        self.config = run.config
        self.devices = run.mesh.size
        self.tokens_per_micro_batch = run.config.tokens_per_step // run.micro_batches
        self.mesh = run.config.mesh.resolve(self.devices)
        self.peak = metrics.dense_peak(self.config.model.dtype)
        self.router_seconds: dict[FFNSparsity, float] = {}
        self.tokens_per_second = math.inf
        """The last that was finite."""
        self.clock = Clock(0)
        self.compiled: set[FFNSparsity] = set()
        self._compiling_seconds = 0.0

    def start(self, step: int) -> None:
        """Times the steps after this one; the first of them is not part of a rate, for
        it compiles."""
        self.clock = Clock(step)
        self.compiled.clear()

    def compiling(self, sparsity: FFNSparsity) -> AbstractContextManager[None]:
        """Returns a context for the call of a step, in which the clock stands still
        where the step is the first of its sparsity: that one compiles."""
        is_new = sparsity not in self.compiled
        self.compiled.add(sparsity)
        return self._compiling() if is_new else nullcontext()

    @contextmanager
    def _compiling(self) -> Iterator[None]:
        begin = time.perf_counter()
        with self.clock.stopped():
            yield
        self._compiling_seconds += time.perf_counter() - begin

    def take_compiling_seconds(self) -> float:
        """Returns the seconds since it was last asked in which the run called a step
        for the first time in a phase, or timed a router: both mostly compile."""
        seconds, self._compiling_seconds = self._compiling_seconds, 0.0
        return seconds

    def of_steps(self, step: int, phase: Phase) -> dict[str, float]:
        """Returns the figures of speed that a record of this step has, none at the
        first. Where some steps of the phase have another sparsity, they are means over
        all of its steps."""
        rate = self.clock.tokens_per_second(step, self.config.tokens_per_step)
        if not math.isfinite(rate):
            return {}
        self.tokens_per_second = rate
        total: dict[str, float] = {}
        for share, sparsity in zip(phase.shares, phase.sparsities, strict=True):
            for name, value in self._speed(rate, sparsity, phase).items():
                total[name] = total.get(name, 0.0) + share * value
        return total | {"tokens_per_second": rate}

    def _speed(
        self, rate: float, sparsity: FFNSparsity, phase: Phase
    ) -> dict[str, float]:
        """Returns the figures of speed for the steps of a phase that have one
        sparsity."""
        length = self.config.data.sequence_length
        model = model_of(phase, self.config.model)
        decisions = self.decisions(sparsity)
        speed = metrics.speed(
            model, length, decisions, rate, self.peak, devices=self.devices
        )
        if sparsity.experts:
            router = self._router_seconds_per_token(sparsity, decisions)
            speed["router_share"] = router * rate
        return speed

    def minutes_of(self, steps: int) -> float:
        """Returns the minutes that so many steps would take at the speed of the last
        ones."""
        return steps * self.config.tokens_per_step / self.tokens_per_second / 60

    def decisions(self, sparsity: FFNSparsity) -> tuple[Decision, ...]:
        """Returns the decisions for the FFN's GEMMs of a micro-batch, on one device."""
        config = self.config
        return metrics.ffn_decisions(
            config.model,
            sparsity,
            self.tokens_per_micro_batch,
            config.backend,
            mesh=self.mesh,
        )

    def _router_seconds_per_token(
        self, sparsity: FFNSparsity, decisions: Sequence[Decision]
    ) -> float:
        """Returns the seconds per token that the routers of all layers take; they are
        timed once."""
        model = self.config.model
        if sparsity not in self.router_seconds:
            tokens = self.tokens_per_micro_batch
            own = tokens // self.mesh.token_shards
            with self._compiling():
                seconds = metrics.router_seconds(model, sparsity, own, decisions)
            self.router_seconds[sparsity] = model.layers * seconds / tokens
        return self.router_seconds[sparsity]


class Clock:
    """The tokens per second of the steps of one phase, without the time of anything
    else."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.start: float | None = None
        self._stopped_at: float | None = None

    def tokens_per_second(self, step: int, tokens_per_step: int) -> float:
        """Returns the tokens per second since the last call; NaN at the first one,
        because the first step compiles."""
        now = self._stopped_at
        if now is None:
            now = time.perf_counter()
        rate = math.nan
        if self.start is not None and step > self.step:
            rate = (step - self.step) * tokens_per_step / (now - self.start)
        self.start, self.step = now, step
        return rate

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Leaves the seconds of the block out; inside of another such block they are
        left out already."""
        if self._stopped_at is not None:
            yield
            return
        begin = self._stopped_at = time.perf_counter()
        try:
            yield
        finally:
            self._stopped_at = None
        if self.start is not None:
            self.start += time.perf_counter() - begin
