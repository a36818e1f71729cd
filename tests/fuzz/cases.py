"""A case of the fuzz test: a family and a seed, and nothing else decides it."""

import os
import shutil
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.random import Generator

from tests.fuzz import checkpoints, command_lines, configs, corpora, runs, shards
from tests.fuzz.judge import (
    LIMIT_SECONDS,
    TimedOut,
    Wrong,
    clear_error,
    time_limit,
)


class Family(NamedTuple):
    """Cases of one kind of input."""

    case: Callable[[Generator, Path, Any], str]
    """Runs a case in an empty folder; how it ended, where that is right."""
    prepare: Callable[[Path], Any] = lambda folder: None
    """The function that makes what all cases share, once."""
    weight: float = 0.0
    """The weight of the family in a long run."""


FAMILIES = {
    "configs": Family(configs.case, weight=0.478),
    "command_lines": Family(command_lines.case, weight=0.1),
    "corpora": Family(corpora.case, corpora.prepare, weight=0.18),
    "shards": Family(shards.case, weight=0.14),
    "checkpoints": Family(checkpoints.case, checkpoints.prepare, weight=0.1),
    "runs": Family(runs.case, runs.prepare, weight=0.002),
}


class Fuzzer:
    """Runs cases in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.material = lru_cache(maxsize=None)(self._material)

    def run(self, family: str, seeds: Iterable[int]) -> Counter[str]:
        """Returns the number of cases for each way in which one ended.

        Raises:
          Wrong: the first case that ends in neither a right result nor a clear error.
        """
        return Counter(self.run_one(family, seed) for seed in seeds)

    def run_one(self, family: str, seed: int) -> str:
        """Returns how a case ended: the name of a right result, or who raised a clear
        error."""
        material = self.material(family)
        generator = np.random.default_rng([zlib.crc32(family.encode()), seed])
        folder = Path(tempfile.mkdtemp(dir=self._folder, prefix=f"{family}-{seed}-"))
        try:
            return self._judge(family, generator, folder, material)
        except Exception as wrong:
            raise Wrong(
                f"{family} {seed}: {wrong or repr(wrong)}\n"
                f"uv run python -m tests.fuzz --family {family} --seed {seed} --cases 1"
            ) from wrong
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _judge(
        self, family: str, generator: Generator, folder: Path, material: Any
    ) -> str:
        here = os.getcwd()
        os.chdir(folder)  # What a case writes to a relative path goes with it.
        try:
            with time_limit(LIMIT_SECONDS):
                return FAMILIES[family].case(generator, folder, material)
        except TimedOut as hang:
            raise Wrong(str(hang)) from hang
        except Exception as error:
            return clear_error(error)
        finally:
            os.chdir(here)

    def _material(self, family: str) -> Any:
        folder = self._folder / f"material-{family}"
        folder.mkdir()
        return FAMILIES[family].prepare(folder)


def shares(cases: int) -> dict[str, int]:
    """Returns the number of cases that each family gets of so many, by weight."""
    counts = {name: int(cases * family.weight) for name, family in FAMILIES.items()}
    counts["configs"] += cases - sum(counts.values())
    return counts


def run_chunk(
    scratch: Path, family: str, start: int, count: int
) -> tuple[str, Counter[str], list[str], float]:
    """Outcomes, failures and seconds of consecutive seeds."""
    fuzzer = _fuzzer(scratch)
    fuzzer.material(family)
    begin = time.perf_counter()
    ended: Counter[str] = Counter()
    failures = []
    for seed in range(start, start + count):
        try:
            ended[fuzzer.run_one(family, seed)] += 1
        except Wrong as wrong:
            failures.append(str(wrong))
    return family, ended, failures, time.perf_counter() - begin


@cache
def _fuzzer(scratch: Path) -> Fuzzer:
    """One for each process."""
    return Fuzzer(Path(tempfile.mkdtemp(dir=scratch)))
