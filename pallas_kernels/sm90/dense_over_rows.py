"""Weight gradients of experts from dense rows, on Hopper's tensor cores.

    C[e] = A[rows of e]^T B[rows of e]      dW1 = X^T dY1, dW2 = A^T dY

in float32. Rows come sorted by expert, each expert's filled up to whole group tiles
(`dispatch.Dispatch`); where they end is data. The kernel is persistent as that of
`sparse_matmul`: every block walks over tiles of all C. One warpgroup copies the
operands of the next steps into shared memory (TMA), two multiply.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.sm90.gemm.epilogue import copy_epi_tile
from pallas_kernels.sm90.gemm.split_k import OrderedReduction, RowParts
from pallas_kernels.sm90.gemm.tile_scheduler import OverTokensOfExpert, OwnTasks, Tiling
from pallas_kernels.sm90.sparse_matmul_configs import (
    LINE_BYTES,
    ROWS,
    SHARED_MEMORY_BYTES,
)

STEP = 64
"""The number of rows of A and B that a step multiplies."""

WARPGROUPS = 2
"""The number of warpgroups that multiply, each its own rows of a tile of C."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """The way that the work is cut up. Shared memory limits the tiles, and registers
    the accumulators: a warpgroup has 64 row_blocks x tile_n of them, at most 64 x
    256."""

    row_blocks: int = 1
    """The number of blocks of 64 rows of C that each warpgroup has."""
    tile_n: int = 256
    """The number of columns of a tile of C."""
    stages: int = 4
    """The number of steps that have their operands in shared memory at a time."""
    cluster: int = 2
    """The number of blocks along m that load B together."""
    grid_tile_width: int = 16
    """The number of tiles along m that are visited before the next ones along n, so
    that both operands stay in the L2 cache."""

    @property
    def tile_m(self) -> int:
        """The number of rows of C in the tile of one block."""
        return ROWS * self.row_blocks * WARPGROUPS

    @property
    def shared_memory_bytes(self) -> int:
        """The bytes of shared memory that a block needs: operands of all stages, two
        epilogue tiles for each warpgroup, barriers."""
        stage = 2 * STEP * (self.tile_m + self.tile_n) + 16
        return self.stages * stage + 2 * WARPGROUPS * ROWS * LINE_BYTES


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
        tiles = experts * math.prod(_tiles(config, m, n))
        rounds = pl.cdiv(tiles, multiprocessors // config.cluster)
        slower = 1.0 if config.tile_n == 256 else 1.07
        return rounds * config.tile_m * config.tile_n * slower

    configs = Config(), Config(cluster=1), Config(tile_n=128, cluster=1)
    return min(configs, key=cost)


def _tiles(config: Config, m: int, n: int) -> tuple[int, int]:
    """Returns how many tiles one C has along m and n; a tile is that of a whole
    cluster."""
    return pl.cdiv(m, config.tile_m * config.cluster), pl.cdiv(n, config.tile_n)


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
    if config.shared_memory_bytes > SHARED_MEMORY_BYTES:
        raise ValueError(
            f"{config} needs {config.shared_memory_bytes} bytes of shared memory of "
            f"{SHARED_MEMORY_BYTES}"
        )
    tile_rows, tile_columns = _tiles(config, m, n)
    tiling = Tiling(
        tile_m=config.tile_m * config.cluster,
        tile_n=config.tile_n,
        rows=tile_rows,
        columns=tile_columns,
        grid_tile_width=config.grid_tile_width,
        grid_minor_dim="m",
    )
    tasks = parts.most * tile_rows * tile_columns
    clusters = min(multiprocessors // config.cluster, tasks)
    out = (m, experts, n) if expert_axis else (experts, m, n)
    return plgpu.kernel(
        partial(
            _kernel,
            tiling=tiling,
            config=config,
            clusters=clusters,
            parts=parts,
            group_tile=group_tile,
            expert_axis=expert_axis,
        ),
        out_type=jax.ShapeDtypeStruct(out, jnp.float32),
        grid=(clusters,),
        grid_names=("grid",),
        cluster=(config.cluster,),
        cluster_names=("cluster",),
        num_threads=WARPGROUPS + 1,
        thread_name="warpgroup",
        kernel_name=f"dense_over_rows_{m}x{n}x{rows}",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup
        ),
    )(a, b, ends.astype(jnp.int32))


def _kernel(
    a_gmem,
    b_gmem,
    ends_gmem,
    out_gmem,
    *,
    tiling: Tiling,
    config: Config,
    clusters: int,
    parts: RowParts,
    group_tile: int,
    expert_axis: int,
) -> None:
    walk = OverTokensOfExpert(tiling, parts, ends_gmem, group_tile // STEP)
    reduction = OrderedReduction.of(
        parts, tiling.rows * tiling.columns, config.cluster, WARPGROUPS
    )
    stages, tile_n = config.stages, config.tile_n
    own_rows = ROWS * config.row_blocks
    warpgroup = lax.axis_index("warpgroup")
    own_tasks = OwnTasks.of(walk, clusters, config.cluster)
    own_tiles = own_tasks.count
    collective = "cluster" if config.cluster > 1 else None

    # Slots are taken in turn, by the number of steps that were loaded before.
    def slot_of(before):
        return lax.rem(before, stages)

    def load(a_smem, b_smem, out_smem, full, empty) -> None:
        """Runs on the memory warpgroup: fills slots as they become empty."""
        plgpu.set_max_registers(40, action="decrease")

        def load_tile(tile, before):
            task, row, column = own_tasks.task(tile)

            def load_step(index, carry):
                slot = slot_of(before + index)
                rows = pl.ds((task.first_step + index) * STEP, STEP)
                plgpu.barrier_wait(empty.at[slot])
                plgpu.copy_gmem_to_smem(
                    a_gmem.at[rows, pl.ds(row, config.tile_m)],
                    a_smem.at[slot],
                    full.at[slot],
                )
                plgpu.copy_gmem_to_smem(
                    b_gmem.at[rows, pl.ds(column, tile_n)],
                    b_smem.at[slot],
                    full.at[slot],
                    collective_axes=collective,
                )
                return carry

            lax.fori_loop(0, task.steps, load_step, None)
            return before + task.steps

        loaded = lax.fori_loop(0, own_tiles, load_tile, 0)

        # A block must not end while others of its cluster still signal to it.
        def drain(step, carry):
            plgpu.barrier_wait(empty.at[slot_of(loaded + step)])
            return carry

        lax.fori_loop(0, stages, drain, None)

    def multiply(a_smem, b_smem, out_smem, full, empty) -> None:
        """Runs on a compute warpgroup: multiplies its rows of every tile."""
        plgpu.set_max_registers(232, action="increase")
        for slot in range(stages):
            plgpu.barrier_arrive(empty.at[slot])

        def multiply_tile(tile, before):
            task, row, column = own_tasks.task(tile)
            of_warpgroup = pl.ds(warpgroup * own_rows, own_rows)

            def multiply_all(acc_ref):
                def multiply_step(index, carry):
                    slot = slot_of(before + index)
                    plgpu.barrier_wait(full.at[slot])
                    a = a_smem.at[slot, :, of_warpgroup]
                    plgpu.wgmma(acc_ref, a.transpose((1, 0)), b_smem.at[slot])
                    # The one before has read its slot.
                    plgpu.wgmma_wait(1)

                    @pl.when(index > 0)
                    def _():
                        plgpu.barrier_arrive(empty.at[slot_of(before + index - 1)])

                    return carry

                lax.fori_loop(0, task.steps, multiply_step, None)
                return acc_ref[...]

            acc = pl.run_scoped(multiply_all, plgpu.ACC((own_rows, tile_n)))

            @pl.when(task.steps > 0)
            def _():
                plgpu.barrier_arrive(empty.at[slot_of(before + task.steps - 1)])

            reduction.wait(task)
            line = LINE_BYTES // 4
            for index in range(config.row_blocks * tile_n // line):
                block, part = divmod(index, tile_n // line)
                epi_tile = acc[
                    block * ROWS : (block + 1) * ROWS, part * line : (part + 1) * line
                ]
                # A slot is free once the write before the last has read it.
                plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                slot = out_smem.at[warpgroup, index % 2]
                slot[0] = epi_tile
                plgpu.commit_smem()
                copy_epi_tile(
                    slot,
                    [out_gmem],
                    (row + warpgroup * own_rows + block * ROWS, column + part * line),
                    expert=task.expert,
                    expert_axis=expert_axis,
                    add=reduction.adds(task),
                )
            reduction.done(task)
            return before + task.steps

        lax.fori_loop(0, own_tiles, multiply_tile, 0)
        plgpu.wait_smem_to_gmem(0)

    barrier = plgpu.Barrier
    if config.cluster > 1:
        barrier = partial(plgpu.ClusterBarrier, collective_axes=("cluster",))
    transforms = (
        plgpu.TilingTransform((8, 64)),
        plgpu.SwizzleTransform(2 * STEP),
    )

    def operand(size: int):
        return plgpu.SMEM((stages, STEP, size), a_gmem.dtype, transforms=transforms)

    pl.run_scoped(
        lambda *scratch: lax.cond(
            warpgroup < WARPGROUPS,
            lambda: multiply(*scratch),
            lambda: load(*scratch),
        ),
        operand(config.tile_m),
        operand(tile_n),
        plgpu.SMEM(
            (WARPGROUPS, 2, 1, ROWS, LINE_BYTES // 4),
            jnp.float32,
            transforms=(
                plgpu.TilingTransform((8, LINE_BYTES // 4)),
                plgpu.SwizzleTransform(LINE_BYTES),
            ),
        ),
        plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        barrier(num_arrivals=WARPGROUPS, num_barriers=stages),
        collective_axes="warpgroup",
    )
