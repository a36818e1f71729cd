"""The rows of a benchmark, in a file of JSON lines."""

import json
from collections.abc import Iterable
from pathlib import Path


def append_rows(rows: Iterable[dict], results: Path | None) -> None:
    """Appends a line per row to `results`, whose folder is made; None: nothing is
    written.

    Raises:
      OSError: the file cannot be written; names it.
    """
    if results is None:
        return
    results.parent.mkdir(parents=True, exist_ok=True)
    with results.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
