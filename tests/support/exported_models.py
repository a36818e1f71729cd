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
}
"""By name: each activation, tied and untied embeddings, grouped queries, blocks on a
diagonal, and settings other than the defaults of `transformers`."""
TOKENS = np.random.default_rng(0).integers(0, 256, 12)


def some_model(config: ModelConfig, sparsity: FFNSparsity = DENSE) -> Transformer:
    """A model whose norms are no ones."""
    model = Transformer(config, sparsity=sparsity, rngs=nnx.Rngs(0))
    for norm in (model.final_norm, model.blocks.attention_norm, model.blocks.ffn_norm):
        shape = norm.scale[...].shape
        norm.scale[...] = 1 + jax.random.uniform(jax.random.key(1), shape)
    return model


def logits_of(model: Transformer) -> Array:
    """Logits (sequence, vocabulary) of `TOKENS`."""
    return model(jnp.asarray(TOKENS)[None])[0]
