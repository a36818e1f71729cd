"""The optimisers by name: their updates, and what a run does with their state."""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparsejax.config import MeshConfig, ModelConfig, OptimizerConfig, PhaseConfig
from sparsejax.config.config_file import check_branchable
from sparsejax.cost_model import memory_bytes
from sparsejax.sparsity.patterns import NM, BlockDiagonal
from sparsejax.training.optimizer import MUON_RMS, make_optimizer
from sparsejax.training.run import Run
from sparsejax.training.train import train
from tests.support.commands import run_train
from tests.support.micro_run import (
    arguments_of,
    arrays_of,
    assert_same_bits,
    micro_config,
    read_records,
)
from tests.support.whole_runs import (
    kills_at_switches,
    shared_run,
    trained_through_kills,
)

NAMES = ("lion", "muon", "adafactor")
RATES = {"lion": 2e-3, "muon": 1e-2, "adafactor": 3e-2}


def named(config, name):
    rule = OptimizerConfig(name=name, peak_learning_rate=RATES[name], warmup_share=0.1)
    return replace(config, optimizer=rule)


def one_update(config: OptimizerConfig):
    """Parameters of two layers and a norm, a small gradient, and the first update."""
    flat = replace(config, warmup_share=0.0, schedule="wsd", decay_share=0.0)
    optimizer = make_optimizer(flat, 10)
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = {
        "blocks": {
            "w_up": (2, 8, 16),
            "norm": {"scale": (2, 8)},
            "bias_key": (2, 8),
        },
        "embedding": (12, 8),
    }
    is_shape = lambda of: isinstance(of, tuple)
    draw = lambda key: jax.tree.map(
        lambda of: jax.random.normal(key, of), shapes, is_leaf=is_shape
    )
    params = draw(keys[0])
    gradient = jax.tree.map(lambda of: 1e-3 * of, draw(keys[1]))
    updates, _ = optimizer.update(gradient, optimizer.init(params), params)
    return params, gradient, updates


def test_lion_takes_the_sign_and_decays_matrices_alone():
    config = OptimizerConfig(name="lion", peak_learning_rate=0.1, weight_decay=0.5)
    params, gradient, updates = one_update(config)
    w, g = params["blocks"]["w_up"], gradient["blocks"]["w_up"]
    expected = -0.1 * (np.sign(g) + 0.5 * np.asarray(w))
    np.testing.assert_allclose(updates["blocks"]["w_up"], expected, rtol=1e-5)
    for of in (lambda t: t["norm"]["scale"], lambda t: t["bias_key"]):
        sign = -0.1 * np.sign(of(gradient["blocks"]))
        np.testing.assert_allclose(of(updates["blocks"]), sign, rtol=1e-6)


def test_muon_makes_each_matrix_orthogonal_and_leaves_others_to_adamw():
    rule = OptimizerConfig(name="muon", peak_learning_rate=0.1, weight_decay=0.0)
    _, gradient, updates = one_update(rule)
    pairs = zip(updates["blocks"]["w_up"], gradient["blocks"]["w_up"], strict=True)
    for update, g in pairs:
        u, _, v = np.linalg.svd(np.asarray(g), full_matrices=False)
        expected = -0.1 * MUON_RMS * math.sqrt(16) * u @ v
        values = np.linalg.svd(update, compute_uv=False) / (0.1 * MUON_RMS * 4)
        # Five steps of Newton and Schulz bring singular values between 0.5 and 1.5.
        assert 0.5 < values.min() and values.max() < 1.5
        cosine = np.sum(update * expected) / np.linalg.norm(update)
        assert cosine / np.linalg.norm(expected) > 0.95
    _, _, adamw = one_update(replace(rule, name="adamw"))
    for of in (
        lambda t: t["embedding"],
        lambda t: t["blocks"]["norm"]["scale"],
        lambda t: t["blocks"]["bias_key"],
    ):
        np.testing.assert_allclose(of(updates), of(adamw), rtol=1e-6)


def test_the_decay_of_adafactor_is_times_the_learning_rate():
    rule = OptimizerConfig(name="adafactor", peak_learning_rate=0.1, weight_decay=0.5)
    params, _, decayed = one_update(rule)
    _, _, others = one_update(replace(rule, weight_decay=0.0))
    more = jax.tree.map(lambda a, b: np.asarray(a - b), decayed, others)
    w = np.asarray(params["blocks"]["w_up"])
    np.testing.assert_allclose(more["blocks"]["w_up"], -0.05 * w, rtol=1e-4, atol=1e-7)
    assert not more["blocks"]["norm"]["scale"].any()
    assert not more["blocks"]["bias_key"].any()


@pytest.mark.parametrize(
    ("name", "recipe"),
    [("lion", "paper"), ("muon", "paper"), ("adafactor", "two-four")],
)
def test_a_run_learns_and_resumes_to_the_same_bits(
    name, recipe, quick_loop, text, tmp_path
):
    config = named(micro_config(text, recipe=recipe), name)
    whole = train(config, tmp_path / "whole")
    losses = [
        record["loss"]
        for record in read_records(tmp_path / "whole")
        if record["event"] == "step"
    ]
    assert losses[-1] < losses[0] - 0.3
    killed = trained_through_kills(
        config, tmp_path / "ended", kills_at_switches([3, 9])
    )
    assert_same_bits(killed.state, whole.state)


