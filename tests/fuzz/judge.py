"""The ways in which a case may end: a right result or a clear error, and that in time.

An error is clear when it is of a kind that says whose fault it is, when our code raised
it on purpose and not something below it, and when its message names something of the
case: a setting, a path, a flag, or `name=value`.
"""

import re
import signal
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import FrameType

from sparsejax.checkpoints.agreement import CheckpointFailed
from sparsejax.config import TrainConfig
from sparsejax.training.progress import NonFiniteLoss

LIMIT_SECONDS = 20
"""The seconds after which a case counts as hanging."""

_ROOT = Path(__file__).resolve().parents[2]
_OURS = tuple(f"{_ROOT / name}/" for name in ("sparsejax", "experiments"))
_CLEAR = (
    ValueError,
    OSError,
    ImportError,
    NotImplementedError,
    CheckpointFailed,
    NonFiniteLoss,
)


class Wrong(AssertionError):
    """A case ended in neither: the defect that fuzzing looks for."""


class TimedOut(BaseException):
    """No `Exception`: nothing that catches those may keep a case that hangs."""


def setting_names(settings: type = TrainConfig) -> Iterator[str]:
    """The names of all settings, without their sections."""
    for field in fields(settings):
        if is_dataclass(field.type):
            yield from setting_names(field.type)
        yield field.name


_NAMED = re.compile(rf"[=/]|--\w|\b({'|'.join(setting_names())})\b")


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises TimedOut in what runs longer, and again while it does not end."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise TimedOut(f"not done after {seconds} seconds")

    previous = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


@contextmanager
def judging() -> Iterator[None]:
    """For the comparison with the right result: any error in it is a wrong result."""
    try:
        yield
    except Wrong:
        raise
    except Exception as error:
        raise Wrong(f"not comparable with the right result: {error!r}") from error


def require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise Wrong(otherwise)


def clear_error(error: BaseException) -> str:
    """Who raised a clear error; raises Wrong for any other."""
    if isinstance(error, Wrong):
        raise error
    message = str(error)
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if frame.filename.startswith(_OURS)]
    if not ours:
        raise error  # Of the case itself.
    # The system's own errors name their path, and may come from below us.
    by_system = isinstance(error, OSError) and error.filename is not None
    if type(error) not in _CLEAR and not by_system:
        raise Wrong(f"a bare {type(error).__name__}: {message[:500]}") from error
    if not by_system and frames[-1] is not ours[-1]:
        raise Wrong(f"not raised by us: {error!r:.500}") from error
    if len(message) < 15:
        raise Wrong(f"says next to nothing: {error!r}") from error
    if not _NAMED.search(message):
        raise Wrong(f"names nothing of the case: {message[:500]}") from error
    return f"{type(error).__name__} of {Path(ours[-1].filename).stem}.{ours[-1].name}"
