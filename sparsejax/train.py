"""One optimiser step as a pure function, and all that is built from a configuration.

Everything the next step needs is in `TrainState`: with the data iterator's state and
the phase index, which every checkpoint holds as well, a resumed run continues with the
same bits.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from math import lcm
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from sparsejax import metrics
from sparsejax.batches import train_batches, validation_batches
from sparsejax.config import (
    OptimizerConfig,
    ScheduleName,
    TrainConfig,
    largest_divisor,
)
from sparsejax.corpus import Corpus, load_corpus
from sparsejax.layers import sparse_ffns
from sparsejax.micro_batches import loss_and_gradient
from sparsejax.model import Transformer, cross_entropy
from sparsejax.ops.ffn_spec import DENSE, FFNSparsity
from sparsejax.recipe import Phase, phases
from sparsejax.sharding import (
    batch_parts,
    check_shardable,
    constrain_state,
    local_rows,
    make_mesh,
    place_rows,
    sharding_of,
    state_shardings,
)
from sparsejax.switching import relabel_neurons, set_sparsity, switch


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """All arrays that the next step reads."""

    step: Int[Array, ""]
    """Optimiser steps done."""
    params: nnx.State
    """float32 masters."""
    buffers: nnx.State
    """State that is not trained: beta, router centres."""
    moments: optax.OptState
    key: Key[Array, ""]
    """Never changes: a step draws from `fold_in(key, step)`."""


def make_optimizer(
    config: OptimizerConfig, steps: int, phases: Sequence[Phase] = ()
) -> optax.GradientTransformation:
    """AdamW behind a clip of the global norm, with the learning rate of
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
    """The learning rate of step 0, 1, ..., steps - 1: a linear rise over the first w =
    round(warmup_share steps) of them, then what `config.schedule` names; in each of the
    `phases` times its `learning_rate_scale`."""
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
    """`learning_rate` without phases."""
    warmup = round(config.warmup_share * steps)
    peak = config.peak_learning_rate
    after = AFTER_WARMUP[config.schedule](config, steps, steps - warmup)
    if warmup == 0:
        return after
    rise = optax.linear_schedule(peak / warmup, peak, max(warmup - 1, 1))
    return optax.join_schedules([rise, after], [warmup])


def cosine(config: OptimizerConfig, steps: int, after_warmup: int) -> optax.Schedule:
    """One cosine over the steps that are left after the warm-up, to final_ratio x peak
    after the last of them. Source: arXiv 1608.03983, without restarts.

    Args:
      steps: those of the run.
      after_warmup: how many of them this schedule has; it counts from the first.
    """
    return optax.cosine_decay_schedule(
        config.peak_learning_rate, max(after_warmup, 1), config.final_ratio
    )


