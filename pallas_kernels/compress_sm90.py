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
from jaxlib.mlir.dialects import arith, llvm, vector
from jaxtyping import Array, Float, UInt32

_TILE = 64


def why_unsupported(rows: int, k: int, dtype: str, out_dtype: str) -> str | None:
    """Why a matrix cannot be packed, or None."""
    for name, size in (("rows", rows), ("k", k)):
        if size % _TILE or not size:
            return f"{name}={size} is not a multiple of {_TILE}"
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
            jax.ShapeDtypeStruct((layers, rows // _TILE, k // _TILE, 128), jnp.uint32),
        ),
        grid=(layers, rows // _TILE, k // _TILE),
        grid_names=("layer", "row_block", "k_block"),
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
    rows, along_k = pl.ds(row_block * _TILE, _TILE), pl.ds(k_block * _TILE, _TILE)
    kept = pl.ds(k_block * (_TILE // 2), _TILE // 2)
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
    thread = _thread()
    quarter = arith.andi(thread, _int(3))
    row = _row_of(thread)
    word = _int(0)
    for half in range(2):
        r = arith.addi(row, _int(8 * half))
        pairs = []
        for group in range(4):
            column = arith.addi(arith.muli(quarter, _int(16)), _int(4 * group))
            entries = _load(w, r, column, 4)
            pair, positions = _prune(entries, beta, _element_type(values))
            pairs.append(pair)
            word = arith.ori(word, _shifted(positions, 4 * group + 16 * half))
        _store(values, r, arith.muli(quarter, _int(8)), pairs)
    _store(metadata, None, thread, [word])


def _pack_columns(w, values, metadata, beta) -> None:
    """One thread of a tile stored (k, rows): one row and half of its 16 groups.

    Neighbouring threads read neighbouring rows. The word of rows r and r + 8 is put
    together from two threads.
    """
    thread = _thread()
    row = arith.remui(thread, _int(_TILE))
    side = arith.divui(thread, _int(_TILE))  # which 32 entries along k
    halves = []
    for quarter in range(2):
        pairs, half = [], _int(0)
        for group in range(4):
            start = arith.addi(
                arith.muli(side, _int(32)), _int(16 * quarter + 4 * group)
            )
            entries = [
                _load(w, arith.addi(start, _int(i)), row, 1)[0] for i in range(4)
            ]
            pair, positions = _prune(entries, beta, _element_type(values))
            pairs.append(pair)
            half = arith.ori(half, _shifted(positions, 4 * group))
        column = arith.addi(arith.muli(side, _int(16)), _int(8 * quarter))
        _store(values, row, column, pairs)
        halves.append(half)
    # Rows r and r + 8 are eight threads apart: the first writes the even quarter.
    upper = arith.andi(arith.shrui(row, _int(3)), _int(1))
    is_upper = arith.cmpi(arith.CmpIPredicate.eq, upper, _int(1))
    own = arith.select(is_upper, halves[1], halves[0])
    given = arith.select(is_upper, halves[0], halves[1])
    received = utils.shfl_bfly(given, 8)
    low = arith.select(is_upper, received, own)
    high = arith.select(is_upper, own, received)
    word = arith.ori(low, _shifted(high, 16))
    warp, row_of_eight = arith.divui(row, _int(16)), arith.andi(row, _int(7))
    quarter = arith.addi(arith.muli(side, _int(2)), upper)
    index = arith.addi(
        arith.muli(warp, _int(32)),
        arith.addi(arith.muli(row_of_eight, _int(4)), quarter),
    )
    _store(metadata, None, index, [word])


def _prune(entries, beta, dtype) -> tuple[ir.Value, ir.Value]:
    """Of one group of four: the kept pair as 16-bit halves of a word, and its positions
    as four bits."""
    f32, i32 = ir.F32Type.get(), _i32()
    if entries[0].type != f32:
        entries = [arith.extf(f32, entry) for entry in entries]
    bits = [arith.bitcast(i32, entry) for entry in entries]
    magnitudes = [arith.andi(b, _int(0x7FFFFFFF)) for b in bits]
    # As integers magnitudes are in order; every NaN is the same, and largest.
    keys = []
    for magnitude in magnitudes:
        is_nan = arith.cmpi(arith.CmpIPredicate.sgt, magnitude, _int(0x7F800000))
        keys.append(arith.select(is_nan, _int(0x7FFFFFFF), magnitude))
    ranks = [_int(0)] * 4
    for i in range(4):
        for j in range(i + 1, 4):
            later_wins = arith.extui(
                i32, arith.cmpi(arith.CmpIPredicate.sgt, keys[j], keys[i])
            )
            ranks[i] = arith.addi(ranks[i], later_wins)
            ranks[j] = arith.addi(ranks[j], arith.subi(_int(1), later_wins))
    kept = [arith.cmpi(arith.CmpIPredicate.ult, rank, _int(2)) for rank in ranks]

    def first(of):
        return arith.select(kept[0], of[0], arith.select(kept[1], of[1], of[2]))

    def second(of):
        return arith.select(kept[3], of[3], arith.select(kept[2], of[2], of[1]))

    threshold = magnitudes[3]
    for rank, magnitude in zip(ranks[:3], magnitudes[:3], strict=True):
        is_third = arith.cmpi(arith.CmpIPredicate.eq, rank, _int(2))
        threshold = arith.select(is_third, magnitude, threshold)
    halves = []
    for kept_bits in (first(bits), second(bits)):
        value = arith.bitcast(f32, kept_bits)
        if beta is not None:
            sign = arith.andi(kept_bits, _int(-(1 << 31)))
            signed = arith.bitcast(f32, arith.ori(sign, threshold))
            value = arith.mulf(beta, arith.subf(value, signed))
        rounded = arith.truncf(dtype, value)
        i16 = ir.IntegerType.get_signless(16)
        halves.append(arith.extui(i32, arith.bitcast(i16, rounded)))
    indices = [_int(i) for i in range(4)]
    pair = arith.ori(halves[0], _shifted(halves[1], 16))
    return pair, arith.ori(first(indices), _shifted(second(indices), 2))


def _i32() -> ir.Type:
    return ir.IntegerType.get_signless(32)


def _int(value: int) -> ir.Value:
    return utils.c(value, _i32())


def _shifted(value: ir.Value, by: int) -> ir.Value:
    return arith.shli(value, _int(by)) if by else value


def _thread() -> ir.Value:
    return arith.remui(utils.thread_idx(), _int(128))


def _row_of(thread: ir.Value) -> ir.Value:
    """The lower of the two rows whose metadata a thread holds."""
    warp = arith.divui(thread, _int(32))
    row_of_eight = arith.andi(arith.divui(thread, _int(4)), _int(7))
    return arith.addi(arith.muli(warp, _int(16)), row_of_eight)


def _element_type(ref: ir.Value) -> ir.Type:
    return ir.MemRefType(ref.type).element_type


def _address(ref, row, column, element_bytes: int) -> ir.Value:
    strides, _ = ir.MemRefType(ref.type).get_strides_and_offset()
    offset = column
    if row is not None:
        offset = arith.addi(arith.muli(row, _int(strides[0])), column)
    i64, i8 = ir.IntegerType.get_signless(64), ir.IntegerType.get_signless(8)
    offset = arith.extui(i64, arith.muli(offset, _int(element_bytes)))
    return utils.getelementptr(utils.memref_ptr(ref), [offset], i8)


def _load(ref, row, column, count: int) -> list[ir.Value]:
    """Neighbouring entries of a row, one access."""
    element = _element_type(ref)
    element_bytes = utils.bitwidth(element) // 8
    loaded = llvm.load(
        ir.VectorType.get((count,), element),
        _address(ref, row, column, element_bytes),
        alignment=count * element_bytes,
    )
    return [
        vector.extract(loaded, dynamic_position=[], static_position=[i])
        for i in range(count)
    ]


def _store(ref, row, column, words: list[ir.Value]) -> None:
    """32-bit words from `column` of a row on, one access."""
    stored = llvm.mlir_undef(ir.VectorType.get((len(words),), _i32()))
    for i, word in enumerate(words):
        stored = vector.insert(word, stored, dynamic_position=[], static_position=[i])
    element_bytes = utils.bitwidth(_element_type(ref)) // 8
    address = _address(ref, row, column, element_bytes)
    llvm.store(stored, address, alignment=4 * len(words))
