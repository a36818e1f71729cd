"""The optimisers by name, and the schedules of their learning rate."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from optax import contrib

from sparsejax.config import (
    OptimizerConfig,
    OptimizerName,
    ScheduleName,
)
from sparsejax.config.schedule import Phase


def make_optimizer(
    config: OptimizerConfig, steps: int, phases: Sequence[Phase] = ()
) -> optax.GradientTransformation:
    """Returns the optimiser that `config` names behind a clip of the global norm, with
    the learning rate of `learning_rate`. Norm scales and biases are not
    decayed."""
    schedule = learning_rate(config, steps, phases)
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        RULES[config.name](config, schedule),
    )


def _adamw(
    config: OptimizerConfig, rate: optax.Schedule
) -> optax.GradientTransformation:
    return optax.adamw(
        rate,
        b1=config.beta1,
        b2=config.beta2,
        eps=config.epsilon,
        weight_decay=config.weight_decay,
        mask=_is_matrix,
    )


def _lion(
    config: OptimizerConfig, rate: optax.Schedule
) -> optax.GradientTransformation:
    return optax.lion(
        rate,
        b1=config.beta1,
        b2=config.beta2,
        weight_decay=config.weight_decay,
        mask=_is_matrix,
    )


MUON_RMS = 0.2
"""The root mean square of Muon's updates before the learning rate, near that of AdamW's
(arXiv 2502.16982), so that both take the same learning rates."""


def _muon(
    config: OptimizerConfig, rate: optax.Schedule
) -> optax.GradientTransformation:
    # Layers, and the blocks of a diagonal, are axes before those of a matrix.
    matrices = lambda updates: jax.tree.map(
        lambda _: contrib.MuonDimensionNumbers(-2, -1), updates
    )
    orthogonal = contrib.muon(
        rate,
        beta=config.momentum,
        weight_decay=config.weight_decay,
        muon_weight_dimension_numbers=matrices,
        consistent_rms=MUON_RMS,
    )
    return optax.partition(
        {"muon": orthogonal, "adamw": _adamw(config, rate)}, _muon_or_adamw
    )


def _adafactor(
    config: OptimizerConfig, rate: optax.Schedule
) -> optax.GradientTransformation:
    # Its own decay would not be scaled by the learning rate.
    return optax.chain(
        optax.adafactor(rate),
        optax.add_decayed_weights(
            lambda count: -config.weight_decay * jnp.asarray(rate(count)), _is_matrix
        ),
    )


RULES: dict[
    OptimizerName,
    Callable[[OptimizerConfig, optax.Schedule], optax.GradientTransformation],
] = {"adamw": _adamw, "lion": _lion, "muon": _muon, "adafactor": _adafactor}
"""The optimisers by name."""


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


def _is_vector(path: tuple) -> bool:
    """Returns whether a parameter is a norm's scale or a bias."""
    names = [str(getattr(entry, "key", "")) for entry in path]
    return "scale" in names or any(name.startswith("bias_") for name in names)


def _is_matrix(params: nnx.State) -> nnx.State:
    def matrix(path: tuple, leaf: Any) -> bool:
        return not _is_vector(path)

    return jax.tree_util.tree_map_with_path(matrix, params)


def _muon_or_adamw(params: nnx.State) -> nnx.State:
    """Returns which rule each parameter has: the matrices of blocks "muon"."""

    def label(path: tuple, leaf: Any) -> str:
        names = [getattr(entry, "key", None) for entry in path]
        return "muon" if "blocks" in names and not _is_vector(path) else "adamw"

    return jax.tree_util.tree_map_with_path(label, params)
