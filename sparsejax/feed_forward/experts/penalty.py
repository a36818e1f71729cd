"""The penalty on what skipped neurons give, which makes experts specialise.

For the tokens t of a sample, with S(t) the experts that a token uses,

    R = mean_t sum over e not in S(t) of w_e ||A_te|| / ||A_t||

is small where a token's activations A_t lie inside its experts. The norms ||A_t|| are
constants, and w_e = max(1, E load_e / sum of all loads) asks more of an expert that
many tokens use. Its gradient is added to that of W1 alone, in proportion to it.

On a mesh each device adds what its own tokens give of both gradients, before they are
summed over the devices. The proportion is that of the sums. Their norms are estimated
from a projection of some of their columns, whose sum is small to send, so that the
gradient itself is still summed once per optimiser step.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from sparsejax.feed_forward.experts.sample import Sample
from sparsejax.feed_forward.layout import FFNLayout, own_experts

COLUMNS = 512
"""The number of neurons, equally far apart, whose columns of a gradient of W1 stand for
its norm; or nearly twice as many, and in a narrower FFN all. On a mesh that splits the
neurons, its devices have as many together."""

SIGNS = 64
"""The number of projections of such a column, each with random signs, which stand for
the column where it is longer. The sum of their squares is that of the column within 18
% (a standard deviation), and of columns that are not parallel within less."""


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
    devices' dW1, by estimates of both norms (`COLUMNS`, `SIGNS`)."""
    x, dy_up, strength = penalty
    own = jnp.matmul(x.T, dy_up, preferred_element_type=jnp.float32)
    norm, size = _norms_of_sums((own, dw_up), layout)
    scale = strength[0] * size / jnp.where(norm > 0, norm, 1)
    return dw_up + (scale * own).astype(dw_up.dtype)


def _norms_of_sums(
    gradients: tuple[Float[Array, "d_model own_hidden"], ...],
    layout: FFNLayout | None,
) -> Float[Array, " gradients"]:
    """Returns estimates of the norms of some gradients, each summed over the devices'
    tokens, float32."""
    d_model, features = gradients[0].shape
    parts = 1 if layout is None else layout.hidden_shards
    stride = max(1, features * parts // COLUMNS)
    columns = jnp.stack([of[:, ::stride].astype(jnp.float32) for of in gradients])
    if d_model > SIGNS:
        # The same at every call and on every device. What is drawn from one key is not
        # independent, as weights have to be of the signs, so that it is no usual key.
        key = jax.random.key(1_910_073_862, impl="threefry2x32")
        signs = jax.random.rademacher(key, (SIGNS, d_model), jnp.float32)
        exact = lax.Precision.HIGHEST
        columns = jnp.einsum("sd,gdc->gsc", signs, columns, precision=exact)
        columns /= SIGNS**0.5
    if layout is not None:
        columns = lax.psum(columns, layout.tokens)
    squares = jnp.sum(jnp.square(columns), axis=(1, 2))
    if layout is not None and layout.hidden_shards > 1:
        squares = lax.psum(squares, layout.hidden)
    return jnp.sqrt(squares)
