"""Trains the runs of a comparison and sets their validation losses side by side.

The five ablations of arXiv 2503.16672 with their baseline (`tiny`, two seeds: 12 runs,
each of about four minutes on two CPU cores):

    uv run experiments/compare_recipes.py experiments/comparisons/ablations.toml

The same command again skips the runs that have ended, resumes the one that was stopped,
and goes on; `--only NAME` and `--seeds 0` train some of them. Every run is one of
`experiments/pretrain.py`, in FOLDER/NAME/seed-SEED and in a process of its own: what
sparse kernels do to a GPU's clock (experiments/LOG.md, 2026-11-22) would make a dense
run after them slower. At the end: two tables, FOLDER/comparison.png, and one JSON line
per run in FOLDER/rows.jsonl. Rows that are to stay go into a file of the repository,
with `--results experiments/results/compare_recipes.jsonl`.
`experiments/comparison_file.py` tells how a comparison is written.
"""

import json
import math
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import date
from itertools import accumulate
from pathlib import Path

import jax
import tyro
from rich.table import Table

from experiments import console, pretrain, printed_plan
from experiments.comparison_file import Comparison, Trial, read_comparison
from experiments.own_process import Terminated, in_own_process
from experiments.plot import plot_comparison
from experiments.provenance import commit
from experiments.rows import append_rows
from sparsejax.branch import Branch
from sparsejax.checkpoint import Checkpoints
from sparsejax.config import TrainConfig
from sparsejax.config_file import changed_settings, read_config
from sparsejax.loop import NonFiniteLoss
from sparsejax.presets import PRESETS
from sparsejax.recipe import phases
from sparsejax.records import (
    check_writable,
    first_step,
    records_until,
    training_seconds,
    write_whole,
)

AROUND_A_SWITCH = ("before", "before_unmasked", "after", "after_unmasked")
PROVENANCE = ("device", "jax", "commit", "date")


@dataclass(frozen=True, kw_only=True)
class Options:
    """Which comparison, and where it goes."""

    comparison: tyro.conf.Positional[Path]
    """A comparison file."""
    folder: Path | None = None
    """Where the runs are written. Default: runs/ and the name of the comparison."""
    only: tuple[str, ...] = ()
    """Runs, beside the baseline; none named: all."""
    seeds: tuple[int, ...] = ()
    """Of them; none given: all."""
    results: Path | None = None
    """A file to which the lines of rows.jsonl, one per run, are added as well, unless
    they are there."""
    dry_run: bool = False
    """Print the plan of every run and stop: nothing is allocated or written."""


# The runs.


def main(comparison: Comparison, folder: Path, results: Path | None) -> list[dict]:
    """Trains what has not ended; returns a row per run, fewer where SIGTERM came.

    Raises:
      ValueError: before anything is trained, where a run's folder holds a run of other
        settings, or the folder cannot be made or written in.
    """
    check_writable(folder)
    for trial in comparison.trials:
        _refuse_other_settings(trial, folder / trial.place)
        _refuse_other_beginning(trial, folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / "comparison.json", json.dumps(_listing(comparison)) + "\n")
    rows: list[dict] = []
    for number, trial in enumerate(comparison.trials, 1):
        if has_ended(trial, folder / trial.place):
            console.say(f"{trial.name}, seed {trial.seed}: has ended, skipped")
        elif not _train(trial, folder):
            console.say("the same command again goes on with the comparison")
            return rows
        rows = _rows(comparison, comparison.trials[:number], folder)
        for row in rows:
            _append_if_new(row, folder / "rows.jsonl")
            if results is not None:
                _append_if_new(row, results)
    console.STDOUT.print(losses_table(rows))
    console.STDOUT.print(means_table(rows))
    console.say(plot_comparison(folder))
    return rows


def _listing(comparison: Comparison) -> dict:
    """What `plot_comparison` reads."""
    folders: dict[str, list[str]] = {}
    for trial in comparison.trials:
        folders.setdefault(trial.name, []).append(trial.place)
    return {"baseline": comparison.baseline, "runs": folders}


def _refuse_other_settings(trial: Trial, folder: Path) -> None:
    saved = folder / "config.json"
    if not saved.exists():
        return
    for name, (old, new) in changed_settings(read_config(saved), trial.config).items():
        raise ValueError(
            f"{folder} holds a run whose {name} is {old!r}, and the comparison gives "
            f"it {new!r}; take the setting back, delete that folder, or choose another "
            f"--folder for the whole comparison"
        )


def _refuse_other_beginning(trial: Trial, folder: Path) -> None:
    """`_refuse_other_settings` of a branch, and of what was one or is one now."""
    own = folder / trial.place
    starts = [r for r in _records(trial.config, own) if r["event"] == "start"]
    if not starts:
        return
    origin, branch = starts[0].get("branch"), trial.branch_in(folder)
    if branch is not None:
        branch.check_begun(origin, own)
    elif origin is not None:
        raise ValueError(
            f"{own} holds a branch of {origin['run']} at step {origin['step']}, and "
            f"in the comparison {trial.name} is none; delete that folder, or choose "
            f"another --folder for the whole comparison"
        )


