"""Linear layers whose weights are blocks on a diagonal, run as batched dense GEMMs.

A weight (d_in, d_out) of G groups is stored as its blocks (G, d_in / G, d_out / G), and
G small GEMMs take the place of a large one: 1 / G of the FLOPs, of the parameters and
of their moments.

Which features a group has: what a layer writes, and what a layer inside of a branch
reads (W_out of attention, W2 of the FFN), is cut into G contiguous groups. What a
branch reads from the residual stream (W_query, W_key, W_value, W1, Wg) is not: there
feature i belongs to group (i // (d / G^2)) mod G, so that a group reads an equal share
of what each group has written. If both sides were contiguous, G narrow models would run
side by side and meet in the head alone. This way every group hears of every other one
two branches later, and two consecutive branches connect all features with all: the
product of two block-diagonal matrices with such a permutation between them is what
arXiv 2204.00595 (Monarch matrices) approximates dense ones by; grouped convolutions
with shuffled channels (arXiv 1707.01083) do the same.

No weight is moved for it. The permutation is one of the activations that a branch reads
and stands right behind their normalisation, an element-wise operation that writes them
anyway; its gradient stands before that of the normalisation, which reads it. Contiguous
groups need none: GEMMs read and write them with strides.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from sparsejax.annotations import check_value
from sparsejax.distributed.mesh import STACKED_BLOCKS
from sparsejax.dtypes import Precision
from sparsejax.feed_forward.activation import ActivationName
from sparsejax.feed_forward.ffn import ffn
from sparsejax.feed_forward.gated_ffn import gated_ffn
from sparsejax.feed_forward.operands.weights import PackedFFN
from sparsejax.ops.linear import linear
from sparsejax.sparsity.patterns import BlockDiagonal

ENDS_OF_BRANCHES = ("w_out", "w_down")
"""The names of the weights that write into the residual stream."""


def check_groups(
    groups: int, precision: Precision, d_model: int, widths: Mapping[str, int]
) -> None:
    """Raises ValueError where a layer cannot have so many groups, or not with that
    precision.

    Args:
      groups: the number of groups; 1 where the weights are whole.
      precision: the precision of the layer's GEMMs.
      d_model: the width of the residual stream.
      widths: the widths inside of the branch, by their names.
    """
    check_value("precision", precision, Precision)
    check_value("groups", groups, int)
    if groups < 1:
        raise ValueError(
            f"groups={groups} must be at least 1: it counts the blocks on the diagonal "
            f"of each weight; use 1 for whole weights"
        )
    if groups == 1:
        return
    pattern = BlockDiagonal(groups)
    for name, width in widths.items():
        pattern.check_divides(width, name)
    pattern.check_divides_residual(d_model, "d_model")
    if precision != "dtype":
        raise ValueError(
            f"precision={precision!r} with weights of {groups} blocks on a diagonal: "
            f"batched GEMMs of 8-bit floats are not built; use precision='dtype', or "
            f"whole weights"
        )


def residual_groups(
    x: Float[Array, "*tokens d_model"], groups: int
) -> Float[Array, "*tokens groups d_in"]:
    """Returns the features of the residual stream by the group that reads them, an
    equal share of every contiguous group each."""
    leading, width = x.shape[:-1], x.shape[-1]
    shares = x.reshape(*leading, groups, groups, width // groups**2)
    return jnp.swapaxes(shares, -2, -3).reshape(*leading, groups, width // groups)


def contiguous_groups(
    x: Float[Array, "*tokens d"], groups: int
) -> Float[Array, "*tokens groups d_in"]:
    """Returns features by contiguous groups, which is how they lie in memory."""
    return x.reshape(*x.shape[:-1], groups, x.shape[-1] // groups)


def multiply(
    x: Float[Array, "*tokens groups d_in"],
    blocks: Float[Array, "groups d_in d_out"],
    read: Float[Array, "groups d_in d_out"],
) -> Float[Array, "*tokens all_d_out"]:
    """Returns the product of every group with its block, groups side by side.

    Args:
      x: the tokens, in the compute dtype.
      blocks: the weight that the gradient belongs to.
      read: the same in the compute dtype, which the GEMMs read: `ops.linear`.
    """
    # The GEMMs read x where it lies: einsum would take the blocks for the left operand.
    out = jax.vmap(linear, in_axes=(-2, 0, 0), out_axes=-2)(x, blocks, read)
    return out.reshape(*out.shape[:-2], -1)


def dense_weight(
    blocks: Float[Array, "*layers groups d_in d_out"], *, reads_residual: bool
) -> Float[Array, "*layers all_d_in all_d_out"]:
    """Returns the dense weight that computes the same: zero outside of the blocks.

    Args:
      reads_residual: whether its inputs are `residual_groups`, and not contiguous ones.
    """
    *layers, groups, d_in, d_out = blocks.shape
    shares = groups if reads_residual else 1
    # (..., input group, share, features, output group, outputs)
    own = blocks.reshape(*layers, groups, shares, d_in // shares, 1, d_out)
    on_diagonal = jnp.eye(groups, dtype=bool)[:, None, None, :, None]
    on_diagonal = jnp.expand_dims(on_diagonal, range(len(layers)))
    full = jnp.where(on_diagonal, own, 0)
    if reads_residual:
        full = jnp.swapaxes(full, -5, -4)
    return full.reshape(*layers, groups * d_in, groups * d_out)


def stacked_dense_weight(name: str, weight: jax.Array) -> jax.Array:
    """Returns a weight of a model's stacked blocks as a dense one, (layers, d_in,
    d_out): blocks on a diagonal become the dense weight that computes the same, and
    every other parameter stays as it is.

    Args:
      name: the name of the parameter in its layer, such as "w_up".
      weight: the parameter of all layers, the layers on its first axis.
    """
    if weight.ndim != STACKED_BLOCKS:
        return weight
    return dense_weight(weight, reads_residual=name not in ENDS_OF_BRANCHES)


def ffn_of_groups(
    x: Float[Array, "tokens d_model"],
    weights: Sequence[Float[Array, "groups d_in d_out"]],
    packed: PackedFFN | None,
    activation: ActivationName,
    **how: Any,
) -> Float[Array, "tokens d_model"]:
    """Returns the FFN of weights that are block-diagonal: a dense FFN for each group,
    all of them in batched GEMMs.

    Args:
      x: the tokens.
      weights: the blocks of W1 and W2, or of Wg, Wu and Wd of a gated FFN.
      packed: the blocks in the compute dtype, from `pack_ffn`; None where they have it.
      activation: the activation of the FFN.
      how: `layout` and `backend` of `ffn`.
    """

    def of_group(
        x: jax.Array, packed: PackedFFN | None, *weights: jax.Array
    ) -> jax.Array:
        if activation == "relu2":
            return ffn(x, *weights, packed=packed, **how)
        return gated_ffn(x, *weights, packed=packed, activation=activation, **how)

    groups = residual_groups(x, weights[0].shape[0])
    in_axes = (1, 0, *(0 for _ in weights))
    out = jax.vmap(of_group, in_axes=in_axes, out_axes=1)(groups, packed, *weights)
    return out.reshape(x.shape)
