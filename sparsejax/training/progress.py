"""The progress of a run: its state, step and phase, and what it records and saves."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from sparsejax.checkpoints.checkpoint import Checkpoints
from sparsejax.config.config_file import to_json
from sparsejax.config.schedule import Phase, with_dense
from sparsejax.feed_forward.sparsity import DENSE
from sparsejax.models.transformer import Transformer
from sparsejax.reports.records import (
    Record,
    append_record,
    flush_to_disk,
)
from sparsejax.training.optimizer import learning_rate
from sparsejax.training.run import Run
from sparsejax.training.step import TrainState

JUMP = 0.1
"""The nats by which the loss may rise at a switch before tail steps are spent on repair
(found in our study of the recipe, 27 M parameters)."""


class NonFiniteLoss(RuntimeError):
    """A loss or a gradient became NaN or infinite; the run stopped, overwriting
    nothing."""


class Progress:
    """The state of a run between two steps.

    Attributes:
      state: all arrays that the next step reads; set when the run begins.
      batches: the training batches, and the position of the run in them.
      step: number of optimiser steps done.
      stop_after_sparse: whether a long dense tail is left to a new process.
      phases: the phases as they are trained, those in `run_dense` with all GEMMs dense.
      phase_index: number of the phase that `state` belongs to.
      origin: the trunk that the run branched from, as checkpoints name it, or None.
      pretrained: the folder of weights that the run began with, as checkpoints name it,
        or None.
      saving_seconds: seconds that saves have taken since the last record of a step.
      wall_seconds_before: wall-clock seconds of the run before this process: of its
        steps timed beforehand, of its trunk, or of earlier processes up to the
        checkpoint that this one began with; None where they are not known.
    """

    state: TrainState

    def __init__(
        self,
        run: Run,
        folder: Path,
        checkpoints: Checkpoints,
        observe: Callable[[Record], None],
        stop_after_sparse: bool,
    ) -> None:
        self.run = run
        self.config = run.config
        self.folder = folder
        self.metrics_file = folder / "metrics.jsonl"
        self.checkpoints = checkpoints
        self.observe = observe
        self.stop_after_sparse = stop_after_sparse
        self.batches = run.batches()
        self.phases = run.phases
        self.run_dense: tuple[int, ...] = ()
        self.step = self.phase_index = 0
        self.origin: dict[str, Any] | None = None
        self.pretrained: dict[str, Any] | None = None
        self.saving_seconds = 0.0
        self.wall_seconds_before: float | None = 0.0
        self._began = time.perf_counter()
        self.is_save_untold = False

    @property
    def phase(self) -> Phase:
        return self.phases[self.phase_index]

    def phase_start(self) -> int:
        """Returns the number of steps before the present phase."""
        return sum(phase.steps for phase in self.phases[: self.phase_index])

    @property
    def run_of_phase(self) -> Run:
        """The run that computes with the present state, whose model may be a smaller
        one."""
        return self.run.of_phase(self.phase)

    def model(self) -> Transformer:
        """Returns the model of the present state, which computes as the phase's steps
        do."""
        phase = self.phase
        return self.run_of_phase.model(self.state, phase.sparsity, phase.held)

    def wall_seconds(self) -> float | None:
        """Returns the wall-clock seconds that the run has taken so far, with
        compilation, validation, clustering and saving; None where those of its trunk or
        of an earlier process are not known."""
        before = self.wall_seconds_before
        return None if before is None else before + time.perf_counter() - self._began

    def learning_rate_of(self, step: int) -> float:
        """Returns the learning rate of the step after `step` steps."""
        of = self.config
        schedule = learning_rate(of.optimizer, of.steps, self.run.phases)
        return float(jnp.asarray(schedule(step)))

    def train_dense(self, phases: Sequence[int]) -> None:
        """Makes the phases with the given numbers dense."""
        self.run_dense = tuple(phases)
        self.phases = with_dense(self.phases, phases)

    def where_it_is_safe(self) -> str:
        """Returns a sentence that names the last good checkpoint."""
        good = self.checkpoints.last_good()
        if good is None:
            return "There is no checkpoint yet"
        return f"The last good checkpoint is {good}"

    def refuse_non_finite(self, step: int, values: dict[str, float]) -> None:
        if all(map(math.isfinite, values.values())):
            return
        self.checkpoints.wait()
        texts = {name: str(value) for name, value in values.items()}
        self.record("non_finite_loss", at=step, **texts)
        raise NonFiniteLoss(
            f"{', '.join(f'{name}={text}' for name, text in texts.items())} at step "
            f"{step}, phase {self.phase_index} ({self.phase.kind}). "
            f"{self.where_it_is_safe()}; nothing was overwritten. Start anew with a "
            f"lower optimizer.peak_learning_rate, or look at the data around this step"
        )

    def validation_loss(self, phase: Phase, *, masks: bool = True) -> float:
        """Returns the validation loss in nats per token of the present state, which
        belongs to `phase`: see `Run.validate`."""
        run = self.run.of_phase(phase)
        return run.validate(self.state, phase.sparsity, phase.held, masks=masks)

    def switch(self, before: Phase, index: int, loss: float | None = None) -> None:
        """Brings a state of the phase `before` to the phase number `index`, with a
        validation on both sides; `loss` is the one of the phase `before`, None where it
        was not taken yet."""
        begin = time.perf_counter()
        after = self.phases[index]
        losses = self._losses_around_masks("before", before, loss)
        self.state = self.run.switch_phase(self.state, before, after)
        losses |= self._losses_around_masks("after", after)
        self.refuse_non_finite(self.step, losses)
        self.phase_index = index
        jump = losses["after"] - losses["before"]
        kinds = {"from": before.kind, "to": self.phase.kind}
        seconds = time.perf_counter() - begin
        self.record(
            "switch", **kinds, jump=jump, large=jump > JUMP, **losses, seconds=seconds
        )

    def _losses_around_masks(
        self, side: str, phase: Phase, loss: float | None = None
    ) -> dict[str, float]:
        """Returns the validation loss of the present state and that of the dense
        network, which are one where the phase's steps compute densely."""
        own = self.validation_loss(phase) if loss is None else loss
        is_dense = phase.sparsity == DENSE
        unmasked = own if is_dense else self.validation_loss(phase, masks=False)
        return {side: own, f"{side}_unmasked": unmasked}

    def save(self, *, permanent: bool = False, blocking: bool = False) -> None:
        begin = time.perf_counter()
        # A failure of the one before is told before anything is said of this one.
        self.checkpoints.wait()
        self.tell_save()
        # First the record: a complete checkpoint then has all records of its step, also
        # after a crash of the machine.
        self.record("checkpoint", permanent=permanent, wall_seconds=self.wall_seconds())
        if jax.process_index() == 0:
            with self.writing(self.metrics_file):
                flush_to_disk(self.metrics_file)
        self.checkpoints.save(
            self.step,
            self.state,
            data_state=self.batches.get_state(),
            metadata={
                "phase": self.phase_index,
                "kind": self.phase.kind,
                "config": to_json(self.config),
                "corpus": self.run.corpus.fingerprint,
                "run_dense": self.run_dense,
                "branch": self.origin,
                "init_from": self.pretrained,
            },
            permanent=permanent,
            blocking=blocking,
        )
        self.is_save_untold = True
        self.saving_seconds += time.perf_counter() - begin

    def tell_save(self) -> None:
        """Tells the observer which checkpoint is the last good one, once a save is
        complete."""
        if self.is_save_untold and not self.checkpoints.saving:
            self.is_save_untold = False
            good = self.checkpoints.last_good()
            if good is not None:
                self.observe_only("saved", checkpoint=str(good))

    def record(self, event: str, **values: Any) -> None:
        """Writes a record to metrics.jsonl, and shows it to the observer."""
        record = self.observe_only(event, **values)
        if jax.process_index() == 0:
            with self.writing(self.metrics_file):
                append_record(self.metrics_file, record)

    @contextmanager
    def writing(self, path: Path) -> Iterator[None]:
        """Adds to an OSError inside the block which file could not be written, and
        which checkpoint is safe."""
        try:
            yield
        except OSError as error:
            raise OSError(
                f"{path} could not be written ({error}). {self.where_it_is_safe()}; "
                f"free space or repair the disk, then resume"
            ) from error

    def observe_only(self, event: str, **values: Any) -> Record:
        """Returns a record that belongs to this process and not to the run, such as
        that of a resume, after showing it to the observer."""
        record = {
            "event": event,
            "step": self.step,
            "phase": self.phase_index,
            "kind": self.phase.kind,
            **values,
        }
        self.observe(record)
        return record