def has_ended(trial: Trial, folder: Path) -> bool:
    """Whether the run is complete, its last checkpoint included, or has diverged."""
    records = _records(trial.config, folder)
    if records and records[-1]["event"] == "non_finite_loss":
        return True
    with Checkpoints(folder / "checkpoints") as checkpoints:
        return checkpoints.latest_step() == trial.config.steps


def _train(trial: Trial, folder: Path) -> bool:
    """Trains the run of a comparison in `folder` to its end or until it diverges; False
    where SIGTERM came."""
    console.say(f"{trial.name}, seed {trial.seed}", style="bold")
    ended = None
    while ended is None:
        try:
            ended = in_own_process(
                train_here, trial.config, folder / trial.place, trial.branch_in(folder)
            )
        except Terminated:
            return False
    return ended


def train_here(config: TrainConfig, folder: Path, branch: Branch | None) -> bool | None:
    """`_train` of one run in its own folder, in this process; None where a new one is
    to resume the run."""
    console.quiet_orbax()
    folder.mkdir(parents=True, exist_ok=True)
    _note_provenance(folder)
    try:
        outcome = pretrain.main(config, folder, branch=branch)
    except NonFiniteLoss as error:
        console.say(f"NonFiniteLoss: {error}", style="yellow")
        return True
    return None if outcome.resume_in_new_process else outcome.completed


def _note_provenance(folder: Path) -> None:
    """Adds where the run goes on, before it does."""
    here = (
        jax.devices()[0].device_kind,
        jax.__version__,
        commit(),
        date.today().isoformat(),
    )
    lines = [*_sessions(folder), dict(zip(PROVENANCE, here, strict=True))]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    write_whole(folder / "provenance.jsonl", text)


def _sessions(folder: Path) -> list[dict[str, str | None]]:
    noted = folder / "provenance.jsonl"
    lines = noted.read_text().splitlines() if noted.exists() else []
    return [json.loads(line) for line in lines]


def _records(config: TrainConfig, folder: Path) -> list[dict]:
    kinds = [phase.kind for phase in phases(config)]
    lines = records_until(folder / "metrics.jsonl", config.steps, kinds)
    return [json.loads(line) for line in lines.splitlines()]


# What came of them.


def _rows(comparison: Comparison, ended: Sequence[Trial], folder: Path) -> list[dict]:
    """What is recorded of the runs that have ended, as far as the baseline of their
    seed has, which may be a branch of another: the same whenever it is asked."""
    losses = {trial: _losses(trial.config, folder / trial.place) for trial in ended}
    references = {
        trial.seed: own["loss"]
        for trial, own in losses.items()
        if trial.name == comparison.baseline
    }
    return [
        _row(comparison, trial, folder / trial.place, own, references[trial.seed])
        for trial, own in losses.items()
        if trial.seed in references
    ]


def _row(
    comparison: Comparison,
    trial: Trial,
    folder: Path,
    own: dict,
    reference: float | None,
) -> dict:
    """What is recorded of one run.

    Args:
      own: its `_losses`.
      reference: the last loss of the baseline.
    """
    config = trial.config
    settings = changed_settings(PRESETS[config.preset](), config)
    missing = None in (own["loss"], reference)
    return {
        "comparison": comparison.name,
        "name": trial.name,
        "seed": trial.seed,
        "preset": config.preset,
        **({} if trial.trunk is None else {"branch": f"{trial.trunk}@{trial.begin}"}),
        "settings": {
            name: value
            for name, (_, value) in settings.items()
            if name not in ("seed", "data.seed")
        },
        **own,
        "baseline": comparison.baseline,
        "to_baseline": None if missing else own["loss"] - reference,
        **_provenance(folder),
    }


def _losses(config: TrainConfig, folder: Path) -> dict:
    """Validation losses, tokens and seconds of a run that has ended."""
    records = _records(config, folder)
    validation = {r["step"]: r["loss"] for r in records if r["event"] == "validation"}
    switches = [r for r in records if r["event"] == "switch"]
    diverged = [r["at"] for r in records if r["event"] == "non_finite_loss"]
    planned = phases(config)
    ends = list(accumulate(phase.steps for phase in planned))
    own_ends = {end for end in ends if end > first_step(records)}
    if not diverged and not validation.keys() >= own_ends:
        raise ValueError(
            f"{folder} holds a run that has ended, but its metrics.jsonl lacks a "
            f"validation at step {', '.join(map(str, sorted(own_ends)))}; delete the "
            f"folder to train the run anew"
        )
    seconds = training_seconds(records, config.tokens_per_step)
    steps = max(seconds)
    return {
        "steps": steps,
        "validation": {
            phase.kind: validation[end]
            for phase, end in zip(planned, ends, strict=True)
            if end in validation
        },
        "switches": [
            # Earlier records did not say what was left; no run was a branch then.
            {"from": switch.get("from", planned[switch["phase"] - 1].kind)}
            | {"to": switch["to"]}
            | {name: switch[name] for name in ("step", *AROUND_A_SWITCH)}
            for switch in switches
        ],
        "loss": None if diverged else validation[config.steps],
        "diverged_at": diverged[0] if diverged else None,
        "tokens": steps * config.tokens_per_step,
        "seconds": None if math.isnan(seconds[steps]) else seconds[steps],
    }


