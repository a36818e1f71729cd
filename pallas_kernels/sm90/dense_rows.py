"""Dense rows times the dense weights of their experts, on Hopper's tensor cores.

    C[r] = f(A[r] B[e])     e: the expert of row r

    Y = A W2, dX = dY1 W1^T             nothing is applied
    A = relu(X W1)^2                    f = relu(.)^2
    dY1 = (dY W2^T) 2 sqrt(A)           f reads another matrix's entry as well

Rows come sorted by expert, each expert's filled up to whole group tiles
(`dispatch.Dispatch`); which expert a tile has, and how many tiles are used, is data.
A row may also have several experts e_1, ..., e_g, and rows be sorted by the set of them
(`expert_sets.RowsOfSets`). Either A has their columns side by side, or C has:

    C[r] = f(sum_j A_j[r] B[e_j])       A_j: the columns of e_j in A
    C_j[r] = f(A[r] B[e_j])             C_j: the columns of e_j in C

The kernel is `gemm/dense_kernel.py`, on the walk of `grouped_matmul`; tiles that are
not used cost nothing. No sparse instruction runs.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.sm90.gemm.dense_kernel import (
    STEP,
    Config,
    Epilogue,
    Operand,
    dense_kernel,
    epi_tiles,
    launch,
)
from pallas_kernels.sm90.gemm.epilogue import copy_epi_tile
from pallas_kernels.sm90.gemm.tile_scheduler import ByExpert
from pallas_kernels.sm90.sparse_matmul_configs import LINE_BYTES, ROWS

EPI_TILES = 2
"""The number of epilogue tiles that each warpgroup writes at a time, where the epilogue
reads none. Where it does, all tiles of the warpgroup's rows are in shared memory."""


class OtherRows(NamedTuple):
    """A matrix as large as the result, which the epilogue reads."""

    entries: Float[Array, "rows n"]
    """The matrix, in the dtype of the result."""
    combine: Callable[[jax.Array, jax.Array], jax.Array]
    """A function of the accumulators and of the matrix's entries, both float32, which
    returns the entries of the result."""


def why_unsupported(sizes: Sequence[int], group_tile: int, dtype: str) -> str | None:
    """Returns why rows of some `sizes`, those of A and of the result, cannot be
    multiplied by the weights of their experts, or None where they can."""
    if dtype not in ("bfloat16", "float16"):
        return f"multiplies bfloat16 and float16, not {dtype}"
    if group_tile % 128 or not group_tile:
        return f"group_tile={group_tile} is not a multiple of 128"
    for size in sizes:
        if size % 64 or size < 128:
            return f"a size of {size} is not a multiple of 64 from 128 on"
    return None


def why_not_joined(features: int) -> str | None:
    """Returns why a row cannot have several experts with so many neurons each side by
    side, or None where it can. A tile of columns belongs to one expert, and the
    narrowest tile has 128."""
    if features % 128:
        return f"{features} neurons of an expert are no multiple of 128"
    return None


def why_invalid(
    config: Config, group_tile: int, *, reads: bool, part: int | None = None
) -> str | None:
    """Returns why `config` cannot run group tiles of so many rows, or None where it
    can; `reads` says whether the epilogue reads another matrix. Where the columns of
    the result are those of several experts, `part` is how many each of them has."""
    tile_m = config.tiling(1, 1).tile_m
    if group_tile % tile_m:
        return f"a tile of {tile_m} rows does not divide group_tile={group_tile}"
    if part is not None and part % config.tile_n:
        return (
            f"a tile of {config.tile_n} columns does not divide the {part} of an expert"
        )
    count = len(epi_tiles(config, jnp.dtype("bfloat16")))
    if not reads and count % EPI_TILES:
        # The next tile's first write would reuse a slot that its last still reads.
        return f"{config} has {count} epilogue tiles, no multiple of {EPI_TILES}"
    return config.why_too_large(_slots(config, reads))


