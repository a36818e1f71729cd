"""Phases as data: how long they are, and whole runs of schedules."""

from dataclasses import replace
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparsejax import cost_model
from sparsejax.config import Interleaved, PhaseConfig, TrainConfig
from sparsejax.config.config_file import from_json, to_json
from sparsejax.config.schedule import Phase, phases, recipe_schedule
from sparsejax.feed_forward.sparsity import DENSE, FFNSparsity
from sparsejax.sparsity.patterns import NM, VNM
from sparsejax.training.optimizer import learning_rate
from sparsejax.training.step_times import PhaseTime
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
    step_times,
    trained_through_kills,
)

TWO_FOUR = FFNSparsity(weights=NM(2, 4), activations=NM(2, 4))
VENOM = FFNSparsity(
    weights=NM(2, 4), activations=VNM(8, 2, 16), weight_gradients="expert_columns"
)
"""Four experts of 16 neurons each in the micro run."""


def with_schedule(config: TrainConfig, *schedule: PhaseConfig, **settings):
    config = config.with_schedule(schedule)
    return replace(config, phases=replace(config.phases, **settings))


# Five phases, of 3, 4, 2, 2 and 1 of 12 steps. The second has dense steps in between,
# and the fourth is dense with sparse ones.
FIVE = (
    PhaseConfig(name="begin", share=0.25),
    PhaseConfig(
        name="experts", share=1 / 3, sparsity=VENOM, every=Interleaved(steps=2)
    ),
    PhaseConfig(name="2:4", share=1 / 6, sparsity=TWO_FOUR, learning_rate_scale=0.5),
    PhaseConfig(
        name="mixed", share=1 / 6, every=Interleaved(steps=2, sparsity=TWO_FOUR)
    ),
    PhaseConfig(name="end"),
)
STAGED_EXIT = (
    PhaseConfig(name="experts", share=0.5, sparsity=VENOM),
    PhaseConfig(name="2:4", share=0.25, sparsity=TWO_FOUR),
    PhaseConfig(name="dense"),
)
# Dense at the end of the run too, with experts in between.
SOMETIMES = (
    PhaseConfig(name="dense", share=0.5),
    PhaseConfig(name="sometimes", every=Interleaved(steps=3, sparsity=VENOM)),
)
# 8-bit floats in a dense and in a sparse phase, the compute dtype at both ends.
PRECISE = (
    PhaseConfig(name="begin", share=0.25),
    PhaseConfig(name="dense", share=0.25, precision="fp8"),
    PhaseConfig(name="sparse", share=0.25, sparsity=VENOM, precision="fp8_all"),
    PhaseConfig(name="end"),
)
SCHEDULES = {
    "five": FIVE,
    "staged": STAGED_EXIT,
    "sometimes": SOMETIMES,
    "precise": PRECISE,
}


# How long they are.


def test_what_the_shares_leave_goes_to_the_phase_without_one():
    shares = (0.1, 0.35, None, 0.25)
    schedule = [PhaseConfig(name=str(i), share=s) for i, s in enumerate(shares)]
    config = with_schedule(TrainConfig(steps=1001), *schedule)
    assert [phase.steps for phase in phases(config)] == [100, 350, 301, 250]
    # Without such a one it is the last; a phase of no steps is none.
    schedule = [PhaseConfig(name=str(i), share=0.2) for i in range(5)]
    for steps, expected in ((13, [3, 3, 3, 3, 1]), (8, [2, 2, 2, 2]), (1, [1])):
        config = with_schedule(TrainConfig(steps=steps), *schedule)
        assert [phase.steps for phase in phases(config)] == expected
    assert phases(config)[0].kind == "4"


@pytest.mark.parametrize("recipe", ["two-four", "paper", "weights", "dense"])
def test_a_recipe_is_a_schedule_of_the_same_phases(recipe):
    for steps in (1, 7, 1000, 1301):
        config = TrainConfig(recipe=recipe, steps=steps)
        schedule = recipe_schedule(recipe, config.phases)
        assert phases(config.with_schedule(schedule)) == phases(config)


def test_steps_in_between_are_each_so_manieth_of_the_phase():
    phase = Phase(
        kind="a",
        steps=9,
        sparsity=VENOM,
        every=Interleaved(steps=4, sparsity=TWO_FOUR),
    )
    between = [n for n in range(1, 10) if phase.sparsity_of(n) == TWO_FOUR]
    assert between == [4, 8]
    assert phase.sparsity_of(1) == phase.sparsity == VENOM
    assert phase.sparsities == (VENOM, TWO_FOUR) and phase.shares == (0.75, 0.25)
    assert phase.as_dense().sparsities == (DENSE,) and not phase.is_dense


