"""Computes what the runs of a comparison are worth in dense tokens and in dense
seconds.

    uv run experiments/equal_loss.py runs/ladder-5m
    uv run experiments/equal_loss.py runs/ladder-5m \\
        --speed two-of-eight=1.44 --speed-from "bench_step, llama-1b, H200"

The dense runs of at least three lengths, all cooled down, give the loss of the dense
model against its tokens, L = E + A D^-b (`comparing/dense_curve.py`). For each other
arm and each of its lengths D:

    D_eq        the tokens after which the dense model has the same loss
    delta       ln(D / D_eq)
    R           seconds of the arm to its loss / seconds of the dense model to that loss

Below R = 1 the arm is worth its time. Where every run had its device for itself, one
kind of device, R takes the seconds that the steps took (`measured` is true). Everywhere
else it takes FLOPs: a step of another model costs its share of the dense model's, and a
sparse step is as many times as fast as `--speed` says for its arm. An arm with sparse
steps and neither has no R, but the speed from which on it would break even.

The 90 % interval is a bootstrap over the seeds and, where the records have them, over
the batches of the last validation, the same ones for all runs. The spread over seeds is
pooled over all arms and lengths with two seeds or more; without any there is no
interval.

It runs on a CPU in seconds, and prints a table. FOLDER/equal_loss.png shows R against
tokens per parameter (of the dense model, without embedding and head), and `--results`
takes a row per arm and length.
"""

import math
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import tyro
from jaxtyping import Float64
from rich.table import Table

from experiments.bench.rows import append_rows
from experiments.comparing.dense_curve import DenseCurves
from experiments.comparing.finished_runs import FinishedRun, baseline_arm, read_finished
from experiments.plot import plot_equal_loss
from experiments.running import console
from sparsejax.config import ModelConfig
from sparsejax.cost_model import parameter_count, relative_flops
from sparsejax.reports.provenance import commit

REPLICATES = 2000
INTERVAL = (5.0, 95.0)
"""The percentiles of the replicates between which 90 % of them lie."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of the analysis: which comparison, and how fast its sparse steps are."""

    folder: tyro.conf.Positional[Path]
    """Folder of a comparison that experiments/compare_recipes.py has written."""
    reference: str | None = None
    """Arm of the dense model. Default: that of the comparison's baseline."""
    speed: tuple[str, ...] = ()
    """Speeds as ARM=S: a sparse step of that arm is S times as fast as its dense
    step."""
    speed_from: str | None = None
    """Source of these speeds, such as a row of bench_step."""
    seed: int = 0
    """Seed of the bootstrap."""
    results: Path = Path("runs/equal_loss.jsonl")
    """File to which the rows are added."""

    def speeds(self) -> dict[str, float]:
        """Returns the speeds by arm. Raises ValueError where a speed is none, or has no
        source."""
        speeds = {}
        for text in self.speed:
            arm, _, number = text.rpartition("=")
            try:
                speeds[arm] = float(number)
            except ValueError:
                speeds[arm] = math.nan
            if not arm or not 0 < speeds[arm] < math.inf:
                raise ValueError(
                    f"--speed {text} must be ARM=S with a positive S, such as "
                    f"two-of-eight=1.44"
                )
        if bool(speeds) != bool(self.speed_from):
            raise ValueError(
                "--speed and --speed-from belong together: a speed says which figure "
                "it is; give both or none"
            )
        return speeds


