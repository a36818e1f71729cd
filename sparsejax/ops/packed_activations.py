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

from sparsejax.ops.ffn_spec import FFNSparsity, dense_feature_count
from sparsejax.ops.sparse_matmul import multiply_packed
from sparsejax.ops.token_sparsity import fixed_token_order
from sparsejax.packing import Packed, in_blocks


class Activations(NamedTuple):
    """A = relu(Y1)^2, two of four features kept: all that the backward needs of Y1."""

    a: Packed
    """(tokens, features)."""
    nonzeros: Int[Array, " features"]
    """How many tokens have a kept entry that is not zero."""


def keep_features(y_up: Float[Array, "tokens features"]) -> Activations:
    """A, of four features the two largest."""
    values, metadata, counts = _keep_features(y_up)
    return Activations(Packed(values, metadata), counts.astype(jnp.int32).sum(axis=0))


def gradient(da: Float[Array, "tokens features"], a: Packed) -> Packed:
    """dY1 = dA 2 relu(Y1) at A's positions, all others being zero."""
    return Packed(_gradient(da, a.values, a.metadata), a.metadata)


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


def keep_gated_features(
    gate: Float[Array, "tokens features"], up: Float[Array, "tokens features"]
) -> tuple[Packed, GatedActivations]:
    """A, of four features the two with the largest |A|; and what the backward needs."""
    values, metadata, counts, hidden, kept_up = _keep_gated_features(gate, up)
    nonzeros = counts.astype(jnp.int32).sum(axis=0)
    kept = Packed(hidden, metadata), Packed(kept_up, metadata)
    return Packed(values, metadata), GatedActivations(*kept, nonzeros)


def gated_gradients(
    da: Float[Array, "tokens features"], kept: GatedActivations
) -> tuple[Packed, Packed]:
    """dG = dA U 2 relu(G) and dU = dA relu(G)^2 at A's positions, all others zero."""
    metadata = kept.hidden.metadata
    gradients = _gated_gradients(da, kept.hidden.values, kept.up.values, metadata)
    dgate, dup = (Packed(values, metadata) for values in gradients)
    return dgate, dup


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
    sparsity: FFNSparsity, tokens: int, nonzeros: Int[Array, " features"]
) -> TokenGroups:
    """Groups for tokens in their fixed order, or as they come; a share of the features,
    those with most non-zeros, stays whole.

    Their second rows come in blocks of 64: where they do not fill the last one, the
    next densest features have a row whose product is not used.
    """
    order = np.arange(tokens, dtype=np.int32)
    if sparsity.permute_tokens:
        order = fixed_token_order(tokens)
    order = np.pad(order, (0, in_blocks(tokens) - tokens), constant_values=-1)
    features = nonzeros.size
    count = dense_feature_count(features, sparsity.dense_features)
    if count == 0:
        return TokenGroups(order, None)
    rows = in_blocks(count)
    _, chosen = lax.top_k(nonzeros, rows)
    row = jnp.arange(rows, dtype=jnp.int32)
    slots = jnp.full(features, -1, jnp.int32).at[chosen].set(row, unique_indices=True)
    return TokenGroups(order, WholeFeatures(chosen[:count], slots, rows))


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
    packed = along_tokens(groups, sparse)
    if groups.whole is None:
        return multiply(packed)
    chosen = groups.whole.chosen
    product, lost = multiply(packed, rows_apart=groups.whole.rows)
    lost = lost[:, : chosen.size] if transpose_out else lost[: chosen.size]
    # In place; each number once, so that the bits repeat. Number by number along the
    # columns, since XLA would first transpose all of the product.
    rows = np.arange(product.shape[0])[:, None]
    place = product.at[rows, chosen] if transpose_out else product.at[chosen]
    return place.add(lost, unique_indices=True, mode="promise_in_bounds")


def along_tokens(groups: TokenGroups, x: Packed) -> Packed:
    """X[order]^T 2:4 along the tokens, and below it what the whole features lose."""
    order = jnp.asarray(groups.order)
    if groups.whole is None:
        return Packed(*_keep_tokens(0)(x.values, x.metadata, order))
    run = _keep_tokens(groups.whole.rows)
    return Packed(*run(x.values, x.metadata, order, groups.whole.slots))


# The kernels have no batching rules.


@jax.custom_batching.sequential_vmap
def _keep_features(y_up):
    from pallas_kernels import activations_sm90

    return activations_sm90.keep_features(y_up)


@jax.custom_batching.sequential_vmap
def _gradient(da, values, metadata):
    from pallas_kernels import activations_sm90

    return activations_sm90.backward(da, values, metadata)


@jax.custom_batching.sequential_vmap
def _keep_gated_features(gate, up):
    from pallas_kernels import activations_sm90

    return activations_sm90.keep_gated_features(gate, up)


@jax.custom_batching.sequential_vmap
def _gated_gradients(da, hidden, up, metadata):
    from pallas_kernels import activations_sm90

    return activations_sm90.gated_backward(da, hidden, up, metadata)


@lru_cache
def _keep_tokens(rest_rows: int):
    @jax.custom_batching.sequential_vmap
    def run(values, metadata, order, *slots):
        from pallas_kernels import over_tokens_sm90

        return over_tokens_sm90.keep_tokens(
            values, metadata, order, *slots, rest_rows=rest_rows
        )

    return run
