"""2:4 activations of a squared-ReLU FFN for Hopper's sparse tensor cores.

Kernels that read and write each number once, between the GEMMs:

    keep_features         A = relu(Y1)^2, of four features the two largest
    backward              dY1 = dA 2 sqrt(A), where A has its entries
    keep_gated_features   A = relu(G)^2 * U, of four features the two of largest |A|
    gated_backward        dG = dA U 2 relu(G) and dU = dA relu(G)^2, there
    keep_tokens           X[order]^T, of four tokens the two with the largest |X|

A 2:4 matrix is its kept values and words of positions, in the order of `packing`. A
warpgroup has 64 tokens by 64 features, or 128 tokens where it packs along them.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith
from jaxtyping import Array, Float, Int, UInt8, UInt32

from pallas_kernels import group_of_four as four
from pallas_kernels import two_groups as two
from pallas_kernels.group_of_four import TILE, constant

_SCALAR = plgpu.Layout.WG_SPLAT


def why_unsupported(features: int, dtype: str) -> str | None:
    """Why activations cannot be packed, whatever the number of tokens, or None."""
    if features % TILE or not features:
        return f"{features} features are not a multiple of {TILE}"
    if dtype not in ("bfloat16", "float16"):
        return f"packs activations in bfloat16 and float16, not {dtype}"
    return None


def keep_features(
    y_up: Float[Array, "tokens features"],
) -> tuple[
    Float[Array, "tokens half_features"],
    UInt32[Array, "token_blocks feature_blocks 128"],
    UInt8[Array, "token_sixteenths features"],
]:
    """A = relu(Y1)^2 2:4 along the features, in one read of Y1.

    The two of four are those of largest A (ties: the lower index, NaN: largest).
    Squares are rounded once.

    Returns:
      A's kept values and their positions; and how many of each 16 tokens have a kept
      entry that is not zero, per feature.
    Raises:
      ValueError: the features are not a multiple of 64, or the dtype not of 16 bits.
    """
    values, metadata, nonzeros = _keep(y_up)
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


def _keep(gate: Array, *up: Array) -> tuple[Array, ...]:
    """What `keep_features` returns, or with U `keep_gated_features`."""
    tokens, features = gate.shape
    _check(features, gate.dtype)
    blocks = pl.cdiv(tokens, TILE)
    kept = jax.ShapeDtypeStruct((tokens, features // 2), gate.dtype)
    return _call(
        partial(_keep_features, tokens=tokens, gated=bool(up)),
        (blocks, features // TILE),
        (
            kept,
            jax.ShapeDtypeStruct((blocks, features // TILE, 128), jnp.uint32),
            jax.ShapeDtypeStruct((4 * blocks, features), jnp.uint8),
            *([kept, kept] if up else []),
        ),
        gate,
        *up,
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
    _check(features, da.dtype)
    kept = jax.ShapeDtypeStruct(hidden.shape, da.dtype)
    return _call(
        partial(_gated_backward, tokens=tokens),
        (pl.cdiv(tokens, TILE), features // TILE),
        (kept, kept),
        da,
        hidden,
        up,
        metadata,
    )


def backward(
    da: Float[Array, "tokens features"],
    values: Float[Array, "tokens half_features"],
    metadata: UInt32[Array, "token_blocks feature_blocks 128"],
) -> Float[Array, "tokens half_features"]:
    """The kept values of dY1 = dA 2 relu(Y1), at the positions of A = relu(Y1)^2.

    relu(Y1) is the root of A's kept values, rounded to their dtype: exactly what was
    squared, unless the square was below the dtype's normal numbers, or infinite.

    Raises:
      ValueError: the features are not a multiple of 64, or the dtype not of 16 bits.
    """
    tokens, features = da.shape
    _check(features, da.dtype)
    (dy,) = _call(
        partial(_backward, tokens=tokens),
        (pl.cdiv(tokens, TILE), features // TILE),
        (jax.ShapeDtypeStruct(values.shape, da.dtype),),
        da,
        values,
        metadata,
    )
    return dy


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
    _check(features, values.dtype)
    if ordered % TILE or rest_rows % TILE or bool(rest_rows) != (slots is not None):
        raise ValueError(
            f"{ordered} tokens in order and rest_rows={rest_rows} must be multiples of "
            f"{TILE}, and slots are given where there are rest_rows"
        )
    rows = features + rest_rows
    return _call(
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


def _check(features: int, dtype: jnp.dtype) -> None:
    if reason := why_unsupported(features, str(dtype)):
        raise ValueError(reason)


def _call(kernel, grid: tuple[int, int], out_type: tuple, *operands, scratch=()):
    """`kernel` on every tile of 64 tokens by 64 features."""
    return plgpu.kernel(
        partial(_on_tile, kernel, len(operands) + len(out_type)),
        out_type=out_type,
        scratch_types=scratch,
        grid=grid,
        grid_names=("token_block", "feature_block"),
        kernel_name=f"activations_{kernel.func.__name__.strip('_')}",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup
        ),
    )(*operands)


def _on_tile(kernel, arrays: int, *refs) -> None:
    blocks = [lax.axis_index(name) for name in ("token_block", "feature_block")]
    scratch = [plgpu.RefType()] * (len(refs) - arrays)

    @plgpu.inline_mgpu(
        arg_types=(_SCALAR, _SCALAR, *[plgpu.RefType()] * arrays, *scratch)
    )
    def run(_, token_block, feature_block, *refs):
        kernel(token_block.registers.item(), feature_block.registers.item(), *refs)

    run(*blocks, *refs)


def _keep_features(token_block, feature_block, *refs, tokens: int, gated: bool) -> None:
    """One thread: 16 features of tokens r and r + 8, as its word of metadata has."""
    inputs, (values, metadata, nonzeros, *more) = refs[: 1 + gated], refs[1 + gated :]
    thread, first_column = _thread_and_column(feature_block)
    dtype = four.element_type(values)
    tokens_of_thread = [_token(token_block, thread, half, tokens) for half in range(2)]
    loaded, exist = [], constant(0)
    for half, (row, exists) in enumerate(tokens_of_thread):
        hidden, *up = (_load_pairs(ref, row, first_column) for ref in inputs)
        loaded.append([[two.relu(pair, dtype) for pair in hidden], *up])
        sign = arith.select(exists, constant(0x8000 << 16 * half), constant(0))
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
        for (row, exists), pairs in zip(tokens_of_thread, rows, strict=True):
            with four.when(exists):
                four.store(ref, row, _half(first_column), pairs)
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


def _backward(token_block, feature_block, da, values, metadata, dy, *, tokens: int):
    """One thread: as in the forward."""

    def gradient(da: ir.Value, square: ir.Value) -> list[ir.Value]:
        hidden = _root(square)
        return [arith.mulf(da, arith.addf(hidden, hidden))]

    place = token_block, feature_block
    _at_positions(gradient, place, da, [values], metadata, [dy], tokens)


def _gated_backward(
    token_block, feature_block, da, hidden, up, metadata, dgate, dup, *, tokens: int
):
    """Likewise. Products of three numbers of 8 bits are exact in float32."""

    def gradients(da: ir.Value, hidden: ir.Value, up: ir.Value) -> list[ir.Value]:
        hidden, up = four.to_float32(hidden), four.to_float32(up)
        of_hidden = arith.mulf(da, hidden)
        twice = arith.addf(of_hidden, of_hidden)
        return [arith.mulf(twice, up), arith.mulf(of_hidden, hidden)]

    place = token_block, feature_block
    _at_positions(gradients, place, da, [hidden, up], metadata, [dgate, dup], tokens)


def _at_positions(gradients, place, da, kept, metadata, out, tokens: int) -> None:
    """What `gradients` makes of dA at each kept position and of the values there."""
    token_block, feature_block = place
    thread, first_column = _thread_and_column(feature_block)
    index = _word_index(token_block, feature_block, metadata)
    (word,) = four.load(metadata, None, index, 1)
    for half in range(2):
        row, exists = _token(token_block, thread, half, tokens)
        dense = _load_row(da, row, first_column)
        there = [four.load(ref, row, _half(first_column), 8) for ref in kept]
        words: list[list[ir.Value]] = [[] for _ in out]
        for group in range(4):
            own = dense[4 * group : 4 * group + 4]
            pairs = []
            for i, position in enumerate(four.positions_in(word, group, half)):
                values = [entries[2 * group + i] for entries in there]
                products = gradients(four.at(position, own), *values)
                dtype = four.element_type(out[0])
                pairs.append([four.rounded_bits(p, dtype) for p in products])
            for row_of_words, low, high in zip(words, *pairs, strict=True):
                row_of_words.append(arith.ori(low, four.shifted(high, 16)))
        for ref, row_of_words in zip(out, words, strict=True):
            with four.when(exists):
                four.store(ref, row, _half(first_column), row_of_words)


def _root(square: ir.Value) -> ir.Value:
    """Rounded to the square's 16 bits, which is what was squared; as float32."""
    root = four.square_root(four.to_float32(square))
    return four.to_float32(arith.truncf(square.type, root))


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
                four.store(out_values, row, _half(at.first_token), [word])
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
            four.store(out_values, row, _half(token), words)


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
        pairs = four.load_pairs(values, token, _half(at.first_feature), 4)
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


