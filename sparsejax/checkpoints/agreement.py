"""The agreement of a run's processes about checkpoints, and how a save fails."""

import itertools
import json
import os
from collections.abc import Callable
from errno import EACCES, EDQUOT, EFBIG, EIO, ENOSPC, EROFS
from typing import Any

import jax

from sparsejax.distributed.processes import Exchange

TIMEOUT_SECONDS = 1200
"""The seconds that the processes of a run wait for one another in a save or a restore.
A dead process is noticed much sooner, by its heartbeat; this is for one that hangs, and
longer than an honest write: the 90 GB of a 7 B model take 900 s at 100 MB/s."""


class CheckpointFailed(OSError):
    """A checkpoint could not be written. All earlier ones are as they were."""


class OtherProcessFailed(Exception):
    """Another process reports that its part of a save failed, or did not report in
    time."""


class Agreement:
    """Decisions and reports about checkpoints that all processes of a run share.

    All processes make this object with the same name and call every method at the same
    points.
    """

    def __init__(self, name: str) -> None:
        self._decisions = Exchange(f"{name}/decisions")
        self._decided = itertools.count()
        self._reports = Exchange(f"{name}/saves")
        self._reported = itertools.count()

    def decide(self, decide: Callable[[], Any]) -> Any:
        """Returns the decision of process 0, a JSON value, or raises the error that
        process 0 met."""
        if jax.process_count() == 1:
            return decide()
        decision, failure = None, None
        if jax.process_index() == 0:
            try:
                decision = ["value", decide()]
            except Exception as error:
                failure = error
                kinds = (k for k, kind in _ERRORS.items() if isinstance(error, kind))
                decision = [next(kinds), str(error)]
        key, text = str(next(self._decided)), json.dumps(decision)
        said = self._decisions.gather(key, text, timeout_seconds=TIMEOUT_SECONDS)
        if failure is not None:
            raise failure
        kind, value = json.loads(said[0])
        if kind != "value":
            raise _ERRORS[kind](value)
        return value

    def report(self, failure: str = "") -> None:
        """Tells the other processes how this process's part of a save went so far.

        All processes report at the same points of every save (orbax adds two to ours),
        until one reports a failure; so all of them end in an error, and soon.

        Raises:
          OtherProcessFailed: a process reports a failure, or nothing in time.
        """
        key = str(next(self._reported))
        try:
            reports = self._reports.gather(
                key, failure, timeout_seconds=TIMEOUT_SECONDS
            )
        except TimeoutError as error:
            raise OtherProcessFailed(str(error)) from error
        failures = [f"process {i}: {text}" for i, text in enumerate(reports) if text]
        if failures:
            raise OtherProcessFailed("; ".join(failures))


# What process 0 may raise as the others raise it, the first that fits.
_ERRORS: dict[str, type[Exception]] = {
    "CheckpointFailed": CheckpointFailed,
    "OSError": OSError,
    "ValueError": ValueError,
    "Exception": Exception,
}


_DISK_ERRORS = (ENOSPC, EDQUOT, EFBIG, EROFS, EIO, EACCES)


def cause(error: Exception) -> str:
    """Returns the cause of an error in one line. Messages of the layers below can fill
    a screen; what the operating system said is somewhere in them, and is never cut
    out."""
    text = " ".join(str(error).split())
    if len(text) > 500:
        said = [os.strerror(number) for number in _DISK_ERRORS]
        found = "".join(f"{words} ... " for words in said if words in text)
        text = f"{text[:250]} ... {found}{text[-250:]}"
    if isinstance(error, OtherProcessFailed):
        return text
    return f"{type(error).__name__}: {text}"
