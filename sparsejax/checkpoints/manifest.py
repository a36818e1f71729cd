"""The manifest of a folder: which files it holds, and their content to the last bit."""

import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from errno import EIO
from pathlib import Path
from typing import Any

NAME = "manifest.json"

THREADS = 4
"""The number of files that are read at the same time."""


def write(folder: Path, format_version: int) -> None:
    """Forces all files of the folder onto the disk, then writes a manifest of them.

    The manifest holds `format_version` and the size in bytes and SHA-256 of every file.

    Raises:
      OSError: a file cannot be read, or nothing can be written.
    """
    found = sorted(folder.rglob("*"))
    files = [path for path in found if not path.is_dir()]
    with ThreadPoolExecutor(THREADS) as pool:
        described = list(pool.map(_flush_and_describe, files))
    names = [path.relative_to(folder).as_posix() for path in files]
    content = _render(format_version, dict(zip(names, described, strict=True)))
    with (folder / NAME).open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    for path in found:
        if path.is_dir():
            flush(path)
    flush(folder)


def flush(path: Path) -> None:
    """Forces a file, or the names in a folder, onto the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def find_damage(folder: Path) -> str | None:
    """Returns how the folder differs from its manifest, naming a file; None where it
    does not differ.

    Files that the manifest does not name are ignored.

    Raises:
      OSError: a file cannot be read for a reason that says nothing about its content,
        like a missing permission.
    """
    try:
        files = _parse((folder / NAME).read_bytes())
    except OSError as error:
        return _damage(NAME, error)
    if files is None:
        return f"{NAME} does not fit its own checksum"
    with ThreadPoolExecutor(THREADS) as pool:
        found = pool.map(lambda name: _difference(folder, name, files[name]), files)
        return next((damage for damage in found if damage), None)


def _parse(content: bytes) -> dict[str, Any] | None:
    """Returns the files that a manifest names; None where it is not what `_render`
    wrote."""
    try:
        manifest = json.loads(content)
        version, files = manifest["format_version"], manifest["files"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    # Any changed byte shows, whether it changes what was parsed or not.
    return files if content == _render(version, files) else None


def _render(format_version: int, files: dict[str, Any]) -> bytes:
    """Returns the text of a manifest, which holds the checksum of its own entries."""
    entries = {"format_version": format_version, "files": files}
    checksum = hashlib.sha256(json.dumps(entries, sort_keys=True).encode()).hexdigest()
    text = json.dumps({**entries, "sha256": checksum}, indent=1, sort_keys=True)
    return text.encode() + b"\n"


def _flush_and_describe(path: Path) -> dict[str, Any]:
    flush(path)
    return _describe(path)


def _describe(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"size": file.tell(), "sha256": digest}


def _difference(folder: Path, name: str, expected: dict[str, Any]) -> str | None:
    try:
        size = (folder / name).stat().st_size
        if size != expected["size"]:
            return f"{name} has {size} bytes instead of {expected['size']}"
        found = _describe(folder / name)
    except OSError as error:
        return _damage(name, error)
    return None if found == expected else f"{name} does not fit its checksum"


def _damage(name: str, error: OSError) -> str:
    """Returns what an error in reading says about the file, or raises the error where
    it says nothing."""
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return f"{name} is missing"
    if isinstance(error, IsADirectoryError):
        return f"{name} is a folder"
    if error.errno == EIO:
        return f"{name} cannot be read from the disk"
    raise error
