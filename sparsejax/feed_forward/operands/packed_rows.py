"""Rows of experts, 2:4 inside their neurons, as a set of kernels packs them.

A row is one (token, expert) pair of a `dispatch.Dispatch`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from sparsejax.feed_forward.operands.packed_activations import (
    DenseFeatures,
    add_lost,
    choose_dense_features,
)
from sparsejax.feed_forward.sparsity import FFNSparsity
from sparsejax.feed_forward.tiles import dense_feature_count
from sparsejax.ops.kernels.base import (
    ExpertRows,
    KeptActivations,
    KernelSet,
    ResidualRows,
)
from sparsejax.routing.dispatch import Dispatch, used_tiles
from sparsejax.sparsity.packed import Packed, in_blocks


class PackedRows(NamedTuple):
    """A = relu(Y1)^2 of the rows with two of every four neurons kept: all that the
    backward needs of Y1, with the rows' dispatch, and X where `x_rows` is None."""

    a: Packed
    """A, (rows, d_hidden / E), packed along the neurons."""
    nonzeros: Int[Array, "experts neurons"]
    """For each expert and each of its neurons, how many of the expert's rows have a
    kept entry that is not zero."""
    routed: Dispatch
    x_rows: Float[Array, "rows d_model"] | None = None
    """The rows of X as GEMM 1 read them, where the backward takes them from here; else
    None."""


def counted(
    routed: Dispatch, kept: KeptActivations, x_rows: jax.Array | None
) -> PackedRows:
    """Returns A of the rows as a kernel kept it, with the non-zeros of each expert's
    neurons summed.

    Args:
      x_rows: as in `PackedRows`.
    """
    counts = kept.counts
    tiles = counts.reshape(routed.tile_expert.size, -1, counts.shape[1])
    of_tile = jnp.sum(tiles, axis=1, dtype=jnp.int32)
    # Tiles without rows may hold anything.
    used = jnp.arange(of_tile.shape[0]) < used_tiles(routed)
    of_tile = jnp.where(used[:, None], of_tile, 0)
    nonzeros = jax.ops.segment_sum(of_tile, routed.tile_expert, routed.experts)
    return PackedRows(kept.a, nonzeros, routed, x_rows)


class RowGroups(NamedTuple):
    """The groups of an expert's rows that GEMMs 5 and 6 sum over: four consecutive rows
    make a group."""

    dense: DenseFeatures | None
    """The neurons that stay dense, one entry for each expert along a first axis; None
    where none does."""

    @property
    def residual(self) -> ResidualRows | None:
        """The residual rows of all experts' dense neurons; None where no neuron stays
        dense."""
        if self.dense is None:
            return None
        return ResidualRows(self.dense.slots.reshape(-1), self.dense.rows)


def row_groups(sparsity: FFNSparsity, tokens: int, kept: PackedRows) -> RowGroups:
    """Returns the groups of GEMMs 5 and 6 by expert: in each expert the share of
    neurons that have most non-zeros stays dense."""
    count = dense_feature_count(kept.nonzeros.shape[1], sparsity.dense_features)
    if count == 0:
        return RowGroups(None)

    def of_expert(nonzeros):
        chosen, slots, _ = choose_dense_features(nonzeros, count, tokens)
        return chosen, slots

    return RowGroups(
        DenseFeatures(*jax.vmap(of_expert)(kept.nonzeros), in_blocks(count))
    )


def weight_gradient_of_experts(
    kernels: KernelSet,
    groups: RowGroups,
    sparse: Packed,
    x: Float[Array, "rows d"],
    rows: ExpertRows,
    *,
    transpose_out: bool,
) -> Float[Array, "_ _"]:
    """Returns `sparse @ x`, summed for each expert over its own rows, in float32: dW2
    (features, d), or with `transpose_out` dW1 (d, features)."""
    residual = groups.residual
    product, lost = kernels.expert_weight_gradient(
        sparse,
        x,
        rows,
        transpose_out=transpose_out,
        residual_rows=0 if residual is None else residual.rows,
    )
    product = _side_by_side(product, transpose_out)
    if groups.dense is None or lost is None:
        return product
    lost = _side_by_side(lost, transpose_out)
    # Of all neurons, and of all second rows: one expert's after the other's.
    experts, count = groups.dense.chosen.shape
    neurons = groups.dense.slots.shape[1]
    second = groups.dense.rows
    first = jnp.arange(experts, dtype=jnp.int32)[:, None]
    chosen = (first * neurons + groups.dense.chosen).reshape(-1)
    own = (first * second + jnp.arange(count)[None]).reshape(-1)
    lost = lost[:, own] if transpose_out else lost[own]
    return add_lost(product, lost, chosen, columns=transpose_out)


def _side_by_side(result: jax.Array, transpose_out: bool) -> jax.Array:
    """Returns the experts' matrices as one matrix, concatenated along its columns with
    `transpose_out`, else along its rows."""
    if transpose_out:
        return result.reshape(result.shape[0], -1)
    return result.reshape(-1, result.shape[2])
