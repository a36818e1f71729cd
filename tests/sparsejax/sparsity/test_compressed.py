"""decompress after compress is masking, bit for bit."""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from sparsejax.sparsity.compressed import Compressed, compress, decompress
from sparsejax.sparsity.masks import magnitude_mask, vnm_mask
from sparsejax.sparsity.patterns import NM, VNM

AWKWARD = (0.0, -0.0, 1.0, -1.0, 2.5, -3.0, np.inf, np.nan)
NM_PATTERNS = (NM(2, 4), NM(1, 4), NM(3, 4), NM(1, 2), NM(4, 8))
VNM_PATTERNS = (VNM(3, 2, 8), VNM(1, 2, 16), VNM(16, 1, 8), VNM(4, 2, 4), VNM(2, 4, 8))


# Compiled once per pattern, instead of once per primitive.
compress_jit = jax.jit(compress, static_argnames=("pattern", "axis"))
decompress_jit = jax.jit(decompress)
magnitude_mask_jit = jax.jit(magnitude_mask, static_argnames=("pattern", "axis"))
vnm_mask_jit = jax.jit(vnm_mask, static_argnames="pattern")


def bits(x):
    x = np.asarray(x)
    return x.view(f"uint{8 * x.dtype.itemsize}")


def masked(w, mask):
    """Returns what must come back: kept bits unchanged, +0.0 elsewhere."""
    return np.where(np.asarray(mask), bits(w), 0)


def awkward_arrays(shape):
    values = hnp.arrays(np.float32, shape, elements=st.sampled_from(AWKWARD))
    dtypes = st.sampled_from([np.float32, np.float16, ml_dtypes.bfloat16])
    return st.builds(lambda x, dtype: x.astype(dtype), values, dtypes)


def test_float32_subnormals_survive():
    # Not so bfloat16 on the CPU, where XLA selects by way of float32 and flushes.
    w = np.array([[1e-40, -3e-40, 2e-40, 0.0]], np.float32)
    back = bits(decompress(compress(jnp.asarray(w))))
    np.testing.assert_array_equal(back, masked(w, [[False, True, True, False]]))


