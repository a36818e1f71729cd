"""Runs that were killed, or ended: to the same bits, in their own folder alone."""

import errno
import fcntl
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from sparsejax.checkpoints.checkpoint import Checkpoints
from sparsejax.config import PhaseConfig
from sparsejax.config.schedule import phases
from sparsejax.feed_forward.sparsity import FFNSparsity
from sparsejax.sparsity.patterns import NM
from sparsejax.training import progress, resume
from sparsejax.training import train as loop
from sparsejax.training.run import Run
from sparsejax.training.train import train
from tests.support.micro_run import (
    assert_same_bits,
    micro_config,
    read_records,
    without_speed,
    write_text,
)
from tests.support.whole_runs import VARIANTS, Killed, kill_at, step_times

pytestmark = pytest.mark.usefixtures("quick_loop")


# Before any checkpoint; inside each phase; between a switch and its checkpoint; at the
# first step after a switch, which resumes exactly there.
KILLS = [
    ("step", 1),
    ("step", 3),
    ("switch", 3),
    ("step", 4),
    ("validation", 8),
    ("checkpoint", 9),
    ("step", 10),
    ("step", 12),
]


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_run_killed_anywhere_resumes_to_the_same_bits(
    variant, uninterrupted, tmp_path
):
    config, folder, expected = uninterrupted(variant)
    for event, step in KILLS:
        with pytest.raises(Killed):
            train(config, tmp_path, observe=kill_at(event, step))
    resumed = train(config, tmp_path)
    assert resumed.completed
    assert_same_bits(resumed.state, expected.state)
    ours, theirs = read_records(tmp_path), read_records(folder)
    assert without_speed(ours) == without_speed(theirs)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_checkpoint_of_a_run_leads_to_its_end(variant, uninterrupted, tmp_path):
    config, folder, expected = uninterrupted(variant)
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    for step in Checkpoints(folder / "checkpoints").steps()[-2::-1]:
        for path in (tmp_path / "checkpoints").iterdir():
            if int(path.name[5:13]) > step:
                shutil.rmtree(path)
        started = []
        resumed = train(config, tmp_path, observe=started.append)
        assert started[0]["event"] == "resume" and started[0]["step"] == step
        assert_same_bits(resumed.state, expected.state)


def test_a_finished_run_is_left_as_it_is(uninterrupted, tmp_path):
    config, folder, expected = uninterrupted("two-four")
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    again = train(config, tmp_path)
    assert again.completed
    assert_same_bits(again.state, expected.state)
    assert read_records(tmp_path) == read_records(folder)


# Folders.


def test_a_folder_of_another_run_is_refused_and_left_alone(uninterrupted, tmp_path):
    config, folder, _ = uninterrupted("two-four")
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    saved = (tmp_path / "config.json").read_bytes()
    with pytest.raises(ValueError, match="whose seed is 0 and cannot become 1"):
        train(replace(config, seed=1), tmp_path)
    assert (tmp_path / "config.json").read_bytes() == saved
    (tmp_path / "config.json").unlink()
    # The checkpoint remembers as well.
    with pytest.raises(ValueError, match="whose seed is 0 and cannot become 1"):
        train(replace(config, seed=1), tmp_path)


def test_a_resumed_run_may_change_what_it_writes(uninterrupted, tmp_path):
    config, _, expected = uninterrupted("two-four")
    with pytest.raises(Killed):
        train(config, tmp_path, observe=kill_at("step", 5))
    changed = replace(config, log_every=5, eval_every=0, keep_checkpoints=9)
    outcome = train(changed, tmp_path)
    assert_same_bits(outcome.state, expected.state)
    steps = [r["step"] for r in read_records(tmp_path) if r["event"] == "step"]
    assert steps == [1, 2, 3, 4, 5, 9, 10, 12]
    assert json.loads((tmp_path / "config.json").read_text())["log_every"] == 5


