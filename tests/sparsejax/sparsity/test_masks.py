"""Masks against plain loops, on the values that break them."""

import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from sparsejax.sparsity.masks import (
    flip_rate,
    magnitude_mask,
    nm_mask,
    soft_threshold,
    soft_threshold_scale,
    vnm_mask,
)
from sparsejax.sparsity.patterns import NM, VNM

DTYPES = (np.float32, np.float16, ml_dtypes.bfloat16)
# Few distinct values, so that ties, zeros and NaN of both signs, infinities and
# subnormals (1e-40 in float32 and bfloat16) meet in one group.
FINITE = (0.0, -0.0, 1.0, -1.0, 2.5, -3.0, 1e-40, -2e-40)
AWKWARD = (*FINITE, np.inf, -np.inf, np.nan, np.copysign(np.nan, -1.0))


def awkward_arrays(shape):
    values = hnp.arrays(np.float32, shape, elements=st.sampled_from(AWKWARD))
    return st.builds(lambda x, dtype: x.astype(dtype), values, st.sampled_from(DTYPES))


def loop_nm_mask(scores, n, m, axis):
    """Repeatedly takes the largest score left; float64, one element at a time."""
    moved = np.moveaxis(np.asarray(scores, np.float64), axis, -1)
    mask = np.zeros(moved.shape, bool)
    for row in np.ndindex(moved.shape[:-1]):
        for start in range(0, moved.shape[-1], m):
            left = list(range(start, start + m))
            for _ in range(n):
                best = left[0]
                for i in left[1:]:
                    score, top = moved[row][i], moved[row][best]
                    if (np.isnan(score) and not np.isnan(top)) or score > top:
                        best = i
                left.remove(best)
                mask[row][best] = True
    return np.moveaxis(mask, -1, axis)


def loop_vnm_mask(w, v, n, m):
    w = np.abs(np.asarray(w, np.float64))
    mask = np.zeros(w.shape, bool)
    for row, col in itertools.product(range(0, w.shape[0], v), range(0, w.shape[1], m)):
        block = w[row : row + v, col : col + m]
        norms = block.sum(axis=0)[None, :]
        columns = np.flatnonzero(loop_nm_mask(norms, 4, m, -1)[0])
        inner = loop_nm_mask(block[:, columns], n, 4, -1)
        for r, c in np.argwhere(inner):
            mask[row + r, col + columns[c]] = True
    return mask


@settings(deadline=None, max_examples=60)
@given(
    x=awkward_arrays((3, 8, 4)),
    pattern=st.sampled_from([NM(2, 4), NM(1, 4), NM(3, 4), NM(1, 2), NM(4, 4)]),
    axis=st.sampled_from([1, 2, -1, -2]),
)
def test_nm_mask_matches_a_loop(x, pattern, axis):
    expected = loop_nm_mask(x, pattern.n, pattern.m, axis)
    np.testing.assert_array_equal(nm_mask(jnp.asarray(x), pattern, axis=axis), expected)


@settings(deadline=None, max_examples=60)
@given(x=awkward_arrays((8, 4)), axis=st.sampled_from([0, -1]))
def test_magnitude_mask_matches_a_loop(x, axis):
    expected = loop_nm_mask(np.abs(x.astype(np.float64)), 2, 4, axis)
    got = magnitude_mask(jnp.asarray(x), axis=axis)
    np.testing.assert_array_equal(got, expected)


def test_signed_scores_are_not_magnitudes():
    scores = jnp.array([-9.0, 1.0, 2.0, -8.0])
    assert nm_mask(scores).tolist() == [False, True, True, False]
    assert magnitude_mask(scores).tolist() == [True, False, False, True]


def test_nm_mask_of_integers_and_empty_arrays():
    assert nm_mask(jnp.array([3, 3, 5, 3])).tolist() == [True, False, True, False]
    assert nm_mask(jnp.zeros((0, 8))).shape == (0, 8)


@pytest.mark.parametrize("axis", [0, 1])
def test_jit_and_vmap_give_the_same_mask(axis):
    x = jnp.asarray(np.random.default_rng(0).integers(-2, 3, (5, 8, 12)), jnp.float32)
    expected = np.stack([loop_nm_mask(row, 2, 4, axis) for row in x])
    mask = jax.jit(jax.vmap(lambda row: nm_mask(row, axis=axis)))(x)
    np.testing.assert_array_equal(mask, expected)


