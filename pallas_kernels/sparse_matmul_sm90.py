"""GEMM with a 2:4 operand on Hopper's sparse tensor cores.

    C = A B,    A (m, k) 2:4 along k,    B (k, n),    C (m, n)

A persistent kernel: every block walks over tiles of C. One warpgroup copies the
operands of the next steps into shared memory (TMA), the others multiply 64 or 128 rows
of A each and write their rows of C. The blocks of a cluster lie side by side along m
and load B together, a part each.
"""

from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, UInt32

from pallas_kernels.gemm_tasks import (
    ByExpert,
    EveryTile,
    OverTokensOfExpert,
    OwnTasks,
    Walk,
    tiling_of,
)
from pallas_kernels.result_pieces_sm90 import OUT_TRANSFORMS, write_piece
from pallas_kernels.row_parts import RowParts, Turns
from pallas_kernels.sparse_matmul_configs import (
    LINE_BYTES,
    ROWS,
    TILE_K,
    Config,
    Shape,
    default_config,
    why_invalid,
)
from pallas_kernels.wgmma_sp_sm90 import SWIZZLE_A, SWIZZLE_B, sparse_wgmma

Epilogue = Callable[..., None]
"""What becomes of a piece of C, 64 rows by `out_columns` in registers, instead of being
written: called with the shape, the piece, its own shared memory, the epilogue's inputs,
all outputs, and row and column of C where the piece begins."""


def sparse_matmul(
    values: Float[Array, "m half_k"],
    metadata: UInt32[Array, "row_blocks k_blocks 128"],
    b: Float[Array, "..."],
    *,
    b_k_major: bool = True,
    transpose_out: bool = True,
    activation: Callable[[jax.Array], jax.Array] | None = None,
    out_dtype: jnp.dtype | None = None,
    rows_apart: int = 0,
    config: Config | None = None,
    multiprocessors: int,
) -> Float[Array, "_ _"] | tuple[Float[Array, "_ _"], Float[Array, "_ _"]]:
    """`activation(A B)`, accumulated in float32 and rounded once.

    The sums are taken in one order, whatever the config and the other columns of B: the
    same inputs give the same bits.

    Args:
      values: A's kept values, bfloat16 or float16.
      metadata: where they stood, ceil(m / 64) by k / 64 blocks: see `packing`.
      b: (n, k) if `b_k_major`, else (k, n); or in segments (64, k / 64, n), row i of B
        being b[i % 64, i // 64]. The dtype of `values`.
      transpose_out: return C^T (n, m) instead of C (m, n).
      activation: applied element-wise to the float32 sums, for example relu squared.
      out_dtype: bfloat16, float16 or float32; None for the dtype of the operands.
      rows_apart: the product of the last rows of A, a multiple of 64 of them, comes as
        a second result: a few small GEMMs' worth in the same launch. 0: one result.
      config: None for `default_config`.
      multiprocessors: of the GPU that will run it.
    Raises:
      ValueError: shapes do not fit, or the config cannot run them; says why.
    """
    out_dtype = jnp.dtype(values.dtype if out_dtype is None else out_dtype)
    if out_dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        raise ValueError(f"out_dtype={out_dtype} is not bfloat16, float16 or float32")
    shape = _shape_of(values, metadata, b, b_k_major, transpose_out, out_dtype)
    if config is None:
        config = default_config(shape, multiprocessors)
    if reason := why_invalid(config, shape):
        raise ValueError(f"no 2:4 GEMM of {shape} with {config}: {reason}")
    if rows_apart % ROWS or shape.m % ROWS * rows_apart or rows_apart >= shape.m:
        raise ValueError(
            f"rows_apart={rows_apart} of {shape.m} rows of A: both must be multiples "
            f"of {ROWS}, and some rows left"
        )
    results = [shape.m - rows_apart] + [rows_apart] * bool(rows_apart)
    sizes = [(n, m) if transpose_out else (m, n) for m in results for n in [shape.n]]
    out = launch(
        shape,
        config,
        [jax.ShapeDtypeStruct(size, out_dtype) for size in sizes],
        values,
        metadata,
        b,
        activation=activation,
        multiprocessors=multiprocessors,
        first_apart=shape.m - rows_apart,
    )
    return (out[0], out[1]) if rows_apart else out[0]


