"""RMS normalisation against NumPy."""

import jax.numpy as jnp
import numpy as np

from sparsejax.models.norm import RMSNorm


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def test_rms_norm_matches_numpy():
    layer = RMSNorm(8, 1e-3, jnp.float32)
    layer.scale[...] = jnp.asarray(normal(8, seed=1))
    x = normal(2, 3, 8)
    expected = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-3) * normal(8, seed=1)
    np.testing.assert_allclose(layer(x), expected, rtol=1e-5)


def test_rms_norm_works_in_float32_inside_a_bfloat16_model():
    # 256 + 1/2 vanishes in bfloat16: squared and summed there, the mean would be off.
    x = jnp.full((1, 512), 1.0, jnp.bfloat16).at[0, 0].set(16.0)
    out = RMSNorm(512, 0.0, jnp.bfloat16)(x)
    assert out.dtype == jnp.bfloat16
    expected = 1 / np.sqrt((511 + 256) / 512)
    np.testing.assert_allclose(float(out[0, 1]), expected, rtol=2**-8)
