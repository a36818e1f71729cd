"""The training loop: phases, switches, checkpoints, records.

`train` runs a configuration in a run folder:
  config.json       the resolved settings
  metrics.jsonl     one record per line, each with "event" and "step"
  checkpoints/      see `checkpoint`
  run.lock          held while the run trains
"""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

import jax
import numpy as np

from sparsejax.checkpoints.agreement import TIMEOUT_SECONDS
from sparsejax.checkpoints.checkpoint import Checkpoints
from sparsejax.config import TrainConfig
from sparsejax.config.config_file import check_resumable, read_config, to_json
from sparsejax.data.corpus import Corpus
from sparsejax.distributed.processes import (
    Exchange,
    ProcessLost,
    alone_in,
    is_loss_of_contact,
    until_stopped,
)
from sparsejax.interchange.pretrained import Pretrained
from sparsejax.models.transformer import Transformer
from sparsejax.reports.profile import ProfiledSteps, Profiler
from sparsejax.reports.records import (
    Record,
    check_writable,
    write_whole,
)
from sparsejax.sparsity.patterns import name_of
from sparsejax.switches.growth import same_size
from sparsejax.training.branch import Branch
from sparsejax.training.progress import Progress
from sparsejax.training.resume import begin_or_resume
from sparsejax.training.run import Run
from sparsejax.training.step import TrainState
from sparsejax.training.step_times import StepTimes
from sparsejax.training.throughput import Pace


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of a run that has ended."""

    state: TrainState
    model: Transformer
    corpus: Corpus
    folder: Path
    """The run folder."""
    completed: bool
    """Whether all steps are done; False where the run ended early, with everything
    saved."""
    resume_in_new_process: bool
    """Whether the run ended early after its last sparse phase, to go on in a new
    process: see `train`."""
    checkpoint: Path
    """The last checkpoint."""


def train(
    config: TrainConfig,
    folder: Path,
    *,
    observe: Callable[[Record], None] = lambda record: None,
    stop_after_sparse: bool = False,
    corpus: Corpus | None = None,
    step_times: StepTimes | None = None,
    branch: Branch | None = None,
    init_from: Pretrained | None = None,
    profile: ProfiledSteps | None = None,
) -> Outcome:
    """Trains `config` in `folder`, or continues the run that `folder` holds.

    Every record written to metrics.jsonl is also given to `observe`. On SIGTERM
    or SIGINT (Ctrl-C), to any process of the run, the step is finished and saved, and
    the function returns; a second SIGINT has the effect that it had before this call.

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
    goes on at that step under the settings of `config`: see
    `sparsejax.training.branch`. Where its phase has another sparsity than the state of
    the checkpoint, a switch comes first. It saves at once, and needs the other run no
    more.

    With `init_from` a new run begins at step 0 with the weights of a Hugging Face
    folder and a fresh optimiser. It saves at once, and needs the folder no more.

    With `profile` a trace of these steps is written to `folder`/profile.

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
    if profile is not None:
        profile.check_within(config.steps)
    if branch is not None and init_from is not None:
        raise ValueError(
            f"a run begins as a branch of {branch.folder} or with {init_from.folder}; "
            f"leave one of them out"
        )
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
        until_stopped(run.mesh) as terminated,
    ):
        begun = checkpoints.latest_step()
        if begun is None and branch is not None:
            begun = branch.step
        if profile is not None and (begun or 0) < config.steps:
            profile.check_ahead(begun or 0)
        profiler = Profiler(folder, profile)
        loop = _Loop(run, folder, checkpoints, observe, stop_after_sparse, profiler)
        begin_or_resume(loop, step_times, branch, init_from)
        loop.pace.start(loop.step)
        if jax.process_index() == 0:
            with loop.writing(saved):
                write_whole(saved, json.dumps(to_json(config), indent=2) + "\n")
        return loop.finish(terminated)


