"""2:4 pruning and packing for Hopper's sparse tensor cores, one read of the matrix.

Of every four consecutive entries along k, the two of largest magnitude stay (ties: the
lower index; NaN: largest), shrunk by the soft threshold where asked:

    S(w)_i = sign(w_i) (|w_i| - t),    t = the third largest |w| of the group

A warpgroup packs 64 rows by 64 entries along k. Memory-bound: 4 bytes read and 9 / 8
written per float32 entry.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm
from jaxtyping import Array, Float, UInt32

from pallas_kernels.sm90 import mosaic_internals
from pallas_kernels.sm90.threads import prune_2to4
from pallas_kernels.sm90.threads.prune_2to4 import TILE


def why_unsupported(rows: int, k: int, dtype: str, out_dtype: str) -> str | None:
    """Returns why a matrix (rows, k) cannot be packed, or None where it can."""
    for name, size in (("rows", rows), ("k", k)):
        if size % TILE or not size:
            return f"{name}={size} is not a multiple of {TILE}"
    if dtype not in ("float32", "bfloat16", "float16"):
        return f"packs float32, bfloat16 and float16, not {dtype}"
    if out_dtype not in ("bfloat16", "float16"):
        return f"packs into bfloat16 and float16, not {out_dtype}"
    return None


def prune_weight(
    w: Float[Array, "layers _ _"],
    scales: Float[Array, " layers"] | None,
    *,
    k_major: bool,
    dtype: jnp.dtype,
) -> tuple[
    Float[Array, "layers rows half_k"], UInt32[Array, "layers row_blocks k_blocks 128"]
]:
    """Returns the kept values of every matrix and their positions, in the order of
    `sparsejax.sparsity.packed`.

    Args:
      w: (layers, rows, k) if `k_major`, else (layers, k, rows).
      scales: beta of each matrix, where the values are beta S(w); None: the values are
        those of w, without a threshold.
      dtype: dtype of the values, bfloat16 or float16, rounded to nearest even.
    Raises:
      ValueError: a size is not a multiple of 64, or a dtype is not supported.
    """
    layers, rows, k = w.shape if k_major else (w.shape[0], w.shape[2], w.shape[1])
    dtype = jnp.dtype(dtype)
    if reason := why_unsupported(rows, k, str(w.dtype), str(dtype)):
        raise ValueError(f"w {w.dtype}{w.shape} cannot be packed: {reason}")
    operands = (w,) if scales is None else (w, scales.astype(jnp.float32))
    values, metadata = plgpu.kernel(
        partial(_kernel, k_major=k_major),
        out_type=(
            jax.ShapeDtypeStruct((layers, rows, k // 2), dtype),
            jax.ShapeDtypeStruct((layers, rows // TILE, k // TILE, 128), jnp.uint32),
        ),
        grid=(layers, rows // TILE, k // TILE),
        grid_names=("layer", "row_block", "k_block"),
        kernel_name="pack_weight",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup
        ),
    )(*operands)
    return values, metadata


def _kernel(w_gmem, *refs, k_major: bool) -> None:
    *scales, values_gmem, metadata_gmem = refs
    layer, row_block, k_block = (
        lax.axis_index(name) for name in ("layer", "row_block", "k_block")
    )
    rows, along_k = pl.ds(row_block * TILE, TILE), pl.ds(k_block * TILE, TILE)
    kept = pl.ds(k_block * (TILE // 2), TILE // 2)
    tile = w_gmem.at[(layer, rows, along_k) if k_major else (layer, along_k, rows)]
    pack = _pack_rows if k_major else _pack_columns

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * (3 + len(scales)))
    def run(_, w, values, metadata, *scale):
        beta = None
        if scale:
            beta = llvm.load(ir.F32Type.get(), mosaic_internals.pointer(scale[0]))
        pack(w, values, metadata, beta)

    run(
        tile,
        values_gmem.at[layer, rows, kept],
        metadata_gmem.at[layer, row_block, k_block],
        *(ref.at[pl.ds(layer, 1)] for ref in scales),
    )


def _pack_rows(w, values, metadata, beta) -> None:
    """Packs the part of one thread of a k-major tile: four groups of each of the rows r
    and r + 8, whose positions its word of metadata holds."""
    thread = prune_2to4.thread()
    row, columns = prune_2to4.metadata_row(thread), prune_2to4.metadata_columns(thread)
    word = prune_2to4.constant(0)
    for half in range(2):
        r = arith.addi(row, prune_2to4.constant(8 * half))
        pairs = []
        for group in range(4):
            column = arith.addi(columns, prune_2to4.constant(4 * group))
            entries = prune_2to4.load(w, r, column, 4)
            pair, positions = _prune(entries, beta, prune_2to4.element_type(values))
            pairs.append(pair)
            word = arith.ori(word, prune_2to4.shifted(positions, 4 * group + 16 * half))
        prune_2to4.store(values, r, arith.divui(columns, prune_2to4.constant(2)), pairs)
    prune_2to4.store(metadata, None, thread, [word])


def _pack_columns(w, values, metadata, beta) -> None:
    """Packs the part of one thread of a tile stored (k, rows): half of the 16 groups of
    one row.

    Neighbouring threads read neighbouring rows. The word of rows r and r + 8 is put
    together from two threads.
    """
    thread = prune_2to4.thread()
    row = arith.remui(thread, prune_2to4.constant(TILE))
    side = arith.divui(thread, prune_2to4.constant(TILE))  # which 32 entries along k
    halves = []
    for quarter in range(2):
        pairs, half = [], prune_2to4.constant(0)
        for group in range(4):
            start = arith.addi(
                arith.muli(side, prune_2to4.constant(32)),
                prune_2to4.constant(16 * quarter + 4 * group),
            )
            entries = [
                prune_2to4.load(w, arith.addi(start, prune_2to4.constant(i)), row, 1)[0]
                for i in range(4)
            ]
            pair, positions = _prune(entries, beta, prune_2to4.element_type(values))
            pairs.append(pair)
            half = arith.ori(half, prune_2to4.shifted(positions, 4 * group))
        column = arith.addi(
            arith.muli(side, prune_2to4.constant(16)), prune_2to4.constant(8 * quarter)
        )
        prune_2to4.store(values, row, column, pairs)
        halves.append(half)
    # Rows r and r + 8 are eight threads apart: the first writes the even quarter.
    upper = arith.andi(arith.shrui(row, prune_2to4.constant(3)), prune_2to4.constant(1))
    is_upper = arith.cmpi(arith.CmpIPredicate.eq, upper, prune_2to4.constant(1))
    own = arith.select(is_upper, halves[1], halves[0])
    given = arith.select(is_upper, halves[0], halves[1])
    received = mosaic_internals.shuffled(given, 8)
    low = arith.select(is_upper, received, own)
    high = arith.select(is_upper, own, received)
    word = arith.ori(low, prune_2to4.shifted(high, 16))
    quarter = arith.addi(arith.muli(side, prune_2to4.constant(2)), upper)
    index = prune_2to4.metadata_index(row, quarter)
    prune_2to4.store(metadata, None, index, [word])


def _prune(entries, beta, dtype) -> tuple[ir.Value, ir.Value]:
    """Returns the kept pair of a group of four as 16-bit halves of a word, and its
    positions as four bits."""
    f32 = ir.F32Type.get()
    bits = [prune_2to4.bits_of(prune_2to4.to_float32(entry)) for entry in entries]
    magnitudes = [arith.andi(b, prune_2to4.constant(0x7FFFFFFF)) for b in bits]
    kept = prune_2to4.keep_two([prune_2to4.magnitude_key(b) for b in bits])
    threshold = magnitudes[3]
    for rank, magnitude in zip(kept.ranks[:3], magnitudes[:3], strict=True):
        is_third = arith.cmpi(arith.CmpIPredicate.eq, rank, prune_2to4.constant(2))
        threshold = arith.select(is_third, magnitude, threshold)
    halves = []
    for kept_bits in (kept.first(bits), kept.second(bits)):
        value = arith.bitcast(f32, kept_bits)
        if beta is not None:
            sign = arith.andi(kept_bits, prune_2to4.constant(-(1 << 31)))
            signed = arith.bitcast(f32, arith.ori(sign, threshold))
            value = arith.mulf(beta, arith.subf(value, signed))
        halves.append(prune_2to4.rounded_bits(value, dtype))
    return arith.ori(halves[0], prune_2to4.shifted(halves[1], 16)), kept.positions()
