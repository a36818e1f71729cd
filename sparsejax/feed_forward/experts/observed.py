"""What training steps observe of the experts, and keep from step to step.

It moves by a `sample` of the tokens of a call, after the call that it was read by: no
token's result depends on a later token.
"""

from collections.abc import Mapping

import jax.numpy as jnp
from jaxtyping import Array

from sparsejax.feed_forward.experts.sample import Sample
from sparsejax.feed_forward.sparsity import FFNSparsity

type Observed = Mapping[str, Array]
"""The arrays that are kept, by the names in `FFNSparsity.observes`."""

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


def initial(sparsity: FFNSparsity, layers: tuple[int, ...] = ()) -> dict[str, Array]:
    """Returns what is kept before the first step; `layers` are stacked in front."""
    start = {
        "energy_threshold": jnp.full(layers, 0.5 / sparsity.experts_per_token),
        "penalty_strength": jnp.full(layers, FIRST_STRENGTH),
    }
    return {name: start[name] for name in sparsity.observes}


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