def default_config(
    rows: int,
    n: int,
    group_tile: int,
    multiprocessors: int,
    *,
    groups: int = 1,
    reads: bool = False,
    part: int | None = None,
) -> Config:
    """Returns the config that needs the least time for all rounds of the
    multiprocessors, in proportion to the size of a tile and to what it reads.

    How many group tiles will have rows is not known before the kernel runs: the last
    one of each group is more or less filled, so that up to one for each group is not
    needed. The time is the mean over these numbers of tiles, each as likely as the
    next: the largest one, which few routings need, may take large tiles one more round
    than all others do.

    Args:
      rows: the number of rows of C, with those of the tiles that stay empty.
      n: the number of columns of C.
      group_tile: the rows of a group tile.
      multiprocessors: their number in the GPU that will run the kernel.
      groups: the number of groups that the rows are sorted into, one for each expert,
        or for each set of experts.
      reads: as in `why_invalid`.
      part: as in `why_invalid`.
    """
    tiles = rows // group_tile
    used = range(max(tiles - groups, 0) + 1, tiles + 1)

    def cost(config: Config) -> float:
        tiling = config.tiling(group_tile, n)
        of_group_tile = tiling.rows * tiling.columns
        clusters = multiprocessors // config.cluster
        rounds = sum(pl.cdiv(count * of_group_tile, clusters) for count in used)
        bytes_of = {"m": config.tile_m, "n": config.tile_n}
        shared = {"m": config.tile_n, "n": config.tile_m}[config.cluster_axis]
        read = bytes_of[config.cluster_axis] + shared / config.cluster
        return rounds * (config.step_cost + 32 * read)

    stages = 3 if reads else 4
    configs = [
        Config(cluster=2, cluster_axis="m", stages=stages),
        Config(cluster=2, cluster_axis="n", stages=stages),
        Config(cluster=1, stages=stages),
        Config(tile_n=128, cluster=2, cluster_axis="n"),
        Config(tile_n=128, cluster=1),
    ]
    how = {"reads": reads, "part": part}
    return min(
        (c for c in configs if why_invalid(c, group_tile, **how) is None), key=cost
    )


def _slots(config: Config, reads: bool) -> int:
    """Returns the number of epilogue tiles that a warpgroup has in shared memory."""
    return len(epi_tiles(config, jnp.dtype("bfloat16"))) if reads else EPI_TILES


