"""Finished runs compared on the files that they have held out."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from experiments import compare_models
from experiments.compare_models import Config, main
from sparsejax.training import train as loop
from sparsejax.training.train import train
from tests.support.micro_run import micro_config
from tests.support.whole_runs import shared_run

pytestmark = pytest.mark.usefixtures("quick")

WORDS = ("alpha_beta", "gamma_delta", "epsilon", "zeta_eta")


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> str:
    """Twelve files of two endings, whose lines repeat their identifiers."""
    folder = tmp_path_factory.mktemp("text")
    for index in range(12):
        lines = [f"{WORDS[(index + i) % 4]} = {WORDS[i % 4]}({i})" for i in range(9)]
        ending = "py" if index % 2 else "c"
        (folder / f"{index}.{ending}").write_text("\n".join(lines) + "\n")
    return f"{folder}/*"


@pytest.fixture(scope="module")
def runs(text, quick, tmp_path_factory) -> list[str]:
    """A run of twelve steps and one of two, dense."""
    folder = tmp_path_factory.mktemp("runs")
    config = micro_config(text, recipe="dense", steps=12)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "Run", shared_run)
        for name, steps in (("long", 12), ("short", 2)):
            train(replace(config, steps=steps), folder / name)
    return [str(folder / name) for name in ("long", "short")]


def test_figures_and_differences_of_two_runs(runs, tmp_path, capsys):
    results = tmp_path / "rows.jsonl"
    arguments = [*runs, "--choices", "20", "--results", str(results)]
    assert compare_models.run(arguments) == 0
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    found = {(Path(row["model"]).name, row["task"]): row for row in rows}
    tasks = {"loss, all", "loss, .py", "loss, .c", "next line", "repeated identifier"}
    assert {task for _, task in found} <= tasks
    long, short = found["long", "loss, all"], found["short", "loss, all"]
    assert long["value"] < short["value"] < 6 and long["to_first"] == 0
    assert short["to_first"] == pytest.approx(short["value"] - long["value"])
    assert short["to_first_low"] <= short["to_first"] <= short["to_first_high"]
    assert (long["step"], short["step"]) == (12, 2)
    # The mean over all tokens is that of the domains, by their tokens.
    domains = [r for (run, task), r in found.items() if run == "long" and "," in task]
    parts = [row for row in domains if row["task"] != "loss, all"]
    total = sum(row["value"] * row["count"] for row in parts)
    assert total / long["count"] == pytest.approx(long["value"], rel=1e-6)
    assert sum(row["count"] for row in parts) == long["count"]
    assert 0 <= found["long", "next line"]["value"] <= 1
    assert "differences to" in capsys.readouterr().out


def test_another_text_is_read_whole(runs, tmp_path):
    (tmp_path / "a.txt").write_text("".join(f"line {i} of it\n" for i in range(9)))
    text = f"{tmp_path}/*.txt"
    config = Config(
        runs=(f"{runs[0]}@12",), text=text, results=tmp_path / "rows", choices=5
    )
    rows = main(config, "the command")
    size = (tmp_path / "a.txt").stat().st_size
    assert {row.task: row.count for row in rows}["loss, all"] == size - 1
    assert all(row.text == text for row in rows)


def test_runs_that_cannot_be_compared_are_refused(runs, text, tmp_path, capsys):
    other = micro_config(text, recipe="dense", steps=2)
    other = replace(other, data=replace(other.data, validation_share=0.5))
    train(other, tmp_path / "other")
    given = [runs[0], str(tmp_path / "other"), "--results", str(tmp_path / "rows")]
    assert compare_models.run(given) == 1
    error = capsys.readouterr().err
    assert "has data.validation_share=0.5 and" in error and "has 0.3, so" in error
    assert compare_models.run([]) == 1
    assert "no run to compare" in capsys.readouterr().err
    assert compare_models.run([str(tmp_path)]) == 1
    assert "has no folder checkpoints" in capsys.readouterr().err


def test_text_that_has_changed_is_not_held_out_for_sure(text, runs, tmp_path):
    added = Path(text).parent / "12.py"
    added.write_text("alpha_beta = epsilon(3)\n" * 9)
    try:
        config = Config(runs=tuple(runs), results=tmp_path / "rows.jsonl")
        with pytest.raises(ValueError, match="was trained on other tokens than 13 fil"):
            main(config, "the command")
        other = tmp_path / "other"
        train(micro_config(text, recipe="dense", steps=2), other)
        both = replace(config, runs=(runs[0], str(other)))
        with pytest.raises(
            ValueError, match="were trained on different tokens, though"
        ):
            main(both, "the command")
    finally:
        added.unlink()
