"""What training steps observe of the experts, and keep from step to step.

A sixteenth of the tokens of a call, and no more than 2,048, is computed with all
neurons, in one dense GEMM, so that the neurons which a token skips are known too. What
is kept moves after the call that it was read by: no token's result depends on a later
token.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from sparsejax.feed_forward.sparsity import FFNSparsity
from sparsejax.ops.fp8_matmul import quantise_weight, rounded_product
from sparsejax.sparsity.masks import soft_threshold

type Observed = Mapping[str, Array]
"""The arrays that are kept, by the names in `FFNSparsity.observes`."""

EVERY = 16
"""Every so many tokens one is in the sample, unless that makes more than `MOST`."""

MOST = 2048
"""The most tokens of a sample. With as many the penalty and the adaptive number of
experts were compared (experiments/LOG.md); a larger call needs no larger sample."""

THRESHOLD_RATE = 0.1
"""The rate at which the log of the threshold grows in an optimiser step, for each
`experts_per_token` that tokens use too many on average."""

LEAST_THRESHOLD = 1e-6
"""The least share of a token's energy that an expert may be asked for: far below any
that changes the result, and above zero, from where a factor leads nowhere."""

FIRST_STRENGTH = 0.05
"""The norm of the penalty's gradient, as a share of that of dW1, at the first step."""

LEAST_STRENGTH = 1e-4
"""The least such share: without effect, and above zero, from where no factor leads."""

STRENGTH_FACTOR = 1.2 ** (1 / 50)
"""The factor of an optimiser step by which it grows, or shrinks: 1.2 in fifty."""


class Sample(NamedTuple):
    """Some of the tokens of a call, with all their neurons."""

    x: Float[Array, "sampled d_model"]
    y_up: Float[Array, "sampled d_hidden"]
    """The products of all neurons, Y1, float32."""
    used: Bool[Array, "sampled experts"]
    """Whether a token uses an expert."""

    @property
    def a_by_expert(self) -> Float[Array, "sampled experts neurons"]:
        """The activations A = relu(Y1)^2 of all neurons."""
        a = jnp.square(jax.nn.relu(self.y_up))
        return a.reshape(*self.used.shape, -1)

    @property
    def energies(self) -> Float[Array, "sampled experts"]:
        """The squared mass of A in each expert."""
        return jnp.sum(jnp.square(self.a_by_expert), axis=-1)


def sampling_stride(tokens: int) -> int:
    """Returns every how many tokens of a call one is in the sample."""
    return max(EVERY, math.ceil(tokens / MOST))


def initial(sparsity: FFNSparsity, layers: tuple[int, ...] = ()) -> dict[str, Array]:
    """Returns what is kept before the first step; `layers` are stacked in front."""
    start = {
        "energy_threshold": jnp.full(layers, 0.5 / sparsity.experts_per_token),
        "penalty_strength": jnp.full(layers, FIRST_STRENGTH),
    }
    return {name: start[name] for name in sparsity.observes}


def sampled(
    x: Float[Array, "tokens d_model"],
    w_up: Float[Array, "d_model d_hidden"],
    scale: Float[Array, ""],
    sparsity: FFNSparsity,
    expert_index: Int[Array, "tokens choices"] | None,
    kept: Observed,
) -> Sample:
    """Returns some tokens of a call, every `sampling_stride`th, without a gradient.

    Args:
      x: the tokens that the FFN reads.
      w_up: W1, and `scale` its beta, read where the weights are 2:4.
      sparsity: the sparsity of the FFN, which has experts.
      expert_index: the experts of each token, or None with a router that reads Y1.
      kept: what the call has read.
    """
    if sparsity.weights is not None:
        w_up = scale * soft_threshold(w_up, axis=-2)
    stride = sampling_stride(len(x))
    x, w_up = lax.stop_gradient((x[::stride], w_up.astype(x.dtype)))
    y_up = jnp.matmul(x, w_up, preferred_element_type=jnp.float32)
    experts = sparsity.experts
    assert experts is not None
    if expert_index is None:
        read = y_up
        if sparsity.chooses_in_fp8:
            read = rounded_product(x, quantise_weight(w_up))
        index = sparsity.router.choose(
            read,
            experts=experts,
            experts_per_token=sparsity.expert_choices,
            threshold=kept.get("energy_threshold"),
        )
    else:
        index = expert_index[::stride]
    used = jax.nn.one_hot(index, experts, dtype=bool).any(axis=1)
    return Sample(x, y_up, used)


def moved(
    sparsity: FFNSparsity, kept: Observed, sample: Sample, share: float
) -> dict[str, Array]:
    """Returns what is kept after a call.

    Args:
      sparsity: the sparsity of the FFN.
      kept: what was kept before.
      sample: the tokens of the call that are looked at.
      share: the share of an optimiser step that the call is, one over its
        micro-batches.
    """
    after = dict(kept)
    if "energy_threshold" in sparsity.observes:
        used = sample.used.sum(axis=1).mean() / sparsity.experts_per_token
        factor = jnp.exp(THRESHOLD_RATE * share * (used - 1))
        threshold = jnp.clip(kept["energy_threshold"] * factor, LEAST_THRESHOLD, 1.0)
        after["energy_threshold"] = threshold.astype(jnp.float32)
    if sparsity.skipped_energy is not None:
        energies = sample.energies
        whole = energies.sum(axis=1)
        skipped = jnp.where(sample.used, 0, energies).sum(axis=1)
        has_any = whole > 0
        shares = jnp.where(has_any, skipped / jnp.where(has_any, whole, 1), 0)
        skipped_share = shares.sum() / jnp.maximum(has_any.sum(), 1)
        grows = jnp.where(skipped_share > sparsity.skipped_energy, 1.0, -1.0)
        strength = kept["penalty_strength"] * STRENGTH_FACTOR ** (share * grows)
        after["penalty_strength"] = jnp.clip(strength, LEAST_STRENGTH, 1.0)
    return after
