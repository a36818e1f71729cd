"""An FFN's GEMM as the kernels for Hopper see it: their sparse operand is the left one.

Where it is our right one, a weight, both are transposed, and so is the product.
"""

from functools import partial

from pallas_kernels.sparse_matmul_configs import Shape
from sparsejax.ops.backend import GemmSpec
from sparsejax.packing import in_blocks
from sparsejax.router import row_count


def shape_of(gemm: GemmSpec) -> Shape:
    """The kernel's view of a GEMM. Features that stay dense have a residual row."""
    if gemm.experts is not None:
        return _grouped_shape_of(gemm)
    transposed = gemm.sparse_operand == "rhs"
    m, n = (gemm.n, gemm.m) if transposed else (gemm.m, gemm.n)
    return Shape(
        m=m + residual_rows(gemm),
        n=n,
        # Tokens are filled up with rows of zeros.
        k=in_blocks(gemm.k) if gemm.over_tokens else gemm.k,
        dtype=gemm.dtype,
        b_k_major=not gemm.over_tokens and (transposed or gemm.rhs_transposed),
        transpose_out=transposed,
        float32_out=gemm.over_tokens or gemm.float32_out,
    )


def _grouped_shape_of(gemm: GemmSpec) -> Shape:
    """The kernel's view of a GEMM over the experts of this device: rows instead of
    tokens, and one expert's neurons instead of all."""
    tokens, neurons = _tokens(gemm), gemm.expert_features
    experts = all_neurons(gemm) // neurons
    rows = row_count(tokens, gemm.experts_per_token, experts, gemm.group_tile)
    grouped = partial(
        Shape, dtype=gemm.dtype, experts=experts, group_tile=gemm.group_tile
    )
    if gemm.over_tokens:
        weight_up = gemm.sparse_operand == "rhs"
        return grouped(
            m=neurons + residual_rows(gemm),
            n=gemm.m if weight_up else gemm.n,
            k=rows,
            b_k_major=False,
            transpose_out=weight_up,
            float32_out=True,
        )
    if gemm.sparse_weight:
        return grouped(m=neurons, n=rows, k=gemm.k)
    return grouped(
        m=rows,
        n=gemm.n,
        k=neurons,
        b_k_major=gemm.rhs_transposed,
        transpose_out=False,
    )


def _tokens(gemm: GemmSpec) -> int:
    return gemm.k if gemm.over_tokens else gemm.m


def all_neurons(gemm: GemmSpec) -> int:
    """The size of an FFN's GEMM that counts neurons."""
    if gemm.over_tokens:
        return gemm.n if gemm.sparse_operand == "rhs" else gemm.m
    return gemm.n if gemm.sparse_weight else gemm.k


def residual_rows(gemm: GemmSpec) -> int:
    """How many rows are added below those of all features, for features that stay
    dense along the tokens."""
    return in_blocks(gemm.whole_features) if gemm.over_tokens else 0
