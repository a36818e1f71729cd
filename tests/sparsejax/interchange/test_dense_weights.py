"""The exported weights are the model: a NumPy forward pass with them agrees."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from sparsejax.config import ModelConfig
from sparsejax.feed_forward.sparsity import FFNSparsity
from sparsejax.interchange.dense_weights import dense_weights, export
from sparsejax.models.transformer import Transformer
from sparsejax.sparsity.patterns import NM, BlockDiagonal

CONFIG = ModelConfig(
    vocab_size=11, d_model=8, layers=2, heads=2, kv_heads=1, d_hidden=16
)


def rms_norm(x, scale):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + CONFIG.norm_epsilon) * scale


def rotate(x):
    """(sequence, head_dim): pairs half a head apart."""
    half = x.shape[1] // 2
    frequency = CONFIG.rope_base ** (-np.arange(half) / half)
    turn = np.exp(1j * np.arange(len(x))[:, None] * frequency)
    turned = (x[:, :half] + 1j * x[:, half:]) * turn
    return np.concatenate([turned.real, turned.imag], axis=1)


def attention(x, w, prefix):
    q, k, v = (x @ w[f"{prefix}.w_{name}"] for name in ("query", "key", "value"))
    size = CONFIG.head_width
    outs = []
    for head in range(CONFIG.heads):
        query = rotate(q[:, head * size : (head + 1) * size])
        scores = query @ rotate(k).T / np.sqrt(size)
        scores[np.triu_indices(len(x), 1)] = -np.inf
        shares = np.exp(scores - scores.max(1, keepdims=True))
        outs.append(shares / shares.sum(1, keepdims=True) @ v)
    return np.concatenate(outs, axis=1) @ w[f"{prefix}.w_out"]


def forward(w, tokens):
    x = w["embedding"][tokens].astype(np.float64)
    for layer in range(CONFIG.layers):
        block = f"blocks.{layer}"
        normed = rms_norm(x, w[f"{block}.attention_norm.scale"])
        x = x + attention(normed, w, f"{block}.attention")
        normed = rms_norm(x, w[f"{block}.ffn_norm.scale"])
        hidden = np.maximum(normed @ w[f"{block}.ffn.w_up"], 0) ** 2
        x = x + hidden @ w[f"{block}.ffn.w_down"]
    return rms_norm(x, w["final_norm.scale"]) @ w["head"]


@pytest.mark.parametrize("static", [None, BlockDiagonal(2)])
def test_the_file_holds_the_model(static, tmp_path):
    config = replace(CONFIG, static_weights=static)
    model = Transformer(config, rngs=nnx.Rngs(0))
    path = tmp_path / "model.safetensors"
    assert str(path) in export(model, path)
    tokens = np.array([3, 1, 4, 1, 5, 9, 2])
    expected = model(jax.numpy.asarray(tokens)[None])[0]
    # float32 against float64, logits of order one
    np.testing.assert_allclose(forward(load_file(path), tokens), expected, atol=2e-5)


def test_a_sparse_model_is_not_passed_off_as_dense(tmp_path):
    sparse = FFNSparsity(weights=NM(2, 4))
    model = Transformer(CONFIG, sparsity=sparse, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="dense phase"):
        dense_weights(model)
    path = tmp_path / "model.safetensors"
    assert "ended sparse" in export(model, path)
    assert not path.exists()
