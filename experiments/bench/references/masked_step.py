"""The steps that `bench/step.py` holds those that it times against."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from sparsejax.config.schedule import Phase
from sparsejax.feed_forward.sparsity import DENSE
from sparsejax.models.transformer import cross_entropy
from sparsejax.switches.growth import grown
from sparsejax.switches.static_weights import layer_of
from sparsejax.training.micro_batches import loss_and_gradient
from sparsejax.training.run import Run
from sparsejax.training.step import TrainState, train_step


def masked_step(run: Run, phase: Phase) -> Any:
    """Returns a function that JAX compiles, from a state and tokens to the report of a
    step on masked operands in the phase's precision, or a dense one in the run's."""
    if phase.static_weights is not None:
        return _whole_step(run)
    if phase.sparsity.is_dense:
        phase = replace(phase, precision=None)
    on_xla = replace(run.of_phase(phase).config, backend="xla")
    masked = Run(on_xla, devices=jax.devices()[:1], corpus=run.corpus)
    graph = masked.graph(phase.sparsity)

    @jax.jit
    def report(state: TrainState, tokens: jax.Array):
        return train_step(graph, masked.optimizer, state, tokens)[1]

    return report


def _whole_step(run: Run) -> Any:
    """Returns what a step with static weights reports, as a function that JAX compiles:
    the same weights in whole ones that are zero elsewhere, and have no gradient
    there."""
    graph, template = run.graph(DENSE), run.template(DENSE)

    @jax.jit
    def report(state: TrainState, tokens: jax.Array):
        params = grown(state.params, template.params)
        buffers = jax.tree.map(
            lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), template.buffers
        )
        keys = jax.random.split(state.key, len(tokens))
        model = nnx.merge(graph, params, buffers)
        loss, gradient = loss_and_gradient(cross_entropy, model, tokens, keys)

        def where_there_is_a_weight(path, gradient, weight):
            if layer_of(path) is None:
                return gradient
            return jnp.where(weight != 0, gradient, 0)

        gradient = jax.tree_util.tree_map_with_path(
            where_there_is_a_weight, gradient, params
        )
        return {"loss": loss, "gradient_norm": optax.tree.norm(gradient)}

    return report
