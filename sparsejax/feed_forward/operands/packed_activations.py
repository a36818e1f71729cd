"""2:4 activations as a set of kernels packs them, and GEMMs 5 and 6 with them.

Nothing here is differentiated: the FFN's backward is written out.
"""

from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from sparsejax.feed_forward.operands.token_sparsity import densest, in_segments
from sparsejax.feed_forward.sparsity import FFNSparsity
from sparsejax.feed_forward.tiles import dense_feature_count
from sparsejax.ops.kernels.base import (
    KeptActivations,
    KeptGatedActivations,
    KernelSet,
    ResidualRows,
)
from sparsejax.sparsity.packed import Packed, in_blocks


class Activations(NamedTuple):
    """A = relu(Y1)^2 with two of every four features kept: all that the backward needs
    of Y1."""

    a: Packed
    """A, (tokens, features), packed along the features."""
    nonzeros: Int[Array, " features"]
    """For each feature, how many tokens have a kept entry that is not zero."""


def counted(kept: KeptActivations) -> Activations:
    """Returns A as a kernel kept it, with the non-zeros of each feature summed."""
    return Activations(kept.a, _nonzeros(kept.counts))


def _nonzeros(counts: Int[Array, "_ features"]) -> Int[Array, " features"]:
    return counts.astype(jnp.int32).sum(axis=0)


class GatedActivations(NamedTuple):
    """relu(G) and U where A = relu(G)^2 * U is kept: all that the backward of a gated
    FFN needs."""

    hidden: Packed
    """The values of relu(G) at the positions of A, (tokens, features)."""
    up: Packed
    """The values of U at the same positions."""
    nonzeros: Int[Array, " features"]
    """For each feature, how many tokens have a kept entry of A that is not zero."""

    @property
    def a(self) -> Packed:
        """A, made anew with the roundings of the kernel that wrote it in the
        forward."""
        hidden, dtype = self.hidden.values, jnp.finfo(self.hidden.dtype)
        square = lax.reduce_precision(hidden * hidden, dtype.nexp, dtype.nmant)
        return replace(self.hidden, values=square * self.up.values)


def counted_gated(kept: KeptGatedActivations) -> GatedActivations:
    """Returns what the backward of a gated FFN needs of the activations that a kernel
    kept, with the non-zeros of each feature summed."""
    return GatedActivations(kept.hidden, kept.up, _nonzeros(kept.counts))


class DenseFeatures(NamedTuple):
    """The dense features, which lose nothing along the tokens: the entries that their
    groups of four drop stand in residual rows, below the rows of all features."""

    chosen: Int[Array, " dense"]
    """The indices of the dense features, in the order of their residual rows."""
    slots: Int[Array, " features"]
    """The residual row of each feature, or -1 where it has none."""
    rows: int
    """The number of residual rows, a multiple of 64. Where the dense features are
    fewer, other features fill the last rows; the product of those rows is not used."""

    @property
    def residual(self) -> ResidualRows:
        """The residual rows in the form in which kernels take them."""
        return ResidualRows(self.slots, self.rows)


class TokenGroups(NamedTuple):
    """The groups of tokens that GEMMs 5 and 6 sum over."""

    by_segments: bool
    """Whether a group takes its tokens in the fixed order, a 64th of all apart; else
    they are consecutive."""
    dense: DenseFeatures | None

    @property
    def residual(self) -> ResidualRows | None:
        """The residual rows of the dense features; None where no feature stays
        dense."""
        return None if self.dense is None else self.dense.residual

    def as_read(self, x: Float[Array, "tokens d"]) -> Float[Array, "..."]:
        """Returns x as the GEMM reads it in the order of the groups: in segments, or
        with rows of zeros appended up to whole blocks of 64; see `KernelSet.matmul`."""
        if self.by_segments:
            return in_segments(x)
        return jnp.pad(x, ((0, in_blocks(len(x)) - len(x)), (0, 0)))


def token_groups(
    sparsity: FFNSparsity, tokens: int, nonzeros: Int[Array, " features"]
) -> TokenGroups:
    """Returns the groups of GEMMs 5 and 6: of tokens in their fixed order or as they
    come, with the share of features that have most non-zeros kept dense.

    Residual rows come in blocks of 64: where the dense features do not fill the last
    block, the first of the other features have a row whose product is not used.
    """
    count = dense_feature_count(nonzeros.size, sparsity.dense_features)
    dense = choose_dense_features(nonzeros, count, tokens) if count else None
    return TokenGroups(sparsity.permute_tokens, dense)


def choose_dense_features(
    nonzeros: Int[Array, " features"], count: int, tokens: int
) -> DenseFeatures:
    """Returns the `count` features with most non-zeros; no feature has more than
    `tokens`."""
    rows = in_blocks(count)
    found, index = densest(nonzeros, count, tokens), jnp.arange(nonzeros.size)
    others = index - found.before
    slots = jnp.where(others < rows - count, count + others, -1)
    slots = jnp.where(found.chosen, found.before, slots)
    place = jnp.where(found.chosen, found.before, count)
    chosen = jnp.zeros(count, jnp.int32).at[place].set(index, mode="drop")
    return DenseFeatures(chosen, slots, rows)


def weight_gradient_up(
    kernels: KernelSet,
    groups: TokenGroups,
    x: Float[Array, "tokens d"],
    dy_up: Packed,
) -> Float[Array, "d features"]:
    """Returns dW1 = X^T dY1 (d, features) in float32, with dY1 packed along the
    tokens."""
    # (d, F) = ((F, T) @ (T, d))^T
    return _weight_gradient(kernels, groups, dy_up, x, transpose_out=True)


def weight_gradient_down(
    kernels: KernelSet, groups: TokenGroups, a: Packed, dy: Float[Array, "tokens d"]
) -> Float[Array, "features d"]:
    """Returns dW2 = A^T dY (features, d) in float32, with A packed along the tokens."""
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
    """Returns `sparse @ dense` in float32, or its transpose."""
    product, lost = kernels.weight_gradient(
        sparse,
        groups.as_read(dense),
        transpose_out=transpose_out,
        residual_rows=0 if groups.dense is None else groups.dense.rows,
    )
    if groups.dense is None or lost is None:
        return product
    chosen = groups.dense.chosen
    lost = lost[:, : chosen.size] if transpose_out else lost[: chosen.size]
    return add_lost(product, lost, chosen, columns=transpose_out)


def add_lost(
    product: Float[Array, "_ _"],
    lost: Float[Array, "_ _"],
    chosen: Int[Array, " dense"],
    *,
    columns: bool,
) -> Float[Array, "_ _"]:
    """Returns `product` with `lost`, the product of the residual rows, added to its
    chosen rows or columns."""
    # In place; each number once, so that the bits repeat. Number by number along the
    # columns, since XLA would first transpose all of the product.
    rows = np.arange(product.shape[0])[:, None]
    place = product.at[rows, chosen] if columns else product.at[chosen]
    return place.add(lost, unique_indices=True, mode="promise_in_bounds")
