"""The kernel of GEMMs whose operands are both dense: that of `dense_rows`, of
`dense_over_rows` and of `expert_energies`.

    C = A B,    A (m, k),    B (k, n),    C (m, n)

A persistent kernel, as `sparse_kernel`: every block walks over tiles of C. One warp
copies the operands of the next steps into shared memory (TMA), two warpgroups multiply
64 or 128 rows of A each and write their rows of C. The blocks of a cluster have tiles
of C side by side, and load the operand together that these tiles have in common, a part
each.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.sm90.gemm.tile_scheduler import OwnTasks, Task, Tiling, Walk
from pallas_kernels.sm90.sparse_matmul_configs import (
    LINE_BYTES,
    ROWS,
    SHARED_MEMORY_BYTES,
)

STEP = 64
"""The number of columns of A and rows of B that a step multiplies, of 16 bits each: a
line of shared memory. Of 8 bits it is twice as many."""

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
    """The number of blocks that load an operand together."""
    cluster_axis: Literal["m", "n"] = "m"
    """The axis of C along which the blocks of a cluster lie: "m" where they load B
    together, "n" where they load A."""
    grid_tile_width: int = 16
    """The number of tiles along m that are visited before the next ones along n, so
    that both operands stay in the L2 cache."""

    @property
    def tile_m(self) -> int:
        """The number of rows of C in the tile of one block."""
        return ROWS * self.row_blocks * WARPGROUPS

    @property
    def step_cost(self) -> float:
        """The time of one step of a tile, where one accumulator of a tile with 256
        columns takes 1. One of a narrower tile took 1.07 in `dense_over_rows`, and with
        128 columns 1.08 to 1.13 in `dense_rows`, the copies of its operands included
        (H200; experiments/LOG.md, 2026-11-29)."""
        return self.tile_m * self.tile_n * (1.0 if self.tile_n == 256 else 1.07)

    def shared_memory_bytes(self, epi_tiles: int) -> int:
        """Returns the bytes of shared memory that a block needs: operands of all
        stages, as many epilogue tiles for each warpgroup, barriers."""
        stage = 2 * STEP * (self.tile_m + self.tile_n) + 16
        return self.stages * stage + epi_tiles * WARPGROUPS * ROWS * LINE_BYTES + 16

    def why_too_large(self, epi_tiles: int) -> str | None:
        """Returns why a block has too little shared memory for the config, or None
        where it has enough."""
        needed = self.shared_memory_bytes(epi_tiles)
        if needed <= SHARED_MEMORY_BYTES:
            return None
        return f"{self} needs {needed} bytes of shared memory of {SHARED_MEMORY_BYTES}"

    def tiling(self, m: int, n: int) -> Tiling:
        """Returns the cut of C (m, n) into tiles, each that of a whole cluster."""
        tile_m, tile_n = self.tile_m, self.tile_n
        if self.cluster_axis == "m":
            tile_m *= self.cluster
        else:
            tile_n *= self.cluster
        return Tiling(
            tile_m=tile_m,
            tile_n=tile_n,
            rows=pl.cdiv(m, tile_m),
            columns=pl.cdiv(n, tile_n),
            grid_tile_width=self.grid_tile_width,
            grid_minor_dim="m",
        )


class Operand(NamedTuple):
    """An operand in main memory."""

    ref: Any
    tile: Callable[[Task, Any, Any], tuple]
    """A function that takes a task, the row of A or column of B where a block's tile
    begins, and the number of a step, or what `look_up` has found for it, and returns
    the index of that step's part of the operand."""
    k_major: bool
    """Whether the part is stored with k as its contiguous axis: A as (m, k), B as
    (n, k)."""


class Epilogue(NamedTuple):
    """The functions by which a warpgroup writes its rows of a tile of C.

    Its warps wait for each other only where a function makes them: in
    `wait_smem_to_gmem`, before they write to an epilogue tile again, and in
    `commit_smem`, before its copy to C begins.
    """

    begin: Callable[..., None] | None
    """A function that is called before a tile is multiplied, with (task, origin, the
    warpgroup's epilogue tiles in shared memory, its barrier); it may start copies that
    arrive at the barrier, `slots` of them. None: there are none."""
    write: Callable[..., None]
    """A function that is called with (task, accumulators, origin, epilogue tiles,
    barrier) and writes what becomes of the accumulators. `origin` is (row, column) of C
    where the warpgroup's part begins."""
    slots: int
    """The number of epilogue tiles that a warpgroup has in shared memory, each 64 rows
    of 128 bytes."""
    dtype: Any
    """The dtype of these tiles."""


