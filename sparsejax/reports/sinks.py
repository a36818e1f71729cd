"""Where the records of a run go besides metrics.jsonl: TensorBoard, Weights & Biases,
trackio.

A sink takes the numbers of each record. Its package is an extra of its own, and is
imported when a run asks for it. What a sink cannot do is told before the run begins;
once it has begun, a sink that fails is left out with a warning, and the run goes on.
"""

import hashlib
import importlib
import numbers
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from sparsejax.reports.records import Record

SinkName = Literal["tensorboard", "wandb", "trackio"]


class Sink(Protocol):
    """A place that takes numbers by step."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Takes numbers by name, after `step` optimiser steps."""
        ...

    def close(self) -> None:
        """Hands over what is left; nothing is logged after it."""
        ...


class SinkFailed(UserWarning):
    """A sink failed during a run, and gets nothing more of it."""


class TensorBoard:
    """Event files in the folder `tensorboard` of the run folder."""

    def __init__(self, folder: Path, settings: Mapping[str, Any], step: int) -> None:
        writer = _package("tensorboard").SummaryWriter
        # Of a resumed run the steps are logged again that come after its checkpoint.
        again = {"purge_step": step + 1} if step else {}
        self._writer = writer(logdir=str(folder / "tensorboard"), **again)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run of project `sparsejax` (or $WANDB_PROJECT), named as the run folder. A
    resumed run goes on in it. WANDB_MODE=offline keeps it on this machine, under the
    run folder."""

    def __init__(self, folder: Path, settings: Mapping[str, Any], step: int) -> None:
        self._run = _package("wandb").init(
            project=None if "WANDB_PROJECT" in os.environ else "sparsejax",
            name=folder.name,
            id=identity(folder),
            resume="allow",
            dir=str(folder),
            config=dict(settings),
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


class Trackio:
    """A run of trackio's project `sparsejax`. A resumed run goes on in it."""

    def __init__(self, folder: Path, settings: Mapping[str, Any], step: int) -> None:
        self._trackio = _package("trackio")
        self._trackio.init(
            project="sparsejax",
            name=identity(folder),
            resume="allow",
            config=dict(settings),
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._trackio.log(dict(values), step=step)

    def close(self) -> None:
        self._trackio.finish()


SINKS: dict[SinkName, Callable[[Path, Mapping[str, Any], int], Sink]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "trackio": Trackio,
}
"""The sinks by name: functions of the run folder, the settings as plain values, and the
step that the run begins at."""


def check_installed(names: Sequence[SinkName]) -> None:
    """Raises ImportError where the package of a sink is not installed; says which extra
    has it."""
    for name in names:
        _package(name)


@contextmanager
def opened(
    names: Sequence[SinkName],
    folder: Path,
    settings: Mapping[str, Any],
    *,
    step: int = 0,
) -> Iterator[Callable[[Record], None]]:
    """Yields a function that gives the numbers of a record to all sinks, which are
    closed at the end of the block.

    Args:
      names: the sinks, each once.
      folder: the run folder.
      settings: the settings of the run, as plain values.
      step: the optimiser steps that the run has done already.
    Raises:
      ImportError: a package is not installed; says which extra has it.
      ValueError: a sink cannot be opened; says why.
    """
    sinks: dict[SinkName, Sink] = {}

    def leave_out(name: SinkName, error: Exception) -> None:
        sinks.pop(name, None)
        reason = " ".join(str(error).split())
        warnings.warn(
            f"{name} failed ({type(error).__name__}: {reason}) and gets no more of "
            f"this run, which goes on; metrics.jsonl has every record",
            SinkFailed,
            stacklevel=2,
        )

    def observe(record: Record) -> None:
        values = numbers_of(record)
        for name, sink in list(sinks.items()) if values else ():
            try:
                sink.log(record["step"], values)
            except Exception as error:
                leave_out(name, error)

    try:
        for name in dict.fromkeys(names):
            try:
                sinks[name] = SINKS[name](folder, settings, step)
            except ImportError:
                raise
            except Exception as error:
                raise ValueError(
                    f"--log-to {name} cannot be opened ({type(error).__name__}: "
                    f"{error}); leave it out, or put right what it says"
                ) from error
        yield observe
    finally:
        for name, sink in list(sinks.items()):
            try:
                sink.close()
            except Exception as error:
                leave_out(name, error)


GROUPS = {"step": "train"}
"""The group under which the numbers of an event are shown, where it is not the event's
own name."""


def numbers_of(record: Record) -> dict[str, float]:
    """Returns the numbers of a record as "group/name": "train/loss" of a step,
    "validation/loss", "ffn/flip_rate". Of a list with a number for each layer, or each
    batch, the mean; everything else is left out."""
    group = GROUPS.get(record["event"], record["event"])
    found = {}
    for name, value in record.items():
        if name == "step" or isinstance(value, bool):
            continue
        if isinstance(value, list) and value and all(map(_is_number, value)):
            value = float(np.mean(value))
        if _is_number(value):
            found[f"{group}/{name}"] = float(value)
    # A record of nothing but its phase says when it was, and no number.
    return {} if set(found) == {f"{group}/phase"} else found


def _is_number(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def identity(folder: Path) -> str:
    """Returns a name for the run in a folder that no run in another one has: that of
    the folder, and eight digits of the SHA-256 of its whole path."""
    whole = str(folder.resolve())
    return f"{folder.name}-{hashlib.sha256(whole.encode()).hexdigest()[:8]}"


PACKAGES: dict[SinkName, str] = {"tensorboard": "tensorboardX"}
"""The package of a sink whose name is another."""


def _package(sink: SinkName) -> Any:
    """Returns the package of a sink. Raises ImportError where it is not installed."""
    name = PACKAGES.get(sink, sink)
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(
            f"--log-to {sink} needs the package {name} ({error}); run `uv sync "
            f"--extra {sink}` or `pip install 'sparsejax[{sink}]'`, or leave it out"
        ) from error
