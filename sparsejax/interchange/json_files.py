"""The JSON files of a Hugging Face folder."""

import json
from pathlib import Path
from typing import Any


def read_object(path: Path) -> dict[str, Any]:
    """Returns the object that a JSON file holds.

    Raises:
      ValueError: the file cannot be read, or holds no JSON object; names it.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read ({error}); mend it") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds {value!r:.80} and no JSON object; mend it")
    return value
