"""Attention and rotary positions against NumPy."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from sparsejax.config import ModelConfig
from sparsejax.models.attention import (
    Attention,
    KVCache,
    attention_implementation,
    rotary_embedding,
)
from sparsejax.ops.fp8_matmul import FORWARD
from sparsejax.sparsity.patterns import BlockDiagonal
from tests.support.oracles.fp8_oracle import rounded

D, F = 16, 64


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def test_rotary_embedding_is_a_complex_rotation():
    x = normal(2, 5, 3, 8)
    positions = np.array([0, 1, 2, 7, 100])
    frequency = 10_000.0 ** (-2 * np.arange(4) / 8)
    turn = np.exp(1j * positions[:, None] * frequency)[None, :, None, :]
    turned = (x[..., :4] + 1j * x[..., 4:]) * turn
    expected = np.concatenate([turned.real, turned.imag], -1)
    got = rotary_embedding(x, jnp.asarray(positions), base=10_000.0)
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


def test_rotary_scores_depend_on_the_distance_only():
    x = jnp.asarray(normal(1, 2, 1, 16))
    scores = []
    for offset in (0, 1000):
        rotated = rotary_embedding(x, offset + jnp.arange(2), base=10_000.0)
        scores.append(jnp.vdot(rotated[0, 0, 0], rotated[0, 1, 0]))
    np.testing.assert_allclose(*scores, rtol=1e-4)


def test_no_pass_joins_the_halves_of_heads_or_of_their_gradient():
    def rotated(x):
        return rotary_embedding(x, jnp.arange(5), base=10_000.0)

    def both(x, gradient):
        y, pullback = jax.vjp(rotated, x)
        return y, pullback(gradient)

    x = normal(2, 5, 3, 8)
    program = jax.jit(both).lower(x, x).as_text()
    whole = "tensor<2x5x3x8xf32>"
    assert whole in program
    lines = program.splitlines()
    joins = [line for line in lines if "concatenate" in line or "pad" in line]
    assert joins  # the angles' cosines and sines
    assert not [line for line in joins if whole in line]


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_attention_matches_numpy(kv_heads):
    heads, head_dim, sequence = 4, 4, 6
    layer = Attention(D, heads, kv_heads=kv_heads, rngs=nnx.Rngs(0))
    x = normal(2, sequence, D)

    def rotate(v):
        positions = np.arange(sequence)
        frequency = 10_000.0 ** (-np.arange(2) / 2)
        turn = np.exp(1j * positions[:, None] * frequency)[None, :, None, :]
        turned = (v[..., :2] + 1j * v[..., 2:]) * turn
        return np.concatenate([turned.real, turned.imag], -1)

    def project(w, n):
        return (x @ np.asarray(w[...])).reshape(2, sequence, n, head_dim)

    query = rotate(project(layer.w_query, heads))
    key = rotate(project(layer.w_key, kv_heads))
    value = project(layer.w_value, kv_heads)
    mixed = np.zeros((2, sequence, heads, head_dim))
    for batch in range(2):
        for head in range(heads):
            group = head // (heads // kv_heads)
            for t in range(sequence):
                seen = key[batch, : t + 1, group]
                score = np.exp(seen @ query[batch, t, head] / np.sqrt(head_dim))
                mixed[batch, t, head] = (
                    score @ value[batch, : t + 1, group] / score.sum()
                )
    expected = mixed.reshape(2, sequence, D) @ np.asarray(layer.w_out[...])
    np.testing.assert_allclose(layer(x), expected, rtol=1e-4, atol=1e-5)


def test_8_bit_projections_are_those_of_rounded_operands():
    """Query, key and value of ones: the softmax is even, and out a mean of values."""
    layer = Attention(16, 4, precision="fp8", rngs=nnx.Rngs(0))
    layer.w_query[...] = jnp.zeros((16, 16))
    x = normal(2, 5, 16)
    values = rounded(x.reshape(10, 16), FORWARD) @ rounded(layer.w_value[...], FORWARD)
    before = np.cumsum(values.astype(np.float32).reshape(2, 5, 16), axis=1)
    mixed = before / np.arange(1, 6, dtype=np.float32)[None, :, None]
    out = rounded(mixed.reshape(10, 16), FORWARD) @ rounded(layer.w_out[...], FORWARD)
    got = np.asarray(layer(jnp.asarray(x))).reshape(10, 16)
    # Where float32 rounds across a boundary of 8 bits one of 16 products is off by 1/8.
    np.testing.assert_allclose(got, out, rtol=0, atol=0.05 * np.abs(out).max())
    assert np.median(np.abs(got - out)) < 1e-5
    # With a cache the projections are in the compute dtype.
    cache = KVCache(*(jnp.zeros((2, 5, 4, 4)) for _ in range(2)))
    positions = jnp.broadcast_to(jnp.arange(5), (2, 5))
    plain = Attention(16, 4, rngs=nnx.Rngs(0))
    plain.w_query[...] = jnp.zeros((16, 16))
    cached, _ = layer.with_cache(jnp.asarray(x), cache, positions)
    np.testing.assert_allclose(cached, plain(jnp.asarray(x)), rtol=1e-4, atol=1e-5)


def test_8_bit_floats_are_refused_with_blocks_on_a_diagonal():
    with pytest.raises(ValueError, match="weights of 2 blocks on a diagonal"):
        Attention(16, 4, groups=2, precision="fp8", rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="leave static_weights out"):
        ModelConfig(static_weights=BlockDiagonal(4), precision="fp8")


def test_attention_refuses_uneven_heads():
    with pytest.raises(ValueError, match="kv_heads=3"):
        Attention(16, 4, kv_heads=3, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("size", [0, -4, 4.0, "4", True])
@pytest.mark.parametrize("name", ["d_model", "heads", "kv_heads", "head_dim"])
def test_attention_refuses_a_size_that_is_none(name, size):
    sizes = {"d_model": 16, "heads": 4} | {name: size}
    with pytest.raises(ValueError, match=f"^{name}={size!r} must be an int of at leas"):
        Attention(**sizes, rngs=nnx.Rngs(0))


def test_attention_refuses_what_are_no_random_streams():
    with pytest.raises(ValueError, match="rngs=0 must be of type Rngs"):
        Attention(16, 4, rngs=0)


@pytest.mark.parametrize(
    ("platform", "capability", "dtype", "head_dim", "expected", "reason"),
    [
        ("cpu", None, jnp.bfloat16, 128, "xla", "needs a GPU"),
        ("gpu", "9.0", jnp.float32, 128, "xla", "not float32"),
        ("gpu", "9.0", jnp.bfloat16, 128, "cudnn", "available"),
        ("gpu", "9.0", jnp.bfloat16, 256, "cudnn", "available"),
        ("gpu", "8.0", jnp.bfloat16, 256, "xla", "up to 128"),
        ("gpu", "9.0", jnp.float16, 20, "xla", "multiple of 8"),
    ],
)
def test_attention_implementation(
    platform, capability, dtype, head_dim, expected, reason
):
    device = SimpleNamespace(platform=platform, compute_capability=capability)
    implementation, why = attention_implementation(head_dim, dtype, device)
    assert implementation == expected
    assert reason in why
