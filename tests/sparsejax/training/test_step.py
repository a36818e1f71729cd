"""The optimiser, one step, accumulation, and what is compiled and packed how often."""

import math
from dataclasses import replace
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from sparsejax.config import OptimizerConfig
from sparsejax.feed_forward import call as call_module
from sparsejax.feed_forward.sparsity import DENSE
from sparsejax.models import sparse_ffn
from sparsejax.models.transformer import cross_entropy
from sparsejax.training.optimizer import learning_rate, make_optimizer
from sparsejax.training.run import Run
from sparsejax.training.step import with_model
from tests.support.micro_run import (
    arrays_of,
    assert_same_bits,
    micro_config,
    with_phases,
    write_text,
)


@pytest.fixture(scope="module")
def run_of(tmp_path_factory):
    """The `Run` of a recipe, built and compiled once."""
    text = write_text(tmp_path_factory.mktemp("text"))

    @lru_cache
    def of(recipe="two-four", micro_batches=1, **phases) -> Run:
        config = micro_config(text, recipe=recipe, micro_batches=micro_batches)
        return Run(with_phases(config, **phases))

    return of


def state_in(run: Run, sparse: bool):
    """A state that has been through one dense step, and the sparsity it is in."""
    state, _ = run.step(DENSE)(run.initial_state(), next(run.batches())["tokens"])
    if not sparse:
        return state, DENSE
    sparsity = run.phases[1].sparsity
    return run.switch(state, DENSE, sparsity), sparsity


def test_a_switch_takes_the_place_of_the_state_before_it(run_of):
    """Weights and moments are permuted where they are: there is no room for both."""
    run = run_of(recipe="paper")
    before = run.initial_state()
    after = run.switch(before, DENSE, run.phases[1].sparsity)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(before.params))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(before.moments))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(after.params))


# The schedule and the optimiser.


@pytest.mark.parametrize(("steps", "warmup_share"), [(50, 0.1), (40, 0.0), (10, 0.1)])
def test_the_rate_rises_linearly_and_falls_by_one_cosine(steps, warmup_share):
    config = OptimizerConfig(
        peak_learning_rate=0.5,
        schedule="cosine",
        warmup_share=warmup_share,
        final_ratio=0.1,
    )
    schedule = learning_rate(config, steps)
    warmup = round(warmup_share * steps)
    for step in range(steps):
        if step < warmup:
            expected = 0.5 * (step + 1) / warmup
        else:
            share = (step - warmup) / (steps - warmup)
            expected = 0.5 * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * share)))
        assert float(schedule(step)) == pytest.approx(expected, rel=1e-5), step


@pytest.mark.parametrize(
    ("steps", "warmup_share", "decay_share"),
    [(50, 0.1, 0.2), (40, 0.0, 1.0), (20, 0.5, 0.5), (30, 0.1, 0.0)],
)
def test_the_rate_stays_at_the_peak_and_falls_by_one_minus_a_square_root(
    steps, warmup_share, decay_share
):
    config = OptimizerConfig(
        peak_learning_rate=0.3,
        schedule="wsd",
        warmup_share=warmup_share,
        decay_share=decay_share,
        final_ratio=0.1,
    )
    schedule = learning_rate(config, steps)
    warmup, decay = round(warmup_share * steps), round(decay_share * steps)
    rates = [float(schedule(step)) for step in range(steps)]
    for step in range(warmup):
        assert rates[step] == pytest.approx(0.3 * (step + 1) / warmup, rel=1e-5)
    # To the last bit: runs that differ in their decay alone are the same before it.
    assert set(rates[warmup : steps - decay]) <= {float(np.float32(0.3))}
    for step in range(steps - decay, steps):
        t = (step - (steps - decay)) / decay
        expected = 0.3 * (0.1 + 0.9 * (1 - math.sqrt(t)))
        assert rates[step] == pytest.approx(expected, rel=1e-5), step
    after = 0.03 if decay else 0.3
    assert float(schedule(steps)) == pytest.approx(after, rel=1e-5)


def test_where_rounding_leaves_too_few_steps_the_decay_is_the_shorter_one():
    config = OptimizerConfig(schedule="wsd", warmup_share=0.5, decay_share=0.5)
    # Both would be rounded to 2 of 3 steps.
    rates = [float(learning_rate(config, 3)(step)) for step in range(3)]
    assert rates == pytest.approx([1.5e-3, 3e-3, 3e-3], rel=1e-5)


