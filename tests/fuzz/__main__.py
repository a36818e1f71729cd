"""Runs fuzz cases and reports how they ended.

    uv run python -m tests.fuzz --cases 50000 --seed 0 --processes 2

Repeats one that failed:

    uv run python -m tests.fuzz --family shards --seed 123 --cases 1
"""

import multiprocessing
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import tyro

from tests.fuzz.cases import FAMILIES, run_chunk, shares

_CHUNK = 50


@dataclass(frozen=True, kw_only=True)
class Options:
    """The number of cases, and which they are."""

    cases: int = 2000
    seed: int = 0
    """The seed of the first case of each family; the others count on."""
    family: str | None = None
    """The family that cases are drawn from; None: all, by their weights."""
    processes: int = 1


def main(options: Options) -> int:
    """The exit status: 1 where a case failed."""
    counts = shares(options.cases)
    if options.family is not None:
        if options.family not in FAMILIES:
            raise SystemExit(f"family={options.family!r}: one of {', '.join(FAMILIES)}")
        counts = {options.family: options.cases}
    begin = time.perf_counter()
    outcomes: dict[str, Counter[str]] = defaultdict(Counter)
    seconds: Counter[str] = Counter()
    failures: list[str] = []
    with tempfile.TemporaryDirectory(prefix="fuzz-") as scratch:
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(options.processes, context) as pool:
            work = [
                pool.submit(run_chunk, Path(scratch), family, start, count)
                for family, start, count in _chunks(counts, options.seed)
            ]
            for done in as_completed(work):
                family, ended, wrong, took = done.result()
                outcomes[family] += ended
                seconds[family] += took
                failures += wrong
                for failure in wrong:
                    print(f"FAILED {failure}\n", flush=True)
    for family, ended in sorted(outcomes.items()):
        print(f"{family}: {ended.total()} cases, {seconds[family]:.0f} s")
        for outcome, count in ended.most_common():
            print(f"  {count:6d}  {outcome}")
    total = sum(ended.total() for ended in outcomes.values())
    took = time.perf_counter() - begin
    print(f"{total + len(failures)} cases, {len(failures)} failed, {took:.0f} s")
    return 1 if failures else 0


def _chunks(counts: dict[str, int], seed: int) -> Iterator[tuple[str, int, int]]:
    for family, count in counts.items():
        for start in range(0, count, _CHUNK):
            yield family, seed + start, min(_CHUNK, count - start)


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options, description=__doc__)))
