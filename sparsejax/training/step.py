"""One optimiser step as a pure function.

Everything the next step needs is in `TrainState`: with the data iterator's state and
the phase index, which every checkpoint holds as well, a resumed run continues with the
same bits.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from sparsejax.distributed.mesh import (
    constrain_gradient,
)
from sparsejax.models.transformer import Transformer, cross_entropy
from sparsejax.switches.static_weights import within_masks
from sparsejax.training.micro_batches import loss_and_gradient


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """All arrays that the next step reads."""

    step: Int[Array, ""]
    """The number of optimiser steps done, int32."""
    params: nnx.State
    """The float32 master weights."""
    buffers: nnx.State
    """State that is not trained: the scales beta, the arrays that routers keep, and
    what steps observe of experts."""
    moments: optax.OptState
    key: Key[Array, ""]
    """The random key, which never changes: a step draws from `fold_in(key, step)`."""


def train_step(
    graph: nnx.GraphDef[Transformer],
    optimizer: optax.GradientTransformation,
    state: TrainState,
    tokens: Int[Array, "micro_batches batch sequence_plus_one"],
    *,
    zero_stage: Literal[1, 2, 3] = 3,
) -> tuple[TrainState, dict[str, Float[Array, ""]]]:
    """Returns the state after one optimiser step on the mean gradient over all
    micro-batches, and the loss and gradient norm, float32.

    The sparse weights are packed once, before the first micro-batch. Gradients are
    accumulated in float32. `zero_stage` is that of `MeshConfig`.
    """
    model = nnx.merge(graph, state.params, state.buffers)
    key = jax.random.fold_in(state.key, state.step)
    keys = jax.vmap(partial(jax.random.fold_in, key))(jnp.arange(tokens.shape[0]))
    place_sum = partial(constrain_gradient, mesh=model.mesh)
    loss, gradient = loss_and_gradient(
        cross_entropy,
        model,
        tokens,
        keys,
        place=partial(place_sum, whole_over_fsdp=zero_stage == 1),
        place_sum=place_sum,
        whole=zero_stage < 3,
    )
    gradient = within_masks(gradient, model.config.static_weights, state.key)
    params = state.params
    updates, moments = optimizer.update(gradient, state.moments, params)
    params = jax.tree.map(jnp.add, params, updates)
    report = {"loss": loss, "gradient_norm": optax.tree.norm(gradient)}
    # What the step has observed; all other buffers are as they were.
    _, _, buffers = nnx.split(model, nnx.Param, ...)
    step = state.step + 1
    state = replace(state, step=step, params=params, buffers=buffers, moments=moments)
    return state, report


def with_model(
    state: TrainState, model: Transformer, moments: optax.OptState
) -> TrainState:
    """Returns the state with the parameters and buffers of a model."""
    _, params, buffers = nnx.split(model, nnx.Param, ...)
    return replace(state, params=params, buffers=buffers, moments=moments)
