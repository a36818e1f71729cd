"""A new compute dtype is a line in `dtypes`: an 8-bit one, computed plainly."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparsejax import dtypes
from sparsejax.feed_forward.ffn import ffn
from sparsejax.feed_forward.sparsity import FFNSparsity
from sparsejax.feed_forward.spec import FFNSpec
from sparsejax.ops.dense_matmul import dense_matmul
from sparsejax.routing.routers import ActivationEnergy
from sparsejax.sparsity.patterns import NM, VNM
from tests.support.devices import hopper

FLOAT8 = "float8_e4m3fn"
TWO_FOUR = FFNSparsity(
    weights=NM(2, 4), activations=NM(2, 4), token_sparsity="magnitude"
)
EXPERTS = replace(
    TWO_FOUR,
    activations=VNM(8, 2, 16),
    router=ActivationEnergy(),
    experts_per_token=2,
    weight_gradients="expert_columns",
)


def whole_numbers(shape: tuple[int, int], seed: int, *, largest: int, zeros: float):
    """Few numbers, so small that Y1, its square and Y are whole numbers of 8 bits."""
    generator = np.random.default_rng(seed)
    numbers = generator.integers(-largest, largest + 1, shape)
    return jnp.asarray(numbers * (generator.random(shape) >= zeros), jnp.float32)


@pytest.mark.parametrize("sparsity", [TWO_FOUR, EXPERTS], ids=["2:4", "experts"])
def test_an_ffn_of_8_bits_is_that_of_32_where_nothing_is_rounded(sparsity, monkeypatch):
    registered = (*dtypes.COMPUTE_DTYPES, FLOAT8)
    monkeypatch.setattr(dtypes, "COMPUTE_DTYPES", registered)
    x, dy = (whole_numbers((32, 64), seed, largest=1, zeros=0.97) for seed in (0, 1))
    w_up = whole_numbers((64, 64), 2, largest=1, zeros=0.5)
    w_down = whole_numbers((64, 64), 3, largest=1, zeros=0.97)

    def results(dtype):
        def run(*operands):
            scales = jnp.ones(2)
            return ffn(*operands, sparsity=sparsity, scales=scales)

        operands = x.astype(dtype), w_up, w_down
        y, pull_back = jax.vjp(jax.jit(run), *operands)
        return y, *pull_back(dy.astype(dtype))

    found, expected = results(jnp.dtype(FLOAT8)), results(jnp.float32)
    assert found[0].dtype == found[1].dtype == FLOAT8
    assert found[2].dtype == found[3].dtype == jnp.float32
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(ours.astype(jnp.float32), theirs)
        assert np.any(theirs)


def test_kernels_that_know_16_bits_alone_say_so(monkeypatch):
    registered = (*dtypes.COMPUTE_DTYPES, FLOAT8)
    monkeypatch.setattr(dtypes, "COMPUTE_DTYPES", registered)
    spec = FFNSpec(
        tokens=4096,
        d_model=2048,
        d_hidden=8192,
        dtype=FLOAT8,
        sparsity=TWO_FOUR,
        device=hopper.H200,
    )
    for decision in spec.explain():
        assert decision.backend == "xla" and f"not {FLOAT8}" in decision.reason


def test_sums_are_wider_than_what_is_summed():
    for dtype in (FLOAT8, "float16", "bfloat16", "float32"):
        assert dtypes.accumulation_dtype(dtype) == jnp.float32
        assert dtypes.widest(dtype, dtype) == dtype
        assert dtypes.widest(dtype, jnp.float32, dtype) == jnp.float32
    assert dtypes.accumulation_dtype(jnp.float64) == np.float64


def test_a_product_of_8_bits_is_rounded_once():
    keys = jax.random.split(jax.random.key(0), 2)
    lhs, rhs = (jax.random.normal(key, (128, 128)).astype(FLOAT8) for key in keys)
    exact = jnp.matmul(lhs.astype(jnp.float32), rhs.astype(jnp.float32))
    found = dense_matmul(lhs, rhs)
    assert found.dtype == FLOAT8
    expected = exact.astype(FLOAT8).astype(jnp.float32)
    np.testing.assert_array_equal(found.astype(jnp.float32), expected)