@pytest.mark.parametrize(
    ("sparsity", "between", "held"),
    [
        (VENOM, DENSE, VENOM),
        (DENSE, VENOM, VENOM),
        (TWO_FOUR, DENSE, TWO_FOUR),
        (replace(VENOM, weights=None), TWO_FOUR, VENOM),
        (DENSE, FFNSparsity(weights=NM(2, 4)), FFNSparsity(weights=NM(2, 4))),
    ],
)
def test_the_state_fits_all_steps_of_its_phase(sparsity, between, held):
    every = Interleaved(steps=2, sparsity=between)
    phase = Phase(kind="a", steps=2, sparsity=sparsity, every=every)
    assert phase.held == held


def test_the_learning_rate_is_scaled_in_its_phase():
    config = with_schedule(TrainConfig(steps=12), *FIVE)
    plain = learning_rate(config.optimizer, 12)
    scaled = learning_rate(config.optimizer, 12, phases(config))
    factors = [1.0] * 7 + [0.5] * 2 + [1.0] * 3
    for step, factor in enumerate(factors):
        assert float(scaled(step)) == factor * np.float32(plain(step))
        assert float(jax.jit(scaled)(jnp.int32(step))) == pytest.approx(
            factor * float(plain(step)), rel=1e-6
        )


# Whole runs.


@pytest.fixture(scope="module")
def whole(quick_loop, text, tmp_path_factory):
    """By name: the config, folder and outcome of a schedule that nothing disturbed."""
    done = {}

    def of(name: str):
        if name not in done:
            config = with_schedule(micro_config(text), *SCHEDULES[name])
            config = replace(
                config, phases=replace(config.phases, recluster_every=3), eval_every=5
            )
            folder = tmp_path_factory.mktemp(name)
            done[name] = config, folder, train(config, folder)
        return done[name]

    return of


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_killed_at_every_switch_and_in_between_has_the_same_bits(
    name, whole, tmp_path
):
    config, folder, expected = whole(name)
    records = read_records(folder)
    switches = [r["step"] for r in records if r["event"] == "switch"]
    assert (
        switches
        == {
            "five": [3, 7, 9, 11],
            "staged": [6, 9],
            "sometimes": [6],
            "precise": [3, 6, 9],
        }[name]
    )
    # Of five, steps 5 and 7 are dense in between and step 11 sparse; of sometimes 9.
    kills = [("step", 5), ("step", 6), ("step", 9), ("step", 11)]
    kills += kills_at_switches(switches)
    resumed = trained_through_kills(config, tmp_path, kills)
    assert_same_bits(resumed.state, expected.state)
    assert without_speed(read_records(tmp_path)) == without_speed(records)


def test_the_records_name_the_phases(whole):
    config, folder, _ = whole("five")
    records = read_records(folder)
    kinds = {r["step"]: r["kind"] for r in records if r["event"] == "step"}
    names = ["begin"] * 3 + ["experts"] * 4 + ["2:4"] * 2 + ["mixed"] * 2 + ["end"]
    assert list(kinds.values()) == names
    sparse = {r["step"]: r["sparse"] for r in records if r["event"] == "step"}
    assert [step for step in sparse if not sparse[step]] == [1, 2, 3, 12]
    ways = [(r["from"], r["to"]) for r in records if r["event"] == "switch"]
    of = [phase.name for phase in config.phases.schedule]
    assert ways == list(pairwise(of))
    rates = {r["step"]: r["learning_rate"] for r in records if r["event"] == "step"}
    schedule = learning_rate(config.optimizer, 12)
    assert rates[8] == pytest.approx(0.5 * float(schedule(7)), rel=1e-6)
    assert rates[7] == pytest.approx(float(schedule(6)), rel=1e-6)


def test_another_precision_is_said_and_changes_no_weight(whole):
    config, folder, _ = whole("precise")
    records = read_records(folder)
    said = [r.get("precision") for r in records if r["event"] == "step"]
    assert said == [None] * 3 + ["fp8"] * 3 + ["fp8_all"] * 3 + [None] * 3
    run = shared_run(config)
    state = run.initial_state()
    before = arrays_of(state)
    after = run.switch_phase(state, *run.phases[:2])
    assert arrays_of(after).keys() == before.keys()
    for name, array in arrays_of(after).items():
        assert array.tobytes() == before[name].tobytes(), name
    # And its losses are those of another computation.
    switch = next(r for r in records if r["event"] == "switch")
    assert 0 < abs(switch["before"] - switch["after"]) < 0.05


def test_a_schedule_that_says_what_a_recipe_does_has_its_bits(uninterrupted, tmp_path):
    config, folder, expected = uninterrupted("paper")
    schedule = recipe_schedule("paper", config.phases)
    same = with_schedule(config, *schedule, recluster_every=2)
    outcome = train(same, tmp_path)
    assert_same_bits(outcome.state, expected.state)
    assert without_speed(read_records(tmp_path)) == without_speed(read_records(folder))


