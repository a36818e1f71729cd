"""Runs that begin with the checkpoint of another run: a branch and its trunk.

A branch has the trunk's parameters, moments, step, position in the data, random key,
router centres and scales, and goes on under settings of its own, in a run folder of its
own. So one trunk at a constant learning rate gives the losses of several budgets, each
by a branch that decays. `config_file.MAY_DIFFER_IN_BRANCH` says which settings may be
others than the trunk's.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from jaxtyping import PyTree

from sparsejax.checkpoints.checkpoint import Checkpoints, Restored
from sparsejax.checkpoints.checkpoint_folder import CheckpointFolder, named_checkpoint
from sparsejax.config import TrainConfig
from sparsejax.config.config_file import check_branchable, from_json
from sparsejax.config.schedule import Phase, phases, with_dense
from sparsejax.reports.records import (
    Record,
    records_until,
    training_seconds,
    wall_seconds,
)
from sparsejax.training.optimizer import learning_rate


@dataclass(frozen=True)
class Branch:
    """The place where a run begins: a checkpoint of another run, its trunk."""

    folder: Path
    """The run folder of the trunk."""
    step: int | None = None
    """The number of steps of the checkpoint; None for the trunk's latest checkpoint."""

    @classmethod
    def named(cls, text: str) -> "Branch":
        """Returns the branch that a text names: "RUN@STEP", or "RUN", which means the
        latest checkpoint of that run."""
        return cls(*named_checkpoint(text))

    def step_among(self, steps: Sequence[int]) -> int:
        """Returns the step that the branch begins at, given the steps of the trunk's
        checkpoints.

        Raises:
          ValueError: there is no such checkpoint; lists those that there are.
        """
        if not steps:
            raise ValueError(
                f"{self.folder} has no checkpoint to branch from; give the run folder "
                f"of a run that has saved one"
            )
        step = max(steps) if self.step is None else self.step
        if step not in steps:
            raise ValueError(
                f"{self.folder} has no checkpoint of step {step} to branch from; take "
                f"one of {', '.join(map(str, sorted(steps)))}, or train that run with "
                f"checkpoint_every={step} and keep_every={step}, which keep one there"
            )
        return step

    def first_step(self) -> int:
        """Returns the step that the branch begins at, among the checkpoints that this
        process sees."""
        folder = self.folder / "checkpoints"
        held = CheckpointFolder(folder, keep=None, keep_every=0)
        return self.step_among(list(held.newest_paths()))

    def check_begun(self, origin: dict[str, Any] | None, folder: Path) -> None:
        """Raises ValueError where the run in `folder` is not this branch. `origin` is
        what its checkpoints say of where it began, None where it is no branch."""
        if origin is None:
            raise ValueError(
                f"{folder} holds a run that is no branch of {self.folder}; go on with "
                f"it without a branch, or choose another run folder"
            )
        run = _from(folder, self.folder)
        step = origin["step"] if self.step is None else self.step
        if (run, step) != (origin["run"], origin["step"]):
            raise ValueError(
                f"{folder} holds a branch of {origin['run']} at step {origin['step']}, "
                f"not of {run} at step {step}; go on with it without naming a branch, "
                f"or choose another run folder"
            )


class Trunk:
    """A run at one of its checkpoints, as a branch reads it; nothing is written.

    Use as a context manager. All processes of the branch make it at the same point.
    """

    def __init__(self, branch: Branch, config: TrainConfig, folder: Path) -> None:
        """Reads the checkpoint's record; `config` and `folder` are the branch's.

        Raises:
          ValueError: the folder is the trunk's own, there is no such checkpoint, the
            checkpoint is damaged, a setting differs that may not, or no step is left to
            train.
        """
        if branch.folder.resolve() == folder.resolve():
            raise ValueError(
                f"{folder} is the run to branch from, and a branch needs a run folder "
                f"of its own; give another --run-folder"
            )
        self._folder = branch.folder
        self._checkpoints = Checkpoints(branch.folder / "checkpoints")
        try:
            self._read(branch, config)
        except BaseException:
            self._checkpoints.close()
            raise
        self.origin = {"run": _from(folder, branch.folder), "step": self.step}
        """The trunk and the step, as the branch's checkpoints and first record name
        them."""

    def _read(self, branch: Branch, config: TrainConfig) -> None:
        """Finds the checkpoint, and reads its settings and its record."""
        self.step = branch.step_among(self._checkpoints.steps())
        if self.step >= config.steps:
            raise ValueError(
                f"steps={config.steps} leaves nothing to train for a branch that "
                f"begins at step {self.step} of {branch.folder}; set --steps above "
                f"{self.step}, or branch from an earlier checkpoint"
            )
        self._checkpoints.check_intact(self.step)
        self._metadata = self._checkpoints.metadata(self.step)
        self.config = from_json(self._metadata["config"])
        check_branchable(self.config, config, branch.folder)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._checkpoints.close()

    @property
    def corpus(self) -> Any:
        """The fingerprint of the tokens that the trunk was trained on."""
        return self._metadata["corpus"]

    @property
    def run_dense(self) -> tuple[int, ...]:
        """The numbers of the trunk's phases that were trained dense because they were
        timed slower sparse."""
        return tuple(self._metadata.get("run_dense", ()))

    @property
    def phases(self) -> tuple[Phase, ...]:
        """The trunk's phases as they were planned."""
        return phases(self.config)

    @property
    def phase(self) -> Phase:
        """The phase that the checkpoint's state belongs to, as it was trained."""
        return with_dense(self.phases, self.run_dense)[self._metadata["phase"]]

    @property
    def learning_rate(self) -> float:
        """The learning rate of the trunk's next step."""
        of = self.config
        schedule = learning_rate(of.optimizer, of.steps, self.phases)
        return float(np.asarray(schedule(self.step)))

    def restore(self, template: PyTree) -> Restored:
        """Returns the state and the position in the data: see `Checkpoints.restore`."""
        return self._checkpoints.restore(self.step, template=template)

    def wall_seconds(self) -> float | None:
        """Returns the wall-clock seconds that the trunk took up to the checkpoint, or
        None where its records do not say."""
        return wall_seconds(self._records(), self.step)

    def _records(self) -> list[Record]:
        kinds = [phase.kind for phase in self.phases]
        path, steps = self._folder / "metrics.jsonl", self.config.steps
        lines = records_until(path, steps, kinds).splitlines()
        return [json.loads(line) for line in lines]

    def seconds(self) -> float | None:
        """Returns the seconds that the trunk's training steps took up to the
        checkpoint, or None where its records do not say."""
        seconds = training_seconds(self._records(), self.config.tokens_per_step)
        known = [step for step in seconds if np.isfinite(seconds[step])]
        if not known or max(known) < self.step:
            return None
        return float(np.interp(self.step, known, [seconds[step] for step in known]))


def _from(folder: Path, trunk: Path) -> str:
    """Returns the relative path from the branch's folder to the trunk: it stays right
    where both are moved together."""
    return os.path.relpath(trunk.resolve(), folder.resolve())
