"""The bytes of the weights that a device gathers where they are stored split."""

from dataclasses import dataclass

from sparsejax.config import ModelConfig
from sparsejax.cost_model.parameters import parameter_count
from sparsejax.feed_forward.sparsity import DENSE, FFNSparsity


@dataclass(frozen=True, kw_only=True)
class GatheredBytes:
    """The bytes of the weights that the GEMMs of one layer, and the head, read, each
    matrix whole.

    Numbers are in the compute dtype. A 2:4 weight travels compressed: half the values,
    and two bits of position for each, which is 9/16 of the dense weight in bfloat16.
    One in 8-bit floats is a byte for each number.
    """

    attention: int
    """The bytes of attention's four weights. In 8-bit floats its backward gathers them
    anew, in another order."""
    ffn_forward: int
    """The bytes of S(W1) for GEMM 1 and of W2 for GEMM 2, and of W1 for a router that
    reads it in 8-bit floats."""
    ffn_backward: int
    """The bytes of S(W2^T) for GEMM 3 and of W1 for GEMM 4, or of W2 and S(W1)."""
    ffn_recomputed: int
    """The bytes that GEMM 1 reads once more in the backward: `ModelConfig.remat`."""
    head: int


def gathered_bytes(config: ModelConfig, sparsity: FFNSparsity = DENSE) -> GatheredBytes:
    """Returns the bytes of the weights that one layer and the head read.

    With remat GEMM 1 runs again in the backward. Where its weight is dense that costs
    no gather: GEMM 4 reads the same one, or ("dots") the output was kept, as it is of
    an FFN by expert. In a sparse FFN with GEMM 1 in 8-bit floats GEMM 4 reads another
    form of it.
    """
    element, layers = element_bytes(config), config.layers
    parameters = parameter_count(config)
    fp8 = config.precision != "dtype"
    numbers = config.d_model * config.d_hidden // config.groups
    dense = numbers * (1 if fp8 and sparsity.is_dense else element)
    up, down = numbers * (1 if fp8 and sparsity.up_is_dense else element), dense
    if sparsity.weights is not None:
        up = down = config.d_model * config.d_hidden // 2 * (4 * element + 1) // 4
    into_hidden = 2 if config.gated else 1
    # The router reads W1 in 8-bit floats as well.
    chosen = numbers if sparsity.chooses_in_fp8 and sparsity.weights is None else 0
    forward = into_hidden * (up + chosen) + dense
    # An exact GEMM 4 reads what a recomputed GEMM 1 has gathered.
    exact = sparsity.d_input_weights is not None
    kept = config.remat == "none" or (config.remat == "dots" and sparsity.experts)
    recomputes = sparsity.weights is not None and not (kept or exact)
    if up < dense and sparsity.weights is None:
        recomputes = config.remat == "full"
    return GatheredBytes(
        attention=(1 if fp8 else element) * parameters.attention // layers,
        ffn_forward=forward,
        ffn_backward=forward if exact else down + into_hidden * dense,
        ffn_recomputed=into_hidden * up if recomputes else 0,
        head=element * parameters.embedding,
    )


def bytes_as_read(
    config: ModelConfig, sparsity: FFNSparsity = DENSE, *, copied: bool = False
) -> int:
    """Returns the bytes of all weights that are made ready once per optimiser step,
    whole: S(W) of the sparse ones, half the values in the compute dtype and a byte of
    position for each, those in 8-bit floats in two orders, and all others that GEMMs
    read, in the compute dtype.

    Args:
      copied: whether the latter are made where the compute dtype is float32, too; their
        GEMMs else read the parameters.
    """
    element, branches = element_bytes(config), 2 if config.gated else 1
    parameters = parameter_count(config)
    packed = bool(sparsity.weights) * branches + bool(sparsity.backward_weights)
    packed *= parameters.ffn // (branches + 1) // 2 * (element + 1)
    of_attention, of_ffn = parameters.attention, parameters.ffn
    if sparsity.weights is None and sparsity.chooses_in_fp8:
        packed += 2 * of_ffn * branches // (branches + 1)
    if config.precision != "dtype":
        in_8_bits = of_attention
        of_attention = 0
        if sparsity.is_dense:
            in_8_bits += of_ffn
            of_ffn = 0
        elif sparsity.up_is_dense:
            in_8_bits += of_ffn * branches // (branches + 1)
        packed += 2 * in_8_bits
    if element < 4 or copied:
        head = config.d_model * config.vocab_size
        packed += element * (of_attention + of_ffn + head)
    return packed


def element_bytes(config: ModelConfig) -> int:
    """Returns the bytes of a number in the compute dtype."""
    return {"float32": 4, "bfloat16": 2}[config.dtype]


def logit_bytes(config: ModelConfig) -> int:
    """Returns the bytes of a logit that a loss is computed from."""
    return element_bytes(config) if config.logits_of_loss == "dtype" else 4
