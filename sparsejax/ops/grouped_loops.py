"""Grouped GEMMs by XLA: as loops over the tiles of rows on CPUs and over chunks of rows
on GPUs, and as its ragged dot on TPUs."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from sparsejax.dtypes import accumulation_dtype
from sparsejax.ops.dense_matmul import dense_matmul
from sparsejax.ops.gemm_spec import GemmSpec


def tile_rows(rows: int, tile_expert: jax.Array) -> int:
    """Returns the number of rows of a tile. Raises ValueError where the rows are not
    whole tiles."""
    tiles = tile_expert.shape[0]
    if rows % tiles:
        raise ValueError(
            f"{rows} rows are not a whole number of {tiles} tiles; take both from one "
            f"dispatch.dispatch"
        )
    return rows // tiles


def tile_ranges(tile_expert, used_tiles, experts: int) -> tuple[jax.Array, jax.Array]:
    """Returns the first tile of each expert and the tile after its last one, both
    (experts,) int32."""
    used = jnp.arange(tile_expert.shape[0]) < used_tiles
    tiles = jnp.zeros(experts, jnp.int32).at[tile_expert].add(used.astype(jnp.int32))
    end = jnp.cumsum(tiles, dtype=jnp.int32)
    return end - tiles, end


@partial(jax.jit, static_argnames="out_dtype", inline=True)
def matmul_by_tiles(rows, weights, tile_expert, used_tiles, out_dtype):
    """Multiplies every row by its expert's weights in a loop over the experts, and
    inside it over the expert's tiles.

    Time over the dense GEMM's on 2 cores, 4096 x 512 x 2048 in bfloat16, E = 4, here
    and in the weight gradient: `lax.ragged_dot` 0.61 and 1.44, this loop 0.19 and 0.26
    (experiments/bench/gemm.py).
    """
    v = tile_rows(rows.shape[0], tile_expert)
    ranges = tile_ranges(tile_expert, used_tiles, weights.shape[0])

    def expert(out, of_expert):
        weight, first, end = of_expert

        def tile(i, out):
            block = lax.dynamic_slice_in_dim(rows, i * v, v)
            product = dense_matmul(block, weight, out_dtype=out_dtype)
            return lax.dynamic_update_slice_in_dim(out, product, i * v, 0)

        return lax.fori_loop(first, end, tile, out), None

    out = jnp.zeros((rows.shape[0], weights.shape[2]), out_dtype)
    return lax.scan(expert, out, (weights, *ranges))[0]


@partial(jax.jit, static_argnames="experts", inline=True)
def outer_by_tiles(lhs, rhs, tile_expert, used_tiles, experts):
    v = tile_rows(lhs.shape[0], tile_expert)
    accumulate = accumulation_dtype(lhs.dtype)

    def expert(_, ends):
        first, end = ends

        def tile(i, out):
            a = lax.dynamic_slice_in_dim(lhs, i * v, v)
            b = lax.dynamic_slice_in_dim(rhs, i * v, v)
            return out + dense_matmul(a.T, b, out_dtype=accumulate)

        zeros = jnp.zeros((lhs.shape[1], rhs.shape[1]), accumulate)
        return None, lax.fori_loop(first, end, tile, zeros)

    return lax.scan(expert, None, tile_ranges(tile_expert, used_tiles, experts))[1]


CHUNK_ROWS: int = 2048
"""The number of rows that one GEMM of the loop on a GPU multiplies. A larger chunk has
more rows that are not its expert's, a smaller one leaves the GPU idle. Time over the
dense GEMM's, for 512, 1024, 2048 rows, on an H200 in bfloat16 with E = 4: (16384 x 4096
x 16384) 0.95, 0.74, 0.76; (8192 x 2048 x 8192) 1.51, 1.21, 1.14
(experiments/bench/gemm.py)."""

CHUNK_COST: float = 2.3
"""The most that a FLOP of that loop took, chunks of 2048 rows, over one of the dense
GEMM: of the two sizes above, the second."""


def chunks_of(spec: GemmSpec) -> tuple[int, float]:
    """Returns how many rows a chunk of a GEMM has, and the FLOPs that all its chunks
    execute over those of the dense GEMM."""
    experts, rows = spec.experts or 1, spec.tokens * spec.experts_per_token
    size = min(CHUNK_ROWS, rows)
    return size, (rows // size + experts) * size / (spec.tokens * experts)


def _chunks(rows: int, size: int, v: int, tile_expert, used_tiles, experts: int):
    """Returns for each chunk of `size` rows its expert, its first row, and how many of
    its rows belong to the expert.

    There are as many chunks as any distribution over the experts needs, a static
    number, since a loop on a GPU waits for the host where its length is data. Unused
    chunks start at row `rows`.
    """
    first, end = tile_ranges(tile_expert, used_tiles, experts)
    group = v * (end - first)
    last = jnp.cumsum(-(-group // size), dtype=jnp.int32)
    index = jnp.arange(rows // size + experts, dtype=jnp.int32)
    expert = jnp.sum(index[:, None] >= last[None, :], axis=1, dtype=jnp.int32)
    used = expert < experts
    expert = jnp.minimum(expert, experts - 1)
    offset = (index - (last - -(-group // size))[expert]) * size
    start = jnp.where(used, v * first[expert] + offset, rows)
    return expert, start, jnp.where(used, group[expert] - offset, 0)


def matmul_by_chunks(rows, weights, tile_expert, used_tiles, out_dtype):
    """Multiplies every row by its expert's weights in one loop over chunks of rows,
    each chunk with the weights of one expert.

    On GPU XLA expands `lax.ragged_dot` into one dense GEMM over all experts, which
    took 1.13 to 1.31 times the dense GEMM that it was to replace (H200).
    """
    size = min(CHUNK_ROWS, rows.shape[0])
    return _matmul_by_chunks(rows, weights, tile_expert, used_tiles, out_dtype, size)


@partial(jax.jit, static_argnames=("out_dtype", "size"), inline=True)
def _matmul_by_chunks(rows, weights, tile_expert, used_tiles, out_dtype, size: int):
    total = rows.shape[0]
    v, experts = tile_rows(total, tile_expert), weights.shape[0]
    chunks = _chunks(total, size, v, tile_expert, used_tiles, experts)
    padded = jnp.pad(rows, ((0, size), (0, 0)))

    def chunk(out, of_chunk):
        expert, start, _ = of_chunk
        block = lax.dynamic_slice_in_dim(padded, start, size)
        weight = lax.dynamic_index_in_dim(weights, expert, keepdims=False)
        product = dense_matmul(block, weight, out_dtype=out_dtype)
        # Rows behind the expert's own get a wrong product, and then their own: chunks
        # come in the order of their rows.
        return lax.dynamic_update_slice_in_dim(out, product, start, 0), None

    out = jnp.zeros((total + size, weights.shape[2]), out_dtype)
    out = lax.scan(chunk, out, chunks)[0][:total]
    return jnp.where(jnp.arange(total)[:, None] < v * used_tiles, out, 0)


def outer_by_chunks(lhs, rhs, tile_expert, used_tiles, experts):
    size = min(CHUNK_ROWS, lhs.shape[0])
    return _outer_by_chunks(lhs, rhs, tile_expert, used_tiles, experts, size)


@partial(jax.jit, static_argnames=("experts", "size"), inline=True)
def _outer_by_chunks(lhs, rhs, tile_expert, used_tiles, experts: int, size: int):
    total = lhs.shape[0]
    v = tile_rows(total, tile_expert)
    chunks = _chunks(total, size, v, tile_expert, used_tiles, experts)
    lhs, rhs = (jnp.pad(x, ((0, size), (0, 0))) for x in (lhs, rhs))
    accumulate = accumulation_dtype(lhs.dtype)

    def chunk(out, of_chunk):
        expert, start, own = of_chunk
        a = lax.dynamic_slice_in_dim(lhs, start, size)
        b = lax.dynamic_slice_in_dim(rhs, start, size)
        a = jnp.where(jnp.arange(size)[:, None] < own, a, 0)
        b = jnp.where(jnp.arange(size)[:, None] < own, b, 0)
        product = dense_matmul(a.T, b, out_dtype=accumulate)
        return out.at[expert].add(product), None

    out = jnp.zeros((experts, lhs.shape[1], rhs.shape[1]), accumulate)
    return lax.scan(chunk, out, chunks)[0]


OVER_ROWS = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())),
    lhs_ragged_dimensions=[0],
    rhs_group_dimensions=[],
)
"""The ragged dot of (rows, m) and (rows, n), (experts, m, n): summed over the rows of
each expert."""


def matmul_by_ragged_dot(rows, weights, tile_expert, used_tiles, out_dtype):
    """Multiplies every row by its expert's weights in the one instruction that XLA has
    for it on TPUs. Elsewhere XLA multiplies every row by the weights of all experts."""
    sizes = group_sizes(rows, tile_expert, used_tiles, weights.shape[0])
    out = lax.ragged_dot(rows, weights, sizes, preferred_element_type=out_dtype)
    return jnp.where(jnp.arange(rows.shape[0])[:, None] < jnp.sum(sizes), out, 0)


def outer_by_ragged_dot(lhs, rhs, tile_expert, used_tiles, experts):
    return lax.ragged_dot_general(
        lhs,
        rhs,
        group_sizes(lhs, tile_expert, used_tiles, experts),
        OVER_ROWS,
        preferred_element_type=accumulation_dtype(lhs.dtype),
    )


def group_sizes(rows: jax.Array, tile_expert, used_tiles, experts: int) -> jax.Array:
    """Returns how many of the rows each expert has, those that only pad its tiles
    included, (experts,) int32."""
    first, end = tile_ranges(tile_expert, used_tiles, experts)
    return tile_rows(rows.shape[0], tile_expert) * (end - first)
