"""The worth of an arm in dense tokens and seconds where it is known in closed form:
runs that nobody trained, on a curve that is given."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from experiments import equal_loss
from experiments.comparing.finished_runs import read_finished
from experiments.worth.equal_loss_rows import (
    Speed,
    grouped,
    parameters,
    ratio_fields,
)
from experiments.worth.equal_loss_rows import rows_of as of_groups
from tests.support.files.equal_loss_runs import (
    BUDGETS,
    dense_runs,
    loss,
    rows_of,
    sparse_config,
    tokens_of,
)
from tests.support.files.synthetic_runs import DENSE, Synthetic, write_comparison


def test_R_is_what_seconds_say_where_runs_had_their_device_alone(tmp_path, capsys):
    # As good as dense after 0.9 of its tokens, in steps of 0.07 seconds.
    sparse = Synthetic(
        name="sparse-300",
        arm="sparse",
        config=sparse_config(300, 0.8),
        loss=loss(tokens_of(270)),
        seconds=0.07 * 300,
    )
    rows = rows_of(tmp_path, [*dense_runs(), sparse])
    row = rows["sparse", 300]
    assert row["dense_tokens"] == pytest.approx(tokens_of(270), rel=1e-4)
    assert row["delta"] == pytest.approx(math.log(300 / 270), rel=1e-3)
    assert row["R"] == pytest.approx(0.07 / 0.1 * 300 / 270, rel=1e-4)
    assert (row["measured"], row["speed_from"]) == (True, "measured")
    assert row["seconds"] == pytest.approx(21.0)
    assert row["sparse_share"] == pytest.approx(0.8)
    # R = q / s + (1 - q) times D / D_eq is 1 at this s.
    speed = row["break_even_speed"]
    assert (0.8 / speed + 0.2) * 300 / 270 == pytest.approx(1, rel=1e-3)
    # It counts FLOPs, and is not shown beside measured seconds.
    assert f"{speed:.2f}x" not in capsys.readouterr().out
    assert not row["extrapolated"] and row["seeds"] == 1
    assert (row["R_low"], row["R_high"]) == (None, None)
    assert (row["device"], row["commit"]) == ("abacus", "0123456")
    assert row["command"] == "the command"
    count = parameters(DENSE.model)
    assert row["parameters"] == count == 2 * (4 * 64**2 + 2 * 64 * 256) + 5 * 64
    assert row["tokens_per_parameter"] == pytest.approx(tokens_of(300) / count)
    for steps in BUDGETS:
        assert rows["dense", steps]["R"] == pytest.approx(1, rel=1e-4)
    assert (tmp_path / "equal_loss.png").stat().st_size > 10_000


def test_R_best_is_over_the_dense_arm_that_needs_the_fewest_seconds(tmp_path):
    """A wide dense model takes 0.15 seconds a step and needs half of the tokens, so
    that its seconds for a loss are 0.75 of the dense model's."""
    wide = [
        Synthetic(
            name=f"wide-{steps}",
            arm="wide",
            config=replace(DENSE, steps=steps),
            loss=loss(tokens_of(2 * steps)),
            seconds=0.15 * steps,
        )
        for steps in (135, 300)
    ]
    sparse = Synthetic(
        name="sparse",
        config=sparse_config(300, 0.8),
        loss=loss(tokens_of(270)),
        seconds=0.07 * 300,
    )
    static = Synthetic(
        name="s2d",
        config=replace(DENSE, steps=100).with_recipe("s2d"),
        loss=0.5,
        seconds=1.0,
    )
    rows = rows_of(tmp_path, [*dense_runs(), *wide, sparse, static])
    row = rows["sparse", 300]
    assert row["best_dense"] == "wide" and not row["best_is_least"]
    assert row["R_best"] == pytest.approx(0.07 * 300 / (0.15 * 135), rel=1e-4)
    assert row["R"] == pytest.approx(0.07 * 300 / (0.1 * 270), rel=1e-4)
    for steps in (135, 300):
        of = rows["wide", steps]
        assert of["best_dense"] == "dense"
        assert of["R_best"] == pytest.approx(of["R"]) == pytest.approx(0.75, rel=1e-3)
    assert rows["dense", 300]["best_dense"] == "wide"
    assert rows["dense", 300]["R_best"] == pytest.approx(1 / 0.75, rel=0.02)
    assert not rows["dense", 300]["best_extrapolated"]
    # The loss of the longest dense run lies below all of the wide ones, whose line goes
    # on: below their curve, so that R_best is a little too high. A model whose weights
    # are static for a time is no dense one.
    row = rows["dense", 1000]
    assert row["best_dense"] == "wide" and row["best_extrapolated"]
    assert 1 / 0.75 < row["R_best"] < 1.1 / 0.75


