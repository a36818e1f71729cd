"""Weight gradients of experts from dense rows, on Hopper's tensor cores.

    C[e] = A[rows of e]^T B[rows of e]      dW1 = X^T dY1, dW2 = A^T dY

in float32. Rows come sorted by expert, each expert's filled up to whole group tiles
(`dispatch.Dispatch`); where they end is data. The kernel is `gemm/dense_kernel.py`,
whose blocks walk over the tiles of all C.
"""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.sm90.gemm.dense_kernel import (
    STEP,
    WARPGROUPS,
    Config,
    Epilogue,
    Operand,
    dense_kernel,
    epi_tiles,
    launch,
)
from pallas_kernels.sm90.gemm.epilogue import copy_epi_tile
from pallas_kernels.sm90.gemm.split_k import OrderedReduction, RowParts
from pallas_kernels.sm90.gemm.tile_scheduler import OverTokensOfExpert
from pallas_kernels.sm90.sparse_matmul_configs import LINE_BYTES, ROWS

EPI_TILES = 2
"""The number of epilogue tiles that each warpgroup writes at a time."""


def why_unsupported(sizes: Sequence[int], group_tile: int, dtype: str) -> str | None:
    """Returns why C with these `sizes`, (m, n), cannot be computed for each expert, or
    None where it can."""
    if dtype not in ("bfloat16", "float16"):
        return f"multiplies bfloat16 and float16, not {dtype}"
    if group_tile % STEP or not group_tile:
        return f"group_tile={group_tile} is not a multiple of {STEP}"
    for size in sizes:
        if size % 64 or not size:
            return f"a weight's size of {size} is not a multiple of 64"
    return None


def default_config(m: int, n: int, experts: int, multiprocessors: int) -> Config:
    """Returns the config that needs the least time for all rounds of the
    multiprocessors, in proportion to the size of a tile; per accumulator, smaller tiles
    took 1.07 times as long (H200)."""

    def cost(config: Config) -> float:
        tiling = config.tiling(m, n)
        tiles = experts * tiling.rows * tiling.columns
        rounds = pl.cdiv(tiles, multiprocessors // config.cluster)
        slower = 1.0 if config.tile_n == 256 else 1.07
        return rounds * config.tile_m * config.tile_n * slower

    configs = Config(), Config(cluster=1), Config(tile_n=128, cluster=1)
    return min(configs, key=cost)


def dense_over_rows(
    a: Float[Array, "rows m"],
    b: Float[Array, "rows n"],
    ends: Int[Array, " experts"],
    *,
    group_tile: int,
    expert_axis: int = 0,
    config: Config | None = None,
    multiprocessors: int,
) -> Float[Array, "_ _ _"]:
    """Returns `C[e] = A[rows of e]^T B[rows of e]` in float32; zeros for an expert
    without rows.

    The sums are taken in one order, whatever the config: the same inputs give the same
    bits.

    Args:
      a, b: bfloat16 or float16. What padding rows hold is multiplied, so they are zero
        in one of the two and finite in the other; what comes after the last expert's
        rows is not read.
      ends: the first group tile after each expert's own.
      group_tile: rows of a group tile, a multiple of 64.
      expert_axis: 0 for C as (experts, m, n), 1 for (m, experts, n), as columns of a
        weight lie in memory.
      config: how the work is cut up; None for `default_config`.
      multiprocessors: their number in the GPU that will run the kernel.
    Raises:
      ValueError: shapes do not fit, or the kernel cannot run them; says why.
    """
    (rows, m), (rows_of_b, n) = a.shape, b.shape
    if rows != rows_of_b or a.dtype != b.dtype:
        raise ValueError(
            f"A {a.dtype}{a.shape} and B {b.dtype}{b.shape} must have equally many "
            f"rows and one dtype"
        )
    if reason := why_unsupported((m, n), group_tile, str(a.dtype)):
        raise ValueError(f"no C (m, n) = {(m, n)} of each expert: {reason}")
    experts, tiles = ends.shape[0], rows // group_tile
    parts = RowParts.of(m, n, tiles, experts, multiprocessors)
    if config is None:
        config = default_config(m, n, experts, multiprocessors)
    if reason := config.why_too_large(EPI_TILES):
        raise ValueError(reason)
    tiling = config.tiling(m, n)
    tasks = parts.most * tiling.rows * tiling.columns
    clusters = min(multiprocessors // config.cluster, tasks)
    out = (m, experts, n) if expert_axis else (experts, m, n)
    return launch(
        partial(
            _kernel,
            config=config,
            clusters=clusters,
            parts=parts,
            group_tile=group_tile,
            expert_axis=expert_axis,
        ),
        (a, b, ends.astype(jnp.int32)),
        jax.ShapeDtypeStruct(out, jnp.float32),
        config=config,
        clusters=clusters,
        name=f"dense_over_rows_{m}x{n}x{rows}",
    )


def _kernel(
    a_gmem,
    b_gmem,
    ends_gmem,
    out_gmem,
    *,
    config: Config,
    clusters: int,
    parts: RowParts,
    group_tile: int,
    expert_axis: int,
) -> None:
    tiling = config.tiling(a_gmem.shape[1], b_gmem.shape[1])
    walk = OverTokensOfExpert(tiling, parts, ends_gmem, group_tile // STEP)
    reduction = OrderedReduction.of(
        parts, tiling.rows * tiling.columns, config.cluster, WARPGROUPS
    )

    def rows_of(size: int, first, step):
        return pl.ds(step * STEP, STEP), pl.ds(first, size)

    def write(task, acc, origin, out_smem, _) -> None:
        reduction.wait(task)
        line = LINE_BYTES // 4
        for index, (row, column) in enumerate(epi_tiles(config, jnp.dtype("float32"))):
            # A slot is free once the write before the last has read it.
            plgpu.wait_smem_to_gmem(EPI_TILES - 1, wait_read_only=True)
            slot = out_smem.at[pl.ds(index % EPI_TILES, 1)]
            slot[0] = acc[row : row + ROWS, column : column + line]
            plgpu.commit_smem()
            copy_epi_tile(
                slot,
                [out_gmem],
                (origin[0] + row, origin[1] + column),
                expert=task.expert,
                expert_axis=expert_axis,
                add=reduction.adds(task),
            )
        reduction.done(task)

    dense_kernel(
        Operand(
            a_gmem, lambda task, row, step: rows_of(config.tile_m, row, step), False
        ),
        Operand(
            b_gmem,
            lambda task, column, step: rows_of(config.tile_n, column, step),
            False,
        ),
        walk=walk,
        config=config,
        clusters=clusters,
        epilogue=Epilogue(None, write, EPI_TILES, jnp.dtype("float32")),
    )
