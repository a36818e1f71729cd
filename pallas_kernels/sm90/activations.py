"""2:4 activations of an FFN with a squared ReLU, for Hopper's sparse tensor cores.

Kernels that read and write each number once, between the GEMMs:

    keep_features         A = relu(Y1)^2, of four features the two largest
    backward              dY1 = dA 2 sqrt(A), where A has its entries
    keep_gated_features   A = relu(G)^2 * U, of four features the two of largest |A|
    gated_backward        dG = dA U 2 relu(G) and dU = dA relu(G)^2, there

A 2:4 matrix is its kept values and words of positions, in the order of
`sparsejax.sparsity.packed`. A warpgroup has 64 tokens by 64 features.
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

from pallas_kernels.sm90.threads import (
    activation_gradients,
    activation_threads,
    activation_tiles,
    prune_2to4,
)
from pallas_kernels.sm90.threads.prune_2to4 import TILE, constant


def keep_features(
    y_up: Float[Array, "tokens features"],
    by_expert: activation_tiles.ByExpert | None = None,
) -> tuple[
    Float[Array, "tokens half_features"],
    UInt32[Array, "token_blocks feature_blocks 128"],
    UInt8[Array, "token_sixteenths features"],
]:
    """Returns A = relu(Y1)^2, 2:4 along the features, in one read of Y1.

    The two of four are those of largest A (ties: the lower index, NaN: largest).
    Squares are rounded once.

    Args:
      by_expert: the rows of A, each with the features of its expert; None: A has the
        rows of Y1.
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
    """Returns A = relu(G)^2 * U, 2:4 along the features, in one read of G and U.

    The two of four are those of largest |A| (ties: the lower index, NaN: largest). The
    square is rounded, then the product.

    Returns:
      what `keep_features` returns; and relu(G) and U at the kept positions.
    Raises:
      ValueError: the features are not a multiple of 64, the dtype is not of 16 bits, or
        G and U differ in shape or dtype.
    """
    if (up.shape, up.dtype) != (gate.shape, gate.dtype):
        raise ValueError(
            f"gate {gate.dtype}{gate.shape} and up {up.dtype}{up.shape} must be alike"
        )
    values, metadata, nonzeros, hidden, kept_up = _keep(gate, up)
    return values, metadata, nonzeros, hidden, kept_up


def _keep(
    gate: Array, *up: Array, by_expert: activation_tiles.ByExpert | None = None
) -> tuple[Array, ...]:
    """Returns the results of `keep_features`, or, where U is given, of
    `keep_gated_features`."""
    tokens, features = gate.shape
    if by_expert is not None:
        assert by_expert.row_token is not None
        tokens, features = by_expert.row_token.size, features // by_expert.experts
        by_expert.check(tokens)
    activation_tiles.check(features, gate.dtype)
    blocks = pl.cdiv(tokens, TILE)
    kept = jax.ShapeDtypeStruct((tokens, features // 2), gate.dtype)
    return activation_tiles.on_tiles(
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
    """Returns the kept values of dG = dA U 2 relu(G) and dU = dA relu(G)^2, rounded
    once.

    Args:
      hidden, up, metadata: relu(G) and U where A is kept, as `keep_gated_features` has
        them.
    Raises:
      ValueError: the features are not a multiple of 64, or the dtype not of 16 bits.
    """
    tokens, features = da.shape
    activation_tiles.check(features, da.dtype)
    kept = jax.ShapeDtypeStruct(hidden.shape, da.dtype)
    return activation_tiles.on_tiles(
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
    by_expert: activation_tiles.ByExpert | None = None,
) -> Float[Array, "tokens half_features"]:
    """Returns the kept values of dY1 = dA 2 relu(Y1), at the positions of A =
    relu(Y1)^2.

    relu(Y1) is the root of A's kept values, rounded to their dtype: exactly what was
    squared, unless the square was below the dtype's normal numbers, or infinite.

    Args:
      by_expert: the rows of A, as `keep_features` had them; dA then has a row per
        token. None: dA has the rows of A.
    Raises:
      ValueError: the features are not a multiple of 64, or the dtype not of 16 bits.
    """
    tokens, features = values.shape[0], 2 * values.shape[1]
    if by_expert is not None:
        by_expert.check(tokens)
    activation_tiles.check(features, da.dtype)
    (dy,) = activation_tiles.on_tiles(
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
    """Keeps two of every four features of one tile."""
    inputs, refs = refs[: 1 + gated], refs[1 + gated :]
    source, outputs = refs[: 2 * by_expert], refs[2 * by_expert :]
    place = activation_threads.Place(token_block, feature_block)
    rows = _rows(place, source, tokens, features)
    activation_threads.keep_features(place, rows, inputs, outputs)


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
    """Computes dY1 at the kept positions of one tile."""
    place, (*source, dy) = activation_threads.Place(token_block, feature_block), refs
    rows = _rows(place, source, tokens, features)
    kept = activation_threads.load_kept(place, rows, [values], metadata)
    activation_threads.gradients_at(
        activation_gradients.squared, place, rows, da, kept, [dy]
    )


def _gated_backward(
    token_block, feature_block, da, hidden, up, metadata, dgate, dup, *, tokens: int
):
    """Computes dG and dU at the kept positions of one tile."""
    place = activation_threads.Place(token_block, feature_block)
    rows = _rows(place, [], tokens, 0)
    kept = activation_threads.load_kept(place, rows, [hidden, up], metadata)
    activation_threads.gradients_at(
        activation_gradients.gated, place, rows, da, kept, [dgate, dup]
    )


class _Row(NamedTuple):
    """A row of A that a thread works on; each thread has two."""

    index: ir.Value
    """The index of the row of A; the last one where A has no such row."""
    exists: ir.Value
    source: ir.Value
    """The index of the row in the matrix that is read."""
    column: ir.Value
    """The first of the thread's 16 features in that matrix."""
    filled: ir.Value | None
    """Whether the row has a source, since rows that pad a tile are zeros. None: every
    row has one."""

    def load_pairs(self, ref: ir.Value) -> list[ir.Value]:
        """Returns the thread's 16 neighbouring features, two to a word."""
        pairs = [
            pair
            for start in (0, 8)
            for pair in prune_2to4.load_pairs(
                ref, self.source, arith.addi(self.column, constant(start)), 4
            )
        ]
        if self.filled is None:
            return pairs
        return [arith.select(self.filled, pair, constant(0)) for pair in pairs]


def _rows(
    place: activation_threads.Place,
    source: Sequence[ir.Value],
    tokens: int,
    features: int,
) -> list[_Row]:
    """Returns the thread's two rows of the tile, r and r + 8."""
    rows, column = [], place.first_feature
    for half in range(2):
        start = arith.muli(place.token_block, constant(TILE))
        start = arith.addi(start, constant(8 * half))
        row = arith.addi(start, prune_2to4.metadata_row(prune_2to4.thread()))
        exists = prune_2to4.below(row, tokens)
        row = arith.select(exists, row, constant(tokens - 1))
        if not source:
            rows.append(_Row(row, exists, row, column, None))
            continue
        of_expert = activation_tiles.Source.of_block(source, place.token_block, tokens)
        token, filled = of_expert.token(row)
        own = of_expert.feature(column, features)
        rows.append(_Row(row, exists, token, own, filled))
    return rows
