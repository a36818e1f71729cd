"""The figures of a run and of a comparison."""

import json
import math
import subprocess
import sys
from itertools import chain
from pathlib import Path

import matplotlib
import matplotlib.image
import matplotlib.pyplot as plt
import numpy as np

from experiments import plot
from experiments.plot import _seconds_label, plot_comparison
from sparsejax.config import DataConfig, TrainConfig
from sparsejax.config.config_file import to_json
from sparsejax.reports.loss_figure import SHADES
from sparsejax.reports.records import training_seconds
from tests.support.files.synthetic_runs import step_record


def test_seconds_are_those_of_the_steps_and_gaps_take_the_rate_of_their_phase():
    records = [
        step_record(2, 0, "warm-up"),
        step_record(4, 0, "warm-up", tokens_per_second=100.0),
        step_record(6, 0, "warm-up", tokens_per_second=50.0),
        step_record(7, 0, "warm-up", tokens_per_second=200.0),
        step_record(9, 1, "sparse"),
        step_record(10, 1, "sparse", tokens_per_second=25.0),
        step_record(12, 2, "dense"),
    ]
    # 10 tokens a step; medians 100 of the warm-up, 25 of the sparse phase, 75 of all.
    ends = [0, 0.2, 0.4, 0.8, 0.85, 1.65, 2.05, 2.05 + 20 / 75]
    seconds = training_seconds(records, tokens_per_step=10)
    assert list(seconds) == [0, 2, 4, 6, 7, 9, 10, 12]
    np.testing.assert_allclose(list(seconds.values()), ends)
    assert math.isnan(training_seconds(records[:1], 10)[2])
    assert training_seconds([], 10) == {0: 0.0}


def write_comparison(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Two runs with two seeds and one seed; step and validation loss of all points, at
    the switch of the last run those before it and after."""
    places = {"one": ["one/seed-0", "one/seed-1"], "two": ["two/seed-0"]}
    (folder / "comparison.json").write_text(json.dumps({"runs": places}))
    config = TrainConfig(batch_size=4, data=DataConfig(sequence_length=25))
    curves = {}
    for rank, place in enumerate(chain(*places.values())):
        run = folder / place
        run.mkdir(parents=True)
        (run / "config.json").write_text(json.dumps(to_json(config)))
        curve = [(step, 5.0 / step + rank) for step in (3, 4, 8)]
        phases = [(4, 0, "dense"), (8, 0, "dense")]
        if place == "two/seed-0":
            phases = [(2, 0, "warm-up"), (4, 0, "warm-up"), (8, 1, "sparse")]
        rate = 50.0 * 2**rank
        records = [step_record(*phase, tokens_per_second=rate) for phase in phases]
        for at, loss in curve:
            records.append({"event": "validation", "step": at, "loss": loss})
        if place == "two/seed-0":
            curve.insert(2, (4, 6.0))
            records.insert(0, {"event": "switch", "step": 4, "after": 6.0})
        curves[place] = curve
        lines = "".join(json.dumps(record) + "\n" for record in records)
        (run / "metrics.jsonl").write_text(lines)
    return curves


def test_a_comparison_shows_all_losses_by_tokens_and_by_seconds(tmp_path, monkeypatch):
    losses = write_comparison(tmp_path)
    drawn = []
    monkeypatch.setattr(plt, "close", drawn.append)
    assert plot_comparison(tmp_path) == f"figure: {tmp_path / 'comparison.png'}"
    (figure,) = drawn
    by_tokens, by_seconds, phases, phases_by_seconds = figure.axes
    # 100 tokens a step, and 50, 100 and 200 tokens a second.
    for axes, scales in (
        (by_tokens, (100, 100, 100)),
        (by_seconds, (2.0, 1.0, 0.5)),
    ):
        curves = axes.get_lines()
        for curve, scale, of_run in zip(curves, scales, losses.values(), strict=True):
            expected = [(scale * step, loss) for step, loss in of_run]
            np.testing.assert_allclose(curve.get_xydata(), expected)
        first, second, other = curves
        assert first.get_color() == second.get_color() != other.get_color()
        assert first.get_linestyle() != second.get_linestyle()
    named = [text.get_text() for text in by_tokens.get_legend().get_texts()]
    assert named == ["one", "two"]
    for axes, scale_one, scale_two in (
        (phases, 100, 100),
        (phases_by_seconds, 2.0, 0.5),
    ):
        strips = [
            (
                round(bar.get_y() + bar.get_height() / 2),
                bar.get_x(),
                bar.get_x() + bar.get_width(),
                matplotlib.colors.to_hex(bar.get_facecolor()),
            )
            for bar in axes.patches
        ]
        assert strips == [
            (0, 0, 8 * scale_one, SHADES["dense"]),
            (1, 0, 4 * scale_two, SHADES["warm-up"]),
            (1, 4 * scale_two, 8 * scale_two, SHADES["sparse"]),
        ]
    assert [label.get_text() for label in phases.get_yticklabels()] == ["one", "two"]
    image = matplotlib.image.imread(tmp_path / "comparison.png")
    assert image[..., :3].std() > 0.05


def test_every_run_of_a_large_comparison_has_its_own_colour(tmp_path, monkeypatch):
    write_comparison(tmp_path)
    file = tmp_path / "comparison.json"
    (place, *_), *_ = json.loads(file.read_text())["runs"].values()
    runs = {f"run {index}": [place] for index in range(12)}
    file.write_text(json.dumps({"baseline": "run 0", "runs": runs}))
    drawn = []
    monkeypatch.setattr(plt, "close", drawn.append)
    plot_comparison(tmp_path)
    lines = drawn[0].axes[0].get_lines()
    assert len({line.get_color() for line in lines}) == len(lines) == 12


def test_the_command_draws_what_each_folder_holds(tmp_path):
    write_comparison(tmp_path)
    run = tmp_path / "one" / "seed-0"
    done = subprocess.run(
        [sys.executable, "-m", "experiments.plot", str(tmp_path), str(run)],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parent.parent.parent,
    )
    figures = [tmp_path / "comparison.png", run / "loss.png"]
    assert done.stdout.splitlines() == [f"figure: {path}" for path in figures]
    assert all(path.is_file() for path in figures)


def test_without_matplotlib_the_line_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "uv sync --extra plots" in plot_comparison(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_seconds_of_a_shared_device_are_told(tmp_path):
    write_comparison(tmp_path)
    runs = json.loads((tmp_path / "comparison.json").read_text())["runs"]
    folders = [tmp_path / place for places in runs.values() for place in places]
    assert _seconds_label(folders) == "seconds of training steps"
    (folders[-1] / "provenance.jsonl").write_text('{"side_by_side": 3}\n')
    assert _seconds_label(folders).endswith("steps, on a shared device")


def test_a_folder_that_is_no_run_is_named(tmp_path, capsys):
    assert plot.run([str(tmp_path / "nothing")]) == 1
    shown = " ".join(capsys.readouterr().err.split())
    assert "nothing/metrics.jsonl" in shown
    assert shown.endswith("give the folder of a run or of a comparison")
