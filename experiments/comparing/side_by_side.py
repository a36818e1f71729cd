"""Training of a comparison's runs side by side: several share one device at a time."""

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from experiments.comparing.comparison_file import Trial
from sparsejax.cost_model import JAX_SHARE
from sparsejax.distributed.own_process import SideBySide
from sparsejax.terminal import console

MEMORY_SHARE = "XLA_PYTHON_CLIENT_MEM_FRACTION"


class RunsFailed(RuntimeError):
    """Some runs of a comparison ended with an error, and all others were trained."""

    def __init__(self, failed: Mapping[Trial, str], folder: Path) -> None:
        reasons = "; ".join(f"{_said(trial)}: {why}" for trial, why in failed.items())
        super().__init__(
            f"{len(failed)} of the runs could not be trained ({reasons}); what they "
            f"printed is in {folder}/NAME/seed-SEED/console.txt, and the same command "
            f"again trains these alone"
        )


def share_memory(at_once: int) -> None:
    """Lets JAX take one `at_once`-th of the GPU memory that it would otherwise take; to
    be called before JAX looks for devices."""
    taken = float(os.environ.get(MEMORY_SHARE, JAX_SHARE))
    os.environ[MEMORY_SHARE] = f"{taken / at_once:.4f}"


def train_all(
    trials: Sequence[Trial],
    at_once: int,
    call: Callable[[Trial], tuple],
    *,
    ended: Collection[Trial],
    keep: Callable[[Trial], None],
) -> dict[Trial, str]:
    """Trains all runs that have not ended, `at_once` at a time and a branch after its
    trunk; after SIGTERM the running ones are stopped and no other begins.

    Args:
      trials: all runs, every branch behind its trunk.
      at_once: how many runs are trained at a time.
      call: a function and its arguments that train a run in another process; True where
        it has ended, None where a new process is to resume it, False where it was
        stopped.
      ended: the runs that have ended before.
      keep: called when a run has ended.
    Returns:
      the runs that failed, and why; a branch whose trunk failed is one of them.
    """
    done = {(trial.name, trial.seed) for trial in ended}
    waiting = [trial for trial in trials if trial not in ended]
    failed: dict[Trial, str] = {}
    with SideBySide[Trial, bool | None]() as calls:
        while True:
            for trial in [] if calls.terminated else list(waiting):
                trunk = (trial.trunk, trial.seed)
                if len(calls) < at_once and (trial.trunk is None or trunk in done):
                    waiting.remove(trial)
                    console.say(f"{_said(trial)}: begins")
                    calls.start(trial, *call(trial))
            if not len(calls):
                return failed
            trial, result = calls.first_ended()
            if result is None:
                waiting.insert(0, trial)
            elif result is True:
                done.add((trial.name, trial.seed))
                console.say(f"{_said(trial)}: has ended")
                keep(trial)
            elif not calls.terminated:
                why = "it was stopped by SIGTERM"
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