def warmup_stable_decay(
    config: OptimizerConfig, steps: int, after_warmup: int
) -> optax.Schedule:
    """Constant at the peak; over the last d = round(decay_share steps), with t from 0
    at the first of them to 1 after the last,

        rate(t) = peak (final_ratio + (1 - final_ratio) (1 - sqrt(t)))

    Source: the "1 - sqrt" form of arXiv 2405.18392. Arguments as in `cosine`.
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


def train_step(
    graph: nnx.GraphDef[Transformer],
    optimizer: optax.GradientTransformation,
    state: TrainState,
    tokens: Int[Array, "micro_batches batch sequence_plus_one"],
) -> tuple[TrainState, dict[str, Float[Array, ""]]]:
    """One optimiser step on the mean gradient over all micro-batches.

    The sparse weights are packed once, before the first micro-batch. Gradients are
    accumulated in float32.
    """
    model = nnx.merge(graph, state.params, state.buffers)
    key = jax.random.fold_in(state.key, state.step)
    keys = jax.vmap(partial(jax.random.fold_in, key))(jnp.arange(tokens.shape[0]))
    # Scattered at once: a sum over all micro-batches is never whole on a device.
    scatter = partial(constrain_state, mesh=model.mesh)
    loss, gradient = loss_and_gradient(
        cross_entropy, model, tokens, keys, place=scatter
    )
    params = state.params
    updates, moments = optimizer.update(gradient, state.moments, params)
    params = jax.tree.map(jnp.add, params, updates)
    report = {"loss": loss, "gradient_norm": optax.tree.norm(gradient)}
    state = replace(state, step=state.step + 1, params=params, moments=moments)
    return state, report


class Run:
    """A configuration with everything built from it, once: phases, corpus, compiled
    functions. One step and one validation are compiled per sparsity, and per form of
    the state where that has more than its steps read.
    """

    def __init__(
        self,
        config: TrainConfig,
        *,
        devices: Sequence[jax.Device] | None = None,
        corpus: Corpus | None = None,
    ) -> None:
        """`devices` are those of the mesh (None: all of all processes); `corpus` holds
        the tokens of `config.data` (None: they are loaded)."""
        self.config = config
        self.phases = phases(config)
        self.mesh = make_mesh(config.mesh, devices)
        resolved = config.mesh.resolve(self.mesh.size)
        self.micro_batches = config.micro_batches_on(resolved)
        self.check_shardable(*(of for phase in self.phases for of in phase.sparsities))
        if corpus is None:
            corpus = load_corpus(config.data, vocab_size=config.model.vocab_size)
        self.corpus = corpus
        self.optimizer = make_optimizer(config.optimizer, config.steps, self.phases)
        self.validation = [
            place_rows(tokens, self.mesh, axis=0, size=len(tokens))
            for tokens in self._held_out()
        ]
        self._graphs = lru_cache(maxsize=None)(self._graph)
        self._steps = lru_cache(maxsize=None)(self._step)
        self.template = lru_cache(maxsize=None)(self._template)
        self.recluster = lru_cache(maxsize=None)(self._recluster)
        # What the host reads has to be on every device: each process reads its own.
        on_all = sharding_of(self.mesh)
        self.statistics = nnx.jit(metrics.model_statistics, out_shardings=on_all)
        self.masks = nnx.jit(metrics.weight_masks)
        self.flip_rate = jax.jit(metrics.mask_flip_rate, out_shardings=on_all)

    def check_shardable(self, *sparsities: FFNSparsity) -> None:
        """Raises ValueError where the mesh cannot share a model of these."""
        resolved = self.config.mesh.resolve(self.mesh.size)
        check_shardable(
            self.config.model, sparsities, resolved, micro_batch=self._micro_batch
        )

    def phase_ends(self) -> list[int]:
        """The step after the last of each phase."""
        return list(np.cumsum([phase.steps for phase in self.phases]))

    def batches(self):
        """The endless training batches, from the first: of each micro-batch the rows
        of this process, for `place`."""
        return train_batches(
            self.corpus,
            self.config.data,
            batch_size=self.config.batch_size,
            micro_batches=self.micro_batches,
            rows=local_rows(self.mesh, self._micro_batch),
        )

    def place(
        self, tokens: Int[np.ndarray, "micro_batches rows sequence_plus_one"]
    ) -> Int[Array, "micro_batches batch sequence_plus_one"]:
        """What `batches` of all processes yielded, on the mesh."""
        return place_rows(tokens, self.mesh, axis=1, size=self._micro_batch)

    def sample_of_validation(self, *, tokens: int) -> Int[Array, "batch sequence"]:
        """Held-out sequences without their targets: at least one for every part of a
        batch, and no more than hold `tokens`."""
        parts = batch_parts(self.mesh)
        sequences = tokens // self.config.data.sequence_length
        sequences = max(parts, sequences // parts * parts)
        return self.validation[0][:sequences, :-1]

    @property
    def _micro_batch(self) -> int:
        return self.config.batch_size // self.micro_batches

    def _held_out(self) -> list[Int[np.ndarray, "batch sequence_plus_one"]]:
        """The batches of a validation. Their sequences are those that one device would
        read, so that losses compare whatever the mesh; where it cannot share them
        equally all are repeated, which leaves their mean as it is."""
        config, parts = self.config, batch_parts(self.mesh)
        batches = validation_batches(
            self.corpus,
            config.data,
            batch_size=config.validation_batch_size,
            batches=config.eval_batches,
        )
        sequences = np.concatenate(batches)
        whole = lcm(len(sequences), parts)
        sequences = np.tile(sequences, (whole // len(sequences), 1))
        on_each = largest_divisor(whole // parts, most=self._micro_batch // parts)
        return list(sequences.reshape(-1, parts * on_each, sequences.shape[1]))

    def build(self, sparsity: FFNSparsity) -> Transformer:
        """A freshly initialised model."""
        return Transformer(
            self.config.model,
            sparsity=sparsity,
            backend=self.config.backend,
            mesh=self.mesh,
            rngs=nnx.Rngs(self.config.seed),
        )

    def initial_state(self, sparsity: FFNSparsity | None = None) -> TrainState:
        """The state before the first step, deterministic from the seed; it belongs to
        `sparsity`, by default to what the first phase's does (`Phase.held`)."""
        sparsity = self.phases[0].held if sparsity is None else sparsity
        shardings = self._shardings(sparsity)
        return jax.jit(partial(self._init, sparsity), out_shardings=shardings)()

    def _template(self, sparsity: FFNSparsity) -> TrainState:
        """Shapes, dtypes and places of the state of a phase, nothing allocated."""
        shapes = jax.eval_shape(partial(self._init, sparsity))
        return jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(
                leaf.shape, leaf.dtype, sharding=sharding
            ),
            shapes,
            state_shardings(shapes, self.mesh),
        )

    def _init(self, sparsity: FFNSparsity) -> TrainState:
        _, params, buffers = nnx.split(self.build(sparsity), nnx.Param, ...)
        return TrainState(
            step=jnp.zeros((), jnp.int32),
            params=params,
            buffers=buffers,
            moments=self.optimizer.init(params),
            key=jax.random.key(self.config.seed),
        )

    def _shardings(self, sparsity: FFNSparsity) -> TrainState:
        return jax.tree.map(lambda leaf: leaf.sharding, self.template(sparsity))

    def graph(
        self, sparsity: FFNSparsity, held: FFNSparsity | None = None
    ) -> nnx.GraphDef[Transformer]:
        """The graph of a model that computes with `sparsity` on a state of `held`
        (None: to the same)."""
        return self._graphs(sparsity, held or sparsity)

    def step(
        self, sparsity: FFNSparsity, held: FFNSparsity | None = None
    ) -> jax.stages.Wrapped:
        """The compiled `train_step`, with sparsities as in `graph`. It takes the place
        of the state given, which is gone."""
        return self._steps(sparsity, held or sparsity)

    def _graph(
        self, sparsity: FFNSparsity, held: FFNSparsity
    ) -> nnx.GraphDef[Transformer]:
        def build() -> Transformer:
            model = self.build(held)
            for ffn in sparse_ffns(model):
                ffn.compute_as(sparsity, keep_centres=True)
            return model

        return nnx.split(nnx.eval_shape(build))[0]

    def _step(self, sparsity: FFNSparsity, held: FFNSparsity) -> jax.stages.Wrapped:
        step = partial(train_step, self.graph(sparsity, held), self.optimizer)
        on_all = sharding_of(self.mesh)
        shardings = self._shardings(held), on_all
        return jax.jit(step, donate_argnums=0, out_shardings=shardings)

    def model(
        self,
        state: TrainState,
        sparsity: FFNSparsity,
        held: FFNSparsity | None = None,
    ) -> Transformer:
        """The model of a state, with sparsities as in `graph`."""
        return nnx.merge(self.graph(sparsity, held), state.params, state.buffers)

    def validate(
        self,
        state: TrainState,
        sparsity: FFNSparsity,
        held: FFNSparsity | None = None,
        *,
        masks: bool = True,
    ) -> float:
        """Mean loss over the held-out batches, with sparsities as in `graph`; without
        `masks` as a dense network."""
        model = self.model(state, sparsity, held)
        if not masks:
            model = _unmasked(model)
        losses = [_validation_loss(model, tokens) for tokens in self.validation]
        return float(np.mean(jax.device_get(losses)))

    def switch_phase(
        self, state: TrainState, before: Phase, after: Phase
    ) -> TrainState:
        """The state for the phase after a switch, which takes the place of the one
        given. Weights are folded where the phases themselves leave 2:4 weights, not the
        steps in between that have another sparsity."""
        folds = bool(before.sparsity.weights) and not after.sparsity.weights
        if folds and after.held.weights:
            # Folded weights have other scales, which are taken on entering 2:4 anew.
            dense = replace(before.held, weights=None)
            state = self.switch(state, before.held, dense)
            return self.switch(state, dense, after.held)
        return self.switch(state, before.held, after.held, fold=folds)

    def switch(
        self,
        state: TrainState,
        before: FFNSparsity,
        after: FFNSparsity,
        *,
        fold: bool = True,
    ) -> TrainState:
        """The state after `switching.switch`, folded if `fold` and the settings say so.
        It takes the place of the one given, which is gone."""

        @partial(jax.jit, donate_argnums=0, out_shardings=self._shardings(after))
        def apply(state: TrainState) -> TrainState:
            model = self.model(state, before)
            folds = fold and self.config.phases.fold
            moments = switch(model, state.moments, after, fold=folds)
            return _with_model(state, model, moments)

        return apply(state)

    def _recluster(self, sparsity: FFNSparsity) -> Callable:
        """The state after a warm-started new clustering of all neurons."""

        @partial(jax.jit, donate_argnums=0, out_shardings=self._shardings(sparsity))
        def apply(state: TrainState) -> TrainState:
            model = self.model(state, sparsity)
            moments = relabel_neurons(model, state.moments, warm_start=True)
            return _with_model(state, model, moments)

        return apply


def _with_model(
    state: TrainState, model: Transformer, moments: optax.OptState
) -> TrainState:
    _, params, buffers = nnx.split(model, nnx.Param, ...)
    return replace(state, params=params, buffers=buffers, moments=moments)


def _unmasked(model: Transformer) -> Transformer:
    model = nnx.clone(model)
    set_sparsity(model, DENSE)
    return model


@nnx.jit
def _validation_loss(model: Transformer, tokens: jax.Array) -> jax.Array:
    # only a backward draws from the key
    return cross_entropy(model, tokens, jax.random.key(0))
