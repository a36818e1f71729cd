"""AdamW, and the schedules of its learning rate."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from sparsejax.config import (
    OptimizerConfig,
    ScheduleName,
)
from sparsejax.training.recipe import Phase


def make_optimizer(
    config: OptimizerConfig, steps: int, phases: Sequence[Phase] = ()
) -> optax.GradientTransformation:
    """Returns AdamW behind a clip of the global norm, with the learning rate of
    `learning_rate`. Norm scales are not decayed."""
    schedule = learning_rate(config, steps, phases)
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.adamw(
            schedule,
            b1=config.beta1,
            b2=config.beta2,
            eps=config.epsilon,
            weight_decay=config.weight_decay,
            mask=_is_matrix,
        ),
    )


def learning_rate(
    config: OptimizerConfig, steps: int, phases: Sequence[Phase] = ()
) -> optax.Schedule:
    """Returns the learning rate of step 0, 1, ..., steps - 1: a linear rise over the
    first w = round(warmup_share steps) of them, then the course that `config.schedule`
    names. In each of the `phases` it is multiplied by the phase's
    `learning_rate_scale`."""
    rate = _over_all_steps(config, steps)
    scales = np.array([phase.learning_rate_scale for phase in phases], np.float32)
    if np.all(scales == 1):
        return rate
    starts = np.cumsum([phase.steps for phase in phases])[:-1]

    def scaled(count: jax.typing.ArrayLike) -> jax.Array:
        phase = jnp.sum(jnp.asarray(count) >= jnp.asarray(starts))
        return jnp.asarray(rate(count)) * jnp.asarray(scales)[phase]

    return scaled


def _over_all_steps(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Returns the learning rate without the scales of the phases."""
    warmup = round(config.warmup_share * steps)
    peak = config.peak_learning_rate
    after = AFTER_WARMUP[config.schedule](config, steps, steps - warmup)
    if warmup == 0:
        return after
    rise = optax.linear_schedule(peak / warmup, peak, max(warmup - 1, 1))
    return optax.join_schedules([rise, after], [warmup])


def cosine(config: OptimizerConfig, steps: int, after_warmup: int) -> optax.Schedule:
    """Returns one cosine over the steps that are left after the warm-up, to final_ratio
    x peak after the last of them.

    Args:
      config: the settings of the learning rate.
      steps: the number of steps of the run.
      after_warmup: how many of them this schedule has; it counts from the first.
    Source: arXiv 1608.03983, without restarts.
    """
    return optax.cosine_decay_schedule(
        config.peak_learning_rate, max(after_warmup, 1), config.final_ratio
    )


def warmup_stable_decay(
    config: OptimizerConfig, steps: int, after_warmup: int
) -> optax.Schedule:
    """Returns a rate that is constant at the peak, and then decays over the last d =
    round(decay_share steps); with t from 0 at the first of them to 1 after the last,

        rate(t) = peak (final_ratio + (1 - final_ratio) (1 - sqrt(t)))

    Arguments are those of `cosine`.

    Source: the "1 - sqrt" form of arXiv 2405.18392.
    """
    decay = min(round(config.decay_share * steps), after_warmup)
    stable = after_warmup - decay

    def rate(count: jax.typing.ArrayLike) -> jax.Array:
        t = jnp.clip((count - stable) / max(decay, 1), 0.0, 1.0)
        # The same equation in a form that is the peak to the last bit at t = 0: runs
        # that differ in their decay alone have the same bits before it.
        return config.peak_learning_rate * (1 - (1 - config.final_ratio) * jnp.sqrt(t))

    return rate


AFTER_WARMUP: dict[
    ScheduleName, Callable[[OptimizerConfig, int, int], optax.Schedule]
] = {"cosine": cosine, "wsd": warmup_stable_decay}


def _is_matrix(params: nnx.State) -> nnx.State:
    def matrix(path: tuple, leaf: Any) -> bool:
        return "scale" not in [getattr(entry, "key", None) for entry in path]

    return jax.tree_util.tree_map_with_path(matrix, params)
