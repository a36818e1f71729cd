"""The training loop: phases, switches, checkpoints, records.

`train` runs a configuration in a run folder:
  config.json       the resolved settings
  metrics.jsonl     one record per line, each with "event" and "step"
  checkpoints/      see `checkpoint`
"""

import json
import math
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sparsejax import metrics
from sparsejax.checkpoint import Checkpoints
from sparsejax.config import TrainConfig, check_resumable, from_json, to_json
from sparsejax.data import Corpus, unigram_loss
from sparsejax.model import Transformer
from sparsejax.recipe import Phase
from sparsejax.train import Run, TrainState, learning_rate

JUMP = 0.1
"""Nats by which the loss may rise at a switch before tail steps are spent on repair
(found in our study of the recipe, 27 M parameters)."""

Record = dict[str, Any]


class NonFiniteLoss(RuntimeError):
    """A loss or a gradient became NaN or infinite; the run stopped, overwriting
    nothing."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run ended."""

    state: TrainState
    model: Transformer
    corpus: Corpus
    completed: bool
    """False when SIGTERM ended it early, with everything saved."""


def train(
    config: TrainConfig,
    folder: Path,
    *,
    observe: Callable[[Record], None] = lambda record: None,
) -> Outcome:
    """Trains `config` in `folder`, or continues the run that `folder` holds.

    Every record written to metrics.jsonl is also given to `observe`. On SIGTERM the
    step is finished and saved, and the function returns.

    Raises:
      NonFiniteLoss: names step, phase and the last good checkpoint.
      ValueError: settings or data that do not fit, or a folder of another run.
    """
    saved = folder / "config.json"
    if saved.exists():
        check_resumable(from_json(json.loads(saved.read_text())), config, folder)
    run = Run(config)
    folder.mkdir(parents=True, exist_ok=True)
    _write(saved, json.dumps(to_json(config), indent=2) + "\n")
    with (
        Checkpoints(
            folder / "checkpoints", keep=config.keep_checkpoints
        ) as checkpoints,
        _until_sigterm() as terminated,
    ):
        return _Loop(run, folder, checkpoints, observe).finish(terminated)


