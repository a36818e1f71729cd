"""A GEMM of an FFN as the tables of times for Hopper see it."""

from pallas_kernels.tuned_gemm import TunedGemm
from sparsejax.ops.gemm_spec import GemmSpec
from sparsejax.routing.dispatch import row_count
from sparsejax.sparsity.packed import in_blocks


def tuned_gemm(gemm: GemmSpec) -> TunedGemm:
    """Returns what the times of a GEMM with a 2:4 operand are looked up by: that of one
    device, with a residual row for each feature that stays dense along the tokens; of
    experts with rows instead of tokens, and one expert's neurons instead of all."""
    assert gemm.sparse_operand is not None
    d_in, d_out, tokens = gemm.d_in, gemm.d_out, gemm.tokens
    experts, group_tile = 1, 0
    if gemm.experts is not None:
        neurons, group_tile = gemm.expert_features, gemm.group_tile
        experts = all_neurons(gemm) // neurons
        tokens = row_count(tokens, gemm.experts_per_token, experts, group_tile)
        if gemm.sparse_operand == "input":
            d_in = neurons
        else:
            d_out = neurons
    elif gemm.is_weight_gradient:
        # Tokens are filled up with rows of zeros.
        tokens = in_blocks(tokens)
    residual = residual_rows(gemm)
    return TunedGemm(
        is_weight_gradient=gemm.is_weight_gradient,
        sparse_operand=gemm.sparse_operand,
        experts=experts,
        group_tile=group_tile,
        d_in=d_in + residual * (gemm.sparse_operand == "input"),
        d_out=d_out + residual * (gemm.sparse_operand == "gradient"),
        tokens=tokens,
        weight_transposed=gemm.sparse_operand == "input" and gemm.weight_transposed,
        float32_out=gemm.float32_out and not gemm.is_weight_gradient,
        dtype=gemm.dtype,
    )


def all_neurons(gemm: GemmSpec) -> int:
    """Returns d_hidden of an FFN's GEMM with a sparse operand: a sparse input has the
    neurons along d_in, a sparse weight or output gradient has them along d_out."""
    return gemm.d_in if gemm.sparse_operand == "input" else gemm.d_out


def residual_rows(gemm: GemmSpec) -> int:
    """Returns the number of residual rows of a GEMM: rows below those of all features,
    for the features that stay dense along the tokens."""
    return in_blocks(gemm.dense_features) if gemm.is_weight_gradient else 0