def dense_kernel(
    a: Operand,
    b: Operand,
    *,
    walk: Walk,
    config: Config,
    clusters: int,
    steps: int = 0,
    look_up: Callable[[Any], Any] = lambda step: step,
    epilogue: Epilogue,
) -> None:
    """Runs the kernel's body, on a grid of `clusters` clusters with `WARPGROUPS` + 1
    warpgroups in a block.

    Args:
      a, b: the operands, of 16 bits, or of 8 bits and both with `k_major`.
      walk: the tasks, in their order.
      steps: the number of steps of each task, unless the tasks of the walk say it
        themselves.
      look_up: a function of the number of a step, which may read main memory. It is
        called a step ahead, so that the answer is there when it is needed. What it
        returns is what the operands' `tile` is called with.
      epilogue: writes the results.
    """
    stages, tile_n = config.stages, config.tile_n
    own_rows = ROWS * config.row_blocks
    warpgroup = lax.axis_index("warpgroup")
    own_tasks = OwnTasks.of(walk, clusters, config.cluster, config.cluster_axis)
    own_tiles = own_tasks.count
    together = "cluster" if config.cluster > 1 else None

    def steps_of(task: Task) -> Any:
        return steps if task.steps is None else task.steps

    # Slots are taken in turn, by the number of steps that were loaded before.
    def slot_of(before):
        return lax.rem(before, stages)

    def load(a_smem, b_smem, out_smem, full, empty, filled) -> None:
        """Runs on the memory warpgroup, one warp of which fills slots as they become
        empty: before a copy of a whole warpgroup its four warps wait for each other."""
        plgpu.set_max_registers(40, action="decrease")

        @plgpu.warp_map
        def _(warp):
            pl.when(warp == 0)(partial(load_all, a_smem, b_smem, full, empty))

    def load_all(a_smem, b_smem, full, empty) -> None:
        """Runs on that warp: loads the operands of all tiles of the block."""

        def load_tile(tile, before):
            task, row, column = own_tasks.task(tile)
            count = steps_of(task)

            def load_step(index, found):
                slot = slot_of(before + index)
                next_found = look_up(
                    task.first_step + jnp.minimum(index + 1, count - 1)
                )
                plgpu.barrier_wait(empty.at[slot])
                plgpu.copy_gmem_to_smem(
                    a.ref.at[a.tile(task, row, found)],
                    a_smem.at[slot],
                    full.at[slot],
                    collective_axes=together if config.cluster_axis == "n" else None,
                )
                plgpu.copy_gmem_to_smem(
                    b.ref.at[b.tile(task, column, found)],
                    b_smem.at[slot],
                    full.at[slot],
                    collective_axes=together if config.cluster_axis == "m" else None,
                )
                return next_found

            lax.fori_loop(0, count, load_step, look_up(task.first_step))
            return before + count

        loaded = lax.fori_loop(0, own_tiles, load_tile, 0)

        # A block must not end while others of its cluster still signal to it.
        def drain(step, carry):
            plgpu.barrier_wait(empty.at[slot_of(loaded + step)])
            return carry

        lax.fori_loop(0, stages, drain, None)

    def multiply(a_smem, b_smem, out_smem, full, empty, filled) -> None:
        """Runs on a compute warpgroup: multiplies its rows of every tile."""
        plgpu.set_max_registers(232, action="increase")
        for slot in range(stages):
            plgpu.barrier_arrive(empty.at[slot])
        of_warpgroup = pl.ds(warpgroup * own_rows, own_rows)
        own = out_smem.at[warpgroup], None if filled is None else filled.at[warpgroup]

        def rows_of_a(slot):
            if a.k_major:
                return a_smem.at[slot, of_warpgroup]
            return a_smem.at[slot, :, of_warpgroup].transpose((1, 0))

        def columns_of_b(slot):
            tile = b_smem.at[slot]
            return tile.transpose((1, 0)) if b.k_major else tile

        def multiply_tile(tile, before):
            task, row, column = own_tasks.task(tile)
            origin = row + warpgroup * own_rows, column
            count = steps_of(task)
            if epilogue.begin is not None:
                epilogue.begin(task, origin, *own)

            def multiply_all(acc_ref):
                def multiply_step(index, carry):
                    slot = slot_of(before + index)
                    plgpu.barrier_wait(full.at[slot])
                    plgpu.wgmma(acc_ref, rows_of_a(slot), columns_of_b(slot))
                    # The one before has read its slot.
                    plgpu.wgmma_wait(1)

                    @pl.when(index > 0)
                    def _():
                        plgpu.barrier_arrive(empty.at[slot_of(before + index - 1)])

                    return carry

                lax.fori_loop(0, count, multiply_step, None)
                return acc_ref[...]

            acc = pl.run_scoped(multiply_all, plgpu.ACC((own_rows, tile_n)))

            @pl.when(count > 0)
            def _():
                plgpu.barrier_arrive(empty.at[slot_of(before + count - 1)])

            epilogue.write(task, acc, origin, *own)
            return before + count

        lax.fori_loop(0, own_tiles, multiply_tile, 0)
        plgpu.wait_smem_to_gmem(0)

    barrier = plgpu.Barrier
    if config.cluster > 1:
        barrier = partial(plgpu.ClusterBarrier, collective_axes=("cluster",))

    def slots_of(operand: Operand, size: int):
        step = LINE_BYTES // operand.ref.dtype.itemsize
        part = (size, step) if operand.k_major else (step, size)
        return plgpu.SMEM(
            (stages, *part), operand.ref.dtype, transforms=_tiled(operand.ref.dtype)
        )

    line = LINE_BYTES // epilogue.dtype.itemsize
    scratch = [
        slots_of(a, config.tile_m),
        slots_of(b, tile_n),
        plgpu.SMEM(
            (WARPGROUPS, epilogue.slots, ROWS, line),
            epilogue.dtype,
            transforms=_tiled(epilogue.dtype),
        ),
        plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        barrier(num_arrivals=WARPGROUPS, num_barriers=stages),
    ]
    if epilogue.begin is not None:
        arrivals = epilogue.slots
        scratch.append(plgpu.Barrier(num_arrivals=arrivals, num_barriers=WARPGROUPS))

    def run(*refs) -> None:
        refs = refs if epilogue.begin is not None else (*refs, None)
        lax.cond(warpgroup < WARPGROUPS, lambda: multiply(*refs), lambda: load(*refs))

    pl.run_scoped(run, *scratch, collective_axes="warpgroup")


