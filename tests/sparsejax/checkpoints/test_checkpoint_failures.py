"""Saves in the background, and failed ones: told, tidied up, nothing earlier lost."""

import errno
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from orbax.checkpoint._src.serialization import serialization

from sparsejax.checkpoints import checkpoint, checkpoint_folder, manifest
from sparsejax.checkpoints.agreement import CheckpointFailed
from sparsejax.checkpoints.checkpoint import Checkpoints


def state_of(step: int) -> dict[str, jax.Array]:
    return {"w": jnp.arange(6.0) + step}


def assert_restores(folder: Path, step: int) -> None:
    """The newest is this step, intact."""
    with Checkpoints(folder) as checkpoints:
        assert checkpoints.set_aside_damaged() == []
        restored = checkpoints.restore(template=state_of(0))
    assert restored.step == step
    np.testing.assert_array_equal(restored.state["w"], state_of(step)["w"])


@pytest.fixture
def gate(monkeypatch):
    """Arrays are written once it is open, not before."""
    opened = threading.Event()
    write = serialization.async_serialize_from_host

    async def write_later(*arguments, **options):
        assert opened.wait(timeout=60)
        return await write(*arguments, **options)

    monkeypatch.setattr(serialization, "async_serialize_from_host", write_later)
    yield opened
    opened.set()


def test_save_returns_before_anything_is_written_and_keeps_the_values(tmp_path, gate):
    increment = jax.jit(lambda x: x + 1, donate_argnums=0)
    array = jnp.arange(1 << 16)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, array)
        assert checkpoints.last_good() is None
        assert checkpoints.latest_step() is None
        checkpoints.raise_if_failed()
        # Buffers are reused while the values still wait to be written.
        for _ in range(5):
            array = increment(array)
        assert array[0].item() == 5
        gate.set()
        checkpoints.wait()
        assert checkpoints.last_good() == tmp_path / "step_00000001"
        restored = checkpoints.restore(template=array)
    np.testing.assert_array_equal(restored.state, np.arange(1 << 16))


def test_a_save_waits_for_the_one_before(tmp_path, gate):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state_of(1))
        threading.Timer(0.2, gate.set).start()
        checkpoints.save(2, state_of(2))
        assert gate.is_set()
        assert (tmp_path / "step_00000001").is_dir()
    assert_restores(tmp_path, 2)


def test_hashing_and_deleting_are_in_the_background(tmp_path, monkeypatch):
    threads = []

    def remember(function):
        def remembering(*arguments):
            threads.append((function.__name__, threading.current_thread()))
            return function(*arguments)

        return remembering

    monkeypatch.setattr(manifest, "write", remember(manifest.write))
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(1, state_of(1), blocking=True)
        removing = remember(checkpoint_folder.remove)
        monkeypatch.setattr(checkpoint_folder, "remove", removing)
        checkpoints.save(2, state_of(2))
    assert [name for name, _ in threads] == ["write", "write", "remove"]
    assert threading.main_thread() not in [thread for _, thread in threads]


def fail_with(error: Exception):
    async def fail(*arguments, **options):
        raise error

    return fail


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        PermissionError(errno.EACCES, "Permission denied"),
        ValueError("RESOURCE_EXHAUSTED: writing state/d/0: Disk quota exceeded"),
        RuntimeError("something else\n\nover several lines"),
    ],
)
def test_any_error_of_the_writer_is_told_with_the_last_good_one(
    tmp_path, monkeypatch, error
):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state_of(1), blocking=True)
        with monkeypatch.context() as patch:
            patch.setattr(serialization, "async_serialize_from_host", fail_with(error))
            checkpoints.save(2, state_of(2))
            with pytest.raises(CheckpointFailed) as raised:
                checkpoints.wait()
        text = str(raised.value)
        assert text.startswith(
            f"the checkpoint of step 2 in {tmp_path} could not be written "
            f"({type(error).__name__}: "
        )
        assert " ".join(str(error).split()) in text
        assert text.endswith(
            f"); the last good checkpoint is {tmp_path / 'step_00000001'}; free space "
            f"or repair the disk, then resume"
        )
        assert isinstance(raised.value, OSError)
        # Its space is given back, and it is told once.
        assert [path.name for path in tmp_path.iterdir()] == ["step_00000001"]
        checkpoints.wait()
        checkpoints.save(2, state_of(2))
    assert_restores(tmp_path, 2)


def test_what_the_system_said_is_not_cut_out_of_a_long_message(tmp_path, monkeypatch):
    error = ValueError(f"{'writing ' * 99} No space left on device {'(a trace) ' * 99}")
    with Checkpoints(tmp_path) as checkpoints, monkeypatch.context() as patch:
        patch.setattr(serialization, "async_serialize_from_host", fail_with(error))
        with pytest.raises(CheckpointFailed, match="No space left on device") as raised:
            checkpoints.save(2, state_of(2), blocking=True)
    assert len(str(raised.value)) < 1000


