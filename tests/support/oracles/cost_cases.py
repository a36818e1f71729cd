"""Models, sparsities and a mesh whose cost is known."""

import dataclasses

from sparsejax.config import MeshConfig, ModelConfig
from sparsejax.feed_forward.sparsity import FFNSparsity
from sparsejax.sparsity.patterns import NM, VNM

TINY = ModelConfig(
    vocab_size=61, d_model=16, layers=3, heads=4, kv_heads=2, d_hidden=64
)
LLAMA_1B = ModelConfig(
    vocab_size=128_256,
    d_model=2048,
    layers=25,
    heads=16,
    kv_heads=16,
    d_hidden=8448,
    dtype="bfloat16",
)
MASKS = FFNSparsity(weights=NM(2, 4), activations=VNM(64, 2, 16))
BLOCKS = FFNSparsity(
    weights=NM(2, 4),
    activations=VNM(64, 2, 16),
    skip_blocks=True,
    weight_gradients="expert_columns",
)


SPLIT = dataclasses.replace(TINY, vocab_size=64, dtype="bfloat16")
CUBE = MeshConfig(data=2, fsdp=2, tensor=2)
WEIGHTS = FFNSparsity(weights=NM(2, 4))
