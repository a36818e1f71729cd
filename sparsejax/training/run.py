"""A configuration with all that is built from it: phases, data, compiled functions."""

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from functools import lru_cache, partial
from math import lcm

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Int, Key

from sparsejax.config import MeshConfig, ModelConfig, TrainConfig
from sparsejax.config.optimizer_limits import check_optimizer
from sparsejax.config.ranges import largest_divisor
from sparsejax.config.schedule import Phase, model_of, phases
from sparsejax.data.batches import train_batches, validation_batches
from sparsejax.data.corpus import Corpus, load_corpus
from sparsejax.distributed.mesh import (
    batch_parts,
    check_shardable,
    local_rows,
    make_mesh,
    place_rows,
    sharding_of,
    state_shardings,
)
from sparsejax.feed_forward.sparsity import DENSE, FFNSparsity
from sparsejax.models.sparse_ffn import sparse_ffns
from sparsejax.models.transformer import Transformer, cross_entropy, graph_on
from sparsejax.reports import metrics
from sparsejax.switches.growth import check_grows, grown, padded, same_size
from sparsejax.switches.static_weights import initial_weights
from sparsejax.switches.switching import relabel_neurons, set_sparsity, switch
from sparsejax.training.optimizer import make_optimizer
from sparsejax.training.step import TrainState, train_step, with_model

GROWTH = 2**32 - 1
"""The number that is folded into the random key where a model grows; no step has it."""


