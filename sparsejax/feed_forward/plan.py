"""The plan of an FFN: what runs its GEMMs, decided once and only read by the passes."""

from collections.abc import Sequence
from dataclasses import dataclass

from sparsejax.feed_forward.activation import Activation
from sparsejax.feed_forward.packing import (
    joins_experts,
    packs_its_result,
    sums_energies,
    why_not_packed_over_tokens,
    writes_dense_rows,
)
from sparsejax.feed_forward.sparsity import FFNSparsity
from sparsejax.feed_forward.spec import FFNCall
from sparsejax.feed_forward.tiles import group_tile
from sparsejax.ops.backend import Backend, Decision
from sparsejax.ops.kernels.base import KernelSet
from sparsejax.sparsity.patterns import VNM


@dataclass(frozen=True, kw_only=True)
class FFNPlan:
    """The decisions for an FFN: what runs each GEMM, what is packed, what is fused. A
    plan is hashable: it is a static argument of the functions that run it. The GEMMs
    are numbered as in `spec` and `gated_ffn`."""

    sparsity: FFNSparsity
    activation: Activation
    up: Decision
    """GEMM 1, Y1 = X W1 (tokens, d_hidden); of a gated FFN GEMM 1b, U = X Wu."""
    down: Decision
    """GEMM 2, Y = A W2 (tokens, d_model)."""
    d_hidden: Decision
    """GEMM 3, dA = dY W2^T (tokens, d_hidden)."""
    d_input: Decision
    """GEMM 4, dX = dY1 W1^T (tokens, d_model); of a gated FFN GEMM 4b, dX += dU
    Wu^T."""
    d_up: Decision
    """GEMM 5, dW1 = X^T dY1 (d_model, d_hidden); of a gated FFN GEMM 5b, dWu = X^T
    dU."""
    d_down: Decision
    """GEMM 6, dW2 = A^T dY (d_hidden, d_model)."""
    gate: Decision | None = None
    """GEMM 1a of a gated FFN, G = X Wg (tokens, d_hidden); None of a plain FFN."""
    d_input_gate: Decision | None = None
    """GEMM 4a of a gated FFN, dX = dG Wg^T (tokens, d_model); None of a plain FFN."""
    d_gate: Decision | None = None
    """GEMM 5a of a gated FFN, dWg = X^T dG (d_model, d_hidden); None of a plain FFN."""
    kernels: KernelSet | None
    """The set of kernels that runs some of the GEMMs; None where none does."""
    up_writes_a: bool
    """Whether GEMM 1 writes A, packed in its epilogue, in place of Y1."""
    d_hidden_writes_dy_up: bool
    """Whether GEMM 3 writes dY1, packed in its epilogue, in place of dA."""
    over_tokens: bool
    """Whether GEMMs 5 and 6 read packed operands that are 2:4 along the tokens."""
    joins_experts: bool
    """Whether a token has one row for all of its experts, in place of a row for each;
    see `passes.joined_experts`."""
    sums_energies: bool
    """Whether a kernel sums the energies by which the router chooses, so that the
    product that it reads is not written; see `packing.sums_energies`."""
    row_tile: int | None
    """The number that an expert's rows are padded to a multiple of; None without
    experts."""

    @classmethod
    def of(cls, call: FFNCall, backend: Backend | None) -> "FFNPlan":
        """Returns the plan of a call, on the backend that is named, or on the fastest
        where it is None.

        Raises:
          NotImplementedError: the named backend cannot run one of the GEMMs, or two
            sets of kernels would run them.
        """
        decisions = call.explain(backend)
        by_role = {str(decision.spec.role): decision for decision in decisions}
        sparsity, gated = call.sparsity, "gate" in by_role
        used = any(decision.on_kernels for decision in decisions)

        def writes_packed(first: str, then: str) -> bool:
            pair = by_role[first], by_role[then]
            return not gated and packs_its_result(sparsity, *pair)

        return cls(
            sparsity=sparsity,
            activation=call.kind,
            **by_role,
            kernels=_kernels_of(decisions),
            up_writes_a=writes_packed("up", "down"),
            d_hidden_writes_dy_up=writes_packed("d_hidden", "d_input"),
            joins_experts=call.distinct_experts and joins_experts(sparsity, decisions),
            sums_energies=sums_energies(sparsity, decisions),
            over_tokens=_packs_over_tokens(sparsity, by_role),
            row_tile=row_tile(sparsity, on_kernels=used),
        )

    @property
    def gemms(self) -> tuple[Decision, ...]:
        """The decisions for all GEMMs, in the order of their numbers."""
        every = (
            self.gate,
            self.up,
            self.down,
            self.d_hidden,
            self.d_input_gate,
            self.d_input,
            self.d_gate,
            self.d_up,
            self.d_down,
        )
        return tuple(decision for decision in every if decision is not None)

    @property
    def fuses_activation(self) -> bool:
        """Whether the FFN is dense and kernels run GEMMs 1 and 3, which write A and
        dY1; see `passes.dense_on_kernels`."""
        return self.up.squares

    @property
    def keeps_rows_of_x(self) -> bool:
        """Whether the residuals hold the rows of X sorted by expert, as GEMM 1 read
        them and GEMM 5 does, in place of X. With several experts per token the rows
        would take several times the memory of X."""
        read = self.up.spec.experts and self.sums_over_rows
        return bool(read) and self.sparsity.expert_choices == 1

    @property
    def sums_over_rows(self) -> bool:
        """Whether GEMMs 5 and 6 sum each expert's columns over that expert's rows;
        otherwise they sum all columns over all tokens."""
        return self.d_up.spec.experts is not None

    @property
    def packs_activations(self) -> bool:
        """Whether A and dY1 are packed for GEMMs 2 and 4."""
        return self.down.on_kernels and self.down.spec.pattern is not None

    @property
    def keeps_dense_rows(self) -> bool:
        """Whether the residuals hold A of dense rows of experts, which kernels read and
        write; see `passes.dense_by_expert`. It takes a squared ReLU, of which A says
        all, and weight gradients that read no activations of other neurons."""
        sparsity = self.sparsity
        own = sparsity.mask_reuse or sparsity.weight_gradients == "expert_columns"
        dense = self.down.on_kernels and self.down.spec.pattern is None
        return dense and own and self.gate is None

    @property
    def up_writes_rows_of_a(self) -> bool:
        """Whether GEMM 1 writes A of dense rows in its epilogue, in place of Y1."""
        return self.keeps_dense_rows and writes_dense_rows(self.up, self.down)

    @property
    def d_hidden_writes_rows_of_dy_up(self) -> bool:
        """Whether GEMM 3 writes dY1 of dense rows in its epilogue, in place of dA."""
        return self.keeps_dense_rows and writes_dense_rows(self.d_hidden, self.d_input)


