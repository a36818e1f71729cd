"""A model that grows between two phases: the function it computes, its moments, runs
that are killed, branches, and what is refused."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from sparsejax.config import ModelConfig, PhaseConfig, TrainConfig
from sparsejax.config.config_file import from_json, to_json
from sparsejax.config.schedule import Phase, model_of, phases
from sparsejax.cost_model import flops_per_token
from sparsejax.feed_forward.sparsity import DENSE, FFNSparsity
from sparsejax.models.ffn_state import soft_threshold_scales
from sparsejax.models.transformer import Transformer
from sparsejax.sparsity.patterns import NM, VNM, BlockDiagonal
from sparsejax.training.branch import Branch
from sparsejax.training.run import Run
from sparsejax.training.step import TrainState
from sparsejax.training.step_times import time_steps
from sparsejax.training.throughput import Pace
from sparsejax.training.train import train
from tests.support.micro_run import (
    arrays_of,
    assert_same_bits,
    micro_config,
    read_records,
    without_speed,
)
from tests.support.whole_runs import (
    kills_at_switches,
    shared_run,
    trained_through_kills,
)

pytestmark = pytest.mark.usefixtures("quick_loop")

VENOM = FFNSparsity(
    weights=NM(2, 4), activations=VNM(8, 2, 16), weight_gradients="expert_columns"
)
NARROW = PhaseConfig(name="narrow", share=0.5, d_hidden=16)
SHALLOW = PhaseConfig(name="shallow", share=0.5, layers=1)
WHOLE = PhaseConfig(name="whole")
SCHEDULES = {
    "neurons": (NARROW, WHOLE),
    "layers": (SHALLOW, WHOLE),
    "both": (replace(NARROW, layers=1), WHOLE),
    # In two steps, and into a sparse phase.
    "then sparse": (
        PhaseConfig(name="first", share=0.25, d_hidden=8),
        PhaseConfig(name="second", share=0.25, d_hidden=8, learning_rate_scale=0.5),
        PhaseConfig(name="third", share=0.25, d_hidden=24),
        PhaseConfig(name="sparse", share=1 / 6, sparsity=VENOM),
        WHOLE,
    ),
}
WIDTHS = {"relu2": ("w_up", "w_down"), "reglu2": ("w_up", "w_down", "w_gate")}


def growing(text: str, name: str, **changes) -> TrainConfig:
    """12 steps of a model with two layers of 64 neurons."""
    config = micro_config(text, **changes).with_schedule(SCHEDULES[name])
    return replace(config, steps=12)


def before_and_after(run: Run) -> tuple[Phase, Phase, TrainState]:
    """The first two phases, and a state of the first after a step."""
    first, second = run.phases[:2]
    small = run.of_phase(first)
    state = small.initial_state(first.held)
    tokens = run.place(next(run.batches())["tokens"])
    state, _ = small.step(first.sparsity, first.held)(state, tokens)
    return first, second, state


def by_name(model: Transformer) -> dict[str, np.ndarray]:
    """The weights of the blocks, (layers, ...)."""
    ffn, attention = model.blocks.ffn, model.blocks.attention
    found = {name: getattr(ffn, name) for name in ("w_up", "w_down", "w_gate")}
    found |= {f"w_{name}": getattr(attention, f"w_{name}") for name in ("query", "out")}
    return {name: np.asarray(of[...]) for name, of in found.items() if of is not None}


KINDS = {
    "relu2": {},
    "reglu2": {"activation": "reglu2"},
    "qwen": {"activation": "swiglu", "qk_norm": True, "qkv_bias": True, "head_dim": 6},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["neurons", "layers", "both"])
def test_a_model_that_grows_computes_what_it_did(name, kind, text):
    config = growing(text, name)
    model = replace(config.model, **KINDS[kind])
    run = Run(replace(config, model=model))
    first, second, state = before_and_after(run)
    small = run.of_phase(first)
    before = small.validate(state, first.sparsity, first.held)
    old = by_name(small.model(state, first.sparsity))
    moments = arrays_of(state.moments)
    after = run.switch_phase(state, first, second)
    assert run.validate(after, second.sparsity, second.held) == pytest.approx(
        before, abs=2e-6
    )
    # What it had is where it was; what is new is zero where it would be heard.
    new = by_name(run.model(after, second.sparsity))
    layers, neurons = len(old["w_up"]), old["w_up"].shape[-1]
    for weight, values in old.items():
        grown = new[weight][:layers]
        if weight in ("w_up", "w_gate"):
            grown = grown[..., :neurons]
        if weight == "w_down":
            grown = grown[:, :neurons]
        assert grown.tobytes() == values.tobytes(), weight
    assert not new["w_down"][:, neurons:].any()
    assert not new["w_down"][layers:].any() and not new["w_out"][layers:].any()
    if neurons < 64:
        deviation = new["w_up"][..., neurons:].std()
        assert deviation == pytest.approx(16**-0.5, rel=0.1)
    if layers < 2:
        assert (new["w_query"][1] == old["w_query"][0]).all()
    # Moments: those that were, and zeros.
    for leaf, values in arrays_of(after.moments).items():
        had = moments[leaf]
        inner = values[tuple(slice(0, size) for size in had.shape)]
        assert inner.tobytes() == had.tobytes()
        assert np.abs(values).sum() == pytest.approx(np.abs(had).sum(), rel=1e-5)


@pytest.mark.parametrize("sparsity", [DENSE, VENOM])
def test_the_betas_after_a_growth_are_those_of_the_grown_weights(sparsity, text):
    """Records report them of a dense model, too, which computes without them."""
    config = growing(text, "both")
    run = Run(config.with_schedule((NARROW, replace(WHOLE, sparsity=sparsity))))
    first, second, state = before_and_after(run)
    after = run.switch_phase(state, first, second)
    ffn = run.model(after, second.sparsity).blocks.ffn
    expected = soft_threshold_scales([ffn.w_up[...]], ffn.w_down[...])
    np.testing.assert_allclose(ffn.scales[...], expected, rtol=1e-6)


def test_what_is_new_learns(text):
    run = Run(growing(text, "both"))
    first, second, state = before_and_after(run)
    state = run.switch_phase(state, first, second)
    tokens = run.place(next(run.batches())["tokens"])
    for _ in range(2):
        state, _ = run.step(second.sparsity, second.held)(state, tokens)
    new = by_name(run.model(state, second.sparsity))
    assert np.abs(new["w_down"][:, 16:]).min() > 0
    assert np.abs(new["w_out"][1:]).mean() > 0


def test_new_neurons_depend_on_the_seed_and_the_step_of_growth(text):
    config = growing(text, "neurons")

    def new_neurons(config: TrainConfig, step: int = 6) -> bytes:
        run = Run(config)
        state = run.of_phase(run.phases[0]).initial_state()
        grown = run.grow(replace(state, step=jnp.int32(step)))
        return by_name(run.model(grown, DENSE))["w_up"][..., 16:].tobytes()

    first = new_neurons(config)
    assert first == new_neurons(config)
    assert first != new_neurons(replace(config, seed=1))
    assert first != new_neurons(config, step=7)


# Whole runs.


@pytest.fixture(scope="module")
def whole(quick_loop, text, tmp_path_factory):
    """By name: the config, folder and outcome of a run that nothing disturbed."""
    done = {}

    def of(name: str):
        if name not in done:
            config = growing(text, name, eval_every=5)
            folder = tmp_path_factory.mktemp("grown")
            done[name] = config, folder, train(config, folder)
        return done[name]

    return of


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_run_that_grows_killed_at_every_switch_and_in_between_has_the_same_bits(
    name, whole, tmp_path
):
    config, folder, expected = whole(name)
    records = read_records(folder)
    switches = [r["step"] for r in records if r["event"] == "switch"]
    assert switches == ([3, 6, 9, 11] if name == "then sparse" else [6])
    kills = [("step", 2), ("step", 5), ("step", 8)]
    kills += kills_at_switches(switches)
    resumed = trained_through_kills(config, tmp_path, kills)
    assert_same_bits(resumed.state, expected.state)
    assert without_speed(read_records(tmp_path)) == without_speed(records)


@pytest.mark.parametrize("name", ["neurons", "layers", "both"])
def test_the_losses_on_both_sides_of_a_growth_are_one(name, whole):
    config, folder, outcome = whole(name)
    (switch,) = (r for r in read_records(folder) if r["event"] == "switch")
    assert switch["after"] == pytest.approx(switch["before"], abs=2e-6)
    assert outcome.model.blocks.ffn.w_up[...].shape == (2, 16, 64)
    steps = [r for r in read_records(folder) if r["event"] == "step"]
    sizes = [(r.get("d_hidden"), r.get("layers")) for r in steps]
    small = model_of(phases(config)[0], config.model)
    assert sizes == [(small.d_hidden, small.layers)] * 6 + [(None, None)] * 6


def test_a_phase_of_the_models_own_size_has_the_bits_of_one_without(text, tmp_path):
    config = growing(text, "neurons")
    plain = config.with_schedule((replace(NARROW, d_hidden=None), WHOLE))
    named = config.with_schedule((replace(NARROW, d_hidden=64, layers=2), WHOLE))
    outcomes = [train(each, tmp_path / str(i)) for i, each in enumerate((plain, named))]
    assert_same_bits(outcomes[0].state, outcomes[1].state)
    records = [without_speed(read_records(tmp_path / str(i))) for i in range(2)]
    assert records[0] == records[1]


def test_a_branch_of_a_small_trunk_grows_as_the_run_that_it_completes(whole, tmp_path):
    config, _, expected = whole("both")
    small = replace(NARROW, share=None, layers=1)
    trunk = replace(config, keep_every=2).with_schedule((small,))
    train(trunk, tmp_path / "trunk")
    branch = Branch(tmp_path / "trunk", 6)
    outcome = train(config, tmp_path / "branch", branch=branch)
    assert_same_bits(outcome.state, expected.state)
    # The trunk has ended small, and a larger state cannot go back.
    later = Branch(tmp_path / "branch", 10)
    with pytest.raises(ValueError, match="d_hidden=64 cannot go on .* d_hidden=16"):
        train(trunk, tmp_path / "shrunk", branch=later)


# Settings.


def test_the_sizes_of_phases_are_data(text, tmp_path):
    config = growing(text, "then sparse")
    assert from_json(to_json(config)) == config
    planned = phases(config)
    assert [phase.d_hidden for phase in planned] == [8, 8, 24, None, None]
    assert model_of(planned[2], config.model) == replace(config.model, d_hidden=24)
    assert model_of(planned[3], config.model) == config.model


def test_a_record_says_the_speed_of_the_model_that_is_trained(text):
    run = shared_run(growing(text, "layers"))
    pace, (small, large) = Pace(run), run.phases
    rates = [
        pace._speed(1000.0, phase.sparsity, phase)["dense_equivalent_tflops"]
        for phase in (small, large)
    ]
    flops = [
        flops_per_token(model_of(of, run.config.model), 16).total()
        for of in (small, large)
    ]
    assert rates[0] / rates[1] == pytest.approx(flops[0] / flops[1])
    assert flops[0] < flops[1]


def test_steps_are_timed_of_the_whole_model(text, monkeypatch):
    monkeypatch.setattr("sparsejax.training.step_times.WARM_SECONDS", 0.0)
    monkeypatch.setattr("sparsejax.training.step_times.ROUND_SECONDS", 0.0)
    config = growing(text, "then sparse")
    times = time_steps(config, Run(config).corpus)
    assert [of.phase for of in times.sparse] == [3] and times.dense_ms > 0


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (
            (PhaseConfig(name="a", share=0.5), PhaseConfig(name="b", d_hidden=16)),
            r"d_hidden=64, 16, one after the other, .* model.d_hidden=64; a model",
        ),
        (
            (PhaseConfig(name="a", share=0.5, layers=3), WHOLE),
            r"layers=3, 2, one after the other",
        ),
        ((PhaseConfig(name="a", layers=3),), r"layers=3, one after the other"),
    ],
)
def test_a_model_that_would_shrink_is_refused(schedule, message):
    model = ModelConfig(d_model=16, layers=2, heads=2, kv_heads=2, d_hidden=64)
    with pytest.raises(ValueError, match=message):
        TrainConfig(model=model).with_schedule(schedule)


def test_a_small_phase_is_dense():
    with pytest.raises(ValueError, match="phase 'a' has a size of its own and sparse"):
        PhaseConfig(name="a", d_hidden=16, sparsity=VENOM)


@pytest.mark.parametrize("size", [{"d_hidden": 16}, {"layers": 1}])
def test_a_model_whose_weights_are_masked_is_refused_to_grow_before_it_is_dense(size):
    """A larger matrix would draw its masks anew."""

    def schedule(pattern, second):
        first = PhaseConfig(name="a", share=0.3, static_weights=pattern, **size)
        return (
            first,
            PhaseConfig(name="b", share=0.3, static_weights=second),
            PhaseConfig(name="c"),
        )

    with pytest.raises(ValueError, match="static_weights as masks have (d_|layers=1)"):
        TrainConfig().with_schedule(schedule(NM(2, 4), NM(2, 4)))
    TrainConfig().with_schedule(schedule(NM(2, 4), None))
    TrainConfig().with_schedule(schedule(BlockDiagonal(4), BlockDiagonal(4)))
