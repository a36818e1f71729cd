"""Which GEMMs of an FFN write what the next one reads, packed or as dense rows; why
nothing packs an operand; and whether a token has one row for all of its experts."""

from collections.abc import Sequence
from dataclasses import replace

from sparsejax.feed_forward.sparsity import FFNSparsity
from sparsejax.ops.backend import Decision
from sparsejax.ops.fp8_matmul import why_no_tensor_cores
from sparsejax.ops.gemm_spec import INTO_HIDDEN
from sparsejax.routing.expert_sets import set_count
from sparsejax.routing.routers import ActivationEnergy

MOST_PADDING = 0.25
"""The largest share of the number of tokens that the padding rows may come to, if each
set of experts has one tile of them."""


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


def joins_experts(sparsity: FFNSparsity, decisions: Sequence[Decision]) -> bool:
    """Returns whether a token has one row with the neurons of all its experts, in place
    of a row for each; see `passes.joined_experts`.

    It has where the GEMMs by expert (2 to 6, and with `skip_blocks` GEMM 1) run on
    kernels that take such rows and are dense inside the experts, and where few rows pad
    the sets of experts. All tokens must have equally many experts and none of them
    twice, as a router chooses them.
    """
    adaptive = sparsity.most_experts_per_token is not None
    if not sparsity.experts or adaptive or sparsity.experts_per_token == 1:
        return False
    if not sparsity.router.chooses_different:
        return False
    into_hidden = () if sparsity.skip_blocks else INTO_HIDDEN
    gemms = [of for of in decisions if of.spec.role not in into_hidden]
    if not all(of.on_kernels and of.spec.experts for of in gemms):
        return False
    if any(of.spec.pattern is not None for of in gemms):
        return False
    kernels = gemms[0].kernels
    assert kernels is not None
    if any(kernels.why_no_joined_rows(of.spec) for of in gemms):
        return False
    spec = next(of.spec for of in gemms if of.spec.role == "down")
    assert spec.experts is not None
    if spec.d_in != spec.experts * spec.expert_features:
        return False  # on a mesh a device may have the neurons of some experts only
    sets = set_count(spec.experts, spec.experts_per_token)
    return sets * spec.group_tile <= MOST_PADDING * spec.tokens


def sums_energies(sparsity: FFNSparsity, decisions: Sequence[Decision]) -> bool:
    """Returns whether a kernel sums the energies of the experts from operands in 8-bit
    floats, so that their product is not written: for a squared ReLU, and a router whose
    scores are those of `ActivationEnergy`, where the set that runs GEMM 2 has one."""
    by_role = {of.spec.role: of for of in decisions}
    kernels = by_role["down"].kernels
    is_energy = type(sparsity.router).scores is ActivationEnergy.scores
    if not sparsity.chooses_in_fp8 or not is_energy or "gate" in by_role:
        return False
    if kernels is None:
        return False
    features = by_role["down"].spec.expert_features
    return kernels.why_no_expert_energies(by_role["up"].spec.d_in, features) is None


def with_router_product(
    sparsity: FFNSparsity, decisions: Sequence[Decision]
) -> tuple[Decision, ...]:
    """Returns the decisions with paths that say where the router reads a product of its
    own, as large as GEMM 1."""
    if not sparsity.chooses_in_fp8:
        return tuple(decisions)

    def told(decision: Decision) -> Decision:
        if decision.spec.role not in INTO_HIDDEN:
            return decision
        product = "a GEMM of 8-bit floats with all neurons, for the router"
        if why := why_no_tensor_cores(decision.spec.device):
            product = f"{product}, which takes as long as GEMM 1 of them: {why}"
        return replace(decision, path=f"{decision.path}, and before it {product}")

    return tuple(map(told, decisions))


def with_joined_experts(
    sparsity: FFNSparsity, decisions: Sequence[Decision]
) -> tuple[Decision, ...]:
    """Returns the decisions with paths that say where a token has one row for all of
    its experts."""
    if not joins_experts(sparsity, decisions):
        return tuple(decisions)
    told = "a row for all experts of a token"
    return tuple(
        replace(of, path=f"{of.path}, {told}") if of.spec.experts else of
        for of in decisions
    )


def rows_of_token(sparsity: FFNSparsity, decisions: Sequence[Decision]) -> int:
    """Returns how many rows a token has at most for its experts."""
    return 1 if joins_experts(sparsity, decisions) else sparsity.expert_choices
