"""Balanced clusters and their order, against plain loops."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparsejax.routing.clusters import balanced_clusters, contiguous_order


def gaussian(shape, seed=0):
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.normal(size=shape), jnp.float32)


def objective(w, assignment, experts):
    units = np.asarray(w, np.float64)
    units = units / np.linalg.norm(units, axis=0)
    return sum(
        np.linalg.norm(units[:, np.asarray(assignment) == e].sum(axis=1))
        for e in range(experts)
    )


def planted(experts, size, noise=0.3, seed=1):
    """Columns around orthogonal directions, shuffled; and which direction."""
    rng = np.random.default_rng(seed)
    label = rng.permutation(np.repeat(np.arange(experts), size))
    w = np.eye(16)[:, label] + noise / 4 * rng.normal(size=(16, experts * size))
    # Norms must not matter.
    return jnp.asarray(w * rng.uniform(0.1, 10, size=w.shape[1]), jnp.float32), label


@pytest.mark.parametrize("d_hidden, experts", [(32, 4), (24, 3), (8, 8), (12, 1)])
def test_clusters_are_equal_and_deterministic(d_hidden, experts):
    w = gaussian((6, d_hidden))
    assignment, centres = balanced_clusters(w, experts)
    sizes = np.bincount(np.asarray(assignment), minlength=experts)
    np.testing.assert_array_equal(sizes, d_hidden // experts)
    again, centres_again = jax.jit(balanced_clusters, static_argnums=1)(w, experts)
    np.testing.assert_array_equal(assignment, again)
    np.testing.assert_allclose(centres, centres_again, atol=1e-6)
    assert assignment.dtype == jnp.int32 and centres.dtype == jnp.float32

    units = np.asarray(w) / np.linalg.norm(w, axis=0)
    for e in range(experts):
        mean = units[:, np.asarray(assignment) == e].sum(axis=1)
        np.testing.assert_allclose(centres[e], mean / np.linalg.norm(mean), atol=1e-5)


@pytest.mark.parametrize("experts, size", [(2, 10), (4, 8), (8, 4)])
def test_planted_clusters_are_found(experts, size):
    w, label = planted(experts, size)
    assignment, _ = balanced_clusters(w, experts)
    pairs = set(zip(label.tolist(), np.asarray(assignment).tolist(), strict=True))
    assert len(pairs) == experts


def test_objective_is_never_below_its_start_and_improves():
    w = gaussian((5, 40), seed=2)
    start = jnp.asarray(np.random.default_rng(3).permutation(np.arange(40) % 4))
    values = [objective(w, start, 4)]
    for iterations in (0, 1, 3, 20):
        found, _ = balanced_clusters(w, 4, iterations=iterations, initial=start)
        values.append(objective(w, found, 4))
    np.testing.assert_array_equal(
        balanced_clusters(w, 4, iterations=0, initial=start)[0], start
    )
    assert all(b >= a - 1e-4 for a, b in itertools.pairwise(values))
    assert values[-1] > values[0] + 5
    # A warm start from the result stays there or gets better.
    again, _ = balanced_clusters(w, 4, initial=found)
    assert objective(w, again, 4) >= values[-1] - 1e-4


def test_keeping_the_best_makes_every_round_safe():
    """The placement is not optimal: a plain round can lower the objective."""
    w = gaussian((64, 3, 12), seed=5)
    start = jnp.broadcast_to(jnp.arange(12) % 3, (64, 12))

    @jax.jit
    @jax.vmap
    def one_round(w, assignment):
        return balanced_clusters(w, 3, iterations=1, initial=assignment)[0]

    for _ in range(8):
        after = one_round(w, start)
        for i in range(64):
            reached = objective(w[i], after[i], 3)
            assert reached >= objective(w[i], start[i], 3) - 1e-5
        start = after


def test_placement_is_stable():
    """No neuron and expert would both rather have each other."""
    w = gaussian((4, 24), seed=4)
    start = jnp.arange(24) % 3
    _, centres = balanced_clusters(w, 3, iterations=0, initial=start)
    placed = np.asarray(balanced_clusters(w, 3, iterations=1, initial=start)[0])
    assert np.any(placed != start)
    cosine = np.asarray((w / jnp.linalg.norm(w, axis=0, keepdims=True)).T @ centres.T)
    for f in range(24):
        for e in range(3):
            neuron_gains = cosine[f, e] > cosine[f, placed[f]] + 1e-6
            expert_gains = cosine[f, e] > cosine[placed == e, e].min() + 1e-6
            assert not (neuron_gains and expert_gains)


@pytest.mark.parametrize("fill", [0.0, np.nan, np.inf])
@pytest.mark.parametrize("iterations", [0, 20])
def test_unusable_columns_do_not_spoil_the_rest(fill, iterations):
    w, label = planted(4, 6)
    w = w.at[:, :3].set(fill)
    assignment, centres = balanced_clusters(w, 4, iterations=iterations)
    np.testing.assert_array_equal(np.bincount(np.asarray(assignment)), 6)
    np.testing.assert_allclose(np.linalg.norm(centres, axis=1), 1, atol=1e-5)
    pairs = zip(label[3:].tolist(), np.asarray(assignment)[3:].tolist(), strict=True)
    # The three take what room the others leave.
    assert len(set(pairs)) == 4
    zeros, none = balanced_clusters(jnp.full((4, 8), fill), 2)
    np.testing.assert_array_equal(np.bincount(np.asarray(zeros)), 4)
    np.testing.assert_array_equal(none, 0.0)


def test_clusters_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"d_hidden=10 .* experts=4.*pad to 12"):
        balanced_clusters(gaussian((4, 10)), 4)
    with pytest.raises(ValueError, match=r"cluster sizes \[3, 1\]"):
        balanced_clusters(gaussian((4, 4)), 2, initial=jnp.array([0, 0, 0, 1]))
    for experts in (0, -2):
        with pytest.raises(ValueError, match=rf"experts={experts} must be at least 1"):
            balanced_clusters(gaussian((4, 8)), experts)
    for experts in (4, 0):
        with pytest.raises(ValueError, match=f"10 neurons, .* experts={experts}"):
            contiguous_order(jnp.zeros(10, jnp.int32), experts)


@pytest.mark.parametrize(
    ("initial", "message"),
    [
        ([0, 0, -1, 1], r"the expert -1, which is not in \[0, 1\]; pass what"),
        ([0, 0, 2, 1], r"the expert 2, which is not in \[0, 1\]; pass what"),
        ([0, 0, 1], r"shape \(3,\) and dtype int32 must have one .* of 4 neurons"),
        ([0.0, 0.0, 1.0, 1.0], r"dtype float32 must have one integer for each of 4"),
    ],
)
def test_an_assignment_that_is_none_is_refused(initial, message):
    with pytest.raises(ValueError, match=message):
        balanced_clusters(gaussian((4, 4)), 2, initial=jnp.array(initial))


def test_contiguous_order_is_stable_and_keeps_the_function():
    w_up, w_down, x = gaussian((6, 16)), gaussian((16, 6), 1), gaussian((9, 6), 2)
    assignment, _ = balanced_clusters(w_up, 4)
    order = contiguous_order(assignment, 4)
    expected = [f for e in range(4) for f in range(16) if assignment[f] == e]
    np.testing.assert_array_equal(order, expected)

    def ffn(w_up, w_down):
        return jnp.square(jax.nn.relu(x @ w_up)) @ w_down

    # float32 sums of 16 terms in another order.
    np.testing.assert_allclose(
        ffn(w_up[:, order], w_down[order]), ffn(w_up, w_down), rtol=1e-4, atol=1e-4
    )