def dense_rows(
    a: Float[Array, "rows k"],
    b: Float[Array, "_ _ _"],
    tile_expert: Int[Array, " tiles"] | Int[Array, "tiles parts"],
    used_tiles: Int[Array, ""],
    *,
    expert_axis: int,
    b_k_major: bool,
    activation: Callable[[jax.Array], jax.Array] | None = None,
    other: OtherRows | None = None,
    out_dtype: jnp.dtype | None = None,
    config: Config | None = None,
    multiprocessors: int,
) -> Float[Array, "rows n"]:
    """Returns `C[r] = f(A[r] B[expert of r])`, accumulated in float32 and rounded once.

    Rows after the used tiles are not written. The bits do not depend on the config.

    Args:
      a: bfloat16 or float16.
      b: a matrix for each expert, as it lies in a weight of all experts. With
        `expert_axis` 0 (experts, k, n), with 1 (k, experts, n); if `b_k_major`
        (experts, n, k) or (n, experts, k).
      tile_expert: the expert of each group tile of rows / tiles rows, or the experts of
        each. Their number is then a factor of the columns of `a`, which are those of
        one expert after the other, or, where `a` has as many as B has k, of the
        columns of the result.
      used_tiles: how many group tiles have rows.
      activation: f, of the float32 accumulators; None: nothing is applied.
      other: f and a matrix that it reads; in place of `activation`.
      out_dtype: the dtype of the result, float32 or that of `a`, which None stands for
        and `other` needs.
      config: how the work is cut up; None for `default_config`.
      multiprocessors: their number in the GPU that will run the kernel.
    Raises:
      ValueError: shapes do not fit, or the kernel cannot run them; says why.
    """
    rows, k = a.shape
    sizes = [size for axis, size in enumerate(b.shape) if axis != expert_axis]
    n, k_of_b = sizes if b_k_major else sizes[::-1]
    tiles, parts = (*tile_expert.shape, 1)[:2]
    along_k = parts > 1 and k == parts * k_of_b
    if not (along_k or k == k_of_b) or a.dtype != b.dtype or rows % tiles:
        of_each = f", {parts} experts each," if parts > 1 else ""
        raise ValueError(
            f"rows {a.dtype}{a.shape} in {tiles} group tiles{of_each} do not fit "
            f"weights {b.dtype}{b.shape} of k={k_of_b}: they need whole tiles, equal k "
            f"and one dtype"
        )
    group_tile, reads = rows // tiles, other is not None
    part = k_of_b if along_k else n
    n_of_part = None if along_k or parts == 1 else n
    n *= 1 if along_k else parts
    dtype = jnp.dtype(a.dtype if out_dtype is None else out_dtype)
    if dtype not in (a.dtype, jnp.float32):
        raise ValueError(
            f"out_dtype={dtype} is neither float32 nor that of the rows, {a.dtype}"
        )
    if other is not None and (
        (other.entries.shape, other.entries.dtype, dtype)
        != ((rows, n), a.dtype, a.dtype)
    ):
        raise ValueError(
            f"the epilogue reads {other.entries.dtype}{other.entries.shape}, but the "
            f"result is {dtype}{(rows, n)}; they must be equal, and as the rows "
            f"{a.dtype}"
        )
    reason = why_unsupported((k, n, part), group_tile, str(a.dtype))
    if reason is None and parts > 1:
        reason = why_not_joined(part)
    if reason:
        raise ValueError(
            f"no product of rows {a.shape} and weights {b.shape}: {reason}"
        )
    how = {"reads": reads, "part": n_of_part}
    if config is None:
        groups = math.comb(b.shape[expert_axis], parts)
        config = default_config(
            rows, n, group_tile, multiprocessors, groups=groups, **how
        )
    if reason := why_invalid(config, group_tile, **how):
        raise ValueError(f"no product of rows {a.shape} with {config}: {reason}")
    tiling = config.tiling(rows, n)
    clusters = min(multiprocessors // config.cluster, tiling.rows * tiling.columns)
    lookups = tile_expert.astype(jnp.int32), used_tiles.astype(jnp.int32).reshape(1)
    entries = (other.entries,) if other is not None else ()
    return launch(
        partial(
            _kernel,
            config=config,
            clusters=clusters,
            group_tile=group_tile,
            n=n,
            part=part,
            along_k=along_k,
            expert_axis=expert_axis,
            b_k_major=b_k_major,
            activation=activation,
            combine=None if other is None else other.combine,
        ),
        (a, b, *lookups, *entries),
        jax.ShapeDtypeStruct((rows, n), dtype),
        config=config,
        clusters=clusters,
        name=f"dense_rows_{rows}x{n}x{k}",
    )


def _kernel(
    a_gmem,
    b_gmem,
    tile_expert_gmem,
    used_tiles_gmem,
    *refs,
    config: Config,
    clusters: int,
    group_tile: int,
    n: int,
    part: int,
    along_k: bool,
    expert_axis: int,
    b_k_major: bool,
    activation: Callable[[jax.Array], jax.Array] | None,
    combine: Callable[[jax.Array, jax.Array], jax.Array] | None,
) -> None:
    *others, out_gmem = refs
    rows, k = a_gmem.shape
    tiling = config.tiling(rows, n)
    walk = ByExpert(
        tiling, tile_expert_gmem, used_tiles_gmem, group_tile, tokens_are_rows=True
    )
    dtype = jnp.dtype(out_gmem.dtype)
    line, tiles = LINE_BYTES // dtype.itemsize, epi_tiles(config, dtype)

    def a_tile(task, row, step):
        return pl.ds(row, config.tile_m), pl.ds(step * STEP, STEP)

    def b_tile(task, column, step):
        k, expert = step * STEP, task.expert
        if isinstance(expert, tuple) and along_k:
            expert, k = _of_part(expert, k, part)
        elif isinstance(expert, tuple):
            expert, column = _of_part(expert, column, part)
        of_k, columns = pl.ds(k, STEP), pl.ds(column, config.tile_n)
        index = [columns, of_k] if b_k_major else [of_k, columns]
        index.insert(expert_axis, expert)
        return tuple(index)

    def begin(task, origin, out_smem, filled) -> None:
        """Starts the copies of the entries that the epilogue reads. They arrive while
        the tile is multiplied."""
        # What was written from these slots has been read.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for slot, (row, column) in enumerate(tiles):
            place = pl.ds(origin[0] + row, ROWS), pl.ds(origin[1] + column, line)
            plgpu.copy_gmem_to_smem(others[0].at[place], out_smem.at[slot], filled)

    def write(task, acc, origin, out_smem, filled) -> None:
        if activation is not None:
            acc = activation(acc)
        if combine is None:
            acc = acc.astype(dtype)
        else:
            plgpu.barrier_wait(filled)
        for index, (row, column) in enumerate(tiles):
            part = acc[row : row + ROWS, column : column + line]
            slot = out_smem.at[pl.ds(index if combine else index % EPI_TILES, 1)]
            if combine is None:
                # A slot is free once the write before the last has read it.
                plgpu.wait_smem_to_gmem(EPI_TILES - 1, wait_read_only=True)
            else:
                entries = plgpu.load(out_smem.at[index], layout=plgpu.Layout.WGMMA)
                part = combine(part, entries.astype(jnp.float32)).astype(dtype)
            slot[0] = part
            plgpu.commit_smem()
            copy_epi_tile(slot, [out_gmem], (origin[0] + row, origin[1] + column))

    reads = combine is not None
    dense_kernel(
        Operand(a_gmem, a_tile, True),
        Operand(b_gmem, b_tile, b_k_major),
        walk=walk,
        config=config,
        clusters=clusters,
        steps=k // STEP,
        epilogue=Epilogue(
            begin if reads else None, write, _slots(config, reads), dtype
        ),
    )


def _of_part(experts: tuple, place, part: int) -> tuple:
    """Returns the expert that has a place in a row of several experts with `part`
    columns each, and the place among that expert's columns."""
    number = lax.div(place, part)
    expert = experts[0]
    for other, candidate in enumerate(experts[1:], 1):
        expert = jnp.where(number >= other, candidate, expert)
    last = jnp.minimum(number, len(experts) - 1)
    return expert, place - last * part
