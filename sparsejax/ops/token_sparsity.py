"""2:4 along the tokens, for the weight gradients (GEMMs 5 and 6).

These GEMMs reduce over tokens, so their sparse operands, A and dY1, need at most two
non-zeros in four consecutive tokens. Three ingredients of arXiv 2503.16672 keep the
error small: a fixed token order that parts neighbours, the densest features left dense,
and (in the caller) the forward's mask applied before.
"""

import math

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Key

from sparsejax.estimators import mvue
from sparsejax.ops.ffn_spec import TokenSparsity, dense_feature_count
from sparsejax.pruning import magnitude_mask

SEGMENTS = 64
"""Into which the tokens are cut: a step of a sparse GEMM over tokens reads one of
each, rows that lie a fixed distance apart, so that nothing has to be moved."""


def in_segments(x: Float[Array, "tokens d"]) -> Float[Array, "segments length d"]:
    """The tokens as 64 segments of equal length, filled up with zeros."""
    length = math.ceil(x.shape[0] / SEGMENTS)
    filled = jnp.pad(x, ((0, SEGMENTS * length - x.shape[0]), (0, 0)))
    return filled.reshape(SEGMENTS, length, -1)


def in_fixed_order(x: Float[Array, "tokens d"]) -> Float[Array, "ordered d"]:
    """The rows of x in the order of `fixed_token_order`, zeros where there is none."""
    segments = in_segments(x)
    return segments.swapaxes(0, 1).reshape(-1, segments.shape[2])


def fixed_token_order(tokens: int) -> np.ndarray:
    """The order in which the tokens are grouped, four after four: the first of each of
    64 segments of the text, then the second; -1 where a segment has none.

    The four tokens of a group are a 64th of all tokens apart.
    """
    length = math.ceil(tokens / SEGMENTS)
    order = np.arange(SEGMENTS * length, dtype=np.int32)
    order = order.reshape(SEGMENTS, length).T.reshape(-1)
    return np.where(order < tokens, order, -1)


def densest_features(
    nonzeros: Int[Array, "... features"], share: float
) -> Bool[Array, "... features"]:
    """Marks the features with most non-zeros; ties go to the lower index."""
    count = dense_feature_count(nonzeros.shape[-1], share)
    if count == 0:
        return jnp.zeros(nonzeros.shape, bool)
    return ranks(nonzeros) < count


def ranks(nonzeros: Int[Array, "... features"]) -> Int[Array, "... features"]:
    """How many features have more non-zeros, or as many and a lower index.

    Every feature is compared with every other: one kernel, where sorting them would
    take several that wait for each other.
    """
    each_with_each = (*nonzeros.shape, nonzeros.shape[-1])
    index = lax.broadcasted_iota(jnp.int32, each_with_each, nonzeros.ndim)
    lower = index < index.swapaxes(-1, -2)
    ahead = nonzeros[..., None, :] + lower > nonzeros[..., :, None]
    return jnp.sum(ahead, axis=-1, dtype=jnp.int32)


def sparsify_tokens(
    x: Float[Array, "tokens features"],
    dense: Bool[Array, "tokens features"] | Bool[Array, "1 features"],
    method: TokenSparsity,
    key: Key[Array, ""] | None,
) -> Float[Array, "tokens features"]:
    """`x` with two of every four consecutive tokens kept, except where `dense`.

    "magnitude" keeps the two largest; "mvue" and "mvue_approximate" draw two and
    rescale them so that the expectation is `x` (arXiv 2203.10991). The number of
    tokens must be a multiple of four.
    """
    if method == "magnitude":
        sparse = jnp.where(magnitude_mask(x, axis=0), x, 0)
    else:
        assert key is not None  # checked by the caller, who knows its name
        sparse = mvue(key, x, axis=0, exact=method == "mvue")
    return jnp.where(dense, x, sparse)
