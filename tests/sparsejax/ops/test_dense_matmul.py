"""The dense GEMM: summed in float32, rounded once, and written in the dtype asked."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparsejax.ops.dense_matmul import dense_matmul

DTYPES = [jnp.float16, jnp.bfloat16, jnp.float32]


@pytest.fixture(params=["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def device(request):
    with jax.default_device(jax.devices(request.param)[0]):
        yield


@pytest.mark.parametrize("out_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_are_rounded_once(device, dtype, out_dtype):
    keys = jax.random.split(jax.random.key(0))
    lhs, rhs = (jax.random.normal(key, (256, 256), dtype) for key in keys)
    # Long sums: 16-bit ones would be wrong by several units in the last place.
    lhs, rhs = jnp.tile(lhs, (1, 16)), jnp.tile(rhs, (16, 1))
    got = jax.jit(dense_matmul, static_argnames="out_dtype")(
        lhs, rhs, out_dtype=out_dtype
    )
    assert got.dtype == out_dtype
    exact = np.asarray(lhs, np.float64) @ np.asarray(rhs, np.float64)
    error = np.abs(np.asarray(got, np.float64) - exact)
    # Half a unit in the last place, and the sums' own error.
    half_unit = float(jnp.finfo(out_dtype).eps) / 2
    assert np.all(error <= half_unit * np.abs(exact) + 1e-5 * np.abs(exact).max())


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_what_is_asked_for_is_what_the_gemm_writes(dtype):
    """In float32 it would be written, read again and rounded."""
    x = jax.ShapeDtypeStruct((8, 8), dtype)
    lowered = jax.jit(dense_matmul).lower(x, x).as_text()
    (product,) = (line for line in lowered.splitlines() if "dot_general" in line)
    name = {jnp.float16: "f16", jnp.bfloat16: "bf16"}[dtype]
    assert product.endswith(f"-> tensor<8x8x{name}>")