def _thread_and_column(feature_block: ir.Value) -> tuple[ir.Value, ir.Value]:
    """The thread, and the first of its 16 features."""
    thread = four.thread()
    start = arith.muli(feature_block, constant(TILE))
    return thread, arith.addi(start, four.metadata_columns(thread))


def _token(
    token_block: ir.Value, thread: ir.Value, half: int, tokens: int
) -> tuple[ir.Value, ir.Value]:
    """A token of a thread, and whether it exists; one that does not is the last."""
    start = arith.addi(arith.muli(token_block, constant(TILE)), constant(8 * half))
    row = arith.addi(start, four.metadata_row(thread))
    exists = four.below(row, tokens)
    return arith.select(exists, row, constant(tokens - 1)), exists


def _load_row(ref: ir.Value, row: ir.Value, column: ir.Value) -> list[ir.Value]:
    """16 neighbouring features of a token, float32."""
    halves = [
        four.load(ref, row, arith.addi(column, constant(start)), 8) for start in (0, 8)
    ]
    return [four.to_float32(entry) for half in halves for entry in half]


def _load_pairs(ref: ir.Value, row: ir.Value, column: ir.Value) -> list[ir.Value]:
    """The same, two to a word."""
    halves = [
        four.load_pairs(ref, row, arith.addi(column, constant(start)), 4)
        for start in (0, 8)
    ]
    return [pair for half in halves for pair in half]


def _half(column: ir.Value) -> ir.Value:
    """Where the kept value of two columns is."""
    return arith.divui(column, constant(2))


def _word_index(
    token_block: ir.Value, feature_block: ir.Value, metadata: ir.Value
) -> ir.Value:
    """Of a thread's word, all words being in a row."""
    start = _tile_start(token_block, feature_block, metadata)
    return arith.addi(start, four.thread())


def _word_of_row(
    metadata: ir.Value, row: ir.Value, k_block: ir.Value, quarter: ir.Value
) -> ir.Value:
    """Of the word with the positions of 16 entries of a row, a quarter of a block."""
    start = _tile_start(arith.divui(row, constant(TILE)), k_block, metadata)
    row = arith.remui(row, constant(TILE))
    return arith.addi(start, four.metadata_index(row, quarter))


def _tile_start(row_block: ir.Value, k_block: ir.Value, metadata: ir.Value) -> ir.Value:
    """Of the first word of a tile."""
    _, k_blocks, words = ir.MemRefType(metadata.type).shape
    tile = arith.addi(arith.muli(row_block, constant(k_blocks)), k_block)
    return arith.muli(tile, constant(words))
