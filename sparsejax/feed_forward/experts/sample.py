"""Some tokens of a call with all of their neurons, which training looks at.

A token's own GEMMs compute the neurons of its experts alone, or say of the others no
more than their energies. All neurons are computed for a sixteenth of the tokens, and
for no more than 2,048 of an optimiser step, or 256 of each call where it has more than
eight, so that what a token skips is known too. On a mesh every device takes some of its
own tokens, with the experts that these have in the call, and with the neurons that its
GEMMs compute.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from sparsejax.feed_forward.layout import FFNLayout, gather_experts, own_experts

EVERY = 16
"""Every so many tokens one is in the sample, unless that makes more than `MOST`."""

MOST = 2048
"""The most tokens of the samples of an optimiser step. With as many the penalty and the
adaptive number of experts were compared (experiments/LOG.md); a larger step needs no
more."""

MOST_OF_SMALL_PART = 256
"""The most tokens of the sample of a call whose share of `MOST` is less than that: with
fewer the GEMMs of the sample would hardly take less time."""


class Sample(NamedTuple):
    """Some of the tokens of a call, and what they use of the experts."""

    x: Float[Array, "sampled d_model"]
    energies: Float[Array, "sampled experts"]
    """The sum of squares of A = relu(Y1)^2 in each expert, float32."""
    used: Bool[Array, "sampled experts"]
    """Whether a token uses an expert."""


def sampling_stride(tokens: int, share_of_step: float) -> int:
    """Returns every how many tokens of a call one is in the sample, where the call is
    that share of an optimiser step."""
    most = max(math.ceil(MOST * share_of_step), MOST_OF_SMALL_PART)
    return max(EVERY, math.ceil(tokens / most))


def stride_on_device(
    tokens: int, layout: FFNLayout | None, share_of_step: float
) -> int:
    """Returns the `sampling_stride` of a call of which this device has so many tokens.
    Where it does not divide them, the devices' samples are not what one device would
    take of the whole call."""
    parts = 1 if layout is None else layout.token_shards
    return sampling_stride(tokens * parts, share_of_step)


def all_products(
    x: Float[Array, "sampled d_model"], w_up: Float[Array, "d_model own_hidden"]
) -> Float[Array, "sampled own_hidden"]:
    """Returns Y1 of the sampled tokens, in the dtype of x."""
    return jnp.matmul(x, w_up, preferred_element_type=x.dtype)


def sample_of(
    x: Float[Array, "sampled d_model"],
    y_up: Float[Array, "sampled own_hidden"],
    expert_index: Int[Array, "sampled choices"],
    experts: int,
    layout: FFNLayout | None = None,
) -> Sample:
    """Returns the sample of a device.

    Args:
      x: the sampled tokens of this device.
      y_up: their Y1, of the neurons of this device.
      expert_index: their experts; a number outside [0, experts) is none.
      experts: E, over all devices.
      layout: how the operands lie on a mesh.
    """
    _, own = own_experts(layout, experts)
    energies = gather_experts(layout, _energies(y_up, own))
    used = jax.nn.one_hot(expert_index, experts, dtype=bool).any(axis=1)
    return Sample(x, energies, used)


def _energies(y_up: jax.Array, experts: int) -> Float[Array, "sampled experts"]:
    a = jnp.square(jax.nn.relu(y_up.astype(jnp.float32)))
    by_expert = a.reshape(len(a), experts, -1)
    # Else XLA reads Y1 again for each sum of energies.
    return lax.optimization_barrier(jnp.sum(jnp.square(by_expert), axis=-1))
