"""The dispatch of tokens to rows, against a plain loop."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsejax.routing.dispatch import (
    combine_rows,
    dispatch,
    expert_of_row,
    gather_rows,
)

dispatch_jit = jax.jit(dispatch, static_argnames=("experts", "v"))


def gaussian(shape, seed=0):
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.normal(size=shape), jnp.float32)


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
