"""Rows of experts, 2:4 inside their neurons, as Hopper's tensor cores read them.

A row is one (token, expert) pair of a `router.Dispatch`. Made straight from what a GEMM
over all neurons wrote, or from the rows that one grouped over experts did.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from sparsejax.ops.backend import current_device
from sparsejax.ops.ffn_spec import FFNSparsity, dense_feature_count
from sparsejax.ops.packed_activations import (
    OverTokens,
    WholeFeatures,
    add_lost,
    to_packed,
    whole_features,
)
from sparsejax.ops.sparse_matmul import tuned_config
from sparsejax.packing import Packed, in_blocks
from sparsejax.router import Dispatch, token_of_row


class PackedRows(NamedTuple):
    """A = relu(Y1)^2 of the rows, two of four neurons kept: all that the backward needs
    of Y1, with the rows' dispatch, and X where `x_rows` is None."""

    a: Packed
    """(rows, d_hidden / E)."""
    nonzeros: Int[Array, "experts neurons"]
    """How many of an expert's rows have a kept entry that is not zero."""
    routed: Dispatch
    x_rows: Float[Array, "rows d_model"] | None = None
    """X of the rows, where the backward is to have them from here."""


def used_tiles(routed: Dispatch) -> Int[Array, ""]:
    """Tiles of the dispatch that hold any row."""
    return jnp.sum(_tiles_of_experts(routed))


