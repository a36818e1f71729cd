"""2:4 activations as one thread of a warpgroup makes them, and their gradients.

A warpgroup has a tile of 64 tokens by 64 features, a thread 16 features of tokens r and
r + 8, as its word of metadata has them. Where a thread's numbers come from is up to the
kernel: its rows load them. Everything here builds MLIR, in the body of an `inline_mgpu`
function.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from pallas_kernels import activation_tiles as tiles
from pallas_kernels import group_of_four as four
from pallas_kernels import two_groups as two
from pallas_kernels.group_of_four import TILE, constant


class Row(Protocol):
    """One of a thread's two rows of a tile."""

    @property
    def index(self) -> ir.Value:
        """In what is written; the last where there is none."""
        ...

    @property
    def exists(self) -> ir.Value:
        """Whether there is one."""
        ...

    def load_pairs(self, ref: ir.Value) -> list[ir.Value]:
        """The thread's 16 neighbouring features, two to a word."""
        ...


class Place(NamedTuple):
    """A tile."""

    token_block: ir.Value
    feature_block: ir.Value

    @property
    def first_feature(self) -> ir.Value:
        """Of the 16 that a thread has."""
        start = arith.muli(self.feature_block, constant(TILE))
        return arith.addi(start, four.metadata_columns(four.thread()))

    def word(self, metadata: ir.Value) -> ir.Value:
        """The index of a thread's word, all words being in a row."""
        start = tiles.tile_start(self.token_block, self.feature_block, metadata)
        return arith.addi(start, four.thread())


def keep_features(
    place: Place,
    rows: Sequence[Row],
    inputs: Sequence[ir.Value],
    outputs: Sequence[ir.Value],
) -> None:
    """A = relu(Y1)^2, or with U as a second input relu(G)^2 * U, two of four features
    kept.

    Args:
      rows: r and r + 8.
      outputs: the values, the words, how many of each 16 tokens have a kept entry that
        is not zero; with U also relu(G) and U at the kept positions.
    """
    values, metadata, nonzeros, *more = outputs
    gated = len(inputs) > 1
    dtype = four.element_type(values)
    loaded, exist = [], constant(0)
    for half, row in enumerate(rows):
        hidden, *up = (row.load_pairs(ref) for ref in inputs)
        loaded.append([[two.relu(pair, dtype) for pair in hidden], *up])
        sign = arith.select(row.exists, constant(0x8000 << 16 * half), constant(0))
        exist = arith.ori(exist, sign)
    word, counts = constant(0), []
    written = [([], []) for _ in (values, *more)]
    for group in range(4):
        own = slice(2 * group, 2 * group + 2)
        hidden, *up = (
            two.by_entry(*(pairs[own] for pairs in of_both))
            for of_both in zip(*loaded, strict=True)
        )
        a = [two.square(entry, dtype) for entry in hidden]
        keys = hidden
        if gated:
            a = [two.product(*both, dtype) for both in zip(a, up[0], strict=True)]
            keys = [two.magnitude(entry) for entry in a]
        kept = two.keep_two(keys)
        of_outputs = [a, hidden, *up] if gated else [a]
        for words, entries in zip(written, of_outputs, strict=True):
            pair = kept.first(entries), kept.second(entries)
            for row, half in zip(words, (two.LOWER, two.UPPER), strict=True):
                row.append(two.bytes_of(*pair, half))
        word = arith.ori(word, four.shifted(kept.positions(), 4 * group))
        counts.append(_kept_nonzeros(kept, a, exist))
    column = tiles.half(place.first_feature)
    for ref, words in zip([values, *more], written, strict=True):
        for row, pairs in zip(rows, words, strict=True):
            with four.when(row.exists):
                four.store(ref, row.index, column, pairs)
    four.store(metadata, None, place.word(metadata), [word])
    counts = [_bytes_of_nibbles(four.sum_over_rows(count)) for count in counts]
    thread = four.thread()
    lane = arith.remui(thread, constant(32))
    with four.when(four.below(lane, 4)):
        warp = arith.divui(thread, constant(32))
        first = arith.muli(place.token_block, constant(4))
        sixteenth = arith.addi(first, warp)
        four.store(nonzeros, sixteenth, place.first_feature, counts)


def _kept_nonzeros(
    kept: two.Kept, entries: list[ir.Value], exist: ir.Value
) -> ir.Value:
    """Of both tokens that `exist`, one bit of four for each of a group's features."""
    bits = constant(0)
    for i, (mask, entry) in enumerate(zip(kept.masks, entries, strict=True)):
        # The sign of a half is set where its 15 bits are not all zero.
        nonzero = arith.addi(two.magnitude(entry), constant(0x7FFF7FFF))
        counted = arith.andi(arith.andi(nonzero, mask), exist)
        bits = arith.ori(bits, arith.shrui(counted, constant(15 - 4 * i)))
    return bits


def _bytes_of_nibbles(counts: ir.Value) -> ir.Value:
    """Four counts of up to 8 in each half, added: four bytes."""
    even, odd = (
        arith.andi(nibbles, constant(0x0F0F0F0F))
        for nibbles in (counts, arith.shrui(counts, constant(4)))
    )
    even = arith.addi(even, arith.shrui(even, constant(16)))
    odd = arith.addi(odd, arith.shrui(odd, constant(16)))
    return two.bytes_of(even, odd, 0x5140)


class Kept(NamedTuple):
    """What a thread has of 2:4 matrices with the same positions."""

    word: ir.Value
    """The positions, of both rows."""
    of_rows: Sequence[Sequence[Sequence[ir.Value]]]
    """Of each row, of each matrix, of each group: two entries in a word."""


def load_kept(
    place: Place,
    rows: Sequence[Row],
    matrices: Sequence[ir.Value],
    metadata: ir.Value,
) -> Kept:
    """The kept values of `matrices` and their positions."""
    (word,) = four.load(metadata, None, place.word(metadata), 1)
    column = tiles.half(place.first_feature)
    return Kept(
        word,
        [[four.load_pairs(m, row.index, column, 4) for m in matrices] for row in rows],
    )


def gradients_at(
    compute: Callable[..., Sequence[ir.Value]],
    place: Place,
    rows: Sequence[Row],
    da: ir.Value,
    kept: Kept,
    outputs: Sequence[ir.Value],
) -> None:
    """What `compute` makes of dA at each kept position and of the values there."""
    dtype = four.element_type(outputs[0])
    column = tiles.half(place.first_feature)
    for half, (row, there) in enumerate(zip(rows, kept.of_rows, strict=True)):
        dense = row.load_pairs(da)
        words: list[list[ir.Value]] = [[] for _ in outputs]
        for group in range(4):
            positions = arith.shrui(kept.word, constant(4 * group + 16 * half))
            own = two.gather(dense[2 * group : 2 * group + 2], positions)
            results = compute(own, *(pairs[group] for pairs in there), dtype)
            for row_of_words, result in zip(words, results, strict=True):
                row_of_words.append(result)
        for ref, row_of_words in zip(outputs, words, strict=True):
            with four.when(row.exists):
                four.store(ref, row.index, column, row_of_words)