@dataclass(frozen=True, kw_only=True)
class Row:
    """One arm at one length, over its seeds."""

    comparison: str
    arm: str
    parameters: int
    """The number of parameters of the arm's model at the end, without embedding and
    head."""
    tokens: int
    tokens_per_parameter: float
    """The arm's tokens over the parameters of the dense model."""
    loss: float
    """The mean loss over the seeds, in nats per token."""
    dense_tokens: float | None
    """The tokens D_eq; None where the dense curve never has this loss."""
    delta: float | None
    extrapolated: bool
    """Whether D_eq is below the shortest or above the longest dense run."""
    sparse_share: float
    """The share q of the steps that are sparse."""
    seconds: float | None
    """The measured seconds of the arm's steps, a mean over the seeds; None where not
    known."""
    speed: float | None
    """How many times as fast as a dense step a sparse one is; None where it was not
    given."""
    speed_from: str | None
    """The source of R's seconds: "measured", that of `speed`, or "FLOPs"."""
    break_even_speed: float | None
    """The speed of a sparse step at which R is 1; None where there is none."""
    R: float | None
    R_low: float | None
    R_high: float | None
    measured: bool
    side_by_side: int
    """The number of runs that shared a device while these were trained."""
    seeds: int
    device: str | None
    commit: str | None
    """The commit that the runs were trained with."""
    command: str
    analysed_with: str | None
    """The commit of this script."""


type Key = tuple[str, int]
"""The arm of a run, and its number of tokens."""


