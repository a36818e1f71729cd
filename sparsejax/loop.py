"""The training loop: phases, switches, checkpoints, records.

`train` runs a configuration in a run folder:
  config.json       the resolved settings
  metrics.jsonl     one record per line, each with "event" and "step"
  checkpoints/      see `checkpoint`
  run.lock          held while the run trains
"""

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sparsejax.branch import Branch, Trunk
from sparsejax.checkpoint import TIMEOUT_SECONDS, Checkpoints
from sparsejax.config import TrainConfig
from sparsejax.config_file import check_resumable, from_json, read_config, to_json
from sparsejax.corpus import Corpus, unigram_loss
from sparsejax.model import Transformer
from sparsejax.pace import Pace
from sparsejax.processes import (
    Exchange,
    ProcessLost,
    alone_in,
    is_loss_of_contact,
    until_sigterm,
)
from sparsejax.recipe import Phase, are_alike, phase_at, steps_left
from sparsejax.records import (
    Record,
    append_record,
    check_writable,
    records_until,
    write_whole,
)
from sparsejax.step_times import StepTimes, phases_run_dense, with_dense
from sparsejax.train import Run, TrainState, learning_rate

JUMP = 0.1
"""Nats by which the loss may rise at a switch before tail steps are spent on repair
(found in our study of the recipe, 27 M parameters)."""


class NonFiniteLoss(RuntimeError):
    """A loss or a gradient became NaN or infinite; the run stopped, overwriting
    nothing."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run ended."""

    state: TrainState
    model: Transformer
    corpus: Corpus
    folder: Path
    """The run folder."""
    completed: bool
    """False when it ended early, with everything saved."""
    resume_in_new_process: bool
    """It ended early after the last sparse phase: see `train`."""
    checkpoint: Path
    """The last one."""


def train(
    config: TrainConfig,
    folder: Path,
    *,
    observe: Callable[[Record], None] = lambda record: None,
    stop_after_sparse: bool = False,
    corpus: Corpus | None = None,
    step_times: StepTimes | None = None,
    branch: Branch | None = None,
) -> Outcome:
    """Trains `config` in `folder`, or continues the run that `folder` holds.

    Every record written to metrics.jsonl is also given to `observe`. On SIGTERM, to any
    process of the run, the step is finished and saved, and the function returns.

    With `stop_after_sparse` it also returns once a phase on sparse tensor cores has
    been left for a dense one of `config.new_process_minutes` or more, so that the
    caller can resume in a new process: in the old one the driver keeps the clock of a
    Hopper GPU lower, and a dense step takes about 4 % longer (experiments/LOG.md,
    2026-11-22).

    `corpus` holds the tokens of `config.data`, where the caller has them; None: they
    are loaded. With `step_times`, from `step_times.time_steps`, a new run trains the
    phases dense that lose time, unless `config.keep_slower`; the checkpoints say which
    these are, so that a run that goes on does the same, whatever it is given.

    With `branch` a new run begins with all that a checkpoint of another run holds, and
    goes on at that step under the settings of `config`: see `sparsejax.branch`. Where
    its phase has another sparsity than the state of the checkpoint, a switch comes
    first. It saves at once, and needs the other run no more.

    A run of several processes (`jax.distributed`) calls it in all of them, with one
    folder that all of them see; process 0 writes the records.

    Raises:
      NonFiniteLoss: names step, phase and the last good checkpoint.
      ProcessLost: another process died or is out of reach; likewise.
      CheckpointFailed: a checkpoint could not be written; likewise.
      OSError: another file could not be written; likewise.
      ValueError: settings or data that do not fit; a checkpoint to branch from that is
        not there or is damaged; a folder of another run, one in which a run trains at
        this moment, or one that cannot be made or written in, which is found out before
        anything else.
    """
    check_writable(folder)
    saved = folder / "config.json"
    if saved.exists():
        check_resumable(read_config(saved), config, folder)
    run = Run(config, corpus=corpus)
    with (
        alone_in(folder, timeout_seconds=TIMEOUT_SECONDS),
        Checkpoints(
            folder / "checkpoints",
            keep=config.keep_checkpoints,
            keep_every=config.keep_every,
        ) as checkpoints,
        until_sigterm(run.mesh) as terminated,
    ):
        loop = _Loop(run, folder, checkpoints, observe, stop_after_sparse)
        loop.begin_or_resume(step_times, branch)
        if jax.process_index() == 0:
            with loop.writing(saved):
                write_whole(saved, json.dumps(to_json(config), indent=2) + "\n")
        return loop.finish(terminated)


