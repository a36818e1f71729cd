"""Instructions on two groups of four 16-bit numbers at a time, as one thread runs them.

The same entry of both groups is one word, an int32 with one number in each half: the
integer instructions of a GPU then rank and select both groups at once. Everything here
builds MLIR, in the body of an `inline_mgpu` function.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels.sm90.threads import prune_2to4
from pallas_kernels.sm90.threads.prune_2to4 import constant, i32, shifted

LOWER, UPPER = 0x5410, 0x7632
"""The selectors for `bytes_of` that take the lower halves of two words, and their upper
halves."""

SIGNS = 0x80008000
"""The sign bits of both halves of a word."""


@dataclass(frozen=True)
class Kept:
    """The two entries that are kept of each of two groups, in the order of their
    indices."""

    masks: Sequence[ir.Value]
    """The mask of each of four entries: in the half of a group all bits are set where
    the group keeps the entry, else none."""

    def first(self, of: Sequence[ir.Value]) -> ir.Value:
        """Returns, from words of the four entries, the word of the first kept entry of
        both groups."""
        return _choose(self.masks[0], of[0], _choose(self.masks[1], of[1], of[2]))

    def second(self, of: Sequence[ir.Value]) -> ir.Value:
        """Returns, from words of the four entries, the word of the second kept entry of
        both groups."""
        return _choose(self.masks[3], of[3], _choose(self.masks[2], of[2], of[1]))

    def rest(self) -> "Kept":
        """Returns the two entries of each group that are not kept."""
        return Kept([_not(mask) for mask in self.masks])

    def positions(self) -> ir.Value:
        """Returns the indices of the two kept entries, two bits each, in the lower four
        bits of a group's half."""
        one, two, three, four = self.masks
        later = _not(one)
        bits = [
            arith.andi(later, two),
            arith.andi(later, _not(two)),
            arith.ori(four, _not(three)),
            arith.ori(four, three),
        ]
        nibble = constant(0)
        for i, bit in enumerate(bits):
            nibble = arith.ori(nibble, arith.andi(bit, constant(0x00010001 << i)))
        return nibble


def keep_two(keys: Sequence[ir.Value]) -> Kept:
    """Returns the two largest of four entries in both groups; of equal ones the first.

    Keys are numbers of 15 bits, such as those of a float that is not negative (infinity
    is larger than any number, and NaN larger still).
    """
    ahead: dict[tuple[int, int], ir.Value] = {}
    for i in range(4):
        raised = arith.ori(keys[i], constant(SIGNS))
        for j in range(i + 1, 4):
            # A half's sign is left where keys[i] >= keys[j].
            ahead[i, j] = arith.subi(raised, keys[j])
            ahead[j, i] = _not(ahead[i, j])
    masks = []
    for i in range(4):
        a, b, c = (ahead[i, j] for j in range(4) if j != i)
        ahead_of_two = arith.ori(arith.andi(a, b), arith.andi(c, arith.ori(a, b)))
        masks.append(_spread_signs(ahead_of_two))
    return Kept(masks)


def by_entry(first: Sequence[ir.Value], second: Sequence[ir.Value]) -> list[ir.Value]:
    """Returns a word for each of four entries, from the two words that each group has,
    (0, 1) and (2, 3)."""
    pairs = list(zip(first, second, strict=True))
    return [bytes_of(*pair, half) for pair in pairs for half in (LOWER, UPPER)]


def expand(pair: ir.Value, positions: ir.Value) -> list[ir.Value]:
    """Returns a group's four entries as two words, (0, 1) and (2, 3), from its two
    kept entries and their positions in the lower four bits. Entries that are not
    kept are 0."""
    first = arith.andi(shifted(positions, 3), constant(24))
    second = arith.andi(shifted(positions, 1), constant(24))
    # Eight selectors of bytes: 4 is a byte of 0, the pair's are 0 to 3.
    selectors = arith.subi(
        arith.subi(constant(0x44444444), arith.shli(constant(0x44 - 0x10), first)),
        arith.shli(constant(0x44 - 0x32), second),
    )
    halves = selectors, arith.shrui(selectors, constant(16))
    return [bytes_of(pair, constant(0), half) for half in halves]


def gather(group: Sequence[ir.Value], positions: ir.Value) -> ir.Value:
    """Returns the two entries of a group at the positions in the lower four bits of a
    word. The group's four entries are two words, (0, 1) and (2, 3)."""
    first = arith.andi(positions, constant(3))
    second = arith.andi(arith.shrui(positions, constant(2)), constant(3))
    # Entry p is bytes 2 p and 2 p + 1 of the two words.
    selectors = arith.addi(
        arith.addi(constant(0x1010), arith.muli(first, constant(0x0022))),
        arith.muli(second, constant(0x2200)),
    )
    return bytes_of(group[0], group[1], selectors)


