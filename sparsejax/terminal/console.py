"""The output of a run: how it goes (on a terminal: `live`), the result after; errors.

The plan before it is printed by `printed_plan`.
"""

import logging
import math
import os
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from sparsejax.config import TrainConfig
from sparsejax.terminal import live

DETERMINISTIC = "--xla_gpu_deterministic_ops=true"
"""The flag with which XLA's GPU kernels repeat their bits."""

SPIKE = 100
"""How many times the median of a run's gradient norms a norm has to be for a line to
say so: training goes on, since each step's gradient is clipped, and learns nothing."""

NORMS_BEFORE = 5
"""The least number of gradient norms that have a median worth the name."""

STDOUT = Console(highlight=False)
STDERR = Console(highlight=False, stderr=True)


def quiet_orbax() -> None:
    """Silences orbax, which logs screens of text where a save fails that our one line
    reports."""
    logging.getLogger("absl").setLevel(logging.CRITICAL)


def repeat_bits() -> None:
    """Makes GPU kernels repeat their bits from now on. XLA reads the flag when the
    first array is made, so this is called before."""
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{flags} {DETERMINISTIC}".strip()


def say(text: str, *, style: str | None = None, error: bool = False) -> None:
    """Prints one line, on standard output or standard error, brackets and all."""
    console = STDERR if error else STDOUT
    console.print(text, style=style, soft_wrap=True, markup=False)


def fail(error: Exception, reason: str | None = None) -> int:
    """Prints the error in red on standard error, its type and `reason` (None: its own
    words); returns the exit status of the command that it ends, 1."""
    reason = str(error) if reason is None else reason
    say(f"{type(error).__name__}: {reason}", style="red", error=True)
    return 1