def launch(
    shape: Shape,
    config: Config,
    out_type: list[jax.ShapeDtypeStruct],
    *operands: jax.Array,
    multiprocessors: int,
    activation: Callable[[jax.Array], jax.Array] | None = None,
    first_apart: int | None = None,
    epilogue: Epilogue | None = None,
    inputs: int = 0,
    parts: RowParts | None = None,
) -> Sequence[jax.Array]:
    """The kernel, on operands that fit: A's values and metadata, B, as many `inputs` of
    the epilogue, and what the walk of a grouped GEMM looks up; `parts` of the rows
    where it sums over those of experts."""
    tiling = tiling_of(shape, config)
    tasks = tiling.rows * tiling.columns * (parts.most if parts else 1)
    clusters = min(multiprocessors // config.cluster, tasks)
    return plgpu.kernel(
        partial(
            _kernel,
            shape=shape,
            config=config,
            clusters=clusters,
            activation=activation,
            first_apart=first_apart,
            epilogue=epilogue,
            inputs=inputs,
            parts=parts,
        ),
        out_type=out_type,
        grid=(clusters,),
        grid_names=("grid",),
        cluster=(config.cluster,),
        cluster_names=("cluster",),
        num_threads=config.warpgroups + 1,
        thread_name="warpgroup",
        kernel_name="grouped_" * bool(shape.group_tile)
        + f"sparse_matmul_{shape.m}x{shape.n}x{shape.k}"
        + "_to_packed" * shape.packed_out,
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup
        ),
    )(*operands)


def check_operands(values, metadata, b, k_of_b: int) -> None:
    """Raises ValueError where A, 2:4, and B do not fit."""
    m, k = values.shape[0], 2 * values.shape[1]
    blocks = (pl.cdiv(m, 64), pl.cdiv(k, 64), 128)
    if k != k_of_b or metadata.shape != blocks or values.dtype != b.dtype:
        raise ValueError(
            f"values {values.dtype}{values.shape} of A ({m}, {k}) need metadata "
            f"{blocks}, got {metadata.shape}, and B of k={k} and the same dtype, got "
            f"{b.dtype}{b.shape} with k={k_of_b}"
        )


def _shape_of(
    values, metadata, b, b_k_major: bool, transpose_out: bool, out_dtype: jnp.dtype
) -> Shape:
    m, k = values.shape[0], 2 * values.shape[1]
    if b.ndim == 3:
        b = jax.ShapeDtypeStruct((b.shape[0] * b.shape[1], b.shape[2]), b.dtype)
    n, k_of_b = b.shape if b_k_major else b.shape[::-1]
    check_operands(values, metadata, b, k_of_b)
    return Shape(
        m=m,
        n=n,
        k=k,
        dtype=str(values.dtype),
        b_k_major=b_k_major,
        transpose_out=transpose_out,
        float32_out=out_dtype == jnp.float32,
    )


