"""Trains the runs of a comparison and sets their validation losses side by side.

The five ablations of arXiv 2503.16672 with their baseline (`tiny`, two seeds: 12 runs,
each of about four minutes on two CPU cores):

    uv run experiments/compare_recipes.py experiments/comparisons/ablations.toml

The same command again skips the runs that have ended, resumes the one that was stopped,
and goes on; `--only NAME` and `--seeds 0` train some of them. Every run is one of
`sparsejax train`, in FOLDER/NAME/seed-SEED and in a process of its own: what
sparse kernels do to a GPU's clock (experiments/LOG.md, 2026-11-22) would make a dense
run after them slower. `--gpus 0 1` trains one at a time on each of these GPUs, and
`--at-once N` trains N at a time on a device, for models that leave it idle: their speed
then means nothing, and their rows have no seconds. At the end: two tables,
FOLDER/comparison.png, and one JSON line per run in FOLDER/rows.jsonl; `--results
experiments/results/compare_recipes.jsonl` is for rows that are to stay.
`experiments/comparing/comparison_file.py` tells how a comparison is written.
"""

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Annotated

import jax
import tyro

from experiments.bench.rows import append_rows
from experiments.comparing.comparison_file import Comparison, Trial, read_comparison
from experiments.comparing.comparison_rows import rows_of
from experiments.comparing.comparison_tables import losses_table, means_table
from experiments.comparing.finished_runs import PROVENANCE, read_records, read_sessions
from experiments.comparing.side_by_side import RunsFailed, Slots, train_all
from experiments.plot import plot_comparison
from sparsejax.checkpoints.checkpoint import Checkpoints
from sparsejax.config import TrainConfig
from sparsejax.config.config_file import changed_settings, read_config
from sparsejax.data.tokenizers import tokenizer_within
from sparsejax.distributed.own_process import Terminated, in_own_process
from sparsejax.launch import job
from sparsejax.launch.before_training import keep_programs
from sparsejax.reports.provenance import commit
from sparsejax.reports.records import (
    check_writable,
    write_whole,
)
from sparsejax.terminal import console, printed_plan
from sparsejax.training.branch import Branch
from sparsejax.training.progress import NonFiniteLoss


@dataclass(frozen=True, kw_only=True)
class Options:
    """Settings of the comparison: which file, runs and seeds, and where results are
    written."""

    comparison: tyro.conf.Positional[Path]
    """A comparison file."""
    folder: Path | None = None
    """Folder of the runs. Default: runs/ and the name of the comparison."""
    only: tuple[str, ...] = ()
    """Names of the runs that are trained beside the baseline; none named: all."""
    seeds: tuple[int, ...] = ()
    """Seeds that are trained; none given: all."""
    results: Path | None = None
    """File that gets the lines of rows.jsonl, one per run, unless it has them."""
    at_once: Annotated[int, tyro.conf.arg(metavar="N")] = 1
    """Number of runs that are trained at a time, each with its share of the GPU's
    memory; what they print goes into FOLDER/NAME/seed-SEED/console.txt."""
    gpus: tuple[str, ...] = ()
    """Numbers of the GPUs, each of which takes so many; none: every run has all."""
    dry_run: bool = False
    """Print the plan of every run and stop: nothing is allocated or written."""


def main(comparison: Comparison, folder: Path, results: Path | None) -> list[dict]:
    """Trains the runs that have not ended; returns the rows, fewer where SIGTERM came.

    Raises:
      ValueError: before anything is trained, where a run's folder holds a run of other
        settings, or the folder cannot be made or written in.
      RunsFailed: branches could not begin, as where their trunk has diverged. The
        others have been trained, and their rows are in the files.
    """
    _prepare(comparison, folder)
    rows: list[dict] = []
    ended: list[Trial] = []
    failed: dict[Trial, str] = {}
    for trial in comparison.trials:
        if has_ended(trial, folder / trial.place):
            console.say(f"{trial.name}, seed {trial.seed}: has ended, skipped")
        elif not _train(trial, folder, failed):
            console.say("the same command again goes on with the comparison")
            return rows
        if trial in failed:
            continue
        ended.append(trial)
        rows = rows_of(comparison, ended, folder)
        _keep(rows, folder, results)
    if failed:
        raise RunsFailed(failed, folder)
    _show(rows, folder)
    return rows


def main_side_by_side(
    comparison: Comparison, folder: Path, results: Path | None, slots: Slots
) -> list[dict]:
    """Does what `main` does, with several runs at a time, each in a process of its own
    and a branch after its trunk. Raises what `main` does, RunsFailed where any run
    ended with an error."""
    _prepare(comparison, folder)
    ended = [t for t in comparison.trials if has_ended(t, folder / t.place)]
    for trial in ended:
        console.say(f"{trial.name}, seed {trial.seed}: has ended, skipped")
    rows = rows_of(comparison, ended, folder)

    def keep(trial: Trial) -> None:
        ended.append(trial)
        in_order = [of for of in comparison.trials if of in ended]
        rows[:] = rows_of(comparison, in_order, folder)
        _keep(rows, folder, results)

    train = lambda trial, gpu: (
        *(train_beside, slots, gpu, trial.config),
        *(folder / trial.place, trial.branch_in(folder)),
    )
    _keep(rows, folder, results)
    gpus, trials = slots.gpu_of_each, comparison.trials
    failed = train_all(trials, gpus, train, ended=ended, keep=keep)
    if failed:
        raise RunsFailed(failed, folder)
    if len(ended) < len(comparison.trials):
        console.say("the same command again goes on with the comparison")
        return rows
    _show(rows, folder)
    return rows


