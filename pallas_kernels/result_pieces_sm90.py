"""A GEMM's result on its way out: from a warpgroup's registers through shared memory, a
piece at a time, to where it lies (TMA), transposed or not.

A piece is 64 rows of C by some columns. In shared memory it is (lines, rows, line): its
columns, or transposed its rows, in lines of 128 bytes side by side.
"""

from collections.abc import Sequence

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.sparse_matmul_configs import LINE_BYTES

# What is 128 bytes wide in shared memory is not tiled: its rows may be any number, and
# of a matrix one tile wide Pallas would drop the tile's index, so that tiles beyond the
# matrix would wrap around into it. The bytes are in the same places either way.
OUT_TRANSFORMS = (plgpu.SwizzleTransform(LINE_BYTES),)


def store_piece(piece, ref, *, transpose: bool) -> None:
    """Of a warpgroup into its shared memory, in lines of 128 bytes with that swizzle;
    in the body of an `inline_mgpu` function."""
    # (lines, rows, line) as (rows / 8, lines, 8, line)
    ref = utils.memref_unfold(ref, 1, (None, 8))
    ref = utils.memref_transpose(ref, (1, 0, 2, 3))
    if transpose:
        ref = utils.memref_transpose(ref, (1, 0, 3, 2))
    piece.store_tiled(ref, swizzle=LINE_BYTES)


def write_piece(
    piece,
    smem,
    out_gmem: Sequence,
    origin: tuple,
    *,
    transpose: bool = False,
    **where,
) -> None:
    """Registers to shared memory to C, or to what is apart of it; the second half is
    left under way.

    Args:
      piece: 64 rows of C, in the WGMMA layout.
      smem: (lines, rows, line) with `OUT_TRANSFORMS`.
      transpose: write C^T.
    Otherwise as `copy_piece`.
    """
    layout = plgpu.Layout.WGMMA_TRANSPOSED if transpose else plgpu.Layout.WGMMA

    @plgpu.inline_mgpu(arg_types=(layout, plgpu.RefType(OUT_TRANSFORMS)))
    def store(_, piece, ref):
        store_piece(piece, ref, transpose=transpose)

    store(plgpu.layout_cast(piece, layout), smem)
    plgpu.commit_smem()
    copy_piece(smem, out_gmem, origin, transpose=transpose, **where)


def copy_piece(
    smem,
    out_gmem: Sequence,
    origin: tuple,
    *,
    expert=None,
    expert_axis: int = 0,
    first_apart: int | None = None,
    transpose: bool = False,
    add=None,
) -> None:
    """Shared memory to C, left under way.

    Args:
      smem: the piece, (lines, rows, line).
      out_gmem: C, and what is apart where there is `first_apart`, its first row.
      origin: row and column of C where the piece begins.
      expert: index along `expert_axis`; None where C has no such axis.
      transpose: the piece is of C^T.
      add: whether the piece is added to what C has there; None: it is not.
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
        row < first_apart,
        lambda: copy_or_add(out_gmem[0], row),
        lambda: copy_or_add(out_gmem[1], row - first_apart),
    )
