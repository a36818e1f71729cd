"""A GEMM as all code that chooses what runs it reads it: its facts, and its times."""

from dataclasses import astuple, dataclass
from typing import Literal

from pallas_kernels.device import CPU, Device
from sparsejax.sparsity.patterns import Pattern

Role = Literal[
    "up",
    "gate",
    "down",
    "d_hidden",
    "d_input",
    "d_input_gate",
    "d_up",
    "d_gate",
    "d_down",
]
"""The product that a GEMM computes in an FFN: "up" and "gate" the products Y1 (U where
the FFN is gated) and G, "down" Y, "d_hidden" dA, "d_input" dX (its part through U where
the FFN is gated), "d_input_gate" the part of dX through G, "d_up", "d_gate" and
"d_down" the gradients dW1, dWg and dW2."""

INTO_HIDDEN: tuple[Role, ...] = ("up", "gate")
"""The roles of the GEMMs that compute the neurons of a token."""


@dataclass(frozen=True, kw_only=True)
class GemmSpec:
    """The static facts of one GEMM, in the words of a linear layer.

    An input (tokens, d_in) times a weight (d_in, d_out) gives an output (tokens,
    d_out), and the sum goes over d_in. A weight gradient (d_in, d_out) is input^T times
    the output's gradient (tokens, d_out), and its sum goes over the tokens.
    """

    name: str
    """The equation that the GEMM computes, such as `Y1 = X W1`."""
    role: Role | None = None
    """The product that the GEMM computes in an FFN; None where it is not part of
    one."""
    tokens: int
    d_in: int
    d_out: int
    dtype: str
    sparse_operand: Literal["input", "weight", "gradient"] | None = None
    """The operand that is sparse: "gradient" is the gradient of the output;
    None where both are dense."""
    pattern: Pattern | None = None
    """The sparse operand's pattern, along the axis that is summed over; None where both
    operands are dense."""
    experts: int | None = None
    """The number of experts that the GEMM is grouped over, so that a row meets only its
    expert's weights; None where it is not grouped."""
    experts_per_token: int = 1
    expert_features: int = 0
    """The number of neurons of one expert; 0 where the GEMM is not one of an FFN by
    expert."""
    group_tile: int = 0
    """The number of consecutive rows that share one expert; 0 where it is not
    stated."""
    is_weight_gradient: bool = False
    """Whether the GEMM sums over the tokens; its result is then float32."""
    fp8: bool = False
    """Whether both operands are rounded to 8-bit floats (`ops.fp8_matmul`)."""
    squares: bool = False
    """Whether a squared ReLU, or its gradient, follows, which a kernel may apply before
    it writes: GEMMs 1 and 3 of a dense FFN."""
    float32_out: bool = False
    """Whether the result is float32 though the GEMM is no weight gradient."""
    weight_transposed: bool = False
    """Whether the weight is stored as (d_out, d_in), with d_in as its contiguous
    axis."""
    dense_features: int = 0
    """The number of dense features: those of a sparse operand over tokens that lose no
    entry, because each is multiplied as the sum of two 2:4 rows."""
    why_not_packed: str | None = None
    """Why nothing packs the sparse operand for tensor cores; None where something
    does."""
    why_not_by_expert: str | None = None
    """Why the GEMM multiplies the neurons of all experts, though tokens use those of
    some experts only; None where no expert need be skipped, or where others are."""
    device: Device = CPU
    """The device that runs the GEMM."""

    @property
    def sparse_weight(self) -> bool:
        """Whether the sparse operand is a weight."""
        return self.sparse_operand == "weight"

    @property
    def reads_activations(self) -> bool:
        """Whether the sparse operand is an activation, a row per token."""
        return self.sparse_operand == "input" and not self.is_weight_gradient

    @property
    def widths_of_expert(self) -> tuple[int, int]:
        """The d_in and d_out of the GEMM of one expert: the one of them that counts the
        neurons counts those of one expert, in place of all."""
        if not self.expert_features:
            return self.d_in, self.d_out
        if self.role in ("down", "d_input", "d_input_gate", "d_down"):
            return self.expert_features, self.d_out
        return self.d_in, self.expert_features

    @property
    def in_words(self) -> str:
        """The equation and the facts that a choice depends on most, in one line."""
        sizes = f"tokens {self.tokens}, d_in {self.d_in}, d_out {self.d_out}"
        facts = [sizes, "8-bit floats" if self.fp8 else self.dtype]
        if self.pattern is not None:
            ratio = ":".join(map(str, astuple(self.pattern)))
            kinds = {self.sparse_weight: "weight", self.reads_activations: "activation"}
            facts.append(f"{ratio} {kinds.get(True, 'operand over tokens')}")
        if self.experts is not None:
            facts.append(f"{self.experts} experts")
        return f"{' '.join(self.name.split())} ({', '.join(facts)})"

    @property
    def dense_flops(self) -> int:
        """The number of multiplications and additions of the dense GEMM that this one
        stands for."""
        return 2 * self.tokens * self.d_in * self.d_out


@dataclass(frozen=True, kw_only=True)
class Times:
    """The times of a GEMM in microseconds, and how they are known."""

    kernel_us: float
    """The time of the sparse kernel alone, in microseconds: measured for this GEMM, or
    scaled in proportion from the nearest measured number of tokens."""
    dense_us: float
    """The time of the library's dense GEMM, in microseconds, known in the same way."""
    packing_us: float
    """The time of packing the sparse operand, in microseconds."""
    estimated_from: str | None = None
    """The source of times that were estimated, in words: a smaller GEMM, or one on
    another GPU. None where this GEMM was measured."""
    measured_on: str | None = None
    """The kind of GPU that was measured, where it is another one than runs the GEMM;
    else None."""
    least_gain: float = 1.0
    """The gain over dense that the GEMM must have to be chosen unasked: 1 for
    measured times, more for estimates."""
