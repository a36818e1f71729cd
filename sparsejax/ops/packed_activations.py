"""2:4 activations as Hopper's sparse tensor cores read them.

Made from what a GEMM writes, and packed again for the GEMM that needs them along
another axis, by kernels that read each number once. Nothing here is differentiated: the
FFN's backward is written out.
"""

from functools import lru_cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from sparsejax.ops.ffn_spec import dense_feature_count
from sparsejax.ops.sparse_matmul import multiply_packed
from sparsejax.packing import BLOCK, Packed


class Activations(NamedTuple):
    """A = relu(Y1)^2, two of four features kept: all that the backward needs of Y1."""

    a: Packed
    """(tokens, features)."""
    nonzeros: Int[Array, " features"]
    """How many tokens have a kept entry that is not zero."""


def keep_features(y_up: Float[Array, "tokens features"]) -> Activations:
    """The two of four features with the largest Y1 by its sign, squared."""
    values, metadata, counts = _keep_features(y_up)
    return Activations(Packed(values, metadata), counts.astype(jnp.int32).sum(axis=0))


def gradient(da: Float[Array, "tokens features"], a: Packed) -> Packed:
    """dY1 = dA 2 relu(Y1) at A's positions, all others being zero."""
    return Packed(_gradient(da, a.values, a.metadata), a.metadata)


class WholeFeatures(NamedTuple):
    """The features that lose nothing along the tokens: what their groups of four do not
    keep goes into a second 2:4 matrix."""

    slots: Int[Array, " features"]
    """A feature's row there, or -1."""
    rank: Int[Array, " features"]
    """The row whose product is added to a feature's, or `rows`: none."""
    rows: int


class TokenGroups(NamedTuple):
    """How GEMMs 5 and 6 group the tokens."""

    order: np.ndarray
    """Tokens, four after four; -1 fills the last block up."""
    whole: WholeFeatures | None

    def ordered(self, x: Float[Array, "tokens d"]) -> Float[Array, "ordered d"]:
        """x's rows as they are grouped, zeros where there is no token."""
        fill = self.order < 0
        rows = x[np.where(fill, 0, self.order)]
        return jnp.where(fill[:, None], 0, rows) if fill.any() else rows


def token_groups(
    order: np.ndarray, nonzeros: Int[Array, " features"], dense_features: float
) -> TokenGroups:
    """Groups for tokens in `order`; a share of the features, those with most non-zeros,
    stays whole.

    Their second matrix comes in blocks of 64 rows: where they do not fill the last one,
    the next densest features have a row whose product is not used.
    """
    fill = -order.size % BLOCK
    order = np.pad(order.astype(np.int32), (0, fill), constant_values=-1)
    features = nonzeros.size
    count = dense_feature_count(features, dense_features)
    if count == 0:
        return TokenGroups(order, None)
    rows = -(-count // BLOCK) * BLOCK
    _, chosen = lax.top_k(nonzeros, rows)
    row = jnp.arange(rows, dtype=jnp.int32)
    slots = jnp.full(features, -1, jnp.int32).at[chosen].set(row)
    used = (slots >= 0) & (slots < count)
    return TokenGroups(order, WholeFeatures(slots, jnp.where(used, slots, rows), rows))


def gradient_of_up(
    groups: TokenGroups, x: Float[Array, "tokens d"], dy_up: Packed
) -> Float[Array, "d features"]:
    """dW1 = X^T dY1 in float32, dY1 2:4 along the tokens."""
    # (d, F) = ((F, T) @ (T, d))^T
    return _over_tokens(groups, dy_up, x, transpose_out=True)


def gradient_of_down(
    groups: TokenGroups, a: Packed, dy: Float[Array, "tokens d"]
) -> Float[Array, "features d"]:
    """dW2 = A^T dY in float32, A 2:4 along the tokens."""
    # (F, d) = (F, T) @ (T, d)
    return _over_tokens(groups, a, dy, transpose_out=False)


def _over_tokens(
    groups: TokenGroups, sparse: Packed, dense: jax.Array, *, transpose_out: bool
) -> jax.Array:
    """sparse^T @ dense, or its transpose."""
    multiply = partial(
        multiply_packed,
        b=groups.ordered(dense),
        b_k_major=False,
        transpose_out=transpose_out,
        out_dtype=jnp.float32,
    )
    kept, lost = _along_tokens(groups, sparse)
    product = multiply(kept)
    if groups.whole is None or lost is None:
        return product
    axis = 1 if transpose_out else 0
    no_row = [(0, int(i == axis)) for i in range(2)]
    added = jnp.pad(multiply(lost), no_row)
    return product + jnp.take(added, groups.whole.rank, axis=axis)


def _along_tokens(groups: TokenGroups, x: Packed) -> tuple[Packed, Packed | None]:
    """X[order]^T 2:4 along the tokens, and what the whole features lose."""
    order = jnp.asarray(groups.order)
    if groups.whole is None:
        values, metadata = _keep_tokens(0)(x.values, x.metadata, order)
        return Packed(values, metadata), None
    run = _keep_tokens(groups.whole.rows)
    values, metadata, *lost = run(x.values, x.metadata, order, groups.whole.slots)
    return Packed(values, metadata), Packed(*lost)


# The kernels have no batching rules.


@jax.custom_batching.sequential_vmap
def _keep_features(y_up):
    from pallas_kernels import activations_sm90

    return activations_sm90.keep_features(y_up)


@jax.custom_batching.sequential_vmap
def _gradient(da, values, metadata):
    from pallas_kernels import activations_sm90

    return activations_sm90.backward(da, values, metadata)


@lru_cache
def _keep_tokens(rest_rows: int):
    @jax.custom_batching.sequential_vmap
    def run(values, metadata, order, *slots):
        from pallas_kernels import activations_sm90

        return activations_sm90.keep_tokens(
            values, metadata, order, *slots, rest_rows=rest_rows
        )

    return run
