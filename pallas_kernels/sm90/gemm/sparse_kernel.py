"""The kernel of all GEMMs with a 2:4 operand: `sparse_matmul` and what builds on it.

    C = A B,    A (m, k) 2:4 along k,    B (k, n),    C (m, n)

A persistent kernel: every block walks over tiles of C. One warp copies the operands of
the next steps into shared memory (TMA), one or two warpgroups multiply 64 or 128 rows
of A each and write their rows of C. The blocks of a cluster lie side by side along m
and load B together, a part each. What differs between a single GEMM, GEMMs of experts
and weight gradients of experts is the order of the tiles, and so what a block looks up
(`tile_scheduler`); `Shape.mode` says which it is.
"""

from collections.abc import Callable, Sequence
from functools import partial

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.sm90 import mosaic_internals
from pallas_kernels.sm90.gemm.epilogue import OUT_TRANSFORMS, write_epi_tile
from pallas_kernels.sm90.gemm.split_k import OrderedReduction, RowParts
from pallas_kernels.sm90.gemm.tile_scheduler import (
    ByExpert,
    EveryTile,
    OverTokensOfExpert,
    OwnTasks,
    Walk,
    tiling_of,
)
from pallas_kernels.sm90.gemm.wgmma_sp import SWIZZLE_A, SWIZZLE_B, sparse_wgmma
from pallas_kernels.sm90.sparse_matmul_configs import (
    LINE_BYTES,
    ROWS,
    TILE_K,
    Config,
    Shape,
)

Epilogue = Callable[..., None]
"""A function that writes what it makes of an epilogue tile of C, 64 rows by
`out_columns` in registers, in place of the tile itself. It is called with the shape,
the tile, the tile's own shared memory, the epilogue's inputs, all outputs, and (row,
column) of C where the tile begins."""


