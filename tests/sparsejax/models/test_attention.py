"""Attention and rotary positions against NumPy."""

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from sparsejax.models.attention import (
    Attention,
    attention_implementation,
    rotary_embedding,
)

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


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_attention_matches_numpy(kv_heads):
    heads, head_dim, sequence, offset = 4, 4, 6, 3
    layer = Attention(D, heads, kv_heads=kv_heads, rngs=nnx.Rngs(0))
    x = normal(2, sequence, D)

    def rotate(v):
        positions = offset + np.arange(sequence)
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
    np.testing.assert_allclose(layer(x, offset=offset), expected, rtol=1e-4, atol=1e-5)


def test_attention_refuses_uneven_heads():
    with pytest.raises(ValueError, match="kv_heads=3"):
        Attention(16, 4, kv_heads=3, rngs=nnx.Rngs(0))


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
