"""The figure of a run."""

import json
import math
import sys

import matplotlib
import matplotlib.image
import matplotlib.pyplot as plt
import numpy as np

from sparsejax.reports.loss_figure import SHADES, plot_run
from sparsejax.reports.records import training_seconds
from tests.support.files.synthetic_runs import step_record

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


def test_without_matplotlib_the_line_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "uv sync --extra plots" in plot_run(tmp_path)
    assert list(tmp_path.iterdir()) == []