def _packs_over_tokens(sparsity: FFNSparsity, by_role: dict[str, Decision]) -> bool:
    asked = sparsity.token_sparsity is not None
    possible = asked and why_not_packed_over_tokens(sparsity) is None
    gradients = (by_role.get(role) for role in ("d_gate", "d_up", "d_down"))
    return possible and any(of is not None and of.on_kernels for of in gradients)


def row_tile(sparsity: FFNSparsity, *, on_kernels: bool) -> int | None:
    """Returns the number that an expert's rows are padded to a multiple of; None
    without experts."""
    pattern = sparsity.activations
    if not isinstance(pattern, VNM):
        return None
    return group_tile(pattern.v) if on_kernels else pattern.v


def _kernels_of(decisions: Sequence[Decision]) -> KernelSet | None:
    """Returns the set of kernels that runs GEMMs of an FFN; None where no set does.
    Raises NotImplementedError where two sets would: neither reads what the other has
    packed."""
    by_name = {each.backend: each.kernels for each in decisions if each.on_kernels}
    if len(by_name) > 1:
        names = " and ".join(map(repr, by_name))
        raise NotImplementedError(
            f"GEMMs of this FFN would run on {names}, which do not read what the other "
            f"has packed; name one of them as backend"
        )
    return next(iter(by_name.values()), None)
