"""The live view of a run on a terminal: where it is, how fast, and when it ends.

Everything is from the records of the run: a phase's speed is the median of its own
records, or follows from the steps that were timed before the run.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from threading import Lock
from typing import Any

import jax
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from pallas_kernels.device import dense_peak_tflops
from sparsejax.config import TrainConfig
from sparsejax.config.schedule import model_of, phase_at, phases, with_dense
from sparsejax.cost_model import flops_per_token


class Standing:
    """Where a run stands, from the records that it has made so far."""

    def __init__(self, config: TrainConfig, *, peak_is_known: bool) -> None:
        """
        Args:
          config: the settings of the run.
          peak_is_known: whether the data sheet of the device says its peak. The
            utilisation is left out where it does not.
        """
        self.config = config
        self.peak_is_known = peak_is_known
        self.phases = phases(config)
        self.step = 0
        self.last: dict[str, Any] = {}
        """The last record of a step."""
        self.rates: dict[int, list[float]] = {}
        """Tokens per second by the number of the phase."""
        self.timed: dict[int, float] = {}
        """How many times as fast as dense ones the steps of a phase were before the
        run."""

    def see(self, record: dict[str, Any]) -> None:
        """Takes a record of `sparsejax.training.train`."""
        self.phases = with_dense(self.phases, record.get("run_dense", ()))
        self.step = record["step"]
        if record["event"] == "step_times":
            for of in record["sparse"]:
                self.timed[of["phase"]] = of["dense_ms"] / of["step_ms"]
        if record["event"] == "step":
            self.last = record
            rate = record.get("tokens_per_second", math.nan)
            if math.isfinite(rate):
                self.rates.setdefault(record["phase"], []).append(rate)

    @property
    def phase(self) -> int:
        """The number of the phase that the next step belongs to."""
        return phase_at(self.phases, self.step)

    def speedup(self, phase: int) -> float | None:
        """Returns how many times as fast as the dense steps of the whole model those of
        a phase are: by the run's own records where there are both, else as timed before
        the run. None where neither is known, and for a phase that is dense itself."""
        if self.phases[phase].is_dense:
            return None
        dense = self._dense_rate()
        if phase in self.rates and dense is not None:
            return statistics.median(self.rates[phase]) / dense
        return self.timed.get(phase)

    def seconds_left(self, step: int | None = None) -> float | None:
        """Returns the seconds until a step is done, None for the last of the run, each
        phase at its own speed; None before any speed is known."""
        until = self.config.steps if step is None else step
        seconds, first = 0.0, 0
        for number, end in enumerate(accumulate(of.steps for of in self.phases)):
            steps = min(end, until) - max(first, self.step)
            first = end
            if steps <= 0:
                continue
            rate = self._rate(number)
            if rate is None:
                return None
            seconds += steps * self.config.tokens_per_step / rate
        return seconds

    def _rate(self, phase: int) -> float | None:
        """Returns the tokens per second of a phase, measured or expected: from the
        speed of the dense steps or, where there were none, of the phase before them."""
        if phase in self.rates:
            return statistics.median(self.rates[phase])
        dense = self._dense_rate()
        if dense is None:
            known = next(iter(reversed(self.rates)), None)
            if known is None:
                return None
            dense = statistics.median(self.rates[known]) / self._expected(known)
        return dense * self._expected(phase)

    def _expected(self, phase: int) -> float:
        """Returns how many times as fast as dense steps of the whole model those of a
        phase should be: by FLOPs where its model is smaller, as timed, or as a phase of
        the same sparsity was; 1 where nothing is known."""
        of = self.phases[phase]
        length = self.config.data.sequence_length
        whole, own = (
            flops_per_token(model, length).total()
            for model in (self.config.model, model_of(of, self.config.model))
        )
        alike = [n for n in self.rates if self.phases[n].sparsity == of.sparsity]
        for number in (phase, *alike):
            found = self.speedup(number) or self.timed.get(number)
            if not of.is_dense and found is not None:
                return found
        return whole / own

    def _dense_rate(self) -> float | None:
        """Returns the tokens per second of the fastest phase with dense steps of the
        whole model: those after sparse ones may be slower."""
        medians = [
            statistics.median(rates)
            for number, rates in self.rates.items()
            if self.phases[number].is_dense
            and model_of(self.phases[number], self.config.model) == self.config.model
        ]
        return max(medians, default=None)

    def rendered(self, elapsed: float) -> RenderableType:
        """Returns the view: a bar, then what is known, in two lines.

        Args:
          elapsed: the seconds since the view began.
        """
        steps, last = self.config.steps, self.last
        kind = self.phases[self.phase].kind
        bar = Table.grid(padding=(0, 1), expand=True)
        bar.add_column(no_wrap=True)
        bar.add_column(ratio=1)
        bar.add_column(no_wrap=True, justify="right")
        place = f"step {self.step:,} of {steps:,}"
        bar.add_row(kind, ProgressBar(total=steps, completed=self.step), place)
        parts = [f"loss {last['loss']:.3f}"] if last else ["loss -"]
        if "tokens_per_second" in last:
            parts.append(f"{last['tokens_per_second']:,.0f} tokens/s")
        if self.peak_is_known and "mfu_executed" in last:
            parts.append(f"MFU {last['mfu_executed']:.1%}")
        if (speedup := self.speedup(self.phase)) is not None:
            parts.append(f"{speedup:.2f}x dense")
        left = self.seconds_left()
        times = [f"{_clock(elapsed)} gone", f"{_clock(left)} left"]
        if self.phase + 1 < len(self.phases):
            ends = list(accumulate(of.steps for of in self.phases))
            at, to = ends[self.phase], self.phases[self.phase + 1].kind
            times.append(f"{to} from step {at:,}, in {_clock(self.seconds_left(at))}")
        return Group(bar, Text("  ".join(parts)), Text("  ".join(times)))


@contextmanager
def view(
    config: TrainConfig, console: Console
) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Shows the live view at the bottom of the console inside the block; the function
    that it yields takes the records of the run."""
    kind, dtype = jax.devices()[0].device_kind, config.model.dtype
    is_known = dense_peak_tflops(kind, dtype) is not None
    standing = Standing(config, peak_is_known=is_known)
    begin, alone = time.monotonic(), Lock()

    # The view is drawn in a thread of its own.
    def show() -> RenderableType:
        with alone:
            return standing.rendered(time.monotonic() - begin)

    def see(record: dict[str, Any]) -> None:
        with alone:
            standing.see(record)

    with Live(get_renderable=show, console=console, refresh_per_second=4):
        yield see


def _clock(seconds: float | None) -> str:
    """Returns a duration as hours, minutes and seconds."""
    if seconds is None:
        return "-:--:--"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"