def _tiles_of_experts(routed: Dispatch) -> Int[Array, " experts"]:
    return -(-routed.group_sizes // routed.v)


def keep_rows(
    y_up: Float[Array, "_ _"], routed: Dispatch, *, by_token: bool
) -> PackedRows:
    """A of every row, from Y1 of all tokens and neurons, or of the rows alone."""
    by_expert = _by_expert(routed) if by_token else ()
    return _counted(routed, *_keep_rows(routed.experts)(y_up, *by_expert))


def multiply_and_keep_rows(
    rows: Float[Array, "rows k"], weight: Packed, routed: Dispatch
) -> PackedRows:
    """`keep_rows` of `multiply_by_expert_weight`, in the GEMM's epilogue: Y1 is not
    written."""
    run = to_packed("keep_features", routed.experts)
    lookups = routed.tile_expert, used_tiles(routed)
    return _counted(routed, *run(lookups, weight.values, weight.metadata, rows))


def _counted(
    routed: Dispatch, values: jax.Array, metadata: jax.Array, counts: jax.Array
) -> PackedRows:
    """What a kernel kept, with the non-zeros of each expert summed."""
    tiles = counts.reshape(routed.tile_expert.size, -1, counts.shape[1])
    of_tile = jnp.sum(tiles, axis=1, dtype=jnp.int32)
    # Tiles without rows may hold anything.
    used = jnp.arange(of_tile.shape[0]) < used_tiles(routed)
    of_tile = jnp.where(used[:, None], of_tile, 0)
    nonzeros = jax.ops.segment_sum(of_tile, routed.tile_expert, routed.experts)
    return PackedRows(Packed(values, metadata), nonzeros, routed)


def row_gradient(
    da: Float[Array, "_ _"], kept: PackedRows, *, by_token: bool
) -> Packed:
    """dY1 = dA 2 relu(Y1) at A's positions, from dA as `keep_rows` takes Y1."""
    by_expert = _by_expert(kept.routed) if by_token else ()
    a = kept.a
    values = _gradient(kept.routed.experts)(da, a.values, a.metadata, *by_expert)
    return Packed(values, a.metadata)


def multiply_for_row_gradient(
    dy_rows: Float[Array, "rows k"], weight: Packed, kept: PackedRows
) -> Packed:
    """`row_gradient` of `multiply_by_expert_weight`, in the GEMM's epilogue: dA is not
    written."""
    routed, a = kept.routed, kept.a
    run = to_packed("backward", routed.experts)
    lookups = routed.tile_expert, used_tiles(routed)
    operands = weight.values, weight.metadata, dy_rows, a.values, a.metadata
    return Packed(run(lookups, *operands), a.metadata)


class RowGroups(NamedTuple):
    """How GEMMs 5 and 6 group an expert's rows: four that follow each other."""

    whole: WholeFeatures | None
    """Of each expert, along a first axis."""

    @property
    def rows(self) -> int:
        """Second rows of an expert."""
        return 0 if self.whole is None else self.whole.rows

    @property
    def slots(self) -> tuple[jax.Array, ...]:
        """Of all experts' neurons, if any are whole."""
        return () if self.whole is None else (self.whole.slots.reshape(-1),)


def row_groups(sparsity: FFNSparsity, tokens: int, kept: PackedRows) -> RowGroups:
    """A share of each expert's neurons, those with most non-zeros, stays whole."""
    count = dense_feature_count(kept.nonzeros.shape[1], sparsity.dense_features)
    if count == 0:
        return RowGroups(None)

    def of_expert(nonzeros):
        chosen, slots, _ = whole_features(nonzeros, count, tokens)
        return chosen, slots

    return RowGroups(
        WholeFeatures(*jax.vmap(of_expert)(kept.nonzeros), in_blocks(count))
    )


def row_gradient_over_tokens(
    groups: RowGroups, da: Float[Array, "_ _"], kept: PackedRows, *, by_token: bool
) -> tuple[Packed, OverTokens]:
    """dY1 as `row_gradient` has it, and A and dY1 2:4 along the rows."""
    by_expert = _by_expert(kept.routed)
    if not by_token:
        by_expert = by_expert[:1]
    run, a = _over_tokens("backward", kept.routed.experts, groups.rows), kept.a
    operands = da, a.values, a.metadata
    dy_up, *over_tokens = run(by_expert, groups.slots, *operands)
    return Packed(dy_up, a.metadata), OverTokens.of(over_tokens)


def rows_over_tokens(groups: RowGroups, dy_up: Packed, kept: PackedRows) -> OverTokens:
    """A and dY1 2:4 along the rows, as `row_gradient_over_tokens` has them."""
    by_expert = _by_expert(kept.routed)[:1]
    run = _over_tokens("keep_tokens_of_both", kept.routed.experts, groups.rows)
    operands = kept.a.values, dy_up.values, dy_up.metadata
    return OverTokens.of(run(by_expert, groups.slots, *operands))


def _by_expert(routed: Dispatch) -> tuple[jax.Array, jax.Array]:
    """What the kernels look up: each tile's expert, and each row's token."""
    return routed.tile_expert, token_of_row(routed)


# The GEMMs.


def multiply_rows(
    a: Packed, b: Float[Array, "_ _ _"], routed: Dispatch, *, b_k_major: bool
) -> Float[Array, "rows n"]:
    """`a[r] @ b[expert of r]`: GEMMs 2 and 4. Rows after the used tiles hold anything.

    Args:
      b: (n, experts, k) if `b_k_major`, else (experts, k, n).
    """
    run = _grouped("sparse_rows", b_k_major=b_k_major)
    return run(a.values, a.metadata, b, routed.tile_expert, used_tiles(routed))


def multiply_by_expert_weight(
    rows: Float[Array, "rows k"], weight: Packed, routed: Dispatch
) -> Float[Array, "rows n"]:
    """`rows[r] @ weight[expert of r]^T`, experts' weights below each other: GEMMs 1
    and 3."""
    run = _grouped("sparse_weights", experts=routed.experts)
    operands = weight.values, weight.metadata, rows, routed.tile_expert
    return run(*operands, used_tiles(routed))


def weight_gradient_of_experts(
    groups: RowGroups,
    sparse: Packed,
    rows: Float[Array, "rows d"],
    routed: Dispatch,
    *,
    transpose_out: bool,
) -> Float[Array, "_ _"]:
    """`sparse @ rows`, of each expert over its own rows, in float32: dW2 (features, d),
    or dW1 (d, features)."""
    ends = jnp.cumsum(_tiles_of_experts(routed), dtype=jnp.int32)
    run = _grouped(
        "sparse_over_rows",
        group_tile=routed.v,
        transpose_out=transpose_out,
        rows_apart=groups.rows,
    )
    results = run(sparse.values, sparse.metadata, rows, ends)
    if groups.whole is None:
        return _side_by_side(results, transpose_out)
    product, lost = (_side_by_side(result, transpose_out) for result in results)
    # Of all neurons, and of all second rows: one expert's after the other's.
    experts, count = groups.whole.chosen.shape
    neurons = groups.whole.slots.shape[1]
    second = groups.whole.rows
    first = jnp.arange(experts, dtype=jnp.int32)[:, None]
    chosen = (first * neurons + groups.whole.chosen).reshape(-1)
    own = (first * second + jnp.arange(count)[None]).reshape(-1)
    lost = lost[:, own] if transpose_out else lost[own]
    return add_lost(product, lost, chosen, columns=transpose_out)


def _side_by_side(result: jax.Array, transpose_out: bool) -> jax.Array:
    """Experts' matrices as columns of one, or as its rows."""
    if transpose_out:
        return result.reshape(result.shape[0], -1)
    return result.reshape(-1, result.shape[2])


# The kernels have no batching rules.


@lru_cache
def _keep_rows(experts: int):
    @jax.custom_batching.sequential_vmap
    def run(y_up, *by_expert):
        from pallas_kernels import activations_sm90

        return activations_sm90.keep_features(y_up, _rows(experts, by_expert))

    return run


@lru_cache
def _gradient(experts: int):
    @jax.custom_batching.sequential_vmap
    def run(da, values, metadata, *by_expert):
        from pallas_kernels import activations_sm90

        rows = _rows(experts, by_expert)
        return activations_sm90.backward(da, values, metadata, rows)

    return run


@lru_cache
def _over_tokens(name: str, experts: int, whole_rows: int):
    """A kernel of `over_tokens_sm90`, for arrays."""

    @jax.custom_batching.sequential_vmap
    def run(by_expert, slots, *operands):
        from pallas_kernels import over_tokens_sm90

        rows = _rows(experts, by_expert)
        whole = over_tokens_sm90.Whole(slots[0], whole_rows) if slots else None
        kernel = getattr(over_tokens_sm90, name)
        return kernel(*operands, whole, by_segments=False, by_expert=rows)

    return run


def _rows(experts: int, by_expert):
    from pallas_kernels.activation_tiles import ByExpert

    if not by_expert:
        return None
    tile_expert, *row_token = by_expert
    return ByExpert(row_token[0] if row_token else None, tile_expert, experts)


@lru_cache
def _grouped(name: str, **options: Any):
    """A kernel of `grouped_matmul_sm90`, for arrays."""

    @jax.custom_batching.sequential_vmap
    def run(*operands):
        from pallas_kernels import grouped_matmul_sm90

        return getattr(grouped_matmul_sm90, name)(
            *operands,
            config_for=tuned_config,
            multiprocessors=current_device().count_multiprocessors(),
            **options,
        )

    return run
