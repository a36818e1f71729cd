"""Weight gradients of experts from dense rows, on Hopper's tensor cores.

    C[e] = A[rows of e]^T B[rows of e]      dW1 = X^T dY1, dW2 = A^T dY

in float32. Rows come sorted by expert, each expert's filled up to whole group tiles
(`dispatch.Dispatch`); where they end is data. A row may also have the neurons of
several experts side by side (`expert_sets.RowsOfSets`): then it is data as well which
tiles hold rows of an expert, and which of their columns are its own. The kernel is
`gemm/dense_kernel.py`, whose blocks walk over the tiles of all C.
"""

from collections.abc import Sequence
from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
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

STEPS_OF_A_TILE = 8
"""The number of steps that are taken to last as long as writing a tile, or adding it to
the part before it. With 2 the second time in `default_parts` would be predicted right;
it is 8 because the first one gained less than such a prediction says."""


class Joined(NamedTuple):
    """The group tiles of each expert, where a row has several experts: the columns of
    one operand are those of one expert after the other."""

    places: Int[Array, " places"]
    """For each expert in turn its tiles, each as tile * parts + part: the expert's own
    columns are those of the part, from 0."""
    parts: int
    """The number of experts of a row."""
    operand: Literal["a", "b"]
    """The operand with the columns of several experts."""


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


def default_parts(m: int, n: int, rows: int, experts: int, multiprocessors: int) -> int:
    """Returns in how many parts an expert with an equal share of `rows` is summed: in
    two, where the tiles of all experts need more than one round of the multiprocessors
    and the rounds of half-length tiles should take less than 0.8 of that time.

    On an H100 two parts took 0.90 of the time for (m, n) = (768, 768), eight experts
    and 65,536 rows, where 192 tiles are two rounds and 384 halves three, for which the
    rounds alone say 0.76. For (2048, 1024) and 16,384 rows, four rounds in either case,
    they took 1.05 of it."""
    steps = pl.cdiv(rows, STEP * experts)

    def time(parts: int) -> float:
        config = default_config(m, n, experts, multiprocessors, parts_of_share=parts)
        rounds = _rounds(config, m, n, experts * parts, multiprocessors)
        return rounds * config.step_cost * (steps / parts + STEPS_OF_A_TILE)

    config = default_config(m, n, experts, multiprocessors)
    if _rounds(config, m, n, experts, multiprocessors) == 1:
        return 1
    return 2 if time(2) < 0.8 * time(1) else 1


def default_config(
    m: int, n: int, experts: int, multiprocessors: int, *, parts_of_share: int = 1
) -> Config:
    """Returns the config that needs the least time for all rounds of the
    multiprocessors, in proportion to the size of a tile."""

    def cost(config: Config) -> float:
        rounds = _rounds(config, m, n, experts * parts_of_share, multiprocessors)
        return rounds * config.step_cost

    smaller = (Config(tile_n=columns, cluster=1) for columns in (192, 128))
    return min((Config(), Config(cluster=1), *smaller), key=cost)