def _prepare(comparison: Comparison, folder: Path) -> None:
    """Refuses a `folder` of other runs, and lists there which runs are compared."""
    check_writable(folder)
    _refuse_other_vocabulary(comparison)
    for trial in comparison.trials:
        _refuse_other_settings(trial, folder / trial.place)
        _refuse_other_beginning(trial, folder)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "comparison.json"
    listed = comparison.listing(json.loads(path.read_text()) if path.exists() else {})
    write_whole(path, json.dumps(listed) + "\n")


def _refuse_other_vocabulary(comparison: Comparison) -> None:
    """Refuses runs on bytes whose models have another vocabulary, which need no text to
    be told, before any of them begins."""
    for trial in comparison.trials:
        data = trial.config.data
        if data.shards is None and data.tokenizer is None:
            try:
                tokenizer_within(None, trial.config.model.vocab_size)
            except ValueError as error:
                raise ValueError(f"run {trial.name!r}: {error}") from None


def _keep(rows: Sequence[dict], folder: Path, results: Path | None) -> None:
    """Adds the rows to the files that do not have them yet."""
    for row in rows:
        _append_if_new(row, folder / "rows.jsonl")
        if results is not None:
            _append_if_new(row, results)


def _show(rows: Sequence[dict], folder: Path) -> None:
    """Prints the tables of a whole comparison, and draws its figure."""
    console.STDOUT.print(losses_table(rows))
    console.STDOUT.print(means_table(rows))
    console.say(plot_comparison(folder))


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
    """Raises ValueError where the run began with another checkpoint than `trial`
    says."""
    own = folder / trial.place
    starts = [r for r in read_records(own, trial.config) if r["event"] == "start"]
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
    """Returns whether the run has diverged, or is complete, its last checkpoint
    included."""
    records = read_records(folder, trial.config)
    if records and records[-1]["event"] == "non_finite_loss":
        return True
    with Checkpoints(folder / "checkpoints") as checkpoints:
        return checkpoints.latest_step() == trial.config.steps


def _train(trial: Trial, folder: Path, failed: dict[Trial, str]) -> bool:
    """Trains a run of the comparison; returns True where it ended or diverged, False
    where SIGTERM came. A branch that its trunk has left nothing is noted as failed."""
    console.say(f"{trial.name}, seed {trial.seed}", style="bold")
    ended, own, branch = None, folder / trial.place, trial.branch_in(folder)
    while ended is None:
        try:
            ended = in_own_process(train_here, trial.config, own, branch)
        except Terminated:
            return False
        except ValueError as error:
            if branch is None:
                raise
            console.say(f"ValueError: {error}", style="yellow")
            failed[trial], ended = str(error), True
    return ended


def train_here(
    config: TrainConfig, folder: Path, branch: Branch | None, at_once: int = 1
) -> bool | None:
    """Trains one run in its own folder, in this process; returns as `_train`, or None
    where a new process is to resume it."""
    console.quiet_orbax()
    folder.mkdir(parents=True, exist_ok=True)
    _note_provenance(folder, at_once)
    try:
        outcome = job.main(config, folder, branch=branch)
    except NonFiniteLoss as error:
        console.say(f"NonFiniteLoss: {error}", style="yellow")
        return True
    return None if outcome.resume_in_new_process else outcome.completed


def train_beside(
    slots: Slots,
    gpu: str | None,
    config: TrainConfig,
    folder: Path,
    branch: Branch | None,
) -> bool | None:
    """Trains one run as `train_here` does, beside others: on that GPU, with its share
    of the memory, and printing into a file of the run's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    slots.enter(gpu)
    with (folder / "console.txt").open("ab") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    if slots.at_once > 1:
        # What one run compiles, others read: no time of such runs is recorded.
        keep_programs()
    return train_here(config, folder, branch, slots.at_once)


def _note_provenance(folder: Path, at_once: int) -> None:
    """Adds a line with the devices and the code on which the run goes on."""
    here = (
        jax.devices()[0].device_kind,
        jax.__version__,
        commit(),
        date.today().isoformat(),
    )
    session = dict(zip(PROVENANCE, here, strict=True))
    session |= {"devices": jax.device_count()} if jax.device_count() > 1 else {}
    session |= {"side_by_side": at_once} if at_once > 1 else {}
    lines = [*read_sessions(folder), session]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    write_whole(folder / "provenance.jsonl", text)


def _append_if_new(row: dict, results: Path) -> None:
    line = json.dumps(row)
    if results.exists() and line in results.read_text().splitlines():
        return
    append_rows([row], results)


def run(arguments: list[str]) -> int:
    """Runs the command and returns its exit status."""
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
        slots = Slots(options.at_once, options.gpus)
        if options.dry_run:
            _refuse_other_vocabulary(comparison)
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
        if slots == Slots():
            main(comparison, folder, options.results)
        else:
            main_side_by_side(comparison, folder, options.results, slots)
    except (
        ValueError,
        NotImplementedError,
        ImportError,
        OSError,
        RunsFailed,
    ) as error:
        return console.fail(error)
    return 0


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
