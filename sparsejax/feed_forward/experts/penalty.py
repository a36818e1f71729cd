"""The penalty on what skipped neurons give, which makes experts specialise.

For the tokens t of a sample, with S(t) the experts that a token uses,

    R = mean_t sum over e not in S(t) of w_e ||A_te|| / ||A_t||

is small where a token's activations A_t lie inside its experts. The norms ||A_t|| are
constants, and w_e = max(1, E load_e / sum of all loads) asks more of an expert that
many tokens use. Its gradient is added to that of W1 alone, in proportion to it.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from sparsejax.feed_forward.experts.observed import Sample


def gradient_of_products(sample: Sample) -> Float[Array, "sampled d_hidden"]:
    """Returns dR / dY1 = w_e 2 relu(y_tf)^3 / (||A_te|| ||A_t||) over the number of
    tokens, where token t skips the expert e of neuron f; else 0. Tokens and experts
    without any activation get zeros."""
    used = sample.used.astype(jnp.float32)
    load = used.sum(axis=0)
    weight = jnp.maximum(1.0, load * (load.shape[0] / load.sum()))
    hidden = jax.nn.relu(sample.y_up).reshape(*used.shape, -1)
    energies = sample.energies
    norms = jnp.sqrt(energies * energies.sum(axis=1, keepdims=True))
    factor = jnp.where(norms > 0, 2 * weight[None] / jnp.where(norms > 0, norms, 1), 0)
    factor *= (1 - used) / used.shape[0]
    return (factor[..., None] * hidden**3).reshape(sample.y_up.shape)


def penalised(
    w_up: Float[Array, "d_model d_hidden"], sample: Sample, strength: Float[Array, ""]
) -> Float[Array, "d_model d_hidden"]:
    """Returns W1, whose gradient will have that of R added, scaled to `strength` times
    the norm of what it is added to."""
    dy_up = gradient_of_products(sample).astype(sample.x.dtype)
    return _with_gradient(w_up, *jax.lax.stop_gradient((sample.x, dy_up, strength)))


@jax.custom_vjp
def _with_gradient(w_up, x, dy_up, strength):
    del x, dy_up, strength
    return w_up


def _fwd(w_up, x, dy_up, strength):
    return w_up, (x, dy_up, strength)


def _bwd(saved, dw_up):
    x, dy_up, strength = saved
    own = jnp.matmul(x.T, dy_up, preferred_element_type=jnp.float32)
    norm, size = (jnp.linalg.norm(m.astype(jnp.float32)) for m in (own, dw_up))
    scale = strength * size / jnp.where(norm > 0, norm, 1)
    return (dw_up + (scale * own).astype(dw_up.dtype), None, None, None)


_with_gradient.defvjp(_fwd, _bwd)
