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

from pallas_kernels.sm90 import mosaic_internals
from pallas_kernels.sm90.threads import activation_tiles, packed16x2, prune_2to4
from pallas_kernels.sm90.threads.prune_2to4 import TILE, constant


class Row(Protocol):
    """A row of a tile that a thread works on; each thread has two."""

    @property
    def index(self) -> ir.Value:
        """The index of the row that is written; the last one where there is no such
        row."""
        ...

    @property
    def exists(self) -> ir.Value:
        """Whether the written matrix has the row."""
        ...

    def load_pairs(self, ref: ir.Value) -> list[ir.Value]:
        """Returns the thread's 16 neighbouring features, two to a word."""
        ...


class Place(NamedTuple):
    """The indices, among all tiles, of a tile of 64 tokens by 64 features."""

    token_block: ir.Value
    feature_block: ir.Value

    @property
    def first_feature(self) -> ir.Value:
        """The index of the first of the 16 features that a thread has."""
        start = arith.muli(self.feature_block, constant(TILE))
        return arith.addi(start, prune_2to4.metadata_columns(prune_2to4.thread()))

    def word(self, metadata: ir.Value) -> ir.Value:
        """Returns the index of a thread's word of metadata among the words of all
        tiles."""
        start = activation_tiles.tile_start(
            self.token_block, self.feature_block, metadata
        )
        return arith.addi(start, prune_2to4.thread())


def keep_features(
    place: Place,
    rows: Sequence[Row],
    inputs: Sequence[ir.Value],
    outputs: Sequence[ir.Value],
) -> None:
    """Writes A = relu(Y1)^2, or with U as a second input A = relu(G)^2 * U, two of
    every four features kept.

    Args:
      place: the tile.
      rows: the thread's rows r and r + 8.
      inputs: Y1, or G and U.
      outputs: the values, the words, how many of each 16 tokens have a kept entry that
        is not zero; with U also relu(G) and U at the kept positions.
    """
    values, metadata, nonzeros, *more = outputs
    gated = len(inputs) > 1
    dtype = prune_2to4.element_type(values)
    loaded, exist = [], constant(0)
    for half, row in enumerate(rows):
        hidden, *up = (row.load_pairs(ref) for ref in inputs)
        loaded.append([[packed16x2.relu(pair, dtype) for pair in hidden], *up])
        sign = arith.select(row.exists, constant(0x8000 << 16 * half), constant(0))
        exist = arith.ori(exist, sign)
    word, counts = constant(0), []
    written = [([], []) for _ in (values, *more)]
    for group in range(4):
        own = slice(2 * group, 2 * group + 2)
        hidden, *up = (
            packed16x2.by_entry(*(pairs[own] for pairs in of_both))
            for of_both in zip(*loaded, strict=True)
        )
        a = [packed16x2.square(entry, dtype) for entry in hidden]
        keys = hidden
        if gated:
            a = [
                packed16x2.product(*both, dtype) for both in zip(a, up[0], strict=True)
            ]
            keys = [packed16x2.magnitude(entry) for entry in a]
        kept = packed16x2.keep_two(keys)
        of_outputs = [a, hidden, *up] if gated else [a]
        for words, entries in zip(written, of_outputs, strict=True):
            pair = kept.first(entries), kept.second(entries)
            for row, half in zip(
                words, (packed16x2.LOWER, packed16x2.UPPER), strict=True
            ):
                row.append(packed16x2.bytes_of(*pair, half))
        word = arith.ori(word, prune_2to4.shifted(kept.positions(), 4 * group))
        counts.append(_kept_nonzeros(kept, a, exist))
    column = activation_tiles.half(place.first_feature)
    for ref, words in zip([values, *more], written, strict=True):
        for row, pairs in zip(rows, words, strict=True):
            with mosaic_internals.when(row.exists):
                prune_2to4.store(ref, row.index, column, pairs)
    prune_2to4.store(metadata, None, place.word(metadata), [word])
    counts = [_bytes_of_nibbles(prune_2to4.sum_over_rows(count)) for count in counts]
    thread = prune_2to4.thread()
    lane = arith.remui(thread, constant(32))
    with mosaic_internals.when(prune_2to4.below(lane, 4)):
        warp = arith.divui(thread, constant(32))
        first = arith.muli(place.token_block, constant(4))
        sixteenth = arith.addi(first, warp)
        prune_2to4.store(nonzeros, sixteenth, place.first_feature, counts)


