"""Damaged checkpoints: found, named and set aside, and the one before is used."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparsejax.checkpoints import manifest
from sparsejax.checkpoints.checkpoint import Checkpoints, Damaged


def state_of(step: int) -> dict[str, jax.Array]:
    return {"w": jnp.arange(6.0).reshape(2, 3) + step, "key": jax.random.key(step)}


def assert_restores(folder: Path, step: int) -> None:
    """The newest is this step, with the bits that were saved."""
    with Checkpoints(folder) as checkpoints:
        restored = checkpoints.restore(template=state_of(0))
    assert restored.step == step
    expected = state_of(step)
    assert np.asarray(restored.state["w"]).tobytes() == (
        np.asarray(expected["w"]).tobytes()
    )
    key_data = jax.random.key_data
    assert (key_data(restored.state["key"]) == key_data(expected["key"])).all()


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    with Checkpoints(folder) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, state_of(step))
    return folder


@pytest.fixture
def folder(saved, tmp_path) -> Path:
    return shutil.copytree(saved, tmp_path / "checkpoints")


def cut(length: int) -> Callable[[Path], None]:
    """Leaves this many bytes; from the end where it is negative."""
    return lambda path: path.write_bytes(path.read_bytes()[:length])


def flip(position: float) -> Callable[[Path], None]:
    """Flips one bit, at a part of the length."""

    def change(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[int(position * (len(content) - 1))] ^= 4
        path.write_bytes(content)

    return change


DAMAGES = {
    "one byte short": cut(-1),
    "empty": cut(0),
    "first byte": flip(0),
    "an early byte": flip(0.1),
    "in the middle": flip(0.5),
    "a late byte": flip(0.9),
    "last byte": flip(1),
    "deleted": Path.unlink,
}


def files_of(checkpoint: Path) -> Iterator[str]:
    for path in sorted(checkpoint.rglob("*")):
        if path.is_file():
            yield path.relative_to(checkpoint).as_posix()


@pytest.mark.parametrize("kind", DAMAGES)
def test_damage_to_any_file_is_named_and_the_one_before_used(saved, tmp_path, kind):
    names = list(files_of(saved / "step_00000003"))
    assert {"manifest.json", "record.json", "state/manifest.ocdbt"} < set(names)
    for number, name in enumerate(names):
        folder = shutil.copytree(saved, tmp_path / str(number))
        DAMAGES[kind](folder / "step_00000003" / name)
        with Checkpoints(folder) as checkpoints:
            (damaged,) = checkpoints.set_aside_damaged()
            assert checkpoints.latest_step() == 2
            assert checkpoints.last_good() == folder / "step_00000002"
            assert checkpoints.set_aside_damaged() == []
        assert damaged.step == 3
        assert damaged.path == folder / "step_00000003.damaged"
        assert damaged.path.is_dir()
        assert damaged.reason.startswith(f"{name} "), damaged.reason
        assert_restores(folder, 2)


def test_intact_checkpoints_stay_as_they_are(folder):
    (folder / "step_00000003" / "state" / "note").write_text("extra")
    before = sorted(folder.rglob("*"))
    with Checkpoints(folder) as checkpoints:
        assert checkpoints.set_aside_damaged() == []
    assert sorted(folder.rglob("*")) == before
    assert_restores(folder, 3)


def test_all_damaged_ones_down_to_the_first_intact_are_set_aside(folder):
    (folder / "step_00000002" / "manifest.json").unlink()
    cut(5)(folder / "step_00000003" / "record.json")
    size = len((folder / "step_00000001" / "record.json").read_bytes())
    with Checkpoints(folder) as checkpoints:
        assert checkpoints.set_aside_damaged() == [
            Damaged(
                path=folder / "step_00000003.damaged",
                step=3,
                reason=f"record.json has 5 bytes instead of {size}",
            ),
            Damaged(
                path=folder / "step_00000002.damaged",
                step=2,
                reason="manifest.json is missing",
            ),
        ]
        assert checkpoints.steps() == [1]
    assert_restores(folder, 1)
    with Checkpoints(folder) as checkpoints:
        (folder / "step_00000001" / "record.json").unlink()
        (damaged,) = checkpoints.set_aside_damaged()
        assert damaged.reason == "record.json is missing"
        assert checkpoints.latest_step() is None
        assert checkpoints.last_good() is None


@pytest.mark.parametrize("newest", ["intact", "damaged"])
def test_what_lies_behind_an_intact_one_is_not_read(folder, newest, monkeypatch):
    """A resume takes the first intact one: what is older costs no time, and a damaged
    one there keeps its name, for it is not in the way."""
    cut(5)(folder / "step_00000001" / "record.json")
    if newest == "damaged":
        cut(5)(folder / "step_00000003" / "record.json")
    read, find_damage = [], manifest.find_damage

    def remember(path: Path) -> str | None:
        read.append(path.name)
        return find_damage(path)

    monkeypatch.setattr(manifest, "find_damage", remember)
    with Checkpoints(folder) as checkpoints:
        found = [damaged.step for damaged in checkpoints.set_aside_damaged()]
        assert found == ([3] if newest == "damaged" else [])
        kept = [1, 2] if newest == "damaged" else [1, 2, 3]
        assert checkpoints.steps() == kept
    expected = ["step_00000003", "step_00000002"]
    assert read == expected[: 2 if newest == "damaged" else 1]
    assert_restores(folder, kept[-1])


def test_a_step_damaged_again_takes_no_name_that_is_taken(folder):
    for suffix in ("", "_1", "_2"):
        with Checkpoints(folder) as checkpoints:
            checkpoints.save(4, state_of(4), blocking=True)
            (folder / "step_00000004" / "record.json").unlink()
            (damaged,) = checkpoints.set_aside_damaged()
            assert damaged.path.name == f"step_00000004.damaged{suffix}"
    # Nobody deletes them.
    with Checkpoints(folder, keep=1) as checkpoints:
        checkpoints.save(5, state_of(5))
    assert len(list(folder.glob("*.damaged*"))) == 3
    assert_restores(folder, 5)


def test_of_two_revisions_the_intact_one_is_used(folder):
    shutil.copytree(folder / "step_00000003", folder / "step_00000003_1")
    (folder / "step_00000003_1" / "record.json").unlink()
    with Checkpoints(folder) as checkpoints:
        (damaged,) = checkpoints.set_aside_damaged()
        assert damaged.path.name == "step_00000003_1.damaged"
        assert checkpoints.path() == folder / "step_00000003"
    assert_restores(folder, 3)


def test_a_checkpoint_without_its_manifest_is_refused_and_never_deleted(folder):
    (folder / "step_00000003" / "manifest.json").unlink()
    with Checkpoints(folder, keep=1) as checkpoints:
        with pytest.raises(ValueError, match=r"or is damaged: .*manifest.json is miss"):
            checkpoints.restore(template=state_of(0))
        assert checkpoints.last_good() == folder / "step_00000002"
        checkpoints.save(4, state_of(4))
    assert Checkpoints(folder).steps() == [3, 4]


@pytest.mark.parametrize("name", ["step_00000009", "step_00000002_1"])
def test_a_checkpoint_under_the_name_of_another_step_is_set_aside(folder, name):
    shutil.rmtree(folder / "step_00000003")
    (folder / "step_00000001").rename(folder / name)
    with Checkpoints(folder) as checkpoints:
        # Who sets nothing aside is told.
        for read in (
            lambda: checkpoints.metadata(),
            lambda: checkpoints.restore(template=state_of(0)),
        ):
            with pytest.raises(ValueError, match=f"{name} is the .* step=1, and was"):
                read()
        (damaged,) = checkpoints.set_aside_damaged()
        assert damaged.path.name == f"{name}.damaged"
        assert damaged.reason == "record.json is of step 1: the folder was renamed"
    assert_restores(folder, 2)


def test_an_intact_checkpoint_is_not_superseded_by_a_damaged_one(folder):
    shutil.copytree(folder / "step_00000002", folder / "step_00000002_1")
    flip(0.5)(folder / "step_00000002_1" / "state" / "manifest.ocdbt")
    shutil.copytree(folder / "step_00000001", folder / "step_00000001_1")
    with Checkpoints(folder, keep=None) as checkpoints:
        checkpoints.save(4, state_of(4), blocking=True)
        # Of step 1 the older of two intact ones is gone.
        assert sorted(path.name[5:] for path in folder.iterdir()) == [
            "00000001_1",
            "00000002",
            "00000002_1",
            "00000003",
            "00000004",
        ]
    shutil.rmtree(folder / "step_00000004")
    shutil.rmtree(folder / "step_00000003")
    with Checkpoints(folder) as checkpoints:
        assert [damaged.step for damaged in checkpoints.set_aside_damaged()] == [2]
    assert_restores(folder, 2)


def test_a_link_to_a_checkpoint_does_not_supersede_it(folder):
    (folder / "step_00000002_1").symlink_to("step_00000002")
    with Checkpoints(folder, keep=None) as checkpoints:
        checkpoints.save(4, state_of(4), blocking=True)
        assert checkpoints.restore(2, template=state_of(0)).step == 2


def test_arrays_that_cannot_be_read_are_named(folder):
    for path in (folder / "step_00000003" / "state" / "d").iterdir():
        cut(10)(path)
    with Checkpoints(folder) as checkpoints:
        message = "step_00000003 is damaged: its arrays cannot be read .*another step"
        with pytest.raises(ValueError, match=message):
            checkpoints.restore(template=state_of(0))
        assert checkpoints.restore(2, template=state_of(0)).step == 2


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("step", None),
        ("step", "3"),
        ("permanent", 1),
        ("metadata", []),
        ("state", ["w"]),
        ("state", {"['w']": "float32"}),
        ("state", {"['w']": {"shape": [2, "3"], "dtype": "float32"}}),
        ("state", {"['w']": {"shape": 2, "dtype": "float32"}}),
    ],
)
def test_a_record_of_another_form_is_named(folder, name, value):
    path = folder / "step_00000003" / "record.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), name: value}))
    message = "step_00000003 .* is damaged: .*record.json does not hold what a save"
    with Checkpoints(folder) as checkpoints:
        for read in (
            lambda: checkpoints.metadata(),
            lambda: checkpoints.restore(template=state_of(0)),
        ):
            with pytest.raises(ValueError, match=message):
                read()


@pytest.mark.parametrize("impl", ["", "threefry", "rbg"])
def test_a_random_key_of_another_kind_is_named(folder, impl):
    path = folder / "step_00000003" / "record.json"
    record = json.loads(path.read_text())
    record["state"]["['key']"]["key_impl"] = impl
    path.write_text(json.dumps(record))
    with Checkpoints(folder) as checkpoints:
        message = f"step_00000003 is damaged: its record says key_impl='{impl}' of a"
        with pytest.raises(ValueError, match=message):
            checkpoints.restore(template=state_of(0))


@pytest.mark.parametrize("name", ["data_state", "metadata", "format_version", "step"])
def test_a_record_without_an_entry_is_named(folder, name):
    path = folder / "step_00000003" / "record.json"
    record = json.loads(path.read_text())
    del record[name]
    path.write_text(json.dumps(record))
    with Checkpoints(folder, keep=1) as checkpoints:
        with pytest.raises(ValueError, match="record.json does not hold what a save"):
            checkpoints.restore(template=state_of(0))
        # Nor does a save fail on it, or delete it.
        checkpoints.save(4, state_of(4))
    assert Checkpoints(folder).steps() == [3, 4]


def test_a_record_of_brackets_without_an_end_is_named(folder):
    (folder / "step_00000003" / "record.json").write_text("[" * 100_000)
    with Checkpoints(folder) as checkpoints:
        with pytest.raises(ValueError, match="is damaged: its record cannot be read"):
            checkpoints.metadata()