@pytest.mark.parametrize("schedule", [{"schedule": "cosine"}, {"decay_share": 0.0}])
def test_a_run_that_is_all_warm_up_ends_at_the_peak(schedule):
    config = OptimizerConfig(peak_learning_rate=1.5e-3, warmup_share=1.0, **schedule)
    schedule = learning_rate(config, 7)
    assert float(schedule(6)) == pytest.approx(1.5e-3, rel=1e-5)
    assert float(schedule(0)) == pytest.approx(1.5e-3 / 7, rel=1e-5)


def adamw(config, rates, params, gradients, decayed):
    """Loshchilov and Hutter's algorithm 2 behind a clip, float64, written out."""
    params = {k: np.float64(v) for k, v in params.items()}
    first = {k: np.zeros_like(v) for k, v in params.items()}
    second = {k: np.zeros_like(v) for k, v in params.items()}
    for step, (rate, gradient) in enumerate(zip(rates, gradients, strict=True), 1):
        norm = math.sqrt(sum((g**2).sum() for g in gradient.values()))
        factor = min(1.0, config.clip_norm / norm)
        for name, g in gradient.items():
            g = g * factor
            first[name] = config.beta1 * first[name] + (1 - config.beta1) * g
            second[name] = config.beta2 * second[name] + (1 - config.beta2) * g**2
            mean = first[name] / (1 - config.beta1**step)
            variance = second[name] / (1 - config.beta2**step)
            update = mean / (np.sqrt(variance) + config.epsilon)
            if name in decayed:
                update = update + config.weight_decay * params[name]
            params[name] = params[name] - rate * update
    return params


def test_the_optimiser_is_adamw_behind_a_clip_without_decay_of_norm_scales():
    config = OptimizerConfig(
        schedule="cosine",
        peak_learning_rate=0.1,
        warmup_share=0.5,
        clip_norm=1.5,
        weight_decay=0.3,
    )
    generator = np.random.default_rng(0)
    shapes = {"w_up": (3, 4), "embedding": (5, 3), "scale": (3,)}
    params = {k: generator.normal(size=s).astype(np.float32) for k, s in shapes.items()}
    # The second gradient is below the clip, the others above it.
    sizes = (3.0, 0.01, 10.0, 1.0)
    gradients = [
        {k: size * generator.normal(size=s) for k, s in shapes.items()}
        for size in sizes
    ]
    optimizer = make_optimizer(config, len(sizes))
    state = nnx.State({k: nnx.Param(jnp.asarray(v)) for k, v in params.items()})
    moments = optimizer.init(state)
    for gradient in gradients:
        wrapped = jax.tree.map(
            lambda _, g: jnp.asarray(g, jnp.float32),
            state,
            nnx.State({k: nnx.Param(v) for k, v in gradient.items()}),
        )
        updates, moments = optimizer.update(wrapped, moments, state)
        state = jax.tree.map(jnp.add, state, updates)
    rates = [0.05, 0.1, 0.1, 0.1 * (0.05 + 0.95 * 0.5)]
    expected = adamw(config, rates, params, gradients, {"w_up", "embedding"})
    for name, value in expected.items():
        np.testing.assert_allclose(state[name][...], value, rtol=2e-5, atol=1e-6)


def test_every_matrix_of_the_model_decays_and_no_norm_scale(run_of):
    run = run_of("dense")
    state = run.initial_state()
    nothing = jax.tree.map(jnp.zeros_like, state.params)
    updates, _ = run.optimizer.update(nothing, state.moments, state.params)
    scales = 0
    for path, update in jax.tree.leaves_with_path(updates):
        name = jax.tree_util.keystr(path)
        is_norm = "norm" in name
        scales += is_norm
        assert bool((update == 0).all()) == is_norm, name
    assert scales == 3


# One step.