def sparse_kernel(
    values_gmem,
    metadata_gmem,
    b_gmem,
    *refs,
    shape: Shape,
    config: Config,
    clusters: int,
    activation,
    split_row: int | None,
    epilogue: Epilogue | None,
    inputs: int,
    parts: RowParts | None,
) -> None:
    """Runs the kernel's body, on a grid of `clusters` clusters with `config.warpgroups`
    + 1 warpgroups in a block; the arguments are those of `sparse_matmul.launch`.

    Args:
      refs: the epilogue's inputs, the arrays in which the order of the tiles is looked
        up, and the results.
    """
    inputs_gmem, refs = refs[:inputs], refs[inputs:]
    walk, reduction, out_gmem = _walk(shape, config, parts, refs)
    in_segments = not shape.group_tile and len(b_gmem.shape) == 3
    # Where half a pair is beyond k, both operands are filled with zeros.
    all_pairs = pl.cdiv(shape.k, 2 * TILE_K)
    tile_n, stages = config.tile_n, config.stages
    warpgroup = lax.axis_index("warpgroup")
    own_rows = ROWS * config.row_blocks
    own_tasks = OwnTasks.of(walk, clusters, config.cluster)
    own_tiles = own_tasks.count
    collective = "cluster" if config.cluster > 1 else None

    def task_of(tile):
        """Returns the task of one of the block's tiles, (row, column) of C where the
        block's part begins, and how many pairs of steps it takes along k."""
        task, row, column = own_tasks.task(tile)
        return task, row, column, all_pairs if task.steps is None else task.steps

    # Slots are taken in turn, by the number of pairs that were loaded before.
    def slot_of_a(before):
        return lax.rem(before, config.pairs)

    def slot_of_b(before, half):
        return lax.rem(2 * before + half, stages)

    def load(a_smem, b_smem, out_smem, a_slots, b_slots) -> None:
        """Runs on the memory warpgroup, one warp of which fills slots as they become
        empty: before a copy of a whole warpgroup its four warps wait for each other."""
        plgpu.set_max_registers(40, action="decrease")

        @plgpu.warp_map
        def _(warp):
            pl.when(warp == 0)(partial(load_all, a_smem, b_smem, a_slots, b_slots))

    def load_all(a_smem, b_smem, a_slots, b_slots) -> None:
        """Runs on that warp: loads the operands of all tiles of the block."""
        values_smem, metadata_smem = a_smem

        def load_tile(tile, before):
            task, row, column, pairs = task_of(tile)
            if shape.group_tile and shape.mode == "sparse_weight":
                row = task.expert * shape.m + row
            rows = pl.ds(row, config.tile_m)
            blocks = pl.ds(row // ROWS, config.tile_m // ROWS)
            columns = pl.ds(column, tile_n)

            def load_pair(index, carry):
                full, empty = a_slots
                slot = slot_of_a(before + index)
                pair = task.first_step + index
                kept = pl.ds(pair * TILE_K, TILE_K)
                words = pl.ds(2 * pair, 2)
                copy = partial(plgpu.copy_gmem_to_smem, barrier=full.at[slot])
                plgpu.barrier_wait(empty.at[slot])
                copy(values_gmem.at[rows, kept], values_smem.at[slot])
                copy(metadata_gmem.at[blocks, words], metadata_smem.at[slot])
                for half in range(2):
                    slot = slot_of_b(before + index, half)
                    load_b(columns, task.expert, slot, 2 * pair + half)
                return carry

            lax.fori_loop(0, pairs, load_pair, None)
            return before + pairs

        def load_b(columns, expert, slot, step):
            full, empty = b_slots
            along_k = pl.ds(step * TILE_K, TILE_K)
            b_tile = (columns, along_k) if shape.b_k_major else (along_k, columns)
            if in_segments:
                b_tile = (slice(None), step, columns)
            elif len(b_gmem.shape) == 3:
                b_tile = (expert, *b_tile)
                if shape.b_k_major:
                    b_tile = (columns, expert, along_k)
            plgpu.barrier_wait(empty.at[slot])
            plgpu.copy_gmem_to_smem(
                b_gmem.at[b_tile],
                b_smem.at[slot],
                full.at[slot],
                collective_axes=collective,
            )

        loaded = lax.fori_loop(0, own_tiles, load_tile, 0)

        # A block must not end while others of its cluster still signal to it.
        def drain(step, carry):
            _, empty = b_slots
            plgpu.barrier_wait(empty.at[slot_of_b(loaded, step)])
            return carry

        lax.fori_loop(0, stages, drain, None)

    def multiply(a_smem, b_smem, out_smem, a_slots, b_slots) -> None:
        """Runs on a compute warpgroup: multiplies its rows of every tile."""
        plgpu.set_max_registers(232, action="increase")
        values_smem, metadata_smem = a_smem
        for (_, empty), count in ((a_slots, config.pairs), (b_slots, stages)):
            for slot in range(count):
                plgpu.barrier_arrive(empty.at[slot])
        multiply_add = [_multiply_add(shape, config, half) for half in range(2)]
        epi_tiles = config.row_blocks * (tile_n // config.out_columns)

        def multiply_tile(tile, before):
            task, row, column, pairs = task_of(tile)
            row = row + warpgroup * own_rows

            def multiply_pair(index, acc):
                slot = slot_of_a(before + index)
                plgpu.barrier_wait(a_slots[0].at[slot])
                values = values_smem.at[slot, pl.ds(warpgroup * own_rows, own_rows)]
                for half in range(2):
                    words = [
                        plgpu.load(
                            metadata_smem.at[
                                slot, warpgroup * config.row_blocks + i, half
                            ],
                            layout=_WORDS_LAYOUT,
                        )
                        for i in range(config.row_blocks)
                    ]
                    b_slot = slot_of_b(before + index, half)
                    plgpu.barrier_wait(b_slots[0].at[b_slot])
                    acc = multiply_add[half](acc, values, b_smem.at[b_slot], *words)
                    plgpu.barrier_arrive(b_slots[1].at[b_slot])
                plgpu.barrier_arrive(a_slots[1].at[slot])
                return acc

            zeros = plgpu.layout_cast(
                jnp.zeros((own_rows, tile_n), jnp.float32), plgpu.Layout.WGMMA
            )
            acc = lax.fori_loop(0, pairs, multiply_pair, zeros)
            if activation is not None:
                acc = activation(acc)
            acc = acc.astype(out_gmem[0].dtype)
            reduction.wait(task)
            for index in range(epi_tiles):
                block, part = divmod(index, tile_n // config.out_columns)
                rows = block * ROWS
                offset = part * config.out_columns
                own = acc[rows : rows + ROWS, offset : offset + config.out_columns]
                origin = row + rows, column + offset
                epi_smem = out_smem.at[
                    warpgroup, lax.rem(tile * epi_tiles + index, config.out_slots)
                ]
                if epilogue is not None:
                    epilogue(shape, own, epi_smem, inputs_gmem, out_gmem, origin)
                    continue
                # A slot is free once the write `out_slots` before this has read it.
                plgpu.wait_smem_to_gmem(config.out_slots - 1, wait_read_only=True)
                write_epi_tile(
                    own,
                    epi_smem,
                    out_gmem,
                    origin,
                    expert=task.expert if shape.mode == "weight_gradient" else None,
                    expert_axis=int(shape.transpose_out),
                    split_row=split_row,
                    transpose=shape.transpose_out,
                    add=reduction.adds(task),
                )
            reduction.done(task)
            return before + pairs

        lax.fori_loop(0, own_tiles, multiply_tile, 0)
        plgpu.wait_smem_to_gmem(0)

    barrier = plgpu.Barrier
    if config.cluster > 1:
        barrier = partial(plgpu.ClusterBarrier, collective_axes=("cluster",))
    b_tile = (tile_n, TILE_K) if shape.b_k_major else (TILE_K, tile_n)
    # An epilogue tile: columns of 128 bytes side by side.
    rows, columns = config.out_columns, ROWS
    if not shape.transpose_out:
        rows, columns = columns, rows
    line = LINE_BYTES // shape.out_bytes
    out_tile = (columns // line, rows, line)
    pl.run_scoped(
        lambda *scratch: lax.cond(
            warpgroup < config.warpgroups,
            lambda: multiply(*scratch),
            lambda: load(*scratch),
        ),
        (
            plgpu.SMEM(
                (config.pairs, config.tile_m, TILE_K),
                values_gmem.dtype,
                transforms=_VALUES_TRANSFORMS,
            ),
            plgpu.SMEM((config.pairs, config.tile_m // ROWS, 2, 128), jnp.uint32),
        ),
        plgpu.SMEM(
            (stages, *b_tile), b_gmem.dtype, transforms=_b_transforms(shape.b_k_major)
        ),
        plgpu.SMEM(
            (config.warpgroups, config.out_slots, *out_tile),
            out_gmem[0].dtype,
            transforms=OUT_TRANSFORMS,
        ),
        # Full and empty slots.
        (
            plgpu.Barrier(num_arrivals=2, num_barriers=config.pairs),
            plgpu.Barrier(num_arrivals=config.warpgroups, num_barriers=config.pairs),
        ),
        (
            plgpu.Barrier(num_barriers=stages),
            barrier(num_arrivals=config.warpgroups, num_barriers=stages),
        ),
        collective_axes="warpgroup",
    )


def _walk(
    shape: Shape, config: Config, parts: RowParts | None, refs: Sequence
) -> tuple[Walk, OrderedReduction, Sequence]:
    """Returns the order of the tiles, the reduction over parts of k, and the results'
    references. In `refs` the results follow the arrays in which that order is looked
    up."""
    tiling = tiling_of(shape, config)
    if not shape.group_tile:
        return EveryTile(tiling), OrderedReduction(), refs
    if shape.mode == "weight_gradient":
        assert parts is not None
        ends, *out = refs
        tiles = tiling.rows * tiling.columns
        reduction = OrderedReduction.of(parts, tiles, config.cluster, config.warpgroups)
        pairs = shape.group_tile // (2 * TILE_K)
        return OverTokensOfExpert(tiling, parts, ends, pairs), reduction, out
    tile_expert, used_tiles, *out = refs
    walk = ByExpert(
        tiling,
        tile_expert,
        used_tiles,
        shape.group_tile,
        tokens_are_rows=shape.mode == "sparse_activation",
    )
    return walk, OrderedReduction(), out


# As `OUT_TRANSFORMS`; `_by_eight` gives the bytes the shape that wgmma knows.
_VALUES_TRANSFORMS = (plgpu.SwizzleTransform(SWIZZLE_A),)
_WORDS_LAYOUT = plgpu.Layout.WG_STRIDED((128,), vec_size=1)


def _b_transforms(b_k_major: bool) -> tuple:
    swizzle = plgpu.SwizzleTransform(SWIZZLE_B)
    return (swizzle,) if b_k_major else (plgpu.TilingTransform((8, 64)), swizzle)


def _by_eight(ref):
    """Returns shared memory of shape (rows, columns) as (rows / 8, 1, 8, columns)."""
    return mosaic_internals.unfolded(ref, 0, (None, 1, 8))


def _reads_beyond(shape: Shape, config: Config, half: int) -> bool:
    """Returns whether a half of a pair may be copied from beyond A: past its last rows,
    or past k where k ends with half a pair. What is read there is zero."""
    tail = half == 1 and shape.k % (2 * TILE_K) != 0
    return tail or shape.m % (config.tile_m * config.cluster) != 0


def _multiply_add(shape: Shape, config: Config, half: int):
    """Returns the function (acc, values, b, *words) -> acc + A's rows of a warpgroup @
    B's tile, of Pallas values; acc is float32 in the WGMMA layout."""

    @plgpu.inline_mgpu(
        arg_types=(
            plgpu.Layout.WGMMA,
            plgpu.RefType(_VALUES_TRANSFORMS),
            plgpu.RefType(_b_transforms(shape.b_k_major)),
            *[_WORDS_LAYOUT] * config.row_blocks,
        ),
        return_type=plgpu.ShapeDtypeStruct(
            (ROWS * config.row_blocks, config.tile_n),
            jnp.float32,
            layout=plgpu.Layout.WGMMA,
        ),
    )
    def run(_, acc, values, b, *words):
        b = _by_eight(b) if shape.b_k_major else b
        return sparse_wgmma(
            acc,
            _by_eight(values),
            words,
            b,
            half=half,
            b_k_major=shape.b_k_major,
            beyond=_reads_beyond(shape, config, half),
        )

    return run