def test_a_resume_on_other_text_is_refused(text, tmp_path):
    own = tmp_path / "text"
    own.mkdir()
    config = micro_config(write_text(own), checkpoint_every=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "Run", Run)
        with pytest.raises(Killed):
            train(config, tmp_path / "run", observe=kill_at("step", 3))
        (own / "0.txt").write_text("something else " * 100)
        with pytest.raises(ValueError, match="trained on other tokens than 8 files"):
            train(config, tmp_path / "run")


def test_a_line_that_is_no_whole_record_is_dropped(uninterrupted, tmp_path):
    config, folder, _ = uninterrupted("two-four")
    with pytest.raises(Killed):
        train(config, tmp_path, observe=kill_at("step", 5))
    whole = {"event": "step", "step": 3, "phase": 0, "kind": "warm-up", "loss": 1.0}
    others = [
        {"event": 3},
        {"step": "3"},
        {"step": True},
        {"phase": 3},
        {"phase": 1},
        {"kind": None},
        {"kind": "spbrse"},
        {"loss": "1.0"},
        {"loss": None},
        {"event": "validation", "loss": 1},
        {"event": "start"},
    ]
    lines = ["[]", "3", "null", "", "\xff", "[" * 100_000]
    lines += [json.dumps({**whole, **other}) for other in others]
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write("\n".join([*lines, '{"event": "step", "ste']))
    train(config, tmp_path)
    ours, theirs = read_records(tmp_path), read_records(folder)
    assert without_speed(ours) == without_speed(theirs)


def test_a_folder_in_which_a_run_trains_is_refused(uninterrupted, tmp_path):
    config, _, expected = uninterrupted("two-four")
    refused = []

    def observe(record: dict) -> None:
        if record["step"] in (0, 5, 12):
            with pytest.raises(ValueError, match=f"a run trains in {tmp_path} at this"):
                train(config, tmp_path)
            refused.append(record["step"])

    outcome = train(config, tmp_path, observe=observe)
    assert set(refused) == {0, 5, 12}
    assert_same_bits(outcome.state, expected.state)
    assert train(config, tmp_path).completed


