"""A linear layer reads a copy of its weight, and the weight gets the gradient."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparsejax.ops.linear import as_read, linear, rounded_copy


def whole_numbers(shape: tuple[int, ...], seed: int, most: int = 4) -> np.ndarray:
    return np.random.default_rng(seed).integers(-most, most + 1, shape).astype(float)


@pytest.mark.parametrize("tokens", [(7,), (3, 5), (2, 3, 2)])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("out_dtype", [None, jnp.float32])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_product_and_gradients_are_those_of_numpy(tokens, transposed, out_dtype, dtype):
    # Whole numbers: products and sums are exact.
    x, w, dy = (
        whole_numbers(shape, seed)
        for seed, shape in enumerate(((*tokens, 6), (6, 4), (*tokens, 4)))
    )
    given = jnp.asarray(w.T if transposed else w, jnp.float32)
    of = partial(linear, transposed=transposed, out_dtype=out_dtype)
    y, gradients = jax.vjp(
        lambda x, w: of(x, w, as_read(w, None, dtype)), jnp.asarray(x, dtype), given
    )
    assert y.dtype == (out_dtype or dtype)
    np.testing.assert_array_equal(y.astype(jnp.float32), x @ w)
    dx, dw = gradients(jnp.asarray(dy, y.dtype))
    assert (dx.dtype, dw.dtype) == (dtype, jnp.float32)
    np.testing.assert_array_equal(dx.astype(jnp.float32), dy @ w.T)
    want = x.reshape(-1, 6).T @ dy.reshape(-1, 4)
    np.testing.assert_array_equal(dw, want.T if transposed else want)


def test_the_gradient_of_a_weight_is_not_rounded_to_the_compute_dtype():
    # 257 = 256 + 1 has nine bits, one more than bfloat16.
    x = jnp.asarray([[16.0], [1.0]], jnp.bfloat16)
    w = jnp.ones((1, 1))
    of = lambda w: linear(x, w, as_read(w, None, x.dtype), out_dtype=jnp.float32)
    _, gradient = jax.vjp(of, w)
    (dw,) = gradient(jnp.asarray([[16.0], [1.0]]))
    assert dw == 257


def test_the_copy_is_read_and_the_weight_has_the_gradient():
    w = jnp.asarray([[1.001, -2.0], [3.0, 0.5]])
    copy = rounded_copy(w, jnp.bfloat16)
    assert copy is not None
    np.testing.assert_array_equal(copy, w.astype(jnp.bfloat16))
    x = jnp.asarray([[1.0, 2.0]], jnp.bfloat16)

    def of(w, copy):
        read = as_read(w, copy, jnp.bfloat16)
        return jnp.sum(linear(x, w, read).astype(jnp.float32) ** 2)

    expected = jax.value_and_grad(of)(w, None)
    got = jax.value_and_grad(of)(w, copy)
    np.testing.assert_array_equal(got[0], expected[0])
    np.testing.assert_array_equal(got[1], expected[1])
    # Another copy is another function, and its gradient still that of the weight.
    doubled = jax.value_and_grad(of)(w, 2 * copy)
    assert doubled[0] == 4 * expected[0]
    np.testing.assert_array_equal(doubled[1], 2 * expected[1])
    # Nothing flows back through what is read.
    assert not jax.grad(of, argnums=1)(w, copy).any()


def test_a_weight_in_the_compute_dtype_needs_no_copy():
    w = jnp.ones((2, 2))
    assert rounded_copy(w, jnp.float32) is None
    np.testing.assert_array_equal(as_read(w, None, jnp.float32), w)
