"""Straight-through gradients; the mean, variance and sparsity of the estimators."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsejax.sparsity.estimators import mvue, straight_through
from sparsejax.sparsity.masks import soft_threshold

KEY = jax.random.key(0)
QUADRUPLES = np.array(
    [
        [1.0, 1.0, 1.0, 1.0],
        [1.0, -2.0, 3.0, -4.0],
        [2.0, 2.0, -3.0, 2.5],  # 2 a1 + a3 > a4
        [0.1, 5.0, -4.0, 3.0],  # 2 a1 + a3 < a4
        [0.5, -0.25, 9.0, 1.0],  # a4 > a1 + a2 + a3
        [6.0, -3.0, 2.0, 1.0],  # a4 == a1 + a2 + a3
        [0.0, 2.0, -2.0, 0.0],
        [0.0, 0.0, 0.0, -3.0],
        [0.0, 1.0, 2.0, -2.0],
        [-0.0, 0.0, 0.0, 0.0],
        [7.0, 7.0, 7.0, -7.0],
    ],
    np.float32,
)


def exact_distribution(x):
    """(positions, values, probability) of each pair, from the table in float64."""
    order = np.argsort(np.abs(x), kind="stable")
    a1, a2, a3, a4 = np.abs(x[order]).astype(np.float64)
    rest, total = a1 + a2 + a3, a1 + a2 + a3 + a4
    if a4 > rest:
        shares = {
            (i, 3): (a / rest if rest else i == 2) for i, a in enumerate((a1, a2, a3))
        }
        values = [rest, rest, rest, a4]
    else:
        if total == 0:
            return [((0, 1), (0.0, 0.0), 1.0)]
        if 2 * a1 + a3 - a4 > 0:
            shares = {
                (0, 2): (2 * a1 + a3 - a4) / (2 * total),
                (0, 3): (2 * a1 - a3 + a4) / (2 * total),
                (1, 2): (2 * a2 + a3 - a4) / (2 * total),
                (1, 3): (2 * a2 - a3 + a4) / (2 * total),
                (2, 3): (-a1 - a2 + a3 + a4) / total,
            }
        else:
            shares = {
                (0, 3): 2 * a1 / total,
                (1, 2): (a1 + a2 + a3 - a4) / total,
                (1, 3): (-a1 + a2 - a3 + a4) / total,
                (2, 3): (-a1 - a2 + a3 + a4) / total,
            }
        values = [total / 2] * 4
    return [
        (
            (order[i], order[k]),
            (np.sign(x[order[i]]) * values[i], np.sign(x[order[k]]) * values[k]),
            float(share),
        )
        for (i, k), share in shares.items()
    ]


def drawing_distribution(x):
    """Draw one, then another of the rest, in proportion to magnitude; float64."""
    a = np.abs(x).astype(np.float64)
    total = a.sum()
    if total == 0:
        return [((0, 1), (0.0, 0.0), 1.0)]
    chance = {}
    for i, k in itertools.permutations(range(4), 2):
        left = total - a[i]
        if a[i] and a[k]:
            pair = (min(i, k), max(i, k))
            chance[pair] = chance.get(pair, 0) + a[i] / total * a[k] / left
        elif a[i] and left == 0:
            chance[(i, i)] = 1.0
    inclusion = np.zeros(4)
    for pair, p in chance.items():
        inclusion[list(set(pair))] += p
    values = np.divide(x, inclusion, out=np.zeros(4), where=inclusion > 0)
    return [(pair, values[list(pair)], p) for pair, p in chance.items()]


def moments(distribution):
    mean, square = np.zeros(4), np.zeros(4)
    for positions, values, probability in distribution:
        sample = np.zeros(4)
        sample[list(positions)] = values
        mean += probability * sample
        square += probability * sample**2
    return mean, square - mean**2


@pytest.mark.parametrize("distribution", [exact_distribution, drawing_distribution])
def test_the_distributions_of_this_file_are_unbiased(distribution):
    """The oracle itself: otherwise a common mistake would go unseen."""
    for x in QUADRUPLES:
        np.testing.assert_allclose(moments(distribution(x))[0], x, atol=1e-12)


@pytest.mark.parametrize(
    "exact, distribution", [(True, exact_distribution), (False, drawing_distribution)]
)
def test_mvue_has_the_distribution_of_its_definition(exact, distribution):
    draws = 20_000
    sample = jax.jit(
        lambda x: mvue(KEY, jnp.broadcast_to(x, (draws, *x.shape)), exact=exact)
    )
    got = np.asarray(sample(jnp.asarray(QUADRUPLES)))
    assert np.isfinite(got).all()
    assert (np.count_nonzero(got, axis=-1) <= 2).all()
    for i, x in enumerate(QUADRUPLES):
        expected = []
        for positions, values, probability in distribution(x):
            row = np.zeros(4)
            row[list(positions)] = values
            expected.append((row, probability))
        seen = 0
        for row, probability in expected:
            same_as = [p for other, p in expected if np.array_equal(other, row)]
            share = np.isclose(got[:, i], row[None], rtol=1e-5).all(axis=-1).mean()
            # Five standard errors of a share; fails by chance once in a million.
            error = 5 * np.sqrt(0.25 / draws)
            assert abs(share - sum(same_as)) <= error, (x, row, share, probability)
            seen += share / len(same_as)
        # Nothing else is ever drawn.
        np.testing.assert_allclose(seen, 1.0, atol=1e-9)


@pytest.mark.parametrize("exact", [True, False])
def test_mvue_is_unbiased(exact):
    draws = 20_000
    rng = np.random.default_rng(0)
    x = rng.normal(size=(8, 4)) * np.exp(rng.normal(size=(8, 4)))
    sample = jax.jit(
        lambda x: mvue(KEY, jnp.broadcast_to(x, (draws, 8, 4)), exact=exact)
    )
    got = np.asarray(sample(jnp.asarray(x, jnp.float32)), np.float64)
    error = got.std(axis=0) / np.sqrt(draws)
    assert (np.abs(got.mean(axis=0) - x) <= 5 * error + 1e-6).all()
    distribution = exact_distribution if exact else drawing_distribution
    variance = np.stack([moments(distribution(row))[1] for row in x])
    # Standard deviation of a sample variance here is below 3 %.
    np.testing.assert_allclose(got.var(axis=0), variance, rtol=0.15, atol=1e-3)


def test_the_exact_estimator_varies_least():
    x = np.random.default_rng(1).standard_t(3, size=(200, 4))
    exact = sum(moments(exact_distribution(row))[1].sum() for row in x)
    drawn = sum(moments(drawing_distribution(row))[1].sum() for row in x)
    assert exact < drawn


@settings(deadline=None, max_examples=40)
@given(
    x=st.lists(
        st.floats(-(2.0**100), 2.0**100, width=32), min_size=16, max_size=16
    ).map(lambda values: np.array(values, np.float32).reshape(8, 2)),
    exact=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_any_finite_input_gives_two_of_four_of_its_signs(x, exact, seed):
    got = np.asarray(mvue(jax.random.key(seed), jnp.asarray(x), axis=0, exact=exact))
    assert np.isfinite(got).all()
    assert (np.count_nonzero(got.reshape(2, 4, 2), axis=1) <= 2).all()
    assert (np.sign(got) * np.sign(x) >= 0).all() and not np.signbit(
        got[got == 0]
    ).any()


def test_axis_dtype_and_key():
    x = jnp.asarray(np.random.default_rng(2).normal(size=(3, 8, 4)), jnp.bfloat16)
    for exact in (True, False):
        got = mvue(KEY, x, axis=1, exact=exact)
        assert got.dtype == jnp.bfloat16 and got.shape == x.shape
        same = mvue(KEY, x, axis=-2, exact=exact)
        np.testing.assert_array_equal(got, same)
        other = mvue(jax.random.key(1), x, axis=1, exact=exact)
        assert np.any(np.asarray(other != got))
    with pytest.raises(ValueError, match="size of axis 0=3 is not a multiple of m=4"):
        mvue(KEY, x, axis=0)


@pytest.mark.parametrize("exact", [True, False])
def test_nan_stays_visible(exact):
    x = jnp.array([[1.0, jnp.nan, 2.0, 3.0], [1.0, 2.0, 3.0, 4.0]])
    got = np.asarray(mvue(KEY, x, exact=exact))
    assert np.isnan(got[0]).any() and np.isfinite(got[1]).all()


def test_an_estimator_is_exact_or_not():
    with pytest.raises(ValueError, match="exact='no' must be True or False"):
        mvue(KEY, jnp.ones(4), exact="no")


def test_straight_through_value_and_gradient():
    w = jnp.asarray(np.random.default_rng(3).normal(size=(8, 4)), jnp.float32)
    dout = jnp.arange(32.0).reshape(8, 4)
    fn = straight_through(soft_threshold)
    value, pullback = jax.vjp(lambda w: fn(w, axis=0), w)
    np.testing.assert_array_equal(value, soft_threshold(w, axis=0))
    np.testing.assert_array_equal(pullback(dout)[0], dout)
    _, tangent = jax.jvp(lambda w: fn(w, axis=0), (w,), (dout,))
    np.testing.assert_array_equal(tangent, dout)
    under_jit = jax.jit(jax.grad(lambda w: jnp.sum(fn(w) * dout)))(w)
    np.testing.assert_array_equal(under_jit, dout)


def test_straight_through_keeps_bits_and_gives_other_arguments_nothing():
    fn = straight_through(lambda w, scale: w * scale)
    w = jnp.array([-0.0, jnp.inf, 2.0])
    np.testing.assert_array_equal(np.signbit(fn(w, 1.0)), [True, False, False])
    dw, dscale = jax.grad(lambda w, s: fn(w, s)[2], argnums=(0, 1))(w, 3.0)
    np.testing.assert_array_equal(dw, [0.0, 0.0, 1.0])
    assert dscale == 0.0
    cast = straight_through(lambda w: w.astype(jnp.bfloat16))
    assert jax.grad(lambda w: jnp.sum(cast(w)).astype(jnp.float32))(w).dtype == w.dtype
    with pytest.raises(ValueError, match=r"maps shape \(3,\) to \(\)"):
        straight_through(jnp.sum)(w)
