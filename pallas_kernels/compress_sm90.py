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
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm
from jaxtyping import Array, Float, UInt32

from pallas_kernels import group_of_four as four
from pallas_kernels.group_of_four import TILE


def why_unsupported(rows: int, k: int, dtype: str, out_dtype: str) -> str | None:
    """Why a matrix cannot be packed, or None."""
    for name, size in (("rows", rows), ("k", k)):
        if size % TILE or not size:
            return f"{name}={size} is not a multiple of {TILE}"
    if dtype not in ("float32", "bfloat16", "float16"):
        return f"packs float32, bfloat16 and float16, not {dtype}"
    if out_dtype not in ("bfloat16", "float16"):
        return f"packs into bfloat16 and float16, not {out_dtype}"
    return None


def compress(
    w: Float[Array, "layers _ _"],
    scales: Float[Array, " layers"] | None,
    *,
    k_major: bool,
    dtype: jnp.dtype,
) -> tuple[
    Float[Array, "layers rows half_k"], UInt32[Array, "layers row_blocks k_blocks 128"]
]:
    """The kept values of every matrix and their positions: see `packing`.

    Args:
      w: (layers, rows, k) if `k_major`, else (layers, k, rows).
      scales: beta, values are beta S(w); None: they are those of w, no threshold.
      dtype: of the values, bfloat16 or float16, rounded to nearest even.
    Raises:
      ValueError: a size is not a multiple of 64, or a dtype is not one of those.
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
            beta = llvm.load(ir.F32Type.get(), utils.memref_ptr(scale[0]))
        pack(w, values, metadata, beta)

    run(
        tile,
        values_gmem.at[layer, rows, kept],
        metadata_gmem.at[layer, row_block, k_block],
        *(ref.at[pl.ds(layer, 1)] for ref in scales),
    )


def _pack_rows(w, values, metadata, beta) -> None:
    """One thread of a k-major tile: rows r and r + 8, four groups of each, which are
    what its word of metadata holds."""
    thread = four.thread()
    row, columns = four.metadata_row(thread), four.metadata_columns(thread)
    word = four.constant(0)
    for half in range(2):
        r = arith.addi(row, four.constant(8 * half))
        pairs = []
        for group in range(4):
            column = arith.addi(columns, four.constant(4 * group))
            entries = four.load(w, r, column, 4)
            pair, positions = _prune(entries, beta, four.element_type(values))
            pairs.append(pair)
            word = arith.ori(word, four.shifted(positions, 4 * group + 16 * half))
        four.store(values, r, arith.divui(columns, four.constant(2)), pairs)
    four.store(metadata, None, thread, [word])


def _pack_columns(w, values, metadata, beta) -> None:
    """One thread of a tile stored (k, rows): one row and half of its 16 groups.

    Neighbouring threads read neighbouring rows. The word of rows r and r + 8 is put
    together from two threads.
    """
    thread = four.thread()
    row = arith.remui(thread, four.constant(TILE))
    side = arith.divui(thread, four.constant(TILE))  # which 32 entries along k
    halves = []
    for quarter in range(2):
        pairs, half = [], four.constant(0)
        for group in range(4):
            start = arith.addi(
                arith.muli(side, four.constant(32)),
                four.constant(16 * quarter + 4 * group),
            )
            entries = [
                four.load(w, arith.addi(start, four.constant(i)), row, 1)[0]
                for i in range(4)
            ]
            pair, positions = _prune(entries, beta, four.element_type(values))
            pairs.append(pair)
            half = arith.ori(half, four.shifted(positions, 4 * group))
        column = arith.addi(
            arith.muli(side, four.constant(16)), four.constant(8 * quarter)
        )
        four.store(values, row, column, pairs)
        halves.append(half)
    # Rows r and r + 8 are eight threads apart: the first writes the even quarter.
    upper = arith.andi(arith.shrui(row, four.constant(3)), four.constant(1))
    is_upper = arith.cmpi(arith.CmpIPredicate.eq, upper, four.constant(1))
    own = arith.select(is_upper, halves[1], halves[0])
    given = arith.select(is_upper, halves[0], halves[1])
    received = utils.shfl_bfly(given, 8)
    low = arith.select(is_upper, received, own)
    high = arith.select(is_upper, own, received)
    word = arith.ori(low, four.shifted(high, 16))
    quarter = arith.addi(arith.muli(side, four.constant(2)), upper)
    index = four.metadata_index(row, quarter)
    four.store(metadata, None, index, [word])


def _prune(entries, beta, dtype) -> tuple[ir.Value, ir.Value]:
    """Of one group of four: the kept pair as 16-bit halves of a word, and its positions
    as four bits."""
    f32 = ir.F32Type.get()
    bits = [four.bits_of(four.to_float32(entry)) for entry in entries]
    magnitudes = [arith.andi(b, four.constant(0x7FFFFFFF)) for b in bits]
    kept = four.keep_two([four.magnitude_key(b) for b in bits])
    threshold = magnitudes[3]
    for rank, magnitude in zip(kept.ranks[:3], magnitudes[:3], strict=True):
        is_third = arith.cmpi(arith.CmpIPredicate.eq, rank, four.constant(2))
        threshold = arith.select(is_third, magnitude, threshold)
    halves = []
    for kept_bits in (kept.first(bits), kept.second(bits)):
        value = arith.bitcast(f32, kept_bits)
        if beta is not None:
            sign = arith.andi(kept_bits, four.constant(-(1 << 31)))
            signed = arith.bitcast(f32, arith.ori(sign, threshold))
            value = arith.mulf(beta, arith.subf(value, signed))
        halves.append(four.rounded_bits(value, dtype))
    return arith.ori(halves[0], four.shifted(halves[1], 16)), kept.positions()
