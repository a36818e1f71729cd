"""Sums of what comes before, against numpy's cumulative sum."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparsejax.routing.prefix_sums import sums_before


@pytest.mark.parametrize("shape", [(1,), (16,), (17,), (3, 1000), (2, 3, 129)])
def test_sums_before_are_cumulative_sums_without_the_entry(shape):
    x = np.random.default_rng(0).integers(-5, 9, shape)
    got = jax.jit(sums_before)(jnp.asarray(x, jnp.int32))
    assert got.dtype == jnp.int32
    np.testing.assert_array_equal(got, np.cumsum(x, axis=-1) - x)


def test_sums_before_of_more_blocks_than_are_summed_at_once():
    flags = np.random.default_rng(1).random(16 * 256 + 300) < 0.3
    got = jax.jit(sums_before)(jnp.asarray(flags))
    np.testing.assert_array_equal(got, np.cumsum(flags) - flags)
