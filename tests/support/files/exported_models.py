"""Models of every kind that is exported, small enough for tests."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array

from sparsejax.config import ModelConfig
from sparsejax.feed_forward.sparsity import DENSE, FFNSparsity
from sparsejax.models.transformer import Transformer
from sparsejax.sparsity.patterns import BlockDiagonal

SMALL = ModelConfig(
    vocab_size=256, d_model=16, layers=2, heads=4, kv_heads=2, d_hidden=32
)
MODELS = {
    "relu2, tied": replace(SMALL, tie_embeddings=True, rope_base=500.0),
    "swiglu": replace(SMALL, activation="swiglu", norm_epsilon=1e-3),
    "reglu2": replace(SMALL, activation="reglu2"),
    "blocks on a diagonal": replace(SMALL, static_weights=BlockDiagonal(2)),
    "qwen2": replace(SMALL, activation="swiglu", qkv_bias=True, tie_embeddings=True),
    "qwen3": replace(
        SMALL, activation="swiglu", qk_norm=True, head_dim=6, norm_epsilon=1e-3
    ),
    "qwen3 of reglu2, blocks": replace(
        SMALL,
        activation="reglu2",
        qk_norm=True,
        head_dim=10,
        static_weights=BlockDiagonal(2),
    ),
}
"""By name: each activation, tied and untied embeddings, grouped queries, blocks on a
diagonal, biases, normalised queries and keys, heads of a width of their own, and
settings other than the defaults of `transformers`."""
CLASSES = {
    "relu2, tied": "Arcee",
    "swiglu": "Llama",
    "reglu2": "Llama",
    "blocks on a diagonal": "Arcee",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "qwen3 of reglu2, blocks": "Qwen3",
}
"""By the same names: the beginning of the class in `transformers`."""
TOKENS = np.random.default_rng(0).integers(0, 256, 12)


def some_model(config: ModelConfig, sparsity: FFNSparsity = DENSE) -> Transformer:
    """A model whose norms are no ones, and whose biases are no zeros."""
    model = Transformer(config, sparsity=sparsity, rngs=nnx.Rngs(0))
    blocks, attention = model.blocks, model.blocks.attention
    norms = [model.final_norm, blocks.attention_norm, blocks.ffn_norm]
    if config.qk_norm:
        norms += [attention.query_norm, attention.key_norm]
    vectors = [norm.scale for norm in norms]
    if config.qkv_bias:
        vectors += [attention.bias_query, attention.bias_key, attention.bias_value]
    for vector in vectors:
        drawn = jax.random.uniform(jax.random.key(1), vector[...].shape)
        vector[...] = vector[...] + drawn
    return model


def logits_of(model: Transformer) -> Array:
    """Logits (sequence, vocabulary) of `TOKENS`."""
    return model(jnp.asarray(TOKENS)[None])[0]
