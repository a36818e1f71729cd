"""Runs of a comparison that share a device: their order, failures and marks."""

import json
import os
from collections import Counter
from dataclasses import replace
from pathlib import Path

import jax
import pytest

from experiments import compare_recipes
from experiments.compare_recipes import main, main_side_by_side
from experiments.comparing import side_by_side
from experiments.comparing.comparison_file import Comparison, Trial
from experiments.comparing.finished_runs import read_finished
from experiments.comparing.side_by_side import RunsFailed, Slots, train_all
from tests.support.micro_run import micro_config, read_records

pytestmark = pytest.mark.usefixtures("quick")


# The order.


class Pretended:
    """In the place of `SideBySide`: the call that began first ends first, with what its
    function returns."""

    def __init__(self) -> None:
        self.waiting: dict = {}
        self.terminated = False

    def __enter__(self) -> "Pretended":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __class_getitem__(cls, _: object) -> type:
        return cls

    def __len__(self) -> int:
        return len(self.waiting)

    def start(self, key, function, *arguments) -> None:
        self.waiting[key] = lambda: function(*arguments)

    def first_ended(self):
        key = next(iter(self.waiting))
        try:
            return key, self.waiting.pop(key)()
        except ValueError as error:
            return key, error


def trial(name: str, trunk: str | None = None) -> Trial:
    return Trial(name=name, seed=0, config=micro_config("*.txt"), trunk=trunk)


@pytest.fixture
def pretended(monkeypatch):
    monkeypatch.setattr(side_by_side, "SideBySide", Pretended)


def test_a_branch_waits_for_its_trunk_and_others_go_first(pretended):
    trials = [trial("a"), trial("a1", "a"), trial("b"), trial("b1", "b"), trial("c")]
    began, ended = [], []

    def call(of: Trial, gpu: str | None) -> tuple:
        assert gpu is None
        began.append(of.name)
        return (lambda: True,)

    keep = lambda of: ended.append(of.name)
    assert train_all(trials, [None] * 2, call, ended=(), keep=keep) == {}
    assert began == ["a", "b", "a1", "b1", "c"] == ended


def test_what_has_ended_is_not_trained_and_its_branches_are(pretended):
    trials = [trial("a"), trial("a1", "a"), trial("b")]
    began = []
    call = lambda of, gpu: (lambda: began.append(of.name) or True,)
    train_all(trials, [None], call, ended=[trials[0], trials[2]], keep=lambda of: None)
    assert began == ["a1"]


def test_a_run_that_a_new_process_is_to_resume_begins_again(pretended):
    answers = iter([None, True])
    began = []

    def call(of: Trial, gpu: str | None) -> tuple:
        assert gpu is None
        began.append(of.name)
        return (lambda: next(answers),)

    kept = []
    assert train_all([trial("a")], [None] * 3, call, ended=(), keep=kept.append) == {}
    assert began == ["a", "a"] and [of.name for of in kept] == ["a"]


def test_a_run_that_fails_takes_its_branches_with_it_and_no_other(pretended, capsys):
    trials = [trial("a"), trial("a1", "a"), trial("a2", "a1"), trial("b")]

    def train(name: str) -> bool:
        if name == "a":
            raise ValueError("no such text")
        return True

    kept = []
    call = lambda of, gpu: (train, of.name)
    failed = train_all(trials, [None] * 2, call, ended=(), keep=kept.append)
    assert [of.name for of in kept] == ["b"]
    assert {of.name: why for of, why in failed.items()} == {
        "a": "ValueError: no such text",
        "a1": "its trunk, a, failed",
        "a2": "its trunk, a1, failed",
    }
    assert "a, seed 0: failed; ValueError: no such text" in capsys.readouterr().out


def test_a_run_has_a_gpu_that_no_other_has_at_the_time(pretended, capsys):
    trials = [trial(name) for name in "abcde"]
    running, most = Counter(), Counter()

    def call(of: Trial, gpu: str | None) -> tuple:
        running[gpu] += 1
        most[gpu] = max(most[gpu], running[gpu])

        def train() -> bool:
            running[gpu] -= 1
            return True

        return (train,)

    devices = Slots(at_once=2, gpus=("0", "3")).gpu_of_each
    assert devices == ["0", "3", "0", "3"]
    train_all(trials, devices, call, ended=(), keep=lambda of: None)
    assert most == {"0": 2, "3": 2} and not +running
    assert "b, seed 0: begins on GPU 3" in capsys.readouterr().out
    most.clear()
    train_all(trials, Slots(gpus=("0", "3")).gpu_of_each, call, ended=(), keep=id)
    assert most == {"0": 1, "3": 1}


