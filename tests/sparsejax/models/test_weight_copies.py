"""A copy of a weight is what is read, and the weight gets the gradient."""

import jax
import jax.numpy as jnp
import numpy as np

from sparsejax.models import weight_copies


def test_the_copy_is_read_and_the_weight_has_the_gradient():
    w = jnp.asarray([[1.001, -2.0], [3.0, 0.5]], jnp.float32)
    copy = weight_copies.rounded(w, jnp.bfloat16)
    np.testing.assert_array_equal(copy, w.astype(jnp.bfloat16))
    x = jnp.asarray([[1.0, 2.0]], jnp.bfloat16)

    def of(w, copy):
        read = weight_copies.read(w, copy, jnp.bfloat16)
        return jnp.sum((x @ read).astype(jnp.float32) ** 2)

    got = jax.value_and_grad(of)(w, copy)
    expected = jax.value_and_grad(of)(w, None)
    np.testing.assert_array_equal(got[0], expected[0])
    np.testing.assert_array_equal(got[1], expected[1])
    assert got[1].dtype == jnp.float32
    # Another copy is another function, and its gradient still that of the weight.
    doubled = jax.value_and_grad(of)(w, 2 * copy)
    assert doubled[0] == 4 * expected[0]
    np.testing.assert_array_equal(doubled[1], 2 * expected[1])


def test_a_weight_in_the_compute_dtype_needs_no_copy():
    w = jnp.ones((2, 2))
    assert weight_copies.rounded(w, jnp.float32) is None
    assert weight_copies.read(w, None, jnp.float32) is w