class _Loop:
    """The state of a running `train`."""

    def __init__(
        self,
        run: Run,
        folder: Path,
        checkpoints: Checkpoints,
        observe: Callable[[Record], None],
    ) -> None:
        self.run = run
        self.config = run.config
        self.checkpoints = checkpoints
        self.observe = observe
        self.folder = folder
        self.metrics_file = folder / "metrics.jsonl"
        self.batches = run.batches()
        self.peak = metrics.dense_peak(self.config.model.dtype)
        if checkpoints.latest_step() is None:
            self.step = self.phase_index = 0
            self.state = run.initial_state()
            self.metrics_file.write_text("")
            self.record("start", unigram_loss=unigram_loss(run.corpus))
        else:
            self.restore()
        self.clock = _Clock(self.step)

    @property
    def phase(self) -> Phase:
        return self.run.phases[self.phase_index]

    def finish(self, terminated: Callable[[], bool]) -> Outcome:
        """Runs to the last step, or to the step in which SIGTERM arrives."""
        ends = self.run.phase_ends()
        pending: tuple[int, dict] | None = None
        stopping = False
        while self.step < self.config.steps and not stopping:
            masks = None
            if self._is_due(self.config.eval_every, self.step + 1):
                # Waits for the step before: its time must not count as looking.
                if pending is not None:
                    self.check(*pending)
                    pending = None
                with self.clock.stopped():
                    model = self.run.model(self.state, self.phase.sparsity)
                    masks = jax.block_until_ready(self.run.masks(model))
            tokens = next(self.batches)["tokens"]
            self.state, report = self.run.step(self.phase.sparsity)(self.state, tokens)
            self.step += 1
            # The step before is looked at while this one runs.
            if pending is not None:
                self.check(*pending)
            pending = self.step, report

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
            with self.clock.stopped():
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
                self.clock = _Clock(self.step)
        self.checkpoints.wait()
        return Outcome(
            state=self.state,
            model=self.run.model(self.state, self.phase.sparsity),
            corpus=self.run.corpus,
            completed=self.step == self.config.steps,
        )

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
        good = self.checkpoints.latest_step()
        where = "there is no checkpoint yet"
        if good is not None:
            where = f"the last good checkpoint is {self.checkpoints.path(good)}"
        texts = {name: str(value) for name, value in values.items()}
        self.record("non_finite_loss", at=step, **texts)
        raise NonFiniteLoss(
            f"{', '.join(f'{name}={text}' for name, text in texts.items())} at step "
            f"{step}, phase {self.phase_index} ({self.phase.kind}); {where}. Nothing "
            f"was overwritten. Start anew with a lower optimizer.peak_learning_rate, "
            f"or look at the data around this step"
        )

    def log(self, report: dict[str, jax.Array]) -> None:
        rate = self.clock.tokens_per_second(self.step, self.config.tokens_per_step)
        tokens = self.config.tokens_per_step // self.config.micro_batches
        decisions = metrics.ffn_decisions(
            self.config.model, self.phase.sparsity, tokens, self.config.backend
        )
        length = self.config.data.sequence_length
        schedule = learning_rate(self.config.optimizer, self.config.steps)
        speed = metrics.speed(self.config.model, length, decisions, rate, self.peak)
        self.record(
            "step",
            loss=float(report["loss"]),
            gradient_norm=float(report["gradient_norm"]),
            learning_rate=float(jnp.asarray(schedule(self.step - 1))),
            **(speed if math.isfinite(rate) else {}),
        )

    def validate(self) -> None:
        loss = self.run.validate(self.state, self.phase.sparsity)
        self.refuse_non_finite(self.step, {"validation_loss": loss})
        self.record("validation", loss=loss)

    def look_at_ffns(self, masks_before: list[jax.Array] | None) -> None:
        model = self.run.model(self.state, self.phase.sparsity)
        sequences = max(1, 4096 // self.config.data.sequence_length)
        tokens = self.run.validation[0][:sequences, :-1]
        report = dict(self.run.statistics(model, tokens))
        if masks_before:
            after = self.run.masks(model)
            report["flip_rate"] = metrics.mask_flip_rate(masks_before, after)
        values = {name: np.asarray(value).tolist() for name, value in report.items()}
        self.record("ffn", **values)

    def end_phase(self, *, validated: bool) -> None:
        """Validates, switches to the next phase if there is one, saves for good."""
        before = self.phase.sparsity
        if not validated:
            self.validate()
        last = self.phase_index + 1 == len(self.run.phases)
        if last:
            self.save(permanent=True, blocking=True)
            return
        losses = {
            "before": self.run.validate(self.state, before),
            "before_unmasked": self.run.validate(self.state, before, masks=False),
        }
        following = self.run.phases[self.phase_index + 1]
        after = following.sparsity
        self.state = self.run.switch(self.state, before, after)
        losses |= {
            "after": self.run.validate(self.state, after),
            "after_unmasked": self.run.validate(self.state, after, masks=False),
        }
        self.refuse_non_finite(self.step, losses)
        self.phase_index += 1
        jump = losses["after"] - losses["before"]
        self.record("switch", to=following.kind, jump=jump, large=jump > JUMP, **losses)
        self.save(permanent=True, blocking=True)

    def recluster_is_due(self) -> bool:
        start = sum(phase.steps for phase in self.run.phases[: self.phase_index])
        every = self.config.phases.recluster_every
        has_clusters = self.phase.sparsity.experts is not None
        return has_clusters and self._is_due(every, self.step - start)

    def recluster(self) -> None:
        recluster = self.run.recluster(self.phase.sparsity)
        self.state = jax.block_until_ready(recluster(self.state))
        self.record("recluster")

    def save(self, *, permanent: bool = False, blocking: bool = False) -> None:
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
            },
            permanent=permanent,
            blocking=blocking,
        )

    def restore(self) -> None:
        """The newest checkpoint, and metrics.jsonl as it was then."""
        metadata = self.checkpoints.metadata()
        check_resumable(from_json(metadata["config"]), self.config, self.folder)
        if metadata["corpus"] != self.run.corpus.fingerprint:
            raise ValueError(
                f"the checkpoint was trained on other tokens than "
                f"{self.run.corpus.description}; restore the text and the tokenizer "
                f"that the run began with"
            )
        self.phase_index = metadata["phase"]
        template = self.run.template(self.phase.sparsity)
        restored = self.checkpoints.restore(template=template)
        self.state, self.step = restored.state, restored.step
        self.batches.set_state(restored.data_state)
        lines = self.metrics_file.read_text().splitlines()
        kept = [line for line in lines if _is_before(line, restored.step)]
        _write(self.metrics_file, "".join(f"{line}\n" for line in kept))

    def record(self, event: str, **values: Any) -> None:
        record = {
            "event": event,
            "step": self.step,
            "phase": self.phase_index,
            "kind": self.phase.kind,
            **values,
        }
        with self.metrics_file.open("a") as file:
            file.write(json.dumps(record) + "\n")
        self.observe(record)


def _is_before(line: str, step: int) -> bool:
    try:
        return json.loads(line)["step"] <= step
    except ValueError:
        return False  # cut off by the end of the process


class _Clock:
    """Tokens per second of the steps of one phase, without what is not a step."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.start: float | None = None

    def tokens_per_second(self, step: int, tokens_per_step: int) -> float:
        """Since the last call; NaN at the first one, for the first step compiles."""
        now = time.perf_counter()
        rate = math.nan
        if self.start is not None and step > self.step:
            rate = (step - self.step) * tokens_per_step / (now - self.start)
        self.start, self.step = now, step
        return rate

    @contextmanager
    def stopped(self) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        if self.start is not None:
            self.start += time.perf_counter() - begin


@contextmanager
def _until_sigterm() -> Iterator[Callable[[], bool]]:
    """A function that says whether SIGTERM has arrived."""
    arrived = []
    try:
        previous = signal.signal(signal.SIGTERM, lambda *_: arrived.append(True))
    except ValueError:  # not the main thread: the host program handles signals
        yield lambda: False
        return
    try:
        yield lambda: bool(arrived)
    finally:
        signal.signal(signal.SIGTERM, previous)


def _write(path: Path, text: str) -> None:
    """Whole or not at all."""
    draft = path.with_suffix(".draft")
    draft.write_text(text)
    draft.replace(path)
