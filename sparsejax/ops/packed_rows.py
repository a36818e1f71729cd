"""Rows of experts, 2:4 inside their neurons, as Hopper's tensor cores read them.

A row is one (token, expert) pair of a `router.Dispatch`. Made straight from what a GEMM
over all neurons wrote, or from the rows that one grouped over experts did.
"""

from functools import lru_cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from sparsejax.ops.backend import current_device_kind, multiprocessors
from sparsejax.ops.ffn_spec import FFNSparsity, dense_feature_count
from sparsejax.ops.packed_activations import OverTokens
from sparsejax.ops.token_sparsity import densest
from sparsejax.packing import Packed, in_blocks
from sparsejax.router import Dispatch


class PackedRows(NamedTuple):
    """A = relu(Y1)^2 of the rows, two of four neurons kept: all that the backward needs
    of Y1, with the rows' dispatch."""

    a: Packed
    """(rows, d_hidden / E)."""
    nonzeros: Int[Array, "experts neurons"]
    """How many of an expert's rows have a kept entry that is not zero."""
    routed: Dispatch


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
    values, metadata, counts = _keep_rows(routed.experts)(y_up, *by_expert)
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


class RowGroups(NamedTuple):
    """How GEMMs 5 and 6 group an expert's rows: four that follow each other. Whole
    features have a second row, as in `packed_activations.WholeFeatures`."""

    chosen: Int[Array, " whole"] | None
    """Neurons of all experts, in the order of their second rows, expert by expert."""
    slots: Int[Array, " features"] | None
    """Of each neuron the second row among its expert's, or -1."""
    rows: int
    """Second rows of an expert, in blocks."""


def row_groups(sparsity: FFNSparsity, tokens: int, kept: PackedRows) -> RowGroups:
    """A share of each expert's neurons, those with most non-zeros, stays whole."""
    experts, neurons = kept.nonzeros.shape
    count = dense_feature_count(neurons, sparsity.dense_features)
    if count == 0:
        return RowGroups(None, None, 0)
    rows, index = in_blocks(count), jnp.arange(neurons)

    def of_expert(nonzeros):
        found = densest(nonzeros, count, tokens)
        others = index - found.before
        slots = jnp.where(others < rows - count, count + others, -1)
        place = jnp.where(found.chosen, found.before, count)
        chosen = jnp.zeros(count, jnp.int32).at[place].set(index, mode="drop")
        return chosen, jnp.where(found.chosen, found.before, slots)

    chosen, slots = jax.vmap(of_expert)(kept.nonzeros)
    first = neurons * jnp.arange(experts, dtype=jnp.int32)
    return RowGroups((chosen + first[:, None]).reshape(-1), slots.reshape(-1), rows)


def row_gradient_over_tokens(
    groups: RowGroups, da: Float[Array, "_ _"], kept: PackedRows, *, by_token: bool
) -> tuple[Packed, OverTokens]:
    """dY1 as `row_gradient` has it, and A and dY1 2:4 along the rows."""
    slots = () if groups.slots is None else (groups.slots,)
    row_token, tile_expert = _by_expert(kept.routed)
    by_expert = (tile_expert, row_token) if by_token else (tile_expert,)
    run, a = _over_tokens(kept.routed.experts, groups.rows), kept.a
    dy_up, *over_tokens = run(da, a.values, a.metadata, by_expert, slots)
    return Packed(dy_up, a.metadata), OverTokens.of(over_tokens)


def _by_expert(routed: Dispatch) -> tuple[jax.Array, jax.Array]:
    """What the kernels look up: each row's token, and each tile's expert."""
    tokens = jnp.where(routed.row_valid, routed.row_token, -1)
    return tokens, routed.tile_expert


# The GEMMs.


