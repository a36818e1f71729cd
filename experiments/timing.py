"""Times callables against each other: interleaved, so that drifts hit all alike."""

import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax


@dataclass(frozen=True, kw_only=True)
class Timing:
    """One callable's times over all rounds, and its ratio to the baseline."""

    name: str
    time_ms: float
    """Median."""
    time_ms_min: float
    time_ms_max: float
    ratio: float
    """Median over the rounds of time / baseline's time in the same round."""
    ratio_min: float
    ratio_max: float
    rounds: int


def time_interleaved(
    calls: Mapping[str, Callable[[], Any]],
    *,
    baseline: str,
    rounds: int,
    warmup: int = 1,
    seed: int = 0,
) -> list[Timing]:
    """The times of every callable, in the order of `calls`.

    Each round runs all of them once, in a new random order; a ratio compares two
    times of one round. Each call is waited for (`jax.block_until_ready`): these are
    times of a host clock, launch included. The first `warmup` rounds, which compile,
    are not counted.

    Raises:
      ValueError: `baseline` is none of the calls, or there is no round to count.
    """
    if baseline not in calls:
        raise ValueError(f"baseline={baseline!r} is not one of {', '.join(calls)}")
    if rounds < 1:
        raise ValueError(f"rounds={rounds} leaves nothing to report; use at least 1")
    order, shuffle = list(calls), random.Random(seed).shuffle
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(warmup + rounds):
        shuffle(order)
        for name in order:
            start = time.perf_counter()
            jax.block_until_ready(calls[name]())
            times[name].append(1e3 * (time.perf_counter() - start))
    timings = []
    for name, with_warmup in times.items():
        own, reference = with_warmup[warmup:], times[baseline][warmup:]
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
                rounds=rounds,
            )
        )
    return timings
