"""Interleaved timing of callables against each other, so that drifts hit all alike."""

import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax

SECONDS = 0.06
"""Seconds of calls that `time_queued` times in a round."""

SETTLE_SECONDS = 0.08
"""Seconds of calls that `time_queued` makes before it times a callable."""

Span = tuple[float, float]
"""The start and the end of a measurement, in seconds of `time.perf_counter`."""


@dataclass(frozen=True, kw_only=True)
class Timing:
    """The times of one callable over all rounds, and its ratio to the baseline."""

    name: str
    time_ms: float
    """The median time of one call, in milliseconds."""
    time_ms_min: float
    time_ms_max: float
    ratio: float
    """The median over the rounds of its time over the baseline's in the same round."""
    ratio_min: float
    ratio_max: float
    rounds: int


def over_alone(timing: Timing, alone: Timing) -> dict[str, Any]:
    """Returns the fields of a benchmark's row that compare a timing with a baseline
    timed by itself, before: how many times as fast it is, by the medians, and by the
    worst and the best pair.

    This is for a dense baseline of sparse kernels: the first of them that a process
    launches makes the driver of a Hopper GPU keep the clock lower for all that follows
    (experiments/LOG.md, 2026-11-22).
    """
    return {
        "over_dense_alone": alone.time_ms / timing.time_ms,
        "spread_alone": [
            alone.time_ms_min / timing.time_ms_max,
            alone.time_ms_max / timing.time_ms_min,
        ],
    }


def time_interleaved(
    calls: Mapping[str, Callable[[], Any]],
    *,
    baseline: str,
    rounds: int,
    warmup: int = 1,
    seed: int = 0,
) -> list[Timing]:
    """Returns the times of every callable, in the order of `calls`.

    Each round runs all of them once, in a new random order; a ratio compares two
    times of one round. Each call is waited for (`jax.block_until_ready`): these are
    times of a host clock, launch included. The first `warmup` rounds, which compile,
    are not counted.

    Raises:
      ValueError: `baseline` is none of the calls, or there is no round to count.
    """
    _check(calls, baseline, rounds)
    order, shuffle = list(calls), random.Random(seed).shuffle
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(warmup + rounds):
        shuffle(order)
        for name in order:
            start = time.perf_counter()
            jax.block_until_ready(calls[name]())
            times[name].append(1e3 * (time.perf_counter() - start))
    measured = {name: with_warmup[warmup:] for name, with_warmup in times.items()}
    return _timings(measured, baseline)


def time_queued(
    calls: Mapping[str, Callable[[], Any]],
    *,
    baseline: str,
    rounds: int,
    seconds: float | None = None,
    settle_seconds: float | None = None,
    seed: int = 0,
) -> tuple[list[Timing], dict[str, list[Span]]]:
    """Returns the time per call of every callable where calls follow each other without
    a gap, as in a training step; and when each was timed.

    It works as `time_interleaved`, but a round runs every callable for `settle_seconds`
    without timing it (clock and power of a GPU follow what runs on it, and lag behind),
    then queues `seconds` worth of calls and waits for the last.

    Args:
      seconds, settle_seconds: None for `SECONDS` and `SETTLE_SECONDS`.
    """
    _check(calls, baseline, rounds)
    seconds = SECONDS if seconds is None else seconds
    settle_seconds = SETTLE_SECONDS if settle_seconds is None else settle_seconds
    counts = {name: _calls_in(call, seconds) for name, call in calls.items()}
    order, shuffle = list(calls), random.Random(seed).shuffle
    times: dict[str, list[float]] = {name: [] for name in calls}
    spans: dict[str, list[Span]] = {name: [] for name in calls}
    for _ in range(rounds):
        shuffle(order)
        for name in order:
            _queue(calls[name], max(1, int(counts[name] * settle_seconds / seconds)))
            start = time.perf_counter()
            _queue(calls[name], counts[name])
            end = time.perf_counter()
            times[name].append(1e3 * (end - start) / counts[name])
            spans[name].append((start, end))
    return _timings(times, baseline), spans


def _queue(call: Callable[[], Any], times: int) -> None:
    out = None
    for _ in range(times):
        out = call()
    jax.block_until_ready(out)


def _calls_in(call: Callable[[], Any], seconds: float) -> int:
    _queue(call, 3)
    start = time.perf_counter()
    _queue(call, 5)
    return max(3, int(5 * seconds / (time.perf_counter() - start)))


def _check(calls: Mapping[str, Any], baseline: str, rounds: int) -> None:
    if baseline not in calls:
        raise ValueError(f"baseline={baseline!r} is not one of {', '.join(calls)}")
    if rounds < 1:
        raise ValueError(f"rounds={rounds} leaves nothing to report; use at least 1")


def _timings(times: Mapping[str, list[float]], baseline: str) -> list[Timing]:
    timings = []
    for name, own in times.items():
        reference = times[baseline]
        ratios = [t / base for t, base in zip(own, reference, strict=True)]
        timings.append(
            Timing(
                name=name,
                time_ms=statistics.median(own),
                time_ms_min=min(own),
                time_ms_max=max(own),
                ratio=statistics.median(ratios),
                ratio_min=min(ratios),
                ratio_max=max(ratios),
                rounds=len(own),
            )
        )
    return timings
