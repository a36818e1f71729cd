"""The tests that ran on a GPU, and whether the kernels have changed since.

`pytest -m gpu` appends a row to `experiments/results/gpu_tests.jsonl`: CI has no GPU,
and says at its end when that row is about other kernels than those at hand.
"""

import hashlib
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

import jax

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "experiments" / "results" / "gpu_tests.jsonl"


def kernel_hash(folder: Path = ROOT / "pallas_kernels") -> str:
    """Returns a hash over the source and the path of every kernel file in `folder`,
    subfolders included, whatever order the file system lists them in."""
    digest = hashlib.sha256()
    for source in sorted(folder.rglob("*.py")):
        name = source.relative_to(folder).as_posix()
        digest.update(name.encode() + b"\0" + source.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def append(counts: Mapping[str, int], record: Path = RECORD) -> dict:
    """Adds the row of a run on this machine's GPU; returns it."""
    row = {
        "kernels": kernel_hash(),
        **counts,
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
    }
    with record.open("a") as file:
        file.write(json.dumps(row) + "\n")
    return row


def what_is_stale(record: Path = RECORD) -> str | None:
    """Returns what is wrong with the last run on a GPU; None if these kernels passed
    it."""
    rows = record.read_text().splitlines() if record.exists() else []
    if not rows:
        return "the GPU tests have no recorded run: pytest -m gpu on a Hopper GPU"
    last = json.loads(rows[-1])
    when = f"the recorded run of {last['date']} on {last['device']}"
    if last["kernels"] != kernel_hash():
        return f"the kernels have changed since {when}: pytest -m gpu on a Hopper GPU"
    if last["failed"]:
        return f"{last['failed']} GPU tests failed in {when}"
    return None
