"""2:4 along the tokens for Hopper's sparse tensor cores, as weight gradients read it.

    keep_tokens    X[order]^T, of four tokens the two with the largest |X|

X is 2:4 along its features, as `activations_sm90` makes it. A warpgroup has 128 tokens
by 64 features.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith
from jaxtyping import Array, Float, Int, UInt32

from pallas_kernels import activation_tiles as tiles
from pallas_kernels import group_of_four as four
from pallas_kernels import two_groups as two
from pallas_kernels.group_of_four import TILE, constant


def keep_tokens(
    values: Float[Array, "tokens half_features"],
    metadata: UInt32[Array, "token_blocks feature_blocks 128"],
    order: Int[Array, " ordered"],
    slots: Int[Array, " features"] | None = None,
    *,
    rest_rows: int = 0,
) -> tuple[
    Float[Array, "rows half_ordered"], UInt32[Array, "row_blocks token_blocks 128"]
]:
    """The transpose of a matrix that is 2:4 along its features, 2:4 along the tokens.

    Of four tokens that follow each other in `order` the two of largest magnitude stay
    (ties: the earlier, NaN: largest). For features that are to lose nothing, the other
    two go into a row below: the sum of both rows is exact.

    Args:
      values, metadata: of X (tokens, features).
      order: int32, tokens, or -1 for a row of zeros; a multiple of 64 of them.
      slots: int32, which of the rows below holds what a feature loses, or -1; each of
        them exactly once.
      rest_rows: how many there are, a multiple of 64.
    Returns:
      values (features + rest_rows, ordered / 2) and metadata of X[order]^T, and below
      it of what is lost.
    Raises:
      ValueError: a size is not a multiple of 64, or the dtype not of 16 bits.
    """
    features, ordered = 2 * values.shape[1], order.size
    tiles.check(features, values.dtype)
    if ordered % TILE or rest_rows % TILE or bool(rest_rows) != (slots is not None):
        raise ValueError(
            f"{ordered} tokens in order and rest_rows={rest_rows} must be multiples of "
            f"{TILE}, and slots are given where there are rest_rows"
        )
    rows = features + rest_rows
    return tiles.on_tiles(
        partial(
            _keep_tokens,
            features=features,
            ordered=ordered,
            with_rest=slots is not None,
        ),
        (pl.cdiv(ordered, 2 * TILE), features // TILE),
        (
            jax.ShapeDtypeStruct((rows, ordered // 2), values.dtype),
            jax.ShapeDtypeStruct((rows // TILE, ordered // TILE, 128), jnp.uint32),
        ),
        values,
        metadata,
        order.astype(jnp.int32),
        *(() if slots is None else (slots.astype(jnp.int32),)),
        scratch=(plgpu.SMEM((TILE, 32), jnp.uint32),),
    )


def _keep_tokens(
    token_block,
    feature_block,
    values,
    metadata,
    order,
    *refs,
    features: int,
    ordered: int,
    with_rest: bool,
) -> None:
    """One thread: 16 features of four tokens in order, packed along the tokens. Then
    all 128 put their words into shared memory, and write whole lines of features."""
    slots, (out_values, out_words, tile) = None, refs[with_rest:]
    at = _Part.of_thread(token_block, feature_block, ordered)
    tokens = _four_tokens(values, metadata, order, at)
    if with_rest:
        fours = [arith.addi(at.first_feature, constant(4 * i)) for i in range(4)]
        slots = [slot for i in fours for slot in four.load(refs[0], None, i, 4)]
    nibbles = []
    for pair in range(8):
        entries = [words[pair] for words in tokens]
        kept = two.keep_two([two.magnitude(word) for word in entries])
        nibbles.append(kept.positions())
        both = kept.first(entries), kept.second(entries)
        for i, half in enumerate((two.LOWER, two.UPPER)):
            row = arith.addi(at.first_row, constant(2 * pair + i))
            # Quarters in other banks.
            column = arith.xori(at.group, arith.muli(at.quarter, constant(8)))
            four.store(tile, row, column, [two.bytes_of(*both, half)])
            if slots is None:
                continue
            slot = slots[2 * pair + i]
            with four.when(arith.andi(at.exists, four.below(constant(-1), slot))):
                lost = kept.rest()
                word = two.bytes_of(lost.first(entries), lost.second(entries), half)
                row = arith.addi(slot, constant(features))
                four.store(out_values, row, tiles.half(at.first_token), [word])
    _store_positions(out_words, nibbles, at, slots, features)
    four.barrier()
    thread = four.thread()
    chunk = arith.andi(thread, constant(7))
    token = arith.addi(
        arith.muli(token_block, constant(2 * TILE)), arith.muli(chunk, constant(16))
    )
    for part in range(4):
        row = arith.addi(arith.divui(thread, constant(8)), constant(16 * part))
        column = arith.xori(arith.muli(chunk, constant(4)), constant(8 * part))
        words = four.load(tile, row, column, 4)
        with four.when(four.below(token, ordered)):
            row = arith.addi(arith.muli(feature_block, constant(TILE)), row)
            four.store(out_values, row, tiles.half(token), words)


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
    first_token: ir.Value
    """In order."""
    exists: ir.Value
    """Whether its tokens do."""

    @classmethod
    def of_thread(cls, token_block, feature_block, ordered: int) -> "_Part":
        thread = four.thread()
        quarter = arith.andi(thread, constant(3))
        group = arith.divui(thread, constant(4))
        first_row = arith.muli(quarter, constant(16))
        first_token = arith.addi(
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
            first_token=first_token,
            exists=four.below(first_token, ordered),
        )


def _four_tokens(values, metadata, order, at: _Part) -> list[list[ir.Value]]:
    """16 dense features of each of four tokens in order, two to a word."""
    start = arith.select(at.exists, at.first_token, constant(0))
    dense = []
    for token in four.load(order, None, start, 4):
        exists = four.below(constant(-1), token)
        token = arith.select(exists, token, constant(0))
        index = _word_of_row(metadata, token, at.feature_block, at.quarter)
        (word,) = four.load(metadata, None, index, 1)
        word = arith.shrui(word, arith.muli(_upper(token), constant(16)))
        words = []
        pairs = four.load_pairs(values, token, tiles.half(at.first_feature), 4)
        for group, pair in enumerate(pairs):
            pair = arith.select(exists, pair, constant(0))
            words += two.expand(pair, arith.shrui(word, constant(4 * group)))
        dense.append(words)
    return dense


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
    block = arith.divui(at.first_token, constant(TILE))
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
