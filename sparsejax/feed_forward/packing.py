"""Which GEMMs of an FFN write what the next one reads, packed or as dense rows; and why
nothing packs an operand."""

from dataclasses import replace

from sparsejax.feed_forward.sparsity import FFNSparsity
from sparsejax.ops.backend import Decision


def packed_before(decision: Decision) -> Decision:
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
    two_four = decision.spec.pattern is not None and sparsity.in_expert is not None
    return two_four and same_rows and both


def why_not_packed_anew(sparsity: FFNSparsity) -> str | None:
    """Returns why nothing packs the operand of GEMM 4, or None."""
    if sparsity.in_expert is None:
        return None
    return None if sparsity.mask_reuse else "mask_reuse=False selects anew in dY1"


def why_not_packed_over_tokens(sparsity: FFNSparsity) -> str | None:
    """Returns why nothing packs the operands of GEMMs 5 and 6, or None."""
    if sparsity.in_expert is None:
        return "they are not 2:4 along the features"
    if sparsity.experts and sparsity.weight_gradients != "expert_columns":
        return "weight_gradients='dense' sums over the tokens of all experts"
    if sparsity.needs_key:
        return f"token_sparsity={sparsity.token_sparsity!r} draws random numbers"
    if not sparsity.mask_reuse:
        return "mask_reuse=False does not keep the mask of the forward"
    return None


def writes_dense_rows(decision: Decision, following: Decision) -> bool:
    """Returns whether the first GEMM applies the activation, or its gradient, in its
    kernel's epilogue to the dense rows of experts that the GEMM that follows reads:
    GEMM 1 then writes A instead of Y1, GEMM 3 dY1 instead of dA. Both have dense
    operands."""
    pair = decision, following
    return all(
        of.on_kernels and of.spec.pattern is None and of.spec.experts for of in pair
    )
