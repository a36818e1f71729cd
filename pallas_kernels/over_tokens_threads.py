"""2:4 along the tokens as one thread of a warpgroup packs it.

A warpgroup has a tile of 64 tokens by 64 features, a thread 8 features of four tokens.
What it keeps goes through shared memory, so that the lines of a feature are written
whole. Everything here builds MLIR, in the body of an `inline_mgpu` function.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jax.experimental import pallas as pl
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from pallas_kernels import activation_tiles as tiles
from pallas_kernels import group_of_four as four
from pallas_kernels import two_groups as two
from pallas_kernels.group_of_four import TILE, constant

SEGMENTS = 64
"""Of equal length, the last filled up with tokens of zeros."""


@dataclass(frozen=True)
class Form:
    """What is computed of two entries of a group, in the halves of a word."""

    name: str
    gradients: int
    """Written along the features too; the last of `matrices`."""
    matrices: int
    """Written over tokens."""
    compute: Callable[..., Sequence[ir.Value]]
    """Each of `matrices`, of dA's word if there are gradients, and of the kept ones."""


def pack(
    token_block,
    feature_block,
    *refs,
    form: Form,
    inputs: int,
    with_rest: bool,
    tokens: int,
    features: int,
    by_segments: bool,
    lookups: int,
) -> None:
    """One thread: 8 features of four tokens, packed along the tokens. Then all 128 put
    their words into shared memory, and write the lines of features."""
    da, refs = _split(refs, int(form.gradients > 0))
    kept, refs = _split(refs, inputs)
    (metadata,), refs = _split(refs, 1)
    slots, refs = _split(refs, int(with_rest))
    source, refs = _split(refs, lookups)
    along_features, refs = _split(refs, form.gradients)
    out, (shared,) = _split(refs, 2 * form.matrices)
    at = _Part.of_thread(token_block, feature_block, tokens, by_segments)
    # Before anything is stored: what is loaded later would be waited for.
    words, chunks = _rows_of_words(at), _rows_of_lines(at)
    rests: list[_Rest | None] = [None] * 4
    rows = None
    if source:
        rows = tiles.Source.of_block(source, token_block, tokens)
    if with_rest:
        every = [
            row if rows is None else rows.feature(row, features)
            for row in (*words, *chunks)
        ]
        rests = [_Rest.of(slots[0], feature, features) for feature in every]
    tokens_of_thread = [
        _of_token(form, token, da, kept, metadata, along_features, at)
        for token in at.four_tokens(metadata, rows, features)
    ]
    lines = [_Lines(shared, i) for i in range(form.matrices * (1 + with_rest))]
    for i in range(form.matrices):
        dense = [token.dense(i) for token in tokens_of_thread]
        positions = _keep_two_tokens(dense, lines[i :: form.matrices], at)
        _store_positions(out[2 * i + 1], positions, words, rests[:2], at)
    four.barrier()
    for i in range(form.matrices):
        _store_lines(out[2 * i], lines[i :: form.matrices], chunks, rests[2:], at)


def _split(refs: Sequence, count: int) -> tuple[Sequence, Sequence]:
    return refs[:count], refs[count:]


class _Rest(NamedTuple):
    """Where what a feature loses goes."""

    row: ir.Value
    exists: ir.Value
    """Whether it is a whole one."""

    @classmethod
    def of(cls, slots: ir.Value, feature: ir.Value, features: int) -> "_Rest":
        (slot,) = four.load(slots, None, feature, 1)
        row = arith.addi(slot, constant(features))
        return cls(row, four.below(constant(-1), slot))


LINES_WORDS = 8 * (8 * 16 + 4)
"""Of 64 features by 16 groups of tokens; each 8 features 4 words further, so that the
threads of a warp write to different banks."""


