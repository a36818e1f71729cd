"""The settings of a model: its sizes, and what it computes."""

from dataclasses import dataclass
from typing import Literal

from sparsejax.annotations import check_fields
from sparsejax.config.ranges import Count, Positive, check_intervals


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The sizes of a decoder-only transformer, and what it computes."""

    vocab_size: Count = 256
    d_model: Count = 128
    layers: Count = 4
    heads: Count = 2
    kv_heads: Count = 2
    """Number of key and value heads; fewer than `heads` is grouped-query attention."""
    d_hidden: Count = 512
    """Number of neurons F of each FFN (of a gated one, per branch)."""
    activation: Literal["relu2", "swiglu", "reglu2"] = "relu2"
    """Kind of FFN: W2 relu(W1 x)^2 ("relu2"), or gated Wd (s(Wg x) * Wu x) with s silu
    ("swiglu") or relu^2 ("reglu2")."""
    tie_embeddings: bool = False
    rope_base: Positive = 10_000.0
    norm_epsilon: Positive = 1e-6
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Compute dtype; master weights and optimiser moments are always float32."""
    remat: Literal["none", "full", "dots"] = "none"
    """What a block recomputes in the backward: nothing ("none"), everything ("full"),
    or all but the outputs of the plain GEMMs ("dots")."""
    scan_layers: bool = True
    """Whether one block is compiled and a loop runs it for every layer. False: the
    program has all layers one after the other; it takes longer to compile, and nothing
    is copied into and out of the loop's stacks."""

    @property
    def head_dim(self) -> int:
        return self.d_model // self.heads

    @property
    def gated(self) -> bool:
        """Whether the FFN has a third weight, Wg."""
        return self.activation != "relu2"

    def __post_init__(self) -> None:
        check_fields(self, "model.")
        check_intervals(self, "model.")
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