def main(config: Config, command: str) -> list[Row]:
    """Prints the table, draws the figure, adds the rows to the file, and returns them.

    Raises:
      ValueError: no comparison; no dense curve; a speed of an arm that is not there.
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
        seed=config.seed,
    )
    console.STDOUT.print(table_of(rows, reference))
    if all(row.R_low is None for row in rows):
        console.say("no arm has two seeds of one length: no interval")
    append_rows(map(asdict, rows), config.results)
    others = [asdict(row) for row in rows if row.arm != reference]
    console.say(plot_equal_loss(config.folder, others))
    return rows


def grouped(runs: Sequence[FinishedRun]) -> dict[Key, list[FinishedRun]]:
    """Returns the runs of one arm and one length together, whatever their seed.

    Raises:
      ValueError: two of them have the same seed.
    """
    groups: dict[Key, list[FinishedRun]] = {}
    for run in runs:
        groups.setdefault((run.arm, run.tokens), []).append(run)
    for (arm, tokens), of in groups.items():
        seeds = [run.seed for run in of]
        if len(set(seeds)) < len(seeds):
            names = ", ".join(dict.fromkeys(run.name for run in of))
            raise ValueError(
                f"arm {arm!r} has several runs of {tokens:,} tokens and one seed "
                f"({names}); give them arms of their own in the comparison file"
            )
    return dict(sorted(groups.items(), key=lambda of: of[0][1]))


def rows_of(
    groups: Mapping[Key, Sequence[FinishedRun]],
    reference: str,
    speeds: Mapping[str, float],
    speed_from: str | None,
    *,
    comparison: str,
    command: str,
    analysed_with: str | None = None,
    seed: int = 0,
) -> list[Row]:
    """Returns a row per group, the rows of the reference first.

    Raises:
      ValueError: no dense curve, or a speed of an arm that is not there.
    """
    arms = dict.fromkeys(arm for arm, _ in groups)
    for name in (reference, *speeds):
        if name not in arms:
            raise ValueError(
                f"{name!r} is no arm with finished runs; there are "
                f"{', '.join(arms) or 'none'}"
            )
    dense = {key: of for key, of in groups.items() if key[0] == reference}
    models = {of.config.model for runs in dense.values() for of in runs}
    if len(models) > 1:
        raise ValueError(
            f"the runs of the reference {reference!r} have {len(models)} different "
            f"models; name the arms in the comparison file so that it has one"
        )
    (model,) = models
    losses = replicates(groups, np.random.default_rng(seed))
    curves = DenseCurves.fit(
        np.array([tokens for _, tokens in dense], np.float64),
        np.stack([losses[key] for key in dense], axis=1),
        np.array([len(of) for of in dense.values()], np.float64),
    )
    dense_runs = [run for of in dense.values() for run in of]
    pace = seconds_per_token(dense_runs)
    has_spread = any(len(of) > 1 for of in groups.values())
    lengths = [tokens for _, tokens in dense]
    rows = []
    for key in (*dense, *(key for key in groups if key not in dense)):
        (arm, tokens), of = key, groups[key]
        equal = curves.tokens(losses[key])
        # Seconds compare where all are of one kind of device.
        alike = len({run.device for run in [*dense_runs, *of]}) == 1
        own_pace = pace if alike else None
        relative, measured = cost(of, model, speeds.get(arm), own_pace)
        ratios = None if relative is None else relative * tokens / equal
        low, high = (None, None)
        if ratios is not None and has_spread:
            low, high = (float(x) for x in np.percentile(ratios[1:], INTERVAL))
        reached = bool(np.isfinite(equal[0]))
        of_speed = speed_from if arm in speeds else "FLOPs"
        if relative is None:
            of_speed = None
        known = [run.seconds for run in of if run.seconds is not None]
        rows.append(
            Row(
                comparison=comparison,
                arm=arm,
                parameters=parameters(of[0].config.model),
                tokens=tokens,
                tokens_per_parameter=tokens / parameters(model),
                loss=float(losses[key][0]),
                dense_tokens=float(equal[0]) if reached else None,
                delta=math.log(tokens / equal[0]) if reached else None,
                extrapolated=not min(lengths) <= equal[0] <= max(lengths),
                sparse_share=of[0].sparse_share,
                seconds=float(np.mean(known)) if len(known) == len(of) else None,
                speed=speeds.get(arm),
                speed_from="measured" if measured else of_speed,
                break_even_speed=break_even(of[0], model, tokens / equal[0]),
                R=None if ratios is None else float(ratios[0]),
                R_low=low,
                R_high=high,
                measured=measured,
                side_by_side=max(run.side_by_side for run in of),
                seeds=len(of),
                device=_all_of(run.device for run in of),
                commit=_all_of(run.commit for run in of),
                command=command,
                analysed_with=analysed_with,
            )
        )
    return rows


def replicates(
    groups: Mapping[Key, Sequence[FinishedRun]], generator: np.random.Generator
) -> dict[Key, Float64[np.ndarray, " replicates"]]:
    """Returns the mean loss of each group: first as it is, then of each bootstrap
    replicate.

    A replicate draws the batches of the validation anew, the same for all runs, where
    all runs record the loss of each. For each of a group's seeds it also draws a
    deviation from the mean, from those of all groups with two seeds or more; they are
    made sqrt(n / (n - 1)) times larger, as many times as a mean over n seeds has made
    them smaller.
    """
    runs = [run for of in groups.values() for run in of]
    counts = {len(run.batch_losses) for run in runs}
    batches = counts.pop() if len(counts) == 1 else 0
    drawn = None
    if batches > 1:
        drawn = generator.integers(batches, size=(REPLICATES, batches))
    deviations = []
    for of in groups.values():
        own = np.array([run.loss for run in of])
        if (n := len(own)) > 1:
            deviations += list((own - own.mean()) * math.sqrt(n / (n - 1)))
    losses = {}
    for key, of in groups.items():
        mean = float(np.mean([run.loss for run in of]))
        replicate = np.full(REPLICATES, mean)
        if drawn is not None:
            by_batch = np.mean([run.batch_losses for run in of], axis=0)
            replicate += by_batch[drawn].mean(axis=1) - by_batch.mean()
        if deviations:
            size = (REPLICATES, len(of))
            replicate += generator.choice(np.array(deviations), size).mean(axis=1)
        losses[key] = np.concatenate([[mean], replicate])
    return losses


def seconds_per_token(runs: Sequence[FinishedRun]) -> float | None:
    """Returns the measured seconds of the dense model's steps per token; None where a
    run has none."""
    seconds = [run.seconds for run in runs]
    if None in seconds:
        return None
    return sum(filter(None, seconds)) / sum(run.tokens for run in runs)


def cost(
    runs: Sequence[FinishedRun],
    model: ModelConfig,
    speed: float | None,
    pace: float | None,
) -> tuple[float | None, bool]:
    """Returns the cost of a token of these runs, in tokens of the dense `model`, and
    whether that was measured: not where a speed is given, nor where runs shared a
    device.

    The cost is None where the runs have sparse steps whose speed is not known.
    """
    seconds = [run.seconds for run in runs if run.seconds is not None]
    if speed is None and pace is not None and len(seconds) == len(runs):
        return sum(seconds) / sum(run.tokens for run in runs) / pace, True
    if speed is None and runs[0].sparse_share > 0:
        return None, False
    dense, sparse = flop_shares(runs[0], model)
    return dense + sparse / (speed or 1.0), False


def flop_shares(run: FinishedRun, model: ModelConfig) -> tuple[float, float]:
    """Returns the FLOPs of a run's dense steps, and those that its sparse steps would
    have if they were dense, over those of the dense `model` in as many steps."""
    length = run.config.data.sequence_length
    dense = sparse = 0.0
    for of in run.stretches:
        share = relative_flops(of.model, model, length) * of.steps / run.config.steps
        dense += (1 - of.sparse_share) * share
        sparse += of.sparse_share * share
    return dense, sparse


def break_even(run: FinishedRun, model: ModelConfig, excess: float) -> float | None:
    """Returns the speed of a sparse step at which R is 1, by FLOPs; None where the run
    has no sparse steps, or where no speed suffices.

    Args:
      excess: D / D_eq.
    """
    dense, sparse = flop_shares(run, model)
    left = (1 / excess if excess > 0 else math.inf) - dense
    return sparse / left if sparse and left > 0 else None


def parameters(model: ModelConfig) -> int:
    """Returns the number of a model's parameters without embedding and head."""
    count = parameter_count(model)
    return count.total - count.embedding - count.head


