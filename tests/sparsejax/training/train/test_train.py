"""Whole runs: phases, switches and records, and a run's speed."""

import json
import math
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from sparsejax.checkpoints import manifest
from sparsejax.checkpoints.checkpoint import Checkpoints
from sparsejax.config import PhaseConfig
from sparsejax.config.config_file import to_json
from sparsejax.feed_forward.sparsity import DENSE
from sparsejax.training import throughput
from sparsejax.training import train as loop
from sparsejax.training.run import Run
from sparsejax.training.train import train
from tests.support.micro_run import (
    assert_same_bits,
    micro_config,
    read_records,
    with_phases,
    without_speed,
)
from tests.support.whole_runs import VARIANTS, Killed

pytestmark = pytest.mark.usefixtures("quick_loop")


def test_records_of_a_run_are_complete(uninterrupted):
    _, folder, _ = uninterrupted("two-four")
    records = read_records(folder)

    def steps_of(event: str) -> list[int]:
        return [r["step"] for r in records if r["event"] == event]

    assert steps_of("start") == [0]
    assert steps_of("step") == list(range(1, 13))
    assert steps_of("validation") == [3, 4, 8, 9, 12]
    assert steps_of("ffn") == [4, 8, 12]
    assert steps_of("switch") == [3, 9]
    assert steps_of("checkpoint") == [2, 3, 4, 6, 8, 9, 10, 12]
    permanent = [r["step"] for r in records if r.get("permanent")]
    assert permanent == [3, 9, 12]
    kinds = {r["step"]: r["kind"] for r in records if r["event"] == "step"}
    assert list(kinds.values()) == ["warm-up"] * 3 + ["sparse"] * 6 + ["dense"] * 3
    saved = json.loads((folder / "config.json").read_text())
    assert saved == to_json(uninterrupted("two-four")[0])


def test_checkpoints_of_the_switches_and_the_newest_stay(uninterrupted):
    config, folder, _ = uninterrupted("two-four")
    assert config.keep_checkpoints == 2
    assert Checkpoints(folder / "checkpoints").steps() == [3, 9, 10, 12]


def test_multiples_of_keep_every_stay_too(uninterrupted, tmp_path):
    config, _, _ = uninterrupted("two-four")
    train(replace(config, keep_every=4), tmp_path)
    kept = {10, 12} | {4, 8, 12} | {3, 9, 12}  # the newest, multiples, switches and end
    names = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert names == {f"step_{step:08d}" for step in kept}


@pytest.mark.parametrize(("step", "until"), [(4, 6), (3, 4), (9, 10)])
def test_steps_go_on_while_a_checkpoint_is_written(
    step, until, uninterrupted, tmp_path, monkeypatch
):
    """The checkpoints of the switches, after steps 3 and 9, hold up no step either."""
    config, _, expected = uninterrupted("two-four")
    stepped, write = threading.Event(), manifest.write
    slow = tmp_path / "checkpoints" / f"step_{step:08d}"

    def write_later(folder: Path, version: int) -> None:
        # Until later steps, which would never come if they waited for this.
        if folder.name.startswith(slow.name):
            assert stepped.wait(timeout=30)
        write(folder, version)

    def observe(record: dict) -> None:
        if (record["event"], record["step"]) == ("step", until):
            assert not slow.exists()
            stepped.set()

    monkeypatch.setattr(manifest, "write", write_later)
    outcome = train(config, tmp_path, observe=observe)
    assert stepped.is_set()
    assert_same_bits(outcome.state, expected.state)


def test_a_run_that_begins_with_experts_begins_with_their_neurons_clustered(
    text, tmp_path, monkeypatch
):
    config = with_phases(micro_config(text, recipe="paper"), warmup_share=0.0)
    events, switch_of = [], Run.switch

    def switch(run, state, before, after, **options):
        events.append((before, after))
        return switch_of(run, state, before, after, **options)

    def observe(record):
        events.append(record["event"])
        raise Killed

    monkeypatch.setattr(Run, "switch", switch)
    with pytest.raises(Killed):
        train(config, tmp_path, observe=observe)
    held = Run(config).phases[0].held
    assert held.experts and events == [(DENSE, held), "start"]


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"backend": "mosaic_sm90"}, NotImplementedError, "needs a Hopper GPU"),
        ({"recipe": "experts"}, ValueError, "training steps observe penalty"),
    ],
)
def test_gemms_that_a_later_phase_cannot_have_are_refused_before_the_first_step(
    changes, error, match, text, tmp_path
):
    config = micro_config(text, **changes)
    if "recipe" in changes:
        sparse = PhaseConfig(name="sparse", sparsity=config.sparsity)
        warm_up = PhaseConfig(name="warm-up", share=0.5)
        gated = replace(config.model, activation="swiglu")
        config = replace(config.with_schedule((warm_up, sparse)), model=gated)
    with pytest.raises(error, match=match):
        train(config, tmp_path / "run")
    assert not list((tmp_path / "run").glob("checkpoints/*"))