def test_R_own_is_over_the_dense_arm_of_the_own_shape(tmp_path, capsys):
    """The wide dense model needs twice the seconds of the dense one for a loss, so that
    it is never the best, and the wide sparse one 0.8 of them."""
    model = replace(DENSE.model, d_hidden=2 * DENSE.model.d_hidden)
    wide = [
        Synthetic(
            name=f"wide-{steps}",
            arm="wide",
            config=replace(DENSE, model=model, steps=steps),
            loss=loss(tokens_of(steps)),
            seconds=0.2 * steps,
        )
        for steps in (135, 300)
    ]
    sparse = Synthetic(
        name="sparse",
        config=replace(sparse_config(300, 0.8), model=model),
        loss=loss(tokens_of(300)),
        seconds=0.16 * 300,
    )
    rows = rows_of(tmp_path, [*dense_runs(), *wide, sparse])
    row = rows["sparse", 300]
    assert (row["own_dense"], row["best_dense"]) == ("wide", "dense")
    assert row["R_own"] == pytest.approx(0.8, rel=1e-3)
    assert row["R_best"] == pytest.approx(1.6, rel=1e-3)
    assert not row["own_is_least"] and not row["own_extrapolated"]
    assert rows["wide", 300]["R_own"] is None is rows["dense", 300]["R_own"]
    # The table has it where no other figure has these digits, and the arm below it.
    assert "0.800" in capsys.readouterr().out
    # Of one length it is known only that this costs as much as its run.
    one = rows_of(tmp_path / "one", [*dense_runs(), wide[0], sparse])["sparse", 300]
    assert one["R_own"] is None and one["own_dense"] is None
    longer = rows_of(tmp_path / "longer", [*dense_runs(), wide[1], sparse])
    assert longer["sparse", 300]["R_own"] == pytest.approx(0.8, rel=1e-3)
    # A model that no dense arm has.
    alone = rows_of(tmp_path / "alone", [*dense_runs(), sparse])["sparse", 300]
    assert alone["R_own"] is None and alone["R_best"] == pytest.approx(1.6, rel=1e-3)


def test_runs_that_shared_a_device_measure_nothing(tmp_path):
    sparse = Synthetic(
        name="sparse",
        config=sparse_config(300, 0.75),
        loss=loss(tokens_of(240)),
        seconds=1.0,
    )
    dense = dense_runs(side_by_side=4)
    untimed = rows_of(tmp_path / "a", [*dense, sparse])["sparse", 300]
    assert untimed["R"] is None and not untimed["measured"]
    speed = untimed["break_even_speed"]
    assert (0.75 / speed + 0.25) * 300 / 240 == pytest.approx(1, rel=1e-3)

    given = {"speed": ("sparse=1.5",), "speed_from": "bench_step"}
    row = rows_of(tmp_path / "b", [*dense, sparse], **given)["sparse", 300]
    assert row["R"] == pytest.approx((0.75 / 1.5 + 0.25) * 300 / 240, rel=1e-4)
    assert (row["measured"], row["speed"]) == (False, 1.5)
    assert row["speed_from"] == "bench_step"
    # A speed that is given is not measured, even where seconds are.
    rows = rows_of(tmp_path / "c", [*dense_runs(), sparse], **given)
    assert not rows["sparse", 300]["measured"]
    assert rows["dense", 300]["measured"]
    # The runs' own mark counts, and that of the trunk that they begin with.
    beside = replace(sparse, name="beside", arm="other", side_by_side=3)
    branch = replace(sparse, name="branch", trunk="beside", begin=200)
    rows = rows_of(tmp_path / "d", [*dense_runs(), beside, branch])
    for arm in ("other", "branch"):
        assert rows[arm, 300]["R"] is None and rows[arm, 300]["seconds"] is None
        assert rows[arm, 300]["side_by_side"] == 3