class Run:
    """A configuration with everything built from it, once: phases, corpus, compiled
    functions. One step and one validation are compiled per sparsity, and per form of
    the state where that has more than its steps read. So is a switch between two.
    """

    def __init__(
        self,
        config: TrainConfig,
        *,
        devices: Sequence[jax.Device] | None = None,
        corpus: Corpus | None = None,
    ) -> None:
        """Builds everything. `devices` are those of the mesh (None: all devices of all
        processes); `corpus` holds the tokens of `config.data` (None: they are
        loaded)."""
        self.config = config
        self.phases = phases(config)
        self.mesh = make_mesh(config.mesh, devices)
        resolved = config.mesh.resolve(self.mesh.size)
        self.micro_batches = config.micro_batches_on(resolved)
        self.check_shardable(*(of for phase in self.phases for of in phase.sparsities))
        self._check_gemms(resolved)
        check_optimizer(config, self.phases, resolved)
        if corpus is None:
            corpus = load_corpus(config.data, vocab_size=config.model.vocab_size)
        self.corpus = corpus
        self.optimizer = make_optimizer(config.optimizer, config.steps, self.phases)
        self.validation = [
            place_rows(tokens, self.mesh, axis=0, size=len(tokens))
            for tokens in self._held_out()
        ]
        self._compile_once()
        # What the host reads has to be on every device: each process reads its own.
        on_all = sharding_of(self.mesh)
        self.statistics = nnx.jit(metrics.model_statistics, out_shardings=on_all)
        self.masks = nnx.jit(metrics.weight_masks)
        self.flip_rate = jax.jit(metrics.mask_flip_rate, out_shardings=on_all)

        self._sized = lru_cache(maxsize=None)(self._with_model_of)
        for phase in self.phases:
            self.of_phase(phase)

    def _compile_once(self) -> None:
        self._graphs = lru_cache(maxsize=None)(self._graph)
        self._steps = lru_cache(maxsize=None)(self._step)
        self.template = lru_cache(maxsize=None)(self._template)
        self.recluster = lru_cache(maxsize=None)(self._recluster)
        self._init = lru_cache(maxsize=None)(self._initialisation)
        self._initial = lru_cache(maxsize=None)(self._compiled_init)
        self._switches = lru_cache(maxsize=None)(self._switch)

    def of_phase(self, phase: Phase) -> "Run":
        """Returns the run that computes with the states of a phase: this one, or one
        with a smaller model, or another precision, and all else in common.

        Raises:
          ValueError: the mesh cannot share the smaller model.
        """
        model = model_of(phase, self.config.model)
        return self if model == self.config.model else self._sized(model)

    def _with_model_of(self, model: ModelConfig) -> "Run":
        other = copy(self)
        if same_size(model, self.config.model):
            other.config = replace(self.config, model=model)
        else:
            other.config = replace(self.config.with_recipe("dense"), model=model)
            other.check_shardable(DENSE)
        other._compile_once()
        return other

    def check_shardable(self, *sparsities: FFNSparsity) -> None:
        """Raises ValueError where the mesh cannot share a model with one of these
        sparsities."""
        resolved = self.config.mesh.resolve(self.mesh.size)
        check_shardable(
            self.config.model, sparsities, resolved, micro_batch=self._micro_batch
        )

    def _check_gemms(self, mesh: MeshConfig) -> None:
        """Raises ValueError or NotImplementedError where a phase has GEMMs that this
        device, or the backend that is named, cannot run: before anything is trained."""
        tokens = self._micro_batch * self.config.data.sequence_length
        for phase in self.phases:
            model = model_of(phase, self.config.model)
            for sparsity in phase.sparsities:
                metrics.ffn_decisions(
                    model, sparsity, tokens, self.config.backend, mesh=mesh
                )

    def phase_ends(self) -> list[int]:
        """Returns for each phase the number of steps that are done at its end."""
        return list(np.cumsum([phase.steps for phase in self.phases]))

    def batches(self):
        """Returns the endless training batches, from the first on: of each micro-batch
        the rows of this process, for `place`."""
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
        """Returns one batch on the mesh, put together from the rows that `batches`
        yielded in all processes."""
        return place_rows(tokens, self.mesh, axis=1, size=self._micro_batch)

    def sample_of_validation(self, *, tokens: int) -> Int[Array, "batch sequence"]:
        """Returns held-out sequences without their targets: at least one for every part
        of a batch and, beyond that, no more than hold `tokens` tokens."""
        parts = batch_parts(self.mesh)
        sequences = tokens // self.config.data.sequence_length
        sequences = max(parts, sequences // parts * parts)
        return self.validation[0][:sequences, :-1]

    @property
    def _micro_batch(self) -> int:
        return self.config.batch_size // self.micro_batches

    def _held_out(self) -> list[Int[np.ndarray, "batch sequence_plus_one"]]:
        """Returns the batches of a validation. Their sequences are those that one
        device would read, so that losses compare whatever the mesh; where the mesh
        cannot share them equally all are repeated, which leaves their mean as it is."""
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

    def build(
        self, sparsity: FFNSparsity, key: Key[Array, ""] | None = None
    ) -> Transformer:
        """Returns a freshly initialised model, drawn from `key` or, where that is None,
        from the seed."""
        return Transformer(
            self.config.model,
            sparsity=sparsity,
            backend=self.config.backend,
            mesh=self.mesh,
            rngs=nnx.Rngs(self.config.seed if key is None else key),
        )

    def initial_state(self, sparsity: FFNSparsity | None = None) -> TrainState:
        """Returns the state before the first step, deterministic from the seed. It
        belongs to `sparsity`; None stands for `Phase.held` of the first phase."""
        return self._initial(self.phases[0].held if sparsity is None else sparsity)()

    def _template(self, sparsity: FFNSparsity) -> TrainState:
        """Returns the shapes, dtypes and shardings of a state that belongs to
        `sparsity`; nothing is allocated."""
        shapes = jax.eval_shape(self._init(sparsity))
        return jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(
                leaf.shape, leaf.dtype, sharding=sharding
            ),
            shapes,
            state_shardings(shapes, self.mesh),
        )

    def _initialisation(self, sparsity: FFNSparsity) -> Callable[[], TrainState]:
        """Returns one function for the shapes and the values of the state before the
        first step, so that JAX traces it once."""

        def initialise() -> TrainState:
            _, params, buffers = nnx.split(self.build(sparsity), nnx.Param, ...)
            key = jax.random.key(self.config.seed)
            params = initial_weights(params, self.config.model.static_weights, key)
            return TrainState(
                step=jnp.zeros((), jnp.int32),
                params=params,
                buffers=buffers,
                moments=self.optimizer.init(params),
                key=key,
            )

        return initialise

    def _compiled_init(self, sparsity: FFNSparsity) -> Callable[[], TrainState]:
        return jax.jit(self._init(sparsity), out_shardings=self._shardings(sparsity))

    def _shardings(self, sparsity: FFNSparsity) -> TrainState:
        return jax.tree.map(lambda leaf: leaf.sharding, self.template(sparsity))

    def graph(
        self, sparsity: FFNSparsity, held: FFNSparsity | None = None
    ) -> nnx.GraphDef[Transformer]:
        """Returns the graph of a model that computes with `sparsity` on a state that
        belongs to `held` (None: to `sparsity`)."""
        return self._graphs(sparsity, held or sparsity)

    def step(
        self, sparsity: FFNSparsity, held: FFNSparsity | None = None
    ) -> jax.stages.Wrapped:
        """Returns the compiled `train_step`, with sparsities as in `graph`. The state
        that it returns takes the place of the one given, which is gone."""
        return self._steps(sparsity, held or sparsity)

    def _graph(
        self, sparsity: FFNSparsity, held: FFNSparsity
    ) -> nnx.GraphDef[Transformer]:
        return graph_on(partial(self.build, held), sparsity)

    def _step(self, sparsity: FFNSparsity, held: FFNSparsity) -> jax.stages.Wrapped:
        graph, stage = self.graph(sparsity, held), self.config.mesh.zero_stage
        step = partial(train_step, graph, self.optimizer, zero_stage=stage)
        on_all = sharding_of(self.mesh)
        shardings = self._shardings(held), on_all
        return jax.jit(step, donate_argnums=0, out_shardings=shardings)

    def model(
        self,
        state: TrainState,
        sparsity: FFNSparsity,
        held: FFNSparsity | None = None,
    ) -> Transformer:
        """Returns the model of a state, with sparsities as in `graph`."""
        return nnx.merge(self.graph(sparsity, held), state.params, state.buffers)

    def validate(
        self,
        state: TrainState,
        sparsity: FFNSparsity,
        held: FFNSparsity | None = None,
        *,
        masks: bool = True,
    ) -> float:
        """Returns the mean loss over the held-out batches in nats per token, with
        sparsities as in `graph`; without `masks` that of the dense network."""
        losses = self.batch_losses(state, sparsity, held, masks=masks)
        return float(np.mean(losses))

    def batch_losses(
        self,
        state: TrainState,
        sparsity: FFNSparsity,
        held: FFNSparsity | None = None,
        *,
        masks: bool = True,
    ) -> list[np.ndarray]:
        """Returns the mean loss over each held-out batch, float32 (), as in
        `validate`."""
        model = self.model(state, sparsity, held)
        if not masks:
            model = _unmasked(model)
        losses = [_validation_loss(model, tokens) for tokens in self.validation]
        return jax.device_get(losses)

    def switch_phase(
        self, state: TrainState, before: Phase, after: Phase
    ) -> TrainState:
        """Returns the state for the phase `after`, which takes the place of the one
        given. Weights are folded where a phase with 2:4 weights is followed by one
        without; the steps in between that have another sparsity do not count. A model
        that grows does so first, dense as it is then.

        Raises:
          ValueError: the model would shrink.
        """
        run, small = self.of_phase(after), self.of_phase(before)
        if not same_size(small.config.model, run.config.model):
            check_grows(small.config.model, run.config.model)
            state = run.grow(state)
            enters = after.held != DENSE
            return run.switch(state, DENSE, after.held) if enters else state
        return run._switch_phase(state, before, after)

    def _switch_phase(
        self, state: TrainState, before: Phase, after: Phase
    ) -> TrainState:
        """Returns the result of `switch_phase` for a model that keeps its size."""
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
        """Returns the state after `switching.switch`, folded if both `fold` and the
        settings say so. It takes the place of the one given, which is gone."""
        return self._switches(before, after, fold)(state)

    def _switch(
        self, before: FFNSparsity, after: FFNSparsity, fold: bool
    ) -> Callable[[TrainState], TrainState]:
        @partial(jax.jit, donate_argnums=0, out_shardings=self._shardings(after))
        def apply(state: TrainState) -> TrainState:
            model = self.model(state, before)
            folds = fold and self.config.phases.fold
            moments = switch(model, state.moments, after, fold=folds)
            return with_model(state, model, moments)

        return apply

    def grow(self, state: TrainState) -> TrainState:
        """Returns the dense state of a smaller model, grown to this run's size: see
        `switches.growth`. New weights are drawn from the state's key and step, by
        numbers that no step draws."""

        @partial(jax.jit, out_shardings=self._shardings(DENSE))
        def apply(state: TrainState) -> TrainState:
            key = jax.random.fold_in(state.key, GROWTH)
            model = self.build(DENSE, jax.random.fold_in(key, state.step))
            _, fresh, _ = nnx.split(model, nnx.Param, ...)
            nnx.update(model, grown(state.params, fresh))
            for ffn in sparse_ffns(model):
                ffn.refresh_scales()
            moments = padded(state.moments, self.template(DENSE).moments)
            return with_model(state, model, moments)

        return apply(state)

    def _recluster(self, sparsity: FFNSparsity) -> Callable:
        """Returns a function from a state to the state after a warm-started new
        clustering of all neurons."""

        @partial(jax.jit, donate_argnums=0, out_shardings=self._shardings(sparsity))
        def apply(state: TrainState) -> TrainState:
            model = self.model(state, sparsity)
            moments = relabel_neurons(model, state.moments, warm_start=True)
            return with_model(state, model, moments)

        return apply


def _unmasked(model: Transformer) -> Transformer:
    model = nnx.clone(model)
    set_sparsity(model, DENSE)
    return model


@nnx.jit
def _validation_loss(model: Transformer, tokens: jax.Array) -> jax.Array:
    # only a backward draws from the key
    return cross_entropy(model, tokens, jax.random.key(0))