def multiply_rows(
    a: Packed, b: Float[Array, "_ _ _"], routed: Dispatch, *, b_k_major: bool
) -> Float[Array, "rows n"]:
    """`a[r] @ b[expert of r]`: GEMMs 2 and 4. Rows after the used tiles hold anything.

    Args:
      b: (n, experts, k) if `b_k_major`, else (experts, k, n).
    """
    run = _multiply_rows(b_k_major)
    return run(a.values, a.metadata, b, routed.tile_expert, used_tiles(routed))


def multiply_by_expert_weight(
    rows: Float[Array, "rows k"], weight: Packed, routed: Dispatch
) -> Float[Array, "rows n"]:
    """`rows[r] @ weight[expert of r]^T`, experts' weights below each other: GEMMs 1
    and 3."""
    run = _multiply_by_expert_weight(routed.experts)
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
    run = _sum_over_rows(routed.v, transpose_out, groups.rows)
    results = run(sparse.values, sparse.metadata, rows, ends)
    if groups.chosen is None:
        return _side_by_side(results, transpose_out)
    product, lost = (_side_by_side(result, transpose_out) for result in results)
    count = groups.chosen.size // routed.experts
    used = jnp.arange(routed.experts)[:, None] * groups.rows + jnp.arange(count)[None]
    used = used.reshape(-1)
    # As in `packed_activations`: in place, each number once.
    if transpose_out:
        row = jnp.arange(product.shape[0])[:, None]
        place, lost = product.at[row, groups.chosen[None]], lost[:, used]
    else:
        place, lost = product.at[groups.chosen], lost[used]
    return place.add(lost, unique_indices=True, mode="promise_in_bounds")


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
def _over_tokens(experts: int, whole_rows: int):
    @jax.custom_batching.sequential_vmap
    def run(da, values, metadata, by_expert, slots):
        from pallas_kernels import over_tokens_sm90
        from pallas_kernels.activation_tiles import ByExpert

        tile_expert, *row_token = by_expert
        rows = ByExpert(row_token[0] if row_token else None, tile_expert, experts)
        whole = over_tokens_sm90.Whole(slots[0], whole_rows) if slots else None
        return over_tokens_sm90.backward(
            da, values, metadata, whole, by_segments=False, by_expert=rows
        )

    return run


def _rows(experts: int, by_expert):
    from pallas_kernels.activation_tiles import ByExpert

    return ByExpert(by_expert[0], by_expert[1], experts) if by_expert else None


@lru_cache
def _multiply_rows(b_k_major: bool):
    @jax.custom_batching.sequential_vmap
    def run(values, metadata, b, tile_expert, used_tiles):
        from pallas_kernels import grouped_matmul_sm90

        return grouped_matmul_sm90.sparse_rows(
            values,
            metadata,
            b,
            tile_expert,
            used_tiles,
            b_k_major=b_k_major,
            config_for=_config,
            multiprocessors=multiprocessors(),
        )

    return run


@lru_cache
def _multiply_by_expert_weight(experts: int):
    @jax.custom_batching.sequential_vmap
    def run(values, metadata, rows, tile_expert, used_tiles):
        from pallas_kernels import grouped_matmul_sm90

        return grouped_matmul_sm90.sparse_weights(
            values,
            metadata,
            rows,
            tile_expert,
            used_tiles,
            experts=experts,
            config_for=_config,
            multiprocessors=multiprocessors(),
        )

    return run


@lru_cache
def _sum_over_rows(group_tile: int, transpose_out: bool, rows_apart: int):
    @jax.custom_batching.sequential_vmap
    def run(values, metadata, rows, ends):
        from pallas_kernels import grouped_matmul_sm90

        return grouped_matmul_sm90.sparse_over_rows(
            values,
            metadata,
            rows,
            ends,
            group_tile=group_tile,
            transpose_out=transpose_out,
            rows_apart=rows_apart,
            config_for=_config,
            multiprocessors=multiprocessors(),
        )

    return run


def _config(shape):
    """What was tuned for a shape, or the heuristic's."""
    from pallas_kernels import tuning

    return tuning.config_for(current_device_kind(), shape)