def test_mask_is_idempotent():
    x = jnp.asarray(np.random.default_rng(1).normal(size=(6, 16)), jnp.float32)
    mask = magnitude_mask(x)
    np.testing.assert_array_equal(magnitude_mask(jnp.where(mask, x, 0.0)), mask)


def test_nm_mask_does_not_sort():
    text = jax.jit(nm_mask).lower(jnp.zeros((8, 8))).as_text()
    assert "sort" not in text and "reduce" not in text


@settings(deadline=None, max_examples=40)
@given(
    # Integers: their column sums are exact, so ties are ties in the loop as well.
    w=hnp.arrays(np.float32, (7, 16), elements=st.sampled_from([0, -0.0, 1, -2, 3])),
    pattern=st.sampled_from([VNM(3, 2, 8), VNM(1, 2, 8), VNM(7, 1, 16), VNM(9, 2, 4)]),
)
def test_vnm_mask_matches_a_loop(w, pattern):
    expected = loop_vnm_mask(w, pattern.v, pattern.n, pattern.m)
    stacked = jnp.asarray(np.stack([w, w]))
    stacked = jax.jit(vnm_mask, static_argnums=1)(stacked, pattern)
    np.testing.assert_array_equal(stacked, np.stack([expected, expected]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_of_vnm_columns_are_float32_sums(dtype):
    """Columns of 600 small integers: sums near 2500, which float32 has exactly, float16
    and bfloat16 only every second or sixteenth. Of 16 the fourth and the fifth are one
    or two apart."""
    rngs = map(np.random.default_rng, (59, 78, 125, 182))
    w = np.hstack([rng.integers(-8, 9, (600, 32)) for rng in rngs]).astype(dtype)
    norms = np.sort(np.abs(w.astype(np.float64)).sum(axis=0).reshape(8, 16), axis=1)
    assert norms.min() > 2048 and set(norms[:, 12] - norms[:, 11]) == {1, 2}
    got = vnm_mask(jnp.asarray(w), VNM(600, 2, 16))
    np.testing.assert_array_equal(got, loop_vnm_mask(w, 600, 2, 16))


def test_vnm_mask_of_m_not_a_multiple_of_four():
    w = np.random.default_rng(2).integers(-9, 10, (6, 15)).astype(np.float32)
    got = vnm_mask(jnp.asarray(w), VNM(4, 2, 5))
    np.testing.assert_array_equal(got, loop_vnm_mask(w, 4, 2, 5))


def test_vnm_mask_keeps_nan_visible():
    w = jnp.ones((4, 8)).at[2, 6].set(jnp.nan)
    mask = vnm_mask(w, VNM(4, 2, 8))
    assert mask[2, 6]
    np.testing.assert_array_equal(mask.sum(axis=1), 2)


def loop_soft_threshold(w, axis):
    moved = np.moveaxis(np.asarray(w, np.float64), axis, -1)
    out = np.zeros(moved.shape)
    for row in np.ndindex(moved.shape[:-1]):
        for start in range(0, moved.shape[-1], 4):
            group = moved[row][start : start + 4]
            threshold = sorted(abs(x) for x in group)[1]
            for i, x in enumerate(group):
                out[row][start + i] = np.sign(x) * max(abs(x) - threshold, 0.0)
    return np.moveaxis(out, -1, axis)


@settings(deadline=None, max_examples=60)
@given(
    w=hnp.arrays(
        np.float32,
        (8, 4),
        elements=st.floats(-4, 4, width=16, allow_subnormal=False),
    ),
    axis=st.sampled_from([0, 1, -1]),
)
@example(w=np.where(np.arange(32).reshape(8, 4), np.float32(1.9276142e-4), 3), axis=0)
def test_soft_threshold_matches_a_loop(w, axis):
    got = np.asarray(soft_threshold(jnp.asarray(w), axis=axis))
    # The loop's float64 has room for every difference: float32 rounds it once.
    np.testing.assert_array_equal(got, loop_soft_threshold(w, axis).astype("float32"))
    mask = np.asarray(magnitude_mask(jnp.asarray(w), axis=axis))
    assert not got[~mask].any() and not np.signbit(got[~mask]).any()
    assert (np.count_nonzero(np.moveaxis(got, axis, -1).reshape(-1, 4), 1) <= 2).all()


def test_soft_threshold_shows_nan_without_spreading_it():
    out = soft_threshold(jnp.array([jnp.nan, 1.0, -2.0, 3.0]))
    np.testing.assert_array_equal(out, [np.nan, 0.0, 0.0, 1.0])


def test_soft_threshold_is_continuous_where_ranks_swap():
    """Along a path on which every pair changes rank, small steps stay small."""
    angle = np.linspace(0, 2 * np.pi, 4001)
    path = np.stack([np.cos(angle * k + k) for k in (1, 2, 3, 5)], axis=-1)
    steps = np.abs(np.diff(path.astype(np.float32), axis=0)).max()
    out = np.asarray(soft_threshold(jnp.asarray(path, jnp.float32)))
    mask = np.asarray(magnitude_mask(jnp.asarray(path, jnp.float32)))
    assert np.any(mask[1:] != mask[:-1])
    # |S(a) - S(b)| <= 2 max|a - b|: the entry and the threshold move at most so much.
    assert np.abs(np.diff(out, axis=0)).max() <= 2 * steps + 1e-6
    hard = np.where(mask, path, 0)
    assert np.abs(np.diff(hard, axis=0)).max() > 20 * steps


def test_gradient_of_soft_threshold_is_that_of_its_equation():
    w = jnp.array([0.1, -0.7, 0.4, 2.0])
    jacobian = jax.jacrev(soft_threshold)(w)
    # t = |w_2| = 0.4: S_1 = w_1 + t, S_3 = w_3 - t.
    expected = np.zeros((4, 4))
    expected[1, 1], expected[1, 2], expected[3, 3], expected[3, 2] = 1, 1, 1, -1
    np.testing.assert_array_equal(jacobian, expected)


@pytest.mark.parametrize("axis", [0, 1, -2])
@pytest.mark.parametrize("deviation", [1.0, 0.02])
def test_scale_on_gaussian_weights(axis, deviation):
    w = np.random.default_rng(5).normal(0, deviation, (512, 512)).astype(np.float32)
    beta = soft_threshold_scale(jnp.asarray(w), axis=axis)
    shrunk = loop_soft_threshold(w, axis)
    exact = (w * shrunk).sum() / (shrunk * shrunk).sum()
    # float32 sums of 2^18 terms.
    np.testing.assert_allclose(beta, exact, rtol=1e-4)
    assert abs(float(beta) - 1.483) < 0.01
    # Least squares: the error has its minimum here.
    errors = [
        ((w - b * shrunk) ** 2).sum() for b in (exact - 0.01, exact, exact + 0.01)
    ]
    assert errors[1] == min(errors)


def test_scale_of_a_stack_and_of_zeros():
    w = np.random.default_rng(6).normal(size=(3, 8, 4)).astype(np.float32)
    w[1] = 0.0
    beta = soft_threshold_scale(jnp.asarray(w, jnp.bfloat16), axis=-2)
    assert beta.shape == (3,) and beta.dtype == jnp.float32
    assert beta[1] == 1.0
    one = soft_threshold_scale(jnp.asarray(w[2], jnp.bfloat16), axis=0)
    np.testing.assert_allclose(beta[2], one, rtol=1e-6)
    assert np.isnan(soft_threshold_scale(jnp.full((4, 4), jnp.nan)))


def test_flip_rate_is_the_changed_fraction():
    before = jnp.array([[True, False, True, False]])
    after = jnp.array([[True, True, True, False]])
    rate = flip_rate(before, after)
    assert rate == 0.25 and rate.dtype == jnp.float32


@pytest.mark.parametrize(
    "call",
    [
        lambda: nm_mask(jnp.zeros((4, 6))),
        lambda: soft_threshold(jnp.zeros((6, 4)), axis=0),
        lambda: vnm_mask(jnp.zeros((4, 12)), VNM(4, 2, 8)),
        lambda: vnm_mask(jnp.zeros(8), VNM(4, 2, 8)),
        lambda: soft_threshold_scale(jnp.zeros(8)),
    ],
)
def test_shapes_that_do_not_fit_are_refused(call):
    with pytest.raises(ValueError, match=r"pad|at least two"):
        call()


def test_a_pattern_of_the_other_kind_is_refused():
    w = jnp.zeros((8, 16))
    for mask in (nm_mask, magnitude_mask):
        with pytest.raises(ValueError, match=r"pattern=VNM\(.* must be of type NM$"):
            mask(w, VNM(8, 2, 16))
    with pytest.raises(ValueError, match=r"pattern=NM\(.* must be of type VNM$"):
        vnm_mask(w, NM(2, 4))
