"""The figure of losses against seconds and of R, read back from what was drawn."""

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest

from experiments import equal_loss
from experiments.worth.equal_loss_figure import _apart, _label_ends
from tests.support.files.equal_loss_runs import (
    BUDGETS,
    dense_runs,
    loss,
    rows_of,
    sparse_config,
    tokens_of,
)
from tests.support.files.synthetic_runs import DENSE, Synthetic


@pytest.mark.parametrize("side_by_side", [1, 4])
def test_the_figure_has_losses_against_seconds_and_R(
    side_by_side, tmp_path, monkeypatch
):
    """Where no seconds were measured, they are a share of the longest dense run's."""
    pyplot = pytest.importorskip("matplotlib.pyplot")
    figures = []
    monkeypatch.setattr(pyplot, "close", figures.append)
    sparse = Synthetic(
        name="sparse",
        config=sparse_config(300, 0.8),
        loss=loss(tokens_of(270)),
        seconds=0.07 * 300,
    )
    given = {"speed": ("sparse=1.6",), "speed_from": "a row"}
    runs = [*dense_runs(side_by_side=side_by_side), sparse]
    rows = rows_of(tmp_path, runs, **(given if side_by_side > 1 else {}))
    left, right = figures[0].axes
    dense, own = (line.get_xydata() for line in left.lines)
    if side_by_side > 1:
        places, place = [0.1, 0.3, 1.0], 0.3 * (0.8 / 1.6 + 0.2)
        assert "not measured" in left.get_xlabel()
    else:
        places, place = [10.0, 30.0, 100.0], 0.07 * 300
        assert left.get_xlabel() == "seconds of training steps"
    losses = [loss(tokens_of(steps)) for steps in BUDGETS]
    np.testing.assert_allclose(dense, np.stack([places, losses], axis=1), rtol=1e-3)
    np.testing.assert_allclose(own, [[place, sparse.loss]], rtol=1e-3)
    (ratio, one) = (line.get_xydata() for line in right.lines)
    row = rows["sparse", 300]
    np.testing.assert_allclose(ratio, [[row["tokens_per_parameter"], row["R_best"]]])
    assert set(one[:, 1]) == {1.0}
    texts = [text.get_text().split()[0] for text in (*left.texts, *right.texts)]
    assert texts == ["dense", "sparse", "sparse"]


def test_the_figure_has_the_arms_that_are_asked_for(tmp_path, capsys, monkeypatch):
    drawn = []
    plot = equal_loss.plot_equal_loss
    spy = lambda folder, rows, arm: drawn.extend(rows) or plot(folder, rows, arm)
    monkeypatch.setattr(equal_loss, "plot_equal_loss", spy)
    arms = [
        Synthetic(
            name=name,
            config=replace(DENSE, steps=300),
            loss=loss(tokens_of(300)),
            seconds=30.0,
        )
        for name in ("first", "second")
    ]
    rows = rows_of(tmp_path, [*dense_runs(), *arms], draw=("second",))
    assert {arm for arm, _ in rows} == {"dense", "first", "second"}
    assert {row["arm"] for row in drawn} == {"dense", "second"}
    with pytest.raises(ValueError, match="--draw third is no arm of .* first, second"):
        rows_of(tmp_path / "again", [*dense_runs(), *arms], draw=("third",))


def test_the_figure_has_six_lines_at_most(tmp_path, capsys):
    arms = [
        Synthetic(
            name=f"arm-{number}",
            config=replace(DENSE, steps=300),
            loss=loss(tokens_of(300)),
            seconds=30.0 + number,
        )
        for number in range(7)
    ]
    rows_of(tmp_path, [*dense_runs(), *arms])
    # The seventh line would be the sixth of these: dense is one, too.
    assert "equal_loss.png; without arm-5, arm-6\n" in capsys.readouterr().out


def test_a_loss_that_dense_never_has_is_in_a_row_and_not_in_the_figure(tmp_path):
    below = Synthetic(
        name="below", config=sparse_config(300, 0.8), loss=0.5, side_by_side=2
    )
    given = {"speed": ("below=1.6",), "speed_from": "a row"}
    row = rows_of(tmp_path, [*dense_runs(side_by_side=2), below], **given)["below", 300]
    assert row["dense_tokens"] is None and row["R"] == 0.0 and row["extrapolated"]
    assert (tmp_path / "equal_loss.png").is_file()


def test_a_loss_that_dense_never_has_is_at_its_measured_seconds(tmp_path, monkeypatch):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    figures = []
    monkeypatch.setattr(pyplot, "close", figures.append)
    below = Synthetic(name="below", config=sparse_config(300, 0.8), loss=0.5)
    rows = rows_of(tmp_path, [*dense_runs(), replace(below, seconds=21.0)])
    assert rows["below", 300]["R_best"] is None
    left, right = figures[0].axes
    _, own = (line.get_xydata() for line in left.lines)
    np.testing.assert_allclose(own, [[21.0, 0.5]], rtol=1e-3)
    assert [text.get_text() for text in right.texts] == []


