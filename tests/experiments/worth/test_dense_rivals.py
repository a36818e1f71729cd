"""The lowest cost of a loss over dense arms whose losses are known in closed form."""

import numpy as np
import pytest

from experiments.worth.dense_curve import DenseCurves
from experiments.worth.dense_rivals import DenseRivals, Length, cost_of


def curve_loss(tokens):
    return 1.0 - 0.1 * np.log(tokens / 100)


@pytest.fixture(scope="module")
def curves():
    """The reference: 0.1 nats for each factor of e, one replicate and one beside it
    that is 0.05 higher."""
    tokens = np.array(TOKENS)
    losses = curve_loss(tokens)
    return DenseCurves.fit(tokens, np.stack([losses, losses + 0.05]), np.ones(3))


def length(cost: float, *losses: float) -> Length:
    return Length(np.array(losses), cost)


TOKENS = (50.0, 100.0, 200.0)
"""The reference's lengths."""


def rivals_of(curves, **others: list[Length]) -> DenseRivals:
    return DenseRivals("dense", curves, TOKENS, others)


def test_between_two_lengths_the_loss_falls_in_a_straight_line_in_the_log_of_cost():
    lengths = [
        length(100.0, 0.9, 0.8),
        length(400.0, 0.7, 0.7),
        length(800.0, 0.6, 0.6),
    ]
    found = cost_of(np.array([0.8, 0.75]), lengths)
    np.testing.assert_allclose(found, [200.0, 200.0])
    np.testing.assert_allclose(
        cost_of(np.array([0.65, 0.6]), lengths), [400 * 2**0.5, 800.0]
    )
    # Before the shortest the first of the lines goes on, after the longest the last.
    np.testing.assert_allclose(cost_of(np.array([1.0, 0.9]), lengths), [50.0, 25.0])
    np.testing.assert_allclose(
        cost_of(np.array([0.5, 0.55]), lengths), [1600, 800 * 2**0.5]
    )


def test_of_one_length_no_more_is_known_than_what_it_costs():
    found = cost_of(np.array([0.9, 0.79]), [length(300.0, 0.8, 0.8)])
    np.testing.assert_array_equal(found, [300.0, np.inf])


@pytest.mark.parametrize("loss", [0.85, 0.75])
def test_who_has_one_length_may_pass_a_loss_before_it_or_after(curves, loss):
    # At a factor of e for 0.1 nats: half of one before its end, or after.
    passed = 300 * np.exp((0.8 - loss) / 0.1)
    losses = np.array([loss, loss])
    for factor, is_least in ((1.01, True), (0.99, False)):
        at = passed * factor
        # They fall by as much, so that the median of the falls is that.
        ends = at * np.exp([-0.1, 0.1])
        around = [length(ends[0], *losses + 0.01), length(ends[1], *losses - 0.01)]
        rivals = rivals_of(curves, deep=[length(300.0, 0.8, 0.8)], wide=around)
        best = rivals.best(losses, rivals.arms)
        assert best.is_least == is_least
        assert best.likely[0] == pytest.approx(min(at, passed))
        assert best.costs[0] == pytest.approx(at)
        # Who is no rival is not counted.
        assert not rivals.best(losses, {"wide"}).is_least


def test_a_longer_run_that_ends_higher_gains_nothing():
    lengths = [length(100.0, 0.8), length(200.0, 0.85), length(400.0, 0.7)]
    np.testing.assert_allclose(cost_of(np.array([0.8]), lengths), [100.0])
    np.testing.assert_allclose(cost_of(np.array([0.75]), lengths), [200 * 2 ** (2 / 3)])


def test_the_best_is_one_of_the_rivals(curves):
    losses = np.array([curve_loss(200.0), curve_loss(200.0)])
    wide = [length(60.0, *(losses + 0.1)), length(150.0, *(losses - 0.1))]
    rivals = rivals_of(curves, wide=wide)
    best = rivals.best(losses, rivals.arms)
    assert best.name == "wide" and not best.extrapolated
    np.testing.assert_allclose(best.costs, [(60 * 150) ** 0.5] * 2, rtol=1e-6)
    # The second replicate of the reference needs half a factor of e more.
    best = rivals.best(losses, {"dense"})
    assert best.name == "dense" and not best.extrapolated
    np.testing.assert_allclose(best.costs, [200.0, 200.0 * np.exp(0.5)], rtol=1e-6)
    best = rivals_of(curves).best(losses, set())
    assert best.name is None and np.isinf(best.costs).all()


@pytest.mark.parametrize("more", [0.2, -0.2])
def test_a_cost_outside_the_lengths_of_the_best_arm_is_extrapolated(curves, more):
    losses = np.array([0.9, 0.9]) + more
    around = [length(30.0, 0.95, 0.95), length(40.0, 0.85, 0.85)]
    best = rivals_of(curves, wide=around).best(losses, {"dense", "wide"})
    assert best.name == "wide" and best.extrapolated
    best = rivals_of(curves).best(losses, {"dense"})
    assert best.name == "dense" and best.extrapolated


def test_a_reference_that_does_not_fall_leaves_the_best_unknown():
    falls = curve_loss(np.array(TOKENS))
    losses = np.stack([falls, falls[::-1]])
    curves = DenseCurves.fit(np.array(TOKENS), losses, np.ones(3))
    rivals = rivals_of(curves, wide=[length(60.0, 0.9, 0.9)])
    best = rivals.best(np.array([curve_loss(100.0)] * 2), rivals.arms)
    assert best.name == "wide" and best.costs[0] == 60.0 and np.isnan(best.costs[1])
    # The reference's own rivals do not rest on its curve.
    best = rivals.best(np.array([curve_loss(100.0)] * 2), {"wide"})
    assert best.costs.tolist() == [60.0, 60.0]
