"""Loss against tokens: what is fitted to a known curve is that curve."""

import numpy as np
import pytest

from experiments.worth.dense_curve import DenseCurves

TOKENS = np.array([1e8, 3e8, 1e9])


def fitted(tokens, losses, weights=None) -> DenseCurves:
    weights = np.ones(len(tokens)) if weights is None else weights
    return DenseCurves.fit(tokens, np.atleast_2d(losses), weights)


@pytest.mark.parametrize("exponent", [0.05, 0.3, 0.9])
@pytest.mark.parametrize("tokens", [TOKENS, np.geomspace(1e7, 1e9, 6)])
def test_three_budgets_or_more_of_a_power_law_give_it_back(exponent, tokens):
    loss = lambda d: 0.8 + 0.5 * (d / 1e8) ** -exponent
    curve = fitted(tokens, loss(tokens))
    assert curve.exponent[0] == pytest.approx(exponent, abs=1e-5)
    for at in (0.7 * tokens[0], 5e8, 1.5 * tokens[-1]):
        assert curve.loss(at)[0] == pytest.approx(loss(at), abs=1e-7)
        assert curve.tokens(np.array([loss(at)]))[0] == pytest.approx(at, rel=1e-5)


def test_a_straight_line_in_the_logarithm_is_one():
    loss = lambda d: 2.0 - 0.1 * np.log(d / 1e8)
    curve = fitted(TOKENS, loss(TOKENS))
    assert curve.exponent[0] < 1e-6
    assert curve.tokens(np.array([loss(5e8)]))[0] == pytest.approx(5e8, rel=1e-4)
    # Concave losses are on no such curve; the nearest is the straight one.
    assert fitted(TOKENS, loss(TOKENS) + np.array([0, 0.01, 0])).exponent[0] < 1e-6


def test_replicates_are_fitted_one_by_one():
    exponents = np.array([0.1, 0.4, 0.2])
    losses = 1 + 0.3 * (TOKENS / 1e8) ** -exponents[:, None]
    curves = fitted(TOKENS, losses)
    np.testing.assert_allclose(curves.exponent, exponents, atol=1e-5)
    wanted = 1 + 0.3 * 5.0**-exponents
    np.testing.assert_allclose(curves.loss(5e8), wanted, atol=1e-7)
    np.testing.assert_allclose(curves.tokens(wanted), 5e8, rtol=1e-5)


def test_a_loss_that_dense_never_has_takes_for_ever():
    curve = fitted(TOKENS, 0.8 + 0.5 * (TOKENS / 1e8) ** -0.5)
    assert np.isinf(curve.tokens(np.array([0.7]))[0])
    assert np.isfinite(curve.tokens(np.array([0.81]))[0])
    assert np.isfinite(curve.tokens(np.array([30.0]))[0])


def test_of_a_replicate_that_does_not_fall_nothing_is_said():
    falls, rises = [1.2, 1.1, 1.0], [1.0, 1.1, 1.2]
    tokens = fitted(TOKENS, [falls, rises]).tokens(np.full(2, 1.1))
    assert np.isnan(tokens).tolist() == [False, True]


def test_weights_say_which_budgets_count():
    tokens = np.array([1e8, 2e8, 4e8, 8e8])
    losses = 1 + (tokens / 1e8) ** -0.5
    off = losses + np.array([0, 0, 0.01, 0])
    heavy = fitted(tokens, off, np.array([1.0, 1.0, 1e-9, 1.0]))
    assert heavy.loss(4e8)[0] == pytest.approx(losses[2], abs=1e-6)
    even = fitted(tokens, off)
    assert even.loss(4e8)[0] - losses[2] > 1e-3


def test_what_is_no_curve_is_refused():
    with pytest.raises(ValueError, match="at least three different lengths, .* are 2"):
        fitted(np.array([1e8, 2e8, 2e8]), [3.0, 2.0, 2.0])
    with pytest.raises(ValueError, match="do not fall with tokens"):
        fitted(TOKENS, [1.0, 1.1, 1.2])
