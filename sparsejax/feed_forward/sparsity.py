"""What may be sparse in the six GEMMs of an FFN, and which settings fit together.

Sparse tensor cores accept sparsity in one operand, along the reduction axis. The GEMMs
are numbered as in `spec`.
"""

from dataclasses import dataclass
from typing import Literal

from sparsejax.annotations import check_fields, check_value
from sparsejax.dtypes import Precision
from sparsejax.routing.named_routers import named_router, names_where
from sparsejax.routing.routers import NEAREST_CENTRE, Reads, Router
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
    """Whether GEMM 1 computes just the neurons of a token's experts (V:N:M only), which
    takes a router that can be asked before it. GEMM 3 does so where its weight is 2:4
    even if this is False (`da_by_expert`)."""

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

    skipped_energy: float | None = None
    """The share of the energy of a token, the squared mass of A, that the neurons of
    the experts which it does not use are to have: a penalty on them, added to the
    gradient of W1, grows in training until they have it (V:N:M only). None: there is no
    penalty."""

    def __post_init__(self) -> None:
        _check_patterns(self)
        if not isinstance(self.router, Router):
            object.__setattr__(self, "router", named_router(self.router))
        check_fields(self)
        for name in ("weights", "activations"):
            pattern = getattr(self, name)
            if isinstance(pattern, NM) and (pattern.n, pattern.m) != (2, 4):
                raise ValueError(
                    f"{name}={pattern} is not 2:4, the N:M pattern that sparse tensor "
                    f"cores run; use NM(2, 4), which settings call '2:4'"
                )
        _check_router(self.router)
        _check_experts(self)
        _check_backward(self)
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
    def up_is_dense(self) -> bool:
        """Whether GEMM 1 multiplies every token by the dense weights of all neurons,
        whatever is left out of its product afterwards."""
        return self.weights is None and not self.skip_blocks

    @property
    def chooses_in_fp8(self) -> bool:
        """Whether the router reads pre-activations of operands in 8-bit floats."""
        return bool(self.experts) and self.router.reads == "y_up_fp8"

    def rounds_up_weight(self, precision: Precision) -> bool:
        """Returns whether the dense W1, and Wg, of an FFN of this precision are read in
        8-bit floats: by GEMM 1, or by the router."""
        by_gemm = precision != "dtype" and self.up_is_dense
        return by_gemm or (self.weights is None and self.chooses_in_fp8)

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
            "energy_threshold": self.most_experts_per_token is not None,
            "penalty_strength": self.skipped_energy is not None,
        }
        return tuple(name for name, is_set in names.items() if is_set)

    @property
    def samples_tokens(self) -> bool:
        """Whether training steps compute some tokens with all their neurons, for what
        they observe or the router learns."""
        return bool(self.observes) or self.learns

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


def _check_router(router: Router) -> None:
    """Raises ValueError where a router's `reads` is none of `Reads`, and where it keeps
    arrays that nothing would read, or would move arrays that it does not keep."""
    check_value(f"reads of router={router.name!r}", router.reads, Reads)
    if router.has_state and router.inside:
        raise ValueError(
            f"router={router.name!r} reads Y1, where a router is asked without the "
            f"arrays that it keeps; let `reads` be 'x' or 'token_ids', or keep none"
        )
    if router.learns and not router.has_state:
        raise ValueError(
            f"router={router.name!r} learns and keeps no arrays; return them from "
            f"`initial_state`, or let `learns` be False"
        )


