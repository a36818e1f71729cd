"""GEMMs of 8-bit floats against float64 products of what NumPy rounds."""

import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from sparsejax.ops.fp8_linear import fp8_linear
from sparsejax.ops.fp8_matmul import (
    FORWARD,
    GRADIENT,
    Quantised,
    dequantise,
    fp8_matmul,
    implementations,
    quantise,
    quantise_weight,
    rounded_product,
    why_no_tensor_cores,
)
from tests.support.devices.hopper import A100, H200, see_device
from tests.support.oracles.fp8_oracle import DTYPES, rounded


def random(*shape: int, seed: int = 0, scale: float = 1.0) -> np.ndarray:
    values = np.random.default_rng(seed).standard_normal(shape) * scale
    return values.astype(np.float32)


@pytest.mark.parametrize("dtype", [FORWARD, GRADIENT], ids=str)
@pytest.mark.parametrize(
    "largest",
    [1.0, 448.0, 449.0, 57344.0, 57345.0, 3e38, 1e-30, 1e-37, 2.0**-126, 0.0],
)
def test_a_matrix_is_rounded_as_numpy_does_with_the_smallest_step(dtype, largest):
    x = random(8, 12) / 4
    x = x / np.abs(x).max() * np.float32(largest)
    got = quantise(jnp.asarray(x), dtype)
    step = float(got.step)
    values = np.asarray(got.values).astype(np.float64)
    np.testing.assert_array_equal(values * step, rounded(x, dtype))
    most = float(ml_dtypes.finfo(DTYPES[dtype.name]).max)
    assert np.log2(step) == round(np.log2(step))
    if largest == 0:
        assert step == 1
    elif step > 2.0**-126:
        assert largest / step <= most < largest / (step / 2)


def test_numbers_with_few_bits_are_kept_whatever_their_size():
    x = np.array([[1, 1.125, -15, 0.25], [-0.0, 0, 7, 3.5]], np.float32)
    for scale in (1, 2.0**-60, 2.0**90):
        got = np.asarray(dequantise(quantise(jnp.asarray(x * scale), FORWARD)))
        np.testing.assert_array_equal(got, x * scale)
        np.testing.assert_array_equal(np.signbit(got), np.signbit(x))


@pytest.mark.parametrize("dtype", [FORWARD, GRADIENT], ids=str)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_visible_in_its_place(dtype, bad):
    x = np.array([[1, bad, 2, 3]], np.float32)
    got = np.asarray(dequantise(quantise(jnp.asarray(x), dtype)))
    np.testing.assert_array_equal(np.isfinite(got), np.isfinite(x))


def test_a_stack_of_weights_has_a_step_for_each():
    w = np.stack([random(8, 4), 1e-3 * random(8, 4, seed=1)])
    got = quantise_weight(jnp.asarray(w))
    for layer in range(2):
        alone = quantise_weight(jnp.asarray(w[layer]))
        for ours, theirs in zip(got, alone, strict=True):
            np.testing.assert_array_equal(ours[layer], theirs)
    np.testing.assert_array_equal(got.transposed, got.values.swapaxes(-1, -2))
    np.testing.assert_array_equal(got.T.values, got.transposed)
    np.testing.assert_array_equal(got.T.T.values, got.values)


@pytest.mark.parametrize("backend", ["xla", "reference"])
@pytest.mark.parametrize("out_dtype", ["float32", "bfloat16"])
def test_whole_numbers_are_multiplied_exactly(backend, out_dtype):
    generator = np.random.default_rng(0)
    # 4 and 3 bits; sums of 12 products stay below 2^8 of bfloat16 in most entries.
    left = generator.integers(-15, 16, (9, 12)).astype(np.float32)
    right = generator.integers(-7, 8, (5, 12)).astype(np.float32)
    run = implementations()[backend].run
    got = run(
        quantise(jnp.asarray(left * 2.0**-20), FORWARD),
        quantise(jnp.asarray(right * 2.0**12), GRADIENT),
        out_dtype=jnp.dtype(out_dtype),
    )
    expected = jnp.asarray((left @ right.T) * 2.0**-8).astype(out_dtype)
    np.testing.assert_array_equal(got, expected)


def test_rows_of_a_rounded_product_have_steps_of_their_own():
    """No row depends on another one, however large that is."""
    x, w = random(7, 32), random(32, 12, seed=1)
    x *= 4.0 ** np.arange(-3, 4, dtype=np.float32)[:, None]
    read = quantise_weight(jnp.asarray(w))
    got = rounded_product(jnp.asarray(x), read)
    assert got.dtype == jnp.float32
    rows = np.stack([rounded(row, FORWARD) for row in x])
    # sums in float32
    np.testing.assert_allclose(got, rows @ rounded(w, FORWARD), rtol=1e-5, atol=1e-5)
    alone = [rounded_product(jnp.asarray(row[None]), read) for row in x]
    np.testing.assert_array_equal(got, jnp.concatenate(alone))


def test_a_rounded_product_is_written_in_bfloat16_and_keeps_its_rows_apart():
    x, w = (jnp.asarray(random(*s), jnp.bfloat16) for s in ((5, 32), (32, 12)))
    read = quantise_weight(w)
    got = np.asarray(rounded_product(x, read))
    rows = np.stack([rounded(row, FORWARD) for row in np.asarray(x, np.float32)])
    expected = rows @ rounded(np.asarray(w, np.float32), FORWARD)
    np.testing.assert_allclose(got, expected, rtol=2**-8, atol=1e-5)
    np.testing.assert_array_equal(got, got.astype(jnp.bfloat16).astype(np.float32))
    bad = np.asarray(rounded_product(x.at[2, 3].set(jnp.nan), read))
    np.testing.assert_array_equal(np.delete(bad, 2, 0), np.delete(got, 2, 0))
    assert np.isnan(bad[2]).all()


