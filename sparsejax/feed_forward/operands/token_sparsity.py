"""2:4 along the tokens, for the weight gradients (GEMMs 5 and 6).

These GEMMs reduce over tokens, so their sparse operands, A and dY1, need at most two
non-zeros in four consecutive tokens. Three ingredients of arXiv 2503.16672 keep the
error small: a fixed token order that parts neighbours, the densest features left dense,
and (in the caller) the forward's mask applied before.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from sparsejax.annotations import check_value
from sparsejax.feed_forward.sparsity import TokenSparsity
from sparsejax.feed_forward.tiles import dense_feature_count
from sparsejax.routing.prefix_sums import sums_before
from sparsejax.sparsity.estimators import mvue
from sparsejax.sparsity.masks import magnitude_mask

SEGMENTS = 64
"""The number of segments that the tokens are cut into. A step of a sparse GEMM over
tokens reads one token of each segment, rows that lie a fixed distance apart, so that
nothing has to be moved."""


def in_segments(x: Float[Array, "tokens d"]) -> Float[Array, "segments length d"]:
    """Returns the tokens as 64 segments of equal length, filled up with zeros."""
    length = math.ceil(x.shape[0] / SEGMENTS)
    filled = jnp.pad(x, ((0, SEGMENTS * length - x.shape[0]), (0, 0)))
    return filled.reshape(SEGMENTS, length, -1)


def in_fixed_order(x: Float[Array, "tokens d"]) -> Float[Array, "ordered d"]:
    """Returns the rows of x in the order of `fixed_token_order`, with zeros where that
    order has -1."""
    segments = in_segments(x)
    return segments.swapaxes(0, 1).reshape(-1, segments.shape[2])


def fixed_token_order(tokens: int) -> np.ndarray:
    """Returns the order in which the tokens are grouped, four after four, int32: the
    first token of each of 64 segments of the text, then the second of each; -1 where a
    segment has none.

    The four tokens of a group are a 64th of all tokens apart.
    """
    length = math.ceil(tokens / SEGMENTS)
    order = np.arange(SEGMENTS * length, dtype=np.int32)
    order = order.reshape(SEGMENTS, length).T.reshape(-1)
    return np.where(order < tokens, order, -1)


class Densest(NamedTuple):
    """The entries of a vector that are chosen as its largest."""

    chosen: Bool[Array, " features"]
    before: Int[Array, " features"]
    """For each entry, how many of the chosen entries come before it."""


def densest_features(
    nonzeros: Int[Array, "... features"], share: float, tokens: int
) -> Bool[Array, "... features"]:
    """Returns booleans that are True for the features with most non-zeros, a `share` of
    them rounded up to whole feature tiles; ties go to the lower index.

    Args:
      nonzeros: how many non-zeros each feature has; leading axes are chosen from
        separately.
      share: share of the features to choose.
      tokens: an upper bound of the non-zeros of a feature.
    """
    features = nonzeros.shape[-1]
    count = dense_feature_count(features, share)
    if count == 0:
        return jnp.zeros(nonzeros.shape, bool)
    rows = nonzeros.reshape(-1, features)
    chosen = jax.vmap(lambda row: densest(row, count, tokens).chosen)(rows)
    return chosen.reshape(nonzeros.shape)


def densest(nonzeros: Int[Array, " features"], count: int, tokens: int) -> Densest:
    """Returns the `count` features with most non-zeros; ties go to the lower index.

    The smallest number of non-zeros among them is found eight bits at a time: on a GPU
    these are a few short kernels, where sorting takes three times as long. No feature
    has more than `tokens` non-zeros.
    """
    least = jnp.zeros((), jnp.int32)
    most = min(tokens, jnp.iinfo(jnp.int32).max)
    for shift in reversed(range(0, most.bit_length(), 8)):
        # None above `most`: 128 << 24 would be negative.
        count_of_steps = min(256, (most >> shift) + 1)
        steps = least + (jnp.arange(count_of_steps, dtype=jnp.int32) << shift)
        reached = jnp.sum(nonzeros[None, :] >= steps[:, None], axis=1)
        last = jnp.sum(reached >= count, dtype=jnp.int32) - 1
        least += last << shift
    above, ties = nonzeros > least, nonzeros == least
    above_before, ties_before = sums_before(jnp.stack([above, ties]))
    missing = count - jnp.sum(above, dtype=jnp.int32)
    chosen = above | (ties & (ties_before < missing))
    return Densest(chosen, above_before + jnp.minimum(ties_before, missing))


def sparsify_tokens(
    x: Float[Array, "tokens features"],
    dense: Bool[Array, "tokens features"] | Bool[Array, "1 features"],
    method: TokenSparsity,
    key: Key[Array, ""] | None,
) -> Float[Array, "tokens features"]:
    """Returns `x` with two of every four consecutive tokens kept, except where `dense`.

    "magnitude" keeps the two largest; "mvue" and "mvue_approximate" draw two and
    rescale them so that the expectation is `x` (arXiv 2203.10991). The number of tokens
    must be a multiple of four.

    Raises:
      ValueError: the method is none of the three, or it draws and `key` is None.
    """
    check_value("method", method, TokenSparsity)
    if method == "magnitude":
        sparse = jnp.where(magnitude_mask(x, axis=0), x, 0)
    else:
        if key is None:
            raise ValueError(f"method={method!r} draws random numbers; pass key")
        sparse = mvue(key, x, axis=0, exact=method == "mvue")
    return jnp.where(dense, x, sparse)
