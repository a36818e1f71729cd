"""The files that hold a corpus: which they are, their order, and which are held out.

None of the answers depends on where the files lie: a corpus moved to another folder or
machine is the same corpus.
"""

import glob
import hashlib
import os
import re
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

# Installed packages differ from machine to machine; the test suite is long tables of
# literals; pydoc_data is generated prose in one file, which the hash holds out, where
# it would be more than half of the held-out tokens and unlike anything trained on.
_NOT_SOURCE = frozenset(
    {
        "site-packages",
        "dist-packages",
        "__pycache__",
        "test",
        "tests",
        "idle_test",
        "pydoc_data",
    }
)
_SHARD_ENDINGS = (".bin", ".npy")


@dataclass(frozen=True, kw_only=True)
class Files:
    """Files in the order of their names."""

    paths: tuple[Path, ...]
    names: tuple[str, ...]
    """The paths relative to the folder, or to the fixed part of the glob."""
    origin: str
    """The place of the files, in a few words."""


def text_files(text: str | None) -> Files:
    """Returns the files of a glob; None stands for the Python standard library's
    source.

    A file that has several names by links is returned once, under the first of them.

    Raises:
      ValueError: no file matches, or the folders of a "**" have no end.
    """
    if text is None:
        root = Path(sysconfig.get_path("stdlib"))
        version = ".".join(map(str, sys.version_info[:3]))
        origin = f"the standard library of Python {version}"
        return _in_order(_standard_library_files(root), root, origin)
    pattern = os.path.expanduser(text)
    root = _fixed_part(pattern)
    paths = [path for path in _matches(pattern) if path.is_file()]
    if not paths:
        if Path(pattern).is_dir():
            raise ValueError(
                f"text={text!r} is a folder; give a glob of the files in it, such as "
                f"{str(Path(text) / '**' / '*.txt')!r}"
            )
        raise ValueError(
            f"text={text!r}: no file matches in {root}; give a glob of text files "
            f"('**' for any depth), or None for the standard library"
        )
    return _once(_in_order(paths, root, text))


def shard_files(shards: str) -> Files:
    """Returns the .bin and .npy files of a folder (not of its subfolders), or those of
    a glob.

    Raises:
      ValueError: there is no such folder or file, nothing matches, the glob matches a
        file that ends otherwise, two are the same file, or the folders of a "**" have
        no end.
    """
    pattern = os.path.expanduser(shards)
    if os.path.isdir(pattern):
        root = Path(pattern)
        paths = [root / name for name in _list(root) if _is_shard(name)]
    else:
        root = _fixed_part(pattern)
        # "**" matches the folders on the way as well.
        paths = [p for p in _matches(pattern) if _is_shard(p.name) or not p.is_dir()]
    if not paths:
        missing = "has no such file"
        if not glob.has_magic(pattern) and not os.path.lexists(pattern):
            missing = "does not exist"
        raise ValueError(
            f"shards={shards!r} {missing}; give a folder with .bin or .npy files of "
            f"tokens, or a glob of them"
        )
    for path in paths:
        if not _is_shard(path.name):
            raise ValueError(
                f"shards={shards!r} matches {path}, which is neither .bin nor .npy; "
                f"narrow the glob, or give the folder: there, other files are ignored"
            )
    files = _in_order(paths, root, shards)
    if double := set(files.paths) - set(_once(files).paths):
        raise ValueError(
            f"{min(double)} is the same file as another one of shards={shards!r}, "
            f"by a link; leave one of them out, for a name says which side it is on"
        )
    return files


def named_side(name: str) -> Literal["held out", "left out"] | None:
    """Returns the side that a name states: a file with "val", "valid" or "validation"
    as a word of its path is held out, one with "test" is left out altogether. None: the
    name says nothing."""
    words = set(re.findall(r"[^\W\d_]+", os.path.splitext(name)[0].lower()))
    if "test" in words:
        return "left out"
    return "held out" if words & {"val", "valid", "validation"} else None


