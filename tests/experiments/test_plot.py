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

from experiments.plot import SHADES, _seconds_label, plot_comparison, plot_run
from sparsejax.config import DataConfig, TrainConfig
from sparsejax.config_file import to_json
from sparsejax.reports.records import training_seconds

START = {"event": "start", "step": 0, "phase": 0, "kind": "warm-up"}


def write_run(folder):
    records = [START | {"unigram_loss": 3.0}]
    kinds = ["warm-up"] * 2 + ["sparse"] * 4 + ["dense"] * 2
    for step, kind in enumerate(kinds, 1):
        where = {"step": step, "phase": list(SHADES).index(kind), "kind": kind}
        records.append({"event": "step", "loss": 5.0 / step} | where)
        if step in (2, 6, 8):
            records.append({"event": "validation", "loss": 5.1 / step} | where)
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (folder / "metrics.jsonl").write_text(lines)


def test_the_figure_shows_losses_phases_and_the_unigram_model(tmp_path, monkeypatch):
    write_run(tmp_path)
    drawn = []
    monkeypatch.setattr(plt, "close", drawn.append)
    assert plot_run(tmp_path) == f"figure: {tmp_path / 'loss.png'}"
    (figure,) = drawn
    (axes,) = figure.axes
    lines = {line.get_label(): line for line in axes.get_lines()}
    training = lines["training"].get_xydata()
    np.testing.assert_allclose(training, [(s, 5.0 / s) for s in range(1, 9)])
    validation = lines["validation, as the phase computes"].get_xydata()
    np.testing.assert_allclose(validation, [(s, 5.1 / s) for s in (2, 6, 8)])
    assert set(lines["unigram model"].get_ydata()) == {3.0}
    shades = [(p.get_x(), p.get_x() + p.get_width()) for p in axes.patches]
    assert shades == [(0, 2), (2, 6), (6, 8)]
    assert [t.get_text() for t in axes.texts] == ["warm-up", "sparse", "dense"]
    colours = [matplotlib.colors.to_hex(p.get_facecolor()) for p in axes.patches]
    assert colours == list(SHADES.values())
    image = matplotlib.image.imread(tmp_path / "loss.png")
    assert image.shape[0] > 300 and image.shape[1] > 600
    assert image[..., :3].std() > 0.05


def test_a_run_without_steps_still_has_a_figure(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(json.dumps(START | {"unigram_loss": 3.0}))
    plot_run(tmp_path)
    assert (tmp_path / "loss.png").is_file()


def step_record(step: int, phase: int, kind: str, **rate: float) -> dict:
    where = {"step": step, "phase": phase, "kind": kind}
    return {"event": "step", "loss": 1.0} | where | rate


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


def test_phases_with_other_names_have_colours_of_their_own(tmp_path, monkeypatch):
    kinds = ["dense", "experts", "2:4", "dense", "end"]
    records = [START | {"unigram_loss": 3.0, "kind": "dense"}]
    for step, kind in enumerate(kinds, 1):
        where = {"step": step, "phase": step - 1, "kind": kind}
        records.append({"event": "step", "loss": 5.0 / step} | where)
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (tmp_path / "metrics.jsonl").write_text(lines)
    drawn = []
    monkeypatch.setattr(plt, "close", drawn.append)
    plot_run(tmp_path)
    (axes,) = drawn[0].axes
    assert [t.get_text() for t in axes.texts] == kinds
    colours = [
        matplotlib.colors.to_hex(patch.get_facecolor()) for patch in axes.patches
    ]
    assert colours[0] == colours[3] == SHADES["dense"]
    assert len(set(colours)) == 4


def test_a_branch_is_drawn_from_its_first_step(tmp_path, monkeypatch):
    trunk = {"run": "../trunk", "step": 4, "seconds": 2.0}
    begin = START | {"step": 4, "kind": "dense", "branch": trunk}
    records = [
        begin | {"unigram_loss": 3.0},
        step_record(6, 0, "dense", tokens_per_second=10.0) | {"loss": 1.0},
        step_record(8, 0, "dense", tokens_per_second=10.0) | {"loss": 1.0},
    ]
    seconds = training_seconds(records, tokens_per_step=10)
    assert seconds == {4: 2.0, 6: 4.0, 8: 6.0}
    unknown = begin | {"branch": trunk | {"seconds": None}}
    assert math.isnan(training_seconds([unknown, *records[1:]], 10)[8])
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (tmp_path / "metrics.jsonl").write_text(lines)
    drawn = []
    monkeypatch.setattr(plt, "close", drawn.append)
    plot_run(tmp_path)
    (axes,) = drawn[0].axes
    (span,) = axes.patches
    assert (span.get_x(), span.get_width()) == (4, 4)


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
    for plot in (plot_run, plot_comparison):
        assert "uv sync --extra plots" in plot(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_seconds_of_a_shared_device_are_told(tmp_path):
    write_comparison(tmp_path)
    runs = json.loads((tmp_path / "comparison.json").read_text())["runs"]
    folders = [tmp_path / place for places in runs.values() for place in places]
    assert _seconds_label(folders) == "seconds of training steps"
    (folders[-1] / "provenance.jsonl").write_text('{"side_by_side": 3}\n')
    assert _seconds_label(folders).endswith("steps, on a shared device")
