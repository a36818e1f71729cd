"""2:4 along the tokens for Hopper's sparse tensor cores, as weight gradients read it.

    keep_tokens          A^T, of four tokens the two with the largest |A|
    keep_tokens_of_both  A^T and dY1^T
    backward             dY1 = dA 2 sqrt(A) along the features, and A^T and dY1^T
    gated_backward       dG = dA U 2 relu(G), dU = dA relu(G)^2, and A^T, dG^T and dU^T

All in one read of each number. What comes in is 2:4 along the features, as
`activations` makes it. A warpgroup has 64 tokens by 64 features.

The tokens are grouped as they come, or the first of each of 64 segments of them, then
the second, and so on, which parts neighbours.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int, UInt32

from pallas_kernels.sm90.threads import (
    activation_gradients,
    activation_tiles,
    packed16x2,
)
from pallas_kernels.sm90.threads.over_tokens_threads import LINES_WORDS, Form, pack
from pallas_kernels.sm90.threads.prune_2to4 import TILE


class OverTokens(NamedTuple):
    """The transpose of a matrix, (features, tokens), 2:4 along the tokens. Below the
    rows of all features lie the residual rows of the features that are kept dense."""

    values: Float[Array, "rows half_ordered"]
    metadata: UInt32[Array, "row_blocks token_blocks 128"]


class DenseFeatures(NamedTuple):
    """The features that are kept dense: the two of four tokens that 2:4 drops go to a
    second, residual row, so that the sum of both rows is exact."""

    slots: Int[Array, " features"]
    """The residual row of each feature, int32, or -1 where it has none; each row
    belongs to exactly one feature. With experts, the features of one expert follow
    those of the other, and each expert counts its own rows."""
    rows: int
    """The number of residual rows (with experts, of each expert), a multiple of 64."""


def keep_tokens(
    values: Float[Array, "tokens half_features"],
    metadata: UInt32[Array, "token_blocks feature_blocks 128"],
    dense: DenseFeatures | None = None,
    *,
    by_segments: bool,
) -> OverTokens:
    """Returns the transpose of a matrix that is 2:4 along its features, 2:4 along the
    tokens.

    Of four tokens the two of largest magnitude stay (ties: the earlier, NaN: largest);
    their number is filled up to a multiple of 64 with zeros.

    Args:
      values, metadata: the matrix, in the order of `sparsejax.sparsity.packed`.
      dense: the features that are kept dense; None where none is.
      by_segments: whether the four tokens of a group lie in four segments, or else are
        neighbours.
    Raises:
      ValueError: the features are not a multiple of 64, or the dtype not of 16 bits.
    """
    ((packed,), ()) = _over_tokens(_KEEP, (), (values,), metadata, dense, by_segments)
    return packed


def keep_tokens_of_both(
    a: Float[Array, "tokens half_features"],
    dy: Float[Array, "tokens half_features"],
    metadata: UInt32[Array, "token_blocks feature_blocks 128"],
    dense: DenseFeatures | None = None,
    *,
    by_segments: bool,
    by_expert: activation_tiles.ByExpert | None = None,
) -> tuple[OverTokens, OverTokens]:
    """Returns what `keep_tokens` makes of A and of dY1, whose positions are the same.

    Args:
      by_expert: the rows of A and dY1, if experts have them, else None; their tokens
        are not looked up. Not with `by_segments`.
    Raises:
      ValueError: the features are not a multiple of 64, or the dtype not of 16 bits.
    """
    packed, _ = _over_tokens(
        _KEEP_BOTH, (), (a, dy), metadata, dense, by_segments, by_expert
    )
    of_a, of_dy = packed
    return of_a, of_dy


def backward(
    da: Float[Array, "tokens features"],
    values: Float[Array, "tokens half_features"],
    metadata: UInt32[Array, "token_blocks feature_blocks 128"],
    dense: DenseFeatures | None = None,
    *,
    by_segments: bool,
    by_expert: activation_tiles.ByExpert | None = None,
) -> tuple[Float[Array, "tokens half_features"], OverTokens, OverTokens]:
    """Returns dY1 as `activations.backward` does, and what `keep_tokens` makes of A and
    dY1.

    Args:
      by_expert: the rows of A, if experts have them, else None. dA then has a row per
        token, or, where `row_token` is None, the same rows. Not with `by_segments`.
    Raises:
      ValueError: the features are not a multiple of 64, or the dtype not of 16 bits.
    """
    packed, (dy,) = _over_tokens(
        _SQUARED, (da,), (values,), metadata, dense, by_segments, by_expert
    )
    a, dy_over_tokens = packed
    return dy, a, dy_over_tokens


def gated_backward(
    da: Float[Array, "tokens features"],
    hidden: Float[Array, "tokens half_features"],
    up: Float[Array, "tokens half_features"],
    metadata: UInt32[Array, "token_blocks feature_blocks 128"],
    dense: DenseFeatures | None = None,
    *,
    by_segments: bool,
) -> tuple[Array, Array, OverTokens, OverTokens, OverTokens]:
    """Returns dG and dU as `activations.gated_backward` does, and what `keep_tokens`
    makes of A, dG and dU.

    Raises:
      ValueError: the features are not a multiple of 64, or the dtype not of 16 bits.
    """
    packed, (dgate, dup) = _over_tokens(
        _GATED, (da,), (hidden, up), metadata, dense, by_segments
    )
    a, dgate_over_tokens, dup_over_tokens = packed
    return dgate, dup, a, dgate_over_tokens, dup_over_tokens


_KEEP = Form("keep_tokens", 0, 1, lambda kept, dtype: [kept])
_KEEP_BOTH = Form("keep_tokens_of_both", 0, 2, lambda a, dy, dtype: [a, dy])
_SQUARED = Form(
    "backward_over_tokens",
    1,
    2,
    lambda da, a, dtype: [a, *activation_gradients.squared(da, a, dtype)],
)
_GATED = Form(
    "gated_backward_over_tokens",
    2,
    3,
    lambda da, hidden, up, dtype: [
        packed16x2.product(packed16x2.square(hidden, dtype), up, dtype),
        *activation_gradients.gated(da, hidden, up, dtype),
    ],
)


def _over_tokens(
    form: Form,
    da: Sequence[Array],
    kept: Sequence[Array],
    metadata: Array,
    dense: DenseFeatures | None,
    by_segments: bool,
    by_expert: activation_tiles.ByExpert | None = None,
) -> tuple[list[OverTokens], Sequence[Array]]:
    """Returns the matrices of a `Form` packed along the tokens, and its gradients
    packed along the features."""
    tokens, features = kept[0].shape[0], 2 * kept[0].shape[1]
    dtype = kept[0].dtype
    activation_tiles.check(features, dtype)
    if by_expert is not None:
        by_expert.check(tokens)
        if by_segments:
            raise ValueError("rows of experts have their order: pass by_segments=False")
    rows = features
    if dense is not None:
        rows += dense.rows
        if dense.rows % TILE or dense.rows < TILE:
            raise ValueError(f"{dense.rows} rows below are not a multiple of {TILE}")
    blocks = pl.cdiv(tokens, TILE)
    over_tokens = (
        jax.ShapeDtypeStruct((rows, blocks * TILE // 2), dtype),
        jax.ShapeDtypeStruct((rows // TILE, blocks, 128), jnp.uint32),
    )
    parts = 1 + (dense is not None)
    out = activation_tiles.on_tiles(
        partial(
            pack,
            form=form,
            inputs=len(kept),
            with_rest=dense is not None,
            tokens=tokens,
            features=features,
            by_segments=by_segments,
            lookups=0 if by_expert is None else len(by_expert.arrays),
        ),
        (blocks, features // TILE),
        (
            *[jax.ShapeDtypeStruct(kept[0].shape, dtype)] * form.gradients,
            *over_tokens * form.matrices,
        ),
        *da,
        *kept,
        metadata,
        *(() if dense is None else (dense.slots.astype(jnp.int32),)),
        *(() if by_expert is None else by_expert.arrays),
        scratch=(plgpu.SMEM((form.matrices * parts * LINES_WORDS,), jnp.uint32),),
        name=form.name,
    )
    pairs = iter(out[form.gradients :])
    packed = [OverTokens(*pair) for pair in zip(pairs, pairs, strict=True)]
    return packed, out[: form.gradients]