def complement(words: ir.Value) -> ir.Value:
    """Returns the positions of the entries that are not kept, for every four bits of a
    word of positions."""
    bits = [arith.shrui(words, constant(i)) if i else words for i in range(4)]
    p0, p1, q0, q1 = bits
    parts = [
        arith.andi(_not(arith.ori(p0, p1)), q1),
        _not(q1),
        arith.ori(p1, _not(arith.andi(q0, q1))),
        _not(p1),
    ]
    result = constant(0)
    for i, part in enumerate(parts):
        own = arith.andi(part, constant(0x11111111))
        result = arith.ori(result, shifted(own, i))
    return result


def magnitude(word: ir.Value) -> ir.Value:
    """Returns |x| in both halves of a word."""
    return arith.andi(word, constant(~SIGNS))


def relu(word: ir.Value, dtype: ir.Type) -> ir.Value:
    """Returns max(x, 0) in both halves; NaN stays NaN, without its sign."""
    return _instruction(f"max.NaN.{_ptx_type(dtype)}x2", word, constant(0))


def square(word: ir.Value, dtype: ir.Type) -> ir.Value:
    """Returns x^2 in both halves, rounded once."""
    return product(word, word, dtype)


def product(left: ir.Value, right: ir.Value, dtype: ir.Type) -> ir.Value:
    """Returns x y in both halves, rounded once."""
    return _instruction(f"mul.{_ptx_type(dtype)}x2", left, right)


def sum_of(left: ir.Value, right: ir.Value, dtype: ir.Type) -> ir.Value:
    """Returns x + y in both halves, rounded once."""
    return _instruction(f"add.{_ptx_type(dtype)}x2", left, right)


def to_float32(word: ir.Value, dtype: ir.Type) -> tuple[ir.Value, ir.Value]:
    """Returns the lower and the upper half of a word, each as a float32."""
    lower, upper = (
        prune_2to4.to_float32(arith.bitcast(dtype, prune_2to4.lower_half(half)))
        for half in (word, arith.shrui(word, constant(16)))
    )
    return lower, upper


def rounded(lower: ir.Value, upper: ir.Value, dtype: ir.Type) -> ir.Value:
    """Returns a word whose halves are two float32, rounded to a 16-bit dtype."""
    return _instruction(f"cvt.rn.{_ptx_type(dtype)}x2.f32", upper, lower)


def square_root(value: ir.Value) -> ir.Value:
    """Returns the square root of a float32, exact up to the last bit but one; 0 where
    the number is below float32's normal ones."""
    return _instruction("sqrt.approx.ftz.f32", value, result=ir.F32Type.get())


def bytes_of(low: ir.Value, high: ir.Value, selectors: int | ir.Value) -> ir.Value:
    """Returns four of the eight bytes of two words; four bits of `selectors` choose
    each of them, 0 to 7."""
    if isinstance(selectors, int):
        selectors = constant(selectors)
    # Of a selector with bit 3 set, the byte's sign eight times.
    return _instruction("prmt.b32", low, high, selectors)


def _spread_signs(word: ir.Value) -> ir.Value:
    """Returns a word in which all bits of a half are that half's sign."""
    return bytes_of(word, word, 0xBB99)


def _choose(mask: ir.Value, yes: ir.Value, no: ir.Value) -> ir.Value:
    return arith.ori(arith.andi(mask, yes), arith.andi(_not(mask), no))


def _not(word: ir.Value) -> ir.Value:
    return arith.xori(word, constant(-1))


def _ptx_type(dtype: ir.Type) -> str:
    return {"bf16": "bf16", "f16": "f16"}[str(dtype)]


def _instruction(
    name: str, *operands: ir.Value, result: ir.Type | None = None
) -> ir.Value:
    """Emits one PTX instruction and returns its result, an int32 unless `result` names
    another type."""
    result = i32() if result is None else result
    numbered = ", ".join(f"${i}" for i in range(len(operands) + 1))
    kinds = ["r" if type_ == i32() else "f" for type_ in (o.type for o in operands)]
    constraints = ",".join(["=r" if result == i32() else "=f", *kinds])
    value: Any = llvm.inline_asm(
        result, list(operands), f"{name} {numbered};", constraints, asm_dialect=0
    )
    return value