@pytest.mark.parametrize("sparse", [False, True])
def test_a_step_follows_the_gradient_of_the_mean_loss(sparse, run_of):
    run = run_of("weights")
    state, sparsity = state_in(run, sparse)
    tokens = next(run.batches())["tokens"]
    graph = run.graph(sparsity)

    def loss_of(params):
        # Unpacked: S(W) anew in the call, and straight through it in the backward.
        return cross_entropy(nnx.merge(graph, params, state.buffers), tokens[0])

    loss, gradient = jax.jit(jax.value_and_grad(loss_of))(state.params)
    updates, _ = run.optimizer.update(gradient, state.moments, state.params)
    expected = arrays_of(jax.tree.map(jnp.add, state.params, updates))
    after, report = run.step(sparsity)(state, tokens)
    squares = [float((g**2).sum()) for g in jax.tree.leaves(gradient)]
    assert float(report["loss"]) == pytest.approx(float(loss), rel=1e-6)
    assert float(report["gradient_norm"]) == pytest.approx(
        math.sqrt(sum(squares)), rel=1e-5
    )
    assert int(after.step) == 2
    for name, array in arrays_of(after.params).items():
        # Rounding of a gradient near 0, over its own size, is all of Adam's update.
        np.testing.assert_allclose(array, expected[name], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("recipe", "sparse"),
    [("two-four", False), ("two-four", True), ("paper", True), ("weights", True)],
)
def test_four_micro_batches_are_one_batch(recipe, sparse, run_of):
    whole, parts = run_of(recipe), run_of(recipe, micro_batches=4)
    state, sparsity = state_in(whole, sparse)
    twin, _ = state_in(whole, sparse)
    tokens = next(whole.batches())["tokens"]
    np.testing.assert_array_equal(
        next(parts.batches())["tokens"].reshape(tokens.shape), tokens
    )
    state, report = whole.step(sparsity)(state, tokens)
    twin, twin_report = parts.step(sparsity)(twin, tokens.reshape(4, 1, -1))
    # Sums over 64 tokens in another order, float32.
    for name, value in report.items():
        assert float(twin_report[name]) == pytest.approx(float(value), rel=1e-5)
    ours, theirs = arrays_of(state.moments), arrays_of(twin.moments)
    for name, moment in ours.items():
        size = np.abs(moment).max()
        np.testing.assert_allclose(theirs[name], moment, rtol=1e-4, atol=1e-5 * size)


def test_weights_are_packed_once_per_step(run_of, monkeypatch):
    packings = []

    def counting(pack):
        def packed(w_up, w_down, **options):
            # An argument that depends on the layer keeps it inside the scan over them.
            jax.debug.callback(lambda _: packings.append(1), w_up.sum())
            return pack(w_up, w_down, **options)

        return packed

    # The layers' packing before the step, and that of a call without packed weights.
    for module in (sparse_ffn, call_module):
        monkeypatch.setattr(module, "pack_ffn", counting(module.pack_ffn))
    run = Run(run_of("weights", micro_batches=4).config)
    state, sparsity = state_in(run, sparse=True)
    tokens = next(run.batches())["tokens"]
    jax.effects_barrier()
    packings.clear()
    state, _ = run.step(sparsity)(state, tokens)
    jax.effects_barrier()
    assert len(packings) == 1
    state, _ = run.step(sparsity)(state, tokens)
    jax.effects_barrier()
    assert len(packings) == 2
    # The count can see what it is to exclude: without it, each call packs.
    nothing = lambda ffn, whole: None
    monkeypatch.setattr(sparse_ffn.SparseFFN, "weights_as_read", nothing)
    unpacked = Run(run.config)
    unpacked.step(sparsity)(state, tokens)
    jax.effects_barrier()
    assert len(packings) >= 2 + 4 * run.config.model.layers


def test_random_estimators_draw_anew_each_step_and_the_same_when_repeated(run_of):
    run = run_of("two-four", token_sparsity="mvue")
    state, sparsity = state_in(run, sparse=True)
    copies = [jax.tree.map(jnp.copy, state) for _ in range(3)]
    tokens = next(run.batches())["tokens"]
    step = run.step(sparsity)
    once, _ = step(copies[0], tokens)
    again, _ = step(copies[1], tokens)
    assert_same_bits(once, again)
    # The same parameters at another step draw other numbers.
    later = replace(copies[2], step=state.step + 1)
    other, report = step(later, tokens)
    ours, theirs = arrays_of(once.moments), arrays_of(other.moments)
    changed = [name for name in ours if "w_up" in name and "mu" in name]
    assert changed
    for name in changed:
        assert not np.array_equal(ours[name], theirs[name])
    assert np.isfinite(float(report["loss"]))


