"""2:4 along the tokens for Hopper's sparse tensor cores, as weight gradients read it.

    keep_tokens      A^T, of four tokens the two with the largest |A|
    backward         dY1 = dA 2 sqrt(A) along the features, and A^T and dY1^T
    gated_backward   dG = dA U 2 relu(G), dU = dA relu(G)^2, and A^T, dG^T and dU^T

All in one read of each number. What comes in is 2:4 along the features, as
`activations_sm90` makes it. A warpgroup has 128 tokens by 64 features.

The tokens are grouped as they come, or the first of each of 64 segments of them, then
the second, and so on, which parts neighbours.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith
from jaxtyping import Array, Float, Int, UInt32

from pallas_kernels import activation_gradients as gradients
from pallas_kernels import activation_tiles as tiles
from pallas_kernels import group_of_four as four
from pallas_kernels import two_groups as two
from pallas_kernels.group_of_four import TILE, constant

SEGMENTS = 64
"""Of equal length, the last filled up with tokens of zeros."""


class OverTokens(NamedTuple):
    """The transpose of a matrix, 2:4 along the tokens; below the rows of all features
    those of what the whole features lose."""

    values: Float[Array, "rows half_ordered"]
    metadata: UInt32[Array, "row_blocks token_blocks 128"]


class Whole(NamedTuple):
    """The features that are to lose nothing: of four tokens the other two go into a
    row below, and the sum of both rows is exact."""

    slots: Int[Array, " features"]
    """int32, a feature's row below, or -1; each of them exactly once."""
    rows: int
    """How many there are, a multiple of 64."""


def keep_tokens(
    values: Float[Array, "tokens half_features"],
    metadata: UInt32[Array, "token_blocks feature_blocks 128"],
    whole: Whole | None = None,
    *,
    by_segments: bool,
) -> OverTokens:
    """The transpose of a matrix that is 2:4 along its features, 2:4 along the tokens.

    Of four tokens the two of largest magnitude stay (ties: the earlier, NaN: largest);
    their number is filled up to a multiple of 64 with zeros.

    Args:
      by_segments: four tokens are of four segments, not neighbours.
    Raises:
      ValueError: the features are not a multiple of 64, or the dtype not of 16 bits.
    """
    ((packed,), ()) = _over_tokens(_KEEP, (), (values,), metadata, whole, by_segments)
    return packed


def backward(
    da: Float[Array, "tokens features"],
    values: Float[Array, "tokens half_features"],
    metadata: UInt32[Array, "token_blocks feature_blocks 128"],
    whole: Whole | None = None,
    *,
    by_segments: bool,
) -> tuple[Float[Array, "tokens half_features"], OverTokens, OverTokens]:
    """dY1 as `activations_sm90.backward` has it, and A and dY1 as `keep_tokens`.

    Raises:
      ValueError: as `keep_tokens`.
    """
    packed, (dy,) = _over_tokens(
        _SQUARED, (da,), (values,), metadata, whole, by_segments
    )
    a, dy_over_tokens = packed
    return dy, a, dy_over_tokens


def gated_backward(
    da: Float[Array, "tokens features"],
    hidden: Float[Array, "tokens half_features"],
    up: Float[Array, "tokens half_features"],
    metadata: UInt32[Array, "token_blocks feature_blocks 128"],
    whole: Whole | None = None,
    *,
    by_segments: bool,
) -> tuple[Array, Array, OverTokens, OverTokens, OverTokens]:
    """dG and dU as `activations_sm90.gated_backward` has them, and A, dG and dU as
    `keep_tokens`.

    Raises:
      ValueError: as `keep_tokens`.
    """
    packed, (dgate, dup) = _over_tokens(
        _GATED, (da,), (hidden, up), metadata, whole, by_segments
    )
    a, dgate_over_tokens, dup_over_tokens = packed
    return dgate, dup, a, dgate_over_tokens, dup_over_tokens


@dataclass(frozen=True)
class _Form:
    """What is computed of two entries of a group, in the halves of a word."""

    name: str
    gradients: int
    """Written along the features too; the last of `matrices`."""
    matrices: int
    """Written over tokens."""
    compute: Callable[..., Sequence[ir.Value]]
    """Each of `matrices`, of dA's word if there are gradients, and of the kept ones."""


