"""Files of a text, and the two sides of the corpus that is made of files."""

from pathlib import Path

import numpy as np


def write_files(folder: Path, texts: dict[str, bytes]) -> None:
    """Writes each text under its name in `folder`."""
    for name, text in texts.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text)


def only(parts: tuple[np.ndarray, ...]) -> np.ndarray:
    """Returns the one part that a side of a corpus has."""
    (part,) = parts
    return part


def side(parts: tuple[np.ndarray, ...]) -> list[list[int]]:
    """Returns the tokens of a side, a list for each of its parts."""
    return [part.tolist() for part in parts]
