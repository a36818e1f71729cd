"""An FFN's GEMM as the kernels for Hopper see it: their sparse operand is the left one.

Where it is our right one, a weight, both are transposed, and so is the product.
"""

from functools import partial

from pallas_kernels.sm90.sparse_matmul_configs import Mode, Shape
from sparsejax.ops.backend import GemmSpec
from sparsejax.routing.dispatch import row_count
from sparsejax.sparsity.packed import in_blocks


def shape_of(gemm: GemmSpec) -> Shape:
    """Returns the shape of a GEMM as the kernel sees it. Each dense feature has a
    residual row."""
    if gemm.experts is not None:
        return _grouped_shape_of(gemm)
    transposed = gemm.sparse_operand in ("weight", "gradient")
    mode: Mode = "sparse_weight" if gemm.sparse_weight else "sparse_activation"
    if gemm.is_weight_gradient:
        mode = "weight_gradient"
        # Tokens are filled up with rows of zeros.
        left, k, right = gemm.d_in, in_blocks(gemm.tokens), gemm.d_out
    else:
        left, k, right = gemm.tokens, gemm.d_in, gemm.d_out
    m, n = (right, left) if transposed else (left, right)
    return Shape(
        m=m + residual_rows(gemm),
        n=n,
        k=k,
        mode=mode,
        dtype=gemm.dtype,
        b_k_major=gemm.sparse_weight or gemm.weight_transposed,
        transpose_out=transposed,
        float32_out=gemm.is_weight_gradient or gemm.float32_out,
    )


def _grouped_shape_of(gemm: GemmSpec) -> Shape:
    """Returns the shape, as the kernel sees it, of a GEMM over this device's experts:
    it has rows instead of tokens, and one expert's neurons instead of all."""
    neurons = gemm.expert_features
    experts = all_neurons(gemm) // neurons
    rows = row_count(gemm.tokens, gemm.experts_per_token, experts, gemm.group_tile)
    grouped = partial(
        Shape, dtype=gemm.dtype, experts=experts, group_tile=gemm.group_tile
    )
    if gemm.is_weight_gradient:
        weight_up = gemm.sparse_operand == "gradient"
        return grouped(
            m=neurons + residual_rows(gemm),
            n=gemm.d_in if weight_up else gemm.d_out,
            k=rows,
            mode="weight_gradient",
            b_k_major=False,
            transpose_out=weight_up,
            float32_out=True,
        )
    if gemm.sparse_weight:
        return grouped(m=neurons, n=rows, k=gemm.d_in, mode="sparse_weight")
    return grouped(
        m=rows,
        n=gemm.d_out,
        k=neurons,
        mode="sparse_activation",
        b_k_major=gemm.weight_transposed,
        transpose_out=False,
    )


def all_neurons(gemm: GemmSpec) -> int:
    """Returns d_hidden of an FFN's GEMM with a sparse operand: a sparse input has the
    neurons along d_in, a sparse weight or output gradient has them along d_out."""
    return gemm.d_in if gemm.sparse_operand == "input" else gemm.d_out


def residual_rows(gemm: GemmSpec) -> int:
    """Returns the number of residual rows of a GEMM: rows below those of all features,
    for the features that stay dense along the tokens."""
    return in_blocks(gemm.whole_features) if gemm.is_weight_gradient else 0
