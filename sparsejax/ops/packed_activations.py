"""2:4 activations as Hopper's sparse tensor cores read them.

Made from what a GEMM writes, and in the backward packed along the tokens as well, by
kernels that read each number once. Nothing here is differentiated: the FFN's backward
is written out.
"""

from functools import lru_cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from sparsejax.ops.backend import current_device
from sparsejax.ops.ffn_spec import FFNSparsity, dense_feature_count
from sparsejax.ops.sparse_matmul import multiply_packed, tuned_config
from sparsejax.ops.token_sparsity import densest, in_segments
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


def multiply_and_keep(x: Float[Array, "tokens k"], weight: Packed) -> Activations:
    """`keep_features(x @ weight^T)`, to the bit, in the GEMM's epilogue: Y1 is not
    written. On an H200 it took 46 us less of 348 than one after the other (8192 x 2048
    x 8192)."""
    w = weight.values.astype(x.dtype)
    values, metadata, counts = to_packed("keep_features")((), w, weight.metadata, x)
    return Activations(Packed(values, metadata), counts.astype(jnp.int32).sum(axis=0))


def multiply_for_gradient(
    dy: Float[Array, "tokens k"], weight: Packed, a: Packed
) -> Packed:
    """`gradient(dy @ weight^T, a)`, likewise: dA is not written."""
    w = weight.values.astype(dy.dtype)
    operands = w, weight.metadata, dy, a.values, a.metadata
    return Packed(to_packed("backward")((), *operands), a.metadata)


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

    by_segments: bool
    """In their fixed order, else as they come."""
    whole: WholeFeatures | None

    def as_read(self, x: Float[Array, "tokens d"]) -> Float[Array, "..."]:
        """x as the GEMM reads it in that order: see `multiply_packed`."""
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
    """The `count` features with most non-zeros, of at most `tokens`."""
    rows = in_blocks(count)
    found, index = densest(nonzeros, count, tokens), jnp.arange(nonzeros.size)
    others = index - found.before
    slots = jnp.where(others < rows - count, count + others, -1)
    slots = jnp.where(found.chosen, found.before, slots)
    place = jnp.where(found.chosen, found.before, count)
    chosen = jnp.zeros(count, jnp.int32).at[place].set(index, mode="drop")
    return WholeFeatures(chosen, slots, rows)


class OverTokens(NamedTuple):
    """A and the gradients before the activation, transposed, 2:4 along the tokens; and
    below them what the whole features lose."""

    a: Packed
    gradients: tuple[Packed, ...]

    @classmethod
    def of(cls, arrays) -> "OverTokens":
        """From what a kernel returns."""
        a, *gradients = (Packed(*matrix) for matrix in arrays)
        return cls(a, tuple(gradients))


def gradient_over_tokens(
    groups: TokenGroups, da: Float[Array, "tokens features"], a: Packed
) -> tuple[Packed, OverTokens]:
    """dY1 as `gradient` has it, and A and dY1 over tokens."""
    run = _over_tokens("backward", groups)
    dy_up, *over_tokens = run(da, a.values, a.metadata)
    return Packed(dy_up, a.metadata), OverTokens.of(over_tokens)


def over_tokens(groups: TokenGroups, a: Packed, dy_up: Packed) -> OverTokens:
    """A and dY1 over tokens, as `gradient_over_tokens` has them."""
    run = _over_tokens("keep_tokens_of_both", groups)
    return OverTokens.of(run(a.values, dy_up.values, a.metadata))


def gated_gradients_over_tokens(
    groups: TokenGroups, da: Float[Array, "tokens features"], kept: GatedActivations
) -> tuple[tuple[Packed, Packed], OverTokens]:
    """dG and dU as `gated_gradients` has them, and A, dG and dU over tokens."""
    run, metadata = _over_tokens("gated_backward", groups), kept.hidden.metadata
    dgate, dup, *over_tokens = run(da, kept.hidden.values, kept.up.values, metadata)
    gradients = Packed(dgate, metadata), Packed(dup, metadata)
    return gradients, OverTokens.of(over_tokens)


