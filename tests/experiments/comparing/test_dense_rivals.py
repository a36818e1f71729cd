"""The lowest cost of a loss over dense arms whose losses are known in closed form."""

import numpy as np
import pytest

from experiments.comparing.dense_curve import DenseCurves
from experiments.comparing.dense_rivals import DenseRivals, Length, cost_of


def curve_loss(tokens):
    return 1.0 - 0.1 * np.log(tokens / 100)


@pytest.fixture(scope="module")
def curves():
    """The reference: 0.1 nats for each factor of e, one replicate and one beside it
    that is 0.05 higher."""
    tokens = np.array([50.0, 100.0, 200.0])
    losses = curve_loss(tokens)
    return DenseCurves.fit(tokens, np.stack([losses, losses + 0.05]), np.ones(3))


def length(cost: float, *losses: float) -> Length:
    return Length(np.array(losses), cost)


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
    # Before the shortest the first of the lines goes on, and after the longest none.
    np.testing.assert_allclose(cost_of(np.array([1.0, 0.9]), lengths), [50.0, 25.0])
    assert np.isinf(cost_of(np.array([0.59, 0.59]), lengths)).all()


def test_of_one_length_no_more_is_known_than_what_it_costs():
    found = cost_of(np.array([0.9, 0.79]), [length(300.0, 0.8, 0.8)])
    np.testing.assert_array_equal(found, [300.0, np.inf])


def test_who_has_one_length_below_a_loss_has_passed_it_for_less(curves):
    one, two = [length(300.0, 0.8)], [length(30.0, 0.9), length(40.0, 0.8)]
    rivals = DenseRivals("dense", curves, {"deep": one, "wide": two})
    # At a factor of e for 0.1 nats, half of one before its end.
    passed = 300 * np.exp(-0.5)
    assert rivals.may_cost_less(0.85, "sparse", passed * 1.01)
    assert not rivals.may_cost_less(0.85, "sparse", passed * 0.99)
    assert not rivals.may_cost_less(0.8, "sparse", np.inf)
    assert not rivals.may_cost_less(0.85, "deep", np.inf)


def test_a_longer_run_that_ends_higher_gains_nothing():
    lengths = [length(100.0, 0.8), length(200.0, 0.85), length(400.0, 0.7)]
    np.testing.assert_allclose(cost_of(np.array([0.8]), lengths), [100.0])
    np.testing.assert_allclose(cost_of(np.array([0.75]), lengths), [200 * 2 ** (2 / 3)])


def test_the_best_is_another_arm_than_the_own_one(curves):
    losses = np.array([curve_loss(200.0), curve_loss(200.0)])
    wide = [length(60.0, *(losses + 0.1)), length(150.0, *(losses - 0.1))]
    rivals = DenseRivals("dense", curves, {"wide": wide})
    name, lowest = rivals.best(losses, "sparse")
    assert name == "wide"
    np.testing.assert_allclose(lowest, [(60 * 150) ** 0.5] * 2, rtol=1e-6)
    # The second replicate of the reference needs half a factor of e more.
    name, lowest = rivals.best(losses, "wide")
    assert name == "dense"
    np.testing.assert_allclose(lowest, [200.0, 200.0 * np.exp(0.5)], rtol=1e-6)
    alone = DenseRivals("dense", curves, {})
    name, lowest = alone.best(losses, "dense")
    assert name is None and np.isinf(lowest).all()


def test_a_reference_that_does_not_fall_leaves_the_best_unknown():
    tokens = np.array([50.0, 100.0, 200.0])
    falls = curve_loss(tokens)
    curves = DenseCurves.fit(tokens, np.stack([falls, falls[::-1]]), np.ones(3))
    wide = [length(60.0, 0.9, 0.9)]
    losses = np.array([curve_loss(100.0)] * 2)
    name, lowest = DenseRivals("dense", curves, {"wide": wide}).best(losses, "sparse")
    assert name == "wide" and lowest[0] == 60.0 and np.isnan(lowest[1])
    # The reference's own rivals do not rest on its curve.
    _, lowest = DenseRivals("dense", curves, {"wide": wide}).best(losses, "dense")
    assert lowest.tolist() == [60.0, 60.0]