def _kept_nonzeros(
    kept: packed16x2.Kept, entries: list[ir.Value], exist: ir.Value
) -> ir.Value:
    """Returns a word whose halves are the thread's two tokens: nibble i of a half is 1
    where feature i of the group is kept and not zero, and 0 else, or where the token
    does not exist."""
    bits = constant(0)
    for i, (mask, entry) in enumerate(zip(kept.masks, entries, strict=True)):
        # The sign of a half is set where its 15 bits are not all zero.
        nonzero = arith.addi(packed16x2.magnitude(entry), constant(0x7FFF7FFF))
        counted = arith.andi(arith.andi(nonzero, mask), exist)
        bits = arith.ori(bits, arith.shrui(counted, constant(15 - 4 * i)))
    return bits


def _bytes_of_nibbles(counts: ir.Value) -> ir.Value:
    """Returns four bytes: the sums of the four counts in the lower and in the upper
    half of a word, each a nibble of up to 8."""
    even, odd = (
        arith.andi(nibbles, constant(0x0F0F0F0F))
        for nibbles in (counts, arith.shrui(counts, constant(4)))
    )
    even = arith.addi(even, arith.shrui(even, constant(16)))
    odd = arith.addi(odd, arith.shrui(odd, constant(16)))
    return packed16x2.bytes_of(even, odd, 0x5140)


class Kept(NamedTuple):
    """The entries that a thread has of 2:4 matrices with the same positions."""

    word: ir.Value
    """The word of metadata: the positions in both of the thread's rows."""
    of_rows: Sequence[Sequence[Sequence[ir.Value]]]
    """The kept entries, indexed by row, matrix and group: a word that holds the group's
    two entries."""


def load_kept(
    place: Place,
    rows: Sequence[Row],
    matrices: Sequence[ir.Value],
    metadata: ir.Value,
) -> Kept:
    """Returns a thread's kept values of `matrices` and their positions, which it
    loads."""
    (word,) = prune_2to4.load(metadata, None, place.word(metadata), 1)
    column = activation_tiles.half(place.first_feature)
    return Kept(
        word,
        [
            [prune_2to4.load_pairs(m, row.index, column, 4) for m in matrices]
            for row in rows
        ],
    )


def gradients_at(
    compute: Callable[..., Sequence[ir.Value]],
    place: Place,
    rows: Sequence[Row],
    da: ir.Value,
    kept: Kept,
    outputs: Sequence[ir.Value],
) -> None:
    """Writes the gradients that `compute` makes of dA and of the kept values, at each
    kept position."""
    dtype = prune_2to4.element_type(outputs[0])
    column = activation_tiles.half(place.first_feature)
    for half, (row, there) in enumerate(zip(rows, kept.of_rows, strict=True)):
        dense = row.load_pairs(da)
        words: list[list[ir.Value]] = [[] for _ in outputs]
        for group in range(4):
            positions = arith.shrui(kept.word, constant(4 * group + 16 * half))
            own = packed16x2.gather(dense[2 * group : 2 * group + 2], positions)
            results = compute(own, *(pairs[group] for pairs in there), dtype)
            for row_of_words, result in zip(words, results, strict=True):
                row_of_words.append(result)
        for ref, row_of_words in zip(outputs, words, strict=True):
            with mosaic_internals.when(row.exists):
                prune_2to4.store(ref, row.index, column, row_of_words)
