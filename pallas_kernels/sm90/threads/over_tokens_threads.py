"""2:4 along the tokens, as one thread of a warpgroup packs it.

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

from pallas_kernels.sm90 import mosaic_internals
from pallas_kernels.sm90.threads import activation_tiles, packed16x2, prune_2to4
from pallas_kernels.sm90.threads.prune_2to4 import TILE, constant

SEGMENTS = 64
"""The number of segments of equal length that the tokens are cut into; the last one is
filled up with tokens of zeros."""


@dataclass(frozen=True)
class Form:
    """The computation of a kernel on two entries of a group, which lie in the halves of
    a word."""

    name: str
    gradients: int
    """The number of matrices, the last ones, that are gradients; they are written along
    the features too."""
    matrices: int
    """The number of matrices that are written, 2:4 along the tokens."""
    compute: Callable[..., Sequence[ir.Value]]
    """Returns a word for each of the matrices, from dA's word, if there are gradients,
    and the words of the kept values."""


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
    """Packs the part of one thread along the tokens: 8 features of four tokens. Then
    all 128 threads put their words into shared memory, and write the lines of
    features."""
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
        rows = activation_tiles.Source.of_block(source, token_block, tokens)
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
    mosaic_internals.warpgroup_barrier()
    for i in range(form.matrices):
        _store_lines(out[2 * i], lines[i :: form.matrices], chunks, rests[2:], at)


def _split(refs: Sequence, count: int) -> tuple[Sequence, Sequence]:
    return refs[:count], refs[count:]


class _Rest(NamedTuple):
    """The residual row of a feature that is kept dense: it takes the entries that 2:4
    drops."""

    row: ir.Value
    exists: ir.Value
    """Whether the feature is kept dense, and so has a residual row."""

    @classmethod
    def of(cls, slots: ir.Value, feature: ir.Value, features: int) -> "_Rest":
        (slot,) = prune_2to4.load(slots, None, feature, 1)
        row = arith.addi(slot, constant(features))
        return cls(row, prune_2to4.below(constant(-1), slot))


LINES_WORDS = 8 * (8 * 16 + 4)
"""The words of shared memory for 64 features by 16 groups of tokens. Each 8 features
begin 4 words further, so that the threads of a warp write to different banks."""


class _Lines(NamedTuple):
    """A matrix in shared memory, each word of which holds the two kept entries of a
    group."""

    ref: ir.Value
    index: int

    def place(self, eighth: ir.Value, row: ir.Value, group: ir.Value) -> ir.Value:
        """Returns the index of the word for a group of tokens and one of the 8 features
        (`row`) of an eighth."""
        start = arith.muli(eighth, constant(LINES_WORDS // 8))
        start = arith.addi(start, arith.muli(row, constant(16)))
        start = arith.addi(start, constant(self.index * LINES_WORDS))
        return arith.addi(start, group)


class _Kept(NamedTuple):
    """The two of four features that a token keeps, for 8 features: two groups."""

    positions: Sequence[ir.Value]
    """The positions in each of the two groups, in the lower four bits of a word."""
    pairs: Sequence[Sequence[ir.Value]]
    """The kept entries, indexed by group and matrix: a word that holds the group's two
    entries."""

    def dense(self, matrix: int) -> list[ir.Value]:
        """Returns the token's 8 features of a matrix, two to a word, zeros where
        nothing is kept."""
        both = zip(self.pairs, self.positions, strict=True)
        return [word for p, at in both for word in packed16x2.expand(p[matrix], at)]


def _of_token(
    form: Form, token: "_Token", da, kept, metadata, along_features, at: "_Part"
) -> _Kept:
    """Returns the entries that one token keeps of each matrix, and writes its gradients
    along the features."""
    (word,) = prune_2to4.load(metadata, None, token.word, 1)
    shift = arith.muli(_upper(token.row), constant(16))
    odd = arith.muli(_bit(at.eighth, 0), constant(8))
    word = arith.shrui(word, arith.addi(shift, odd))
    column = activation_tiles.half(at.first_feature)
    there = [prune_2to4.load_pairs(ref, token.row, column, 2) for ref in kept]
    whole_row = [
        pair
        for ref in da
        for pair in prune_2to4.load_pairs(ref, token.source, token.feature, 4)
    ]
    dtype = prune_2to4.element_type(kept[0])
    positions = [word, arith.shrui(word, constant(4))]
    of_groups = []
    for group in range(2):
        entries = [pairs[group] for pairs in there]
        if whole_row:
            own = whole_row[2 * group : 2 * group + 2]
            entries = [packed16x2.gather(own, positions[group]), *entries]
        matrices = list(form.compute(*entries, dtype))
        if token.exists is not None:
            matrices = [
                arith.select(token.exists, pair, constant(0)) for pair in matrices
            ]
        of_groups.append(matrices)
    for i, ref in enumerate(along_features, form.matrices - form.gradients):
        pairs = [matrices[i] for matrices in of_groups]
        if token.stored is None:
            prune_2to4.store(ref, token.row, column, pairs)
            continue
        with mosaic_internals.when(token.stored):
            prune_2to4.store(ref, token.row, column, pairs)
    return _Kept(positions, of_groups)


def _keep_two_tokens(
    dense: list[list[ir.Value]], lines: Sequence[_Lines], at: "_Part"
) -> ir.Value:
    """Stores two of every four tokens into the first of `lines`, and the other two into
    the second, if there is one. Returns the positions of features 0, 2, 4, 6 and 1, 3,
    5, 7, four bits each."""
    positions = constant(0)
    for pair in range(4):
        entries = [words[pair] for words in dense]
        kept = packed16x2.keep_two([packed16x2.magnitude(word) for word in entries])
        positions = arith.ori(positions, prune_2to4.shifted(kept.positions(), 4 * pair))
        for which, ref in zip((kept, kept.rest()), lines, strict=False):
            both = which.first(entries), which.second(entries)
            for i, half in enumerate((packed16x2.LOWER, packed16x2.UPPER)):
                place = ref.place(at.eighth, constant(2 * pair + i), at.group)
                prune_2to4.store(
                    ref.ref, None, place, [packed16x2.bytes_of(*both, half)]
                )
    return positions


def _rows_of_lines(at: "_Part") -> list[ir.Value]:
    """Returns the two features of whose lines a thread writes one quarter each."""
    first = arith.muli(at.feature_block, constant(TILE))
    row = arith.addi(first, arith.divui(prune_2to4.thread(), constant(4)))
    return [row, arith.addi(row, constant(32))]


def _store_lines(
    values,
    lines: Sequence[_Lines],
    features: Sequence[ir.Value],
    rests: Sequence[_Rest | None],
    at: "_Part",
) -> None:
    """Writes the lines of features from shared memory; four threads share a feature."""
    chunk = arith.andi(prune_2to4.thread(), constant(3))
    first = arith.muli(at.token_block, constant(TILE))
    column = activation_tiles.half(arith.addi(first, arith.muli(chunk, constant(16))))
    for feature, rest in zip(features, rests, strict=True):
        row = arith.remui(feature, constant(TILE))
        eighth, of_eight = arith.divui(row, constant(8)), arith.andi(row, constant(7))
        group = arith.muli(chunk, constant(4))
        places = [ref.place(eighth, of_eight, group) for ref in lines]
        words = prune_2to4.load(lines[0].ref, None, places[0], 4)
        prune_2to4.store(values, feature, column, words)
        if rest is None:
            continue
        with mosaic_internals.when(rest.exists):
            words = prune_2to4.load(lines[1].ref, None, places[1], 4)
            prune_2to4.store(values, rest.row, column, words)


class _Token(NamedTuple):
    """A token of a thread."""

    row: ir.Value
    """The index of the token's row in the kept matrices; the last one where there is no
    such token."""
    word: ir.Value
    """The index of the word of metadata that holds the positions of its features."""
    exists: ir.Value | None
    """Whether the row has a token, since rows without one are zeros; None: every row
    has one."""
    stored: ir.Value | None
    """Whether the gradients have a row for the token; None: they do for every token."""
    source: ir.Value
    """The index of the token's row in dA."""
    feature: ir.Value
    """The index of the first of the thread's 8 features in that row."""