@contextmanager
def progress(config: TrainConfig) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Shows how a run goes inside the block; the function that it yields takes the
    records of `sparsejax.training.train`.

    On a terminal it is the view of `live`; elsewhere a line per record of a step.
    """
    on_terminal = STDOUT.is_terminal
    say_step = partial(_say_step, config.steps)
    shown = live.view(config, STDOUT) if on_terminal else nullcontext(say_step)
    norms: list[float] = []
    with shown as see:

        def observe(record: dict[str, Any]) -> None:
            if on_terminal or record["event"] == "step":
                see(record)
            if record["event"] == "step":
                _say_spike(record, norms)
                norms.append(record["gradient_norm"])
            if (line := _line_of(record)) is not None:
                alarming = record["event"] == "damaged" or record.get("large")
                say(line, style="yellow" if alarming else None)

        yield observe


def _say_step(steps: int, record: dict[str, Any]) -> None:
    """Prints a line about the record of a step."""
    rate = record.get("tokens_per_second", math.nan)
    rate = "-" if math.isnan(rate) else f"{rate:,.0f}"
    where = f"step {record['step']}/{steps} {record['kind']}"
    say(f"{where}: loss {record['loss']:.3f}, {rate} tokens/s")


def _say_spike(record: dict[str, Any], norms: list[float]) -> None:
    """Prints a line about the gradient norm of a step that is far above those before
    it."""
    if len(norms) < NORMS_BEFORE:
        return
    norm, usual = record["gradient_norm"], statistics.median(norms)
    if norm > SPIKE * usual:
        say(
            f"step {record['step']}: gradient norm {norm:.3g}, and the median before "
            f"it {usual:.3g}: if it happens often, the run learns little; try a lower "
            f"--optimizer.peak-learning-rate or a longer warm-up",
            style="yellow",
        )


def _line_of(record: dict[str, Any]) -> str | None:
    step = f"step {record['step']}"
    if record["event"] == "start":
        line = (
            f"data: {record['corpus']}\n"
            f"unigram model: {record['unigram_loss']:.3f} nats per token"
        )
        if "branch" in record:
            trunk = record["branch"]
            line += (
                f"\na branch of {trunk['run']}, from step {trunk['step']}: learning "
                f"rate there {trunk['learning_rate']:.3g}, here "
                f"{record['learning_rate']:.3g}"
            )
            if record.get("run_dense"):
                numbers = ", ".join(map(str, record["run_dense"]))
                line += f"; phase {numbers} is trained dense, as there"
        return line
    if record["event"] == "validation":
        return f"{step} {record['kind']}: validation loss {record['loss']:.4f}"
    if record["event"] == "switch":
        line = (
            f"{step}: switch to {record['to']}; validation loss "
            f"before {record['before']:.4f} (masks off "
            f"{record['before_unmasked']:.4f}), "
            f"after {record['after']:.4f} (masks off {record['after_unmasked']:.4f})"
        )
        if record["large"]:
            line += (
                f"; a jump of {record['jump']:.3f}: the next steps are spent on repair"
            )
        return line
    if record["event"] == "checkpoint" and record["permanent"]:
        return f"{step}: checkpoint, for good"
    if record["event"] == "saved":
        return f"last good checkpoint: {record['checkpoint']}"
    if record["event"] == "profile":
        return f"{step}: trace in {record['folder']}, for XProf"
    if record["event"] == "resume":
        line = f"{step}: continues from {record['checkpoint']}"
        if record.get("run_dense"):
            numbers = ", ".join(map(str, record["run_dense"]))
            line += f"; phase {numbers} is trained dense, which was timed faster"
        return line
    if record["event"] == "damaged":
        return (
            f"{record['checkpoint']} is damaged ({record['reason']}) and set aside; "
            f"the run goes on from step {record['step']}"
        )
    return None


def summarise(records: list[dict[str, Any]]) -> None:
    """Prints the validation loss at the end of every phase, beside the unigram model's,
    as far as the run has records."""
    ends = {r["phase"]: r for r in records if r["event"] == "validation"}
    unigram = [r["unigram_loss"] for r in records if r["event"] == "start"]
    beside = f" (unigram model {unigram[0]:.4f})" if unigram else ""
    table = Table(title=f"validation loss{beside}")
    for name in ("phase", "last step", "loss", "perplexity"):
        table.add_column(name)
    for record in ends.values():
        loss = record["loss"]
        kind, step = record["kind"], str(record["step"])
        perplexity = math.exp(loss) if loss < 700 else math.inf
        table.add_row(kind, step, f"{loss:.4f}", f"{perplexity:.2f}")
    STDOUT.print(table)


RECORDS_OF_SPEED = 3
"""The number of records from which the speed of a phase is told: one alone is noise."""


def say_speedup(records: list[dict[str, Any]]) -> None:
    """Prints how much faster the sparse steps of a run were than dense ones of the same
    model, by the medians of its records; nothing where one of the two has fewer than
    `RECORDS_OF_SPEED` of them in each of its phases."""
    phases_of: dict[bool, dict[int, list[float]]] = {True: {}, False: {}}
    for record in records:
        if (
            record["event"] == "step"
            and {"tokens_per_second", "sparse"} <= record.keys()
            and not {"d_hidden", "layers"} & record.keys()
        ):
            of = phases_of[record["sparse"]].setdefault(record["phase"], [])
            of.append(record["tokens_per_second"])
    enough = lambda rates: len(rates) >= RECORDS_OF_SPEED
    phases_of = {
        sparse: {phase: rates for phase, rates in of.items() if enough(rates)}
        for sparse, of in phases_of.items()
    }
    if not phases_of[True] or not phases_of[False]:
        return
    # The dense phase with the fastest steps: those after sparse ones may be slower.
    medians = {
        sparse: {phase: statistics.median(rates) for phase, rates in of.items()}
        for sparse, of in phases_of.items()
    }
    dense = max(medians[False].values())
    for phase, rate in medians[True].items():
        say(
            f"sparse steps (phase {phase}): {rate:,.0f} tokens/s, dense ones "
            f"{dense:,.0f}: {rate / dense:.2f} times as fast, in this run"
        )


def show_sample(prompt: str, continuation: str) -> None:
    """Prints a greedy continuation of held-out text."""
    say("greedy sample (prompt, then the model):")
    parts = (_printable(prompt), "dim"), (_printable(continuation), "bold")
    STDOUT.print(Text.assemble(*parts))


def _printable(text: str) -> str:
    """Returns the text without control characters: a model of bytes may well write the
    bytes that move a terminal's cursor."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)