def test_a_loss_that_dense_never_has_needs_seconds_that_all_have(tmp_path):
    runs = [
        Synthetic(name=name, config=sparse_config(300, 0.8), loss=of, seconds=21.0)
        for name, of in (("below", 0.5), ("other", loss(tokens_of(240))))
    ]
    given = {"speed": ("other=1.5",), "speed_from": "a row"}
    rows = rows_of(tmp_path, [*dense_runs(), *runs], **given)
    assert rows["below", 300]["measured"] and not rows["other", 300]["measured"]
    assert (tmp_path / "equal_loss.png").is_file()


def test_an_interval_that_does_not_hold_its_value_ends_there(tmp_path, monkeypatch):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    figures = []
    sparse = Synthetic(
        name="sparse", config=sparse_config(300, 0.8), loss=loss(tokens_of(270))
    )
    rows = list(rows_of(tmp_path, [*dense_runs(), sparse]).values())
    value = rows[-1]["R_best"]
    rows[-1] |= {"R_best_low": value + 0.1, "R_best_high": value + 0.2}
    monkeypatch.setattr(pyplot, "close", figures.append)
    equal_loss.plot_equal_loss(tmp_path, rows, "dense")
    (bars,) = figures[0].axes[1].collections
    ((low, high),) = (segment[:, 1] for segment in bars.get_segments())
    assert (low, high) == pytest.approx((value, value + 0.2))


def test_the_longest_dense_run_is_not_outside_of_its_own_curve(tmp_path):
    rows = rows_of(tmp_path, dense_runs())
    assert not any(row["extrapolated"] for row in rows.values())


def test_R_best_over_a_loss_that_was_extrapolated_is_hollow(tmp_path, monkeypatch):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    figures = []
    monkeypatch.setattr(pyplot, "close", figures.append)
    below, between = (
        Synthetic(
            name=name,
            config=sparse_config(300, 0.8),
            loss=loss(tokens_of(worth)),
            seconds=21.0,
        )
        for name, worth in (("below", 2000), ("between", 500))
    )
    rows = rows_of(tmp_path, [*dense_runs(), below, between])
    hollow = {
        name: rows[name, 300]["best_extrapolated"] for name in ("below", "between")
    }
    assert hollow == {"below": True, "between": False}
    right = figures[0].axes[1]
    assert right.get_xlabel().endswith("\nhollow: extrapolated")
    (mark,) = right.collections
    assert mark.get_offsets()[0][1] == rows["below", 300]["R_best"]


def test_from_the_least_that_R_best_can_be_a_line_leads_to_what_is_likely(
    tmp_path, monkeypatch
):
    """The deep arm has one length, and has passed the sparse arm's loss before."""
    pyplot = pytest.importorskip("matplotlib.pyplot")
    figures = []
    monkeypatch.setattr(pyplot, "close", figures.append)
    deep, sparse = (
        Synthetic(name=name, config=config, loss=loss(tokens_of(worth)), seconds=took)
        for name, config, worth, took in (
            ("deep", replace(DENSE, steps=300), 900, 30.0),
            ("sparse", sparse_config(300, 0.8), 600, 21.0),
        )
    )
    row = rows_of(tmp_path, [*dense_runs(), deep, sparse])["sparse", 300]
    right = figures[0].axes[1]
    lines = [line.get_xydata() for line in right.lines]
    ends = sorted([row["R_best"], row["R_best_likely"]])
    assert any(
        len(line) == 2 and line[:, 1].tolist() == pytest.approx(ends) for line in lines
    )
    assert "triangle: at least, and up to what is likely" in right.get_xlabel()


def test_labels_stand_beside_the_axes_and_apart_near_their_lines_ends():
    plt = pytest.importorskip("matplotlib.pyplot")
    text = pytest.importorskip("matplotlib.text").Text
    figure, axes = plt.subplots()
    ends = [axes.plot([0, 1], [0, height])[0] for height in (0.5, 0.5, 0.0, 1.0, 0.51)]
    figure.canvas.draw()
    _label_ends(axes, list(zip(ends, "abcde", strict=True)))
    figure.canvas.draw()
    boxes = {of.get_text(): text.get_window_extent(of) for of in axes.texts}
    for one, other in combinations(boxes.values(), 2):
        assert not one.overlaps(other)
    inside = axes.get_window_extent()
    assert all(box.x0 > inside.x1 for box in boxes.values())
    heights = {name: (box.y0 + box.y1) / 2 for name, box in boxes.items()}
    at = {height: axes.transData.transform((1, height))[1] for height in (0, 0.5, 1)}
    # Those that have room are where their lines end; the others are around theirs.
    assert abs(heights["c"] - at[0]) < 2 and abs(heights["d"] - at[1]) < 2
    assert heights["a"] < heights["b"] < heights["e"]
    assert abs(heights["b"] - at[0.5]) < 4
    plt.close(figure)


def test_what_is_too_near_spreads_around_its_mean_without_a_change_of_order():
    assert _apart([0.0, 1.0, 5.0], 1.0) == [0.0, 1.0, 5.0]
    assert _apart([1.0, 1.0], 1.0) == [0.5, 1.5]
    assert _apart([0.0, 1.5, 1.5, 1.5], 1.0) == [-0.375, 0.625, 1.625, 2.625]
    assert _apart([], 1.0) == []