def test_seconds_of_another_kind_of_device_are_not_compared(tmp_path):
    elsewhere = Synthetic(
        name="again", config=replace(DENSE, steps=400), loss=1.0, device="slide rule"
    )
    rows = rows_of(tmp_path, [*dense_runs(), elsewhere])
    assert rows["dense", 300]["measured"] and not rows["again", 400]["measured"]
    assert rows["again", 400]["speed_from"] == "FLOPs"


def test_seconds_of_more_devices_are_not_compared(tmp_path):
    again = Synthetic(name="again", config=replace(DENSE, steps=400), loss=1.0)
    rows = rows_of(tmp_path, [*dense_runs(), replace(again, devices=2)])
    assert rows["dense", 300]["measured"] and not rows["again", 400]["measured"]
    assert rows["again", 400]["device"] == "2 x abacus"


def test_shares_of_sparse_steps_are_means_over_the_seeds(tmp_path):
    """One run of the arm is sparse for 80 % of its steps, the other for 40 %."""
    runs = [
        Synthetic(
            name="sparse",
            seed=seed,
            config=sparse_config(300, share),
            loss=loss(tokens_of(270)),
            side_by_side=2,
        )
        for seed, share in enumerate((0.8, 0.4))
    ]
    given = {"speed": ("sparse=1.5",), "speed_from": "a test"}
    dense = dense_runs(side_by_side=2)
    row = rows_of(tmp_path, [*dense, *runs], **given)["sparse", 300]
    assert row["sparse_share"] == row["sparse_cost"] == pytest.approx(0.6)
    assert row["dense_cost"] == pytest.approx(0.4)
    expected = (0.4 + 0.6 / 1.5) * 300 / 270
    assert row["R"] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(("unknown", "has_interval"), [(5, True), (50, False)])
def test_an_interval_needs_curves_that_fall(unknown, has_interval):
    ratios = np.concatenate([[1.0], np.linspace(0.5, 1.5, 1000)])
    ratios[1 : 1 + unknown] = np.nan
    row = ratio_fields("R", ratios, has_spread=True)
    assert row["R"] == 1.0
    known = np.percentile(ratios[1 + unknown :], [5, 95])
    ends = [row["R_low"], row["R_high"]]
    assert ends == (pytest.approx(known.tolist()) if has_interval else [None, None])


def test_seconds_below_zero_are_no_ratio(tmp_path):
    """A line through these dense runs says that one of few tokens takes less than no
    time."""
    dense = [
        replace(run, wall_seconds=seconds)
        for run, seconds in zip(dense_runs(), (1.0, 90.0, 500.0), strict=True)
    ]
    poor = Synthetic(
        name="poor",
        config=replace(DENSE, steps=200),
        loss=loss(tokens_of(20)),
        seconds=20.0,
        wall_seconds=60.0,
    )
    row = rows_of(tmp_path, [*dense, poor])["poor", 200]
    assert row["extrapolated"] and row["R"] == pytest.approx(10, rel=1e-2)
    assert row["R_wall"] is None


def test_a_table_in_a_pipe_has_all_of_its_numbers(tmp_path, capsys):
    given = {"speed": ("sparse=1.4",), "speed_from": "a test"}
    runs = with_noise(1e-3, 2, np.random.default_rng(0))
    rows = rows_of(tmp_path, runs, **given)
    shown = capsys.readouterr().out
    for row in rows.values():
        assert f"{row['loss']:.4f}" in shown and f"{row['R']:.3f}" in shown
        assert f"{row['R_low']:.3f}-{row['R_high']:.3f}" in shown
    assert len(rows) == 4 and "seeds" in shown
    assert f"{rows['sparse', 300]['break_even_speed']:.2f}x" in shown


def test_a_branch_has_the_steps_of_its_trunk_as_they_were_trained(tmp_path):
    """By its own plan the branch was dense from step 50 on, but it began at step 240 of
    a trunk that was sparse to there."""
    constant = replace(DENSE.optimizer, decay_share=0.0)
    trunk = Synthetic(
        name="trunk",
        config=replace(sparse_config(400, 0.9), optimizer=constant),
        loss=2.0,
        seconds=20.0,
    )
    branch = Synthetic(
        name="branch",
        config=sparse_config(300, 50 / 300),
        loss=loss(tokens_of(300)),
        trunk="trunk",
        begin=240,
        trunk_seconds=12.0,
        seconds=6.0,
    )
    rows = rows_of(tmp_path, [*dense_runs(), trunk, branch])
    assert rows["branch", 300]["sparse_share"] == pytest.approx(0.8)
    assert rows["branch", 300]["R"] == pytest.approx(18 / 30, rel=1e-4)
    assert "trunk" not in {arm for arm, _ in rows}


