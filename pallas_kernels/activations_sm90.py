"""2:4 activations of a squared-ReLU FFN for Hopper's sparse tensor cores.

Three kernels that read and write each number once, between the GEMMs:

    keep_features    A = relu(Y1)^2, of four features the two with the largest Y1
    backward         dY1 = dA 2 sqrt(A), where A has its entries
    keep_tokens      X[order]^T, of four tokens the two with the largest |X|

A 2:4 matrix is its kept values and words of positions, in the order of `packing`. A
warpgroup has 64 tokens by 64 features.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith
from jaxtyping import Array, Float, Int, UInt8, UInt32

from pallas_kernels import group_of_four as four
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

    The two of four are those of largest Y1 by its sign (ties: the lower index, NaN:
    largest), which are those of largest A. Squares are rounded once.

    Returns:
      A's kept values and their positions; and how many of each 16 tokens have a kept
      entry that is not zero, per feature.
    Raises:
      ValueError: the features are not a multiple of 64, or the dtype not of 16 bits.
    """
    tokens, features = y_up.shape
    _check(features, y_up.dtype)
    blocks = pl.cdiv(tokens, TILE)
    return _call(
        partial(_keep_features, tokens=tokens),
        (blocks, features // TILE),
        (
            jax.ShapeDtypeStruct((tokens, features // 2), y_up.dtype),
            jax.ShapeDtypeStruct((blocks, features // TILE, 128), jnp.uint32),
            jax.ShapeDtypeStruct((4 * blocks, features), jnp.uint8),
        ),
        y_up,
    )


def backward(
    da: Float[Array, "tokens features"],
    values: Float[Array, "tokens half_features"],
    metadata: UInt32[Array, "token_blocks feature_blocks 128"],
) -> Float[Array, "tokens half_features"]:
    """The kept values of dY1 = dA 2 relu(Y1), at the positions of A = relu(Y1)^2.

    relu(Y1) is the root of A's kept values, which have been rounded: half a unit in
    the last place of the result comes from that.

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
) -> tuple[Array, ...]:
    """The transpose of a matrix that is 2:4 along its features, 2:4 along the tokens.

    Of four tokens that follow each other in `order` the two of largest magnitude stay
    (ties: the earlier, NaN: largest). For features that are to lose nothing, the other
    two go into a second 2:4 matrix: the sum of both is exact.

    Args:
      values, metadata: of X (tokens, features).
      order: int32, tokens, or -1 for a row of zeros; a multiple of 64 of them.
      slots: int32, the row of the second matrix that holds what a feature loses, or
        -1; each row exactly once.
      rest_rows: of the second matrix, a multiple of 64.
    Returns:
      values (features, ordered / 2) and metadata of X[order]^T; and of the rest where
      there are slots, (rest_rows, ordered / 2).
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
    sizes = [features] + [rest_rows] * (slots is not None)
    out = []
    for rows in sizes:
        halves = (rows // TILE, ordered // TILE, 256)
        out.append(jax.ShapeDtypeStruct((rows, ordered // 2), values.dtype))
        out.append(jax.ShapeDtypeStruct(halves, jnp.uint16))
    packed = _call(
        partial(_keep_tokens, with_rest=slots is not None),
        (ordered // TILE, features // TILE),
        tuple(out),
        values,
        metadata,
        order.astype(jnp.int32),
        *(() if slots is None else (slots.astype(jnp.int32),)),
        scratch=(plgpu.SMEM((TILE, TILE), values.dtype),),
    )
    return tuple(_words(x) if x.dtype == jnp.uint16 else x for x in packed)


def _words(halves: Array) -> UInt32[Array, "row_blocks k_blocks 128"]:
    pairs = halves.reshape(*halves.shape[:-1], 128, 2)
    return lax.bitcast_convert_type(pairs, jnp.uint32)


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


def _keep_features(
    token_block, feature_block, y_up, values, metadata, nonzeros, *, tokens: int
) -> None:
    """One thread: 16 features of tokens r and r + 8, as its word of metadata has."""
    thread, first_column = _thread_and_column(feature_block)
    word, counts = constant(0), [constant(0)] * 4
    for half in range(2):
        row, exists = _token(token_block, thread, half, tokens)
        entries = _load_row(y_up, row, first_column)
        pairs = []
        for group in range(4):
            bits = [four.bits_of(entry) for entry in entries[4 * group : 4 * group + 4]]
            keys = [four.value_key(b) for b in bits]
            kept = four.keep_two(keys)
            squares = []
            for pick in (kept.first, kept.second):
                square = _relu_squared(pick(bits), pick(keys))
                squares.append(four.rounded_bits(square, four.element_type(values)))
            pairs.append(arith.ori(squares[0], four.shifted(squares[1], 16)))
            positions = kept.positions()
            word = arith.ori(word, four.shifted(positions, 4 * group + 16 * half))
            for square, position in zip(squares, four.pair_of(positions), strict=True):
                counts[group] = arith.addi(
                    counts[group], _one_in_byte(position, square, exists)
                )
        with four.when(exists):
            four.store(values, row, _half(first_column), pairs)
    four.store(
        metadata, None, _word_index(token_block, feature_block, metadata), [word]
    )
    # A byte per feature: at most 16.
    counts = [four.sum_over_rows(count) for count in counts]
    lane = arith.remui(thread, constant(32))
    with four.when(four.below(lane, 4)):
        warp = arith.divui(thread, constant(32))
        sixteenth = arith.addi(arith.muli(token_block, constant(4)), warp)
        four.store(nonzeros, sixteenth, first_column, counts)


def _relu_squared(bits: ir.Value, key: ir.Value) -> ir.Value:
    """Of a float32, float32; NaN stays, its key being positive."""
    f32 = ir.F32Type.get()
    positive = arith.cmpi(arith.CmpIPredicate.sgt, key, constant(0))
    hidden = arith.bitcast(f32, arith.select(positive, bits, constant(0)))
    return arith.mulf(hidden, hidden)


def _one_in_byte(position: ir.Value, square: ir.Value, exists: ir.Value) -> ir.Value:
    """1 in the byte of `position`, if `square`, a 16-bit float, is not zero."""
    nonzero = arith.cmpi(arith.CmpIPredicate.ne, square, constant(0))
    one = arith.extui(four.i32(), arith.andi(nonzero, exists))
    return arith.shli(one, arith.muli(position, constant(8)))


def _backward(token_block, feature_block, da, values, metadata, dy, *, tokens: int):
    """One thread: as in the forward."""
    thread, first_column = _thread_and_column(feature_block)
    index = _word_index(token_block, feature_block, metadata)
    (word,) = four.load(metadata, None, index, 1)
    for half in range(2):
        row, exists = _token(token_block, thread, half, tokens)
        gradients = _load_row(da, row, first_column)
        squares = four.load(values, row, _half(first_column), 8)
        words = []
        for group in range(4):
            own = gradients[4 * group : 4 * group + 4]
            products = []
            for i, position in enumerate(four.positions_in(word, group, half)):
                root = four.square_root(four.to_float32(squares[2 * group + i]))
                product = arith.mulf(four.at(position, own), arith.addf(root, root))
                products.append(four.rounded_bits(product, four.element_type(dy)))
            words.append(arith.ori(products[0], four.shifted(products[1], 16)))
        with four.when(exists):
            four.store(dy, row, _half(first_column), words)


def _keep_tokens(
    token_block, feature_block, values, metadata, order, *refs, with_rest: bool
) -> None:
    """All 128 threads put the tile into shared memory, dense; then each packs 32
    tokens of one feature."""
    *refs, tile = refs
    thread = four.thread()
    _decompress(token_block, feature_block, values, metadata, order, tile)
    four.barrier()
    column = arith.remui(thread, constant(TILE))
    side = arith.divui(thread, constant(TILE))
    feature = arith.addi(arith.muli(feature_block, constant(TILE)), column)
    slots, (out_values, out_words, *rest) = None, refs
    if with_rest:
        slots, out_values, out_words, *rest = refs
    for quarter in range(2):
        quarter_of_tile = arith.addi(arith.muli(side, constant(2)), constant(quarter))
        first_token = arith.muli(quarter_of_tile, constant(16))
        groups = []
        for group in range(4):
            tokens = [
                arith.addi(first_token, constant(4 * group + i)) for i in range(4)
            ]
            entries = [four.load(tile, token, column, 1)[0] for token in tokens]
            bits = [four.bits_of(four.to_float32(entry)) for entry in entries]
            kept = four.keep_two([four.magnitude_key(b) for b in bits])
            groups.append(([four.raw_bits(entry) for entry in entries], kept))
        place = token_block, quarter_of_tile
        _store_quarter(out_values, out_words, feature, place, groups)
        if slots is not None:
            (slot,) = four.load(slots, None, feature, 1)
            rest_values, rest_words = rest
            with four.when(four.below(constant(-1), slot)):
                others = [(entries, kept.rest()) for entries, kept in groups]
                _store_quarter(rest_values, rest_words, slot, place, others)


def _decompress(token_block, feature_block, values, metadata, order, tile) -> None:
    """One thread: 16 features of the tokens in rows r and r + 8 of the tile."""
    thread, first_column = _thread_and_column(feature_block)
    start = arith.muli(token_block, constant(TILE))
    for half in range(2):
        row = arith.addi(four.metadata_row(thread), constant(8 * half))
        (token,) = four.load(order, None, arith.addi(start, row), 1)
        exists = four.below(constant(-1), token)
        token = arith.select(exists, token, constant(0))
        block = arith.divui(token, constant(TILE))
        row_of_block = arith.remui(token, constant(TILE))
        quarter = arith.andi(thread, constant(3))
        index = arith.addi(
            _tile_start(block, feature_block, metadata, words=128),
            four.metadata_index(row_of_block, quarter),
        )
        (word,) = four.load(metadata, None, index, 1)
        word = arith.shrui(word, arith.muli(_upper(row_of_block), constant(16)))
        kept = four.load(values, token, _half(first_column), 8)
        words = []
        for group in range(4):
            positions = four.positions_in(word, group, 0)
            pair = [four.raw_bits(value) for value in kept[2 * group : 2 * group + 2]]
            entries = []
            for i in range(4):
                entry = arith.select(
                    four.equal(positions[0], i),
                    pair[0],
                    arith.select(four.equal(positions[1], i), pair[1], constant(0)),
                )
                entries.append(arith.select(exists, entry, constant(0)))
            words += [
                arith.ori(low, four.shifted(high, 16))
                for low, high in (entries[:2], entries[2:])
            ]
        for part in range(2):
            column = arith.addi(four.metadata_columns(thread), constant(8 * part))
            four.store(tile, row, column, words[4 * part : 4 * part + 4])


def _store_quarter(values, metadata, row, place, groups) -> None:
    """What is kept of 16 tokens of one feature: a row of the transpose."""
    token_block, quarter = place
    pairs, positions = [], constant(0)
    for index, (entries, kept) in enumerate(groups):
        pairs.append(
            arith.ori(kept.first(entries), four.shifted(kept.second(entries), 16))
        )
        positions = arith.ori(positions, four.shifted(kept.positions(), 4 * index))
    start = arith.addi(
        arith.muli(token_block, constant(TILE // 2)), arith.muli(quarter, constant(8))
    )
    four.store(values, row, start, pairs)
    # Rows r and r + 8 of a tile share a word; each writes its half.
    row_of_tile = arith.remui(row, constant(TILE))
    word = four.metadata_index(row_of_tile, quarter)
    half = arith.addi(arith.muli(word, constant(2)), _upper(row_of_tile))
    tile = arith.divui(row, constant(TILE))
    index = arith.addi(_tile_start(tile, token_block, metadata, words=256), half)
    four.store(metadata, None, index, [four.lower_half(positions)])


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


def _half(column: ir.Value) -> ir.Value:
    """Where the kept value of two columns is."""
    return arith.divui(column, constant(2))


def _word_index(
    token_block: ir.Value, feature_block: ir.Value, metadata: ir.Value
) -> ir.Value:
    """Of a thread's word, all words being in a row."""
    start = _tile_start(token_block, feature_block, metadata, words=128)
    return arith.addi(start, four.thread())


def _tile_start(
    row_block: ir.Value, k_block: ir.Value, metadata: ir.Value, *, words: int
) -> ir.Value:
    """Of the first of a tile's `words`."""
    _, k_blocks, _ = ir.MemRefType(metadata.type).shape
    tile = arith.addi(arith.muli(row_block, constant(k_blocks)), k_block)
    return arith.muli(tile, constant(words))
