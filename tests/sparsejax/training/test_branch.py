"""Runs that begin with a checkpoint of another: the same bits, a switch, refusals."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from sparsejax.checkpoints.checkpoint import Checkpoints
from sparsejax.config import TrainConfig
from sparsejax.feed_forward.sparsity import DENSE
from sparsejax.reports.records import training_seconds
from sparsejax.sparsity.patterns import VNM
from sparsejax.training import resume
from sparsejax.training import train as loop
from sparsejax.training.branch import Branch
from sparsejax.training.run import Run
from sparsejax.training.train import Outcome, train
from tests.support.micro_run import (
    assert_same_bits,
    micro_config,
    read_records,
    with_phases,
    without_speed,
    write_text,
)
from tests.support.whole_runs import (
    VARIANTS,
    Killed,
    kill_at,
    shared_run,
    step_times,
)

pytestmark = pytest.mark.usefixtures("quick_loop")


def with_optimizer(config: TrainConfig, **changes) -> TrainConfig:
    return replace(config, optimizer=replace(config.optimizer, **changes))


def of_steps(folder: Path) -> list[dict]:
    """The records of steps and validations."""
    events = ("step", "validation")
    records = [r for r in read_records(folder) if r["event"] in events]
    return without_speed(records)


def test_a_name_says_the_run_and_the_step():
    assert Branch.named("runs/a@20") == Branch(Path("runs/a"), 20)
    assert Branch.named("runs/a") == Branch(Path("runs/a"))
    assert Branch.named("runs/me@home@20") == Branch(Path("runs/me@home"), 20)
    assert Branch.named("runs/me@home") == Branch(Path("runs/me@home"))


# The same bits.


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_branch_with_the_trunks_settings_has_its_bits(
    variant, uninterrupted, tmp_path
):
    config, trunk, expected = uninterrupted(variant)
    steps = [step for step in Checkpoints(trunk / "checkpoints").steps() if step < 12]
    assert steps[:2] == [3, 9]
    for step in steps:
        folder = tmp_path / str(step)
        outcome = train(config, folder, branch=Branch(trunk, step))
        assert outcome.completed
        assert_same_bits(outcome.state, expected.state)
        later = [r for r in of_steps(trunk) if r["step"] > step]
        assert of_steps(folder) == later


@pytest.fixture(scope="module")
def wsd_trunk(quick_loop, text, tmp_path_factory) -> tuple[TrainConfig, Path, Outcome]:
    """At its peak from the second step to its end, with sparse steps 4 to 9."""
    config = with_optimizer(
        micro_config(text, keep_every=2), schedule="wsd", decay_share=0.0
    )
    folder = tmp_path_factory.mktemp("trunk")
    return config, folder, train(config, folder)


@pytest.mark.parametrize(("begin", "steps"), [(6, 10), (10, 14)])
def test_a_branch_that_decays_has_the_bits_of_the_run_that_it_completes(
    begin, steps, wsd_trunk, tmp_path
):
    config, trunk, _ = wsd_trunk
    # The same phases, warm-up of one step and peak before the branch; then its decay.
    shares = {"warmup_share": 3 / steps, "sparse_share": 6 / steps}
    whole = with_phases(replace(config, steps=steps), **shares)
    whole = with_optimizer(whole, decay_share=4 / steps)
    expected = train(whole, tmp_path / "whole")
    branch = train(whole, tmp_path / "branch", branch=Branch(trunk, begin))
    assert_same_bits(branch.state, expected.state)
    own = of_steps(tmp_path / "branch")
    assert own == [r for r in of_steps(tmp_path / "whole") if r["step"] > begin]
    rates = [r["learning_rate"] for r in own if r["event"] == "step"]
    t = np.arange(4) / 4
    np.testing.assert_allclose(
        rates, 0.01 * (0.05 + 0.95 * (1 - np.sqrt(t))), rtol=1e-5
    )


# Another sparsity.


def test_a_branch_in_another_phase_begins_with_a_switch(wsd_trunk, text, tmp_path):
    config, trunk, _ = wsd_trunk
    config = with_phases(
        replace(config, recipe="paper"), activations=VNM(8, 2, 16), warmup_share=0.0
    )
    config = with_phases(config, sparse_share=1.0)
    outcome = train(config, tmp_path / "sparse", branch=Branch(trunk, 2))
    records = read_records(tmp_path / "sparse")
    events = [r["event"] for r in records]
    assert events[:4] == ["start", "switch", "checkpoint", "step"]
    start, switch = records[0], records[1]
    assert (switch["step"], switch["phase"]) == (2, 0)
    assert (switch["from"], switch["to"]) == ("warm-up", "sparse")
    assert switch["jump"] == switch["after"] - switch["before"]
    assert start["branch"]["run"] == f"../../{trunk.name}"
    assert start["branch"]["step"] == start["step"] == 2
    assert start["learning_rate"] == pytest.approx(0.01)
    assert outcome.completed and int(outcome.state.step) == 12
    # The state of the trunk, switched: what the branch's first checkpoint holds.
    run: Run = shared_run(config)
    sparsity = run.phases[0].sparsity
    with Checkpoints(trunk / "checkpoints") as checkpoints:
        dense = checkpoints.restore(2, template=run.template(DENSE))
    with Checkpoints(tmp_path / "sparse" / "checkpoints") as checkpoints:
        first = checkpoints.restore(2, template=run.template(sparsity))
    assert_same_bits(first.state, run.switch(dense.state, DENSE, sparsity))


def test_a_branch_at_the_end_of_a_phase_goes_on_in_the_next(wsd_trunk, tmp_path):
    config, trunk, _ = wsd_trunk
    # Step 9 is the trunk's last sparse one; here the sparse phase ends with step 9 of
    # 18, and the dense tail follows.
    longer = with_phases(
        replace(config, steps=18), warmup_share=3 / 18, sparse_share=6 / 18
    )
    train(longer, tmp_path / "run", branch=Branch(trunk, 9))
    records = read_records(tmp_path / "run")
    assert {r["kind"] for r in records} == {"dense"}
    assert not [r for r in records if r["event"] == "switch"]


# Its own run.


def test_a_branch_that_was_killed_resumes_without_its_trunk(uninterrupted, tmp_path):
    config, folder, expected = uninterrupted("paper")
    trunk, own = tmp_path / "trunk", tmp_path / "branch"
    shutil.copytree(folder, trunk)
    # Before its first checkpoint it begins anew.
    for event in ("start", "checkpoint"):
        with pytest.raises(Killed):
            train(config, own, observe=kill_at(event, 3), branch=Branch(trunk, 3))
    # Not from random weights, without its trunk.
    with pytest.raises(ValueError, match="has no checkpoint, .* began with --branch; "):
        train(config, own)
    with pytest.raises(Killed):
        train(config, own, observe=kill_at("step", 4), branch=Branch(trunk, 3))
    shutil.rmtree(trunk)
    with pytest.raises(Killed):
        train(config, own, observe=kill_at("step", 7), branch=Branch(trunk, 3))
    resumed = train(config, own)
    assert_same_bits(resumed.state, expected.state)
    assert of_steps(own) == [r for r in of_steps(folder) if r["step"] > 3]
    start = read_records(own)[0]
    assert (start["event"], start["branch"]["run"]) == ("start", "../trunk")
    with Checkpoints(own / "checkpoints") as checkpoints:
        assert checkpoints.metadata()["branch"] == {"run": "../trunk", "step": 3}


def test_a_folder_is_gone_on_with_only_as_the_branch_that_it_is(
    uninterrupted, tmp_path
):
    config, trunk, _ = uninterrupted("two-four")
    own = tmp_path / "branch"
    train(config, own, branch=Branch(trunk, 9))
    assert train(config, own, branch=Branch(trunk)).completed
    with pytest.raises(ValueError, match="holds a branch of .* at step 9, not of .* 3"):
        train(config, own, branch=Branch(trunk, 3))
    with pytest.raises(ValueError, match=r"a branch of .*, not of \.\./elsewhere"):
        train(config, own, branch=Branch(tmp_path / "elsewhere", 9))
    other = tmp_path / "other"
    shutil.copytree(trunk, other)
    with pytest.raises(ValueError, match="holds a run that is no branch of "):
        train(config, other, branch=Branch(trunk, 9))


def test_a_branch_counts_the_seconds_of_its_trunk(uninterrupted, tmp_path):
    config, trunk, _ = uninterrupted("two-four")
    train(config, tmp_path, branch=Branch(trunk, 9))
    before = training_seconds(read_records(trunk), config.tokens_per_step)
    own = training_seconds(read_records(tmp_path), config.tokens_per_step)
    assert list(own) == [9, 10, 11, 12]
    assert own[9] == pytest.approx(before[9]) and own[9] > 0
    assert own[9] < own[10] < own[12]


def test_a_branch_without_times_trains_dense_what_its_trunk_did(
    uninterrupted, tmp_path, monkeypatch
):
    config, _, _ = uninterrupted("two-four")
    slow = tmp_path / "slow"
    monkeypatch.setattr(resume, "phases_run_dense", lambda *of, **how: (1,))
    expected = train(config, slow, step_times=step_times())
    outcome = train(config, tmp_path / "same", branch=Branch(slow, 3))
    assert_same_bits(outcome.state, expected.state)
    with Checkpoints(tmp_path / "same" / "checkpoints") as checkpoints:
        assert checkpoints.metadata()["run_dense"] == [1]
    assert read_records(tmp_path / "same")[0]["run_dense"] == [1]


# What cannot be.


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (5, "has no checkpoint of step 5 to branch from; take one of 3, 9, 10, 12, or"),
        (12, "steps=12 leaves nothing to train .* at step 12 of .*; set --steps above"),
        (None, "steps=12 leaves nothing to train .* at step 12"),
    ],
)
def test_a_step_without_checkpoint_or_without_steps_left_is_refused(
    step, message, uninterrupted, tmp_path
):
    config, trunk, _ = uninterrupted("two-four")
    with pytest.raises(ValueError, match=message):
        train(config, tmp_path / "own", branch=Branch(trunk, step))
    assert not (tmp_path / "own" / "config.json").exists()


def test_a_folder_that_is_no_trunk_is_refused(uninterrupted, tmp_path):
    config, _, _ = uninterrupted("two-four")
    with pytest.raises(ValueError, match="nowhere has no checkpoint to branch from"):
        train(config, tmp_path / "own", branch=Branch(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match="a branch needs a run folder of its own"):
        train(config, tmp_path / "own", branch=Branch(tmp_path / "own"))


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda c: replace(c, seed=1), "seed is 0"),
        (lambda c: replace(c, batch_size=8), "batch_size is 4"),
        (lambda c: replace(c, data=replace(c.data, seed=2)), r"data\.seed is 0"),
        (
            lambda c: replace(c, model=replace(c.model, rope_base=9.0)),
            r"model\.rope_base is 10000\.0",
        ),
    ],
)
def test_a_setting_that_the_checkpoint_fixes_is_refused(
    change, name, uninterrupted, tmp_path
):
    config, trunk, _ = uninterrupted("two-four")
    message = f"holds a run whose {name}, and a branch of it cannot have .*; leave it"
    with pytest.raises(ValueError, match=message):
        train(change(config), tmp_path / "own", branch=Branch(trunk, 9))


def test_other_tokens_are_refused(uninterrupted, tmp_path, monkeypatch):
    config, trunk, _ = uninterrupted("two-four")
    monkeypatch.setattr(loop, "Run", Run)
    (tmp_path / "text").mkdir()
    glob = write_text(tmp_path / "text")
    (tmp_path / "text" / "0.txt").write_text("something else " * 100)
    other = replace(config, data=replace(config.data, text=glob))
    with pytest.raises(ValueError, match="trained on other tokens than 8 files"):
        train(other, tmp_path / "own", branch=Branch(trunk, 9))


def test_a_damaged_checkpoint_is_refused_and_left_as_it_is(uninterrupted, tmp_path):
    config, folder, _ = uninterrupted("two-four")
    trunk = tmp_path / "trunk"
    shutil.copytree(folder, trunk)
    record = trunk / "checkpoints" / "step_00000009" / "record.json"
    record.write_text(record.read_text().replace("0", "1", 1))
    with pytest.raises(ValueError, match=r"step_00000009 is damaged \(record.json "):
        train(config, tmp_path / "own", branch=Branch(trunk, 9))
    assert record.parent.is_dir()