def test_what_has_no_final_loss_is_left_out_with_the_reason(tmp_path, capsys):
    runs = dense_runs()
    constant = replace(DENSE.optimizer, decay_share=0.0)
    runs.append(
        Synthetic(name="trunk", config=replace(DENSE, optimizer=constant), loss=1.0)
    )
    runs.append(Synthetic(name="begun", loss=1.0, ended=False))
    write_comparison(tmp_path, runs, baseline="dense-100")
    listing = json.loads((tmp_path / "comparison.json").read_text())
    listing["runs"]["later"] = ["later/seed-0"]
    (tmp_path / "comparison.json").write_text(json.dumps(listing))
    finished, others = read_finished(tmp_path)
    assert [run.name for run in finished] == [f"dense-{n}" for n in BUDGETS]
    assert set(others) == {"trunk/seed-0", "begun/seed-0", "later/seed-0"}
    results = str(tmp_path / "rows.jsonl")
    assert equal_loss.run([str(tmp_path), "--results", results]) == 0
    shown = capsys.readouterr().out
    assert "trunk/seed-0: is at a constant learning rate" in shown
    assert "begun/seed-0: has not ended; left out" in shown
    assert "later/seed-0: has not begun; left out" in shown


def with_noise(deviation: float, seeds: int, generator) -> list[Synthetic]:
    """Dense runs and a sparse one of so many seeds, whose losses differ by chance."""
    sparse = Synthetic(
        name="sparse", config=sparse_config(300, 0.8), loss=loss(tokens_of(270))
    )
    return [
        replace(run, seed=seed, loss=run.loss + generator.normal(0, deviation))
        for run in (*dense_runs(side_by_side=2), sparse)
        for seed in range(seeds)
    ]


def test_the_interval_holds_the_truth_as_often_as_it_says(tmp_path):
    generator = np.random.default_rng(1)
    truth = (0.8 / 1.4 + 0.2) * 300 / 270
    held, widths = 0, []
    for trial in range(20):
        folder = tmp_path / str(trial)
        write_comparison(folder, with_noise(2e-3, 4, generator))
        groups = grouped(read_finished(folder)[0])
        told = {"comparison": "a", "command": "b"}
        rows = of_groups(groups, "dense", {"sparse": Speed(1.4)}, "a test", **told)
        row = next(row for row in rows if row.arm == "sparse")
        assert row.R_low is not None and row.R is not None and row.R_high is not None
        assert row.R_low < row.R < row.R_high and row.seeds == 4
        held += row.R_low < truth < row.R_high
        widths.append(row.R_high - row.R_low)
    # 20 trials at 90 %: fewer than 15 are as likely as 1 in 88.
    assert held >= 15
    # dR = R dL / (D dL/dD): twice 1.645 standard errors, sparse's and the curve's.
    slope = 0.3 * (loss(tokens_of(270)) - 0.9)
    one = 2 * 1.645 * 2e-3 / math.sqrt(4) / slope * truth
    assert one < np.mean(widths) < 2 * one


def test_wall_clock_counts_what_is_paid_once_by_either_once(tmp_path):
    # 40 seconds before the first step and 0.12 a step, 55 and 0.08 of the sparse run.
    dense = [
        replace(run, wall_seconds=40 + 0.12 * run.config.steps) for run in dense_runs()
    ]
    sparse = Synthetic(
        name="sparse",
        config=sparse_config(300, 0.8),
        loss=loss(tokens_of(270)),
        seconds=0.07 * 300,
        wall_seconds=55 + 0.08 * 300,
    )
    row = rows_of(tmp_path / "a", [*dense, sparse])["sparse", 300]
    assert row["wall_seconds"] == pytest.approx(79)
    expected = (55 + 0.08 * 300) / (40 + 0.12 * 270)
    # The curve through the dense losses is found to 1e-4 of D_eq.
    assert row["R_wall"] == pytest.approx(expected, rel=1e-4)
    assert row["R_tokens"] == pytest.approx(300 / 270, rel=1e-4)
    # One run that does not say leaves nothing to compare with.
    some = [*dense[:-1], replace(dense[-1], wall_seconds=None), sparse]
    row = rows_of(tmp_path / "b", some)["sparse", 300]
    assert row["R_wall"] is None and row["R"] is not None
    # Nor do seconds of a device that other runs had a share of say anything.
    shared = [*dense, replace(sparse, side_by_side=2)]
    row = rows_of(tmp_path / "c", shared)["sparse", 300]
    assert row["R_wall"] is row["wall_seconds"] is row["seconds"] is None