def test_reclustering_happens_when_it_is_due_and_not_at_the_switch(uninterrupted):
    config, folder, _ = uninterrupted("paper")
    records = read_records(folder)
    assert config.phases.recluster_every == 2
    # The sparse phase is steps 4 to 9, its last step ends in the switch.
    assert [r["step"] for r in records if r["event"] == "recluster"] == [5, 7]
    losses = [r["loss"] for r in records if r["event"] == "step"]
    assert losses[-1] < losses[0] - 0.5


def test_reclustering_needs_no_other_event_on_its_step(text, tmp_path):
    settings = {"log_every": 100, "eval_every": 0, "checkpoint_every": 0}
    config = VARIANTS["paper"](micro_config(text, **settings))
    train(config, tmp_path)
    events = [(r["event"], r["step"]) for r in read_records(tmp_path)]
    assert ("recluster", 5) in events and ("recluster", 7) in events
    assert [e for e in events if e[0] == "step"] == [
        ("step", 3),
        ("step", 9),
        ("step", 12),
    ]


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_phase_compiles_one_step_and_both_dense_phases_share_it(
    variant, uninterrupted
):
    config, _, _ = uninterrupted(variant)
    run = loop.Run(config)
    warmup, sparse, tail = (run.step(phase.sparsity) for phase in run.phases)
    assert warmup is tail and warmup is not sparse
    # All runs of this module that train alike, the resumed ones included.
    assert warmup._cache_size() == 1
    assert sparse._cache_size() == 1


def test_a_switch_records_both_sides_with_and_without_masks(uninterrupted):
    _, folder, _ = uninterrupted("two-four")
    entering, leaving = (r for r in read_records(folder) if r["event"] == "switch")
    assert (entering["to"], leaving["to"]) == ("sparse", "dense")
    # Dense on one side of each: there is nothing to mask.
    assert entering["before"] == entering["before_unmasked"]
    assert leaving["after"] == leaving["after_unmasked"]
    # Masks change the loss, the parameters were not touched.
    assert entering["after"] != entering["before"]
    assert entering["after_unmasked"] == entering["before"]
    for record in (entering, leaving):
        assert record["jump"] == record["after"] - record["before"]
        assert record["large"] == (record["jump"] > 0.1)


def test_no_loss_around_a_switch_is_computed_twice(
    uninterrupted, tmp_path, monkeypatch
):
    config, folder, _ = uninterrupted("two-four")
    computed: list[tuple[bool, bool]] = []
    losses = Run.batch_losses

    def counted(run, state, sparsity, held=None, *, masks=True):
        computed.append((sparsity.is_dense, masks))
        return losses(run, state, sparsity, held, masks=masks)

    monkeypatch.setattr(Run, "batch_losses", counted)
    train(replace(config, eval_every=0), tmp_path)
    dense, sparse, unmasked = (True, True), (False, True), (False, False)
    into, out = [dense, sparse, unmasked], [sparse, unmasked, dense]
    assert computed == [*into, *out, dense]
    switches = [
        [r for r in without_speed(read_records(of)) if r["event"] == "switch"]
        for of in (folder, tmp_path)
    ]
    assert switches[0] == switches[1]


def test_folding_makes_the_switch_out_of_two_four_weights_lossless(text, tmp_path):
    config = micro_config(text, recipe="weights", steps=6, eval_every=0)
    config = with_phases(config, warmup_share=0, sparse_share=0.5)
    train(config, tmp_path)
    (record,) = (r for r in read_records(tmp_path) if r["event"] == "switch")
    # float32 rounding of beta S(W1), read once packed and once as a dense weight
    assert record["after"] == pytest.approx(record["before"], rel=1e-5)
    assert not record["large"]
    assert abs(record["before_unmasked"] - record["before"]) > 1e-3


def test_without_the_fold_the_dense_tail_begins_with_the_masters(uninterrupted):
    config, folder, _ = uninterrupted("mvue")
    assert not config.phases.fold
    _, leaving = (r for r in read_records(folder) if r["event"] == "switch")
    assert leaving["after"] == leaving["before_unmasked"] != leaving["before"]


def test_a_jump_above_a_tenth_is_flagged(text, tmp_path, monkeypatch):
    def validate(run, state, sparsity, held, *, masks=True):
        return 3.0 if sparsity.is_dense or not masks else 3.11

    monkeypatch.setattr(Run, "validate", validate)
    train(micro_config(text), tmp_path)
    entering, leaving = (r for r in read_records(tmp_path) if r["event"] == "switch")
    assert entering["jump"] == pytest.approx(0.11)
    assert entering["large"] is True
    assert leaving["jump"] == pytest.approx(-0.11)
    assert leaving["large"] is False