@pytest.mark.parametrize("name", ["lion", "muon"])
def test_moments_follow_their_neurons(name, quick_loop, text):
    config = named(micro_config(text, recipe="paper"), name)
    run = shared_run(config)
    warmup, sparse, _ = run.phases
    state = run.initial_state(warmup.held)
    # Moments that are the weights themselves have to stay so.
    leaves = {
        path.removeprefix(".params"): np.asarray(leaf)
        for path, leaf in arrays_of(state).items()
        if path.startswith(".params") and "w_" in path
    }

    def as_weight(path, leaf):
        end = next((of for of in leaves if jax.tree_util.keystr(path).endswith(of)), "")
        return jnp.asarray(leaves[end]) if end else leaf

    moments = jax.tree_util.tree_map_with_path(as_weight, state.moments)
    state = run.switch_phase(replace(state, moments=moments), warmup, sparse)
    after = arrays_of(state)
    moved = 0
    for path, leaf in after.items():
        for end in leaves if path.startswith(".moments") else ():
            if path.endswith(end):
                np.testing.assert_array_equal(leaf, after[f".params{end}"])
                moved += not np.array_equal(leaf, leaves[end])
    assert moved >= 2  # w_up and w_down are renumbered


def test_what_is_new_in_a_model_that_grows_has_no_momentum(quick_loop, text):
    config = named(micro_config(text), "muon").with_schedule(
        (PhaseConfig(name="small", share=0.5, d_hidden=32), PhaseConfig(name="whole"))
    )
    run = shared_run(config)
    small, whole = run.phases
    before = run.of_phase(small)
    tokens = run.place(next(run.batches())["tokens"])
    state, _ = before.step(small.held)(before.initial_state(small.held), tokens)
    grown = arrays_of(run.switch_phase(state, small, whole))
    (momentum,) = (
        leaf
        for path, leaf in grown.items()
        if path.startswith(".moments") and "mu" in path and "w_up" in path
    )
    assert momentum.shape == (2, 16, 64)
    assert momentum[..., :32].any() and not momentum[..., 32:].any()


SMALLER = (PhaseConfig(name="small", share=0.5, d_hidden=32), PhaseConfig(name="whole"))
MASKS = (
    PhaseConfig(name="masks", share=0.5, static_weights=NM(2, 4)),
    PhaseConfig(name="whole"),
)
BLOCKS = (
    PhaseConfig(name="blocks", share=0.5, static_weights=BlockDiagonal(2)),
    PhaseConfig(name="whole"),
)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("adafactor", lambda c: replace(c, recipe="paper"), "a phase with experts"),
        ("adafactor", lambda c: c.with_schedule(SMALLER), "cannot be grown"),
        ("adafactor", lambda c: c.with_schedule(BLOCKS), "cannot be grown"),
        ("adafactor", lambda c: replace(c, mesh=MeshConfig(fsdp=2)), "mesh.fsdp=2"),
        ("muon", lambda c: c.with_schedule(MASKS), "static weights 2:4 are to stay"),
    ],
)
def test_what_a_state_cannot_follow_is_refused_before_the_run(
    name, change, message, text
):
    config = change(named(micro_config(text), name))
    devices = jax.devices()[:1] * config.mesh.fsdp
    with pytest.raises(ValueError, match=message):
        Run(config, devices=devices)


def test_a_phase_of_another_precision_is_no_smaller_model(text):
    eight = PhaseConfig(name="eight", share=0.5, precision="fp8")
    config = named(micro_config(text), "adafactor")
    config = config.with_schedule((eight, PhaseConfig(name="last")))
    assert len(Run(config, devices=jax.devices()[:1]).phases) == 2


def test_the_plan_refuses_it_too(text, capsys):
    config = named(micro_config(text, recipe="paper"), "adafactor")
    assert run_train([*arguments_of(config), "--dry-run"]) == 1
    shown = capsys.readouterr()
    assert "use --optimizer.name adamw or lion" in shown.err and not shown.out


@pytest.mark.parametrize(
    ("name", "setting"), [("lion", "epsilon"), ("adafactor", "beta1")]
)
def test_a_setting_that_is_not_read_is_refused(name, setting):
    with pytest.raises(ValueError, match=f"optimizer.{setting}=0.5 has no meaning in"):
        OptimizerConfig(name=name, **{setting: 0.5})


def test_a_branch_keeps_the_optimizer_of_its_trunk(text, tmp_path):
    trunk = micro_config(text)
    with pytest.raises(ValueError, match=r"whose optimizer.name is 'adamw', and a br"):
        check_branchable(trunk, named(trunk, "lion"), tmp_path)


@pytest.mark.parametrize("name", ["adamw", *NAMES])
@pytest.mark.parametrize("activation", ["relu2", "reglu2"])
def test_the_plan_counts_the_moments_of_each(name, activation, quick_loop, text):
    model = ModelConfig(
        vocab_size=256,
        d_model=128,
        layers=2,
        heads=2,
        kv_heads=1,
        d_hidden=256,
        activation=activation,
    )
    config = replace(micro_config(text), model=model)
    config = replace(config, optimizer=OptimizerConfig(name=name))
    run = shared_run(config)
    moments = run.template(run.phases[0].held).moments
    held = sum(4 * leaf.size for leaf in jax.tree.leaves(moments) if leaf.size > 64)
    assert memory_bytes(model, tokens_per_device=1, optimizer=name).moments == held
