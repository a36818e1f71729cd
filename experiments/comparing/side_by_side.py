"""Training of a comparison's runs side by side: several share one device at a time, or
each has one of several GPUs."""

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax

from experiments.comparing.comparison_file import Trial
from sparsejax.cost_model import JAX_SHARE
from sparsejax.distributed.own_process import SideBySide
from sparsejax.terminal import console

MEMORY_SHARE = "XLA_PYTHON_CLIENT_MEM_FRACTION"
VISIBLE = "CUDA_VISIBLE_DEVICES"


class RunsFailed(RuntimeError):
    """Some runs of a comparison ended with an error, and all others were trained."""

    def __init__(self, failed: Mapping[Trial, str], folder: Path) -> None:
        reasons = "; ".join(f"{_said(trial)}: {why}" for trial, why in failed.items())
        printed = [folder / trial.place / "console.txt" for trial in failed]
        where = "; what they printed is in {folder}/NAME/seed-SEED/console.txt"
        super().__init__(
            f"{len(failed)} of the runs could not be trained ({reasons}); the same "
            f"command again trains these alone"
            + (where.format(folder=folder) if any(p.exists() for p in printed) else "")
        )


@dataclass(frozen=True)
class Slots:
    """The slots in which runs are trained, one run at a time in each.

    Raises:
      ValueError: no run at a time, or a GPU is named twice.
    """

    at_once: int = 1
    """The number of slots on each device, among which its memory is divided."""
    gpus: tuple[str, ...] = ()
    """The GPUs, as CUDA_VISIBLE_DEVICES names them; none named: the slots share the
    devices that JAX finds."""

    def __post_init__(self) -> None:
        if self.at_once < 1:
            raise ValueError(f"--at-once {self.at_once} is not 1 or more")
        if len(set(self.gpus)) < len(self.gpus):
            raise ValueError(
                f"--gpus {' '.join(self.gpus)} names a GPU twice; name each once, and "
                f"say with --at-once how many runs it takes at a time"
            )

    @property
    def gpu_of_each(self) -> list[str | None]:
        """The GPU of each slot, the GPUs in turn; None where none is named."""
        return list(self.gpus or (None,)) * self.at_once

    def enter(self, gpu: str | None) -> None:
        """Lets JAX see one GPU alone, where it is named, and take this slot's share of
        the memory that it would otherwise take; to be called before JAX looks for
        devices.

        Raises:
          ValueError: there is no such GPU.
        """
        taken = float(os.environ.get(MEMORY_SHARE, JAX_SHARE))
        os.environ[MEMORY_SHARE] = f"{taken / self.at_once:.4f}"
        if gpu is None:
            return
        os.environ[VISIBLE] = gpu
        if jax.default_backend() != "gpu":
            raise ValueError(
                f"--gpus {gpu}: JAX finds no such GPU; take a number that nvidia-smi "
                f"lists, or leave --gpus out"
            )


def train_all(
    trials: Sequence[Trial],
    gpus: Sequence[str | None],
    call: Callable[[Trial, str | None], tuple],
    *,
    ended: Collection[Trial],
    keep: Callable[[Trial], None],
) -> dict[Trial, str]:
    """Trains all runs that have not ended, one at a time in each slot, a branch after
    its trunk; after SIGTERM the running ones are stopped and no other begins.

    Args:
      trials: all runs, every branch behind its trunk.
      gpus: the GPU of each slot, or None, in the order in which slots are taken.
      call: a function and its arguments that train a run on such a GPU in another
        process; True where it has ended, None where a new process is to resume it,
        False where it was stopped.
      ended: the runs that have ended before.
      keep: called when a run has ended.
    Returns:
      the runs that failed, and why; a branch whose trunk failed is one of them.
    """
    done = {(trial.name, trial.seed) for trial in ended}
    waiting = [trial for trial in trials if trial not in ended]
    failed: dict[Trial, str] = {}
    free, taken = list(gpus), dict[Trial, str | None]()
    with SideBySide[Trial, bool | None]() as calls:
        while True:
            for trial in [] if calls.terminated else list(waiting):
                trunk = (trial.trunk, trial.seed)
                if free and (trial.trunk is None or trunk in done):
                    waiting.remove(trial)
                    taken[trial] = gpu = free.pop(0)
                    on = "" if gpu is None else f" on GPU {gpu}"
                    console.say(f"{_said(trial)}: begins{on}")
                    calls.start(trial, *call(trial, gpu))
            if not len(calls):
                return failed
            trial, result = calls.first_ended()
            free.append(taken.pop(trial))
            if result is None:
                waiting.insert(0, trial)
            elif result is True:
                done.add((trial.name, trial.seed))
                console.say(f"{_said(trial)}: has ended")
                keep(trial)
            elif not calls.terminated:
                why = "it was stopped by SIGTERM or Ctrl-C"
                if isinstance(result, Exception):
                    why = f"{type(result).__name__}: {result}"
                _note_failed(trial, why, waiting, failed)


def _note_failed(
    trial: Trial, why: str, waiting: list[Trial], failed: dict[Trial, str]
) -> None:
    """Notes that a run failed, and with it all runs that would branch from it."""
    console.say(f"{_said(trial)}: failed; {why}", style="yellow")
    failed[trial] = why
    for branch in list(waiting):
        if (branch.trunk, branch.seed) == (trial.name, trial.seed):
            waiting.remove(branch)
            _note_failed(branch, f"its trunk, {trial.name}, failed", waiting, failed)


def _said(trial: Trial) -> str:
    return f"{trial.name}, seed {trial.seed}"
