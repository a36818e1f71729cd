"""The records of a run in metrics.jsonl, one JSON object per line; and the run's
folder."""

import json
import math
import os
import statistics
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

Record = dict[str, Any]
"""A record of a run: it has "event" and "step", and "phase" and "kind" of the step's
phase."""


def append_record(path: Path, record: Record) -> None:
    """Appends a record to the file as one line."""
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")


def flush_to_disk(path: Path) -> None:
    """Waits until what was written to the file lies on the disk."""
    with path.open("a") as file:
        os.fsync(file.fileno())


def read_metrics(run_folder: Path) -> list[Record]:
    """Returns the records of metrics.jsonl."""
    lines = (run_folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def records_until(path: Path, step: int, kinds: Sequence[str]) -> str:
    """Returns the lines that are whole records of no later than `step`; all other lines
    are damaged, or come from a process that was killed.

    Args:
      path: the file, which may be absent.
      step: the last step whose records are returned.
      kinds: the kinds of the run's phases, in their order.
    """
    if not path.exists():
        return ""
    lines = path.read_text(errors="replace").splitlines()
    return "".join(f"{line}\n" for line in lines if _is_record(line, step, kinds))


def first_step(records: Sequence[Record]) -> int:
    """Returns the number of steps done before the run's first: 0, or of a branch those
    of its trunk."""
    return next((r["step"] for r in records if r["event"] == "start"), 0)


def training_seconds(
    records: Sequence[Record], tokens_per_step: int
) -> dict[int, float]:
    """Returns the seconds that the training steps took up to each step with a record,
    by step. The first entry is of the step that the run began at: 0 seconds, or of a
    branch what its trunk took.

    Validation, saving and compilation are left out, so that they do not depend on how
    often a run was resumed. A record without a rate, as the first of a phase and of a
    resume, takes the median of its phase, or else of the run; NaN where there is none.
    """
    steps = [r for r in records if r["event"] == "step"]
    rated = [r for r in steps if "tokens_per_second" in r]
    rates = [r["tokens_per_second"] for r in rated]
    before, total = first_step(records), _seconds_before(records)
    seconds = {before: total}
    for record in steps:
        phase = record["phase"]
        of_phase = [r["tokens_per_second"] for r in rated if r["phase"] == phase]
        typical = statistics.median(of_phase or rates or [math.nan])
        rate = record.get("tokens_per_second", typical)
        total += (record["step"] - before) * tokens_per_step / rate
        before = record["step"]
        seconds[before] = total
    return seconds


def _seconds_before(records: Sequence[Record]) -> float:
    """Returns the seconds that the trunk's steps took before a branch began, 0 of a run
    that is no branch; NaN where they are not known."""
    starts = (r["branch"] for r in records if r["event"] == "start" and "branch" in r)
    seconds = next((of["seconds"] for of in starts), 0.0)
    return math.nan if seconds is None else seconds


def wall_seconds(records: Sequence[Record], step: int) -> float | None:
    """Returns the wall-clock seconds that the run had taken when the checkpoint of
    `step` was begun, with all that is no training step; None where no record says so,
    as none did in earlier versions."""
    own = [r for r in records if r["event"] == "checkpoint" and r["step"] == step]
    return own[-1].get("wall_seconds") if own else None


def write_whole(path: Path, text: str) -> None:
    """Replaces the content of a file as a whole or not at all."""
    draft = path.with_suffix(".draft")
    draft.write_text(text)
    draft.replace(path)


def check_writable(folder: Path) -> None:
    """Checks that a run can write in `folder`, or make it, and leaves nothing behind.

    Raises:
      ValueError: names the folder, and why a run cannot write in it.
    """
    there = folder.absolute()
    while not os.path.lexists(there) and there != there.parent:
        there = there.parent
    try:
        with suppress(FileNotFoundError):
            folder.lstat()  # a name that is too long, a way through what is no folder
        with tempfile.TemporaryFile(dir=there) as probe:
            probe.write(b"probe")
            probe.flush()
            os.fsync(probe.fileno())  # where a file system over a network says no
    except OSError as error:
        how = "written in" if there == folder.absolute() else "made"
        raise ValueError(
            f"the run folder {folder} cannot be {how} ({there}: {error.strerror}); "
            f"choose another, or make this one writable"
        ) from error


def _is_record(line: str, step: int, kinds: Sequence[str]) -> bool:
    """Returns whether a line is a whole record of no later than `step`."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return False  # cut off by the end of the process
    forms = {"event": str, "step": int, "phase": int, "kind": str}
    if not isinstance(record, dict) or any(
        type(record.get(name)) is not form for name, form in forms.items()
    ):
        return False
    loss = "unigram_loss" if record["event"] == "start" else "loss"
    has_loss = record["event"] in ("start", "step", "validation")
    return (
        record["step"] <= step
        and (record["phase"], record["kind"]) in enumerate(kinds)
        and (not has_loss or type(record.get(loss)) is float)
    )