def _tiled(dtype) -> tuple:
    """Returns the order of a matrix in shared memory whose rows are read or written in
    lines of 128 bytes."""
    columns = LINE_BYTES // dtype.itemsize
    return plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(LINE_BYTES)


def epi_tiles(config: Config, dtype) -> list[tuple[int, int]]:
    """Returns (row, column) inside a warpgroup's accumulators where each epilogue tile
    begins, in the order in which they are written."""
    line = LINE_BYTES // dtype.itemsize
    return [
        (block * ROWS, column)
        for block in range(config.row_blocks)
        for column in range(0, config.tile_n, line)
    ]


def launch(
    body: Callable[..., None],
    operands: tuple,
    out_type: Any,
    *,
    config: Config,
    clusters: int,
    name: str,
) -> Any:
    """Returns the result of the kernel whose `body` calls `dense_kernel`."""
    return plgpu.kernel(
        body,
        out_type=out_type,
        grid=(clusters,),
        grid_names=("grid",),
        cluster=(config.cluster,),
        cluster_names=("cluster",),
        num_threads=WARPGROUPS + 1,
        thread_name="warpgroup",
        kernel_name=name,
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
            # `Epilogue` says where warps wait for each other instead.
            unsafe_no_auto_barriers=True,
            # The roots of GEMM 3's epilogue: exact ones take some ten instructions and
            # a branch each, and the result is rounded to 16 bits.
            approx_math=True,
        ),
    )(*operands)
