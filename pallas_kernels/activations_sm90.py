"""2:4 activations of an FFN with a squared ReLU, for Hopper's sparse tensor cores.

Kernels that read and write each number once, between the GEMMs:

    keep_features         A = relu(Y1)^2, of four features the two largest
    backward              dY1 = dA 2 sqrt(A), where A has its entries
    keep_gated_features   A = relu(G)^2 * U, of four features the two of largest |A|
    gated_backward        dG = dA U 2 relu(G) and dU = dA relu(G)^2, there

A 2:4 matrix is its kept values and words of positions, in the order of `packing`. A
warpgroup has 64 tokens by 64 features.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith
from jaxtyping import Array, Float, UInt8, UInt32

from pallas_kernels import activation_gradients as gradients
from pallas_kernels import activation_tiles as tiles
from pallas_kernels import group_of_four as four
from pallas_kernels import two_groups as two
from pallas_kernels.group_of_four import TILE, constant


def keep_features(
    y_up: Float[Array, "tokens features"],
    by_expert: tiles.ByExpert | None = None,
) -> tuple[
    Float[Array, "tokens half_features"],
    UInt32[Array, "token_blocks feature_blocks 128"],
    UInt8[Array, "token_sixteenths features"],
]:
    """A = relu(Y1)^2 2:4 along the features, in one read of Y1.

    The two of four are those of largest A (ties: the lower index, NaN: largest).
    Squares are rounded once.

    Args:
      by_expert: A's rows are these, with the features of their experts.
    Returns:
      A's kept values and their positions; and how many of each 16 tokens have a kept
      entry that is not zero, per feature.
    Raises:
      ValueError: the features are not a multiple of 64, or the dtype not of 16 bits.
    """
    values, metadata, nonzeros = _keep(y_up, by_expert=by_expert)
    return values, metadata, nonzeros


def keep_gated_features(
    gate: Float[Array, "tokens features"], up: Float[Array, "tokens features"]
) -> tuple[
    Float[Array, "tokens half_features"],
    UInt32[Array, "token_blocks feature_blocks 128"],
    UInt8[Array, "token_sixteenths features"],
    Float[Array, "tokens half_features"],
    Float[Array, "tokens half_features"],
]:
    """A = relu(G)^2 * U 2:4 along the features, in one read of G and U.

    The two of four are those of largest |A| (ties: the lower index, NaN: largest). The
    square is rounded, then the product.

    Returns:
      as `keep_features`; and relu(G) and U at the kept positions.
    Raises:
      ValueError: as `keep_features`, or G and U differ.
    """
    if (up.shape, up.dtype) != (gate.shape, gate.dtype):
        raise ValueError(
            f"gate {gate.dtype}{gate.shape} and up {up.dtype}{up.shape} must be alike"
        )
    values, metadata, nonzeros, hidden, kept_up = _keep(gate, up)
    return values, metadata, nonzeros, hidden, kept_up


def _keep(
    gate: Array, *up: Array, by_expert: tiles.ByExpert | None = None
) -> tuple[Array, ...]:
    """What `keep_features` returns, or with U `keep_gated_features`."""
    tokens, features = gate.shape
    if by_expert is not None:
        assert by_expert.row_token is not None
        tokens, features = by_expert.row_token.size, features // by_expert.experts
        by_expert.check(tokens)
    tiles.check(features, gate.dtype)
    blocks = pl.cdiv(tokens, TILE)
    kept = jax.ShapeDtypeStruct((tokens, features // 2), gate.dtype)
    return tiles.on_tiles(
        partial(
            _keep_features,
            tokens=tokens,
            features=features,
            gated=bool(up),
            by_expert=by_expert is not None,
        ),
        (blocks, features // TILE),
        (
            kept,
            jax.ShapeDtypeStruct((blocks, features // TILE, 128), jnp.uint32),
            jax.ShapeDtypeStruct((4 * blocks, features), jnp.uint8),
            *([kept, kept] if up else []),
        ),
        gate,
        *up,
        *(() if by_expert is None else by_expert.arrays),
        name="keep_gated_features" if up else "keep_features",
    )


def gated_backward(
    da: Float[Array, "tokens features"],
    hidden: Float[Array, "tokens half_features"],
    up: Float[Array, "tokens half_features"],
    metadata: UInt32[Array, "token_blocks feature_blocks 128"],
) -> tuple[Float[Array, "tokens half_features"], Float[Array, "tokens half_features"]]:
    """The kept values of dG = dA U 2 relu(G) and dU = dA relu(G)^2, rounded once.

    Args:
      hidden, up, metadata: relu(G) and U where A is kept, as `keep_gated_features` has
        them.
    Raises:
      ValueError: the features are not a multiple of 64, or the dtype not of 16 bits.
    """
    tokens, features = da.shape
    tiles.check(features, da.dtype)
    kept = jax.ShapeDtypeStruct(hidden.shape, da.dtype)
    return tiles.on_tiles(
        partial(_gated_backward, tokens=tokens),
        (pl.cdiv(tokens, TILE), features // TILE),
        (kept, kept),
        da,
        hidden,
        up,
        metadata,
        name="gated_backward",
    )


def backward(
    da: Float[Array, "tokens features"],
    values: Float[Array, "tokens half_features"],
    metadata: UInt32[Array, "token_blocks feature_blocks 128"],
    by_expert: tiles.ByExpert | None = None,
) -> Float[Array, "tokens half_features"]:
    """The kept values of dY1 = dA 2 relu(Y1), at the positions of A = relu(Y1)^2.

    relu(Y1) is the root of A's kept values, rounded to their dtype: exactly what was
    squared, unless the square was below the dtype's normal numbers, or infinite.

    Args:
      by_expert: the rows of A, as `keep_features` had them; those of dA are tokens.
    Raises:
      ValueError: the features are not a multiple of 64, or the dtype not of 16 bits.
    """
    tokens, features = values.shape[0], 2 * values.shape[1]
    if by_expert is not None:
        by_expert.check(tokens)
    tiles.check(features, da.dtype)
    (dy,) = tiles.on_tiles(
        partial(_backward, tokens=tokens, features=features),
        (pl.cdiv(tokens, TILE), features // TILE),
        (jax.ShapeDtypeStruct(values.shape, da.dtype),),
        da,
        values,
        metadata,
        *(() if by_expert is None else by_expert.arrays),
        name="backward",
    )
    return dy


def _keep_features(
    token_block,
    feature_block,
    *refs,
    tokens: int,
    features: int,
    gated: bool,
    by_expert: bool,
) -> None:
    """One thread: 16 features of tokens r and r + 8, as its word of metadata has."""
    inputs, refs = refs[: 1 + gated], refs[1 + gated :]
    source, refs = refs[: 2 * by_expert], refs[2 * by_expert :]
    values, metadata, nonzeros, *more = refs
    thread, first_column = _thread_and_column(feature_block)
    dtype = four.element_type(values)
    rows_of_thread = _rows(token_block, thread, first_column, source, tokens, features)
    loaded, exist = [], constant(0)
    for half, row in enumerate(rows_of_thread):
        hidden, *up = (row.load_pairs(ref) for ref in inputs)
        loaded.append([[two.relu(pair, dtype) for pair in hidden], *up])
        sign = arith.select(row.exists, constant(0x8000 << 16 * half), constant(0))
        exist = arith.ori(exist, sign)
    word, counts = constant(0), []
    outputs = [values, *more]
    written = [([], []) for _ in outputs]
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
        for rows, entries in zip(written, of_outputs, strict=True):
            pair = kept.first(entries), kept.second(entries)
            for row, half in zip(rows, (two.LOWER, two.UPPER), strict=True):
                row.append(two.bytes_of(*pair, half))
        word = arith.ori(word, four.shifted(kept.positions(), 4 * group))
        counts.append(_kept_nonzeros(kept, a, exist))
    for ref, rows in zip(outputs, written, strict=True):
        for row, pairs in zip(rows_of_thread, rows, strict=True):
            with four.when(row.exists):
                four.store(ref, row.index, tiles.half(first_column), pairs)
    index = _word_index(token_block, feature_block, metadata)
    four.store(metadata, None, index, [word])
    counts = [_bytes_of_nibbles(four.sum_over_rows(count)) for count in counts]
    lane = arith.remui(thread, constant(32))
    with four.when(four.below(lane, 4)):
        warp = arith.divui(thread, constant(32))
        sixteenth = arith.addi(arith.muli(token_block, constant(4)), warp)
        four.store(nonzeros, sixteenth, first_column, counts)


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


def _backward(
    token_block,
    feature_block,
    da,
    values,
    metadata,
    *refs,
    tokens: int,
    features: int,
):
    """One thread: as in the forward."""
    place, (*source, dy) = (token_block, feature_block), refs
    sizes = tokens, features
    _at_positions(gradients.squared, place, da, [values], metadata, source, [dy], sizes)


def _gated_backward(
    token_block, feature_block, da, hidden, up, metadata, dgate, dup, *, tokens: int
):
    """Likewise."""
    place, kept, out = (token_block, feature_block), [hidden, up], [dgate, dup]
    sizes = tokens, 0
    _at_positions(gradients.gated, place, da, kept, metadata, [], out, sizes)


def _at_positions(
    compute, place, da, kept, metadata, source, out, sizes: tuple[int, int]
) -> None:
    """What `compute` makes of dA at each kept position and of the values there."""
    token_block, feature_block = place
    thread, first_column = _thread_and_column(feature_block)
    index = _word_index(token_block, feature_block, metadata)
    (word,) = four.load(metadata, None, index, 1)
    dtype = four.element_type(da)
    column = tiles.half(first_column)
    rows = _rows(token_block, thread, first_column, source, *sizes)
    for half, row in enumerate(rows):
        dense = row.load_pairs(da)
        there = [four.load_pairs(ref, row.index, column, 4) for ref in kept]
        words: list[list[ir.Value]] = [[] for _ in out]
        for group in range(4):
            positions = arith.shrui(word, constant(4 * group + 16 * half))
            own = two.gather(dense[2 * group : 2 * group + 2], positions)
            results = compute(own, *(pairs[group] for pairs in there), dtype)
            for row_of_words, result in zip(words, results, strict=True):
                row_of_words.append(result)
        for ref, row_of_words in zip(out, words, strict=True):
            with four.when(row.exists):
                four.store(ref, row.index, column, row_of_words)


def _thread_and_column(feature_block: ir.Value) -> tuple[ir.Value, ir.Value]:
    """The thread, and the first of its 16 features."""
    thread = four.thread()
    start = arith.muli(feature_block, constant(TILE))
    return thread, arith.addi(start, four.metadata_columns(thread))


class _Row(NamedTuple):
    """One of a thread's rows of A."""

    index: ir.Value
    """The last where there is none."""
    exists: ir.Value
    source: ir.Value
    """Its row in what is read."""
    column: ir.Value
    """The first of its 16 features there."""
    filled: ir.Value | None
    """Whether there is a source, else zeros; None: there is."""

    def load_pairs(self, ref: ir.Value) -> list[ir.Value]:
        """16 neighbouring features, two to a word."""
        pairs = [
            pair
            for start in (0, 8)
            for pair in four.load_pairs(
                ref, self.source, arith.addi(self.column, constant(start)), 4
            )
        ]
        if self.filled is None:
            return pairs
        return [arith.select(self.filled, pair, constant(0)) for pair in pairs]


def _rows(
    token_block: ir.Value,
    thread: ir.Value,
    first_column: ir.Value,
    source: Sequence[ir.Value],
    tokens: int,
    features: int,
) -> list[_Row]:
    """Two, 8 apart."""
    rows = []
    for half in range(2):
        start = arith.addi(arith.muli(token_block, constant(TILE)), constant(8 * half))
        row = arith.addi(start, four.metadata_row(thread))
        exists = four.below(row, tokens)
        row = arith.select(exists, row, constant(tokens - 1))
        if not source:
            rows.append(_Row(row, exists, row, first_column, None))
            continue
        of_expert = tiles.Source.of_block(source, token_block, tokens)
        token, filled = of_expert.token(row)
        column = of_expert.feature(first_column, features)
        rows.append(_Row(row, exists, token, column, filled))
    return rows


def _word_index(
    token_block: ir.Value, feature_block: ir.Value, metadata: ir.Value
) -> ir.Value:
    """Of a thread's word, all words being in a row."""
    start = tiles.tile_start(token_block, feature_block, metadata)
    return arith.addi(start, four.thread())
