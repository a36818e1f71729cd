"""The record of a checkpoint: all that it holds but the arrays, as JSON.

Step, permanence, data state, metadata, and what the arrays are (`stored_state`).
"""

import json
from pathlib import Path
from typing import Any

from sparsejax.checkpoints import manifest
from sparsejax.checkpoints.stored_state import is_description

FORMAT_VERSION = 2
"""Of what a checkpoint holds and under which names; raised when older code cannot read
what newer code writes."""

RECORD = "record.json"
_RECORD_OF_FORMAT_1 = "record/metadata"


def checked_json(name: str, value: Any) -> Any:
    """Returns `value`; raises ValueError where it is not JSON, naming it as `name`."""
    try:
        json.dumps(value)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{name} cannot be stored as JSON ({error}); arrays belong into the state, "
            f"other things have to be turned into numbers, text, lists and dicts"
        ) from error
    return value


def is_sealed(path: Path) -> bool:
    """Returns whether the manifest of a checkpoint, which is written last, is there."""
    return (path / manifest.NAME).is_file()


def check_format(path: Path) -> None:
    """Raises ValueError where all that states the format of a checkpoint states another
    one.

    One that differs from the rest is a damaged file.
    """
    files = (manifest.NAME, RECORD, _RECORD_OF_FORMAT_1)
    stated = {_stated_format(path / file) for file in files} - {None}
    if stated and FORMAT_VERSION not in stated:
        raise ValueError(
            f"format_version={stated.pop()} of {path} is unknown to this sparsejax, "
            f"which reads {FORMAT_VERSION}; use the version that wrote it"
        )


def read_record(path: Path) -> dict[str, Any]:
    """Returns everything but the arrays of the checkpoint at `path`.

    Raises:
      ValueError: it is of an unknown format, or the record cannot be read or is none.
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
    """Returns whether it has the form of what `Checkpoints.save` writes."""
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
