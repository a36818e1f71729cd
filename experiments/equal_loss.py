"""Computes what the runs of a comparison are worth in dense tokens and in dense
seconds.

    uv run experiments/equal_loss.py runs/ladder-5m
    uv run experiments/equal_loss.py runs/ladder-5m \\
        --speed two-of-eight=1.44:1.42-1.46 --speed-from "bench_step, llama-1b, H200"
    uv run experiments/equal_loss.py experiments/results/direct-57m-linux \\
        --draw two-of-eight narrow

The dense runs of at least three lengths, all cooled down, give the loss of the dense
model against its tokens, L = E + A D^-b (`worth/dense_curve.py`). For each other
arm and each of its lengths D:

    D_eq        the tokens after which the dense model has the same loss
    R_tokens    D / D_eq
    R           seconds of the arm to its loss / seconds of the dense model to that loss
    R_at_most   seconds of the arm / seconds of the longest dense run, where the arm
                ended below it: what R is less than without any curve
    R_wall      the same of all wall-clock seconds of the runs
    R_own       R, but over the dense arm whose model has as many layers and neurons as
                the sparse arm's own: what sparsity alone is worth in a model that is
                given; an arm without sparse steps has none
    R_best      R, but over the dense arm, of whatever size, that needs the fewest
                seconds to that loss (`worth/dense_rivals.py`)

R_own and R_best have a star where that arm has no runs of both less and more, and are
only the least that they can be where a dense arm of a single length seems to pass the
loss in fewer seconds, with what they likely are, if that arm's loss falls as others'
do.

Below R = 1 the arm is worth its time. Where every run had its device for itself, one
kind of device, R takes the seconds that the steps took (`measured` is true), and R_wall
those from the first to the last of the run, with compilation, validation, clustering
and saves. Everywhere else R takes FLOPs: a step of another model costs its share of the
dense model's, and a sparse step is as many times as fast as `--speed` says for its arm,
and there is no R_wall. An arm with sparse steps and neither has no R, but the speed
from which on it would break even.

A speed of a step of `llama-1b` goes with FLOPs of small models that read bytes only
roughly: their FFNs are a larger part of a step. With `--widths-of llama-1b --device
"NVIDIA H200"` a dense step of each arm costs the seconds that `sparsejax plan` predicts
for its shape at that preset's widths (`worth/step_costs.py`), and nothing is taken
from a clock but the speeds.

The 90 % interval is a bootstrap over the seeds and, where the records have them, over
the batches of the last validation, the same ones for all runs; and over the speed where
`--speed` gives its interval too. What a seed adds to the losses of all arms alike is
fitted and left out; the spread that is left is pooled over all arms and lengths with
two seeds or more. Without any there is no interval.

It runs on a CPU in seconds, and prints a table. FOLDER/equal_loss.png shows the losses
against seconds, and R_best against tokens per parameter (of the dense model, without
embedding and head); `--results` takes a row per arm and length.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import tyro
from rich.console import Console
from rich.table import Table

from experiments.bench.rows import append_rows
from experiments.command_line import run_script
from experiments.comparing.finished_runs import (
    FinishedRun,
    baseline_arm,
    read_finished,
)
from experiments.worth.equal_loss_figure import plot_equal_loss
from experiments.worth.equal_loss_rows import Key, Speed, grouped, rows_of
from experiments.worth.row import Row
from experiments.worth.step_costs import AtWidths
from pallas_kernels.device import Device
from sparsejax.config import PresetName
from sparsejax.reports.provenance import commit
from sparsejax.terminal import console

WIDTH_OF_TABLE = 140
"""The columns that the table takes where it is printed to no terminal."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of the analysis: which comparison, and how fast its sparse steps are."""

    folder: tyro.conf.Positional[Path]
    """Folder of a comparison that experiments/compare_recipes.py has written."""
    reference: str | None = None
    """Arm of the dense model. Default: that of the comparison's baseline."""
    speed: tuple[str, ...] = ()
    """Speeds as ARM=S or ARM=S:LOW-HIGH: a sparse step of that arm is S times as fast
    as its dense step, with a 90 % interval from LOW to HIGH."""
    speed_from: str | None = None
    """Source of these speeds, such as a row of bench_step."""
    widths_of: PresetName | None = None
    """Preset at whose widths dense steps cost what `sparsejax plan` predicts. None:
    they cost what was measured, or their FLOPs."""
    device: str | None = None
    """With --widths-of: name of the GPU, as "NVIDIA H200"."""
    draw: tuple[str, ...] | None = None
    """Arms that the figure has beside the dense model. None: all that have an R, the
    sparse ones first, five at most."""
    seed: int = 0
    """Seed of the bootstrap."""
    results: Path = Path("runs/equal_loss.jsonl")
    """File to which the rows are added."""

    def speeds(self) -> dict[str, Speed]:
        """Returns the speeds by arm. Raises ValueError where a speed is none, or has no
        source."""
        speeds = {}
        for text in self.speed:
            arm, _, number = text.rpartition("=")
            try:
                speeds[arm] = Speed.read(number)
            except ValueError:
                arm = ""
            if not arm:
                raise ValueError(
                    f"--speed {text} must be ARM=S or ARM=S:LOW-HIGH with positive "
                    f"numbers and S between LOW and HIGH, such as "
                    f"two-of-eight=1.44:1.42-1.46"
                )
        if bool(speeds) != bool(self.speed_from):
            raise ValueError(
                "--speed and --speed-from belong together: a speed says which figure "
                "it is; give both or none"
            )
        return speeds

    def at_widths(
        self, groups: Mapping[Key, Sequence[FinishedRun]], reference: str
    ) -> AtWidths | None:
        """Returns the widths at which steps are counted. Raises ValueError where the
        preset or the GPU is given without the other, or where nothing is known of that
        GPU."""
        if (self.widths_of is None) != (self.device is None):
            raise ValueError(
                "--widths-of and --device belong together: steps of a preset are "
                "predicted for a GPU; give both or none"
            )
        if self.widths_of is None or self.device is None:
            return None
        models = [run.config.model for of in groups.values() for run in of]
        dense = [
            of[0].config.model for (arm, _), of in groups.items() if arm == reference
        ]
        return AtWidths(
            preset=self.widths_of,
            device=Device.named(self.device),
            # A reference without runs is refused where the rows are made.
            reference=dense[0] if dense else models[0],
            most_layers=max(model.layers for model in models),
        )


