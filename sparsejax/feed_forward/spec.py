"""One call of an FFN: its six GEMMs and their facts.

    1  Y1 = X W1        2  Y  = A W2        with A = relu(Y1)^2
    3  dA = dY W2^T     4  dX = dY1 W1^T    with dY1 = dA * 2 relu(Y1)
    5  dW1 = X^T dY1    6  dW2 = A^T dY

Sparse tensor cores accept sparsity in one operand, along the reduction axis, so a
GEMM is sparse in its weight (1, 3) or in its activation (2, 4, 5, 6), never in both.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from jaxtyping import Array, Float

from pallas_kernels.device import CPU, Device
from sparsejax.annotations import check_value
from sparsejax.dtypes import Precision, check_compute_dtype, dtype_in_jax
from sparsejax.feed_forward.activation import Activation, SquaredReLU
from sparsejax.feed_forward.choice import decide
from sparsejax.feed_forward.packing import (
    packed_before,
    packs_its_result,
    why_not_packed_anew,
    why_not_packed_over_tokens,
    with_joined_experts,
    with_router_product,
    writes_dense_rows,
)
from sparsejax.feed_forward.sparsity import DENSE, FFNSparsity, check_divisible
from sparsejax.feed_forward.tiles import (
    GROUP_TILE,
    dense_feature_count,
    group_tile,
)
from sparsejax.ops.backend import Backend, Decision, current_device
from sparsejax.ops.gemm_spec import INTO_HIDDEN, GemmSpec, Role
from sparsejax.sparsity.patterns import NM, TWO_FOUR, VNM


@dataclass(frozen=True, kw_only=True)
class FFNCall(ABC):
    """The static facts of one call of an FFN, gated or not."""

    tokens: int
    d_model: int
    d_hidden: int
    dtype: str
    sparsity: FFNSparsity = DENSE
    precision: Precision = "dtype"
    """The precision of the GEMMs where the FFN is dense. Of a sparse FFN it is that of
    GEMM 1 alone (GEMMs 1a and 1b with a gate), where `FFNSparsity.up_is_dense`; the
    others are in the compute dtype."""
    device: Device = CPU
    token_shards: int = 1
    """The number of parts that the tokens are split into on a mesh, one per device."""
    hidden_shards: int = 1
    """The number of parts that the neurons are split into on a mesh, one per device."""
    distinct_experts: bool = True
    """Whether every token has as many experts as all others and none of them twice, as
    a router chooses them: choices that a caller hands over need not be so."""

    def __post_init__(self) -> None:
        check_value("sparsity", self.sparsity, FFNSparsity)
        check_value("precision", self.precision, Precision)
        check_compute_dtype("x", self.dtype)
        check_divisible(self.d_model, self.d_hidden, self.sparsity)

    @property
    def quantises(self) -> bool:
        """Whether GEMM 1 is one of 8-bit floats."""
        return self.precision != "dtype" and self.sparsity.up_is_dense

    @property
    @abstractmethod
    def kind(self) -> Activation:
        """The activation between GEMM 1 and GEMM 2."""

    @abstractmethod
    def gemms(self) -> tuple[GemmSpec, ...]:
        """Returns the GEMMs of one device, forward and backward, in their numbers'
        order."""

    def weight_gemm(self, role: Role, name: str, *, by_expert: bool) -> GemmSpec:
        """Returns a GEMM from d_model to the neurons, whose weight may be 2:4."""
        s = self.sparsity
        pattern = s.backward_weights if role == "d_hidden" else s.weights
        return self._gemm(role, name, "weight", pattern, by_expert)

    def activation_gemm(self, role: Role, name: str, **facts: Any) -> GemmSpec:
        """Returns a GEMM from the neurons to d_model, whose input may be 2:4."""
        pattern, by_expert = self.sparsity.in_expert, bool(self.sparsity.experts)
        return self._gemm(role, name, "input", pattern, by_expert, **facts)

    def gradient_gemm(
        self, role: Role, name: str, operand: Literal["input", "gradient"]
    ) -> GemmSpec:
        """Returns the gradient of a weight, whose operand with a column per neuron may
        be 2:4 along the tokens."""
        s = self.sparsity
        columns = s.weight_gradients == "expert_columns"
        features = self.d_hidden // (s.experts or 1)
        if not columns:
            features = self.d_hidden // self.hidden_shards
        return self._gemm(
            role,
            name,
            operand,
            TWO_FOUR if s.token_sparsity else None,
            columns,
            is_weight_gradient=True,
            dense_features=dense_feature_count(features, s.dense_features),
            why_not_packed=self.why_not_packed or why_not_packed_over_tokens(s),
        )

    def _gemm(
        self,
        role: Role,
        name: str,
        operand: Literal["input", "weight", "gradient"],
        pattern: NM | None,
        by_expert: bool,
        **facts: Any,
    ) -> GemmSpec:
        """Returns a GEMM of one device. An input has a column per neuron, a weight and
        the gradient of an output have them along d_out."""
        s, widths = self.sparsity, (self.d_model, self.d_hidden // self.hidden_shards)
        d_in, d_out = reversed(widths) if operand == "input" else widths
        pattern_of_rows = s.activations if isinstance(s.activations, VNM) else None
        if by_expert and pattern_of_rows is not None:
            facts |= {
                "experts": s.experts,
                "experts_per_token": s.experts_per_token,
                "expert_features": self.d_hidden // pattern_of_rows.experts,
                "group_tile": group_tile(pattern_of_rows.v),
            }
        return GemmSpec(
            name=name,
            role=role,
            fp8=self._is_fp8(role, facts.get("is_weight_gradient", False)),
            tokens=self.tokens // self.token_shards,
            d_in=d_in,
            d_out=d_out,
            dtype=self.dtype,
            sparse_operand=operand if pattern else None,
            pattern=pattern,
            device=self.device,
            **facts,
        )

    def _is_fp8(self, role: Role, is_weight_gradient: bool) -> bool:
        """Returns whether a GEMM is one of 8-bit floats."""
        if self.sparsity.is_dense and is_weight_gradient:
            return self.precision == "fp8_all"
        return self.quantises and (self.sparsity.is_dense or role in INTO_HIDDEN)

    @property
    def why_not_packed(self) -> str | None:
        """Why nothing packs the activations of any FFN of this kind for tensor cores;
        None where something may."""
        return None

    def explain(self, backend: Backend | None = None) -> tuple[Decision, ...]:
        """Returns what runs each of the GEMMs, and why: see `choice.decide`.

        Raises:
          NotImplementedError: the named backend cannot run one of them; says why.
        """
        decisions = decide(self.gemms(), backend, self.with_epilogues)
        return with_router_product(self.sparsity, decisions)

    def with_epilogues(self, decisions: Sequence[Decision]) -> tuple[Decision, ...]:
        """Returns the decisions with paths that say what a kernel does besides
        multiply."""
        if not self.distinct_experts:
            return tuple(decisions)
        return with_joined_experts(self.sparsity, decisions)


class FFNSpec(FFNCall):
    """The static facts of one call of a squared-ReLU FFN."""

    @property
    def kind(self) -> Activation:
        return SquaredReLU()

    @classmethod
    def of(
        cls,
        x: Float[Array, "tokens d_model"],
        w_up: Float[Array, "d_model d_hidden"],
        w_down: Float[Array, "d_hidden d_model"],
        sparsity: FFNSparsity,
        *,
        precision: Precision = "dtype",
        token_shards: int = 1,
        hidden_shards: int = 1,
        distinct_experts: bool = True,
    ) -> "FFNSpec":
        """Returns the spec of a call. Raises ValueError where the operands' shapes do
        not fit, or where a dtype is none that an FFN computes in."""
        if x.ndim != 2 or w_up.ndim != 2 or w_down.ndim != 2:
            raise ValueError(
                f"x {x.shape}, w_up {w_up.shape} and w_down {w_down.shape} must be "
                f"matrices; flatten batch axes or use jax.vmap"
            )
        d_model, d_hidden = w_up.shape
        if x.shape[1] != d_model or w_down.shape != (d_hidden, d_model):
            raise ValueError(
                f"shapes do not chain: x {x.shape} needs w_up (d_model, d_hidden), got "
                f"{w_up.shape}, and w_down (d_hidden, d_model), got {w_down.shape}"
            )
        for name, weight in (("w_up", w_up), ("w_down", w_down)):
            check_compute_dtype(name, dtype_in_jax(weight))
        return cls(
            tokens=x.shape[0],
            d_model=d_model,
            d_hidden=d_hidden,
            dtype=dtype_in_jax(x),
            sparsity=sparsity,
            precision=precision,
            device=current_device(),
            token_shards=token_shards,
            hidden_shards=hidden_shards,
            distinct_experts=distinct_experts,
        )

    def gemms(self) -> tuple[GemmSpec, ...]:
        """Returns GEMMs 1 to 6 of one device."""
        s = self.sparsity
        up = self.weight_gemm("up", "1  Y1 = X W1", by_expert=s.skip_blocks)
        d_hidden = self.weight_gemm(
            "d_hidden", "3  dA = dY W2^T", by_expert=s.da_by_expert
        )
        if s.is_dense and self.precision == "dtype":
            up, d_hidden = (
                replace(gemm, squares=True, group_tile=GROUP_TILE)
                for gemm in (up, d_hidden)
            )
        return (
            up,
            self.activation_gemm("down", "2  Y = A W2"),
            d_hidden,
            self.activation_gemm(
                "d_input",
                "4  dX = dY1 S(W1)^T" if s.d_input_weights else "4  dX = dY1 W1^T",
                weight_transposed=True,
                why_not_packed=why_not_packed_anew(s),
            ),
            self.gradient_gemm("d_up", "5  dW1 = X^T dY1", "gradient"),
            self.gradient_gemm("d_down", "6  dW2 = A^T dY", "input"),
        )

    def with_epilogues(self, decisions: Sequence[Decision]) -> tuple[Decision, ...]:
        told = {decision.spec.role: decision for decision in decisions}
        for first, then, packed, dense in (
            ("up", "down", "A 2:4", "A"),
            ("d_hidden", "d_input", "dY1 where A is kept", "dY1"),
        ):
            path = told[first].path
            if packs_its_result(self.sparsity, told[first], told[then]):
                told[first] = replace(told[first], path=f"{path}, writes {packed}")
                told[then] = packed_before(told[then])
            elif writes_dense_rows(told[first], told[then]):
                told[first] = replace(told[first], path=f"{path}, writes {dense}")
        return super().with_epilogues(tuple(told.values()))