def loop_compress_nm(w, mask, n, m):
    """Values and positions along the last axis, one entry at a time."""
    values, positions = [], []
    for row in np.ndindex(w.shape[:-1]):
        for k in range(w.shape[-1]):
            if mask[row][k]:
                values.append(w[row][k])
                positions.append(k % m)
    shape = (*w.shape[:-1], w.shape[-1] // m * n)
    return np.array(values, w.dtype).reshape(shape), np.reshape(positions, shape)


@settings(deadline=None, max_examples=50)
@given(
    w=awkward_arrays((2, 8, 16)),
    pattern=st.sampled_from(NM_PATTERNS),
    axis=st.sampled_from([1, 2, -1]),
)
def test_nm_round_trip_is_masking(w, pattern, axis):
    mask = np.asarray(magnitude_mask_jit(jnp.asarray(w), pattern, axis=axis))
    c = compress_jit(jnp.asarray(w), pattern, axis=axis)
    np.testing.assert_array_equal(bits(decompress_jit(c)), masked(w, mask))

    values, positions = loop_compress_nm(
        np.moveaxis(w, axis, -1), np.moveaxis(mask, axis, -1), pattern.n, pattern.m
    )
    moved = np.moveaxis(np.asarray(c.values), axis, -1)
    np.testing.assert_array_equal(bits(moved), bits(values))
    np.testing.assert_array_equal(np.moveaxis(c.metadata, axis, -1), positions)
    assert c.metadata.dtype == jnp.uint8 and c.columns is None
    assert c.shape == w.shape and c.ndim == 3 and c.dtype == w.dtype
    assert c.values.size == c.density * w.size


@settings(deadline=None, max_examples=50)
@given(
    w=awkward_arrays((2, 7, 16)),
    pattern=st.sampled_from(VNM_PATTERNS),
)
def test_vnm_round_trip_is_masking(w, pattern):
    mask = np.asarray(vnm_mask_jit(jnp.asarray(w), pattern))
    c = compress_jit(jnp.asarray(w), pattern)
    np.testing.assert_array_equal(bits(decompress_jit(c)), masked(w, mask))
    assert c.shape == w.shape

    columns = np.asarray(c.columns).astype(int)
    blocks, groups = -(-7 // pattern.v), 16 // pattern.m
    assert columns.shape == (*w.shape[:-2], blocks, groups, 4)
    assert c.columns.dtype == jnp.uint16 and c.metadata.dtype == jnp.uint8
    assert (np.diff(columns, axis=-1) > 0).all() and (columns < pattern.m).all()
    # Every kept entry is found through its metadata and its block's columns.
    for index in np.ndindex(c.values.shape):
        *batch, row, slot = index
        group = slot // pattern.n
        block_columns = columns[(*batch, row // pattern.v, group)]
        col = group * pattern.m + block_columns[c.metadata[index]]
        assert bits(w)[(*batch, row, col)] == bits(c.values)[index]


def test_vnm_with_m_not_a_multiple_of_four():
    w = np.random.default_rng(0).normal(size=(6, 15)).astype(np.float32)
    c = compress_jit(jnp.asarray(w), VNM(4, 2, 5))
    mask = vnm_mask_jit(jnp.asarray(w), VNM(4, 2, 5))
    np.testing.assert_array_equal(bits(decompress_jit(c)), masked(w, mask))


def test_positions_at_the_end_of_large_groups():
    """Put together by hand, for `compress` takes long to compile of large groups."""
    values = jnp.array([[1.0, -2.0]])
    position = jnp.array([[3, 255]], jnp.uint8)
    dense = decompress(Compressed(values, position, None, NM(2, 256), -1))
    assert dense.shape == (1, 256) and (dense[0, 3], dense[0, 255]) == (1, -2)
    columns = jnp.array([[[0, 1, 200, 65_535]]], jnp.uint16)
    position = jnp.array([[2, 3]], jnp.uint8)
    dense = decompress(Compressed(values, position, columns, VNM(1, 2, 65_536), -1))
    assert dense.shape == (1, 65_536)
    assert np.flatnonzero(dense).tolist() == [200, 65_535]
    assert (dense[0, 200], dense[0, 65_535]) == (1, -2)


def test_a_given_mask_decides():
    w = jnp.asarray(np.random.default_rng(1).normal(size=(8, 8)), jnp.float32)
    # 2:4 along both axes.
    mask = (jnp.arange(8)[:, None] + jnp.arange(8)[None]) % 4 < 2
    for axis in (0, 1):
        c = compress(w, mask=mask, axis=axis)
        np.testing.assert_array_equal(decompress(c), np.where(mask, w, 0))
    sparse = jnp.zeros((4, 8), bool).at[:, 5:7].set(True)
    c = compress(w[:4], VNM(4, 2, 8), mask=sparse)
    # Columns 5 and 6 are used, the lowest unused ones fill up.
    np.testing.assert_array_equal(c.columns, [[[0, 1, 5, 6]]])
    np.testing.assert_array_equal(decompress(c), np.where(sparse, w[:4], 0))


def test_a_wrong_mask_is_refused_with_its_place():
    w = jnp.ones((2, 8))
    three = jnp.array([[True, True, False, False] * 2] * 2).at[1, 6].set(True)
    with pytest.raises(ValueError, match=r"keeps 3 entries in group \(1, 1\), not n=2"):
        compress(w, mask=three)
    five_columns = jnp.zeros((4, 8), bool)
    for row in range(4):
        five_columns = five_columns.at[row, [row, row + 1]].set(True)
    with pytest.raises(ValueError, match=r"uses 5 columns in block \(0, 0\)"):
        compress(jnp.ones((4, 8)), VNM(4, 2, 8), mask=five_columns)
    with pytest.raises(ValueError, match=r"mask has shape \(2, 4\), not \(2, 8\)"):
        compress(w, mask=three[:, :4])
    with pytest.raises(ValueError, match=r"mask has shape \(4, 4\), not \(2, 8\)"):
        compress(w, mask=jnp.ones((4, 4), bool))
    one = jnp.array([[True, True, False, False] * 2] * 2).at[0, 0].set(False)
    with pytest.raises(ValueError, match=r"keeps 1 entries in group \(0, 0\), not n=2"):
        compress(w, mask=one)
    with pytest.raises(ValueError, match=r"keeps 0 entries in group \(0, 0\), not n=2"):
        compress(jnp.ones((4, 8)), VNM(4, 2, 8), mask=jnp.zeros((4, 8), bool))
    with pytest.raises(ValueError, match=r"cols=12 is not a multiple of m=8"):
        compress(jnp.ones((4, 12)), VNM(4, 2, 8), mask=jnp.ones((4, 12), bool))
    with pytest.raises(ValueError, match=r"axis=-2 is not the last"):
        compress(jnp.ones((8, 8)), VNM(4, 2, 8), axis=0)
    with pytest.raises(ValueError, match=r"at least two axes"):
        compress(jnp.ones(8), VNM(4, 2, 8))
    with pytest.raises(ValueError, match=r"pad to 8"):
        compress(jnp.ones((2, 6)))


@pytest.mark.parametrize("pattern", [NM(2, 4), VNM(3, 2, 8)])
def test_transformations(pattern):
    w = jnp.asarray(np.random.default_rng(2).normal(size=(3, 8, 16)), jnp.float32)
    w = w.at[0, 0, 0].set(-0.0)
    dense = np.asarray(decompress(compress(w, pattern)))

    jitted = jax.jit(lambda x: compress(x, pattern))(w)
    np.testing.assert_array_equal(bits(jax.jit(decompress)(jitted)), bits(dense))

    mapped = jax.jit(jax.vmap(lambda x: compress(x, pattern)))(w)
    assert mapped.shape == w.shape
    back = jax.jit(jax.vmap(decompress))(mapped)
    np.testing.assert_array_equal(bits(back), bits(dense))

    _, scanned = jax.lax.scan(lambda carry, c: (carry, decompress(c)), 0, mapped)
    np.testing.assert_array_equal(bits(scanned), bits(dense))

    abstract = jax.eval_shape(lambda x: decompress(compress(x, pattern)), w)
    assert abstract.shape == w.shape and abstract.dtype == w.dtype
    doubled = jax.tree.map(lambda x: x * 2 if x.dtype == w.dtype else x, mapped)
    assert isinstance(doubled, Compressed)
    np.testing.assert_array_equal(decompress_jit(doubled), 2 * dense)


@pytest.mark.parametrize("pattern, axis", [(NM(2, 4), 0), (VNM(3, 2, 8), -1)])
def test_gradient_in_values_is_the_cotangent_at_kept_places(pattern, axis):
    rng = np.random.default_rng(3)
    w, dout = (jnp.asarray(rng.normal(size=(8, 16)), jnp.float32) for _ in range(2))
    c = compress_jit(w, pattern, axis=axis)

    def loss(values):
        return jnp.sum(decompress(dataclasses.replace(c, values=values)) * dout)

    kept = decompress_jit(c) != 0
    expected = compress(dout, pattern, mask=kept, axis=axis).values
    np.testing.assert_array_equal(jax.jit(jax.grad(loss))(c.values), expected)

    # And of compress: back to where each value came from.
    through = jax.grad(lambda x: jnp.sum(compress(x, pattern, axis=axis).values))
    np.testing.assert_array_equal(jax.jit(through)(w), kept.astype(jnp.float32))


def test_what_is_no_pattern_is_refused():
    with pytest.raises(ValueError, match="pattern='2:4' must be of type NM or of type"):
        compress(jnp.ones((4, 8)), "2:4")


def test_no_sort_and_no_gather_for_two_four():
    def round_trip(x):
        return decompress(compress(x))

    text = jax.jit(round_trip).lower(jnp.zeros((8, 16))).as_text()
    assert "sort" not in text and "gather" not in text
