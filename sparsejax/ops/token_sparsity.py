"""2:4 along the tokens, for the weight gradients (GEMMs 5 and 6).

These GEMMs reduce over tokens, so their sparse operands, A and dY1, need at most two
non-zeros in four consecutive tokens. Three ingredients of arXiv 2503.16672 keep the
error small: a fixed random token order, the densest features left dense, and (in the
caller) the forward's mask applied before.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Key

from sparsejax.estimators import mvue
from sparsejax.ops.ffn_spec import TokenSparsity, dense_feature_count
from sparsejax.pruning import magnitude_mask


def fixed_token_order(tokens: int) -> np.ndarray:
    """A permutation of `tokens` tokens, the same in every call and on every machine.

    Random, so that the four tokens of a group are seldom neighbours in the text.
    """
    return np.random.default_rng(seed=24).permutation(tokens).astype(np.int32)


def densest_features(
    nonzeros: Float[Array, "... features"], share: float
) -> Bool[Array, "... features"]:
    """Marks the features with most non-zeros; ties go to the lower index."""
    features = nonzeros.shape[-1]
    count = dense_feature_count(features, share)
    if count == 0:
        return jnp.zeros(nonzeros.shape, bool)
    _, chosen = lax.top_k(nonzeros, count)
    return jnp.any(jax.nn.one_hot(chosen, features, dtype=bool), axis=-2)


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