@pytest.mark.parametrize("failing", ["manifest", "commit"])
def test_an_error_after_the_arrays_is_told_as_well(tmp_path, monkeypatch, failing):
    rename = os.rename

    def fail(source, target, **options):
        if failing == "manifest" or str(target).endswith("step_00000002"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return rename(source, target, **options)

    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(1, state_of(1), blocking=True)
        with monkeypatch.context() as patch:
            if failing == "manifest":
                patch.setattr(manifest, "write", fail)
            else:
                patch.setattr(os, "rename", fail)
            with pytest.raises(CheckpointFailed, match="No space left on device"):
                checkpoints.save(2, state_of(2), blocking=True)
        assert [path.name for path in tmp_path.iterdir()] == ["step_00000001"]
        assert checkpoints.steps() == [1]
    assert_restores(tmp_path, 1)


def test_what_is_written_after_the_error_is_removed_too(tmp_path, monkeypatch):
    late = tmp_path / "step_00000002.writing" / "state" / "late"
    stragglers = []

    def write() -> None:
        for _ in range(20):
            late.mkdir(parents=True, exist_ok=True)
            time.sleep(0.02)

    async def fail(*arguments, **options):
        stragglers.append(threading.Thread(target=write))
        stragglers[-1].start()
        raise OSError(errno.ENOSPC, "No space left on device")

    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state_of(1), blocking=True)
        monkeypatch.setattr(serialization, "async_serialize_from_host", fail)
        with pytest.raises(CheckpointFailed, match="No space left on device"):
            checkpoints.save(2, state_of(2), blocking=True)
        for straggler in stragglers:
            straggler.join()
        assert [path.name for path in tmp_path.iterdir()] == ["step_00000001"]


def test_the_first_save_says_that_there_is_none_before_it(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with Checkpoints(tmp_path / "file" / "checkpoints") as checkpoints:
        with pytest.raises(CheckpointFailed, match=r"step 3 .*; there is none before"):
            checkpoints.save(3, state_of(3))
        with pytest.raises(CheckpointFailed, match=r"NotADirectoryError"):
            checkpoints.save(3, {})


def test_a_failure_in_the_background_is_raised_once_it_is_known(tmp_path, monkeypatch):
    go = threading.Event()

    def fail(folder, version):
        assert go.wait(timeout=60)
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(manifest, "write", fail)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state_of(1))
        for _ in range(3):
            checkpoints.raise_if_failed()
        go.set()
        deadline = time.monotonic() + 60
        with pytest.raises(CheckpointFailed, match="Input/output error"):
            while time.monotonic() < deadline:
                checkpoints.raise_if_failed()
                time.sleep(0.01)
        checkpoints.raise_if_failed()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("last", ["save", "wait", "close"])
def test_a_failure_that_nobody_asked_for_is_raised_at_the_next_call(
    tmp_path, monkeypatch, last
):
    monkeypatch.setattr(manifest, "write", lambda folder, version: 1 / 0)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, {})
    with pytest.raises(CheckpointFailed, match="ZeroDivisionError"):
        if last == "save":
            checkpoints.save(2, {})
        else:
            getattr(checkpoints, last)()
    checkpoints.close()


def test_what_cannot_be_deleted_is_deleted_later(tmp_path, monkeypatch):
    rename = Path.rename

    def fail(path, target):
        if str(target).endswith(".deleting"):
            raise PermissionError(errno.EACCES, "Permission denied")
        return rename(path, target)

    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(1, state_of(1))
        with monkeypatch.context() as patch:
            patch.setattr(Path, "rename", fail)
            checkpoints.save(2, state_of(2), blocking=True)
        assert checkpoints.steps() == [1, 2]
        checkpoints.save(3, state_of(3), blocking=True)
        assert checkpoints.steps() == [3]


@pytest.fixture
def calls(tmp_path, monkeypatch):
    """Records what reaches the disk from now on, in order: ("flush", name), ("rename",
    new name) and ("remove", name), names relative to the folder of checkpoints."""
    made: list[tuple[str, str]] = []
    fsync, rename, rmtree = os.fsync, os.rename, shutil.rmtree

    def note(what: str, path: str | os.PathLike[str]) -> None:
        made.append((what, Path(path).relative_to(tmp_path).as_posix()))

    def note_flush(descriptor: int) -> None:
        number = os.fstat(descriptor).st_ino
        paths = (tmp_path, *tmp_path.rglob("*"))
        note("flush", next(p for p in paths if p.stat().st_ino == number))
        fsync(descriptor)

    def note_rename(source, target, **options) -> None:
        note("rename", target)
        rename(source, target, **options)

    def note_remove(path, *arguments, **options) -> None:
        note("remove", path)
        rmtree(path, *arguments, **options)

    monkeypatch.setattr(os, "fsync", note_flush)
    monkeypatch.setattr(os, "rename", note_rename)
    monkeypatch.setattr(shutil, "rmtree", note_remove)
    return made


