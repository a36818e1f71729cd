"""Predicts R, the seconds to dense's loss over dense's, at sizes that nobody trained.

    uv run experiments/predict_ratio.py runs/equal_loss.jsonl \\
        --arm two-of-eight --speed 1.44:1.42-1.46 --speed-from "bench_step, llama-1b"

It reads rows of `experiments/equal_loss.py`, those of several sizes and lengths, and
fits the excess of tokens of the arm,

    delta = ln(D / D_eq) = a + b ln N + c ln(D / N)

Where the 90 % interval of b holds 0, the dependence on the size is not resolved: the
prediction then takes the rung with the largest excess and no dependence. The ratio of
seconds is

    R = (c_dense + c_sparse / s) exp(delta)

for the costs of the arm's dense and sparse steps and the speed s of a sparse step over
a dense one of the same model, which `--speed` gives: that of this very recipe at the
width that is predicted. The costs are those of the rows at the largest rung, as if all
steps were dense, over those of the dense model: 1 - q and q where the arm has the dense
model's size, for the share q of its steps that are sparse. An arm without sparse steps
costs per token what the largest rung says. The 90 % interval comes from the intervals
of the rows and of the speed.

It runs on a CPU in seconds, prints a table, and `--results` takes a row per size and
length. Every row says that it is predicted, and not measured.
"""

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from rich.table import Table

from experiments.bench.rows import append_rows
from experiments.command_line import run_script
from experiments.worth.bootstrap import INTERVAL, Replicates
from experiments.worth.delta_fit import DeltaFit, Excess
from experiments.worth.equal_loss_rows import Speed
from sparsejax.config import PresetName
from sparsejax.terminal import console


@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of the prediction: of which arm, at which sizes and lengths."""

    rows: tyro.conf.Positional[Path]
    """File of rows of experiments/equal_loss.py."""
    arm: str
    """Arm whose R is predicted."""
    parameters: tuple[float, ...] = (1.8e9, 7.5e9)
    """Parameters of the models to predict for, without embedding and head."""
    tokens_per_parameter: tuple[float, ...] = (20.0, 60.0, 200.0)
    """Lengths to predict for."""
    speed: str | None = None
    """Speed of a sparse step over a dense one as S or S:LOW-HIGH, LOW to HIGH being its
    90 % interval."""
    speed_from: str | None = None
    """Source of that speed, such as a row of bench_step."""
    widths_of: PresetName | None = None
    """Preset at whose widths the rows that are read count steps, as in `equal_loss.py`.
    None: those without, which count FLOPs or measured seconds."""
    seed: int = 0
    """Seed of the bootstrap."""
    results: Path = Path("runs/predicted_ratio.jsonl")
    """File to which the rows are added."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """R of an arm at one size and length, with its 90 % interval."""

    arm: str
    parameters: float
    tokens_per_parameter: float
    delta: float
    R: float
    R_low: float
    R_high: float
    sparse_share: float
    speed: float | None
    speed_from: str | None
    size_slope: float | None
    """b of the fit; None where there is one size only."""
    size_is_resolved: bool
    """Whether the prediction rests on b, and not on the worst rung."""
    rungs: tuple[int, ...]
    """The sizes that were trained."""
    measured: bool
    command: str


def main(config: Config, command: str) -> list[Prediction]:
    """Prints the table, adds the rows to the file, and returns them.

    Raises:
      ValueError: no rows of the arm, a speed that is missing, or rows from which
        nothing can be predicted.
    """
    generator = np.random.default_rng(config.seed)
    rows = rows_of_arm(config.rows, config.arm, config.widths_of)
    fit = DeltaFit.draw(list(map(_excess, rows)), generator)
    cost, sparse_share, speed = cost_per_token(config, rows, generator)
    slope = fit.size_slope()
    predictions = []
    for parameters in config.parameters:
        for length in config.tokens_per_parameter:
            delta = fit.at(parameters, length)
            ratio = cost * np.exp(delta)
            low, high = np.percentile(ratio[1:], INTERVAL)
            predictions.append(
                Prediction(
                    arm=config.arm,
                    parameters=parameters,
                    tokens_per_parameter=length,
                    delta=float(delta[0]),
                    R=float(ratio[0]),
                    R_low=float(low),
                    R_high=float(high),
                    sparse_share=sparse_share,
                    speed=None if speed is None else speed.value,
                    speed_from=config.speed_from,
                    size_slope=None if slope is None else slope[0],
                    size_is_resolved=fit.is_size_resolved,
                    rungs=tuple(fit.sizes),
                    measured=False,
                    command=command,
                )
            )
    console.STDOUT.print(table_of(predictions))
    if not fit.is_size_resolved:
        console.say(
            "the dependence on the size is not resolved: the rung with the largest "
            "excess stands for all sizes"
        )
    append_rows(map(asdict, predictions), config.results)
    return predictions


def rows_of_arm(
    path: Path, arm: str, widths_of: PresetName | None = None
) -> list[dict[str, Any]]:
    """Returns the last row of the arm for each size and length, of those that count
    steps at the widths of a preset, or of those that do not. Rows without an interval,
    of arms with one seed, are named on the console and left out.

    Raises:
      ValueError: the file has no row of the arm, or none with an interval, at those
        widths, or such rows of several GPUs.
    """
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows = _rows_at(path, rows, widths_of)
    arms = dict.fromkeys(row["arm"] for row in rows)
    if arm not in arms:
        raise ValueError(
            f"--arm {arm} has no row in {path}; there are {', '.join(arms) or 'none'}"
        )
    kept = {}
    for row in (row for row in rows if row["arm"] == arm):
        parameters = _dense_parameters(row)
        if row.get("R_tokens_low") is None:
            console.say(
                f"{arm} at {row['tokens_per_parameter']:.1f} tokens per parameter of "
                f"{parameters:,} has no interval; left out"
            )
        else:
            # A file is added to: of two analyses of one length the later one counts.
            kept[parameters, row["tokens"]] = row
    if not kept:
        raise ValueError(
            f"no row of {arm} in {path} has an interval; train a second seed of an "
            f"arm and run experiments/equal_loss.py again"
        )
    gpus = dict.fromkeys(row.get("at_widths") for row in kept.values())
    if len(gpus) > 1:
        raise ValueError(
            f"the rows of {arm} in {path} count steps of different GPUs "
            f"({'; '.join(map(str, gpus))}); make all of them with one --device of "
            f"experiments/equal_loss.py"
        )
    return list(kept.values())


def _rows_at(
    path: Path, rows: Sequence[dict[str, Any]], widths_of: PresetName | None
) -> list[dict[str, Any]]:
    """Returns the rows that count steps at the widths of a preset; for None those that
    count them at no preset's. Raises ValueError where there are only others."""
    preset = lambda row: (row.get("at_widths") or "").partition(",")[0] or None
    found = [row for row in rows if preset(row) == widths_of]
    if rows and not found:
        known = sorted(filter(None, {preset(row) for row in rows}))
        ways = [f"--widths-of {name}" for name in known]
        ways += ["no --widths-of"] * any(preset(row) is None for row in rows)
        asked = f"--widths-of {widths_of}" if widths_of else "no --widths-of"
        raise ValueError(
            f"{path} has no row made with {asked}; give {' or '.join(ways)}, or make "
            f"such rows with experiments/equal_loss.py"
        )
    return found


