"""GEMM with a 2:4 operand on Hopper's sparse tensor cores.

    C = A B,    A (m, k) 2:4 along k,    B (k, n),    C (m, n)

Checks the operands and launches the kernel, `gemm/sparse_kernel.py`, for this GEMM and
for those that `grouped_matmul` and `matmul_to_packed` make of it.
"""

from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, UInt32

from pallas_kernels.sm90.gemm.sparse_kernel import Epilogue, sparse_kernel
from pallas_kernels.sm90.gemm.split_k import RowParts
from pallas_kernels.sm90.gemm.tile_scheduler import tiling_of
from pallas_kernels.sm90.sparse_matmul_configs import (
    ROWS,
    Config,
    Mode,
    Shape,
    default_config,
    why_invalid,
)


def sparse_matmul(
    values: Float[Array, "m half_k"],
    metadata: UInt32[Array, "row_blocks k_blocks 128"],
    b: Float[Array, "..."],
    *,
    mode: Mode = "sparse_weight",
    b_k_major: bool = True,
    transpose_out: bool = True,
    activation: Callable[[jax.Array], jax.Array] | None = None,
    out_dtype: jnp.dtype | None = None,
    split_rows: int = 0,
    config: Config | None = None,
    multiprocessors: int,
) -> Float[Array, "_ _"] | tuple[Float[Array, "_ _"], Float[Array, "_ _"]]:
    """Returns `activation(A B)`, accumulated in float32 and rounded once.

    The sums are taken in one order, whatever the config and the other columns of B: the
    same inputs give the same bits.

    Args:
      values: A's kept values, bfloat16 or float16.
      metadata: the positions of these values, ceil(m / 64) by k / 64 blocks, as
        `sparsejax.sparsity.packed` orders them.
      b: (n, k) if `b_k_major`, else (k, n); or in segments (64, k / 64, n), row i of B
        being b[i % 64, i // 64]. The dtype of `values`.
      transpose_out: return C^T (n, m) instead of C (m, n).
      activation: applied element-wise to the float32 accumulators, for example relu
        squared; None: nothing is.
      out_dtype: bfloat16, float16 or float32; None for the dtype of the operands.
      mode: what A is, see `Mode`: by it, too, configs are looked up.
      split_rows: how many of A's last rows, a multiple of 64, have their product in a
        second result, in the same launch. 0: there is one result.
      config: how the work is cut up; None for `default_config`.
      multiprocessors: their number in the GPU that will run the kernel.
    Raises:
      ValueError: shapes do not fit, or the config cannot run them; says why.
    """
    out_dtype = jnp.dtype(values.dtype if out_dtype is None else out_dtype)
    if out_dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        raise ValueError(f"out_dtype={out_dtype} is not bfloat16, float16 or float32")
    shape = _shape_of(values, metadata, b, mode, b_k_major, transpose_out, out_dtype)
    if config is None:
        config = default_config(shape, multiprocessors)
    if reason := why_invalid(config, shape):
        raise ValueError(f"no 2:4 GEMM of {shape} with {config}: {reason}")
    if split_rows % ROWS or shape.m % ROWS * split_rows or split_rows >= shape.m:
        raise ValueError(
            f"split_rows={split_rows} of {shape.m} rows of A: both must be multiples "
            f"of {ROWS}, and some rows left"
        )
    results = [shape.m - split_rows] + [split_rows] * bool(split_rows)
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
        split_row=shape.m - split_rows,
    )
    return (out[0], out[1]) if split_rows else out[0]


def launch(
    shape: Shape,
    config: Config,
    out_type: list[jax.ShapeDtypeStruct],
    *operands: jax.Array,
    multiprocessors: int,
    activation: Callable[[jax.Array], jax.Array] | None = None,
    split_row: int | None = None,
    epilogue: Epilogue | None = None,
    inputs: int = 0,
    parts: RowParts | None = None,
) -> Sequence[jax.Array]:
    """Launches the kernel on operands that fit, and returns its results.

    Args:
      out_type: the results: C; C in two parts; or what the epilogue writes.
      operands: A's values and metadata, B, the epilogue's inputs, and what a grouped
        GEMM looks up: each group tile's expert and the number of used group tiles, or
        for weight gradients of experts where each expert's group tiles end.
      split_row: the first row of C that belongs to the second of two results.
      epilogue: what becomes of C; None: it is written.
      inputs: how many inputs the epilogue has.
      parts: how the rows of experts are cut up; given for their weight gradients, and
        for nothing else.
    """
    tiling = tiling_of(shape, config)
    tasks = tiling.rows * tiling.columns * (parts.most if parts else 1)
    clusters = min(multiprocessors // config.cluster, tasks)
    return plgpu.kernel(
        partial(
            sparse_kernel,
            shape=shape,
            config=config,
            clusters=clusters,
            activation=activation,
            split_row=split_row,
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
    """Raises ValueError where the 2:4 operand A and B do not fit each other."""
    m, k = values.shape[0], 2 * values.shape[1]
    blocks = (pl.cdiv(m, 64), pl.cdiv(k, 64), 128)
    if k != k_of_b or metadata.shape != blocks or values.dtype != b.dtype:
        raise ValueError(
            f"values {values.dtype}{values.shape} of A ({m}, {k}) need metadata "
            f"{blocks}, got {metadata.shape}, and B of k={k} and the same dtype, got "
            f"{b.dtype}{b.shape} with k={k_of_b}"
        )


def _shape_of(
    values,
    metadata,
    b,
    mode: Mode,
    b_k_major: bool,
    transpose_out: bool,
    out_dtype: jnp.dtype,
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
        mode=mode,
        dtype=str(values.dtype),
        b_k_major=b_k_major,
        transpose_out=transpose_out,
        float32_out=out_dtype == jnp.float32,
    )