def test_the_interval_of_a_speed_widens_that_of_R_and_of_nothing_else(tmp_path):
    def row_at(speed: str, folder) -> dict:
        runs = with_noise(1e-6, 2, np.random.default_rng(3))
        given = {"speed": (f"sparse={speed}",), "speed_from": "a test"}
        return rows_of(folder, runs, **given)["sparse", 300]

    sure, drawn = row_at("1.4", tmp_path / "a"), row_at("1.4:1.3-1.5", tmp_path / "b")
    assert (drawn["speed"], drawn["speed_low"], drawn["speed_high"]) == (1.4, 1.3, 1.5)
    assert drawn["R"] == sure["R"]
    assert drawn["R_tokens_low"] == pytest.approx(sure["R_tokens_low"], rel=1e-3)
    # R at the ends of the speed's interval, whose middle is 1.4 but for 0.2 %; the
    # percentiles of 2,000 draws of a deviation s / R of 0.034 are known to 0.003.
    for end, speed in (("R_low", 1.5), ("R_high", 1.3)):
        expected = (0.8 / speed + 0.2) * 300 / 270
        assert drawn[end] == pytest.approx(expected, abs=0.006)
    assert sure["R_high"] - sure["R_low"] < 1e-3


def test_batches_that_all_runs_share_move_them_together(tmp_path):
    """Batches that are harder for all runs alike say nothing of R; those that are
    harder for one arm do."""
    generator = np.random.default_rng(0)
    common = generator.normal(0, 0.05, 64)
    own = generator.normal(0, 0.05, 64)

    def widths(of_sparse, folder):
        runs = with_noise(1e-5, 2, np.random.default_rng(2))
        runs = [
            replace(
                run,
                batch_losses=list(
                    run.loss + (of_sparse if run.name == "sparse" else common)
                ),
            )
            for run in runs
        ]
        given = {"speed": ("sparse=1.4",), "speed_from": "a test"}
        row = rows_of(folder, runs, **given)["sparse", 300]
        return row["R_high"] - row["R_low"]

    together = widths(common, tmp_path / "a")
    assert together < 0.01
    assert widths(own, tmp_path / "b") > 10 * together


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"reference": "sparse"}, "at least three different lengths"),
        ({"reference": "dens"}, "'dens' is no arm with finished runs"),
        ({"speed": ("sparse=x",), "speed_from": "a"}, "--speed sparse=x must be ARM=S"),
        ({"speed": ("sparse=-1",), "speed_from": "a"}, "with positive numbers"),
        ({"speed": ("sparse=2:1",), "speed_from": "a"}, "sparse=2:1 must be ARM=S"),
        ({"speed": ("sparse=2:3-4",), "speed_from": "a"}, "S between LOW and HIGH"),
        ({"speed": ("spars=1.1",), "speed_from": "a"}, "'spars' is no arm"),
        ({"speed": ("sparse=1.1",)}, "belong together"),
    ],
)
def test_what_cannot_be_asked_is_refused(settings, message, tmp_path):
    sparse = Synthetic(name="sparse", config=sparse_config(300, 0.8), loss=1.0)
    with pytest.raises(ValueError, match=message):
        rows_of(tmp_path, [*dense_runs(), sparse], **settings)


def test_two_runs_of_one_arm_length_and_seed_are_refused(tmp_path):
    twice = replace(dense_runs()[1], name="dense-again")
    with pytest.raises(ValueError, match="arm 'dense' has several runs .* dense-again"):
        rows_of(tmp_path, [*dense_runs(), twice])


def test_a_folder_without_a_comparison_is_refused(tmp_path, capsys):
    assert equal_loss.run([str(tmp_path)]) == 1
    assert "holds no comparison" in capsys.readouterr().err