class _Loop(Progress):
    """A run inside `train`, from its first step to its last."""

    def __init__(
        self,
        run: Run,
        folder: Path,
        checkpoints: Checkpoints,
        observe: Callable[[Record], None],
        stop_after_sparse: bool,
        profiler: Profiler,
    ) -> None:
        super().__init__(run, folder, checkpoints, observe, stop_after_sparse)
        self.pace = Pace(run)
        self.profiler = profiler

    def finish(self, terminated: Callable[[], bool]) -> Outcome:
        """Runs to the last step, or to the step in which it is told to stop, and
        returns how the run ended."""
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
        finally:
            self.profiler.close()

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
            with self.profiler.around(self.step + 1, self.state):
                report = self.do_step(tokens)
            self.step += 1
            traced = self.profiler.end(self.step, report)
            if traced is not None:
                self.observe_only("profile", folder=str(traced))
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
                loss = None
                if evaluate:
                    loss = self.validate()
                    self.look_at_ffns(masks)
                if recluster:
                    self.recluster()
                if at_end:
                    self.end_phase(loss)
                elif save or stopping:
                    self.save(blocking=stopping)
            if at_end:
                self.pace.start(self.step)
                if self.stop_after_sparse and not stopping:
                    left_sparse = self.left_sparse_kernels() and self.is_long()
                    stopping = left_sparse
        self.checkpoints.wait()
        self.tell_save()
        if left_sparse:
            # SIGTERM may have come in the wait. Several processes answer for the call
            # before, and so are asked twice.
            left_sparse = not any([terminated(), terminated()])
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
        """Takes the next optimiser step, with the sparsity that it has in its phase,
        and returns its report."""
        sparsity = self.phase.sparsity_of(self.step + 1 - self.phase_start())
        step = self.run_of_phase.step(sparsity, self.phase.held)
        with self.pace.compiling(sparsity):
            self.state, report = step(self.state, tokens)
        return report

    def left_sparse_kernels(self) -> bool:
        """Returns whether the run has just left a phase that ran on sparse tensor cores
        for a dense one."""
        at_the_end = self.step == self.config.steps
        if at_the_end or self.phase_index == 0 or not self.phase.is_dense:
            return False
        before = self.phases[self.phase_index - 1].sparsities
        decisions = [d for sparsity in before for d in self.pace.decisions(sparsity)]
        return any(decision.on_sparse_cores for decision in decisions)

    def is_long(self) -> bool:
        """Returns whether the dense steps from here to the next sparse phase take
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
        """Raises NonFiniteLoss where the loss or the gradient of a step is not finite.
        It is called before anything of the step is saved: a NaN gradient behind a
        finite loss would be in the masters."""
        self.refuse_non_finite(step, {name: float(x) for name, x in report.items()})

    def log(self, report: dict[str, jax.Array]) -> None:
        speed = self.pace.of_steps(self.step, self.phase)
        self.record(
            "step",
            loss=float(report["loss"]),
            gradient_norm=float(report["gradient_norm"]),
            sparse=not self.phase.is_dense,
            **self.own_size(),
            learning_rate=self.learning_rate_of(self.step - 1),
            compiling_seconds=self.pace.take_compiling_seconds(),
            saving_seconds=self.saving_seconds,
            **speed,
        )
        self.saving_seconds = 0.0

    def own_size(self) -> dict[str, int | str]:
        """Returns the size of the phase's model where it is not the run's, and its
        precision where that is not the compute dtype."""
        model = self.run_of_phase.config.model
        own: dict[str, int | str] = {}
        if model.precision != "dtype":
            own["precision"] = model.precision
        if same_size(model, self.run.config.model):
            return own
        if model.static_weights is not None:
            own["static_weights"] = name_of(model.static_weights)
        return {"d_hidden": model.d_hidden, "layers": model.layers, **own}

    def validate(self) -> float:
        """Records the validation loss of the present state, and returns it."""
        begin = time.perf_counter()
        own: dict[str, list[float]] = {}
        if self.step == self.config.steps:
            # What is drawn from the last loss needs its spread over the batches.
            of = self.phase
            losses = self.run_of_phase.batch_losses(self.state, of.sparsity, of.held)
            loss = float(np.mean(losses))
            own = {"batch_losses": [float(each) for each in losses]}
        else:
            loss = self.validation_loss(self.phase)
        self.refuse_non_finite(self.step, {"validation_loss": loss})
        self.record("validation", loss=loss, **own, seconds=time.perf_counter() - begin)
        return loss

    def look_at_ffns(self, masks_before: list[jax.Array] | None) -> None:
        begin = time.perf_counter()
        model = self.model()
        tokens = self.run.sample_of_validation(tokens=4096)
        report = dict(self.run.statistics(model, tokens))
        if masks_before:
            after = self.run.masks(model)
            report["flip_rate"] = self.run.flip_rate(masks_before, after)
        values = {name: np.asarray(value).tolist() for name, value in report.items()}
        self.record("ffn", **values, seconds=time.perf_counter() - begin)

    def end_phase(self, loss: float | None) -> None:
        """Validates, unless `loss` is the validation loss of this step, switches to the
        next phase if there is one, and saves for good, while the next steps run."""
        if loss is None:
            loss = self.validate()
        last = self.phase_index + 1 == len(self.phases)
        if not last:
            self.switch(self.phase, self.phase_index + 1, loss)
        self.save(permanent=True)

    def recluster_is_due(self) -> bool:
        every = self.config.phases.recluster_every
        has_clusters = self.phase.held.experts is not None
        return has_clusters and self._is_due(every, self.step - self.phase_start())

    def recluster(self) -> None:
        begin = time.perf_counter()
        recluster = self.run.recluster(self.phase.held)
        self.state = jax.block_until_ready(recluster(self.state))
        self.record("recluster", seconds=time.perf_counter() - begin)