_KEEP = _Form("keep_tokens", 0, 1, lambda kept, dtype: [kept])
_SQUARED = _Form(
    "backward_over_tokens",
    1,
    2,
    lambda da, a, dtype: [a, *gradients.squared(da, a, dtype)],
)
_GATED = _Form(
    "gated_backward_over_tokens",
    2,
    3,
    lambda da, hidden, up, dtype: [
        two.product(two.square(hidden, dtype), up, dtype),
        *gradients.gated(da, hidden, up, dtype),
    ],
)


def _over_tokens(
    form: _Form,
    da: Sequence[Array],
    kept: Sequence[Array],
    metadata: Array,
    whole: Whole | None,
    by_segments: bool,
) -> tuple[list[OverTokens], Sequence[Array]]:
    """The matrices over tokens, and the gradients along the features."""
    tokens, features = kept[0].shape[0], 2 * kept[0].shape[1]
    dtype = kept[0].dtype
    tiles.check(features, dtype)
    rows = features
    if whole is not None:
        rows += whole.rows
        if whole.rows % TILE or whole.rows < TILE:
            raise ValueError(f"{whole.rows} rows below are not a multiple of {TILE}")
    blocks = pl.cdiv(tokens, TILE)
    over_tokens = (
        jax.ShapeDtypeStruct((rows, blocks * TILE // 2), dtype),
        jax.ShapeDtypeStruct((rows // TILE, blocks, 128), jnp.uint32),
    )
    out = tiles.on_tiles(
        partial(
            _pack,
            form=form,
            inputs=len(kept),
            with_rest=whole is not None,
            tokens=tokens,
            features=features,
            by_segments=by_segments,
        ),
        (pl.cdiv(blocks, 2), features // TILE),
        (
            *[jax.ShapeDtypeStruct(kept[0].shape, dtype)] * form.gradients,
            *over_tokens * form.matrices,
        ),
        *da,
        *kept,
        metadata,
        *(() if whole is None else (whole.slots.astype(jnp.int32),)),
        scratch=(plgpu.SMEM((form.matrices * TILE, 32), jnp.uint32),),
        name=form.name,
    )
    parts = iter(out[form.gradients :])
    packed = [OverTokens(*pair) for pair in zip(parts, parts, strict=True)]
    return packed, out[: form.gradients]


def _pack(
    token_block,
    feature_block,
    *refs,
    form: _Form,
    inputs: int,
    with_rest: bool,
    tokens: int,
    features: int,
    by_segments: bool,
) -> None:
    """One thread: 16 features of four tokens, packed along the tokens. Then all 128 put
    their words into shared memory, and write whole lines of features."""
    da, refs = _split(refs, int(form.gradients > 0))
    kept, refs = _split(refs, inputs)
    (metadata,), refs = _split(refs, 1)
    slots_ref, refs = _split(refs, int(with_rest))
    along_features, refs = _split(refs, form.gradients)
    out, (shared,) = _split(refs, 2 * form.matrices)
    at = _Part.of_thread(token_block, feature_block, tokens, by_segments)
    slots = None
    if with_rest:
        fours = [arith.addi(at.first_feature, constant(4 * i)) for i in range(4)]
        slots = [slot for i in fours for slot in four.load(slots_ref[0], None, i, 4)]
    dense: list[list[list[ir.Value]]] = [[] for _ in range(form.matrices)]
    for i in range(4):
        of_token = _of_token(form, at.token(i), da, kept, metadata, along_features, at)
        for matrix, words in zip(dense, of_token, strict=True):
            matrix.append(words)
    for i, matrix in enumerate(dense):
        values, words = out[2 * i : 2 * i + 2]
        tile = _Tile(shared, constant(i * TILE))
        nibbles = _keep_two_tokens(matrix, at, slots, values, tile, features)
        _store_positions(words, nibbles, at, slots, features)
    four.barrier()
    for i in range(form.matrices):
        _store_lines(out[2 * i], _Tile(shared, constant(i * TILE)), at)


def _split(refs: Sequence, count: int) -> tuple[Sequence, Sequence]:
    return refs[:count], refs[count:]


class _Tile(NamedTuple):
    """64 features by 32 groups of tokens in shared memory, two kept entries a word."""

    ref: ir.Value
    first_row: ir.Value

    def row(self, row: ir.Value) -> ir.Value:
        return arith.addi(self.first_row, row)


def _of_token(
    form: _Form, token: "_Token", da, kept, metadata, along_features, at: "_Part"
) -> list[list[ir.Value]]:
    """16 dense features of each matrix, two to a word; the gradients are written."""
    index = _word_of_row(metadata, token.row, at.feature_block, at.quarter)
    (word,) = four.load(metadata, None, index, 1)
    word = arith.shrui(word, arith.muli(_upper(token.row), constant(16)))
    column = tiles.half(at.first_feature)
    there = [four.load_pairs(ref, token.row, column, 4) for ref in kept]
    whole_row = [
        pair
        for ref in da
        for start in (0, 8)
        for pair in four.load_pairs(
            ref, token.row, arith.addi(at.first_feature, constant(start)), 4
        )
    ]
    dtype = four.element_type(kept[0])
    dense: list[list[ir.Value]] = [[] for _ in range(form.matrices)]
    written: list[list[ir.Value]] = [[] for _ in along_features]
    for group in range(4):
        positions = arith.shrui(word, constant(4 * group)) if group else word
        entries = [pairs[group] for pairs in there]
        if whole_row:
            own = whole_row[2 * group : 2 * group + 2]
            entries = [two.gather(own, positions), *entries]
        matrices = list(form.compute(*entries, dtype))
        if token.exists is not None:
            matrices = [
                arith.select(token.exists, pair, constant(0)) for pair in matrices
            ]
        new = matrices[form.matrices - form.gradients :]
        for row, pair in zip(written, new, strict=True):
            row.append(pair)
        for words, pair in zip(dense, matrices, strict=True):
            words += two.expand(pair, positions)
    for ref, pairs in zip(along_features, written, strict=True):
        with four.when(at.exists if token.exists is None else token.exists):
            four.store(ref, token.row, column, pairs)
    return dense


def _keep_two_tokens(
    dense: list[list[ir.Value]], at: "_Part", slots, values, tile: _Tile, features: int
) -> list[ir.Value]:
    """Of four tokens two into the tile, of whole features the others into their rows;
    the positions of each pair of features."""
    nibbles = []
    for pair in range(8):
        entries = [words[pair] for words in dense]
        kept = two.keep_two([two.magnitude(word) for word in entries])
        nibbles.append(kept.positions())
        both = kept.first(entries), kept.second(entries)
        for i, half in enumerate((two.LOWER, two.UPPER)):
            row = arith.addi(at.first_row, constant(2 * pair + i))
            # Quarters in other banks.
            column = arith.xori(at.group, arith.muli(at.quarter, constant(8)))
            four.store(tile.ref, tile.row(row), column, [two.bytes_of(*both, half)])
            if slots is None:
                continue
            slot = slots[2 * pair + i]
            with four.when(arith.andi(at.exists, four.below(constant(-1), slot))):
                lost = kept.rest()
                word = two.bytes_of(lost.first(entries), lost.second(entries), half)
                row = arith.addi(slot, constant(features))
                four.store(values, row, tiles.half(at.first_ordered), [word])
    return nibbles


def _store_lines(values, tile: _Tile, at: "_Part") -> None:
    """From shared memory, eight threads to a feature."""
    thread = four.thread()
    chunk = arith.andi(thread, constant(7))
    ordered = arith.addi(
        arith.muli(at.token_block, constant(2 * TILE)), arith.muli(chunk, constant(16))
    )
    for part in range(4):
        row = arith.addi(arith.divui(thread, constant(8)), constant(16 * part))
        column = arith.xori(arith.muli(chunk, constant(4)), constant(8 * part))
        words = four.load(tile.ref, tile.row(row), column, 4)
        with four.when(four.below(ordered, at.ordered)):
            row = arith.addi(arith.muli(at.feature_block, constant(TILE)), row)
            four.store(values, row, tiles.half(ordered), words)


class _Token(NamedTuple):
    """One of a thread's tokens."""

    row: ir.Value
    """Of X; the last where there is no such token."""
    exists: ir.Value | None
    """None: all do that the part has."""


class _Part(NamedTuple):
    """What a thread has of a tile of 128 tokens by 64 features."""

    token_block: ir.Value
    """Of 128."""
    feature_block: ir.Value
    quarter: ir.Value
    """Of the features."""
    group: ir.Value
    """Of four tokens, below 32."""
    first_row: ir.Value
    """The first of its features in the tile."""
    first_feature: ir.Value
    first_ordered: ir.Value
    """Its first token, in order."""
    exists: ir.Value
    """Whether its groups do."""
    tokens: int
    by_segments: bool

    @classmethod
    def of_thread(
        cls, token_block, feature_block, tokens: int, by_segments: bool
    ) -> "_Part":
        thread = four.thread()
        quarter = arith.andi(thread, constant(3))
        group = arith.divui(thread, constant(4))
        first_row = arith.muli(quarter, constant(16))
        first_ordered = arith.addi(
            arith.muli(token_block, constant(2 * TILE)), arith.muli(group, constant(4))
        )
        return cls(
            token_block=token_block,
            feature_block=feature_block,
            quarter=quarter,
            group=group,
            first_row=first_row,
            first_feature=arith.addi(
                arith.muli(feature_block, constant(TILE)), first_row
            ),
            first_ordered=first_ordered,
            exists=four.below(first_ordered, pl.cdiv(tokens, TILE) * TILE),
            tokens=tokens,
            by_segments=by_segments,
        )

    @property
    def ordered(self) -> int:
        """Tokens, filled up."""
        return pl.cdiv(self.tokens, TILE) * TILE

    def token(self, i: int) -> _Token:
        """The i-th of four."""
        index = arith.addi(self.first_ordered, constant(i))
        if self.by_segments:
            segment = arith.remui(index, constant(SEGMENTS))
            start = arith.muli(segment, constant(self.ordered // SEGMENTS))
            index = arith.addi(start, arith.divui(index, constant(SEGMENTS)))
        inside = four.below(index, self.tokens)
        row = arith.select(inside, index, constant(self.tokens - 1))
        if self.tokens % TILE == 0:
            return _Token(row, None)
        return _Token(row, arith.andi(self.exists, inside))


def _store_positions(metadata, nibbles, at: _Part, slots, features: int) -> None:
    """Of 16 features; a word has those of features r and r + 8, four groups of each."""
    of_four = arith.andi(at.group, constant(3))
    shift = arith.muli(of_four, constant(4))
    nibbles = [arith.shli(nibble, shift) for nibble in nibbles]
    words = [
        four.or_over_groups(two.bytes_of(nibbles[i], nibbles[i + 4], half))
        for i in range(4)
        for half in (two.LOWER, two.UPPER)
    ]
    block = arith.divui(at.first_ordered, constant(TILE))
    quarter = arith.divui(arith.remui(at.group, constant(16)), constant(4))
    for i in range(2):  # the rows that this thread of four writes
        word = four.at(of_four, words[i::2])
        row = arith.addi(arith.muli(of_four, constant(2)), constant(i))
        row = arith.addi(at.first_feature, row)
        with four.when(at.exists):
            index = _word_of_row(metadata, row, block, quarter)
            four.store(metadata, None, index, [word])
        for upper in range(2 * (slots is not None)):
            slot = four.at(of_four, slots[8 * upper + i : 8 * upper + 8 : 2])
            with four.when(arith.andi(at.exists, four.below(constant(-1), slot))):
                lost = arith.shrui(two.complement(word), constant(16 * upper))
                row_below = arith.addi(slot, constant(features))
                index = _word_of_row(metadata, row_below, block, quarter)
                half = four.lower_half(lost)
                four.store_half(metadata, index, _upper(row_below), half)


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
