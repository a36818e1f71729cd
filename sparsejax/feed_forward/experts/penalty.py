"""The penalty on what skipped neurons give, which makes experts specialise.

For the tokens t of a sample, with S(t) the experts that a token uses,

    R = mean_t sum over e not in S(t) of w_e ||A_te|| / ||A_t||

is small where a token's activations A_t lie inside its experts. The norms ||A_t|| are
constants, and w_e = max(1, E load_e / sum of all loads) asks more of an expert that
many tokens use. Its gradient is added to that of W1 alone, in proportion to it.

On a mesh each device adds what its own tokens give of both gradients, before they are
summed over the devices. The proportion is that of the sums. Their norms are estimated
from a random projection of both, whose sum is small to send, so that the gradient
itself is still summed once per optimiser step. Every entry is in that projection: where
few neurons are active, no choice of columns stands for the others.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from sparsejax.feed_forward.experts.sample import Sample
from sparsejax.feed_forward.layout import FFNLayout, own_experts

GROUPS = 512
"""The number of groups, or nearly twice as many, in which the columns of a gradient of
W1 are summed, each with a random sign. A group is 2^n neighbours, one where there are
fewer columns or an odd number of them. On a mesh that splits the neurons, its devices
have as many groups together. Where nearly all of the norm lies in two columns of one
group, and these are equal, they may cancel."""

SIGNS = 64
"""The number of projections of such a sum, each with random signs, which stand for it
where it is longer. The sum of all their squares is the square of the gradient's norm
within 18 % (a standard deviation) if its columns are parallel, and else within less."""


class Penalty(NamedTuple):
    """What a backward needs for the penalty, on one device."""

    x: Float[Array, "sampled d_model"]
    dy_up: Float[Array, "sampled own_hidden"]
    """The gradient of R at the sampled tokens' Y1, in the dtype of x."""
    strength: Float[Array, "1"]
    """The norm of what is added to dW1, as a share of that of dW1."""


def penalty(
    sample: Sample,
    y_up: Float[Array, "sampled own_hidden"],
    strength: Float[Array, ""],
    layout: FFNLayout | None = None,
) -> Penalty:
    """Returns what a backward needs, from the sample of a forward and its Y1."""
    dy_up = gradient_of_products(sample, y_up, layout).astype(sample.x.dtype)
    return Penalty(sample.x, dy_up, strength[None])


def gradient_of_products(
    sample: Sample,
    y_up: Float[Array, "sampled own_hidden"],
    layout: FFNLayout | None = None,
) -> Float[Array, "sampled own_hidden"]:
    """Returns dR / dY1 = w_e 2 relu(y_tf)^3 / (||A_te|| ||A_t||) over the number of
    tokens, where token t skips the expert e of neuron f; else 0. Tokens and experts
    without any activation get zeros. The loads are those of all devices' tokens."""
    used = sample.used.astype(jnp.float32)
    tokens, experts = used.shape
    load = used.sum(axis=0)
    if layout is not None:
        load = lax.psum(load, layout.tokens)
        tokens *= layout.token_shards
    weight = jnp.maximum(1.0, load * (experts / load.sum()))
    energies = sample.energies
    norms = jnp.sqrt(energies * energies.sum(axis=1, keepdims=True))
    factor = jnp.where(norms > 0, 2 * weight[None] / jnp.where(norms > 0, norms, 1), 0)
    factor *= (1 - used) / tokens
    own = lax.dynamic_slice_in_dim(factor, *own_experts(layout, experts), axis=1)
    accurate = jnp.promote_types(y_up.dtype, jnp.float32)
    hidden = jax.nn.relu(y_up.astype(accurate)).reshape(*own.shape, -1)
    return (own[..., None] * hidden**3).reshape(y_up.shape)


def penalised(
    dw_up: Float[Array, "d_model own_hidden"],
    penalty: Penalty,
    layout: FFNLayout | None = None,
) -> Float[Array, "d_model own_hidden"]:
    """Returns dW1 of this device's tokens with their share of the gradient of R, scaled
    so that the sum of these shares has `strength` times the norm of the sum of all
    devices' dW1, by estimates of both norms (`GROUPS`, `SIGNS`)."""
    x, dy_up, strength = penalty
    # In the dtype of x: it is a small part of the sum, and half as many bytes.
    own = jnp.matmul(x.T, dy_up, preferred_element_type=x.dtype)
    # The projection of a product is that of its factors, which are smaller.
    of_own = _product(_row_sums(x.T), _column_sums(dy_up, layout))
    projections = jnp.stack((of_own, _row_sums(_column_sums(dw_up, layout))))
    norm, size = _norms_of_sums(projections, layout)
    scale = strength[0] * size / jnp.where(norm > 0, norm, 1)
    return dw_up + (scale * own.astype(jnp.float32)).astype(dw_up.dtype)


def _column_sums(
    gradient: Float[Array, "rows own_hidden"], layout: FFNLayout | None
) -> Float[Array, "rows own_groups"]:
    """Returns the sums of groups of columns with random signs, float32. The groups are
    those of one device, whatever the mesh."""
    rows, own = gradient.shape
    features = own * (1 if layout is None else layout.hidden_shards)
    columns = 1
    while own % (2 * columns) == 0 and features // (2 * columns) >= GROUPS:
        columns *= 2
    if columns == 1:
        return gradient.astype(jnp.float32)
    first, _ = own_experts(layout, features)
    signs = lax.dynamic_slice_in_dim(_signs(1, features), first, own)
    signed = gradient.astype(jnp.float32) * signs[None]
    return jnp.sum(signed.reshape(rows, -1, columns), axis=2)


def _row_sums(
    gradient: Float[Array, "d_model columns"],
) -> Float[Array, "projections columns"]:
    """Returns sums of all rows with random signs over the root of their number,
    float32; of few rows these themselves."""
    gradient = gradient.astype(jnp.float32)
    d_model = len(gradient)
    if d_model <= SIGNS:
        return gradient
    return _product(_signs(0, SIGNS, d_model) / SIGNS**0.5, gradient)


def _signs(axis: int, *shape: int) -> Float[Array, "*shape"]:
    """Returns random signs, the same at every call and on every device, others for each
    axis."""
    # No key that weights are drawn from, or they would depend on the signs.
    key = jax.random.key(1_910_073_862 + axis, impl="threefry2x32")
    return jax.random.rademacher(key, shape, jnp.float32)


def _product(
    left: Float[Array, "projections rows"], right: Float[Array, "rows columns"]
) -> Float[Array, "projections columns"]:
    return jnp.matmul(left, right, precision=lax.Precision.HIGHEST)


def _norms_of_sums(
    projections: Float[Array, "gradients projections own_groups"],
    layout: FFNLayout | None,
) -> Float[Array, " gradients"]:
    """Returns the norms of projected gradients, each summed over the devices'
    tokens."""
    if layout is not None:
        projections = lax.psum(projections, layout.tokens)
    squares = jnp.sum(jnp.square(projections), axis=(1, 2))
    if layout is not None and layout.hidden_shards > 1:
        squares = lax.psum(squares, layout.hidden)
    return jnp.sqrt(squares)
