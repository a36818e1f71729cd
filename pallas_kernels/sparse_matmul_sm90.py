"""GEMM with a 2:4 operand on Hopper's sparse tensor cores.

    C = A B,    A (m, k) 2:4 along k,    B (k, n),    C (m, n)

A persistent kernel: every block walks over tiles of C. One warpgroup copies the
operands of the next steps into shared memory (TMA), the others multiply 64 rows of A
each and write their rows of C. The blocks of a cluster lie side by side along m and
load B together, a part each.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, UInt32

from pallas_kernels.wgmma_sp_sm90 import SWIZZLE_A, SWIZZLE_B, sparse_wgmma

TILE_K = 64
"""Columns of A in one step: what a word of metadata per thread covers."""

SHARED_MEMORY_BYTES = 227 << 10
"""What a block may use on Hopper."""

_ROWS = 64  # of A, per warpgroup


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The static facts of one GEMM."""

    m: int
    n: int
    k: int
    dtype: str = "bfloat16"
    b_k_major: bool = True
    """Whether B is stored (n, k), else (k, n)."""
    transpose_out: bool = True
    """Whether C is stored (n, m), else (m, n)."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """How the work is cut up; what the tuner searches."""

    tile_n: int = 256
    """Columns of B per tile."""
    warpgroups: int = 2
    """That multiply; a tile has 64 rows of A for each."""
    stages: int = 4
    """Steps along k whose operands are in shared memory at a time."""
    cluster: int = 2
    """Blocks along m that load B together."""
    columns_first: bool = True
    """Whether neighbouring tiles follow along n, else along m."""
    width: int = 8
    """Tiles of the other axis that are visited together, so that both operands stay in
    the L2 cache."""
    out_columns: int = 64
    """Columns of C written at a time."""
    out_slots: int = 2
    """Writes of C under way at a time."""

    @property
    def tile_m(self) -> int:
        """Rows of A per block."""
        return _ROWS * self.warpgroups

    @property
    def shared_memory_bytes(self) -> int:
        """Operands of all stages, pieces of C, barriers."""
        words = 128 * self.warpgroups
        stage = self.tile_m * TILE_K + 4 * words + 2 * self.tile_n * TILE_K
        pieces = 2 * self.warpgroups * self.out_slots * self.out_columns * _ROWS
        return self.stages * (stage + 16) + pieces


def why_unsupported(shape: Shape) -> str | None:
    """Why no config runs a GEMM, or None. The gate of every caller."""
    if shape.dtype not in ("bfloat16", "float16"):
        return f"multiplies bfloat16 and float16, not {shape.dtype}"
    if shape.k % TILE_K or not shape.k:
        return f"k={shape.k} is not a multiple of {TILE_K}"
    if not shape.b_k_major and shape.n % 64:
        return f"n={shape.n} is not a multiple of 64, required of B stored (k, n)"
    name, size = ("m", shape.m) if shape.transpose_out else ("n", shape.n)
    if size % 64 or not size:
        return f"{name}={size}, the rows of C in memory, is not a multiple of 64"
    return None


def why_invalid(config: Config, shape: Shape) -> str | None:
    """Why `config` cannot run `shape`, or None: for the gate, the heuristic and the
    tuner alike."""
    if reason := why_unsupported(shape):
        return reason
    if config.tile_n not in (64, 128, 192, 256):
        return f"tile_n={config.tile_n} is not one of 64, 128, 192, 256"
    if config.warpgroups not in (1, 2):
        # Three would leave 128 registers per thread, all of them sums.
        return f"warpgroups={config.warpgroups} is not 1 or 2"
    if config.cluster not in (1, 2):
        # Larger ones leave blocks idle: 30 clusters of four fit 132 multiprocessors.
        return f"cluster={config.cluster} is not 1 or 2"
    if config.out_columns not in (32, 64) or config.tile_n % config.out_columns:
        return f"out_columns={config.out_columns} is not 32 or 64"
    if not shape.transpose_out and config.out_columns != 64:
        return (
            f"out_columns={config.out_columns} is not 64, required of C stored (m, n)"
        )
    if min(config.stages, config.out_slots, config.width) < 1:
        return "stages, out_slots and width must be positive"
    if config.shared_memory_bytes > SHARED_MEMORY_BYTES:
        return (
            f"needs {config.shared_memory_bytes} bytes of shared memory of "
            f"{SHARED_MEMORY_BYTES}"
        )
    return None


def default_config(shape: Shape) -> Config:
    """The heuristic for shapes that were not tuned.

    The largest tile that B's columns fill; a small GEMM gets smaller ones, so that
    every multiprocessor has work.
    """
    tile_n = next((size for size in (64, 128) if shape.n <= size), 256)
    while tile_n > 64 and _tiles(shape, 128, tile_n) < 132:
        tile_n //= 2
    cluster = 2 if shape.m > 128 else 1
    return Config(tile_n=tile_n, cluster=cluster)


def _tiles(shape: Shape, tile_m: int, tile_n: int) -> int:
    return pl.cdiv(shape.m, tile_m) * pl.cdiv(shape.n, tile_n)


def sparse_matmul(
    values: Float[Array, "m half_k"],
    metadata: UInt32[Array, "row_blocks k_blocks 128"],
    b: Float[Array, "_ _"],
    *,
    b_k_major: bool = True,
    transpose_out: bool = True,
    activation: Callable[[jax.Array], jax.Array] | None = None,
    out_dtype: jnp.dtype | None = None,
    config: Config | None = None,
    multiprocessors: int = 132,
) -> Float[Array, "_ _"]:
    """`activation(A B)`, accumulated in float32 and rounded once.

    The sums are taken in one order, whatever the config and the other columns of B: the
    same inputs give the same bits.

    Args:
      values: A's kept values, bfloat16 or float16.
      metadata: where they stood, ceil(m / 64) by k / 64 blocks: see `packing`.
      b: (n, k) if `b_k_major`, else (k, n); the dtype of `values`.
      transpose_out: return C^T (n, m) instead of C (m, n).
      activation: applied element-wise to the float32 sums, for example relu squared.
      out_dtype: bfloat16 or float16; None for the dtype of the operands.
      config: None for `default_config`.
      multiprocessors: of the GPU that will run it.
    Raises:
      ValueError: shapes do not fit, or the config cannot run them; says why.
    """
    shape = _shape_of(values, metadata, b, b_k_major, transpose_out)
    out_dtype = jnp.dtype(values.dtype if out_dtype is None else out_dtype)
    if out_dtype not in (jnp.bfloat16, jnp.float16):
        raise ValueError(f"out_dtype={out_dtype} is not bfloat16 or float16")
    config = default_config(shape) if config is None else config
    if reason := why_invalid(config, shape):
        raise ValueError(f"no 2:4 GEMM of {shape} with {config}: {reason}")
    tiles_m = pl.cdiv(shape.m, config.tile_m * config.cluster)
    tiles_n = pl.cdiv(shape.n, config.tile_n)
    clusters = min(multiprocessors // config.cluster, tiles_m * tiles_n)
    kernel = partial(
        _kernel,
        shape=shape,
        config=config,
        tiles=(tiles_m, tiles_n),
        clusters=clusters,
        activation=activation,
    )
    rows, columns = (shape.n, shape.m) if transpose_out else (shape.m, shape.n)
    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((rows, columns), out_dtype),
        grid=(clusters,),
        grid_names=("grid",),
        cluster=(config.cluster,),
        cluster_names=("cluster",),
        num_threads=config.warpgroups + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup
        ),
    )(values, metadata, b)


def _shape_of(values, metadata, b, b_k_major: bool, transpose_out: bool) -> Shape:
    m, k = values.shape[0], 2 * values.shape[1]
    n, k_of_b = b.shape if b_k_major else b.shape[::-1]
    blocks = (pl.cdiv(m, 64), pl.cdiv(k, 64), 128)
    if k != k_of_b or metadata.shape != blocks or values.dtype != b.dtype:
        raise ValueError(
            f"values {values.dtype}{values.shape} of A (m, {k}) need metadata {blocks},"
            f" got {metadata.shape}, and B of k={k} and the same dtype, got "
            f"{b.dtype}{b.shape} with k={k_of_b}"
        )
    return Shape(
        m=m,
        n=n,
        k=k,
        dtype=str(values.dtype),
        b_k_major=b_k_major,
        transpose_out=transpose_out,
    )


def _kernel(
    values_gmem,
    metadata_gmem,
    b_gmem,
    out_gmem,
    *,
    shape: Shape,
    config: Config,
    tiles: tuple[int, int],
    clusters: int,
    activation,
) -> None:
    steps = shape.k // TILE_K
    tile_n, stages = config.tile_n, config.stages
    warpgroup = lax.axis_index("warpgroup")
    first = lax.axis_index("grid")
    own_tiles = (tiles[0] * tiles[1] - first + clusters - 1) // clusters
    collective = "cluster" if config.cluster > 1 else None

    def origin(tile):
        """Of this block's part of a tile: row of A, column of B."""
        row, column = plgpu.planar_snake(
            first + tile * clusters, tiles, int(config.columns_first), config.width
        )
        row = row * config.cluster + lax.axis_index("cluster")
        return row * config.tile_m, column * tile_n

    def slot_of(tile, step):
        return lax.rem(tile * steps + step, stages)

    def load(values_smem, metadata_smem, b_smem, out_smem, full, empty) -> None:
        """The memory warpgroup: fills slots as they become empty."""
        plgpu.set_max_registers(40, action="decrease")

        def load_tile(tile, carry):
            row, column = origin(tile)
            rows = pl.ds(row, config.tile_m)
            blocks = pl.ds(row // _ROWS, config.warpgroups)
            columns = pl.ds(column, tile_n)

            def load_step(step, carry):
                slot = slot_of(tile, step)
                along_k = pl.ds(step * TILE_K, TILE_K)
                kept = pl.ds(step * (TILE_K // 2), TILE_K // 2)
                b_tile = (columns, along_k) if shape.b_k_major else (along_k, columns)
                copy = partial(plgpu.copy_gmem_to_smem, barrier=full.at[slot])
                plgpu.barrier_wait(empty.at[slot])
                copy(
                    b_gmem.at[b_tile],
                    b_smem.at[slot],
                    collective_axes=collective,
                )
                copy(values_gmem.at[rows, kept], values_smem.at[slot])
                copy(metadata_gmem.at[blocks, pl.ds(step, 1)], metadata_smem.at[slot])
                return carry

            return lax.fori_loop(0, steps, load_step, carry)

        lax.fori_loop(0, own_tiles, load_tile, None)

        # A block must not end while others of its cluster still signal to it.
        def drain(step, carry):
            plgpu.barrier_wait(empty.at[slot_of(own_tiles, step)])
            return carry

        lax.fori_loop(0, stages, drain, None)

    def multiply(values_smem, metadata_smem, b_smem, out_smem, full, empty) -> None:
        """A compute warpgroup: 64 rows of every tile."""
        plgpu.set_max_registers(232, action="increase")
        for slot in range(stages):
            plgpu.barrier_arrive(empty.at[slot])
        pieces = tile_n // config.out_columns

        def multiply_tile(tile, carry):
            row, column = origin(tile)
            row = row + warpgroup * _ROWS

            def multiply_step(step, sums):
                slot = slot_of(tile, step)
                plgpu.barrier_wait(full.at[slot])
                words = plgpu.load(
                    metadata_smem.at[slot, warpgroup, 0], layout=_WORDS_LAYOUT
                )
                own_rows = pl.ds(warpgroup * _ROWS, _ROWS)
                sums = _multiply_add(shape, tile_n)(
                    sums, values_smem.at[slot, own_rows], words, b_smem.at[slot]
                )
                plgpu.barrier_arrive(empty.at[slot])
                return sums

            zeros = plgpu.layout_cast(
                jnp.zeros((_ROWS, tile_n), jnp.float32), plgpu.Layout.WGMMA
            )
            sums = lax.fori_loop(0, steps, multiply_step, zeros)
            if activation is not None:
                sums = activation(sums)
            sums = sums.astype(out_gmem.dtype)
            for index in range(pieces):
                offset = index * config.out_columns
                piece = out_smem.at[
                    warpgroup, lax.rem(tile * pieces + index, config.out_slots)
                ]
                # A slot is free once the write `out_slots` before this has read it.
                plgpu.wait_smem_to_gmem(config.out_slots - 1, wait_read_only=True)
                _write_piece(
                    sums[:, offset : offset + config.out_columns],
                    piece,
                    out_gmem,
                    (row, column + offset),
                    shape.transpose_out,
                )
            return carry

        lax.fori_loop(0, own_tiles, multiply_tile, None)
        plgpu.wait_smem_to_gmem(0)

    barrier = plgpu.Barrier
    if config.cluster > 1:
        barrier = partial(plgpu.ClusterBarrier, collective_axes=("cluster",))
    b_tile = (tile_n, TILE_K) if shape.b_k_major else (TILE_K, tile_n)
    out_tile = (_ROWS, config.out_columns)
    pl.run_scoped(
        lambda *scratch: lax.cond(
            warpgroup < config.warpgroups,
            lambda: multiply(*scratch),
            lambda: load(*scratch),
        ),
        plgpu.SMEM(
            (stages, config.tile_m, TILE_K // 2),
            values_gmem.dtype,
            transforms=_VALUES_TRANSFORMS,
        ),
        plgpu.SMEM((stages, config.warpgroups, 1, 128), jnp.uint32),
        plgpu.SMEM(
            (stages, *b_tile), b_gmem.dtype, transforms=_b_transforms(shape.b_k_major)
        ),
        plgpu.SMEM(
            (
                config.warpgroups,
                config.out_slots,
                *(out_tile[::-1] if shape.transpose_out else out_tile),
            ),
            out_gmem.dtype,
            transforms=_OUT_TRANSFORMS,
        ),
        plgpu.Barrier(num_arrivals=3, num_barriers=stages),
        barrier(num_arrivals=config.warpgroups, num_barriers=stages),
        collective_axes="warpgroup",
    )


# Rows are not tiled by eight in global memory, where their number is any. Shared memory
# holds the same bytes either way, and `_by_eight` gives it the shape that wgmma knows.
_VALUES_TRANSFORMS = (
    plgpu.TilingTransform((SWIZZLE_A // 2,)),
    plgpu.SwizzleTransform(SWIZZLE_A),
)
_OUT_TRANSFORMS = (plgpu.TilingTransform((64,)), plgpu.SwizzleTransform(128))
_WORDS_LAYOUT = plgpu.Layout.WG_STRIDED((128,), vec_size=1)


def _b_transforms(b_k_major: bool) -> tuple:
    tiling = (64,) if b_k_major else (8, 64)
    return plgpu.TilingTransform(tiling), plgpu.SwizzleTransform(SWIZZLE_B)


def _by_eight(ref):
    """(rows, 1, columns) as (rows / 8, 1, 8, columns)."""
    return utils.memref_transpose(utils.memref_unfold(ref, 0, (None, 8)), (0, 2, 1, 3))


def _multiply_add(shape: Shape, tile_n: int):
    """sums (64, tile_n) + A's 64 rows @ B's tile, as a function of Pallas values."""

    @plgpu.inline_mgpu(
        arg_types=(
            plgpu.Layout.WGMMA,
            plgpu.RefType(_VALUES_TRANSFORMS),
            _WORDS_LAYOUT,
            plgpu.RefType(_b_transforms(shape.b_k_major)),
        ),
        return_type=plgpu.ShapeDtypeStruct(
            (_ROWS, tile_n), jnp.float32, layout=plgpu.Layout.WGMMA
        ),
    )
    def run(_, sums, values, words, b):
        b = _by_eight(b) if shape.b_k_major else b
        return sparse_wgmma(
            sums, _by_eight(values), words, b, b_k_major=shape.b_k_major
        )

    return run


def _write_piece(piece, smem, out_gmem, origin, transpose: bool) -> None:
    """Registers to shared memory to C; the second half is left under way."""
    layout = plgpu.Layout.WGMMA_TRANSPOSED if transpose else plgpu.Layout.WGMMA

    @plgpu.inline_mgpu(arg_types=(layout, plgpu.RefType(_OUT_TRANSFORMS)))
    def store(_, piece, ref):
        ref = _by_eight(ref)
        if transpose:
            ref = utils.memref_transpose(ref, (1, 0, 3, 2))
        piece.store_tiled(ref, swizzle=128)

    rows, columns = (
        pl.ds(start, size) for start, size in zip(origin, piece.shape, strict=True)
    )
    store(plgpu.layout_cast(piece, layout), smem)
    plgpu.commit_smem()
    target = (columns, rows) if transpose else (rows, columns)
    plgpu.copy_smem_to_gmem(smem, out_gmem.at[target])
