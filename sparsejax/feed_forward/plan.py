"""What runs an FFN: decided once for a call, and only read by forward and backward."""

from dataclasses import dataclass

from sparsejax.feed_forward.activation import Activation
from sparsejax.feed_forward.spec import (
    FFNCall,
    FFNSparsity,
    group_tile,
    packs_its_result,
    why_not_packed_over_tokens,
)
from sparsejax.ops.backend import Backend, Decision
from sparsejax.ops.kernels import registry
from sparsejax.ops.kernels.base import KernelSet
from sparsejax.sparsity.patterns import VNM


@dataclass(frozen=True, kw_only=True)
class FFNPlan:
    """What runs each GEMM of an FFN, and what is packed and fused. Hashable: a static
    argument of what runs it. The numbers are those of `spec` and `gated_ffn`."""

    sparsity: FFNSparsity
    activation: Activation
    up: Decision
    """1, Y1 = X W1; of a gated FFN 1b, U = X Wu."""
    down: Decision
    """2, Y = A W2."""
    d_hidden: Decision
    """3, dA = dY W2^T."""
    d_input: Decision
    """4, dX = dY1 W1^T; of a gated FFN 4b, dX += dU Wu^T."""
    d_up: Decision
    """5, dW1 = X^T dY1; of a gated FFN 5b, dWu = X^T dU."""
    d_down: Decision
    """6, dW2 = A^T dY."""
    gate: Decision | None = None
    """1a, G = X Wg."""
    d_input_gate: Decision | None = None
    """4a, dX = dG Wg^T."""
    d_gate: Decision | None = None
    """5a, dWg = X^T dG."""
    kernels: KernelSet | None
    """The set of kernels that runs some of the GEMMs, or None where none does."""
    up_writes_a: bool
    """Whether GEMM 1 writes A packed, in its epilogue, and not Y1."""
    d_hidden_writes_dy_up: bool
    """Whether GEMM 3 writes dY1 packed, in its epilogue, and not dA."""
    over_tokens: bool
    """Whether GEMMs 5 and 6 read packed operands that are 2:4 along the tokens."""
    row_tile: int | None
    """What an expert's rows are filled up to multiples of; None without experts."""

    @classmethod
    def of(cls, call: FFNCall, backend: Backend | None) -> "FFNPlan":
        """Decides for a call, on the backend that is named or the fastest.

        Raises:
          NotImplementedError: the named backend cannot run one of the GEMMs.
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
            kernels=registry.kernels_of(call.device) if used else None,
            up_writes_a=writes_packed("up", "down"),
            d_hidden_writes_dy_up=writes_packed("d_hidden", "d_input"),
            over_tokens=_packs_over_tokens(sparsity, by_role),
            row_tile=row_tile(sparsity, on_kernels=used),
        )

    @property
    def gemms(self) -> tuple[Decision, ...]:
        """All of them, in the order of their numbers."""
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
    def keeps_rows_of_x(self) -> bool:
        """Whether the residuals have X sorted by expert, as GEMM 1 read it, and so need
        no other. With several experts for a token that would be several times X."""
        return self.sparsity.skip_blocks and self.sparsity.experts_per_token == 1

    @property
    def packs_activations(self) -> bool:
        """Whether A and dY1 are packed for GEMMs 2 and 4."""
        return self.down.on_kernels


def _packs_over_tokens(sparsity: FFNSparsity, by_role: dict[str, Decision]) -> bool:
    asked = sparsity.token_sparsity is not None
    possible = asked and why_not_packed_over_tokens(sparsity) is None
    gradients = (by_role.get(role) for role in ("d_gate", "d_up", "d_down"))
    return possible and any(of is not None and of.on_kernels for of in gradients)


def row_tile(sparsity: FFNSparsity, *, on_kernels: bool) -> int | None:
    """Returns what an expert's rows are filled up to multiples of; None without
    experts."""
    pattern = sparsity.activations
    if not isinstance(pattern, VNM):
        return None
    return group_tile(pattern.v) if on_kernels else pattern.v
