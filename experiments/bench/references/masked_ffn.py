"""The oracle of one FFN: a training step of full-size matrices and masks.

It is written without the library's masks, dispatch or grouped GEMMs, for comparison;
only the expert that a token's hash gives is the library's.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from sparsejax.feed_forward.operands.token_sparsity import fixed_token_order
from sparsejax.feed_forward.sparsity import FFNSparsity
from sparsejax.feed_forward.tiles import dense_feature_count
from sparsejax.routing.routers import (
    ActivationEnergy,
    ActivationEnergyFP8,
    TokenHash,
)


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """The weights of one FFN, float32, and one batch."""

    x: Float[Array, "tokens d_model"]
    w_up: Float[Array, "d_model d_hidden"]
    w_down: Float[Array, "d_hidden d_model"]
    dy: Float[Array, "tokens d_model"]
    scales: Float[Array, "2"]
    """The scales beta of W1 and W2^T, frozen when the sparse phase began: not timed."""
    centres: Float[Array, "experts d_model"]
    """The centres of the clusters, recomputed rarely: not timed."""
    token_ids: Int[Array, " tokens"]
    """The ids of the tokens, by which the hash routes."""


jax.tree_util.register_dataclass(Inputs)


def masked_dense(
    sparsity: FFNSparsity, inputs: Inputs
) -> tuple[Array, Array, Array, Array]:
    """Returns (y, dx, dw_up, dw_down), computed from full-size matrices and masks."""
    x, dy, dtype = inputs.x, inputs.dy, inputs.x.dtype
    s_up, s_down = inputs.w_up, inputs.w_down
    if sparsity.weights:
        s_up = inputs.scales[0] * _shrink(s_up.T).T
        s_down = inputs.scales[1] * _shrink(s_down)
    w_up, w_down, s_up, s_down = (
        w.astype(dtype) for w in (inputs.w_up, inputs.w_down, s_up, s_down)
    )
    y_up = x @ s_up
    hidden = jnp.maximum(y_up, 0)
    if sparsity.activations and sparsity.activations.n == 2:
        hidden = jnp.where(_two_largest_of_four(y_up), hidden, 0)
    member = jnp.ones((len(x), 1), bool)
    if sparsity.experts:
        experts, count = sparsity.experts, sparsity.experts_per_token
        if sparsity.router in (ActivationEnergy(), ActivationEnergyFP8()):
            read = y_up
            if sparsity.router == ActivationEnergyFP8():
                read = _in_8_bits(x, axis=1) @ _in_8_bits(s_up, axis=None)
            mass = jnp.maximum(read, 0).astype(jnp.float32) ** 4
            scores = mass.reshape(len(x), experts, -1).sum(axis=2)
        elif sparsity.router == TokenHash():
            chosen = sparsity.router.choose(
                inputs.token_ids, experts=experts, experts_per_token=count
            )
            scores = jax.nn.one_hot(chosen, experts).sum(axis=1)
        else:
            scores = jnp.matmul(x, inputs.centres.T, precision="highest")
        best = jnp.sort(scores, axis=1)[:, -count][:, None]
        member = scores >= best
        hidden *= jnp.repeat(member, y_up.shape[1] // experts, axis=1)
    a = hidden**2
    dy_up = 2 * hidden * (dy @ s_down.T)
    y, dx = a @ w_down, dy_up @ w_up.T
    if sparsity.token_sparsity and sparsity.experts:
        a, dy_up = (
            _along_tokens_of_experts(matrix, a, member, sparsity.dense_features)
            for matrix in (a, dy_up)
        )
    elif sparsity.token_sparsity:
        # Over the tokens, in their fixed order; a share of the features stays dense.
        count = dense_feature_count(a.shape[1], sparsity.dense_features)
        ranked = jnp.argsort(-(a != 0).sum(axis=0), stable=True)
        whole = jnp.zeros(a.shape[1], bool).at[ranked[:count]].set(True)
        x, dy, a, dy_up = (_in_order(matrix) for matrix in (x, dy, a, dy_up))
        a, dy_up = (
            jnp.where(whole[None] | _two_largest_of_four(abs(matrix).T).T, matrix, 0)
            for matrix in (a, dy_up)
        )
    return y, dx, x.T @ dy_up, a.T @ dy


def _along_tokens_of_experts(
    matrix: Array, a: Array, member: Array, share: float
) -> Array:
    """Returns, in each expert's columns, two of every four of that expert's tokens, in
    their fixed order; a share of the columns, those with most non-zeros in A, stays
    dense."""
    tokens, experts = member.shape
    order = fixed_token_order(tokens)
    order = order[order >= 0]
    parts = zip(*(jnp.split(m, experts, axis=1) for m in (matrix, a)), strict=True)
    kept = []
    for expert, (own, own_a) in enumerate(parts):
        among = member[order, expert]
        place = jnp.where(among, jnp.cumsum(among) - 1, tokens)
        place = jnp.zeros(tokens, int).at[order].set(place)
        rows = jnp.zeros_like(own).at[place].set(own, mode="drop")
        count = dense_feature_count(own.shape[1], share)
        ranked = jnp.argsort(-(own_a != 0).sum(axis=0), stable=True)
        whole = jnp.zeros(own.shape[1], bool).at[ranked[:count]].set(True)
        mask = whole[None] | _two_largest_of_four(abs(rows).T).T
        rows = jnp.where(mask, rows, 0)
        kept.append(rows.at[place].get(mode="fill", fill_value=0))
    return jnp.concatenate(kept, axis=1)


def _in_8_bits(matrix: Array, axis: int | None) -> Array:
    """Returns the matrix as float8_e4m3fn has it, float32, with the smallest power of
    two for its scale, along `axis`, with which nothing overflows."""
    matrix = matrix.astype(jnp.float32)
    largest = jnp.max(jnp.abs(matrix), axis=axis, keepdims=True)
    scale = 2.0 ** jnp.ceil(jnp.log2(largest / 448))
    return (matrix / scale).astype(jnp.float8_e4m3fn).astype(jnp.float32) * scale


def _in_order(matrix: Array) -> Array:
    """Returns the rows in the order in which they are grouped along the tokens, with
    zeros where there is no token."""
    order = fixed_token_order(len(matrix))
    return jnp.where((order < 0)[:, None], 0, matrix[order])


def _two_largest_of_four(scores: Array) -> Array:
    """Returns the mask of the two largest of every four; of equal ones the first
    stays."""
    descending = jnp.argsort(-scores.reshape(-1, 4), axis=1, stable=True)
    return (jnp.argsort(descending, axis=1) < 2).reshape(scores.shape)


def _shrink(w: Array) -> Array:
    """Returns w with each group of four along the last axis brought nearer to zero by
    its second smallest magnitude."""
    fours = w.reshape(-1, 4)
    threshold = jnp.sort(jnp.abs(fours), axis=1)[:, 1:2]
    shrunk = jnp.sign(fours) * jnp.maximum(jnp.abs(fours) - threshold, 0)
    return shrunk.reshape(w.shape)
