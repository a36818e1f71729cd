"""The tests that ran on a GPU, and whether the kernels have changed since.

`pytest -m gpu` appends a row to `experiments/results/gpu_tests.jsonl`: CI has no GPU,
and says at its end what the rows about the kernels at hand leave open. A run may be of
some files alone, as where a GPU is lent for minutes: a row names the files that it is
about, and the rows of one kind of GPU count together.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path

import jax
import pytest

ROOT = Path(__file__).parents[3]
RECORD = ROOT / "experiments" / "results" / "gpu_tests.jsonl"
MARK = "pytest.mark.gpu"


def kernel_hash(folder: Path = ROOT / "pallas_kernels") -> str:
    """Returns a hash over the source and the path of every kernel file in `folder`,
    subfolders included, whatever order the file system lists them in."""
    digest = hashlib.sha256()
    for source in sorted(folder.rglob("*.py")):
        name = source.relative_to(folder).as_posix()
        digest.update(name.encode() + b"\0" + source.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def files_with_gpu_tests(folder: Path = ROOT / "tests") -> list[str]:
    """Returns the paths of the test files that have GPU tests, from the root on."""
    return sorted(
        path.relative_to(folder.parent).as_posix()
        for path in folder.rglob("test_*.py")
        if MARK in path.read_text(encoding="utf-8")
    )


def is_of_whole_files(config: pytest.Config) -> bool:
    """Returns whether a run takes all GPU tests of the files that it takes any of."""
    names_tests = any("::" in given for given in config.args)
    stops_early = config.option.maxfail or config.option.keyword
    return not (names_tests or stops_early)


def append(passed: Iterable[str], failed: Iterable[str], record: Path = RECORD) -> dict:
    """Adds the row of a run on this machine's GPU; returns it.

    Args:
      passed: the file of every test that passed, named again by each of its tests.
      failed: the same of those that failed.
    """
    passed, failed = Counter(passed), Counter(failed)
    row = {
        "kernels": kernel_hash(),
        "passed": passed.total(),
        "failed": failed.total(),
        "files": {
            file: [passed[file], failed[file]] for file in sorted(passed | failed)
        },
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
    }
    with record.open("a") as file:
        file.write(json.dumps(row) + "\n")
    return row


def what_is_stale(
    record: Path = RECORD, needed: Iterable[str] | None = None
) -> str | None:
    """Returns what the record leaves open about the present kernels, on the kind of GPU
    that ran them last; None if they have passed all GPU tests there.

    Args:
      needed: the files that have to have run; None: all that have GPU tests.
    """
    lines = record.read_text().splitlines() if record.exists() else []
    rows = [json.loads(line) for line in lines]
    if not rows:
        return "the GPU tests have no recorded run: pytest -m gpu on a Hopper GPU"
    last = rows[-1]
    when = f"the recorded run of {last['date']} on {last['device']}"
    if last["kernels"] != kernel_hash():
        return f"the kernels have changed since {when}: pytest -m gpu on a Hopper GPU"
    counts: dict[str, list[int]] = {}
    for row in rows:
        if (row["kernels"], row["device"]) == (last["kernels"], last["device"]):
            counts |= row.get("files", {})
    if failed := sum(of_file[1] for of_file in counts.values()):
        return f"{failed} GPU tests failed in {when}"
    needed = files_with_gpu_tests() if needed is None else needed
    if missing := [file for file in needed if file not in counts]:
        return (
            f"these kernels have not run {len(missing)} of the files with GPU tests on "
            f"{last['device']}, such as {missing[0]}: pytest -m gpu there"
        )
    return None
