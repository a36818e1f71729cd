"""The experts that each router chooses, against plain loops."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparsejax.routing.best_experts import best_experts
from sparsejax.routing.learned_energy import LearnedEnergy
from sparsejax.routing.routers import (
    ActivationEnergy,
    NearestCentre,
    SameExperts,
    TokenHash,
)


def nearest_centre(x, centres, experts_per_token=1):
    return NearestCentre().choose(
        x,
        experts=len(centres),
        experts_per_token=experts_per_token,
        state={"centres": centres},
    )


def gaussian(shape, seed=0):
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.normal(size=shape), jnp.float32)


def test_bfloat16_tokens_find_the_nearest_of_float32_centres():
    keys = jax.random.split(jax.random.key(3), 2)
    x = jax.random.normal(keys[0], (4000, 64), jnp.bfloat16)
    # Close to each other: rounded to bfloat16 many a choice would be another.
    centres = 1 + 1e-3 * jax.random.normal(keys[1], (8, 64))
    exact = np.asarray(x, np.float64) @ np.asarray(centres, np.float64).T
    first, second = np.sort(exact, axis=1)[:, ::-1][:, :2].T
    clear = first - second > 1e-4
    assert clear.mean() > 0.95
    got = nearest_centre(x, centres)[:, 0]
    np.testing.assert_array_equal(got[clear], exact.argmax(axis=1)[clear])
    rounded = nearest_centre(x, centres.astype(jnp.bfloat16))[:, 0]
    assert np.mean(got != rounded) > 0.1


@pytest.mark.parametrize("choices", [1, 2])
def test_nearest_centre_is_the_nearest_on_the_sphere(choices):
    x, centres = gaussian((20, 6)), gaussian((5, 6), 1)
    centres = centres / jnp.linalg.norm(centres, axis=1, keepdims=True)
    unit = np.asarray(x) / np.linalg.norm(x, axis=1, keepdims=True)
    distance = np.linalg.norm(unit[:, None] - np.asarray(centres)[None], axis=2)
    got = nearest_centre(x, centres, experts_per_token=choices)
    np.testing.assert_array_equal(got, np.argsort(distance, axis=1)[:, :choices])
    # Positive scaling of a token changes nothing; ties go to the lower expert.
    scaled = nearest_centre(8 * x, centres, experts_per_token=choices)
    np.testing.assert_array_equal(scaled, got)
    tied = nearest_centre(jnp.zeros((1, 6)), centres, experts_per_token=choices)
    np.testing.assert_array_equal(tied[0], np.arange(choices))


def python_mix(x):
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) % 2**32
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) % 2**32
    return x ^ (x >> 16)


@pytest.mark.parametrize("choices", [1, 3])
def test_token_hash_is_fixed_balanced_and_distinct(choices):
    ids = np.arange(4000)
    got = np.asarray(
        TokenHash().choose(jnp.asarray(ids), experts=8, experts_per_token=choices)
    )
    for token in ids[:50].tolist():
        scores = [
            python_mix(python_mix(token) ^ ((e + 1) * 0x9E3779B9 % 2**32)) >> 1
            for e in range(8)
        ]
        best = sorted(range(8), key=lambda e: -scores[e])[:choices]
        assert got[token].tolist() == best
    assert (np.diff(np.sort(got, axis=1), axis=1) > 0).all()
    counts = np.bincount(got.ravel(), minlength=8)
    mean = 4000 * choices / 8
    assert (np.abs(counts - mean) < 5 * np.sqrt(mean)).all()
    first = TokenHash().choose(jnp.asarray(ids), experts=8)
    np.testing.assert_array_equal(got[:, :1], first)


def test_same_experts_are_the_first_for_every_token():
    choose = SameExperts().choose
    got = choose(gaussian((5, 6)), experts=8, experts_per_token=2)
    np.testing.assert_array_equal(got, [[0, 1]] * 5)
    assert choose(gaussian((0, 6)), experts=8).shape == (0, 1)


def test_activation_energy_is_the_largest_squared_activation():
    y = gaussian((12, 16)).at[3].set(-1.0)
    clusters = np.maximum(np.asarray(y, np.float64).reshape(12, 4, 4), 0)
    mass = (clusters**4).sum(axis=2)
    choose = ActivationEnergy().choose
    got = choose(y, experts=4, experts_per_token=2)
    np.testing.assert_array_equal(got, np.argsort(-mass, axis=1, kind="stable")[:, :2])
    assert got[3].tolist() == [0, 1]
    assert choose(y[:0], experts=4).shape == (0, 1)
    with pytest.raises(ValueError, match="d_hidden=16 is not a multiple of experts=3"):
        choose(y, experts=3)
    with pytest.raises(ValueError, match="experts_per_token=5"):
        choose(y, experts=4, experts_per_token=5)


def test_what_a_router_reads_says_whether_blocks_can_be_skipped():
    for router, before, keeps in (
        (NearestCentre(), True, True),
        (TokenHash(), True, False),
        (ActivationEnergy(), False, False),
        (SameExperts(), True, False),
        (LearnedEnergy(), True, True),
    ):
        assert (router.before_up, router.has_state) == (before, keeps)


def test_a_router_that_learns_returns_the_arrays_that_it_was_given():
    class Forgets(LearnedEnergy):
        def learned_state(self, state, x, energies, share):
            return {"w": state["w"].astype(jnp.bfloat16)}

    x, energies = gaussian((6, 8)), jnp.ones((6, 4))
    state = LearnedEnergy().initial_state(gaussian((8, 16)), 4)
    found = LearnedEnergy().learn(state, x, energies, 1.0)
    assert set(found) == set(state)
    with pytest.raises(ValueError, match=r"router='learned' must return.*bfloat16"):
        Forgets().learn(state, x, energies, 1.0)


def test_the_centres_are_those_of_blocks_until_a_clustering_gives_others():
    w_up = gaussian((6, 8)).at[:, 2].set(0)
    units = np.asarray(w_up) / np.maximum(np.linalg.norm(w_up, axis=0), 1e-30)
    means = units.reshape(6, 4, 2).mean(axis=2).T
    router = NearestCentre()
    (centres,) = router.initial_state(w_up, 4).values()
    expected = means / np.linalg.norm(means, axis=1, keepdims=True)
    np.testing.assert_allclose(centres, expected, rtol=1e-5, atol=1e-6)
    clustered = gaussian((4, 6), 1)
    assert router.clustered_state(w_up, clustered)["centres"] is clustered
    assert TokenHash().clustered_state(w_up, clustered) == {}


@pytest.mark.parametrize(
    ("threshold", "counts"), [(0.0, [4, 3, 2, 1]), (0.3, [1, 2, 2, 1]), (1.0, [1] * 4)]
)
def test_a_threshold_leaves_the_experts_of_little_energy_out(threshold, counts):
    """At zero each expert with any energy is used, up to the cap; at one the best."""
    energies = jnp.array(
        [[8.0, 1, 2, 3], [0, 4, 3, 1], [5, 5, 0, 0], [0, 0, 0, 0]], jnp.float32
    )
    got = np.asarray(ActivationEnergy().of_scores(energies, 4, jnp.float32(threshold)))
    assert (got >= 0).sum(axis=1).tolist() == counts
    best = np.asarray(best_experts(energies, 4))
    np.testing.assert_array_equal(got, np.where(got >= 0, best, -1))
    capped = ActivationEnergy().of_scores(energies, 2, jnp.float32(threshold))
    np.testing.assert_array_equal(capped, got[:, :2])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int32])
@pytest.mark.parametrize("experts_per_token", [1, 2, 3, 4])
def test_ties_go_to_the_lower_expert(experts_per_token, dtype):
    """Also between zeros of both signs, and between several NaN, the largest scores."""
    scores = [[-0.0, 0.0, -1.0, 0.0], [0.0, 1.0, -0.0, 1.0], [-0.0, -0.0, 0.0, -0.0]]
    order = [[0, 1, 3, 2], [1, 3, 0, 2], [0, 1, 2, 3]]
    if dtype != jnp.int32:
        scores.append([1.0, np.nan, np.inf, -np.nan])
        order.append([1, 3, 2, 0])
    found = partial(best_experts, jnp.asarray(scores, dtype), experts_per_token)
    expected = np.array(order)[:, :experts_per_token]
    np.testing.assert_array_equal(found(), expected)
    np.testing.assert_array_equal(jax.jit(found)(), expected)


def test_scores_that_are_no_energies_have_no_shares():
    with pytest.raises(NotImplementedError, match="'token_hash' does not score"):
        TokenHash().of_scores(jnp.ones((2, 4)), 2, jnp.float32(0.5))
