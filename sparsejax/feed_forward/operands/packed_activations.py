"""2:4 activations as a set of kernels packs them, and GEMMs 5 and 6 of them.

Nothing here is differentiated: the FFN's backward is written out.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from sparsejax.feed_forward.operands.token_sparsity import densest, in_segments
from sparsejax.feed_forward.spec import FFNSparsity, dense_feature_count
from sparsejax.ops.kernels.base import (
    KeptActivations,
    KeptGatedActivations,
    KernelSet,
    ResidualRows,
)
from sparsejax.sparsity.packed import Packed, in_blocks


class Activations(NamedTuple):
    """A = relu(Y1)^2, two of four features kept: all that the backward needs of Y1."""

    a: Packed
    """(tokens, features)."""
    nonzeros: Int[Array, " features"]
    """How many tokens have a kept entry that is not zero."""


def counted(kept: KeptActivations) -> Activations:
    """Returns what a kernel kept, with the non-zeros of each feature summed."""
    return Activations(kept.a, _nonzeros(kept.counts))


def _nonzeros(counts: Int[Array, "_ features"]) -> Int[Array, " features"]:
    return counts.astype(jnp.int32).sum(axis=0)


class GatedActivations(NamedTuple):
    """Where A = relu(G)^2 * U is kept: all that the backward of a gated FFN needs."""

    hidden: Packed
    """relu(G), (tokens, features)."""
    up: Packed
    """U, at the same positions."""
    nonzeros: Int[Array, " features"]
    """How many tokens have a kept entry of A that is not zero."""

    @property
    def a(self) -> Packed:
        """A, with the roundings it was made with."""
        hidden, dtype = self.hidden.values, jnp.finfo(self.hidden.dtype)
        square = lax.reduce_precision(hidden * hidden, dtype.nexp, dtype.nmant)
        return Packed(square * self.up.values, self.hidden.metadata)


def counted_gated(kept: KeptGatedActivations) -> GatedActivations:
    """Returns what a kernel kept of a gated FFN, with the non-zeros of each feature
    summed."""
    return GatedActivations(kept.hidden, kept.up, _nonzeros(kept.counts))


class WholeFeatures(NamedTuple):
    """The features that lose nothing along the tokens: what their groups of four do not
    keep stands in rows of their own, below those of all features."""

    chosen: Int[Array, " whole"]
    """Which they are, in the order of those rows."""
    slots: Int[Array, " features"]
    """A feature's row there, or -1."""
    rows: int
    """More than are chosen where those do not fill a block: their product is not
    used."""

    @property
    def residual(self) -> ResidualRows:
        """These rows, as kernels are told of them."""
        return ResidualRows(self.slots, self.rows)


class TokenGroups(NamedTuple):
    """How GEMMs 5 and 6 group the tokens."""

    by_segments: bool
    """In their fixed order, else as they come."""
    whole: WholeFeatures | None

    @property
    def residual(self) -> ResidualRows | None:
        """The second rows of the features that stay whole, if any do."""
        return None if self.whole is None else self.whole.residual

    def as_read(self, x: Float[Array, "tokens d"]) -> Float[Array, "..."]:
        """Returns x as the GEMM reads it in that order: see `multiply_packed`."""
        if self.by_segments:
            return in_segments(x)
        return jnp.pad(x, ((0, in_blocks(len(x)) - len(x)), (0, 0)))


def token_groups(
    sparsity: FFNSparsity, tokens: int, nonzeros: Int[Array, " features"]
) -> TokenGroups:
    """Groups for tokens in their fixed order, or as they come; a share of the features,
    those with most non-zeros, stays whole.

    Their second rows come in blocks of 64: where they do not fill the last one, the
    first of the other features have a row whose product is not used.
    """
    count = dense_feature_count(nonzeros.size, sparsity.dense_features)
    whole = whole_features(nonzeros, count, tokens) if count else None
    return TokenGroups(sparsity.permute_tokens, whole)


def whole_features(
    nonzeros: Int[Array, " features"], count: int, tokens: int
) -> WholeFeatures:
    """Returns the `count` features with most non-zeros, of at most `tokens`."""
    rows = in_blocks(count)
    found, index = densest(nonzeros, count, tokens), jnp.arange(nonzeros.size)
    others = index - found.before
    slots = jnp.where(others < rows - count, count + others, -1)
    slots = jnp.where(found.chosen, found.before, slots)
    place = jnp.where(found.chosen, found.before, count)
    chosen = jnp.zeros(count, jnp.int32).at[place].set(index, mode="drop")
    return WholeFeatures(chosen, slots, rows)


def weight_gradient_up(
    kernels: KernelSet,
    groups: TokenGroups,
    x: Float[Array, "tokens d"],
    dy_up: Packed,
) -> Float[Array, "d features"]:
    """Returns dW1 = X^T dY1 in float32, dY1 over tokens."""
    # (d, F) = ((F, T) @ (T, d))^T
    return _weight_gradient(kernels, groups, dy_up, x, transpose_out=True)


def weight_gradient_down(
    kernels: KernelSet, groups: TokenGroups, a: Packed, dy: Float[Array, "tokens d"]
) -> Float[Array, "features d"]:
    """Returns dW2 = A^T dY in float32, A over tokens."""
    # (F, d) = (F, T) @ (T, d)
    return _weight_gradient(kernels, groups, a, dy, transpose_out=False)


def _weight_gradient(
    kernels: KernelSet,
    groups: TokenGroups,
    sparse: Packed,
    dense: jax.Array,
    *,
    transpose_out: bool,
) -> jax.Array:
    """Returns `sparse @ dense`, or its transpose."""
    product, lost = kernels.weight_gradient(
        sparse,
        groups.as_read(dense),
        transpose_out=transpose_out,
        residual_rows=0 if groups.whole is None else groups.whole.rows,
    )
    if groups.whole is None or lost is None:
        return product
    chosen = groups.whole.chosen
    lost = lost[:, : chosen.size] if transpose_out else lost[: chosen.size]
    return add_lost(product, lost, chosen, columns=transpose_out)


def add_lost(
    product: Float[Array, "_ _"],
    lost: Float[Array, "_ _"],
    chosen: Int[Array, " whole"],
    *,
    columns: bool,
) -> Float[Array, "_ _"]:
    """Returns `product` with `lost` added to its chosen rows or columns."""
    # In place; each number once, so that the bits repeat. Number by number along the
    # columns, since XLA would first transpose all of the product.
    rows = np.arange(product.shape[0])[:, None]
    place = product.at[rows, chosen] if columns else product.at[chosen]
    return place.add(lost, unique_indices=True, mode="promise_in_bounds")
