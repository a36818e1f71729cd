"""The cache of a user's own tuning results: a file per GEMM, in a cache folder.

    CACHE/tuned/<gpu>/driver-<version>_jax-<version>_kernels-<hash>/<gemm>.json

What the times depend on is part of the path, so that what is stale is not found. CACHE
is $SPARSEJAX_CACHE, or sparsejax/ in $XDG_CACHE_HOME or in ~/.cache. A file is whole or
not there, and processes may write at once: each GEMM has a file of its own.
"""

import contextlib
import hashlib
import importlib
import os
import re
import tempfile
from functools import lru_cache
from pathlib import Path

import jax
from jax.extend.backend import get_backend

VARIABLE = "SPARSEJAX_CACHE"
"""The environment variable that names the cache folder."""

NO_KERNELS = (
    "__init__.py",
    "device.py",
    "tuned_gemm.py",
    "tuning.py",
    "tuning_cache.py",
)
"""The names of this package's files that no measured time depends on."""


def root() -> Path:
    """Returns the folder CACHE.

    Raises:
      RuntimeError: no variable is set, and the user has no home.
    """
    if named := os.environ.get(VARIABLE):
        return Path(named)
    if caches := os.environ.get("XDG_CACHE_HOME"):
        return Path(caches) / "sparsejax"
    return Path.home() / ".cache" / "sparsejax"


def folder(kind: str) -> Path:
    """Returns the folder of the files of a kind of GPU, measured with the installed
    versions; it need not exist. Raises as `root`."""
    versions = f"driver-{driver_version()}_jax-{jax.__version__}"
    key = f"{versions}_kernels-{kernel_hash()}"
    return root() / "tuned" / _as_name(kind.lower()) / _as_name(key)


@lru_cache
def driver_version() -> str:
    """Returns the version of the GPU's driver: from NVML, where Python has it, else
    from JAX's backend, else "unknown"."""
    try:
        # Not one of our dependencies.
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
        version = nvml.nvmlSystemGetDriverVersion()
        nvml.nvmlShutdown()
    except Exception:  # of a library that need not be there, or find a GPU
        version = get_backend().platform_version
    if isinstance(version, bytes):  # as older ones have it
        version = version.decode(errors="replace")
    return " ".join(version.split()) or "unknown"


@lru_cache
def kernel_hash(package: Path = Path(__file__).parent) -> str:
    """Returns a hash over the path and the source of every kernel file in `package`,
    subfolders included, whatever order the file system lists them in."""
    digest = hashlib.sha256()
    for source in sorted(package.rglob("*.py")):
        if source.name not in NO_KERNELS:
            name = source.relative_to(package).as_posix()
            digest.update(name.encode() + b"\0" + source.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def files(kind: str) -> list[Path]:
    """Returns the files that were kept for a kind of GPU, in the order of their names;
    none where the folder cannot be read."""
    try:
        return sorted(folder(kind).glob("*.json"))
    except (OSError, RuntimeError):
        return []


def write(kind: str, name: str, text: str) -> None:
    """Writes `text` under `name`, in place of what was there, all of it or nothing.

    Raises:
      OSError, RuntimeError: the folder cannot be made or written; says which.
    """
    place = folder(kind)
    place.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=place, prefix=name, suffix=".part")
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
        os.replace(temporary, place / f"{name}.json")
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _as_name(text: str) -> str:
    """Returns a text as the name of a folder, made of letters, digits, dots,
    underscores and hyphens."""
    return re.sub(r"[^\w.-]+", "-", text)[:128]