def test_no_gradient_passes_through_a_rounded_product():
    x, w = jnp.asarray(random(5, 32)), quantise_weight(jnp.asarray(random(32, 12)))
    assert not jax.grad(lambda x: rounded_product(x, w).sum())(x).any()


def test_a_product_is_that_of_the_rounded_matrices():
    x, w = random(33, 64), random(48, 64, seed=1)
    got = fp8_matmul(
        quantise(jnp.asarray(x), FORWARD),
        quantise(jnp.asarray(w), FORWARD),
        out_dtype=jnp.float32,
    )
    exact = rounded(x, FORWARD) @ rounded(w, FORWARD).T
    # float32 sums of 64 products of numbers around 1
    np.testing.assert_allclose(got, exact, rtol=0, atol=1e-5)
    assert np.abs(x @ w.T - exact).max() > 0.1  # and not that of the matrices


@pytest.mark.parametrize("precision", ["fp8", "fp8_all"])
def test_a_linear_layer_and_its_gradients(precision):
    x, w, dy = random(3, 7, 16), random(16, 24, seed=1), random(3, 7, 24, seed=2)

    @jax.jit
    def run(x, w, dy):
        layer = lambda x, w: fp8_linear(x, w, quantise_weight(w), precision=precision)
        y, pull_back = jax.vjp(layer, x, w)
        return y, *pull_back(dy)

    y, dx, dw = run(*map(jnp.asarray, (x, w, dy)))
    x2, dy2 = x.reshape(21, 16), dy.reshape(21, 24)
    qx, qw, qdy = rounded(x2, FORWARD), rounded(w, FORWARD), rounded(dy2, GRADIENT)
    of_dw = (qx, qdy) if precision == "fp8_all" else (x2, dy2)
    expected = qx @ qw, qdy @ qw.T, of_dw[0].T.astype(np.float64) @ of_dw[1]
    for got, wanted in zip((y, dx, dw), expected, strict=True):
        assert got.dtype == jnp.float32
        got = np.asarray(got).reshape(wanted.shape)
        np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-5)  # sums in float32


def test_hopper_multiplies_8_bit_floats_and_older_gpus_what_they_stand_for(monkeypatch):
    x, w = jnp.zeros((64, 32), jnp.bfloat16), jnp.zeros((32, 64))

    def both(x, w):
        layer = lambda x, w: fp8_linear(x, w, quantise_weight(w), precision="fp8_all")
        return jax.vjp(layer, x, w)[1](layer(x, w))

    def products(device):
        jax.clear_caches()
        see_device(monkeypatch, device)
        lowered = jax.jit(both).trace(x, w).lower(lowering_platforms=("cuda",))
        return re.findall(r"dot_general.*: \(tensor<[\dx]*x(\w+)>", lowered.as_text())

    assert sorted(products(H200)) == ["f8E4M3FN", "f8E4M3FN", "f8E5M2"]
    assert set(products(A100)) == {"bf16"}
    assert why_no_tensor_cores(H200) is None
    assert "A100" in (why_no_tensor_cores(A100) or "")
    jax.clear_caches()


def test_quantised_values_are_a_pytree_of_arrays():
    leaves = jax.tree.leaves(Quantised(jnp.zeros((2, 2), FORWARD), jnp.ones(())))
    assert [leaf.shape for leaf in leaves] == [(2, 2), ()]


# On a GPU, with its tensor cores.


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("formats", ["e4m3 e4m3", "e5m2 e4m3", "e4m3 e5m2"])
def test_a_gpu_multiplies_the_rounded_matrices(seed, formats):
    generator = np.random.default_rng(seed)
    # Multiples of 16, which cuBLAS takes, and sizes that have to be padded.
    unit = 16 if seed % 2 else 1
    m, k, n = (unit * int(size) for size in generator.integers(1, 1024 // unit, 3))
    kinds = {"e4m3": FORWARD, "e5m2": GRADIENT}
    first, second = (kinds[name] for name in formats.split())
    left = random(m, k, seed=seed, scale=10.0 ** generator.integers(-6, 6))
    right = random(n, k, seed=seed + 1, scale=10.0 ** generator.integers(-6, 6))

    @jax.jit
    def run(left, right):
        operands = quantise(left, first), quantise(right, second)
        return fp8_matmul(*operands, out_dtype=jnp.float32)

    got = np.asarray(run(left, right)).astype(np.float64)
    np.testing.assert_array_equal(got, run(left, right))
    rounded_left, rounded_right = rounded(left, first), rounded(right, second)
    sums = np.abs(rounded_left) @ np.abs(rounded_right).T
    off = np.abs(got - rounded_left @ rounded_right.T)
    # One instruction adds 32 products to a sum, each cut off 13 bits below the largest
    # of them: 33 x 2^-13 if all are cut by as much, and 2^-16 in the mean on an H200.
    assert (off <= 33 * 2.0**-13 * sums).all(), (off / sums).max()
    assert np.linalg.norm(off) <= 2.0**-14 * np.linalg.norm(sums)
