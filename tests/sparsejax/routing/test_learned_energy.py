"""The router that learns, against least squares and the energies themselves."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparsejax.routing.learned_energy import LearnedEnergy


def test_the_learned_router_finds_the_experts_with_the_most_energy():
    """The columns of an expert share a direction, and their lengths and the tokens'
    mean deceive the centres, at which it begins."""
    rng = np.random.default_rng(0)
    d_model, experts, neurons = 32, 8, 16
    directions = np.linalg.qr(rng.normal(size=(d_model, d_model)))[0][:experts]
    lengths = np.linspace(0.5, 2.0, experts)
    columns = np.repeat(lengths[:, None] * directions, neurons, axis=0)
    columns += 0.05 * rng.normal(size=columns.shape)
    w_up, router = jnp.asarray(columns.T, jnp.float32), LearnedEnergy()

    def tokens(count):
        mean = directions[0] - directions[-1]
        return jnp.asarray(mean + rng.normal(size=(count, d_model)), jnp.float32)

    def energies_of(x):
        clusters = jnp.maximum(x @ w_up, 0).reshape(-1, experts, neurons)
        return jnp.sum(clusters**4, axis=-1)

    def caught(state, x):
        index = router.choose(x, experts=experts, experts_per_token=2, state=state)
        energies = energies_of(x)
        own = jnp.take_along_axis(energies, index, axis=1).sum(axis=1)
        return float(jnp.mean(own / energies.sum(axis=1)))

    learn = jax.jit(partial(router.learned_state, share=1.0))
    state, held_out = router.initial_state(w_up, experts), tokens(2000)
    before = caught(state, held_out)
    for _ in range(400):
        x = tokens(256)
        state = learn(state, x, energies_of(x))
    after = caught(state, held_out)
    # What least squares finds in closed form, linear in the token, and what can be
    # caught at all.
    x = tokens(100 * 256)
    energies = energies_of(x)
    target = jnp.log(energies / energies.sum(axis=1, keepdims=True) + 1e-3)
    target -= target.mean(axis=1, keepdims=True)
    ones = np.pad(x, ((0, 0), (0, 1)), constant_values=1)
    solution, *_ = np.linalg.lstsq(ones, target)
    of_token, bias = solution[:-1].T, solution[-1:].T
    w = np.concatenate([of_token, 0 * state["w"][:, d_model:-1], bias], axis=1)
    linear = caught(dict(state, w=jnp.asarray(w)), held_out)
    energies = energies_of(held_out)
    two_best = jnp.sort(energies, axis=1)[:, -2:].sum(axis=1)
    most = float(jnp.mean(two_best / energies.sum(axis=1)))
    assert before < linear - 0.03 < most - 0.03, (before, linear, most)
    assert after > most - 0.5 * (most - linear), (before, after, linear, most)
    shares = router.energy_shares(router.scores(held_out, experts, state))
    np.testing.assert_allclose(shares.sum(axis=1), 1, rtol=1e-5)


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e30])
def test_the_learned_router_learns_nothing_from_what_is_not_finite(value):
    rng = np.random.default_rng(0)
    router, w_up = LearnedEnergy(), jnp.asarray(rng.normal(size=(8, 32)), jnp.float32)
    x = jnp.asarray(rng.normal(size=(64, 8)), jnp.float32)
    energies = jnp.asarray(rng.random((64, 4)), jnp.float32)
    learn = jax.jit(partial(router.learned_state, share=1.0))
    state = learn(router.initial_state(w_up, 4), x, energies)
    of_x = learn(state, x.at[0, 0].set(value), energies)
    of_energies = learn(state, x, energies.at[0, 0].set(np.nan))
    for after in (of_x, of_energies):
        jax.tree.map(np.testing.assert_array_equal, after, dict(state))
    assert int(learn(state, x, energies)["count"]) == 2
