"""Clusters, router choices and the dispatch of tokens, against plain loops."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsejax.router import (
    balanced_clusters,
    combine_rows,
    contiguous_order,
    dispatch,
    expert_of_row,
    gather_rows,
    nearest_centre,
    token_hash,
    true_mass,
)

dispatch_jit = jax.jit(dispatch, static_argnames=("experts", "v"))


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
    with pytest.raises(ValueError, match="10 neurons"):
        contiguous_order(jnp.zeros(10, jnp.int32), 4)


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
    got = np.asarray(token_hash(jnp.asarray(ids), 8, experts_per_token=choices))
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
    first = token_hash(jnp.asarray(ids), 8)
    np.testing.assert_array_equal(got[:, :1], first)


def test_true_mass_is_the_largest_squared_activation():
    y = gaussian((12, 16)).at[3].set(-1.0)
    clusters = np.maximum(np.asarray(y, np.float64).reshape(12, 4, 4), 0)
    mass = (clusters**4).sum(axis=2)
    got = true_mass(y, 4, experts_per_token=2)
    np.testing.assert_array_equal(got, np.argsort(-mass, axis=1, kind="stable")[:, :2])
    assert got[3].tolist() == [0, 1]
    assert true_mass(y[:0], 4).shape == (0, 1)
    with pytest.raises(ValueError, match="d_hidden=16 is not a multiple of experts=3"):
        true_mass(y, 3)
    with pytest.raises(ValueError, match="experts_per_token=5"):
        true_mass(y, 4, experts_per_token=5)


def loop_dispatch(expert_index, experts, v, order):
    """Rows as (token, choice) or None, and the expert of each tile in use."""
    rows, tiles = [], []
    for expert in range(experts):
        mine = [
            (t, j)
            for t in order
            for j in range(expert_index.shape[1])
            if expert_index[t, j] == expert and expert not in expert_index[t, :j]
        ]
        while len(mine) % v:
            mine.append(None)
        rows += mine
        tiles += [expert] * (len(mine) // v)
    return rows, tiles


@st.composite
def routings(draw):
    # Few shapes, many routings: each shape compiles anew.
    tokens, experts, choices, v = draw(
        st.sampled_from([(1, 5, 1, 4), (23, 4, 2, 8), (16, 3, 1, 1), (18, 2, 2, 4)])
    )
    seed = draw(st.integers(0, 2**16))
    rng = np.random.default_rng(seed)
    # Skew 0: everybody's first choice is one expert; others are nearly uniform.
    skew = draw(st.sampled_from([0.0, 0.3, 10.0]))
    weights = rng.gamma(0.1 + skew, size=experts) + 1e-9
    index = np.stack(
        [
            rng.choice(experts, choices, replace=False, p=weights / weights.sum())
            for _ in range(tokens)
        ]
    )
    order = rng.permutation(tokens) if draw(st.booleans()) else None
    return index.astype(np.int32), experts, v, order


def check_dispatch(index, experts, v, order, d):
    d = jax.tree.map(np.asarray, d)
    tokens, choices = index.shape
    rows, tiles = loop_dispatch(
        index, experts, v, range(tokens) if order is None else order
    )
    total = d.row_token.shape[0]
    assert total % v == 0 and total >= max(len(rows), v)
    rows = rows + [None] * (total - len(rows))
    tiles = tiles + [experts - 1] * (total // v - len(tiles))
    np.testing.assert_array_equal(d.row_token, [r[0] if r else 0 for r in rows])
    np.testing.assert_array_equal(d.row_valid, [r is not None for r in rows])
    np.testing.assert_array_equal(d.tile_expert, tiles)
    chosen = [e for choices in index for e in set(choices.tolist())]
    counts = [chosen.count(e) for e in range(experts)]
    np.testing.assert_array_equal(d.group_sizes, counts)
    for t in range(tokens):
        for j in range(choices):
            row = int(d.token_rows[t, j])
            if 0 <= index[t, j] < experts and index[t, j] not in index[t, :j]:
                assert rows[row] == (t, j)
            else:
                assert row == total


@settings(deadline=None, max_examples=40)
@given(routing=routings())
def test_dispatch_matches_a_loop(routing):
    index, experts, v, order = routing
    token_order = None if order is None else jnp.asarray(order)
    d = dispatch_jit(jnp.asarray(index), experts, v, token_order=token_order)
    check_dispatch(index, experts, v, order, d)


@pytest.mark.parametrize(
    "index, experts",
    [
        (np.zeros((5, 1)), 4),  # one expert has all
        (np.full((9, 1), 3), 4),
        (np.array([[0], [3]]), 4),  # one token each, two experts empty
        (np.array([[1, 0], [0, 1], [2, 3]]), 4),
        (np.zeros((8, 1)), 1),
        # repeated choices, and some that are no expert
        (np.array([[1, 1, 1], [0, 2, 0], [3, 1, 1], [2, 2, 3], [0, 1, 2]]), 4),
        (np.array([[-1, 0], [4, 4], [9, 3], [2, 2], [-7, -1]]), 4),
        (np.zeros((6, 3)), 2),  # more choices than experts
    ],
)
def test_dispatch_of_skewed_routings(index, experts):
    index = index.astype(np.int32)
    d = dispatch_jit(jnp.asarray(index), experts, 4)
    check_dispatch(index, experts, 4, None, d)


def test_expert_of_row_covers_padding():
    d = dispatch(jnp.array([[2], [0], [2]]), 4, 2)
    assert expert_of_row(d).tolist() == [0, 0, 2, 2, 3, 3]


def test_row_bound_is_reached():
    """The static size is the smallest that suffices: some routing fills it."""
    for tokens, experts, v in [(7, 3, 4), (9, 4, 8), (2, 5, 4)]:
        worst = 0
        rng = np.random.default_rng(0)
        for _ in range(500):
            sizes = np.bincount(rng.integers(0, experts, tokens), minlength=experts)
            worst = max(worst, int((-(-sizes // v) * v).sum()))
        d = dispatch(jnp.zeros((tokens, 1), jnp.int32), experts, v)
        assert d.row_token.shape[0] == worst


@pytest.mark.parametrize("choices", [1, 2, 3])
def test_gather_and_combine_match_loops_and_are_transposes(choices):
    rng = np.random.default_rng(5)
    index = np.stack([rng.permutation(4)[:choices] for _ in range(11)])
    d = dispatch(jnp.asarray(index, jnp.int32), 4, 4)
    x = gaussian((11, 3))
    rows = gather_rows(x, d)
    for r in range(rows.shape[0]):
        expected = x[d.row_token[r]] if d.row_valid[r] else np.zeros(3)
        np.testing.assert_array_equal(rows[r], expected)
    # NaN in padding rows must not reach a token.
    y = jnp.where(d.row_valid[:, None], gaussian(rows.shape, 6), jnp.nan)
    out = combine_rows(y, d)
    for t in range(11):
        expected = sum(np.asarray(y[r]) for r in d.token_rows[t])
        np.testing.assert_allclose(out[t], expected, rtol=1e-6, atol=1e-6)

    dout = gaussian((11, 3), 7)
    drows = gaussian(rows.shape, 8)
    dx = jax.jit(jax.grad(lambda x: jnp.sum(gather_rows(x, d) * drows)))(x)
    dy = jax.jit(jax.grad(lambda y: jnp.sum(combine_rows(y, d) * dout)))(y)
    expected_dx, expected_dy = np.zeros((11, 3)), np.zeros(rows.shape)
    for t in range(11):
        for r in np.asarray(d.token_rows[t]):
            expected_dx[t] += drows[r]
            expected_dy[r] += dout[t]
    np.testing.assert_allclose(dx, expected_dx, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(dy, expected_dy.astype(np.float32))


def test_combine_adds_in_float32_and_returns_its_dtype():
    index = jnp.array([[0, 1, 2]], jnp.int32)
    d = dispatch(index, 3, 1)
    # In bfloat16 1 + 2^-9 is 1, twice over; in float32 the two halves add up.
    y = jnp.array([[1.0], [2.0**-8], [2.0**-8]], jnp.bfloat16)
    out = combine_rows(y, d)
    assert out.dtype == jnp.bfloat16
    assert float(out[0, 0]) == 1.0 + 2.0**-7
    assert gather_rows(jnp.ones((1, 2), jnp.bfloat16), d).dtype == jnp.bfloat16
