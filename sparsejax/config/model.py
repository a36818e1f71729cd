"""The settings of a model: its sizes, and what it computes."""

from dataclasses import dataclass
from typing import Literal

from sparsejax.annotations import check_fields
from sparsejax.config.ranges import Count, CountOrNone, Positive, check_intervals
from sparsejax.dtypes import Precision
from sparsejax.feed_forward.activation import ActivationName
from sparsejax.sparsity.patterns import BlockDiagonal, StaticPattern


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
    activation: ActivationName = "relu2"
    """Kind of FFN: W2 relu(W1 x)^2 ("relu2"), or gated Wd (s(Wg x) * Wu x) with s silu
    ("swiglu") or relu^2 ("reglu2")."""
    head_dim: CountOrNone = None
    """Width of each head; None: d_model / heads."""
    qk_norm: bool = False
    """Whether each head's queries and keys are normalised by their root mean square,
    with a scale for each feature that the heads share, before they are rotated."""
    qkv_bias: bool = False
    """Whether queries, keys and values have biases."""
    tie_embeddings: bool = False
    rope_base: Positive = 10_000.0
    norm_epsilon: Positive = 1e-6
    static_weights: StaticPattern | None = None
    """The entries that the weights of all linear layers have, chosen once and at random
    where there is a choice: BlockDiagonal(4), "diagonal:4" in files, computes a quarter
    of the FLOPs (`models.block_diagonal`); NM(2, 4) trains half of the entries, by
    masks at dense cost (`switches.static_weights`). None: all. A phase may have its
    own, of a model that becomes dense."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Compute dtype; master weights and optimiser moments are always float32."""
    precision: Precision = "dtype"
    """Precision of the GEMMs with attention's four weights, and with the FFN's where it
    is dense: operands in `dtype` ("dtype"); rounded to 8-bit floats in the forward and
    for the gradients of inputs ("fp8"); those of weights too ("fp8_all"). Of a sparse
    FFN only GEMM 1 is rounded, where its weights are dense and no neuron is skipped.
    Experimental: dense runs of 85 M parameters ended up to 0.9 thousandths of a nat
    higher with "fp8". A phase may have its own."""
    logits_of_loss: Literal["float32", "dtype"] = "float32"
    """Dtype of the logits that a loss is computed from: "float32", or the compute dtype
    ("dtype"). The logits of a large vocabulary are the largest array of a step, and in
    bfloat16 they have half as many bytes. The loss itself is computed in float32."""
    remat: Literal["none", "full", "dots"] = "none"
    """The part that a block recomputes in the backward: nothing ("none"), everything
    ("full"), or all but the outputs of the plain GEMMs, attention's result, and what an
    FFN by expert keeps of its neurons ("dots")."""
    scan_layers: bool = True
    """Whether one block is compiled and a loop runs it for every layer. False: the
    program has all layers one after the other; it takes longer to compile, and nothing
    is copied into and out of the loop's stacks."""

    @property
    def head_width(self) -> int:
        """The width of each head: `head_dim`, or d_model / heads."""
        return self.head_dim or self.d_model // self.heads

    @property
    def query_width(self) -> int:
        """The width of the queries of all heads, which W_out reads."""
        return self.heads * self.head_width

    @property
    def kv_width(self) -> int:
        """The width of the keys, and of the values, of all their heads."""
        return self.kv_heads * self.head_width

    @property
    def groups(self) -> int:
        """Blocks on the diagonal of each linear layer's weight; 1 where it is whole."""
        static = self.static_weights
        return static.groups if isinstance(static, BlockDiagonal) else 1

    @property
    def gated(self) -> bool:
        """Whether the FFN has a third weight, Wg."""
        return self.activation != "relu2"

    def __post_init__(self) -> None:
        check_fields(self, "model.")
        check_intervals(self, "model.")
        if self.head_dim is None and self.d_model % self.heads:
            raise ValueError(
                f"d_model={self.d_model} is not a multiple of heads={self.heads}; "
                f"change one of them, or give a head_dim"
            )
        if self.heads % self.kv_heads:
            raise ValueError(
                f"heads={self.heads} is not a multiple of kv_heads={self.kv_heads}; "
                f"grouped-query attention gives each key head the same number of "
                f"query heads"
            )
        if self.head_width % 2:
            whose = "" if self.head_dim else " (d_model / heads)"
            raise ValueError(
                f"head_dim={self.head_width}{whose} is odd; rotary position embedding "
                f"rotates pairs"
            )
        self._check_static_weights()
        if self.precision != "dtype" and self.groups > 1:
            raise ValueError(
                f"model.precision={self.precision!r} with weights of {self.groups} "
                f"blocks on a diagonal: batched GEMMs of 8-bit floats are not built; "
                f"use precision='dtype', or leave static_weights out"
            )

    def _check_static_weights(self) -> None:
        """Raises ValueError where the pattern of the weights does not divide them."""
        pattern = self.static_weights
        if pattern is None:
            return
        if not isinstance(pattern, BlockDiagonal) and not (
            pattern.m == 4 and pattern.n < 4
        ):
            raise ValueError(
                f"model.static_weights={pattern} must keep one, two or three of every "
                f"four entries; use NM(2, 4), or BlockDiagonal(4) for a quarter of "
                f"the FLOPs"
            )
        pattern.check_divides(self.d_hidden, "model.d_hidden")
        pattern.check_divides(self.kv_width, "model.kv_heads x head_dim")
        pattern.check_divides(self.query_width, "model.heads x head_dim")
        pattern.check_divides(self.d_model, "model.d_model")
        if isinstance(pattern, BlockDiagonal):
            pattern.check_divides_residual(self.d_model, "model.d_model")
