"""The number of parameters of a model, without building it."""

from dataclasses import dataclass

from sparsejax.config import ModelConfig


@dataclass(frozen=True, kw_only=True)
class ParameterCount:
    """The number of trained parameters of each component, over all layers."""

    embedding: int
    attention: int
    ffn: int
    norms: int
    head: int
    """The number of parameters of the head; 0 where the head is the embedding."""

    @property
    def total(self) -> int:
        return self.embedding + self.attention + self.ffn + self.norms + self.head


def parameter_count(config: ModelConfig) -> ParameterCount:
    """Returns the number of trained parameters of `model.Transformer(config)`. Weights
    that are masked are stored whole and counted so; of those that are blocks on a
    diagonal, only the blocks are."""
    d, layers = config.d_model, config.layers
    kv_width = config.kv_heads * config.head_dim
    matrices = 3 if config.gated else 2
    vocabulary = config.vocab_size * d
    return ParameterCount(
        embedding=vocabulary,
        attention=layers * (2 * d * d + 2 * d * kv_width) // config.groups,
        ffn=layers * matrices * d * config.d_hidden // config.groups,
        norms=(2 * layers + 1) * d,
        head=0 if config.tie_embeddings else vocabulary,
    )
