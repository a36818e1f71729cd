"""The checkpoints that stay: the newest, the permanent, those of every n steps."""

import os
from pathlib import Path

from sparsejax.checkpoints.checkpoint import Checkpoints
from tests.support.files.saved_states import assert_same, save_steps, state_of


def test_the_newest_and_the_permanent_stay(tmp_path):
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        assert checkpoints.latest_step() is None
        for step in range(6):
            checkpoints.save(step, state_of(step), permanent=step in (1, 4))
        checkpoints.wait()
        assert checkpoints.steps() == [1, 4, 5]
        assert checkpoints.latest_step() == 5
        checkpoints.save(6, state_of(6))
    reader = Checkpoints(tmp_path)
    assert reader.steps() == [1, 4, 5, 6]
    for step in reader.steps():
        assert_same(reader.restore(step, template=state_of(0)).state, state_of(step))
    # The rest left nothing behind.
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [reader.path(step).name for step in reader.steps()]


def test_steps_that_are_a_multiple_of_keep_every_stay(tmp_path):
    with Checkpoints(tmp_path, keep=2, keep_every=4) as checkpoints:
        for step in range(2, 12):
            checkpoints.save(step, {}, permanent=step == 5)
    assert Checkpoints(tmp_path).steps() == [4, 5, 8, 10, 11]
    # None of them was marked: another policy may drop them.
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(12, {})
    assert Checkpoints(tmp_path).steps() == [5, 12]


def test_a_run_that_continues_keeps_what_an_earlier_one_made_permanent(tmp_path):
    save_steps(tmp_path, 1, permanent=True)
    save_steps(tmp_path, 2, 3)
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(4, {})
    assert Checkpoints(tmp_path).steps() == [1, 4]


def test_the_same_step_again_replaces_and_stays_permanent(tmp_path):
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(5, state_of(1), permanent=True)
        for value in (2, 3):
            checkpoints.save(5, state_of(value), metadata={"value": value})
        checkpoints.wait()
        assert checkpoints.steps() == [5]
        assert len(list(tmp_path.iterdir())) == 1
        restored = checkpoints.restore(template=state_of(0))
        assert_same(restored.state, state_of(3))
        assert restored.metadata == {"value": 3}
        checkpoints.save(6, state_of(6))
    assert Checkpoints(tmp_path).steps() == [5, 6]


def test_the_same_step_again_never_leaves_a_moment_without_it(tmp_path, monkeypatch):
    """At the commit of the replacement, the replaced one is still whole."""
    save_steps(tmp_path, 5)
    rename = os.rename
    seen = []

    def look_first(source, target, **options):
        if Path(target).parent == tmp_path:
            restored = Checkpoints(tmp_path).restore(template=state_of(0))
            seen.append(restored.state["w"][0, 0].item())
        return rename(source, target, **options)

    with Checkpoints(tmp_path) as checkpoints:
        monkeypatch.setattr(os, "rename", look_first)
        checkpoints.save(5, state_of(7), blocking=True)
    # First the commit, then the deletion of the old one, when the new one counts.
    assert seen == [5.0, 7.0]


def test_revisions_are_ordered_as_numbers(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        for value in range(12):
            checkpoints.save(1, state_of(value))
        assert Checkpoints(tmp_path).latest_step() == 1
    restored = Checkpoints(tmp_path).restore(template=state_of(0))
    assert_same(restored.state, state_of(11))


def test_names_that_are_no_checkpoint_are_ignored(tmp_path):
    save_steps(tmp_path, 1)
    for name in (
        "step_00000002.writing",
        "step_00000003.orbax-checkpoint-tmp",
        "step_00000003.orbax-checkpoint-tmp-1700000000",
        "step_00000004_1.deleting",
        "step_5x",
        "metrics",
    ):
        (tmp_path / name).mkdir()
    (tmp_path / "step_00000002.writing" / "half").write_text("written")
    reader = Checkpoints(tmp_path)
    assert reader.steps() == [1]
    reader.close()
    assert len(list(tmp_path.iterdir())) == 7  # a reader deletes nothing
    save_steps(tmp_path, 2)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"step_00000001", "step_00000002", "step_5x", "metrics"}