def main(config: Config, command: str) -> list[Row]:
    """Prints the table, draws the figure, adds the rows to the file, and returns them.

    Raises:
      ValueError: no comparison; no dense curve; a speed of an arm that is not there,
        or one to draw; widths at which no step can be predicted.
    """
    speeds = config.speeds()
    runs, unfinished = read_finished(config.folder)
    reference = config.reference or baseline_arm(config.folder)
    for place, why in unfinished.items():
        console.say(f"{place}: {why}; left out")
    groups = grouped(runs)
    rows = rows_of(
        groups,
        reference,
        speeds,
        config.speed_from,
        comparison=config.folder.name,
        command=command,
        analysed_with=commit(),
        at_widths=config.at_widths(groups, reference),
        seed=config.seed,
    )
    drawn = _drawn(config, rows, reference)
    on_terminal = console.STDOUT.is_terminal
    printer = console.STDOUT if on_terminal else Console(width=WIDTH_OF_TABLE)
    printer.print(table_of(rows, reference))
    if all(row.R_low is None for row in rows):
        console.say("no arm has two seeds of one length: no interval")
    console.say(plot_equal_loss(config.folder, list(map(asdict, drawn)), reference))
    append_rows(map(asdict, rows), config.results)
    return rows


def _drawn(config: Config, rows: Sequence[Row], reference: str) -> list[Row]:
    """Returns the rows of the arms that the figure has. Raises ValueError where one of
    those that are asked for has no row."""
    if config.draw is None:
        return list(rows)
    arms = {row.arm for row in rows}
    for arm in config.draw:
        if arm not in arms:
            raise ValueError(
                f"--draw {arm} is no arm of {config.folder}; it has "
                f"{', '.join(sorted(arms))}"
            )
    return [row for row in rows if row.arm in (reference, *config.draw)]