class _Loop:
    """The state of a running `train`."""

    def __init__(
        self,
        run: Run,
        folder: Path,
        checkpoints: Checkpoints,
        observe: Callable[[Record], None],
        stop_after_sparse: bool,
    ) -> None:
        self.run = run
        self.phases = run.phases
        self.run_dense: tuple[int, ...] = ()
        self.stop_after_sparse = stop_after_sparse
        self.config = run.config
        self.checkpoints = checkpoints
        self.observe = observe
        self.folder = folder
        self.metrics_file = folder / "metrics.jsonl"
        self.batches = run.batches()
        self.pace = Pace(run)
        self.saving_seconds = 0.0
        self.is_save_untold = False
        self.step = self.phase_index = 0
        self.origin: dict[str, Any] | None = None

    def begin_or_resume(
        self, step_times: StepTimes | None, branch: Branch | None
    ) -> None:
        """Brings the state to where the first step of this process begins."""
        checkpoints, folder = self.checkpoints, self.folder
        damaged = checkpoints.set_aside_damaged()
        if damaged and checkpoints.latest_step() is None:
            found = "; ".join(f"{each.path} ({each.reason})" for each in damaged)
            raise ValueError(
                f"every checkpoint in {folder} is damaged and was set aside: {found}; "
                f"there is nothing to go on from. To train anew in this folder, give "
                f"the command again; to keep its records, use another folder"
            )
        if checkpoints.latest_step() is not None:
            self.restore(branch)
            self.observe_only(
                "resume",
                checkpoint=str(checkpoints.path()),
                run_dense=self.run_dense,
            )
        elif branch is not None:
            with Trunk(branch, self.config, folder) as trunk:
                self.begin_as_branch(trunk, step_times)
        else:
            if step_times is not None:
                self.leave_out_slower_phases(step_times)
            self.state = self.run.initial_state(self.phase.held)
            self.record_start(step_times)
        for checkpoint in damaged:
            path, reason = str(checkpoint.path), checkpoint.reason
            self.observe_only("damaged", checkpoint=path, reason=reason)
        self.pace.start(self.step)

    def begin_as_branch(self, trunk: Trunk, step_times: StepTimes | None) -> None:
        """The trunk's state and data, switched to the phase in which they go on."""
        self.check_corpus(trunk.corpus)
        self.run.check_shardable(*trunk.phase.sparsities)
        self.step, self.origin = trunk.step, trunk.origin
        self.phase_index = phase_at(self.phases, self.step)
        if step_times is not None:
            self.leave_out_slower_phases(step_times)
        elif are_alike(self.phases, trunk.phases) and not self.config.keep_slower:
            self.train_dense(trunk.run_dense)
        restored = trunk.restore(self.run.template(trunk.phase.held))
        self.state = restored.state
        self.batches.set_state(restored.data_state)
        self.record_start(
            step_times,
            branch=trunk.origin
            | {"seconds": trunk.seconds(), "learning_rate": trunk.learning_rate},
            learning_rate=self.learning_rate_of(self.step),
        )
        if trunk.phase.sparsities != self.phase.sparsities:
            self.switch(trunk.phase, self.phase_index)
        self.save(blocking=True)

    def record_start(self, step_times: StepTimes | None, **values: Any) -> None:
        """The first records of a run, in a file without any."""
        if jax.process_index() == 0:
            with self.writing(self.metrics_file):
                self.metrics_file.write_text("")
        self.record(
            "start",
            corpus=self.run.corpus.description,
            unigram_loss=unigram_loss(self.run.corpus),
            micro_batches=self.run.micro_batches,
            **values,
        )
        if step_times is not None:
            self.record("step_times", run_dense=self.run_dense, **asdict(step_times))

    @property
    def phase(self) -> Phase:
        return self.phases[self.phase_index]

    def leave_out_slower_phases(self, times: StepTimes) -> None:
        """Trains dense what would lose time sparse, by what was timed."""
        if self.config.keep_slower:
            return
        minutes = self.config.new_process_minutes if self.stop_after_sparse else None
        left = steps_left(self.phases, self.step)
        self.train_dense(phases_run_dense(times, left, new_process_minutes=minutes))

    def train_dense(self, phases: Sequence[int]) -> None:
        """Makes the phases with these numbers dense."""
        self.run_dense = tuple(phases)
        self.phases = with_dense(self.phases, phases)

    def finish(self, terminated: Callable[[], bool]) -> Outcome:
        """Runs to the last step, or to the step in which SIGTERM arrives."""
        try:
            return self.run_steps(terminated)
        except (jax.errors.JaxRuntimeError, TimeoutError, ValueError) as error:
            if jax.process_count() == 1 or not is_loss_of_contact(error):
                raise
            raise ProcessLost(
                f"process {jax.process_index()} of {jax.process_count()} cannot go on "
                f"at step {self.step}, phase {self.phase_index} ({self.phase.kind}): "
                f"another one has died or is out of reach "
                f"({' '.join(str(error).split())[:300]}). {self.where_it_is_safe()}. "
                f"See what the others printed last, and start all of them anew with "
                f"--resume {self.folder}"
            ) from error

    def where_it_is_safe(self) -> str:
        """The last good checkpoint, in words."""
        good = self.checkpoints.last_good()
        if good is None:
            return "There is no checkpoint yet"
        return f"The last good checkpoint is {good}"

    def run_steps(self, terminated: Callable[[], bool]) -> Outcome:
        ends = self.run.phase_ends()
        pending: tuple[int, dict] | None = None
        stopping = left_sparse = False
        while self.step < self.config.steps and not stopping:
            masks = None
            if self._is_due(self.config.eval_every, self.step + 1):
                # Waits for the step before: its time must not count as looking.
                if pending is not None:
                    self.check(*pending)
                    pending = None
                with self.pace.clock.stopped():
                    masks = jax.block_until_ready(self.run.masks(self.model()))
            tokens = self.run.place(next(self.batches)["tokens"])
            report = self.do_step(tokens)
            self.step += 1
            # The step before is looked at while this one runs.
            if pending is not None:
                self.check(*pending)
            pending = self.step, report

            if jax.process_count() == 1:
                # Several processes learn of it at the next save, all at the same step.
                self.checkpoints.raise_if_failed()
            self.tell_save()
            # Asked once per step, so that the loop never ends without saving.
            stopping = terminated()
            at_end = self.step == ends[self.phase_index]
            log = self._is_due(self.config.log_every, self.step) or at_end
            evaluate = self._is_due(self.config.eval_every, self.step)
            recluster = self.recluster_is_due() and not at_end
            save = self._is_due(self.config.checkpoint_every, self.step)
            if not (log or evaluate or recluster or save or at_end or stopping):
                continue
            self.check(*pending)
            pending = None
            with self.pace.clock.stopped():
                if log:
                    self.log(report)
                if evaluate:
                    self.validate()
                    self.look_at_ffns(masks)
                if recluster:
                    self.recluster()
                if at_end:
                    self.end_phase(validated=evaluate)
                elif save or stopping:
                    self.save(blocking=stopping)
            if at_end:
                self.pace.start(self.step)
                if self.stop_after_sparse and not stopping:
                    left_sparse = self.left_sparse_kernels() and self.is_long()
                    stopping = left_sparse
        self.checkpoints.wait()
        self.tell_save()
        return Outcome(
            state=self.state,
            model=self.model(),
            corpus=self.run.corpus,
            folder=self.folder,
            completed=self.step == self.config.steps,
            resume_in_new_process=left_sparse,
            checkpoint=self.checkpoints.path(),
        )

    def do_step(self, tokens: jax.Array) -> dict[str, jax.Array]:
        """The next optimiser step, with the sparsity that it has in its phase."""
        sparsity = self.phase.sparsity_of(self.step + 1 - self.phase_start())
        step = self.run.step(sparsity, self.phase.held)
        with self.pace.compiling(sparsity):
            self.state, report = step(self.state, tokens)
        return report

    def phase_start(self) -> int:
        """The steps before the present phase."""
        return sum(phase.steps for phase in self.phases[: self.phase_index])

    def model(self) -> Transformer:
        """The model of the present state, which computes as the phase's steps do."""
        return self.run.model(self.state, self.phase.sparsity, self.phase.held)

    def left_sparse_kernels(self) -> bool:
        """Whether, at the end of a phase, that ran on sparse tensor cores and the next
        one is dense."""
        at_the_end = self.step == self.config.steps
        if at_the_end or self.phase_index == 0 or not self.phase.is_dense:
            return False
        before = self.phases[self.phase_index - 1].sparsities
        decisions = [d for sparsity in before for d in self.pace.decisions(sparsity)]
        return any(decision.on_kernels for decision in decisions)

    def is_long(self) -> bool:
        """Whether the dense steps from here to the next sparse phase take
        `new_process_minutes` or more at the pace of the last steps, as process 0 sees
        it."""
        ahead = takewhile(lambda of: of.is_dense, self.phases[self.phase_index :])
        minutes = self.pace.minutes_of(sum(phase.steps for phase in ahead))
        long = minutes >= self.config.new_process_minutes
        answers = Exchange("is_long").gather(
            str(self.step), str(long), timeout_seconds=TIMEOUT_SECONDS
        )
        return answers[0] == str(True)

    def _is_due(self, every: int, step: int) -> bool:
        return every > 0 and step % every == 0

    def check(self, step: int, report: dict[str, jax.Array]) -> None:
        """Raises NonFiniteLoss. Called before anything of the step is saved: a NaN
        gradient behind a finite loss would be in the masters."""
        self.refuse_non_finite(step, {name: float(x) for name, x in report.items()})

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

    def log(self, report: dict[str, jax.Array]) -> None:
        speed = self.pace.of_steps(self.step, self.phase)
        self.record(
            "step",
            loss=float(report["loss"]),
            gradient_norm=float(report["gradient_norm"]),
            sparse=not self.phase.is_dense,
            learning_rate=self.learning_rate_of(self.step - 1),
            saving_seconds=self.saving_seconds,
            **speed,
        )
        self.saving_seconds = 0.0

    def learning_rate_of(self, step: int) -> float:
        """The learning rate of the step that follows `step` steps."""
        of = self.config
        schedule = learning_rate(of.optimizer, of.steps, self.run.phases)
        return float(jnp.asarray(schedule(step)))

    def validate(self) -> None:
        loss = self.validation_loss(self.phase)
        self.refuse_non_finite(self.step, {"validation_loss": loss})
        self.record("validation", loss=loss)

    def validation_loss(self, phase: Phase, *, masks: bool = True) -> float:
        """The validation loss of a state of this phase: see `Run.validate`."""
        return self.run.validate(self.state, phase.sparsity, phase.held, masks=masks)

    def look_at_ffns(self, masks_before: list[jax.Array] | None) -> None:
        model = self.model()
        tokens = self.run.sample_of_validation(tokens=4096)
        report = dict(self.run.statistics(model, tokens))
        if masks_before:
            after = self.run.masks(model)
            report["flip_rate"] = self.run.flip_rate(masks_before, after)
        values = {name: np.asarray(value).tolist() for name, value in report.items()}
        self.record("ffn", **values)

    def end_phase(self, *, validated: bool) -> None:
        """Validates, switches to the next phase if there is one, saves for good."""
        if not validated:
            self.validate()
        last = self.phase_index + 1 == len(self.phases)
        if not last:
            self.switch(self.phase, self.phase_index + 1)
        self.save(permanent=True, blocking=True)

    def switch(self, before: Phase, index: int) -> None:
        """Brings a state of the phase `before` to the phase of the number `index`, with
        a validation on both sides."""
        after = self.phases[index]
        losses = {
            "before": self.validation_loss(before),
            "before_unmasked": self.validation_loss(before, masks=False),
        }
        self.state = self.run.switch_phase(self.state, before, after)
        losses |= {
            "after": self.validation_loss(after),
            "after_unmasked": self.validation_loss(after, masks=False),
        }
        self.refuse_non_finite(self.step, losses)
        self.phase_index = index
        jump = losses["after"] - losses["before"]
        kinds = {"from": before.kind, "to": self.phase.kind}
        self.record("switch", **kinds, jump=jump, large=jump > JUMP, **losses)

    def recluster_is_due(self) -> bool:
        every = self.config.phases.recluster_every
        has_clusters = self.phase.held.experts is not None
        return has_clusters and self._is_due(every, self.step - self.phase_start())

    def recluster(self) -> None:
        recluster = self.run.recluster(self.phase.held)
        self.state = jax.block_until_ready(recluster(self.state))
        self.record("recluster")

    def save(self, *, permanent: bool = False, blocking: bool = False) -> None:
        begin = time.perf_counter()
        # A failure of the one before is told before anything is said of this one.
        self.checkpoints.wait()
        self.tell_save()
        # First the record: a complete checkpoint then has all records of its step.
        self.record("checkpoint", permanent=permanent)
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
            },
            permanent=permanent,
            blocking=blocking,
        )
        self.is_save_untold = True
        self.saving_seconds += time.perf_counter() - begin

    def tell_save(self) -> None:
        """Tells the observer where the last good checkpoint is, once it is complete."""
        if self.is_save_untold and not self.checkpoints.saving:
            self.is_save_untold = False
            good = self.checkpoints.last_good()
            if good is not None:
                self.observe_only("saved", checkpoint=str(good))

    def check_corpus(self, fingerprint: Any) -> None:
        """Raises ValueError where a checkpoint of these tokens is not of the run's."""
        if fingerprint != self.run.corpus.fingerprint:
            raise ValueError(
                f"the checkpoint was trained on other tokens than "
                f"{self.run.corpus.description}; point --data.text or --data.shards, "
                f"and --data.tokenizer, at those that the run began with"
            )

    def restore(self, branch: Branch | None) -> None:
        """The newest checkpoint, and metrics.jsonl as it was then.

        Raises:
          ValueError: it is of other settings or tokens, or not of the branch named.
        """
        metadata = self.checkpoints.metadata()
        before = from_json(metadata["config"])
        check_resumable(before, self.config, self.folder)
        # Checkpoints of before there was any are of runs that are no branches.
        self.origin = metadata.get("branch")
        if branch is not None:
            branch.check_begun(self.origin, self.folder)
        self.check_corpus(metadata["corpus"])
        step = self.checkpoints.latest_step()
        assert step is not None
        self.check_phase(step, metadata["phase"], metadata["kind"], before.steps)
        self.phase_index = metadata["phase"]
        # Checkpoints of before there was any are of runs that left no phase out.
        self.train_dense(metadata.get("run_dense", ()))
        template = self.run.template(self.phase.held)
        restored = self.checkpoints.restore(template=template)
        self.state, self.step = restored.state, restored.step
        self.batches.set_state(restored.data_state)
        if jax.process_index() == 0:
            kinds = [phase.kind for phase in self.phases]
            kept = records_until(self.metrics_file, restored.step, kinds)
            with self.writing(self.metrics_file):
                write_whole(self.metrics_file, kept)

    def check_phase(self, step: int, index: int, kind: str, steps_before: int) -> None:
        """Raises ValueError where another `steps` moves `step` into another phase."""
        ends = self.run.phase_ends()
        phases = self.phases
        start = ends[index - 1] if 0 < index < len(ends) else 0
        if index < len(ends) and phases[index].kind == kind:
            last = index + 1 == len(ends)
            if start <= step < ends[index] or (last and step == ends[index]):
                return
        plan = ", ".join(
            f"{phase.kind} to step {end}"
            for phase, end in zip(phases, ends, strict=True)
        )
        raise ValueError(
            f"steps={self.config.steps} plans {plan}, but {self.folder} is at step "
            f"{step} in phase {index} ({kind}) of steps={steps_before}; choose steps "
            f"that keep step {step} in that phase, or resume with {steps_before}"
        )

    def record(self, event: str, **values: Any) -> None:
        """Writes a record, and shows it to the observer."""
        record = self.observe_only(event, **values)
        if jax.process_index() == 0:
            with self.writing(self.metrics_file):
                append_record(self.metrics_file, record)

    @contextmanager
    def writing(self, path: Path) -> Iterator[None]:
        """Says of an error which file it was, and what is safe."""
        try:
            yield
        except OSError as error:
            raise OSError(
                f"{path} could not be written ({error}). {self.where_it_is_safe()}; "
                f"free space or repair the disk, then resume"
            ) from error

    def observe_only(self, event: str, **values: Any) -> Record:
        """Of what belongs to this process and not to the run, as a resume does."""
        record = {
            "event": event,
            "step": self.step,
            "phase": self.phase_index,
            "kind": self.phase.kind,
            **values,
        }
        self.observe(record)
        return record
