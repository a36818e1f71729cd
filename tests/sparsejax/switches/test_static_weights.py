"""Linear layers with static weights, and the dense phase after them: the function that
is kept, what is new, masks, whole runs that are killed, and what is refused."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from sparsejax.config import PhaseConfig, RecipeConfig, TrainConfig
from sparsejax.config.config_file import from_json, to_json
from sparsejax.config.schedule import model_of, phases
from sparsejax.cost_model import flops_per_token, parameter_count, relative_flops
from sparsejax.feed_forward.sparsity import FFNSparsity
from sparsejax.sparsity.patterns import NM, BlockDiagonal
from sparsejax.switches.static_weights import (
    LINEAR_LAYERS,
    balanced_mask,
    layer_of,
)
from sparsejax.training.branch import Branch
from sparsejax.training.run import Run
from sparsejax.training.step import TrainState
from sparsejax.training.train import train
from tests.support.micro_run import (
    arrays_of,
    assert_same_bits,
    micro_config,
    read_records,
    without_speed,
)
from tests.support.whole_runs import Killed, kill_at

pytestmark = pytest.mark.usefixtures("quick_loop")

QUARTER, HALF, MASKED = BlockDiagonal(4), BlockDiagonal(2), NM(2, 4)


def s2d(text: str, pattern=QUARTER, **changes) -> TrainConfig:
    """Six steps with static weights, and six dense ones."""
    phases = RecipeConfig(sparse_share=0.5, static_weights=pattern)
    return micro_config(text, recipe="s2d", phases=phases, **changes)


@pytest.fixture(scope="module")
def switched(text):
    """By pattern: the run, and its states after a step, after the switch, and two steps
    later; with the losses of a validation on both sides of the switch."""
    done = {}

    def of(pattern) -> tuple[Run, list[TrainState], list[float]]:
        if pattern not in done:
            run = Run(s2d(text, pattern))
            first, second = run.phases
            small = run.of_phase(first)
            tokens = run.place(next(run.batches())["tokens"])
            state = small.initial_state(first.held)
            state, _ = small.step(first.sparsity, first.held)(state, tokens)
            losses = [small.validate(state, first.sparsity, first.held)]
            states = [jax.tree.map(lambda leaf: leaf.copy(), state)]
            state = run.switch_phase(state, first, second)
            losses.append(run.validate(state, second.sparsity, second.held))
            states.append(jax.tree.map(lambda leaf: leaf.copy(), state))
            for _ in range(2):
                state, _ = run.step(second.sparsity, second.held)(state, tokens)
            done[pattern] = run, [*states, state], losses
        return done[pattern]

    return of


def weights_of(state: TrainState) -> dict[str, np.ndarray]:
    leaves = jax.tree_util.tree_leaves_with_path(state.params)
    return {layer_of(path): np.asarray(w) for path, w in leaves if layer_of(path)}


@pytest.mark.parametrize("pattern", [QUARTER, HALF, MASKED])
def test_entering_the_dense_phase_keeps_the_function_and_all_moments(pattern, switched):
    _, (before, after, _), losses = switched(pattern)
    # Sums of as many terms as before, and of zeros, in another order.
    assert losses[1] == pytest.approx(losses[0], abs=2e-6)
    small, large = arrays_of(before), arrays_of(after)
    for name, array in large.items():
        if "params" not in name and "moments" not in name:
            continue
        # The same numbers, and zeros.
        assert np.array_equal(
            np.sort(array[array != 0]), np.sort(small[name][small[name] != 0])
        ), name
    for name, w in weights_of(after).items():
        assert w.ndim == 3 and np.mean(w != 0) == pytest.approx(pattern.density), name
    assert {w.ndim for w in weights_of(before).values()} == {
        3 if pattern == MASKED else 4
    }


def test_where_a_weight_had_no_entry_its_moments_are_zero_too(switched):
    for pattern in (QUARTER, MASKED):
        _, (_, after, _), _ = switched(pattern)
        arrays = arrays_of(after)
        for name, w in weights_of(after).items():
            moments = [
                array
                for path, array in arrays.items()
                if "moments" in path and name in path
            ]
            assert len(moments) == 2
            assert all(not moment[w == 0].any() for moment in moments)
            assert all(moment[w != 0].any() for moment in moments)


@pytest.mark.parametrize("pattern", [QUARTER, MASKED])
def test_what_is_new_learns(pattern, switched):
    _, (_, after, later), _ = switched(pattern)
    for name, w in weights_of(later).items():
        new = w[weights_of(after)[name] == 0]
        assert np.mean(new != 0) > 0.99, name


# Masks.


@pytest.mark.parametrize(("n", "patterns"), [(1, 24), (2, 90), (3, 24)])
def test_every_block_of_a_mask_keeps_as_many_in_each_row_and_column(n, patterns):
    mask = np.asarray(balanced_mask(jax.random.key(0), (3, 128, 256), n))
    blocks = mask.reshape(3, 32, 4, 64, 4)
    assert (blocks.sum(2) == n).all() and (blocks.sum(4) == n).all()
    # All that there are, each about as often.
    blocks = np.moveaxis(blocks, 2, 3).reshape(-1, 16)
    found, counts = np.unique(blocks, axis=0, return_counts=True)
    assert len(found) == patterns
    expected = len(blocks) / patterns
    assert np.abs(counts - expected).max() < 6 * expected**0.5


def test_masked_entries_stay_zero_and_depend_on_the_seed_alone(text, switched):
    run, (state, *_), _ = switched(MASKED)
    first = run.phases[0]
    small = run.of_phase(first)
    fresh = weights_of(small.initial_state(first.held))
    for name, w in weights_of(state).items():
        assert np.array_equal(w != 0, fresh[name] != 0), name
        # An output reads half of the inputs, each larger by sqrt(2).
        fan_in = w.shape[1] / 2
        if name not in ("w_out", "w_down"):
            deviation = fresh[name][fresh[name] != 0].std()
            assert deviation == pytest.approx(fan_in**-0.5, rel=0.15), name
    assert set(fresh) == set(LINEAR_LAYERS) - {"w_gate"}
    other = Run(replace(run.config, seed=1))
    of_other = weights_of(other.of_phase(other.phases[0]).initial_state(first.held))
    assert not np.array_equal(of_other["w_up"] != 0, fresh["w_up"] != 0)
    # No two layers, and no two weights, have one mask.
    assert not np.array_equal(fresh["w_up"][0] != 0, fresh["w_up"][1] != 0)


# Whole runs.


@pytest.mark.parametrize("pattern", [QUARTER, MASKED])
def test_a_run_that_is_killed_has_the_same_bits(pattern, text, tmp_path):
    config = s2d(text, pattern, eval_every=5)
    expected = train(config, tmp_path / "whole")
    records = read_records(tmp_path / "whole")
    (switch,) = (r for r in records if r["event"] == "switch")
    assert (switch["step"], switch["from"], switch["to"]) == (6, "sparse", "dense")
    assert switch["after"] == pytest.approx(switch["before"], abs=2e-6)
    named = [r.get("static_weights") for r in records if r["event"] == "step"]
    name = "2:4" if pattern == MASKED else "diagonal:4"
    assert named == [name] * 6 + [None] * 6
    for event, step in (("step", 3), ("switch", 6), ("checkpoint", 6), ("step", 9)):
        with pytest.raises(Killed):
            train(config, tmp_path / "killed", observe=kill_at(event, step))
    resumed = train(config, tmp_path / "killed")
    assert_same_bits(resumed.state, expected.state)
    assert without_speed(read_records(tmp_path / "killed")) == without_speed(records)
    if pattern == MASKED:
        return
    # A trunk that ends with static weights, and a branch that becomes dense.
    static = (PhaseConfig(name="sparse", static_weights=pattern),)
    trunk = replace(config, steps=6).with_schedule(static)
    train(trunk, tmp_path / "trunk")
    outcome = train(
        config, tmp_path / "branch", branch=Branch(tmp_path / "trunk", None)
    )
    assert outcome.completed
    later = Branch(tmp_path / "branch", None)
    back = replace(config, steps=14).with_schedule(static)
    with pytest.raises(ValueError, match="static_weights=None cannot go on in a phase"):
        train(back, tmp_path / "back", branch=later)


# Settings and costs.


def test_the_recipe_and_a_schedule_of_it_are_data(text):
    config = s2d(text, None)
    assert from_json(to_json(config)) == config
    sparse, dense = phases(config)
    assert (sparse.steps, dense.steps) == (6, 6)
    assert sparse.static_weights == QUARTER and sparse.is_dense
    named = s2d(text, MASKED)
    assert to_json(named)["phases"]["static_weights"] == "2:4"
    assert from_json(to_json(named)) == named
    schedule = (
        PhaseConfig(name="sparse", share=0.5, static_weights=HALF),
        PhaseConfig(name="dense"),
    )
    written = to_json(config.with_schedule(schedule))
    assert written["phases"]["schedule"][0]["static_weights"] == "diagonal:2"
    assert from_json(written) == config.with_schedule(schedule)
    assert phases(config.with_schedule(schedule))[0].static_weights == HALF


def test_a_quarter_of_the_weights_costs_a_quarter_of_their_flops(text):
    whole = micro_config(text).model
    small = model_of(phases(s2d(text))[0], whole)
    masked = replace(whole, static_weights=MASKED)
    dense, own = flops_per_token(whole, 16), flops_per_token(small, 16)
    assert 4 * own.ffn == dense.ffn
    assert 4 * own.attention_projections == dense.attention_projections
    assert (own.head, own.sdpa_causal) == (dense.head, dense.sdpa_causal)
    assert relative_flops(small, whole, 16) == own.total() / dense.total()
    assert relative_flops(masked, whole, 16) == 1
    run = Run(s2d(text))
    state = run.of_phase(run.phases[0]).template(run.phases[0].held)
    stored = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    assert stored == parameter_count(small).total


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda c: c.with_schedule(
                (
                    PhaseConfig(name="a", share=0.5),
                    PhaseConfig(name="b", static_weights=QUARTER),
                )
            ),
            "static_weights=None, 'diagonal:4', one after the other; a model becomes",
        ),
        (
            lambda c: PhaseConfig(
                name="a", static_weights=QUARTER, sparsity=FFNSparsity(weights=MASKED)
            ),
            "phase 'a' has a size of its own and sparse steps",
        ),
        (
            lambda c: replace(c, phases=RecipeConfig(static_weights=QUARTER)),
            "phases.static_weights='diagonal:4' has no meaning in recipe 'two-four'",
        ),
        (
            lambda c: replace(c, model=replace(c.model, static_weights=QUARTER)),
            "model.static_weights='diagonal:4' holds in all phases, and one of them is",
        ),
        (
            lambda c: phases(
                replace(c, recipe="s2d", model=replace(c.model, d_hidden=66))
            ),
            "model.d_hidden=66 is not a multiple of the 4 groups",
        ),
    ],
)
def test_what_cannot_be_is_refused(build, message, text):
    with pytest.raises(ValueError, match=message):
        build(micro_config(text))