def table_of(rows: Sequence[Row], reference: str) -> Table:
    """Returns the table that is printed, a line per row."""
    table = Table(
        title=f"to the loss of each arm: tokens and seconds, over those of {reference}"
    )
    table.add_column("arm", overflow="fold", min_width=12)
    names = ("tokens/\nparam", "loss", "D_eq/\nparam", "R_tokens", "R", "seconds")
    for name in (*names, "R_wall", "R_own", "R_best", "breaks\neven at", "seeds"):
        # A terminal that is too narrow breaks numbers, and cuts none short.
        table.add_column(name, justify="right", overflow="fold")
    for row in rows:
        per = row.tokens_per_parameter / row.tokens
        equal = "never"
        if row.dense_tokens is not None:
            mark = " *" if row.extrapolated else ""
            equal = f"{row.dense_tokens * per:.1f}{mark}"
        speed = "" if row.speed is None else f" at {row.speed:g}x"
        # By FLOPs: beside measured seconds it would be another answer than R.
        needed = None if row.measured else row.break_even_speed
        table.add_row(
            row.arm,
            f"{row.tokens_per_parameter:.1f}",
            f"{row.loss:.4f}",
            equal,
            with_interval(row.R_tokens, row.R_tokens_low, row.R_tokens_high),
            seconds_ratio(row),
            "measured" if row.measured else f"{row.speed_from or ''}{speed}",
            with_interval(row.R_wall, row.R_wall_low, row.R_wall_high),
            over_dense_arm(row, "own"),
            over_dense_arm(row, "best"),
            "" if needed is None else f"{needed:.2f}x",
            str(row.seeds),
        )
    table.caption = (
        "* outside the lengths of the dense runs, in R_own and R_best those of that arm"
    )
    return table


def seconds_ratio(row: Row) -> str:
    """Returns R as the table has it, with what it is at most where that is known."""
    ratio = with_interval(row.R, row.R_low, row.R_high)
    bound = "" if row.R_at_most is None else f"\nat most {row.R_at_most:.3f}"
    return f"{ratio}{bound}"


def over_dense_arm(row: Row, name: Literal["own", "best"]) -> str:
    """Returns R_own or R_best as the table has it, with the name of the dense arm."""
    of = asdict(row)
    with_ends = lambda ratio: with_interval(
        *(of[f"{ratio}{end}"] for end in ("", "_low", "_high"))
    )
    ratio, dense = with_ends(f"R_{name}"), of[f"{name}_dense"]
    mark = " *" if of[f"{name}_extrapolated"] else ""
    if not ratio:
        return ""
    if not of[f"{name}_is_least"]:
        return f"{ratio}{mark}\n{dense}"
    likely = with_ends(f"R_{name}_likely")
    return f"at least {ratio}{mark}\n{dense}\nlikely {likely}"


def with_interval(value: float | None, low: float | None, high: float | None) -> str:
    """Returns a ratio as the table has it, with its 90 % interval below it where there
    is one."""
    if value is None:
        return ""
    if low is None or high is None:
        return f"{value:.3f}"
    return f"{value:.3f}\n{low:.3f}-{high:.3f}"


def run(arguments: list[str]) -> int:
    """Runs the command and returns its exit status."""
    script = "experiments/equal_loss.py"
    return run_script(main, Config, arguments, script=script, description=__doc__)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