def test_a_step_in_between_is_one_of_its_sparsity_on_the_same_neurons(whole):
    config, _, _ = whole("five")
    run = shared_run(config)
    experts = run.phases[1]
    assert experts.held == VENOM
    tokens = run.place(next(run.batches())["tokens"])
    state = run.switch(run.initial_state(), DENSE, VENOM)
    before = arrays_of(state)
    # The same parameters without centres: what a dense phase would step on.
    buffers = jax.tree.map(jnp.copy, state)
    alone = run.switch(buffers, VENOM, DENSE, fold=False)
    between, report = run.step(DENSE, VENOM)(state, tokens)
    expected, wanted = run.step(DENSE)(alone, tokens)
    assert float(report["loss"]) == float(wanted["loss"])
    ours, theirs = arrays_of(between), arrays_of(expected)
    assert theirs.keys() < ours.keys()
    assert all(ours[name].tobytes() == theirs[name].tobytes() for name in theirs)
    centres_and_scales = [name for name in ours if name.startswith(".buffers")]
    assert any("centres" in name for name in centres_and_scales)
    for name in centres_and_scales:
        assert ours[name].tobytes() == before[name].tobytes(), name
    # And the next sparse step goes on from it.
    after, _ = run.step(VENOM)(between, tokens)
    assert int(after.step) == 2


def test_weights_are_folded_where_the_phase_leaves_them_and_not_its_steps_between(
    whole,
):
    config, folder, _ = whole("five")
    switches = {r["from"]: r for r in read_records(folder) if r["event"] == "switch"}
    # Folded, the dense phase with 2:4 steps computes what the 2:4 phase's masters did.
    left = switches["2:4"]
    assert left["to"] == "mixed"
    assert left["after"] != left["before_unmasked"]
    # From a dense phase with sparse steps to a dense one nothing changes.
    end = switches["mixed"]
    assert end["before"] == end["after"] == end["after_unmasked"]
    run = shared_run(config)
    mixed = run.phases[3]
    state = run.switch(run.initial_state(), DENSE, TWO_FOUR)
    w_up = np.asarray(run.model(state, TWO_FOUR).blocks.ffn.w_up[...])
    scales = np.asarray(run.model(state, TWO_FOUR).blocks.ffn.scales[...])
    folded = run.switch_phase(state, run.phases[2], mixed)
    ffn = run.model(folded, DENSE, mixed.held).blocks.ffn
    groups = np.asarray(ffn.w_up[...]).reshape(*w_up.shape[:-2], -1, 4, w_up.shape[-1])
    assert ((groups == 0).sum(axis=-2) >= 2).all()
    # Of weights that are folded already the scale is another one.
    assert not np.array_equal(np.asarray(ffn.scales[...]), scales)


def test_a_first_phase_that_is_left_out_begins_dense(whole, text, tmp_path):
    config = with_schedule(micro_config(text, steps=4), *STAGED_EXIT)
    slow = {"fastest_ms": 9.0, "slowest_ms": 9.0, "dense_ms": 1.0}
    slow["dense_after_ms"] = 1.0
    times = step_times(PhaseTime(phase=0, step_ms=9.0, **slow))
    outcome = train(config, tmp_path, step_times=times)
    assert outcome.completed
    sparse = [r["sparse"] for r in read_records(tmp_path) if r["event"] == "step"]
    assert sparse == [False, False, True, False]


def test_the_speed_of_a_phase_is_the_mean_over_its_steps(whole):
    config, _, _ = whole("five")
    run = shared_run(config)
    pace, phase = Pace(run), run.phases[1]
    assert pace.of_steps(1, phase) == {}
    speed = pace.of_steps(3, phase)
    dense, sparse = pace.decisions(DENSE), pace.decisions(VENOM)
    shares = [
        np.mean([decision.executed_share for decision in of]) for of in (dense, sparse)
    ]
    assert shares[1] < shares[0] == 1
    ffn = cost_model.flops_per_token(
        config.model, config.data.sequence_length
    ).ffn_share()
    assert speed["executed_tflops"] / speed["dense_equivalent_tflops"] == pytest.approx(
        1 - ffn * (1 - np.mean(shares))
    )
    # A router is in half of the steps.
    only = pace.of_steps(5, replace(phase, every=None))
    per_token = [of["router_share"] / of["tokens_per_second"] for of in (speed, only)]
    assert per_token[0] == pytest.approx(per_token[1] / 2)


def test_the_first_step_of_each_sparsity_compiles_outside_the_clock(whole):
    pace = Pace(shared_run(whole("five")[0]))
    pace.start(3)
    pace.clock.start = 0.0
    stopped = []
    for sparsity in (VENOM, VENOM, DENSE, DENSE):
        before = pace.clock.start
        with pace.compiling(sparsity):
            pass
        stopped.append(pace.clock.start > before)
    assert stopped == [True, False, True, False]


def test_old_settings_without_a_schedule_are_read():
    older = to_json(TrainConfig(seed=3))
    del older["phases"]["schedule"], older["optimizer"]["schedule"]
    del older["optimizer"]["decay_share"]
    assert from_json(older) == TrainConfig(seed=3)
