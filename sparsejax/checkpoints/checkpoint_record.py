"""The record of a checkpoint: all that it holds but the arrays, as JSON.

It says the step, whether the checkpoint is permanent, the data state, the metadata, and
what the arrays are (`stored_state`).
"""

import json
from pathlib import Path
from typing import Any

from sparsejax.checkpoints import manifest
from sparsejax.checkpoints.stored_state import is_description

FORMAT_VERSION = 2
"""The number of the form in which checkpoints are stored; raised when older code cannot
read what newer code writes."""

RECORD = "record.json"
_RECORD_OF_FORMAT_1 = "record/metadata"


def checked_json(name: str, value: Any) -> Any:
    """Returns `value`. Raises ValueError, with the name `name`, where it is not
    JSON."""
    try:
        json.dumps(value)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{name} cannot be stored as JSON ({error}); arrays belong into the state, "
            f"other things have to be turned into numbers, text, lists and dicts"
        ) from error
    return value


def is_sealed(path: Path) -> bool:
    """Returns whether a checkpoint has its manifest, which is written last."""
    return (path / manifest.NAME).is_file()


def check_format(path: Path) -> None:
    """Raises ValueError where a checkpoint has a format that this version does not
    read.

    Several of its files state the format; a single one that differs from the others is
    a damaged file, and no other format.
    """
    files = (manifest.NAME, RECORD, _RECORD_OF_FORMAT_1)
    stated = {_stated_format(path / file) for file in files} - {None}
    if stated and FORMAT_VERSION not in stated:
        raise ValueError(
            f"format_version={stated.pop()} of {path} is unknown to this sparsejax, "
            f"which reads {FORMAT_VERSION}; use the version that wrote it"
        )


def read_record(path: Path) -> dict[str, Any]:
    """Returns the record of the checkpoint at `path`, everything but the arrays.

    Raises:
      ValueError: the checkpoint has an unknown format, or its record cannot be read or
        is no record.
    """
    check_format(path)
    try:
        if not is_sealed(path):
            raise ValueError(f"{manifest.NAME} is missing")
        record = json.loads((path / RECORD).read_bytes())
        if not _is_record(record):
            raise ValueError(f"{RECORD} does not hold what a save writes")
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(
            f"{path} is not a checkpoint of sparsejax, or is damaged: its record "
            f"cannot be read ({error}); remove the folder to use the one before"
        ) from error
    return record


def _is_record(record: Any) -> bool:
    """Returns whether a value has the form of the records that `Checkpoints.save`
    writes."""
    kinds = {"step": int, "permanent": bool, "state": dict, "metadata": dict}
    return (
        isinstance(record, dict)
        and {"format_version", "data_state"} <= record.keys()
        and all(type(record.get(name)) is kind for name, kind in kinds.items())
        and all(map(is_description, record["state"].values()))
    )


def _stated_format(file: Path) -> int | None:
    try:
        version = json.loads(file.read_bytes())["format_version"]
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
    return version if isinstance(version, int) else None
