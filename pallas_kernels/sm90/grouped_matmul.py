"""GEMMs grouped over experts, with a 2:4 operand, on Hopper's sparse tensor cores.

    sparse_rows       C[r] = A[r] B[e]         Y = A W2, dX = dY1 W1^T
    sparse_weights    C[r] = B[r] A[e]^T       Y1 = X W1, dA = dY W2^T
    sparse_over_rows  C[e] = A[:, r] B[r]      dW2 = A^T dY, dW1^T = dY1^T X

where e is the expert of row r, and the last sums over e's rows. Rows come sorted by
expert, each expert's filled up to whole group tiles (`dispatch.Dispatch`); which expert
a tile has, and how many tiles are used, is data. The kernel is that of `sparse_matmul`,
whose blocks look up their expert; tiles that are not used cost nothing.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from pallas_kernels.sm90.gemm.split_k import RowParts
from pallas_kernels.sm90.sparse_matmul import check_operands, launch
from pallas_kernels.sm90.sparse_matmul_configs import (
    Config,
    Shape,
    default_config,
    why_invalid,
)


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
    """Returns `C[r] = A[r] B[expert of r]`, accumulated in float32 and rounded once.

    Rows after the used tiles are not written. The bits do not depend on the config.

    Args:
      values, metadata: A (rows, k), 2:4 along k: see `sparsejax.sparsity.packed`.
      b: a matrix for each expert: (n, experts, k) if `b_k_major`, as columns of a
        weight lie in memory, else (experts, k, n), as its rows do.
      tile_expert: the expert of each group tile of rows / tiles rows.
      used_tiles: how many group tiles have rows.
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
        mode="sparse_activation",
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
    """Returns `C[r] = activation(B[r] A[expert of r]^T)`, accumulated in float32 and
    rounded once. Rows after the used tiles are not written.

    Args:
      values, metadata: the experts' A (m, k) one below the other, 2:4 along k; m a
        multiple of 64.
      b: the rows, each multiplied by its expert's A.
      activation: applied element-wise to the float32 accumulators.
      tile_expert, used_tiles, config_for, multiprocessors: see `sparse_rows`.
    Raises:
      ValueError: shapes do not fit, or the config cannot run them; says why.
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
        mode="sparse_weight",
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
    split_rows: int = 0,
    config_for: Callable[[Shape], Config] | None = None,
    multiprocessors: int,
) -> Float[Array, "_ _ _"] | tuple[Float[Array, "_ _ _"], Float[Array, "_ _ _"]]:
    """Returns `C[e] = A[:, rows of e] B[rows of e]` in float32; zeros for an expert
    without rows.

    Args:
      values, metadata: A (m, rows), 2:4 along the rows. What padding rows hold is
        multiplied, so they are zero in A or in b.
      b: the rows, each multiplied by its column of A.
      ends: the first group tile after each expert's own.
      group_tile: rows of a group tile, a multiple of 128.
      transpose_out: return (n, experts, m), as columns of a weight lie in memory,
        instead of (experts, m, n).
      split_rows: how many of A's last rows, a multiple of 64 as m is, have their
        product in a second result. 0: there is one result.
      config_for, multiprocessors: see `sparse_rows`.
    Raises:
      ValueError: shapes do not fit, or the config cannot run them; says why.
    """
    rows, n = b.shape
    experts = ends.shape[0]
    shape = Shape(
        m=values.shape[0],
        n=n,
        k=2 * values.shape[1],
        mode="weight_gradient",
        dtype=str(values.dtype),
        b_k_major=False,
        transpose_out=transpose_out,
        float32_out=True,
        experts=experts,
        group_tile=group_tile,
    )
    check_operands(values, metadata, b, rows)
    if split_rows % 64 or shape.m % 64 * split_rows or split_rows >= shape.m:
        raise ValueError(
            f"split_rows={split_rows} of {shape.m} rows of A: both must be multiples "
            f"of 64, and some rows left"
        )
    results = [shape.m - split_rows] + [split_rows] * bool(split_rows)
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
        split_row=shape.m - split_rows,
    )
    return (out[0], out[1]) if split_rows else out[0]


def _group_tile(rows: int, tile_expert: jax.Array) -> int:
    """Returns how many rows a group tile has."""
    tiles = tile_expert.shape[0]
    if rows % tiles:
        raise ValueError(
            f"{rows} rows are not a whole number of {tiles} group tiles; take both "
            f"from one dispatch.dispatch"
        )
    return rows // tiles


def _lookups(tile_expert: jax.Array, used_tiles: jax.Array) -> tuple[jax.Array, ...]:
    """Returns the arrays that the blocks look up: int32 (group tiles,), the expert of
    each, and int32 (1,), the number of used group tiles."""
    return tile_expert.astype(jnp.int32), used_tiles.astype(jnp.int32).reshape(1)


def _config(
    config_for: Callable[[Shape], Config] | None, shape: Shape, multiprocessors: int
) -> Config:
    """Returns the config of a shape. Raises ValueError where it cannot run the
    shape."""
    if config_for is None:
        config_for = partial(default_config, multiprocessors=multiprocessors)
    config = config_for(shape)
    if reason := why_invalid(config, shape):
        raise ValueError(f"no grouped 2:4 GEMM of {shape} with {config}: {reason}")
    return config