def _kernel(
    values_gmem,
    metadata_gmem,
    b_gmem,
    *refs,
    shape: Shape,
    config: Config,
    clusters: int,
    activation,
    first_apart: int | None,
    epilogue: Epilogue | None,
    inputs: int,
    parts: RowParts | None,
) -> None:
    inputs_gmem, refs = refs[:inputs], refs[inputs:]
    walk, turns, out_gmem = _walk(shape, config, parts, refs)
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
        """A tile's; row and column of this block's part of C; pairs along k."""
        task, row, column = own_tasks.task(tile)
        return task, row, column, all_pairs if task.steps is None else task.steps

    # Slots are taken in turn, by the number of pairs that were loaded before.
    def slot_of_a(before):
        return lax.rem(before, config.pairs)

    def slot_of_b(before, half):
        return lax.rem(2 * before + half, stages)

    def load(a_smem, b_smem, out_smem, a_slots, b_slots) -> None:
        """The memory warpgroup: fills slots as they become empty."""
        plgpu.set_max_registers(40, action="decrease")
        values_smem, metadata_smem = a_smem

        def load_tile(tile, before):
            task, row, column, pairs = task_of(tile)
            if shape.group_tile and shape.transpose_out and not shape.sums_over_tokens:
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
        """A compute warpgroup: its rows of every tile."""
        plgpu.set_max_registers(232, action="increase")
        values_smem, metadata_smem = a_smem
        for (_, empty), count in ((a_slots, config.pairs), (b_slots, stages)):
            for slot in range(count):
                plgpu.barrier_arrive(empty.at[slot])
        multiply_add = [_multiply_add(shape, config, half) for half in range(2)]
        pieces = config.row_blocks * (tile_n // config.out_columns)

        def multiply_tile(tile, before):
            task, row, column, pairs = task_of(tile)
            row = row + warpgroup * own_rows

            def multiply_pair(index, sums):
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
                    sums = multiply_add[half](sums, values, b_smem.at[b_slot], *words)
                    plgpu.barrier_arrive(b_slots[1].at[b_slot])
                plgpu.barrier_arrive(a_slots[1].at[slot])
                return sums

            zeros = plgpu.layout_cast(
                jnp.zeros((own_rows, tile_n), jnp.float32), plgpu.Layout.WGMMA
            )
            sums = lax.fori_loop(0, pairs, multiply_pair, zeros)
            if activation is not None:
                sums = activation(sums)
            sums = sums.astype(out_gmem[0].dtype)
            turns.wait(task)
            for index in range(pieces):
                block, part = divmod(index, tile_n // config.out_columns)
                rows = block * ROWS
                offset = part * config.out_columns
                own = sums[rows : rows + ROWS, offset : offset + config.out_columns]
                origin = row + rows, column + offset
                piece = out_smem.at[
                    warpgroup, lax.rem(tile * pieces + index, config.out_slots)
                ]
                if epilogue is not None:
                    epilogue(shape, own, piece, inputs_gmem, out_gmem, origin)
                    continue
                # A slot is free once the write `out_slots` before this has read it.
                plgpu.wait_smem_to_gmem(config.out_slots - 1, wait_read_only=True)
                write_piece(
                    own,
                    piece,
                    out_gmem,
                    origin,
                    expert=task.expert if shape.sums_over_tokens else None,
                    expert_axis=int(shape.transpose_out),
                    first_apart=first_apart,
                    transpose=shape.transpose_out,
                    add=turns.adds(task),
                )
            turns.done(task)
            return before + pairs

        lax.fori_loop(0, own_tiles, multiply_tile, 0)
        plgpu.wait_smem_to_gmem(0)

    barrier = plgpu.Barrier
    if config.cluster > 1:
        barrier = partial(plgpu.ClusterBarrier, collective_axes=("cluster",))
    b_tile = (tile_n, TILE_K) if shape.b_k_major else (TILE_K, tile_n)
    # A piece of C: columns of 128 bytes side by side.
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
) -> tuple[Walk, Turns, Sequence]:
    """The order of the tiles; and the results, which follow what it looks up."""
    tiling = tiling_of(shape, config)
    if not shape.group_tile:
        return EveryTile(tiling), Turns(), refs
    if parts is not None:
        ends, *out = refs
        tiles = tiling.rows * tiling.columns
        turns = Turns.of(parts, tiles, config.cluster, config.warpgroups)
        pairs = shape.group_tile // (2 * TILE_K)
        return OverTokensOfExpert(tiling, parts, ends, pairs), turns, out
    tile_expert, used_tiles, *out = refs
    walk = ByExpert(
        tiling, tile_expert, used_tiles, shape.group_tile, not shape.transpose_out
    )
    return walk, Turns(), out


# As `OUT_TRANSFORMS`; `_by_eight` gives the bytes the shape that wgmma knows.
_VALUES_TRANSFORMS = (plgpu.SwizzleTransform(SWIZZLE_A),)
_WORDS_LAYOUT = plgpu.Layout.WG_STRIDED((128,), vec_size=1)


def _b_transforms(b_k_major: bool) -> tuple:
    swizzle = plgpu.SwizzleTransform(SWIZZLE_B)
    return (swizzle,) if b_k_major else (plgpu.TilingTransform((8, 64)), swizzle)


def _by_eight(ref):
    """(rows, columns) as (rows / 8, 1, 8, columns)."""
    return utils.memref_unfold(ref, 0, (None, 1, 8))


def _reads_beyond(shape: Shape, config: Config, half: int) -> bool:
    """Whether a half of a pair may be copied from beyond A: past its last rows, or past
    k where that is half a pair too short. What is there is zero."""
    tail = half == 1 and shape.k % (2 * TILE_K) != 0
    return tail or shape.m % (config.tile_m * config.cluster) != 0


def _multiply_add(shape: Shape, config: Config, half: int):
    """sums + A's rows of a warpgroup @ B's tile, as a function of Pallas values."""

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
    def run(_, sums, values, b, *words):
        b = _by_eight(b) if shape.b_k_major else b
        return sparse_wgmma(
            sums,
            _by_eight(values),
            words,
            b,
            half=half,
            b_k_major=shape.b_k_major,
            beyond=_reads_beyond(shape, config, half),
        )

    return run