def _check_experts(sparsity: FFNSparsity) -> None:
    """Raises ValueError where settings of the experts do not fit the activation
    pattern, or one another."""
    activations = sparsity.activations
    venom = isinstance(activations, VNM)
    if isinstance(activations, VNM):
        if activations.n not in (2, 4):
            raise ValueError(
                f"activations={activations} keeps n={activations.n} of four; sparse "
                f"tensor cores need n=2, and n=4 is dense inside an expert"
            )
        if not 1 <= sparsity.experts_per_token <= activations.experts:
            raise ValueError(
                f"experts_per_token={sparsity.experts_per_token} is not in "
                f"[1, {activations.experts}], the experts of {activations} (m / 4)"
            )
    elif sparsity.experts_per_token < 1:
        raise ValueError(
            f"experts_per_token={sparsity.experts_per_token} must be at least 1; leave "
            f"it out where activations={activations} has no experts"
        )
    if sparsity.skip_blocks and not venom:
        raise ValueError(
            f"skip_blocks=True needs a V:N:M activation pattern, not {activations}; "
            f"set activations=VNM(v, 2, m)"
        )
    if sparsity.skip_blocks and not sparsity.router.before_up:
        others = names_where(lambda router: router.before_up)
        raise ValueError(
            f"skip_blocks=True with router={sparsity.router.name!r}: its choice is "
            f"only known after GEMM 1 over all neurons; choose router={others}, or "
            f"skip_blocks=False"
        )
    if sparsity.skip_blocks and sparsity.weight_gradients != "expert_columns":
        raise ValueError(
            f"skip_blocks=True leaves nothing outside the token's experts, so "
            f"weight_gradients={sparsity.weight_gradients!r} cannot be computed; use "
            f"'expert_columns'"
        )
    most = sparsity.most_experts_per_token
    if most is not None:
        if not sparsity.experts or not sparsity.router.scores_are_energies:
            others = names_where(lambda router: router.scores_are_energies)
            raise ValueError(
                f"most_experts_per_token={most} needs a V:N:M activation pattern and a "
                f"router that knows the experts' shares of a token's energy, not "
                f"activations={activations}, router={sparsity.router.name!r}; leave it "
                f"out or use router={others}"
            )
        if not sparsity.experts_per_token < most <= sparsity.experts:
            raise ValueError(
                f"most_experts_per_token={most} is not above experts_per_token="
                f"{sparsity.experts_per_token}, the mean, and at most "
                f"{sparsity.experts}, the experts of {activations}"
            )
    target = sparsity.skipped_energy
    if target is not None and not (venom and 0 < target < 1):
        raise ValueError(
            f"skipped_energy={target} with activations={activations} is not a share in "
            f"(0, 1) of the energy of a token with a V:N:M activation pattern; use one "
            f"such as 0.05, or leave it out"
        )
    if sparsity.weight_gradients == "expert_columns" and not venom:
        raise ValueError(
            f"weight_gradients='expert_columns' needs a V:N:M activation pattern, not "
            f"{activations}; use 'dense' or activations=VNM(v, 2, m)"
        )


def _check_backward(sparsity: FFNSparsity) -> None:
    """Raises ValueError where the backward could not be exact though it should."""
    along_tokens = sparsity.token_sparsity
    approximate = {
        "mask_reuse=False": not sparsity.mask_reuse,
        f"token_sparsity={along_tokens!r}": along_tokens is not None,
    }
    for setting, is_set in approximate.items():
        if sparsity.exact_gradients and is_set:
            raise ValueError(
                f"exact_gradients=True with {setting}, which approximates the "
                f"gradients; leave one of them out"
            )


def _check_patterns(sparsity: FFNSparsity) -> None:
    """Raises ValueError where a pattern is none, and says which one was meant."""
    if not isinstance(sparsity.weights, NM | None):
        raise ValueError(
            f"weights={sparsity.weights!r} must be a 2:4 pattern, whose groups lie "
            f"along d_model, or None for dense weights; use NM(2, 4)"
        )
    if not isinstance(sparsity.activations, NM | VNM | None):
        raise ValueError(
            f"activations={sparsity.activations!r} must be a pattern along the neurons "
            f"or None for dense activations; use NM(2, 4), or VNM(v, 2, m), or "
            f"VNM(v, 4, m), with m four times the number of experts"
        )


DENSE = FFNSparsity()