# Speed.


def test_the_clock_counts_steps_and_nothing_else(monkeypatch):
    now = 100.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    clock = throughput.Clock(step=3)
    now += 50.0  # the first step compiles
    with clock.stopped():
        assert math.isnan(clock.tokens_per_second(5, 10))
        now += 7.0  # a validation
    now += 2.0
    with clock.stopped():
        now += 1000.0
    now += 0.5
    with clock.stopped():
        assert clock.tokens_per_second(10, 10) == pytest.approx(5 * 10 / 2.5)
        now += 30.0
    now += 4.0
    assert clock.tokens_per_second(12, 10) == pytest.approx(2 * 10 / 4.0)
    now += 3.0
    with clock.stopped():
        now += 20.0
        with clock.stopped():  # a router is timed while the step is recorded
            now += 100.0
        assert clock.tokens_per_second(15, 10) == pytest.approx(3 * 10 / 3.0)
        now += 5.0
    now += 2.0
    assert clock.tokens_per_second(16, 10) == pytest.approx(10 / 2.0)


def test_speed_is_recorded_but_for_the_first_interval_of_a_phase(uninterrupted):
    _, folder, _ = uninterrupted("two-four")
    steps = [r for r in read_records(folder) if r["event"] == "step"]
    silent = [r["step"] for r in steps if "tokens_per_second" not in r]
    assert silent == [1, 4, 10]
    timed = next(r for r in steps if r["step"] == 6)
    assert timed["tokens_per_second"] > 0
    assert timed["mfu_executed"] <= timed["mfu_dense_equivalent"]


def test_the_seconds_that_are_no_step_are_recorded(uninterrupted):
    for recipe, compiling in (("two-four", [1, 4, 10]), ("paper", [1, 4, 5, 10])):
        _, folder, _ = uninterrupted(recipe)
        records = read_records(folder)
        steps = [r for r in records if r["event"] == "step"]
        # At step 5 a router is timed.
        assert [r["step"] for r in steps if r["compiling_seconds"] > 0] == compiling
        others = [r for r in records if r["event"] in ("validation", "switch", "ffn")]
        others += [r for r in records if r["event"] == "recluster"]
        assert {r["event"] for r in others} >= {"validation", "switch", "ffn"}
        assert all(r["seconds"] > 0 for r in others)
        parts = sum(r["seconds"] for r in others)
        parts += sum(r["compiling_seconds"] + r["saving_seconds"] for r in steps)
        whole = next(r for r in reversed(records) if r["event"] == "checkpoint")
        assert parts < whole["wall_seconds"]


def test_the_routers_share_is_recorded_where_there_is_a_router(uninterrupted):
    _, folder, _ = uninterrupted("paper")
    steps = [r for r in read_records(folder) if r["event"] == "step"]
    routed = {r["step"]: r["router_share"] for r in steps if "router_share" in r}
    assert list(routed) == [5, 6, 7, 8, 9]
    # Timed once in a phase: it is in proportion to the speed of the step.
    rates = {r["step"]: r["tokens_per_second"] for r in steps if r["step"] in routed}
    per_token = [routed[step] / rates[step] for step in routed]
    assert per_token[0] > 0
    np.testing.assert_allclose(per_token, per_token[0], rtol=1e-6)


def test_gradient_norms_and_rates_are_those_of_the_step(uninterrupted):
    _, folder, _ = uninterrupted("two-four")
    steps = [r for r in read_records(folder) if r["event"] == "step"]
    # warm-up of round(0.1 * 12) = 1 step, then one cosine, blind to the phases
    expected = [0.01]
    for step in range(1, 12):
        cosine = 0.5 * (1 + math.cos(math.pi * (step - 1) / 11))
        expected.append(0.01 * (0.05 + 0.95 * cosine))
    np.testing.assert_allclose([r["learning_rate"] for r in steps], expected, rtol=1e-5)
    assert all(r["gradient_norm"] > 0 for r in steps)


def test_the_run_says_where_the_last_good_checkpoint_is(text, tmp_path):
    config = micro_config(text)
    seen: list[dict] = []
    train(config, tmp_path, observe=seen.append)
    saved = [r["checkpoint"] for r in seen if r["event"] == "saved"]
    written = [r["step"] for r in seen if r["event"] == "checkpoint"]
    folder = tmp_path / "checkpoints"
    assert saved == [str(folder / f"step_{step:08d}") for step in written]
    # Said of what is complete, and before the next save begins.
    events = [r["event"] for r in seen if r["event"] in ("saved", "checkpoint")]
    assert events == ["checkpoint", "saved"] * len(written)
    assert not any(r["event"] == "saved" for r in read_records(tmp_path))