def _dense_parameters(row: dict[str, Any]) -> int:
    """Returns the parameters of the dense model, which the row's own may differ
    from."""
    return round(row["tokens"] / row["tokens_per_parameter"])


def _excess(row: dict[str, Any]) -> Excess:
    return Excess.of_ratio(
        _dense_parameters(row),
        row["tokens_per_parameter"],
        row["R_tokens"],
        row["R_tokens_low"],
        row["R_tokens_high"],
    )


def cost_per_token(
    config: Config, rows: Sequence[dict[str, Any]], generator: np.random.Generator
) -> tuple[Replicates | float, float, Speed | None]:
    """Returns the cost of a token of the arm in tokens of the dense model, the share of
    its steps that are sparse, and their speed.

    Raises:
      ValueError: an arm with sparse steps without a speed, or a speed without its
        source or of an arm without sparse steps; or as `_costs`.
    """
    largest = max(rows, key=_dense_parameters)
    share = largest["sparse_share"]
    if (config.speed is None) != (config.speed_from is None):
        raise ValueError(
            "--speed and --speed-from belong together: a speed says which figure it "
            "is; give both or none"
        )
    if config.speed is None:
        if share:
            raise ValueError(
                f"{config.arm} has sparse steps, and how fast they are at the sizes to "
                f"predict for is not in {config.rows}; give --speed and --speed-from"
            )
        return largest["R"] / largest["R_tokens"], share, None
    if not share:
        raise ValueError(
            f"--speed {config.speed} is that of sparse steps, of which {config.arm} "
            f"has none; leave it out"
        )
    speed = Speed.read(config.speed)
    dense, sparse = _costs(largest)
    return dense + sparse / speed.replicates(generator), share, speed


def _costs(row: dict[str, Any]) -> tuple[float, float]:
    """Returns the costs of an arm's dense and sparse steps, as in its row.

    Raises:
      ValueError: an older row, without them, of another model than the dense one.
    """
    if "dense_cost" in row:
        return row["dense_cost"], row["sparse_cost"]
    own, dense = row["parameters"], _dense_parameters(row)
    if not math.isclose(own, dense, rel_tol=1e-6):
        raise ValueError(
            f"{row['arm']} has {own:,} parameters, and the dense model {dense:,}, and "
            f"the row does not say what its steps cost; make the rows anew with "
            f"experiments/equal_loss.py"
        )
    return 1 - row["sparse_share"], row["sparse_share"]


def table_of(predictions: Sequence[Prediction]) -> Table:
    """Returns the table that is printed, a line for each size and length."""
    table = Table(title=f"predicted, not measured: R of {predictions[0].arm}")
    for name in ("parameters", "tokens/param", "delta", "R", "90 %"):
        table.add_column(name, justify="right")
    for of in predictions:
        table.add_row(
            f"{of.parameters / 1e9:.3g} B",
            f"{of.tokens_per_parameter:g}",
            f"{of.delta:+.4f}",
            f"{of.R:.3f}",
            f"{of.R_low:.3f}-{of.R_high:.3f}",
        )
    return table


def run(arguments: list[str]) -> int:
    """Runs the command and returns its exit status."""
    script = "experiments/predict_ratio.py"
    return run_script(main, Config, arguments, script=script, description=__doc__)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