class _Lines(NamedTuple):
    """A matrix in shared memory: two kept entries of a group are a word."""

    ref: ir.Value
    index: int

    def place(self, eighth: ir.Value, row: ir.Value, group: ir.Value) -> ir.Value:
        """Of one of 8 features of an eighth."""
        start = arith.muli(eighth, constant(LINES_WORDS // 8))
        start = arith.addi(start, arith.muli(row, constant(16)))
        start = arith.addi(start, constant(self.index * LINES_WORDS))
        return arith.addi(start, group)


class _Kept(NamedTuple):
    """What a token keeps of 8 features."""

    positions: Sequence[ir.Value]
    """Of both groups, in the lower four bits."""
    pairs: Sequence[Sequence[ir.Value]]
    """Of each group, of each matrix."""

    def dense(self, matrix: int) -> list[ir.Value]:
        """8 features, two to a word."""
        both = zip(self.pairs, self.positions, strict=True)
        return [word for p, at in both for word in two.expand(p[matrix], at)]


def _of_token(
    form: Form, token: "_Token", da, kept, metadata, along_features, at: "_Part"
) -> _Kept:
    """Of each matrix; the gradients are written."""
    (word,) = four.load(metadata, None, token.word, 1)
    shift = arith.muli(_upper(token.row), constant(16))
    odd = arith.muli(_bit(at.eighth, 0), constant(8))
    word = arith.shrui(word, arith.addi(shift, odd))
    column = tiles.half(at.first_feature)
    there = [four.load_pairs(ref, token.row, column, 2) for ref in kept]
    whole_row = [
        pair
        for ref in da
        for pair in four.load_pairs(ref, token.source, token.feature, 4)
    ]
    dtype = four.element_type(kept[0])
    positions = [word, arith.shrui(word, constant(4))]
    of_groups = []
    for group in range(2):
        entries = [pairs[group] for pairs in there]
        if whole_row:
            own = whole_row[2 * group : 2 * group + 2]
            entries = [two.gather(own, positions[group]), *entries]
        matrices = list(form.compute(*entries, dtype))
        if token.exists is not None:
            matrices = [
                arith.select(token.exists, pair, constant(0)) for pair in matrices
            ]
        of_groups.append(matrices)
    for i, ref in enumerate(along_features, form.matrices - form.gradients):
        pairs = [matrices[i] for matrices in of_groups]
        if token.stored is None:
            four.store(ref, token.row, column, pairs)
            continue
        with four.when(token.stored):
            four.store(ref, token.row, column, pairs)
    return _Kept(positions, of_groups)


def _keep_two_tokens(
    dense: list[list[ir.Value]], lines: Sequence[_Lines], at: "_Part"
) -> ir.Value:
    """Of four tokens two into the lines, the others into those of the rest, if any; the
    positions of features 0, 2, 4, 6 and 1, 3, 5, 7, four bits each."""
    positions = constant(0)
    for pair in range(4):
        entries = [words[pair] for words in dense]
        kept = two.keep_two([two.magnitude(word) for word in entries])
        positions = arith.ori(positions, four.shifted(kept.positions(), 4 * pair))
        for which, ref in zip((kept, kept.rest()), lines, strict=False):
            both = which.first(entries), which.second(entries)
            for i, half in enumerate((two.LOWER, two.UPPER)):
                place = ref.place(at.eighth, constant(2 * pair + i), at.group)
                four.store(ref.ref, None, place, [two.bytes_of(*both, half)])
    return positions


def _rows_of_lines(at: "_Part") -> list[ir.Value]:
    """The features whose lines a thread writes, a quarter of each."""
    first = arith.muli(at.feature_block, constant(TILE))
    row = arith.addi(first, arith.divui(four.thread(), constant(4)))
    return [row, arith.addi(row, constant(32))]


def _store_lines(
    values,
    lines: Sequence[_Lines],
    features: Sequence[ir.Value],
    rests: Sequence[_Rest | None],
    at: "_Part",
) -> None:
    """From shared memory, four threads to a feature."""
    chunk = arith.andi(four.thread(), constant(3))
    first = arith.muli(at.token_block, constant(TILE))
    column = tiles.half(arith.addi(first, arith.muli(chunk, constant(16))))
    for feature, rest in zip(features, rests, strict=True):
        row = arith.remui(feature, constant(TILE))
        eighth, of_eight = arith.divui(row, constant(8)), arith.andi(row, constant(7))
        group = arith.muli(chunk, constant(4))
        places = [ref.place(eighth, of_eight, group) for ref in lines]
        words = four.load(lines[0].ref, None, places[0], 4)
        four.store(values, feature, column, words)
        if rest is None:
            continue
        with four.when(rest.exists):
            words = four.load(lines[1].ref, None, places[1], 4)
            four.store(values, rest.row, column, words)


class _Token(NamedTuple):
    """One of a thread's tokens."""

    row: ir.Value
    """Of X; the last where there is no such token."""
    word: ir.Value
    """Of the metadata: which has the positions of its features."""
    exists: ir.Value | None
    """Whether there is one, else zeros; None: all do."""
    stored: ir.Value | None
    """Whether there is a row for it; None: all have one."""
    source: ir.Value
    """Its row of dA."""
    feature: ir.Value
    """The first of its 8 there."""


class _Part(NamedTuple):
    """What a thread has of a tile of 64 tokens by 64 features."""

    token_block: ir.Value
    feature_block: ir.Value
    eighth: ir.Value
    """Of the features."""
    group: ir.Value
    """Of four tokens, below 16."""
    first_feature: ir.Value
    tokens: int
    by_segments: bool

    @classmethod
    def of_thread(
        cls, token_block, feature_block, tokens: int, by_segments: bool
    ) -> "_Part":
        thread = four.thread()
        eighth = arith.andi(thread, constant(7))
        start = arith.muli(feature_block, constant(TILE))
        return cls(
            token_block=token_block,
            feature_block=feature_block,
            eighth=eighth,
            group=arith.divui(thread, constant(8)),
            first_feature=arith.addi(start, arith.muli(eighth, constant(8))),
            tokens=tokens,
            by_segments=by_segments,
        )

    def four_tokens(
        self, metadata: ir.Value, by_expert: tiles.Source | None, features: int
    ) -> list[_Token]:
        """Of a group."""
        tokens = self._four_rows(metadata)
        if by_expert is None or by_expert.row_token is None:
            return tokens
        feature = by_expert.feature(self.first_feature, features)
        found = [by_expert.token(token.row) for token in tokens]
        return [
            token._replace(source=source, exists=exists, feature=feature)
            for token, (source, exists) in zip(tokens, found, strict=True)
        ]

    def _four_rows(self, metadata: ir.Value) -> list[_Token]:
        first = arith.muli(self.group, constant(4))
        if self.by_segments:
            apart = pl.cdiv(self.tokens, SEGMENTS)
            first = arith.addi(arith.muli(first, constant(apart)), self.token_block)
        else:
            apart = 1
            first = arith.addi(arith.muli(self.token_block, constant(TILE)), first)
        if self.tokens % TILE:
            rows = [arith.addi(first, constant(i * apart)) for i in range(4)]
            exist = [four.below(row, self.tokens) for row in rows]
            last = constant(self.tokens - 1)
            rows = [arith.select(e, r, last) for e, r in zip(exist, rows, strict=True)]
            words = [self._word(metadata, row) for row in rows]
            return [
                _Token(row, word, exists, exists, row, self.first_feature)
                for row, word, exists in zip(rows, words, exist, strict=True)
            ]
        # Rows in steps that are known, so that one address does for all.
        rows, words = [first], [self._word(metadata, first)]
        for i in range(1, 4):
            rows.append(arith.addi(first, constant(i * apart)))
            if apart % TILE == 0:
                further = tiles.words_of_row(metadata) * (apart // TILE) * i
                words.append(arith.addi(words[0], constant(further)))
            else:
                words.append(self._word(metadata, rows[i]))
        return [
            _Token(row, word, None, None, row, self.first_feature)
            for row, word in zip(rows, words, strict=True)
        ]

    def _word(self, metadata: ir.Value, row: ir.Value) -> ir.Value:
        quarter = arith.divui(self.eighth, constant(2))
        return _word_of_row(metadata, row, self.feature_block, quarter)


def _rows_of_words(at: _Part) -> list[ir.Value]:
    """Both features whose positions are in the word that a thread writes: of 16
    features by 16 tokens, which eight threads have, each writes one of eight words."""
    bits = (_bit(at.group, 0), _bit(at.group, 1), _bit(at.eighth, 0))
    row = arith.addi(
        arith.addi(arith.muli(bits[0], constant(2)), arith.muli(bits[1], constant(4))),
        bits[2],
    )
    sixteenth = arith.muli(arith.divui(at.eighth, constant(2)), constant(16))
    start = arith.muli(at.feature_block, constant(TILE))
    feature = arith.addi(arith.addi(start, sixteenth), row)
    return [feature, arith.addi(feature, constant(8))]


def _store_positions(
    metadata,
    positions: ir.Value,
    features: Sequence[ir.Value],
    rests: Sequence[_Rest | None],
    at: _Part,
) -> None:
    """Each of eight threads' nibbles become one nibble in the words of all eight."""
    word = _exchanged(positions, 1, _bit(at.eighth, 0), 0x5410, 0x3276)
    word = _exchanged(word, 16, _bit(at.group, 1), 0x6240, 0x3715)
    word = _with_nibbles(word, four.shuffled(word, 8), _bit(at.group, 0))
    quarter = arith.divui(at.group, constant(4))
    index = _word_of_row(metadata, features[0], at.token_block, quarter)
    four.store(metadata, None, index, [word])
    for half, rest in enumerate(rests):
        if rest is None:
            continue
        lost = arith.shrui(two.complement(word), constant(16 * half))
        with four.when(rest.exists):
            index = _word_of_row(metadata, rest.row, at.token_block, quarter)
            half_word = four.lower_half(lost)
            four.store_half(metadata, index, _upper(rest.row), half_word)


def _exchanged(
    word: ir.Value, distance: int, bit: ir.Value, lower: int, upper: int
) -> ir.Value:
    """Bytes of a thread's word and of the one `distance` away, by its bit."""
    selectors = arith.select(four.equal(bit, 0), constant(lower), constant(upper))
    return two.bytes_of(word, four.shuffled(word, distance), selectors)


def _with_nibbles(own: ir.Value, other: ir.Value, bit: ir.Value) -> ir.Value:
    """The lower nibbles of both words, byte by byte, or the upper ones."""
    lower, upper = constant(0x0F0F0F0F), constant(0xF0F0F0F0)
    of_lower = arith.ori(
        arith.andi(own, lower), arith.shli(arith.andi(other, lower), constant(4))
    )
    of_upper = arith.ori(
        arith.shrui(arith.andi(other, upper), constant(4)), arith.andi(own, upper)
    )
    return arith.select(four.equal(bit, 0), of_lower, of_upper)


def _bit(value: ir.Value, index: int) -> ir.Value:
    return arith.andi(arith.shrui(value, constant(index)), constant(1))


def _upper(row: ir.Value) -> ir.Value:
    """1 where a row has the upper half of its words."""
    return arith.andi(arith.shrui(row, constant(3)), constant(1))


def _word_of_row(
    metadata: ir.Value, row: ir.Value, k_block: ir.Value, quarter: ir.Value
) -> ir.Value:
    """Of the word with the positions of 16 entries of a row, a quarter of a block."""
    start = tiles.tile_start(arith.divui(row, constant(TILE)), k_block, metadata)
    row = arith.remui(row, constant(TILE))
    return arith.addi(start, four.metadata_index(row, quarter))