def _rounds(config: Config, m: int, n: int, parts: int, multiprocessors: int) -> int:
    """Returns how many tiles of so many parts' C a multiprocessor has one after the
    other, at most."""
    tiling = config.tiling(m, n)
    tiles = parts * tiling.rows * tiling.columns
    return pl.cdiv(tiles, multiprocessors // config.cluster)


def dense_over_rows(
    a: Float[Array, "rows m"],
    b: Float[Array, "rows n"],
    ends: Int[Array, " experts"],
    *,
    group_tile: int,
    expert_axis: int = 0,
    joined: Joined | None = None,
    parts_of_share: int | None = None,
    config: Config | None = None,
    multiprocessors: int,
) -> Float[Array, "_ _ _"]:
    """Returns `C[e] = A[rows of e]^T B[rows of e]` in float32; zeros for an expert
    without rows.

    The sums are taken in one order, whatever the config: the same inputs, and
    `parts_of_share`, give the same bits.

    Args:
      a, b: bfloat16 or float16. What padding rows hold is multiplied, so they are zero
        in one of the two and finite in the other; what comes after the last expert's
        rows is not read.
      ends: the first group tile after each expert's own; with `joined` the first of
        its places.
      group_tile: rows of a group tile, a multiple of 64.
      expert_axis: 0 for C as (experts, m, n), 1 for (m, experts, n), as columns of a
        weight lie in memory.
      joined: where each expert's rows and columns lie, if a row has several experts; m
        or n is then the number of columns of one of them.
      parts_of_share: how many parts an expert with an equal share of the rows is summed
        in, as `RowParts.of` says; None for `default_parts`.
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
    experts, tiles = ends.shape[0], rows // group_tile
    if joined is not None:
        tiles = joined.places.shape[0]
        if joined.operand == "a":
            m = _of_each(m, joined.parts)
        else:
            n = _of_each(n, joined.parts)
    if reason := why_unsupported((m, n), group_tile, str(a.dtype)):
        raise ValueError(f"no C (m, n) = {(m, n)} of each expert: {reason}")
    if parts_of_share is None:
        filled = tiles * group_tile
        parts_of_share = default_parts(m, n, filled, experts, multiprocessors)
    parts = RowParts.of(
        m, n, tiles, experts, multiprocessors, parts_of_share=parts_of_share
    )
    if config is None:
        config = default_config(
            m, n, experts, multiprocessors, parts_of_share=parts_of_share
        )
    if reason := config.why_too_large(EPI_TILES):
        raise ValueError(reason)
    tiling = config.tiling(m, n)
    tasks = parts.most * tiling.rows * tiling.columns
    clusters = min(multiprocessors // config.cluster, tasks)
    out = (m, experts, n) if expert_axis else (experts, m, n)
    places = () if joined is None else (joined.places.astype(jnp.int32),)
    return launch(
        partial(
            _kernel,
            config=config,
            clusters=clusters,
            parts=parts,
            group_tile=group_tile,
            expert_axis=expert_axis,
            joined=None if joined is None else (joined.parts, joined.operand),
        ),
        (a, b, ends.astype(jnp.int32), *places),
        jax.ShapeDtypeStruct(out, jnp.float32),
        config=config,
        clusters=clusters,
        name=f"dense_over_rows_{m}x{n}x{rows}",
    )


def _kernel(
    a_gmem,
    b_gmem,
    ends_gmem,
    *refs,
    config: Config,
    clusters: int,
    parts: RowParts,
    group_tile: int,
    expert_axis: int,
    joined: tuple[int, Literal["a", "b"]] | None,
) -> None:
    *places, out_gmem = refs
    m, n = (size for axis, size in enumerate(out_gmem.shape) if axis != expert_axis)
    tiling, steps_of_tile = config.tiling(m, n), group_tile // STEP
    walk = OverTokensOfExpert(tiling, parts, ends_gmem, steps_of_tile)
    reduction = OrderedReduction.of(
        parts, tiling.rows * tiling.columns, config.cluster, WARPGROUPS
    )

    def look_up(step):
        """Returns where a step's rows lie, in steps from the first row of all. With
        several experts of a row the answer also holds the part of the columns: it is
        that place times the number of parts, plus the part."""
        if joined is None:
            return step
        # At the end of the last expert's places there is none to look ahead to.
        index = jnp.minimum(lax.div(step, steps_of_tile), places[0].shape[0] - 1)
        place, number = places[0][index], joined[0]
        tile, part = lax.div(place, number), lax.rem(place, number)
        of_rows = tile * steps_of_tile + lax.rem(step, steps_of_tile)
        return of_rows * number + part

    def part_of(operand: Literal["a", "b"], size: int, of_expert: int):
        """Returns the function that gives a step's part of an operand: `size` columns,
        where each expert has `of_expert` columns of it."""

        def tile(task, first, found):
            if joined is not None:
                number, whose = joined
                if whose == operand:
                    first = first + lax.rem(found, number) * of_expert
                found = lax.div(found, number)
            return pl.ds(found * STEP, STEP), pl.ds(first, size)

        return tile

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
        Operand(a_gmem, part_of("a", config.tile_m, m), False),
        Operand(b_gmem, part_of("b", config.tile_n, n), False),
        walk=walk,
        look_up=look_up,
        config=config,
        clusters=clusters,
        epilogue=Epilogue(None, write, EPI_TILES, jnp.dtype("float32")),
    )


def _of_each(columns: int, parts: int) -> int:
    """Returns how many columns each of `parts` experts has of all columns. Raises
    ValueError where they have not equally many."""
    if columns % parts:
        raise ValueError(
            f"{columns} columns are not those of {parts} experts side by side: give a "
            f"multiple of {parts}"
        )
    return columns // parts
