"""What training steps observe of experts: its values, and its way through a run."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from sparsejax.config import Interleaved, PhaseConfig, RecipeConfig, TrainConfig
from sparsejax.feed_forward.experts.observed import initial, moved
from sparsejax.feed_forward.experts.sample import Sample
from sparsejax.feed_forward.ffn import observed_ffn
from sparsejax.feed_forward.sparsity import DENSE, FFNSparsity
from sparsejax.models.ffn_state import arrays_of
from sparsejax.models.sparse_ffn import SparseFFN
from sparsejax.routing.routers import ActivationEnergy
from sparsejax.sparsity.patterns import NM, VNM
from sparsejax.training.micro_batches import loss_and_gradient
from sparsejax.training.run import Run
from tests.support.devices import hopper
from tests.support.micro_run import assert_same_bits, micro_config
from tests.support.oracles.ffn_cases import make_inputs
from tests.support.whole_runs import kills_at_switches, trained_through_kills

OBSERVED = FFNSparsity(
    weights=NM(2, 4),
    activations=VNM(8, 2, 16),
    router=ActivationEnergy(),
    experts_per_token=2,
    weight_gradients="expert_columns",
    most_experts_per_token=4,
    skipped_energy=0.05,
)
ALL_NEURONS = FFNSparsity(weights=NM(2, 4), activations=NM(2, 4))
AFTER = PhaseConfig(name="dense")


@pytest.mark.parametrize("target", [1, 2, 3])
def test_the_threshold_moves_until_tokens_use_as_many_as_asked_for(target):
    """Each call is one of two micro-batches of a step."""
    sparsity = replace(OBSERVED, experts_per_token=target, skipped_energy=None)
    x, *weights, _ = (jnp.asarray(a, jnp.float32) for a in make_inputs(tokens=3200))
    kept = initial(sparsity)

    @jax.jit
    def call(kept):
        how = {"sparsity": sparsity, "scales": jnp.ones(2)}
        _, sample = observed_ffn(x, *weights, **how, **kept)
        used = sample.used.sum(axis=1)
        return moved(sparsity, kept, sample, 0.5), used

    for _ in range(800):
        kept, used = call(kept)
    assert np.all((used >= 1) & (used <= 4))
    if target == 1:
        # One is the least that a token can use.
        assert np.mean(used) < 1.05
    else:
        assert abs(np.mean(used) - target) < 0.05 and len(np.unique(used)) > 1


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_the_threshold_moves_as_far_as_a_call_is_of_its_step(share):
    """Tokens use three experts on average, where two are asked for."""
    used = jnp.arange(4)[None] < jnp.array([4, 4, 3, 1])[:, None]
    sample = Sample(jnp.ones((4, 8)), jnp.ones((4, 4)), used)
    kept = initial(OBSERVED)
    after = moved(OBSERVED, kept, sample, share)
    expected = kept["energy_threshold"] * np.exp(0.1 * share * (3 / 2 - 1))
    np.testing.assert_allclose(after["energy_threshold"], expected, rtol=1e-6)


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_the_router_learns_in_a_run_and_elsewhere_stays(text, micro_batches):
    config = config_of(text, batch_size=8, micro_batches=micro_batches)
    learned = FFNSparsity(
        activations=VNM(8, 2, 16),
        router="learned",
        skip_blocks=True,
        weight_gradients="expert_columns",
    )
    sparse = replace(config.phases.schedule[1], sparsity=learned, every=None)
    config = replace(config, phases=RecipeConfig(schedule=(sparse, AFTER)))
    run = Run(config)
    state = run.initial_state(learned)

    def kept(state):
        return arrays_of(state.buffers.blocks.ffn.router_state)

    before = jax.device_get(kept(state))
    run.validate(state, learned)
    tokens = run.place(next(run.batches())["tokens"])
    state, _ = run.step(learned)(state, tokens)
    after = kept(state)
    assert after["count"].tolist() == [micro_batches] * 2
    moved_by = np.max(np.abs(after["w"] - before["w"]), axis=(1, 2))
    # A first step of Adam is its rate: 1 / (2 d_model), of all micro-batches together.
    assert np.all((0.5 / 32 < moved_by) & (moved_by <= 1.01 / 32))


# In a run.


def config_of(text, **changes):
    """12 steps, a dense first phase; every third step of the sparse one is on all
    neurons, and its neurons are clustered anew."""
    config = micro_config(text, recipe=TrainConfig.recipe, **changes)
    between = Interleaved(steps=3, sparsity=ALL_NEURONS)
    schedule = (
        PhaseConfig(name="warm-up", share=0.25),
        PhaseConfig(name="sparse", share=0.5, sparsity=OBSERVED, every=between),
        AFTER,
    )
    phases = RecipeConfig(schedule=schedule, recluster_every=4)
    return replace(config, phases=phases)


def stepped(config, sparsity=OBSERVED):
    """The state after one step of the phase, and its run."""
    run = Run(config)
    phase = run.phases[1]
    state = run.initial_state(phase.held)
    tokens = run.place(next(run.batches())["tokens"])
    state, _ = run.step(sparsity, phase.held)(state, tokens)
    return run, state


def kept_in(state):
    return {
        name: np.asarray(value)
        for name, value in arrays_of(state.buffers.blocks.ffn.observed).items()
    }


def test_a_step_observes_in_every_layer_whatever_is_recomputed_or_looped(text):
    config = config_of(text, batch_size=8, micro_batches=2)
    _, state = stepped(config)
    kept = kept_in(state)
    assert set(kept) == set(OBSERVED.observes)
    first = initial(OBSERVED, (2,))
    # By a factor up or down at each call; the threshold stays where it meets its aim.
    assert np.all(kept["penalty_strength"] != first["penalty_strength"])
    assert np.any(kept["energy_threshold"] != first["energy_threshold"])
    for changes in ({"remat": "full"}, {"remat": "none", "scan_layers": False}):
        model = replace(config.model, **changes)
        _, other = stepped(replace(config, model=model))
        for name, values in kept_in(other).items():
            # float32 in other fusions
            np.testing.assert_allclose(values, kept[name], rtol=1e-4, atol=1e-7)


def test_validation_and_steps_on_all_neurons_observe_nothing(text):
    _, state = stepped(config_of(text), ALL_NEURONS)
    for name, values in initial(OBSERVED, (2,)).items():
        np.testing.assert_array_equal(kept_in(state)[name], values)
    run, state = stepped(config_of(text))
    before = kept_in(state)
    held = run.phases[1].held
    first = run.validate(state, OBSERVED, held)
    assert run.validate(state, OBSERVED, held) == first
    for name, values in kept_in(state).items():
        np.testing.assert_array_equal(values, before[name])


def test_a_run_reports_how_many_experts_its_tokens_use(text):
    run, state = stepped(config_of(text))
    model = run.model(state, OBSERVED, run.phases[1].held)
    kept = model.blocks.ffn.observed
    tokens = run.sample_of_validation(tokens=64)
    means = {}
    for threshold in (1.0, 1e-6):
        kept["energy_threshold"].set_value(jnp.full(2, threshold))
        report = run.statistics(model, tokens)
        means[threshold] = report["tokens_per_expert"].sum(axis=1) / tokens.size
        density = np.asarray(report["density"]) / np.asarray(report["natural_density"])
        assert np.all(density <= means[threshold] / 4 + 0.35)
    np.testing.assert_array_equal(means[1.0], 1)
    assert np.all(means[1e-6] > 3)


def test_a_run_killed_in_between_resumes_to_the_same_bits(text, tmp_path, quick_loop):
    config = config_of(text, steps=12)
    ended = [
        trained_through_kills(config, tmp_path / name, kills)
        for name, kills in (
            ("whole", ()),
            ("killed", [*kills_at_switches([3]), ("step", 8)]),
        )
    ]
    assert_same_bits(*(outcome.state for outcome in ended))
    assert ended[0].model.sparsity == DENSE


def test_what_has_no_place_for_it_refuses():
    with pytest.raises(ValueError, match="is not a share in .* V:N:M activation"):
        FFNSparsity(activations=NM(2, 4), skipped_energy=0.05)
    with pytest.raises(ValueError, match="router='nearest_centre'; leave it out or"):
        FFNSparsity(activations=VNM(8, 2, 16), most_experts_per_token=3)
    for most in (2, 5):
        message = f"most_experts_per_token={most} is not above experts_per_token=2"
        with pytest.raises(ValueError, match=message):
            replace(OBSERVED, most_experts_per_token=most)
    other = replace(OBSERVED, skipped_energy=None)
    with pytest.raises(ValueError, match="its state has room for one of them"):
        PhaseConfig(
            name="both", sparsity=OBSERVED, every=Interleaved(steps=2, sparsity=other)
        )


LEARNED = replace(
    OBSERVED, router="learned", skip_blocks=True, token_sparsity="magnitude"
)
EXACT = replace(OBSERVED, exact_gradients=True)


@pytest.mark.parametrize("sparsity", [LEARNED, EXACT], ids=["learned", "exact"])
def test_a_training_step_with_all_of_it_lowers_for_hopper(monkeypatch, sparsity):
    """With the real kernels, which run their GEMMs at the width of small runs too."""
    hopper.see_device(monkeypatch)
    sparsity = replace(sparsity, activations=VNM(128, 2, 32))
    ffn = SparseFFN(256, 1024, dtype=jnp.bfloat16, sparsity=sparsity, rngs=nnx.Rngs(0))
    graph, state = nnx.split(ffn)

    def loss_of(ffn, x):
        return jnp.sum(ffn(x).astype(jnp.float32) ** 2)

    def step(state, x):
        ffn = nnx.merge(graph, state)
        loss, gradient = loss_and_gradient(loss_of, ffn, x)
        return loss, gradient, nnx.state(ffn)

    x = jax.ShapeDtypeStruct((1, 2048, 256), jnp.bfloat16)
    lowered = jax.jit(step).trace(state, x).lower(lowering_platforms=("cuda",))
    assert "mosaic_gpu" in lowered.as_text()