def keep_tokens(groups: TokenGroups, x: Packed) -> Packed:
    """One matrix alone, over tokens."""
    return Packed(*_over_tokens("keep_tokens", groups)(x.values, x.metadata))


def _over_tokens(name: str, groups: TokenGroups):
    """The kernel of that name, for arrays."""
    if groups.whole is None:
        return _kernel_over_tokens(name, groups.by_segments, 0)
    run = _kernel_over_tokens(name, groups.by_segments, groups.whole.rows)
    return partial(run, groups.whole.slots)


def weight_gradient_up(
    groups: TokenGroups, x: Float[Array, "tokens d"], dy_up: Packed
) -> Float[Array, "d features"]:
    """dW1 = X^T dY1 in float32, dY1 over tokens."""
    # (d, F) = ((F, T) @ (T, d))^T
    return _weight_gradient(groups, dy_up, x, transpose_out=True)


def weight_gradient_down(
    groups: TokenGroups, a: Packed, dy: Float[Array, "tokens d"]
) -> Float[Array, "features d"]:
    """dW2 = A^T dY in float32, A over tokens."""
    # (F, d) = (F, T) @ (T, d)
    return _weight_gradient(groups, a, dy, transpose_out=False)


def _weight_gradient(
    groups: TokenGroups, sparse: Packed, dense: jax.Array, *, transpose_out: bool
) -> jax.Array:
    """sparse @ dense, or its transpose."""
    multiply = partial(
        multiply_packed,
        sparse,
        groups.as_read(dense),
        b_k_major=False,
        transpose_out=transpose_out,
        out_dtype=jnp.float32,
    )
    if groups.whole is None:
        return multiply()
    chosen = groups.whole.chosen
    product, lost = multiply(rows_apart=groups.whole.rows)
    lost = lost[:, : chosen.size] if transpose_out else lost[: chosen.size]
    return add_lost(product, lost, chosen, columns=transpose_out)


def add_lost(
    product: Float[Array, "_ _"],
    lost: Float[Array, "_ _"],
    chosen: Int[Array, " whole"],
    *,
    columns: bool,
) -> Float[Array, "_ _"]:
    """`product` with `lost` added to its chosen rows or columns."""
    # In place; each number once, so that the bits repeat. Number by number along the
    # columns, since XLA would first transpose all of the product.
    rows = np.arange(product.shape[0])[:, None]
    place = product.at[rows, chosen] if columns else product.at[chosen]
    return place.add(lost, unique_indices=True, mode="promise_in_bounds")


# The kernels have no batching rules.


@jax.custom_batching.sequential_vmap
def _keep_features(y_up):
    from pallas_kernels import activations_sm90

    return activations_sm90.keep_features(y_up)


@lru_cache
def to_packed(name: str, experts: int = 0):
    """A kernel of `matmul_to_packed_sm90`, for arrays: first each tile's expert and how
    many tiles are used, or nothing without experts, then its operands."""

    @jax.custom_batching.sequential_vmap
    def run(lookups, *operands):
        from pallas_kernels import matmul_to_packed_sm90 as kernels

        return getattr(kernels, name)(
            *operands,
            kernels.Experts(*lookups, count=experts) if experts else None,
            config_for=tuned_config,
            multiprocessors=current_device().count_multiprocessors(),
        )

    return run


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
def _kernel_over_tokens(name: str, by_segments: bool, whole_rows: int):
    @jax.custom_batching.sequential_vmap
    def run(*operands):
        from pallas_kernels import over_tokens_sm90

        kernel = partial(getattr(over_tokens_sm90, name), by_segments=by_segments)
        if not whole_rows:
            return kernel(*operands)
        slots, *operands = operands
        return kernel(*operands, over_tokens_sm90.Whole(slots, whole_rows))

    return run
