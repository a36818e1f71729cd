"""The epilogue of a GEMM: its result goes from a warpgroup's registers through shared
memory to main memory (TMA), one epilogue tile at a time, transposed or not.

An epilogue tile is 64 rows of C by some columns. In shared memory it has the shape
(lines, rows, line): its columns, or transposed its rows, lie side by side in lines of
128 bytes.
"""

from collections.abc import Sequence

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.sm90 import mosaic_internals
from pallas_kernels.sm90.sparse_matmul_configs import LINE_BYTES

# What is 128 bytes wide in shared memory is not tiled: its rows may be any number, and
# of a matrix one tile wide Pallas would drop the tile's index, so that tiles beyond the
# matrix would wrap around into it. The bytes are in the same places either way.
OUT_TRANSFORMS = (plgpu.SwizzleTransform(LINE_BYTES),)


def store_epi_tile(epi_tile, ref, *, transpose: bool) -> None:
    """Stores an epilogue tile from a warpgroup's registers into its shared memory.

    For the body of an `inline_mgpu` function; `ref` is (lines, rows, line), and gets a
    swizzle of 128 bytes.
    """
    # (lines, rows, line) as (rows / 8, lines, 8, line)
    ref = mosaic_internals.unfolded(ref, 1, (None, 8))
    ref = mosaic_internals.transposed(ref, (1, 0, 2, 3))
    if transpose:
        ref = mosaic_internals.transposed(ref, (1, 0, 3, 2))
    epi_tile.store_tiled(ref, swizzle=LINE_BYTES)


def write_epi_tile(
    epi_tile,
    smem,
    out_gmem: Sequence,
    origin: tuple,
    *,
    transpose: bool = False,
    **where,
) -> None:
    """Stores an epilogue tile into shared memory and starts its copy to C.

    The copy is left under way.

    Args:
      epi_tile: 64 rows of C by some columns, in the WGMMA layout.
      smem: the warpgroup's own shared memory, (lines, rows, line), `OUT_TRANSFORMS`.
      out_gmem, origin, where: see `copy_epi_tile`.
      transpose: write C^T.
    """
    layout = plgpu.Layout.WGMMA_TRANSPOSED if transpose else plgpu.Layout.WGMMA

    @plgpu.inline_mgpu(arg_types=(layout, plgpu.RefType(OUT_TRANSFORMS)))
    def store(_, epi_tile, ref):
        store_epi_tile(epi_tile, ref, transpose=transpose)

    store(plgpu.layout_cast(epi_tile, layout), smem)
    plgpu.commit_smem()
    copy_epi_tile(smem, out_gmem, origin, transpose=transpose, **where)


def copy_epi_tile(
    smem,
    out_gmem: Sequence,
    origin: tuple,
    *,
    expert=None,
    expert_axis: int = 0,
    split_row: int | None = None,
    transpose: bool = False,
    add=None,
) -> None:
    """Starts the copy of an epilogue tile from shared memory to C.

    The copy is left under way.

    Args:
      smem: the epilogue tile, (lines, rows, line).
      out_gmem: C; or two results, C's rows before `split_row` and those from there on.
      origin: row and column of C where the epilogue tile begins.
      expert: the index along `expert_axis`; None where C has no such axis.
      expert_axis: the axis of C that counts experts.
      split_row: the first row of C that belongs to the second result; None where there
        is one result.
      transpose: whether the tile is one of C^T, and the results are transposed.
      add: whether the tile is added to what C has there; None: it is written.
    """
    row, column = origin
    lines, rows, line = smem.shape

    def copy(target, row, reduction) -> None:
        first, second = (column, row) if transpose else (row, column)
        for index in range(lines):
            part = [pl.ds(first, rows), pl.ds(second + index * line, line)]
            if expert is not None:
                part.insert(expert_axis, expert)
            last = index == lines - 1
            plgpu.copy_smem_to_gmem(
                smem.at[index],
                target.at[tuple(part)],
                commit_group=last,
                reduction_op=reduction,
            )

    def copy_or_add(target, row) -> None:
        if add is None:
            copy(target, row, None)
            return
        lax.cond(add, lambda: copy(target, row, "add"), lambda: copy(target, row, None))

    if len(out_gmem) == 1:
        copy_or_add(out_gmem[0], row)
        return
    lax.cond(
        row < split_row,
        lambda: copy_or_add(out_gmem[0], row),
        lambda: copy_or_add(out_gmem[1], row - split_row),
    )