class _Part(NamedTuple):
    """The part of one thread of a tile of 64 tokens by 64 features: 8 features of four
    tokens."""

    token_block: ir.Value
    feature_block: ir.Value
    eighth: ir.Value
    """The eighth of the tile's features that the thread has, 0 to 7."""
    group: ir.Value
    """The group of four tokens that the thread has, 0 to 15."""
    first_feature: ir.Value
    tokens: int
    by_segments: bool

    @classmethod
    def of_thread(
        cls, token_block, feature_block, tokens: int, by_segments: bool
    ) -> "_Part":
        thread = prune_2to4.thread()
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
        self,
        metadata: ir.Value,
        by_expert: activation_tiles.Source | None,
        features: int,
    ) -> list[_Token]:
        """Returns the four tokens of the thread's group."""
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
            exist = [prune_2to4.below(row, self.tokens) for row in rows]
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
                further = activation_tiles.words_of_row(metadata) * (apart // TILE) * i
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
    """Returns the two features whose positions are in the word that a thread writes.
    Eight threads have 16 features by 16 tokens, and each of them writes one of eight
    words."""
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
    """Writes the words of positions: the eight nibbles of each of eight threads are
    exchanged, so that every thread gets one nibble of each."""
    word = _exchanged(positions, 1, _bit(at.eighth, 0), 0x5410, 0x3276)
    word = _exchanged(word, 16, _bit(at.group, 1), 0x6240, 0x3715)
    word = _with_nibbles(word, mosaic_internals.shuffled(word, 8), _bit(at.group, 0))
    quarter = arith.divui(at.group, constant(4))
    index = _word_of_row(metadata, features[0], at.token_block, quarter)
    prune_2to4.store(metadata, None, index, [word])
    for half, rest in enumerate(rests):
        if rest is None:
            continue
        lost = arith.shrui(packed16x2.complement(word), constant(16 * half))
        with mosaic_internals.when(rest.exists):
            index = _word_of_row(metadata, rest.row, at.token_block, quarter)
            half_word = prune_2to4.lower_half(lost)
            prune_2to4.store_half(metadata, index, _upper(rest.row), half_word)


def _exchanged(
    word: ir.Value, distance: int, bit: ir.Value, lower: int, upper: int
) -> ir.Value:
    """Returns bytes of a thread's word and of the word of the thread `distance` away:
    the bytes that `lower` selects where the thread's `bit` is 0, else those that
    `upper` selects."""
    selectors = arith.select(prune_2to4.equal(bit, 0), constant(lower), constant(upper))
    return packed16x2.bytes_of(
        word, mosaic_internals.shuffled(word, distance), selectors
    )


def _with_nibbles(own: ir.Value, other: ir.Value, bit: ir.Value) -> ir.Value:
    """Returns the lower nibbles of both words, byte by byte, where `bit` is 0, else the
    upper ones."""
    lower, upper = constant(0x0F0F0F0F), constant(0xF0F0F0F0)
    of_lower = arith.ori(
        arith.andi(own, lower), arith.shli(arith.andi(other, lower), constant(4))
    )
    of_upper = arith.ori(
        arith.shrui(arith.andi(other, upper), constant(4)), arith.andi(own, upper)
    )
    return arith.select(prune_2to4.equal(bit, 0), of_lower, of_upper)


def _bit(value: ir.Value, index: int) -> ir.Value:
    return arith.andi(arith.shrui(value, constant(index)), constant(1))


def _upper(row: ir.Value) -> ir.Value:
    """Returns 1 where a row has the upper half of its words of metadata, else 0."""
    return arith.andi(arith.shrui(row, constant(3)), constant(1))


def _word_of_row(
    metadata: ir.Value, row: ir.Value, k_block: ir.Value, quarter: ir.Value
) -> ir.Value:
    """Returns the index of the word with the positions of 16 entries of a row, a
    quarter of a block along k."""
    start = activation_tiles.tile_start(
        arith.divui(row, constant(TILE)), k_block, metadata
    )
    row = arith.remui(row, constant(TILE))
    return arith.addi(start, prune_2to4.metadata_index(row, quarter))
