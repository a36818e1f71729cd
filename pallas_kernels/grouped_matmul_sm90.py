"""GEMMs grouped over experts, with a 2:4 operand, on Hopper's sparse tensor cores.

    sparse_rows       C[r] = A[r] B[e]         Y = A W2, dX = dY1 W1^T
    sparse_weights    C[r] = B[r] A[e]^T       Y1 = X W1, dA = dY W2^T
    sparse_over_rows  C[e] = A[:, r] B[r]      dW2 = A^T dY, dW1^T = dY1^T X

with e the expert of row r, and a sum over e's rows in the last. Rows come sorted by
expert, each expert's filled up to whole group tiles (`router.Dispatch`); which expert a
tile has, and how many tiles are used, is data. The kernel is that of
`sparse_matmul_sm90`, whose blocks look up their expert; tiles that are not used cost
nothing.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from pallas_kernels.row_parts import RowParts
from pallas_kernels.sparse_matmul_configs import (
    Config,
    Shape,
    default_config,
    why_invalid,
)
from pallas_kernels.sparse_matmul_sm90 import check_operands, launch


def sparse_rows(
    values: Float[Array, "rows half_k"],
    metadata: UInt32[Array, "row_blocks k_blocks 128"],
    b: Float[Array, "_ _ _"],
    tile_expert: Int[Array, " tiles"],
    used_tiles: Int[Array, ""],
    *,
    b_k_major: bool,
    config_for: Callable[[Shape], Config] | None = None,
    multiprocessors: int,
) -> Float[Array, "rows n"]:
    """`C[r] = A[r] B[expert of r]`, accumulated in float32 and rounded once.

    Rows after the used tiles are not written. The bits do not depend on the config.

    Args:
      values, metadata: A (rows, k), 2:4 along k: see `packing`.
      b: a matrix for each expert: (n, experts, k) if `b_k_major`, as columns of a
        weight lie in memory, else (experts, k, n), as its rows do.
      tile_expert: the expert of each group tile, of rows / tiles rows.
      used_tiles: how many have rows.
      config_for: chooses the config of the shape; None for `default_config`.
      multiprocessors: of the GPU that will run it.
    Raises:
      ValueError: shapes do not fit, or the config cannot run them; says why.
    """
    if b_k_major:
        n, experts, k_of_b = b.shape
    else:
        experts, k_of_b, n = b.shape
    rows = values.shape[0]
    shape = Shape(
        m=rows,
        n=n,
        k=2 * values.shape[1],
        dtype=str(values.dtype),
        b_k_major=b_k_major,
        transpose_out=False,
        experts=experts,
        group_tile=_group_tile(rows, tile_expert),
    )
    check_operands(values, metadata, b, k_of_b)
    (out,) = launch(
        shape,
        _config(config_for, shape, multiprocessors),
        [jax.ShapeDtypeStruct((rows, n), values.dtype)],
        values,
        metadata,
        b,
        *_lookups(tile_expert, used_tiles),
        multiprocessors=multiprocessors,
    )
    return out


def sparse_weights(
    values: Float[Array, "experts_m half_k"],
    metadata: UInt32[Array, "row_blocks k_blocks 128"],
    b: Float[Array, "rows k"],
    tile_expert: Int[Array, " tiles"],
    used_tiles: Int[Array, ""],
    *,
    experts: int,
    activation: Callable[[jax.Array], jax.Array] | None = None,
    config_for: Callable[[Shape], Config] | None = None,
    multiprocessors: int,
) -> Float[Array, "rows m"]:
    """`C[r] = activation(B[r] A[expert of r]^T)`, otherwise as `sparse_rows`.

    Args:
      values, metadata: the experts' A (m, k) one below the other, 2:4 along k; m a
        multiple of 64.
      b: the rows.
      activation: applied element-wise to the float32 sums.
    """
    rows, k_of_b = b.shape
    if values.shape[0] % (64 * experts):
        raise ValueError(
            f"{values.shape[0]} rows of A are not {experts} experts of equally many, a "
            f"multiple of 64"
        )
    shape = Shape(
        m=values.shape[0] // experts,
        n=rows,
        k=2 * values.shape[1],
        dtype=str(values.dtype),
        experts=experts,
        group_tile=_group_tile(rows, tile_expert),
    )
    check_operands(values, metadata, b, k_of_b)
    (out,) = launch(
        shape,
        _config(config_for, shape, multiprocessors),
        [jax.ShapeDtypeStruct((rows, shape.m), values.dtype)],
        values,
        metadata,
        b,
        *_lookups(tile_expert, used_tiles),
        activation=activation,
        multiprocessors=multiprocessors,
    )
    return out


def sparse_over_rows(
    values: Float[Array, "m half_rows"],
    metadata: UInt32[Array, "row_blocks k_blocks 128"],
    b: Float[Array, "rows n"],
    ends: Int[Array, " experts"],
    *,
    group_tile: int,
    transpose_out: bool,
    rows_apart: int = 0,
    config_for: Callable[[Shape], Config] | None = None,
    multiprocessors: int,
) -> Float[Array, "_ _ _"] | tuple[Float[Array, "_ _ _"], Float[Array, "_ _ _"]]:
    """`C[e] = A[:, rows of e] B[rows of e]` in float32; zeros for an expert without.

    Args:
      values, metadata: A (m, rows), 2:4 along the rows; what padding rows hold is
        multiplied, so they are zero here or in b.
      ends: of each expert the first group tile after its own.
      group_tile: rows of a group tile, a multiple of 128.
      transpose_out: return (n, experts, m), as columns of a weight lie in memory,
        instead of (experts, m, n).
      rows_apart: the product of the last rows of A, a multiple of 64 of them as m is,
        comes as a second result. 0: one result.
    Otherwise as `sparse_rows`.
    """
    rows, n = b.shape
    experts = ends.shape[0]
    shape = Shape(
        m=values.shape[0],
        n=n,
        k=2 * values.shape[1],
        dtype=str(values.dtype),
        b_k_major=False,
        transpose_out=transpose_out,
        float32_out=True,
        experts=experts,
        group_tile=group_tile,
    )
    check_operands(values, metadata, b, rows)
    if rows_apart % 64 or shape.m % 64 * rows_apart or rows_apart >= shape.m:
        raise ValueError(
            f"rows_apart={rows_apart} of {shape.m} rows of A: both must be multiples "
            f"of 64, and some rows left"
        )
    results = [shape.m - rows_apart] + [rows_apart] * bool(rows_apart)
    sizes = [(n, experts, m) if transpose_out else (experts, m, n) for m in results]
    tiles = rows // group_tile
    out = launch(
        shape,
        _config(config_for, shape, multiprocessors),
        [jax.ShapeDtypeStruct(size, jnp.float32) for size in sizes],
        values,
        metadata,
        b,
        ends.astype(jnp.int32),
        parts=RowParts.of(shape.m, n, tiles, experts, multiprocessors),
        multiprocessors=multiprocessors,
        first_apart=shape.m - rows_apart,
    )
    return (out[0], out[1]) if rows_apart else out[0]


def _group_tile(rows: int, tile_expert: jax.Array) -> int:
    tiles = tile_expert.shape[0]
    if rows % tiles:
        raise ValueError(
            f"{rows} rows are not a whole number of {tiles} group tiles; take both "
            f"from one router.dispatch"
        )
    return rows // tiles


def _lookups(tile_expert: jax.Array, used_tiles: jax.Array) -> tuple[jax.Array, ...]:
    """What the blocks look up."""
    return tile_expert.astype(jnp.int32), used_tiles.astype(jnp.int32).reshape(1)


def _config(
    config_for: Callable[[Shape], Config] | None, shape: Shape, multiprocessors: int
) -> Config:
    if config_for is None:
        config_for = partial(default_config, multiprocessors=multiprocessors)
    config = config_for(shape)
    if reason := why_invalid(config, shape):
        raise ValueError(f"no grouped 2:4 GEMM of {shape} with {config}: {reason}")
    return config
