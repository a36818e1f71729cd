"""Cases of whole run folders: damaged anywhere, then trained on to the end."""

import copy
import io
import json
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

from numpy.random import Generator
from rich.console import Console

from sparsejax.checkpoints.checkpoint import Checkpoints
from sparsejax.config import TrainConfig
from sparsejax.reports import metrics
from sparsejax.reports.metrics import DensePeak
from sparsejax.reports.records import read_metrics
from sparsejax.terminal import console
from sparsejax.training import train as loop
from sparsejax.training.run import Run
from sparsejax.training.step import TrainState
from tests.fuzz import checkpoints, configs
from tests.fuzz.judge import clear_error, judging, require
from tests.fuzz.mutations import damaged, mutated_json, one_of
from tests.support.micro_run import arrays_of, micro_config, write_text
from tests.support.whole_runs import Killed, kill_at


@dataclass(frozen=True, kw_only=True)
class Material:
    """A run that ended, and one that was killed half-way."""

    config: TrainConfig
    run: Run
    finished: Path
    half_done: Path
    expected: TrainState
    """After the last step."""


def prepare(folder: Path) -> Material:
    (folder / "text").mkdir()
    config = micro_config(write_text(folder / "text"))
    run = Run(config)
    finished, half_done = folder / "finished", folder / "half done"
    outcome = _train(run, finished)
    with suppress(Killed):
        _train(run, half_done, observe=kill_at("step", 7))
    return Material(
        config=config,
        run=run,
        finished=finished,
        half_done=half_done,
        expected=outcome.state,
    )


def case(generator: Generator, folder: Path, material: Material) -> str:
    source = one_of(generator, (material.finished, material.half_done))
    run_folder = folder / "run"
    shutil.copytree(source, run_folder)
    for _ in range(generator.integers(1, 4)):
        _damage(generator, run_folder)
    saved = source / "checkpoints"
    root = run_folder / "checkpoints"
    before = checkpoints.look(root, saved) if root.is_dir() else None
    try:
        outcome = _train(material.run, run_folder)
    except Exception as error:
        label = clear_error(error)
    else:
        label = "the same bits"
        with judging():
            require(outcome.completed, "not completed")
            _check_same_bits(outcome.state, material.expected)
        _check_records(run_folder)
    with judging():
        if before is not None:
            after = checkpoints.look(root, saved)
            kept = set(Checkpoints(material.finished / "checkpoints").steps())
            lost = {n for n, s in before.whole.items() if s in kept} - set(after.whole)
            lost = {n for n in lost if before.whole[n] not in after.whole.values()}
            require(not lost, f"whole checkpoints {lost} are lost")
    return label


def _train(run: Run, folder: Path, **options) -> loop.Outcome:
    """`train`, with what is compiled already, and no measurement of this machine."""
    peak = DensePeak(tflops=1.0, source="test")
    with (
        patch.object(loop, "Run", lambda config, corpus: copy.copy(run)),
        patch.object(metrics, "dense_peak", lambda dtype: peak),
    ):
        return loop.train(run.config, folder, **options)


def _check_same_bits(state: TrainState, expected: TrainState) -> None:
    ours, theirs = arrays_of(state), arrays_of(expected)
    require(ours.keys() == theirs.keys(), f"leaves {ours.keys()}")
    for name, array in ours.items():
        require(array.tobytes() == theirs[name].tobytes(), f"other bits in {name}")


def _check_records(run_folder: Path) -> None:
    """Every record can be read again, and the summary of the run be printed."""
    with judging():
        records = read_metrics(run_folder)
        require(all(isinstance(record, dict) for record in records), "no objects")
        with patch.object(console, "STDOUT", Console(file=io.StringIO())):
            console.summarise(records)


def _damage(generator: Generator, run_folder: Path) -> None:
    saved, records = run_folder / "config.json", run_folder / "metrics.jsonl"
    root = run_folder / "checkpoints"
    match int(generator.integers(10)):
        case 0 if saved.is_file():
            configs.write(generator, saved)
        case 1 if saved.is_file():
            saved.write_bytes(damaged(generator, saved.read_bytes()))
        case 2 if saved.is_file():
            settings = mutated_json(generator, json.loads(saved.read_text()), 1)
            saved.write_text(json.dumps(settings))
        case 3:
            path = one_of(generator, (saved, records))
            path.unlink(missing_ok=True) if not path.is_dir() else path.rmdir()
            if generator.random() < 0.5:
                path.mkdir()
        case 4 if records.is_file():
            records.write_bytes(damaged(generator, records.read_bytes()))
        case 5 if records.is_file():
            lines = records.read_text(errors="replace").splitlines() or ["{}"]
            index = int(generator.integers(len(lines)))
            try:
                record = mutated_json(generator, json.loads(lines[index]), 1)
            except ValueError:
                return
            lines[index] = json.dumps(record)
            records.write_text("\n".join(lines) + "\n")
        case 6:
            shutil.rmtree(root, ignore_errors=True)
            if generator.random() < 0.5 and not root.exists():
                root.write_text("no folder")
        case _ if root.is_dir():
            checkpoints.damage(generator, root)
