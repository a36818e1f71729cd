"""Scores of experts and a step of their regression, against plain loops."""

import jax.numpy as jnp
import numpy as np

from sparsejax.routing.regression import (
    feature_count,
    regression_at,
    regression_scores,
    regression_step,
)

TOKENS, D, F, EXPERTS = 6, 16, 48, 3


def some_state(rng: np.random.Generator) -> dict:
    """A regression all of whose coefficients matter, with moments that are zero."""
    weights, w_up = rng.normal(size=(EXPERTS, D)), rng.normal(size=(D, F))
    state = regression_at(jnp.asarray(weights), jnp.asarray(w_up))
    for name in ("directions", "w"):
        state[name] = jnp.asarray(rng.normal(size=state[name].shape), jnp.float32)
    return state


def scores_by_loops(x, directions, w):
    found = np.zeros((len(x), len(w)))
    for t, token in enumerate(x):
        features = [max(token @ row[:-1] + row[-1], 0) ** 2 for row in directions]
        for e, row in enumerate(w):
            found[t, e] = row[:-1] @ np.concatenate([token, features]) + row[-1]
    return found


def test_it_begins_at_its_weights_and_at_neurons_of_unit_norm():
    rng = np.random.default_rng(0)
    weights, w_up = rng.normal(size=(EXPERTS, D)), rng.normal(size=(D, F))
    x = jnp.asarray(rng.normal(size=(TOKENS, D)), jnp.float32)
    state = regression_at(jnp.asarray(weights), jnp.asarray(w_up))
    np.testing.assert_allclose(regression_scores(x, state), x @ weights.T, atol=1e-4)
    assert feature_count(D, F) == len(state["directions"]) == 4
    assert (feature_count(4096, 16384), feature_count(64, 8)) == (512, 8)
    for j, row in enumerate(np.asarray(state["directions"])):
        neuron = w_up[:, j * F // 4]
        np.testing.assert_allclose(row[:-1], neuron / np.linalg.norm(neuron), rtol=1e-5)
        assert row[-1] == 0


def test_scores_and_a_step_are_those_of_plain_loops():
    """Adam's first step moves each coefficient by the rate against its gradient."""
    rng = np.random.default_rng(1)
    state = some_state(rng)
    x = rng.normal(size=(TOKENS, D)).astype(np.float32)
    at = {name: np.asarray(state[name], np.float64) for name in ("directions", "w")}
    got = regression_scores(jnp.asarray(x), state)
    np.testing.assert_allclose(got, scores_by_loops(x, **at), rtol=1e-4, atol=1e-4)

    shares = rng.dirichlet(np.ones(EXPERTS), size=TOKENS)

    def cross_entropy(coefficients):
        scores = scores_by_loops(x, **coefficients)
        logs = scores - np.log(np.exp(scores).sum(axis=1, keepdims=True))
        return -(shares * logs).sum(axis=1).mean()

    rate, little = 1e-3, 1e-6
    after = regression_step(state, jnp.asarray(x), jnp.asarray(shares), rate)
    for name, array in at.items():
        for place in [(0, 0), (1, 3), (2, -1)]:
            ends = []
            for sign in (1, -1):
                moved = {key: of.copy() for key, of in at.items()}
                moved[name][place] += sign * little
                ends.append(cross_entropy(moved))
            slope = (ends[0] - ends[1]) / (2 * little)
            step = float(after[name][place]) - array[place]
            assert abs(slope) > 1e-4
            np.testing.assert_allclose(step, -rate * np.sign(slope), rtol=0.02)


def test_a_step_on_bfloat16_tokens_is_that_on_the_same_tokens_in_float32():
    """Neither the products nor the gradients are rounded to bfloat16, 0.4 %."""
    rng = np.random.default_rng(2)
    state = some_state(rng)
    x = jnp.asarray(rng.normal(size=(TOKENS, D)), jnp.bfloat16)
    shares = jnp.asarray(rng.dirichlet(np.ones(EXPERTS), size=TOKENS))
    got = regression_step(state, x, shares, 1e-3)
    right = regression_step(state, x.astype(jnp.float32), shares, 1e-3)
    for name in ("first_directions", "first_w"):
        largest = float(jnp.max(jnp.abs(right[name])))
        assert largest > 1e-3
        np.testing.assert_allclose(got[name], right[name], atol=1e-5 * largest)