def test_flushed_named_flushed_and_only_then_are_older_ones_deleted(tmp_path, calls):
    """A power failure at any line leaves a whole checkpoint under its name."""
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(1, state_of(1), blocking=True)
        calls.clear()
        checkpoints.save(2, state_of(2), blocking=True)
    new, old = "step_00000002", "step_00000001"
    named = calls.index(("rename", new))
    flushed = [name for what, name in calls[:named] if what == "flush"]
    found = {True: [], False: []}
    for path in (tmp_path / new).rglob("*"):
        name = path.relative_to(tmp_path / new).as_posix()
        found[path.is_dir()].append(f"{new}.writing/{name}")
    folders, files = (found[True], found[False])
    assert len(files) > 5
    # Files, then the manifest that names them, then the folders that hold them all.
    sealed = flushed.index(f"{new}.writing/manifest.json")
    assert set(files) <= set(flushed[: sealed + 1])
    assert set(folders) <= set(flushed[sealed:])
    assert flushed[-1] == f"{new}.writing"
    assert calls[named + 1 :] == [
        ("flush", "."),
        ("rename", f"{old}.deleting"),
        ("remove", f"{old}.deleting"),
    ]


def test_a_damaged_one_is_set_aside_on_the_disk_as_well(tmp_path, calls):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state_of(1), blocking=True)
        (tmp_path / "step_00000001" / "record.json").unlink()
        calls.clear()
        checkpoints.set_aside_damaged()
    assert calls == [("rename", "step_00000001.damaged"), ("flush", ".")]


# The disk is full in the middle of the arrays: 4 MB fit, or 1 MB into one file, and
# step 2 has 16 in arrays of 2.
FULL = """
import os, resource, sys
from pathlib import Path
import jax.numpy as jnp, numpy as np
from sparsejax.checkpoints.agreement import CheckpointFailed
from sparsejax.checkpoints.checkpoint import Checkpoints

folder = Path(sys.argv[1]) / "checkpoints"
if sys.argv[2] == "file size":
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
else:
    status = os.statvfs(folder.parent)
    assert status.f_blocks * status.f_frsize == 4 << 20

def state_of(step, size):
    numbers = np.random.default_rng(step).integers(0, 1 << 31, size // 4, np.int32)
    return {f"w{i}": jnp.asarray(part) for i, part in enumerate(np.split(numbers, 8))}

with Checkpoints(folder, keep=2) as checkpoints:
    checkpoints.save(1, state_of(1, 1 << 18), blocking=True)
    for step in (2, 3):
        checkpoints.save(step, state_of(step, 16 << 20))
        try:
            checkpoints.wait()
        except CheckpointFailed as error:
            print(error)
        assert os.listdir(folder) == ["step_00000001"], os.listdir(folder)
    checkpoints.save(4, state_of(4, 1 << 18))
with Checkpoints(folder) as checkpoints:
    assert checkpoints.set_aside_damaged() == []
    for step in (1, 4):
        template = state_of(step, 1 << 18)
        restored = checkpoints.restore(step, template=template).state
        for name, array in template.items():
            np.testing.assert_array_equal(restored[name], array)
print("nothing lost")
"""

# A mount of its own, which ends with the process.
MOUNTED = ["unshare", "--map-root-user", "--mount", "sh", "-c"]
MOUNT = 'mount -t tmpfs -o size=4m tmpfs "$0" && exec "$@"'


def can_mount(folder: Path) -> bool:
    try:
        done = subprocess.run([*MOUNTED, MOUNT, str(folder), "true"], check=False)
    except FileNotFoundError:  # no such command on this system
        return False
    return done.returncode == 0


@pytest.mark.parametrize("limit", ["disk", "file size"])
def test_a_full_disk_costs_the_save_and_nothing_else(tmp_path, limit):
    command = [sys.executable, "-c", FULL, str(tmp_path), limit]
    if limit == "disk":
        if can_mount(tmp_path):
            command = [*MOUNTED, MOUNT, str(tmp_path), *command]
        else:  # the other limit gives the same errors from the same calls
            command[-1] = "file size"
    done = subprocess.run(
        command,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        cwd=Path(checkpoint.__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=120,
    )
    lines = done.stdout.splitlines()
    assert len(lines) == 3, done.stderr
    folder = tmp_path / "checkpoints"
    for step, line in zip((2, 3), lines[:2], strict=True):
        assert line.startswith(f"the checkpoint of step {step} in {folder} could not")
        assert ("No space left" if command[-1] == "disk" else "too large") in line
        assert f"the last good checkpoint is {folder / 'step_00000001'}; free" in line
    assert lines[2] == "nothing lost"
