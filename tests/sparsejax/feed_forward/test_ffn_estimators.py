"""Weight gradients that draw random numbers: minimum-variance unbiased estimators."""

import dataclasses

import jax
import numpy as np
import pytest
from jax import lax

from sparsejax.feed_forward.sparsity import FFNSparsity
from sparsejax.sparsity.patterns import VNM
from tests.support.oracles.ffn_cases import (
    D_HIDDEN,
    jitted,
    make_experts,
    make_inputs,
    name_of,
    value_and_gradients,
)
from tests.support.oracles.ffn_oracle import (
    cluster_mask,
    two_of_four,
)

STOCHASTIC = pytest.mark.parametrize(
    "sparsity",
    [
        FFNSparsity(
            activations=activations,
            weight_gradients=weight_gradients,
            token_sparsity=method,
        )
        for method in ("mvue", "mvue_approximate")
        for activations, weight_gradients in (
            (None, "dense"),
            (VNM(8, 2, 16), "expert_columns"),
        )
    ],
    ids=name_of,
)


@STOCHASTIC
def test_mvue_weight_gradients_are_unbiased(sparsity):
    x, w_up, w_down, dy = (a.astype(np.float32) for a in make_inputs())
    experts, draws = make_experts(sparsity), 2000
    exact = dataclasses.replace(sparsity, token_sparsity=None)
    y, dx, *expected = jitted(exact, x, w_up, w_down, dy, experts)

    def one(key):
        return value_and_gradients(sparsity, x, w_up, w_down, dy, experts, key=key)

    run = jax.jit(lambda keys: lax.map(one, keys, batch_size=50))
    ys, dxs, *drawn = run(jax.random.split(jax.random.key(0), draws))
    # the key reaches nothing but the weight gradients
    assert np.ptp(ys, axis=0).max() == 0 and np.ptp(dxs, axis=0).max() == 0
    np.testing.assert_allclose(ys[0], y, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(dxs[0], dx, rtol=1e-5, atol=1e-5)
    for samples, target in zip(drawn, expected, strict=True):
        samples, target = np.asarray(samples, np.float64), np.asarray(target)
        error = abs(samples.mean(axis=0) - target)
        deviation = samples.std(axis=0)
        # Bernstein's second term: a draw too rare to be seen has no deviation, and a
        # mean that is off by its effect times at most a few over `draws`
        unseen = 3 * np.max(abs(samples - target)) / draws
        bound = 5 * deviation / np.sqrt(draws) + unseen
        assert np.all(error < bound)
        # the bound means something, and the draws differ
        assert np.median(bound) < 0.1 * np.std(target)
        assert np.max(deviation) > 0.1 * np.std(target)


@STOCHASTIC
def test_mvue_leaves_the_densest_features_exact(sparsity):
    x, w_up, w_down, dy = make_inputs()
    experts = make_experts(sparsity)
    exact = dataclasses.replace(sparsity, token_sparsity=None)
    y_up = x @ w_up
    active, clusters = y_up > 0, [range(D_HIDDEN)]
    if sparsity.experts:
        own = cluster_mask(experts, D_HIDDEN, sparsity.experts)
        active &= two_of_four(y_up, axis=1) & own
        clusters = np.split(np.arange(D_HIDDEN), sparsity.experts)
    dense = np.zeros(D_HIDDEN, bool)
    for cluster in clusters:
        # 5 % of the features are less than one tile of 16
        ranked = sorted(cluster, key=lambda f: (-np.sum(active[:, f]), f))
        dense[ranked[:16]] = True
    inputs = tuple(a.astype(np.float32) for a in (x, w_up, w_down, dy))
    expected = jitted(exact, *inputs, experts)
    got = jitted(sparsity, *inputs, experts, key=jax.random.key(1))
    for i, axis in ((2, 0), (3, 1)):
        error = np.max(abs(got[i] - expected[i]), axis=axis)
        assert np.max(error[dense]) < 1e-5
        assert np.max(error[~dense]) > 1e-2


@STOCHASTIC
def test_mvue_draws_from_its_key_alone(sparsity):
    inputs = tuple(a.astype(np.float32) for a in make_inputs())
    experts = make_experts(sparsity)
    first, again, *others = (
        jitted(sparsity, *inputs, experts, key=jax.random.key(seed))
        for seed in (0, 0, 1, 2, 3)
    )
    for i in (2, 3):
        np.testing.assert_array_equal(first[i], again[i])
        # Few groups have more than two non-zeros to draw from.
        assert any(np.any(first[i] != other[i]) for other in others)


@STOCHASTIC
def test_mvue_draws_of_a_what_it_does_not_of_dy1(sparsity):
    """X and dY are the identity, so that dW1 is what is left of dY1, and dW2 of A^T;
    with W2 half of W1^T, A and dY1 are the same numbers."""
    x = dy = np.eye(32, dtype=np.float32)
    w_up = np.random.default_rng(0).uniform(1, 2, (32, D_HIDDEN)).astype(np.float32)
    experts = np.zeros((32, 1), int) if sparsity.experts else None

    def kept(sparsity, key=None):
        *_, dw_up, dw_down = jitted(sparsity, x, w_up, w_up.T / 2, dy, experts, key=key)
        return dw_up != 0, dw_down.T != 0

    by_size = dataclasses.replace(sparsity, token_sparsity="magnitude")
    np.testing.assert_array_equal(*kept(by_size))
    of_dy1, of_a = kept(sparsity, jax.random.key(0))
    assert np.any(of_dy1 != of_a)
