"""Every setting of a training run, as frozen dataclasses; named presets."""

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder-only transformer."""

    vocab_size: int = 256
    d_model: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int = 4
    """Key and value heads; fewer than `heads` is grouped-query attention."""
    d_hidden: int = 512
    """F, neurons per FFN (for "swiglu": per branch)."""
    activation: Literal["relu2", "swiglu"] = "relu2"
    """The FFN: W2 relu(W1 x)^2, or Wd (silu(Wg x) * Wu x)."""
    tie_embeddings: bool = False
    rope_base: float = 10_000.0
    norm_epsilon: float = 1e-6
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Compute type; master weights and optimiser moments are always float32."""
    remat: Literal["none", "full", "dots"] = "none"
    """What a block recomputes in the backward: nothing, everything, or all but the
    outputs of the plain GEMMs."""

    @property
    def head_dim(self) -> int:
        return self.d_model // self.heads

    def __post_init__(self) -> None:
        if self.d_model % self.heads:
            raise ValueError(
                f"d_model={self.d_model} is not a multiple of heads={self.heads}; "
                f"change one of them"
            )
        if self.heads % self.kv_heads:
            raise ValueError(
                f"heads={self.heads} is not a multiple of kv_heads={self.kv_heads}; "
                f"grouped-query attention gives each key head the same number of "
                f"query heads"
            )
        if self.head_dim % 2:
            raise ValueError(
                f"head_dim={self.head_dim} (d_model / heads) is odd; rotary position "
                f"embedding rotates pairs"
            )


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where the tokens come from."""

    text: str | None = None
    """Glob of text files ("**" allowed). None: the Python standard library's source."""
    tokenizer: str | None = None
    """Path of a Hugging Face tokenizer.json. None: bytes, vocabulary 256."""
    sequence_length: int = 256
    """Tokens the model sees per sequence (one more is read, for the targets)."""
    validation_share: float = 0.05
    """Share of the files held out; a file is always on the same side."""
    seed: int = 0
    """Of the order of the training windows."""