def test_each_takes_its_share_of_what_jax_takes(monkeypatch):
    name = "XLA_PYTHON_CLIENT_MEM_FRACTION"
    monkeypatch.delenv(name, raising=False)
    Slots(5).enter(None)
    assert os.environ[name] == "0.1500"
    monkeypatch.setenv(name, "0.9")
    Slots(4).enter(None)
    assert os.environ[name] == "0.2250"


def test_a_gpu_that_is_not_there_is_an_error_and_no_cpu_trains_in_its_place(
    monkeypatch,
):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    with pytest.raises(ValueError, match="--gpus 9: JAX finds no such GPU"):
        Slots(gpus=("9",)).enter("9")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "9"
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    Slots(gpus=("9",)).enter("9")


# Runs.


def micro_comparison(text: str) -> Comparison:
    """A trunk with a branch, and a run that cannot begin: its text is not there."""
    base = micro_config(text, steps=4, recipe="dense", eval_every=0, keep_every=2)
    optimizer = replace(base.optimizer, schedule="wsd", decay_share=0.0)
    trunk = replace(base, optimizer=optimizer)
    decayed = replace(trunk, optimizer=replace(optimizer, decay_share=0.5))
    nowhere = replace(base, data=replace(base.data, text="/nowhere/*.txt"))
    trials = (
        Trial(name="trunk", seed=0, config=trunk),
        Trial(name="short", seed=0, config=decayed, trunk="trunk", begin=2),
        Trial(name="lost", seed=0, config=nowhere),
    )
    return Comparison(name="micro", baseline="short", trials=trials)


def rows_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_runs_side_by_side_are_those_of_one_after_the_other(
    text, tmp_path, capsys, monkeypatch
):
    """But for their speed, which their rows do not state; and what one compiles, the
    others need not."""
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    monkeypatch.setenv("SPARSEJAX_CACHE", str(tmp_path))
    comparison = micro_comparison(text)
    folder, results = tmp_path / "beside", tmp_path / "rows.jsonl"
    with pytest.raises(RunsFailed, match=r"1 of the runs .*lost, seed 0: .*nowhere"):
        main_side_by_side(comparison, folder, results, Slots(2))
    shown = capsys.readouterr().out
    assert shown.index("trunk, seed 0: has ended") < shown.index("short, seed 0: begin")
    assert "step 4/4" not in shown
    assert list((tmp_path / "programs").iterdir())
    console = (folder / "trunk" / "seed-0" / "console.txt").read_text()
    assert "step 4/4" in console
    rows = rows_of(results)
    assert [row["name"] for row in rows] == ["trunk", "short"]
    for row in rows:
        assert row["seconds"] is None and row["side_by_side"] == 2
    assert rows_of(folder / "rows.jsonl") == rows

    whole = replace(comparison, trials=comparison.trials[:2])
    again = main_side_by_side(whole, folder, results, Slots(2))
    assert again == rows == rows_of(results)
    assert (folder / "comparison.png").is_file()

    monkeypatch.setattr(compare_recipes, "in_own_process", lambda f, *of: f(*of))
    alone = main(whole, tmp_path / "alone", None)
    for row, beside in zip(alone, rows, strict=True):
        assert row["loss"] == beside["loss"] and row["seconds"] > 0
        assert "side_by_side" not in row

    finished, others = read_finished(folder)
    (run,) = finished
    assert (run.name, run.side_by_side, run.seconds) == ("short", 2, None)
    assert "constant learning rate" in others["trunk/seed-0"]
    last = read_records(folder / "short" / "seed-0")
    (validation,) = (r for r in last if "batch_losses" in r)
    assert run.batch_losses == tuple(validation["batch_losses"])
    assert len(run.batch_losses) == 2
    assert run.loss == pytest.approx(sum(run.batch_losses) / 2, rel=1e-6)


def test_the_command_says_how_many_run_at_once(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "some.toml"
    path.write_text("seeds = [0]\n[runs.a]")
    asked = []
    monkeypatch.setattr(
        compare_recipes, "main_side_by_side", lambda *given: asked.append(given[1:])
    )
    assert compare_recipes.run([str(path), "--at-once", "3"]) == 0
    assert asked == [(Path("runs/some"), None, Slots(3))]
    assert compare_recipes.run([str(path), "--gpus", "0", "1"]) == 0
    assert asked[1:] == [(Path("runs/some"), None, Slots(1, ("0", "1")))]
    assert compare_recipes.run([str(path), "--gpus", "1", "1"]) == 1
    assert "--gpus 1 1 names a GPU twice" in capsys.readouterr().err
    assert compare_recipes.run([str(path), "--at-once", "0"]) == 1
    assert "--at-once 0 is not 1 or more" in capsys.readouterr().err