def hold_out(names: Sequence[str], share: float) -> list[bool]:
    """Returns for each name whether it is held out, which it is where its hash lies in
    the lowest `share` of all hashes.

    The side of a name does not depend on the others, except that, of two names or more,
    each side gets at least one.
    """
    # As the file system has them: a name need not be valid UTF-8.
    encoded = [name.encode(errors="surrogateescape") for name in names]
    digests = [hashlib.sha256(name).digest() for name in encoded]
    scores = [int.from_bytes(digest[:8]) / 2**64 for digest in digests]
    chosen = [score < share for score in scores]
    if not any(chosen):
        chosen[scores.index(min(scores))] = True
    if all(chosen):
        chosen[scores.index(max(scores))] = False
    return chosen


def hold_out_packages(names: Sequence[str], share: float) -> list[bool]:
    """Returns for each name whether it is held out, by whole packages: names whose
    first folder is the same are on one side, and a name without a folder is a package
    by itself.

    Raises:
      ValueError: all names are of one package.
    """
    packages = [name.partition("/")[0] for name in names]
    different = list(dict.fromkeys(packages))
    if len(different) < 2:
        raise ValueError(
            f"split_by='package' holds out whole packages, and all {len(names)} files "
            f"lie in {different[0]!r}; give a glob whose fixed part ends above several "
            f"packages, or split by file"
        )
    chosen = dict(zip(different, hold_out(different, share), strict=True))
    return [chosen[package] for package in packages]


def _in_order(paths: Iterable[Path], root: Path, origin: str) -> Files:
    # By the relative path, as strings: the order must not depend on the machine.
    named = sorted((path.relative_to(root).as_posix(), path) for path in set(paths))
    names, ordered = zip(*named, strict=True)
    return Files(paths=ordered, names=names, origin=origin)


def _once(files: Files) -> Files:
    """Returns the files, each under the first of its names: the same tokens must not be
    both trained on and held out."""
    once: dict[str, tuple[Path, str]] = {}
    for path, name in zip(files.paths, files.names, strict=True):
        once.setdefault(os.path.realpath(path), (path, name))
    paths, names = zip(*once.values(), strict=True)
    return Files(paths=paths, names=names, origin=files.origin)


def _matches(pattern: str) -> list[Path]:
    """Returns the paths that a glob matches, folders included."""
    if "**" in Path(pattern).parts:
        _refuse_loops(_fixed_part(pattern))
    return [Path(match) for match in glob.glob(pattern, recursive=True)]


def _refuse_loops(root: Path) -> None:
    """Raises ValueError where a link below `root` leads back to a folder that it lies
    in: "**" would follow it again and again."""
    for folder, subfolders, _ in os.walk(root, followlinks=True):
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        for link in (Path(folder, name) for name in subfolders):
            if not link.is_symlink():
                continue
            target = link.resolve()
            if any(above.resolve().is_relative_to(target) for above in link.parents):
                raise ValueError(
                    f"{link} is a link to {target}, which it lies in, so '**' has "
                    f"no end there; remove the link, or give a glob without '**'"
                )


def _standard_library_files(root: Path) -> Iterator[Path]:
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [s for s in subfolders if s not in _NOT_SOURCE]
        yield from (Path(folder, file) for file in files if file.endswith(".py"))


def _list(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError as error:
        raise ValueError(
            f"{folder} cannot be read ({error.strerror}); change its permissions"
        ) from error


def _is_shard(name: str) -> bool:
    # A hidden file is what some systems put beside the real one.
    return name.endswith(_SHARD_ENDINGS) and not name.startswith(".")


def _fixed_part(pattern: str) -> Path:
    """Returns the folder in front of the first wildcard of a glob."""
    fixed: list[str] = []
    for part in Path(pattern).parts[:-1]:
        if glob.has_magic(part):
            break
        fixed.append(part)
    return Path(*fixed)