def test_a_file_system_without_locks_will_do(uninterrupted, tmp_path, monkeypatch):
    config, _, _ = uninterrupted("two-four")

    def flock(file, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(Killed):
        train(config, tmp_path, observe=kill_at("step", 1))


@pytest.mark.parametrize("name", ["metrics.jsonl", "config.json"])
def test_a_record_that_cannot_be_written_ends_the_run_and_is_told(
    name, uninterrupted, tmp_path
):
    config, _, expected = uninterrupted("two-four")
    with pytest.raises(Killed):
        train(config, tmp_path, observe=kill_at("step", 5))
    draft = tmp_path / Path(name).with_suffix(".draft")
    draft.mkdir()
    good = tmp_path / "checkpoints" / "step_00000004"
    with pytest.raises(OSError) as caught:
        train(config, tmp_path)
    assert str(caught.value).startswith(f"{tmp_path / name} could not be written (")
    assert f"The last good checkpoint is {good}; free space" in str(caught.value)
    draft.rmdir()
    assert_same_bits(train(config, tmp_path).state, expected.state)


def test_a_full_disk_under_the_records_ends_the_run_and_is_told(
    uninterrupted, tmp_path
):
    config, _, expected = uninterrupted("two-four")
    records, aside = tmp_path / "metrics.jsonl", tmp_path / "aside"

    def observe(record: dict) -> None:
        if (record["event"], record["step"]) == ("step", 7):
            records.rename(aside)
            records.symlink_to("/dev/full")

    with pytest.raises(OSError, match="metrics.jsonl could not be written .*No space"):
        train(config, tmp_path, observe=observe)
    aside.rename(records)
    assert_same_bits(train(config, tmp_path).state, expected.state)


def test_a_run_without_an_intact_checkpoint_is_not_begun_anew_unasked(text, tmp_path):
    config = micro_config(text, checkpoint_every=0)
    train(config, tmp_path)
    records = (tmp_path / "metrics.jsonl").read_text()
    checkpoints = sorted((tmp_path / "checkpoints").iterdir())
    for checkpoint in checkpoints:
        (checkpoint / "record.json").write_text("{}")
    with pytest.raises(ValueError, match="every checkpoint .* is damaged") as refused:
        train(config, tmp_path)
    # Each is named under its new name, and nothing else was touched.
    for checkpoint in checkpoints:
        assert f"{checkpoint}.damaged (record.json has 2 bytes" in str(refused.value)
    assert (tmp_path / "metrics.jsonl").read_text() == records


# Another number of steps.


def test_a_finished_run_goes_on_to_more_steps(uninterrupted, tmp_path):
    config, folder, _ = uninterrupted("two-four")
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    outcome = train(replace(config, steps=16), tmp_path)
    assert outcome.completed and int(outcome.state.step) == 16
    records = read_records(tmp_path)
    assert [r["step"] for r in records if r["event"] == "step"] == list(range(1, 17))
    assert without_speed(records)[: len(read_records(folder))] == without_speed(
        read_records(folder)
    )
    assert json.loads((tmp_path / "config.json").read_text())["steps"] == 16


@pytest.mark.parametrize(
    ("steps", "plan"),
    [
        (8, "warm-up to step 2, sparse to step 6, dense to step 8"),
        (20, "warm-up to step 5, sparse to step 15, dense to step 20"),
    ],
)
def test_steps_that_move_the_run_into_another_phase_are_refused(
    steps, plan, uninterrupted, tmp_path
):
    config, folder, _ = uninterrupted("two-four")
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    with pytest.raises(ValueError) as caught:
        train(replace(config, steps=steps), tmp_path)
    assert str(caught.value) == (
        f"steps={steps} plans {plan}, but {tmp_path} is at step 12 in phase 2 (dense) "
        f"of steps=12; choose steps that keep step 12 in that phase, or resume with 12"
    )
    assert read_records(tmp_path) == read_records(folder)
    assert train(config, tmp_path).completed


def test_records_are_on_the_disk_before_their_checkpoint(text, tmp_path, monkeypatch):
    happened = []
    flush, save = progress.flush_to_disk, Checkpoints.save
    monkeypatch.setattr(
        progress,
        "flush_to_disk",
        lambda path: happened.append(read_records(tmp_path)[-1]) or flush(path),
    )
    monkeypatch.setattr(
        Checkpoints,
        "save",
        lambda self, step, *of, **how: (
            happened.append(step) or save(self, step, *of, **how)
        ),
    )
    train(micro_config(text, recipe="dense", steps=2), tmp_path)
    records, steps = happened[0::2], happened[1::2]
    assert steps == [2] and [r["event"] for r in records] == ["checkpoint"]


def test_phases_that_are_dense_keep_their_names_when_others_get_steps(
    text, tmp_path, monkeypatch
):
    """The second of four phases has no step in a run of 12, and one in a run of 24."""
    two_four = FFNSparsity(weights=NM(2, 4))
    shares = {"first": 0.5, "short": 0.04, "sparse": 0.3}
    schedule = (
        *(PhaseConfig(name=n, share=s, sparsity=two_four) for n, s in shares.items()),
        PhaseConfig(name="last"),
    )
    config = micro_config(text, recipe="dense").with_schedule(schedule)
    config = replace(config, keep_slower=False)
    assert [phase.kind for phase in phases(config)] == ["first", "sparse", "last"]
    monkeypatch.setattr(resume, "phases_run_dense", lambda *of, **how: (1,))
    with pytest.raises(Killed):
        train(config, tmp_path, step_times=step_times(), observe=kill_at("step", 3))
    train(replace(config, steps=24), tmp_path)
    steps = [r for r in read_records(tmp_path) if r["event"] == "step"]
    is_sparse = {r["kind"]: r["sparse"] for r in steps}
    expected = {"first": True, "short": True, "sparse": False, "last": False}
    assert is_sparse == expected
