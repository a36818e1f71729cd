"""The configuration space of the six FFN GEMMs, and what may be combined.

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
from sparsejax.annotations import check_fields, check_value
from sparsejax.dtypes import Precision, check_compute_dtype, dtype_in_jax
from sparsejax.feed_forward.activation import Activation, SquaredReLU
from sparsejax.feed_forward.choice import decide
from sparsejax.feed_forward.operands.checks import (
    check_backward,
    check_experts,
    check_patterns,
)
from sparsejax.feed_forward.packing import (
    packed_before,
    packs_its_result,
    why_not_packed_anew,
    why_not_packed_over_tokens,
    writes_dense_rows,
)
from sparsejax.feed_forward.tiles import dense_feature_count, group_tile
from sparsejax.ops.backend import Backend, Decision, current_device
from sparsejax.ops.gemm_spec import GemmSpec, Role
from sparsejax.routing.routers import NEAREST_CENTRE, Router, named_router
from sparsejax.sparsity.patterns import NM, TWO_FOUR, VNM

WeightGradients = Literal["dense", "expert_columns"]
TokenSparsity = Literal["magnitude", "mvue", "mvue_approximate"]


@dataclass(frozen=True, kw_only=True)
class FFNSparsity:
    """The sparsity of the operands of an FFN's GEMMs. The default is a dense FFN.

    Sources: arXiv 2602.06183 (weights, Venom, router), 2503.16672 (activations).
    """

    weights: NM | None = None
    """The pattern of S(W1) and S(W2^T) in GEMMs 1 and 3, along d_model; None: dense."""

    activations: NM | VNM | None = None
    """The pattern of A and dY1 in GEMMs 2 and 4, along the F neurons: 2:4; V:2:M, 2:4
    inside a token's experts; V:4:M, dense inside of them; None: dense."""

    router: Router = NEAREST_CENTRE
    """The way in which a token chooses its experts (V:N:M only): a `Router` or its
    registered name."""

    experts_per_token: int = 1
    """The number g of the E experts that a token uses (V:N:M only); A has density g * n
    / m."""

    most_experts_per_token: int | None = None
    """The largest number of experts that a token may use where their number depends on
    the token: those whose share of its energy is above a threshold, and at least one.
    The threshold moves in training so that tokens use `experts_per_token` on average.
    None: every token uses that many."""

    skip_blocks: bool = False
    """Whether GEMM 1 computes just the neurons of a token's experts (V:N:M only). GEMM
    3 does so where its weight is 2:4 even if this is False (`da_by_expert`)."""

    mask_reuse: bool = True
    """Whether the backward applies the forward's mask to Y1 first. If not, GEMM 4
    selects anew in dY1 and GEMMs 5, 6 read unmasked activations: an ablation."""

    weight_gradients: WeightGradients = "dense"
    """The sums that GEMMs 5 and 6 take: over all tokens, or by expert over the expert's
    tokens."""

    token_sparsity: TokenSparsity | None = None
    """The way in which A and dY1 are made 2:4 along the tokens for GEMMs 5 and 6: by
    magnitude, or by the minimum-variance unbiased estimator (needs a key). None: they
    are not."""

    dense_features: float = 0.05
    """The share of features, those with most non-zeros, that stay dense in GEMMs 5 and
    6 with `token_sparsity`. The default is the 95/5 split of arXiv 2503.16672."""

    permute_tokens: bool = True
    """Whether the groups of four of `token_sparsity` are tokens a 64th of all apart, in
    a fixed order, since neighbours activate the same features (arXiv 2503.16672)."""

    exact_gradients: bool = False
    """Whether the backward reads the weights that the forward has read: GEMM 3 the
    dense W2^T, and GEMM 4 the transpose of beta S(W1). The gradients are then those of
    the forward with its masks held constant, and the one of beta S(W1) is passed on to
    W1 as it is. Without 2:4 weights they are so in any case."""

    mean_compensation: bool = False
    """Whether Y gets what the neurons of the experts that a token does not use give on
    average: the mean of A over the tokens that skip a neuron, a moving average over
    training steps, times W2 (V:N:M only)."""

    skipped_energy: float | None = None
    """The share of the energy of a token, the squared mass of A, that the neurons of
    the experts which it does not use are to have: a penalty on them, added to the
    gradient of W1, grows in training until they have it (V:N:M only). None: there is no
    penalty."""

    def __post_init__(self) -> None:
        check_patterns(self)
        if not isinstance(self.router, Router):
            object.__setattr__(self, "router", named_router(self.router))
        check_fields(self)
        for name in ("weights", "activations"):
            pattern = getattr(self, name)
            if isinstance(pattern, NM) and (pattern.n, pattern.m) != (2, 4):
                raise ValueError(
                    f"{name}={pattern} is not 2:4, the N:M pattern that sparse tensor "
                    f"cores run; use NM(2, 4)"
                )
        check_experts(self)
        check_backward(self)
        if not 0.0 <= self.dense_features < 1.0:
            raise ValueError(
                f"dense_features={self.dense_features} is not in [0, 1): it is the "
                f"share of features kept dense in GEMMs 5 and 6"
            )

    @property
    def experts(self) -> int | None:
        """The number of experts E, or None where no router is used."""
        return self.activations.experts if isinstance(self.activations, VNM) else None

    @property
    def in_expert(self) -> NM | None:
        """The pattern of A along the neurons of a token's experts, or along all neurons
        where there are no experts: 2:4, or None where A is dense there."""
        pattern = self.activations
        is_dense = isinstance(pattern, VNM) and pattern.dense_inside
        return None if pattern is None or is_dense else TWO_FOUR

    @property
    def backward_weights(self) -> NM | None:
        """The pattern of the weight that GEMM 3 reads; None where it is dense."""
        return None if self.exact_gradients else self.weights

    @property
    def d_input_weights(self) -> NM | None:
        """The pattern of the weights that GEMM 4 reads, as zeros of a dense operand;
        None where they have none."""
        return self.weights if self.exact_gradients else None

    @property
    def da_by_expert(self) -> bool:
        """Whether GEMM 3 computes dA for the neurons of a token's experts alone. A is
        zero at all others, and so is dY1 = dA * 2 relu(Y1), unless `mask_reuse=False`
        lets dense weight gradients read them. Where only A is 2:4, and no block is
        skipped, the GEMM is left to one dense one, which no loop over experts beats at
        every size."""
        read_elsewhere = not self.mask_reuse and self.weight_gradients == "dense"
        skips = self.backward_weights is not None or self.in_expert is None
        return bool(self.experts) and (
            self.skip_blocks or (skips and not read_elsewhere)
        )

    @property
    def observes(self) -> tuple[str, ...]:
        """The names of the arrays that training steps observe and an FFN keeps, besides
        those of its router."""
        names = {
            "skipped_means": self.mean_compensation,
            "energy_threshold": self.most_experts_per_token is not None,
            "penalty_strength": self.skipped_energy is not None,
        }
        return tuple(name for name, is_set in names.items() if is_set)

    @property
    def learns(self) -> bool:
        """Whether training steps move what the router keeps."""
        return bool(self.experts) and self.router.learns

    @property
    def expert_choices(self) -> int:
        """The number of experts that a token can have at most."""
        return self.most_experts_per_token or self.experts_per_token

    @property
    def needs_key(self) -> bool:
        """Whether the backward draws random numbers."""
        return self.token_sparsity in ("mvue", "mvue_approximate")

    @property
    def is_dense(self) -> bool:
        """Whether all six GEMMs are dense."""
        return (
            self.weights is None
            and self.activations is None
            and self.token_sparsity is None
        )


