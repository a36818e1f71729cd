"""The configuration space of the six FFN GEMMs, and what may be combined.

    1  Y1 = X W1        2  Y  = A W2        with A = relu(Y1)^2
    3  dA = dY W2^T     4  dX = dY1 W1^T    with dY1 = dA * 2 relu(Y1)
    5  dW1 = X^T dY1    6  dW2 = A^T dY

Sparse tensor cores accept sparsity in one operand, along the reduction axis, so a
GEMM is sparse in its weight (1, 3) or in its activation (2, 4, 5, 6), never in both.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.device import CPU, Device
from sparsejax.annotations import check_fields, check_value
from sparsejax.dtypes import check_compute_dtype
from sparsejax.feed_forward.activation import Activation, SquaredReLU
from sparsejax.feed_forward.choice import decide
from sparsejax.ops.backend import (
    Backend,
    Decision,
    GemmSpec,
    current_device,
)
from sparsejax.routing.routers import NEAREST_CENTRE, Router, named_router
from sparsejax.sparsity.patterns import NM, VNM

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
    """The pattern of A and dY1 in GEMMs 2 and 4, along the F neurons; None: dense."""

    router: Router = NEAREST_CENTRE
    """The way in which a token chooses its experts (V:N:M only): a `Router` or its
    registered name."""

    experts_per_token: int = 1
    """The number g of the E experts that a token uses (V:N:M only); A has density g * n
    / m."""

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

    def __post_init__(self) -> None:
        self._check_patterns()
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
        venom = isinstance(self.activations, VNM)
        if isinstance(self.activations, VNM):
            if self.activations.n != 2:
                raise ValueError(
                    f"activations={self.activations} keeps n={self.activations.n} of "
                    f"four; sparse tensor cores need n=2"
                )
            if not 1 <= self.experts_per_token <= self.activations.experts:
                raise ValueError(
                    f"experts_per_token={self.experts_per_token} is not in "
                    f"[1, {self.activations.experts}], the experts of "
                    f"{self.activations} (m / 4)"
                )
        if self.skip_blocks and not venom:
            raise ValueError(
                f"skip_blocks=True needs a V:N:M activation pattern, not "
                f"{self.activations}; set activations=VNM(v, 2, m)"
            )
        if self.skip_blocks and not self.router.before_up:
            raise ValueError(
                f"skip_blocks=True with router={self.router.name!r}: its choice is "
                f"only known after GEMM 1 over all neurons; choose router="
                f"'nearest_centre' or 'token_hash', or skip_blocks=False"
            )
        if self.skip_blocks and self.weight_gradients != "expert_columns":
            raise ValueError(
                f"skip_blocks=True leaves nothing outside the token's experts, so "
                f"weight_gradients={self.weight_gradients!r} cannot be computed; use "
                f"'expert_columns'"
            )
        if self.weight_gradients == "expert_columns" and not venom:
            raise ValueError(
                f"weight_gradients='expert_columns' needs a V:N:M activation pattern, "
                f"not {self.activations}; use 'dense' or activations=VNM(v, 2, m)"
            )
        if not 0.0 <= self.dense_features < 1.0:
            raise ValueError(
                f"dense_features={self.dense_features} is not in [0, 1): it is the "
                f"share of features kept dense in GEMMs 5 and 6"
            )

    def _check_patterns(self) -> None:
        """Raises ValueError where a pattern is none, and says which one was meant."""
        if not isinstance(self.weights, NM | None):
            raise ValueError(
                f"weights={self.weights!r} must be a 2:4 pattern, whose groups lie "
                f"along d_model, or None for dense weights; use NM(2, 4)"
            )
        if not isinstance(self.activations, NM | VNM | None):
            raise ValueError(
                f"activations={self.activations!r} must be a pattern along the neurons "
                f"or None for dense activations; use NM(2, 4), or VNM(v, 2, m) with m "
                f"four times the number of experts"
            )

    @property
    def experts(self) -> int | None:
        """The number of experts E, or None where no router is used."""
        return self.activations.experts if isinstance(self.activations, VNM) else None

    @property
    def da_by_expert(self) -> bool:
        """Whether GEMM 3 computes dA for the neurons of a token's experts alone. A is
        zero at all others, and so is dY1 = dA * 2 relu(Y1), unless `mask_reuse=False`
        lets dense weight gradients read them. A dense weight (no `skip_blocks`) is left
        to one dense GEMM, which no loop over experts beats at every size."""
        read_elsewhere = not self.mask_reuse and self.weight_gradients == "dense"
        two_four = self.weights is not None and not read_elsewhere
        return bool(self.experts) and (self.skip_blocks or two_four)

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

FEATURE_TILE = 16
"""The features of one tile. The dense features of GEMMs 5 and 6 are rounded up to whole
tiles, the row granularity of the tensor-core instructions that multiply them."""


def dense_feature_count(features: int, share: float) -> int:
    """Returns how many features stay dense: `share` of them, rounded up to whole
    feature tiles."""
    return min(math.ceil(share * features / FEATURE_TILE) * FEATURE_TILE, features)


GROUP_TILE = 128
"""The number of rows of one expert that sparse tensor cores take together."""


def group_tile(v: int) -> int:
    """Returns the number that sparse tensor cores pad an expert's rows to a multiple
    of, at least V. It pads more than V does, and changes no value."""
    return math.ceil(v / GROUP_TILE) * GROUP_TILE


@dataclass(frozen=True, kw_only=True)
class FFNCall(ABC):
    """The static facts of one call of an FFN, gated or not."""

    tokens: int
    d_model: int
    d_hidden: int
    dtype: str
    sparsity: FFNSparsity = DENSE
    device: Device = CPU
    token_shards: int = 1
    """The number of parts that the tokens are split into on a mesh, one per device."""
    hidden_shards: int = 1
    """The number of parts that the neurons are split into on a mesh, one per device."""

    def __post_init__(self) -> None:
        check_value("sparsity", self.sparsity, FFNSparsity)
        check_compute_dtype("x", self.dtype)
        check_divisible(self.d_model, self.d_hidden, self.sparsity)

    @property
    @abstractmethod
    def kind(self) -> Activation:
        """The activation between GEMM 1 and GEMM 2."""

    @abstractmethod
    def gemms(self) -> tuple[GemmSpec, ...]:
        """Returns the GEMMs of one device, forward and backward, in their numbers'
        order."""

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


def dtype_in_jax(array: Array) -> str:
    """Returns the dtype that JAX computes with: float32 for NumPy's float64, unless x64
    is enabled."""
    return str(jnp.result_type(array))


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
            device=current_device(),
            token_shards=token_shards,
            hidden_shards=hidden_shards,
        )

    def gemms(self) -> tuple[GemmSpec, ...]:
        """Returns GEMMs 1 to 6 of one device."""
        s = self.sparsity
        t, d = self.tokens // self.token_shards, self.d_model
        f = self.d_hidden // self.hidden_shards
        activations = NM(2, 4) if s.activations else None
        venom = s.activations if isinstance(s.activations, VNM) else None
        neurons = self.d_hidden // (s.experts or 1)
        along_tokens = NM(2, 4) if s.token_sparsity else None
        routed, columns = bool(s.experts), s.weight_gradients == "expert_columns"

        def gemm(role, name, d_in, d_out, operand, pattern, by_expert, **facts):
            return GemmSpec(
                name=name,
                role=role,
                tokens=t,
                d_in=d_in,
                d_out=d_out,
                dtype=self.dtype,
                sparse_operand=operand if pattern else None,
                pattern=pattern,
                experts=s.experts if by_expert else None,
                experts_per_token=s.experts_per_token if by_expert else 1,
                expert_features=neurons if by_expert else 0,
                group_tile=group_tile(venom.v) if venom and by_expert else 0,
                device=self.device,
                **facts,
            )

        weight = partial(gemm, operand="weight", pattern=s.weights)
        activation = partial(
            gemm, operand="input", pattern=activations, by_expert=routed
        )
        gradient = partial(
            gemm,
            pattern=along_tokens,
            by_expert=columns,
            is_weight_gradient=True,
            dense_features=dense_feature_count(
                neurons if columns else f, s.dense_features
            ),
            why_not_packed=why_not_packed_over_tokens(s),
        )
        return (
            weight("up", "1  Y1 = X W1", d, f, by_expert=s.skip_blocks),
            activation("down", "2  Y = A W2", f, d),
            weight("d_hidden", "3  dA = dY W2^T", d, f, by_expert=s.da_by_expert),
            activation(
                "d_input",
                "4  dX = dY1 W1^T",
                f,
                d,
                weight_transposed=True,
                why_not_packed=why_not_packed_anew(s),
            ),
            gradient("d_up", "5  dW1 = X^T dY1", d, f, operand="gradient"),
            gradient("d_down", "6  dW2 = A^T dY", f, d, operand="input"),
        )

    def with_epilogues(self, decisions: Sequence[Decision]) -> tuple[Decision, ...]:
        told = {decision.spec.role: decision for decision in decisions}
        for first, then, what in (
            ("up", "down", "A 2:4"),
            ("d_hidden", "d_input", "dY1 where A is kept"),
        ):
            if packs_its_result(self.sparsity, told[first], told[then]):
                path = f"{told[first].path}, writes {what}"
                told[first] = replace(told[first], path=path)
                told[then] = _packed_before(told[then])
        return tuple(told.values())


def _packed_before(decision: Decision) -> Decision:
    """Returns the decision for a GEMM whose operand the GEMM before it has packed."""
    if decision.times is None:
        return decision
    times = replace(decision.times, packing_us=0.0)
    return replace(decision, times=times)


def packs_its_result(
    sparsity: FFNSparsity, decision: Decision, following: Decision
) -> bool:
    """Returns whether the first GEMM packs its result 2:4 in its kernel's epilogue, as
    the GEMM that follows reads it: GEMM 1 then writes A instead of Y1, GEMM 3 dY1
    instead of dA. Both GEMMs must have the same rows."""
    same_rows = not sparsity.experts or decision.spec.experts is not None
    both = decision.on_kernels and following.on_kernels
    return sparsity.weights is not None and same_rows and both


def why_not_packed_anew(sparsity: FFNSparsity) -> str | None:
    """Returns why nothing packs the operand of GEMM 4, or None."""
    return None if sparsity.mask_reuse else "mask_reuse=False selects anew in dY1"


def why_not_packed_over_tokens(sparsity: FFNSparsity) -> str | None:
    """Returns why nothing packs the operands of GEMMs 5 and 6, or None."""
    if sparsity.activations is None:
        return "they are not 2:4 along the features"
    if sparsity.experts and sparsity.weight_gradients != "expert_columns":
        return "weight_gradients='dense' sums over the tokens of all experts"
    if sparsity.needs_key:
        return f"token_sparsity={sparsity.token_sparsity!r} draws random numbers"
    if not sparsity.mask_reuse:
        return "mask_reuse=False does not keep the mask of the forward"
    return None


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