def _all_of(values) -> str | None:
    return ", ".join(dict.fromkeys(filter(None, values))) or None


def table_of(rows: Sequence[Row], reference: str) -> Table:
    """Returns the table that is printed, a line per row."""
    table = Table(
        title=f"to the loss of each arm: tokens and seconds, over those of {reference}"
    )
    table.add_column("arm")
    names = ("tokens/param", "loss", "D_eq/param", "delta", "R", "90 %", "seconds")
    for name in (*names, "breaks even at", "seeds"):
        table.add_column(name, justify="right")
    for row in rows:
        per = row.tokens_per_parameter / row.tokens
        equal = "never"
        if row.dense_tokens is not None:
            mark = " *" if row.extrapolated else ""
            equal = f"{row.dense_tokens * per:.1f}{mark}"
        interval = ""
        if row.R_low is not None and row.R_high is not None:
            interval = f"{row.R_low:.3f}-{row.R_high:.3f}"
        speed = "" if row.speed is None else f" at {row.speed:g}x"
        table.add_row(
            row.arm,
            f"{row.tokens_per_parameter:.1f}",
            f"{row.loss:.4f}",
            equal,
            "" if row.delta is None else f"{row.delta:+.4f}",
            "" if row.R is None else f"{row.R:.3f}",
            interval,
            "measured" if row.measured else f"{row.speed_from or ''}{speed}",
            "" if row.break_even_speed is None else f"{row.break_even_speed:.2f}x",
            str(row.seeds),
        )
    table.caption = "* outside the lengths of the dense runs"
    return table


def run(arguments: list[str]) -> int:
    """Runs the command and returns its exit status."""
    config = tyro.cli(
        Config, args=arguments, description=__doc__, prog="experiments/equal_loss.py"
    )
    command = shlex.join(["experiments/equal_loss.py", *arguments])
    try:
        main(config, command)
    except (ValueError, OSError) as error:
        return console.fail(error)
    return 0


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