DENSE = FFNSparsity()


@dataclass(frozen=True, kw_only=True)
class FFNCall(ABC):
    """The static facts of one call of an FFN, gated or not."""

    tokens: int
    d_model: int
    d_hidden: int
    dtype: str
    sparsity: FFNSparsity = DENSE
    precision: Precision = "dtype"
    """The precision of the GEMMs where the FFN is dense. Those of a sparse one are in
    the compute dtype."""
    device: Device = CPU
    token_shards: int = 1
    """The number of parts that the tokens are split into on a mesh, one per device."""
    hidden_shards: int = 1
    """The number of parts that the neurons are split into on a mesh, one per device."""

    def __post_init__(self) -> None:
        check_value("sparsity", self.sparsity, FFNSparsity)
        check_value("precision", self.precision, Precision)
        check_compute_dtype("x", self.dtype)
        check_divisible(self.d_model, self.d_hidden, self.sparsity)

    @property
    def quantises(self) -> bool:
        """Whether the GEMMs with the weights are those of 8-bit floats."""
        return self.precision != "dtype" and self.sparsity.is_dense

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
        of_weight = facts.get("is_weight_gradient", False)
        fp8 = self.quantises and (self.precision == "fp8_all" or not of_weight)
        return GemmSpec(
            name=name,
            role=role,
            fp8=fp8,
            tokens=self.tokens // self.token_shards,
            d_in=d_in,
            d_out=d_out,
            dtype=self.dtype,
            sparse_operand=operand if pattern else None,
            pattern=pattern,
            device=self.device,
            **facts,
        )

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
        return decide(self.gemms(), backend, self.with_epilogues)

    def with_epilogues(self, decisions: Sequence[Decision]) -> tuple[Decision, ...]:
        """Returns the decisions with paths that say what a kernel does besides
        multiply."""
        return tuple(decisions)


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
        )

    def gemms(self) -> tuple[GemmSpec, ...]:
        """Returns GEMMs 1 to 6 of one device."""
        s = self.sparsity
        return (
            self.weight_gemm("up", "1  Y1 = X W1", by_expert=s.skip_blocks),
            self.activation_gemm("down", "2  Y = A W2"),
            self.weight_gemm("d_hidden", "3  dA = dY W2^T", by_expert=s.da_by_expert),
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
        return tuple(told.values())


def check_divisible(d_model: int, d_hidden: int, sparsity: FFNSparsity) -> None:
    """Raises ValueError where groups or clusters do not divide the two widths."""
    weights, activations = sparsity.weights, sparsity.activations
    if weights is not None and d_model % weights.m:
        raise ValueError(
            f"d_model={d_model} is not a multiple of {weights.m}, required by "
            f"weights={weights}; pad to {-(-d_model // weights.m) * weights.m}"
        )
    if activations is not None and d_hidden % activations.m:
        raise ValueError(
            f"d_hidden={d_hidden} is not a multiple of m={activations.m}, required by "
            f"activations={activations}; pad to "
            f"{-(-d_hidden // activations.m) * activations.m}"
        )
    if (
        isinstance(activations, VNM)
        and sparsity.token_sparsity
        and sparsity.weight_gradients == "expert_columns"
        and activations.v % 4
    ):
        raise ValueError(
            f"{activations} pads an expert's tokens to multiples of {activations.v}, "
            f"but token_sparsity={sparsity.token_sparsity!r} needs groups of four; "
            f"use a v that is a multiple of 4"
        )