def _provenance(folder: Path) -> dict[str, str | None]:
    """Where the run was trained; of one that was resumed elsewhere, all of it."""
    sessions = _sessions(folder)
    values = {
        name: dict.fromkeys(session[name] for session in sessions)
        for name in PROVENANCE
    }
    return {
        name: ", ".join(filter(None, different)) or None
        for name, different in values.items()
    }


def _append_if_new(row: dict, results: Path) -> None:
    line = json.dumps(row)
    if results.exists() and line in results.read_text().splitlines():
        return
    append_rows([row], results)


def losses_table(rows: Sequence[dict]) -> Table:
    """A row per run: the loss at the end of each phase and right after the switch."""
    table = Table(
        title="validation loss at the end of a phase -> right after the switch"
    )
    # In the order of the phases, as far as the runs have the same.
    left = dict.fromkeys(switch["from"] for row in rows for switch in row["switches"])
    table.add_column("run")
    for name in ("seed", *left, "final", f"to {rows[0]['baseline']}"):
        table.add_column(name, justify="right")
    for row in rows:
        around = {
            switch["from"]: f"{switch['before']:.4f} -> {switch['after']:.4f}"
            for switch in row["switches"]
        }
        final = f"diverged at step {row['diverged_at']}"
        if row["loss"] is not None:
            final = f"{row['loss']:.4f}"
        cells = (around.get(kind, "") for kind in left)
        to_baseline = _signed(row["to_baseline"])
        table.add_row(row["name"], str(row["seed"]), *cells, final, to_baseline)
    return table


def means_table(rows: Sequence[dict]) -> Table:
    """A row per name: means over the seeds, and largest minus smallest."""
    table = Table(title="mean over the seeds (spread: largest - smallest)")
    table.add_column("run")
    baseline = rows[0]["baseline"]
    for name in ("final", "spread", f"to {baseline}", "spread", "tokens", "seconds"):
        table.add_column(name, justify="right")
    for name in dict.fromkeys(row["name"] for row in rows):
        of_name = [row for row in rows if row["name"] == name]
        final, final_spread = _mean_and_spread(row["loss"] for row in of_name)
        gap, gap_spread = _mean_and_spread(row["to_baseline"] for row in of_name)
        seconds, _ = _mean_and_spread(row["seconds"] for row in of_name)
        table.add_row(
            name,
            "diverged" if final is None else f"{final:.4f}",
            "" if final_spread is None else f"{final_spread:.4f}",
            _signed(gap),
            "" if gap_spread is None else f"{gap_spread:.4f}",
            f"{statistics.fmean(row['tokens'] for row in of_name):,.0f}",
            "" if seconds is None else f"{seconds:,.1f}",
        )
    return table


def _mean_and_spread(
    values: Iterable[float | None],
) -> tuple[float | None, float | None]:
    """Neither where a value is missing; no spread of a single one."""
    values = list(values)
    present = [value for value in values if value is not None]
    if len(present) < len(values):
        return None, None
    spread = max(present) - min(present) if len(present) > 1 else None
    return statistics.fmean(present), spread


def _signed(difference: float | None) -> str:
    return "" if difference is None else f"{difference:+.4f}"


def run(arguments: list[str]) -> int:
    """The command: its exit status."""
    console.quiet_orbax()
    options = tyro.cli(
        Options,
        args=arguments,
        description=__doc__,
        prog="experiments/compare_recipes.py",
    )
    try:
        comparison = read_comparison(options.comparison)
        comparison = comparison.only(options.only, options.seeds)
        if options.dry_run:
            first: dict[str, Trial] = {}
            for trial in comparison.trials:
                first.setdefault(trial.name, trial)
            for name, trial in first.items():
                console.say(name, style="bold")
                if trial.trunk is not None:
                    console.say(f"begins with step {trial.begin:,} of {trial.trunk}")
                printed_plan.announce(trial.config, predicted=True)
            return 0
        if comparison.trials[0].config.deterministic:
            console.repeat_bits()
        folder = options.folder or Path("runs") / comparison.name
        # The devices are for the processes that train.
        jax.config.update("jax_platforms", "cpu")
        main(comparison, folder, options.results)
    except (ValueError, NotImplementedError, ImportError, OSError) as error:
        return console.fail(error)
    return 0


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
