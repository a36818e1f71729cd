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
    biases: int
    head: int
    """The number of parameters of the head; 0 where the head is the embedding."""

    @property
    def vectors(self) -> int:
        """The number of parameters that every device has: all that are no matrices."""
        return self.norms + self.biases

    @property
    def total(self) -> int:
        return self.embedding + self.attention + self.ffn + self.vectors + self.head


def parameter_count(config: ModelConfig) -> ParameterCount:
    """Returns the number of trained parameters of `model.Transformer(config)`. Weights
    that are masked are stored whole and counted so; of those that are blocks on a
    diagonal, only the blocks are."""
    d, layers = config.d_model, config.layers
    query_width, kv_width = config.query_width, config.kv_width
    matrices = 3 if config.gated else 2
    vocabulary = config.vocab_size * d
    return ParameterCount(
        embedding=vocabulary,
        attention=layers * 2 * d * (query_width + kv_width) // config.groups,
        ffn=layers * matrices * d * config.d_hidden // config.groups,
        norms=(2 * layers + 1) * d + layers * config.qk_norm * 2 * config.head_width,
        biases=layers * config.qkv_bias * (query_width + 2 * kv_width),
        head=0 if config.tie_embeddings else vocabulary,
    )
