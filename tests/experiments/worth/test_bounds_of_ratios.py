"""What R is at least, or at most, where no dense curve says it."""

import math
from dataclasses import replace

import pytest

from tests.support.files.equal_loss_runs import (
    BUDGETS,
    dense_runs,
    loss,
    rows_of,
    sparse_config,
    tokens_of,
)
from tests.support.files.synthetic_runs import DENSE, Synthetic


def test_a_dense_arm_of_one_length_below_a_loss_leaves_only_a_bound(tmp_path, capsys):
    of = {"deep": (replace(DENSE, steps=300), 900, 30.0)}
    of |= {"sparse": (sparse_config(300, 0.8), 600, 21.0)}
    deep, sparse = (
        Synthetic(name=name, config=config, loss=loss(tokens_of(worth)), seconds=took)
        for name, (config, worth, took) in of.items()
    )
    rows = rows_of(tmp_path, [*dense_runs(), deep, sparse])
    row = rows["sparse", 300]
    assert row["R_best"] == pytest.approx(21 / 30) and row["best_is_least"]
    assert row["R_best_low"] is None and row["R"] == pytest.approx(21 / 60, rel=1e-3)
    # The deep arm has passed that loss before its 300 steps, if it falls as dense does.
    long, longest = (loss(tokens_of(steps)) for steps in BUDGETS[-2:])
    fall = (long - longest) / math.log(BUDGETS[-1] / BUDGETS[-2])
    passed = 300 * math.exp((loss(tokens_of(900)) - loss(tokens_of(600))) / fall)
    likely = row["R_best_likely"]
    assert likely == pytest.approx(210 / passed, rel=1e-3) and likely > row["R_best"]
    shown = capsys.readouterr().out
    assert "at least" in shown and f"likely {likely:.3f}" in shown
    assert not rows["deep", 300]["best_is_least"]
    assert rows["deep", 300]["R_best_likely"] is None


def test_an_arm_below_the_longest_dense_run_has_a_bound_without_any_curve(
    tmp_path, capsys
):
    longest = max(BUDGETS)
    of = {
        "above": loss(tokens_of(longest)) + 0.001,
        "below": 0.9 * loss(tokens_of(longest)),
    }
    config = sparse_config(300, 0.8)
    arms = [
        Synthetic(name=name, config=config, loss=value, seconds=21.0)
        for name, value in of.items()
    ]
    rows = rows_of(tmp_path, [*dense_runs(), *arms])
    # A step of the dense model takes 0.1 seconds.
    assert rows["below", 300]["R_at_most"] == pytest.approx(21 / (0.1 * longest))
    assert rows["above", 300]["R_at_most"] is None
    assert rows["dense", longest]["R_at_most"] is None
    assert "at most" in capsys.readouterr().out