def test_micro_batches_of_equal_tokens_draw_each_their_own_numbers(run_of):
    run = run_of("two-four", token_sparsity="mvue")
    state, sparsity = state_in(run, sparse=True)
    twin = jax.tree.map(jnp.copy, state)
    tokens = next(run.batches())["tokens"]
    step = run.step(sparsity)
    once, report = step(state, tokens)
    twice, twin_report = step(twin, jnp.concatenate([tokens, tokens]))
    assert float(twin_report["loss"]) == pytest.approx(float(report["loss"]), rel=1e-5)
    ours, theirs = arrays_of(once.moments), arrays_of(twice.moments)
    changed = [name for name in ours if "w_up" in name and "mu" in name]
    assert changed
    for name in changed:
        # The mean of two equal draws would be each of them, up to rounding.
        difference = np.linalg.norm(theirs[name] - ours[name])
        assert difference > 0.01 * np.linalg.norm(ours[name])


# The run.


def test_the_first_state_is_deterministic_and_depends_on_the_seed(run_of):
    run = run_of("dense")
    assert_same_bits(run.initial_state(), run.initial_state())
    other = Run(replace(run.config, seed=1)).initial_state()
    ours, theirs = arrays_of(run.initial_state()), arrays_of(other)
    name = next(name for name in ours if "w_up" in name and "params" in name)
    assert not np.array_equal(ours[name], theirs[name])


@pytest.mark.parametrize("recipe", ["two-four", "paper"])
def test_a_template_is_the_state_without_its_values(recipe, run_of):
    run = run_of(recipe)
    for sparse in (False, True):
        state, sparsity = state_in(run, sparse)
        template = run.template(sparsity)
        assert jax.tree.structure(template) == jax.tree.structure(state)
        for spec, leaf in zip(
            jax.tree.leaves(template), jax.tree.leaves(state), strict=True
        ):
            assert isinstance(spec, jax.ShapeDtypeStruct)
            assert (spec.shape, spec.dtype) == (leaf.shape, leaf.dtype)


def test_validation_is_the_mean_over_the_held_out_batches(run_of):
    run = run_of("two-four")
    state, sparsity = state_in(run, sparse=True)
    assert len(run.validation) == 2

    def mean_loss(sparsity):
        model = run.model(state, sparsity)
        return np.mean([float(cross_entropy(model, t)) for t in run.validation])

    assert run.validate(state, sparsity) == pytest.approx(mean_loss(sparsity), rel=1e-5)
    dense = run.validate(state, sparsity, masks=False)
    assert dense == pytest.approx(mean_loss(DENSE), rel=1e-5)
    assert abs(dense - run.validate(state, sparsity)) > 1e-3


def test_a_vocabulary_larger_than_the_models_is_refused(run_of):
    config = run_of("dense").config
    small = replace(config, model=replace(config.model, vocab_size=100))
    with pytest.raises(
        ValueError, match=r"bytes has 256 tokens.*--model\.vocab-size 256"
    ):
        Run(small)


def test_reclustering_keeps_the_dense_function(run_of):
    run = run_of("paper")
    state, sparsity = state_in(run, sparse=True)
    state, _ = run.step(sparsity)(state, next(run.batches())["tokens"])
    before = run.validate(state, sparsity, masks=False)
    old = {k: v for k, v in arrays_of(state.params).items() if "w_up" in k}
    state = run.recluster(sparsity)(state)
    new = {k: v for k, v in arrays_of(state.params).items() if "w_up" in k}
    assert run.validate(state, sparsity, masks=False) == pytest.approx(before, rel=1e-5)
    assert old
    for name, w in old.items():
        # The same neurons in another order, layer by layer.
        for layer, relabelled in zip(w, new[name], strict=True):
            columns = {column.tobytes() for column in layer.T}
            assert columns == {column.tobytes() for column in relabelled.T}


def test_reclustering_begins_at_the_experts_that_are_there(run_of):
    """Neurons in reverse have the same experts, numbered in reverse; from a spread-out
    beginning these would get the numbers that they had."""
    run = run_of("paper")
    state, sparsity = state_in(run, sparse=True)
    model = run.model(state, sparsity)
    ffn = model.blocks.ffn
    ffn.w_up[...], ffn.w_down[...] = ffn.w_up[..., ::-1], ffn.w_down[:, ::-1]
    expected = np.array(ffn.w_up[...])
    state = run.recluster(sparsity)(with_model(state, model, state.moments))
    np.testing.assert_array_equal(state.params.blocks.ffn.w_up[...], expected)
