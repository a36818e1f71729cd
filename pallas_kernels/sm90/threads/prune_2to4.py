"""Instructions on groups of four, as one thread runs them: load, rank, keep two, store.

They are for kernels that pack 2:4 matrices in the order of `wgmma.mma_async.sp`. A
warpgroup has a tile of 64 rows by 64 entries along k. Everything here builds MLIR, in
the body of an `inline_mgpu` function.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels.sm90 import mosaic_internals

TILE = 64
"""The number of rows of a tile, and of its entries along k."""


@dataclass(frozen=True)
class Kept:
    """The two entries that are kept of a group of four, in the order of their
    indices."""

    ranks: Sequence[ir.Value]
    """The rank of each of the four entries; 0 is the largest."""
    flags: Sequence[ir.Value]

    def first(self, of: Sequence[ir.Value]) -> ir.Value:
        """Returns, from the values of four entries, that of the first kept entry."""
        return arith.select(
            self.flags[0], of[0], arith.select(self.flags[1], of[1], of[2])
        )

    def second(self, of: Sequence[ir.Value]) -> ir.Value:
        """Returns, from the values of four entries, that of the second kept entry."""
        return arith.select(
            self.flags[3], of[3], arith.select(self.flags[2], of[2], of[1])
        )

    def positions(self) -> ir.Value:
        """Returns the indices of both kept entries, two bits each: the group's
        metadata."""
        indices = [constant(i) for i in range(4)]
        return arith.ori(self.first(indices), shifted(self.second(indices), 2))


def keep_two(keys: Sequence[ir.Value]) -> Kept:
    """Returns the two entries with the largest of four int32 keys; of equal ones the
    first."""
    ranks = [constant(0)] * 4
    for i in range(4):
        for j in range(i + 1, 4):
            later_wins = arith.extui(
                i32(), arith.cmpi(arith.CmpIPredicate.sgt, keys[j], keys[i])
            )
            ranks[i] = arith.addi(ranks[i], later_wins)
            ranks[j] = arith.addi(ranks[j], arith.subi(constant(1), later_wins))
    two = constant(2)
    flags = [arith.cmpi(arith.CmpIPredicate.ult, rank, two) for rank in ranks]
    return Kept(ranks, flags)


def magnitude_key(bits: ir.Value) -> ir.Value:
    """Returns an int32 key in the order of |x|, from the bits of a float32 x; every NaN
    has the same, largest key."""
    magnitude = arith.andi(bits, constant(0x7FFFFFFF))
    return arith.select(is_nan(bits), constant(0x7FFFFFFF), magnitude)


def is_nan(bits: ir.Value) -> ir.Value:
    """Returns whether `bits` are those of a float32 NaN."""
    magnitude = arith.andi(bits, constant(0x7FFFFFFF))
    return arith.cmpi(arith.CmpIPredicate.sgt, magnitude, constant(0x7F800000))


def i32() -> ir.Type:
    return ir.IntegerType.get_signless(32)


def constant(value: int, bits: int = 32) -> ir.Value:
    return mosaic_internals.constant(value, bits)


def shifted(value: ir.Value, by: int) -> ir.Value:
    """Returns value << by."""
    return arith.shli(value, constant(by)) if by else value


def to_float32(value: ir.Value) -> ir.Value:
    """Returns a number of any float type as a float32."""
    f32 = ir.F32Type.get()
    return value if value.type == f32 else arith.extf(f32, value)


def bits_of(value: ir.Value) -> ir.Value:
    """Returns the bits of a float32, as an int32."""
    return arith.bitcast(i32(), value)


def raw_bits(value: ir.Value) -> ir.Value:
    """Returns the bits of a 16-bit float, as the lower half of an int32."""
    i16 = ir.IntegerType.get_signless(16)
    return arith.extui(i32(), arith.bitcast(i16, value))


def lower_half(value: ir.Value) -> ir.Value:
    """Returns the lower half of an int32, as an int16."""
    return arith.trunci(ir.IntegerType.get_signless(16), value)


def rounded_bits(value: ir.Value, dtype: ir.Type) -> ir.Value:
    """Returns a float32, rounded to a 16-bit dtype, as the lower half of an int32."""
    return raw_bits(arith.truncf(dtype, value))


def thread() -> ir.Value:
    """Returns the index of the thread in its warpgroup, 0 to 127."""
    return arith.remui(mosaic_internals.thread_index(), constant(128))


def metadata_row(thread: ir.Value) -> ir.Value:
    """Returns the lower of the two rows of a tile, r and r + 8, whose metadata a thread
    holds."""
    warp = arith.divui(thread, constant(32))
    row_of_eight = arith.andi(arith.divui(thread, constant(4)), constant(7))
    return arith.addi(arith.muli(warp, constant(16)), row_of_eight)


def metadata_columns(thread: ir.Value) -> ir.Value:
    """Returns the first of the 16 columns of a tile whose metadata a thread holds."""
    return arith.muli(arith.andi(thread, constant(3)), constant(16))


def at(position: ir.Value, of: Sequence[ir.Value]) -> ir.Value:
    """Returns of[position], from four values."""
    value = of[3]
    for i in range(3):
        value = arith.select(equal(position, i), of[i], value)
    return value


def equal(value: ir.Value, number: int) -> ir.Value:
    return arith.cmpi(arith.CmpIPredicate.eq, value, constant(number))


def below(value: ir.Value, bound: ir.Value | int) -> ir.Value:
    """Returns value < bound, compared as int32."""
    bound = constant(bound) if isinstance(bound, int) else bound
    return arith.cmpi(arith.CmpIPredicate.slt, value, bound)


def sum_over_rows(value: ir.Value) -> ir.Value:
    """Returns the sum over the eight threads of a warp that hold the same columns of
    other rows."""
    for distance in (4, 8, 16):
        value = arith.addi(value, mosaic_internals.shuffled(value, distance))
    return value


def metadata_index(row: ir.Value, quarter: ir.Value) -> ir.Value:
    """Returns the index of the word that holds the positions of columns 16 quarter to
    16 quarter + 15 of a row. They are in its upper half where row % 16 is 8 or more."""
    warp, row_of_eight = arith.divui(row, constant(16)), arith.andi(row, constant(7))
    first = arith.addi(
        arith.muli(warp, constant(32)), arith.muli(row_of_eight, constant(4))
    )
    return arith.addi(first, quarter)


def element_type(ref: ir.Value) -> ir.Type:
    return ir.MemRefType(ref.type).element_type


def load(
    ref: ir.Value, row: ir.Value | None, column: ir.Value, count: int
) -> list[ir.Value]:
    """Returns `count` neighbouring entries of a row (or of a vector), loaded in one
    access."""
    return _load(element_type(ref), ref, row, column, count)


def load_pairs(
    ref: ir.Value, row: ir.Value | None, column: ir.Value, count: int
) -> list[ir.Value]:
    """Returns `count` neighbouring pairs of 16-bit entries, each an int32, from
    `column` of a row (or of a vector) on, loaded in one access."""
    return _load(i32(), ref, row, column, count)


def _load(
    kind: ir.Type, ref: ir.Value, row: ir.Value | None, column: ir.Value, count: int
) -> list[ir.Value]:
    loaded = llvm.load(
        ir.VectorType.get((count,), kind),
        _address(ref, row, column),
        alignment=count * mosaic_internals.bit_width(kind) // 8,
    )
    return [
        vector.extract(loaded, dynamic_position=[], static_position=[i])
        for i in range(count)
    ]


def store(
    ref: ir.Value, row: ir.Value | None, column: ir.Value, words: Sequence[ir.Value]
) -> None:
    """Stores integers of one width from `column` of a row (or of a vector) on, in one
    access."""
    kind = words[0].type
    stored = llvm.mlir_undef(ir.VectorType.get((len(words),), kind))
    for i, word in enumerate(words):
        stored = vector.insert(word, stored, dynamic_position=[], static_position=[i])
    alignment = len(words) * mosaic_internals.bit_width(kind) // 8
    llvm.store(stored, _address(ref, row, column), alignment=alignment)


def store_half(ref: ir.Value, index: ir.Value, upper: ir.Value, half: ir.Value) -> None:
    """Stores 16 bits into the lower (`upper` = 0) or the upper (1) half of a word of a
    vector."""
    i64 = ir.IntegerType.get_signless(64)
    offset = arith.muli(arith.extui(i64, upper), constant(2, 64))
    address = mosaic_internals.offset_pointer(_address(ref, None, index), offset)
    llvm.store(half, address, alignment=2)


def _address(ref: ir.Value, row: ir.Value | None, column: ir.Value) -> ir.Value:
    strides, _ = ir.MemRefType(ref.type).get_strides_and_offset()
    i64 = ir.IntegerType.get_signless(64)
    offset = arith.extui(i64, column)
    if row is not None:
        start = arith.muli(arith.extui(i64, row), constant(strides[0], 64))
        offset = arith.addi(start, offset)
    element_bytes = mosaic_internals.bit_width(element_type(ref)) // 8
    offset = arith.muli(offset, constant(element_bytes, 64))
    return mosaic_internals.offset_pointer(mosaic_internals.pointer(ref), offset)
