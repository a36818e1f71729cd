"""Checkpoints of a run of two processes: one folder, one answer, no endless waiting."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparsejax.checkpoints import checkpoint
from sparsejax.checkpoints.checkpoint import Checkpoints

START = """
import os, signal, sys, time
from pathlib import Path
import jax
process, port, folder = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
jax.distributed.initialize(
    coordinator_address=f"localhost:{port}",
    num_processes=2,
    process_id=process,
    heartbeat_timeout_seconds=10,
)
import jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from orbax.checkpoint._src.serialization import serialization
from sparsejax.checkpoints import agreement, checkpoint, manifest
from sparsejax.checkpoints.agreement import CheckpointFailed
from sparsejax.checkpoints.checkpoint import Checkpoints
from tests.sparsejax.checkpoints import test_checkpoint_processes
on_one_device = test_checkpoint_processes.state_of

assert (jax.process_count(), jax.device_count()) == (2, 4)
square = jax.make_mesh((2, 2), ("data", "model"))
line = jax.make_mesh((4,), ("all",))

def state_of(step, mesh=square, axes=("data", "model")):
    place = {name: NamedSharding(mesh, P()) for name in on_one_device(step)}
    place["w"] = NamedSharding(mesh, P(*axes))
    place["keys"] = NamedSharding(mesh, P(axes[0]))
    return jax.jit(lambda: on_one_device(step), out_shardings=place)()

def assert_same(found, expected):
    for name, array in expected.items():
        assert found[name].sharding == array.sharding, (name, found[name].sharding)
        shards = found[name].addressable_shards, array.addressable_shards
        for ours, theirs in zip(*shards, strict=True):
            assert ours.index == theirs.index
            assert str(ours.data) == str(theirs.data), name
"""


def run_processes(script: str, folder: Path) -> list[subprocess.CompletedProcess]:
    """Runs the script in two processes of two devices each, until both have ended."""
    with socket.socket() as unused:
        unused.bind(("localhost", 0))
        port = unused.getsockname()[1]
    running = [
        subprocess.Popen(
            [
                sys.executable,
                "-c",
                START + script,
                str(process),
                str(port),
                str(folder),
            ],
            env={
                **os.environ,
                "JAX_PLATFORMS": "cpu",
                "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
            },
            cwd=Path(checkpoint.__file__).parents[2],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for process in (0, 1)
    ]
    try:
        ended = [process.communicate(timeout=150) for process in running]
    finally:
        for process in running:
            process.kill()
    return [
        subprocess.CompletedProcess(process.args, process.returncode, *output)
        for process, output in zip(running, ended, strict=True)
    ]


def printed(done: list[subprocess.CompletedProcess]) -> list[list[str]]:
    """Returns the output of each process; both have to end well."""
    for process in done:
        assert process.returncode == 0, process.stderr
    return [
        [line for line in process.stdout.splitlines() if not line.startswith("[Gloo]")]
        for process in done
    ]


def state_of(step: int) -> dict[str, jax.Array]:
    return {
        "w": jnp.arange(64.0).reshape(8, 8) + step,
        "b": jnp.arange(3, dtype=jnp.bfloat16) + step,
        "step": jnp.int32(step),
        "keys": jax.random.split(jax.random.key(step), 4),
        "key": jax.random.key(step + 1),
        "none": jnp.zeros((0, 4)),
    }


def assert_restores_in_one_process(folder: Path, step: int) -> None:
    with Checkpoints(folder) as checkpoints:
        assert checkpoints.set_aside_damaged() == []
        restored = checkpoints.restore(template=state_of(0))
    assert restored.step == step
    for name, array in state_of(step).items():
        found = restored.state[name]
        if name.startswith("key"):
            found, array = jax.random.key_data(found), jax.random.key_data(array)
        assert found.dtype == array.dtype
        assert np.asarray(found).tobytes() == np.asarray(array).tobytes(), name


LIFE = """
checkpoints = Checkpoints(folder, keep=2, keep_every=4)
assert checkpoints.latest_step() is None
for step in range(1, 9):
    checkpoints.save(
        step, state_of(step), metadata={"of": process}, permanent=step == 1
    )
checkpoints.wait()
assert (folder / "step_00000008" / "manifest.json").is_file()
assert checkpoints.last_good() == folder / "step_00000008"
print(checkpoints.steps(), checkpoints.metadata(), checkpoints.path(4).name)
of_one = Checkpoints(folder.parent / "of one")
assert of_one.set_aside_damaged() == []
for mesh, axes in (
    (square, ("data", "model")), (line, ("all",)), (line, (None, "all"))
):
    expected = state_of(8, mesh, axes)
    assert_same(checkpoints.restore(template=expected).state, expected)
    assert_same(of_one.restore(template=expected).state, expected)
    earlier = checkpoints.restore(4, template=expected).state
    assert_same(earlier, state_of(4, mesh, axes))
of_one.close()

def refused(call):
    try:
        call()
    except ValueError as error:
        print(str(error).replace(str(folder), "FOLDER"))

refused(lambda: checkpoints.save(7, state_of(7)))
refused(lambda: checkpoints.path(5))
refused(lambda: checkpoints.restore(template={}))

# Both see the damage only through process 0.
if process == 0:
    for step in (7, 8):
        (folder / f"step_0000000{step}" / "record.json").write_text("{}")
for damaged in checkpoints.set_aside_damaged():
    print(damaged.step, damaged.path.name, damaged.reason)
print(checkpoints.latest_step())
checkpoints.save(7, state_of(7), blocking=True)
checkpoints.close()
"""


def test_two_processes_save_and_restore_as_one(tmp_path):
    with Checkpoints(tmp_path / "of one") as checkpoints:
        checkpoints.save(8, state_of(8))
    folder = tmp_path / "of two"
    first, second = printed(run_processes(LIFE, folder))
    assert first == second
    # The records differ in the step alone.
    size = (folder / "step_00000004" / "record.json").stat().st_size
    assert first == [
        "[1, 4, 7, 8] {'of': 0} step_00000004",
        "step=7 is below step 8, the newest checkpoint in FOLDER, and would not be the "
        "one that a resume takes; continue from step 8 or use another folder",
        "there is no checkpoint of step=5 in FOLDER; there are [1, 4, 7, 8]",
        "FOLDER/step_00000008 does not fit the template: at state['b'] the checkpoint "
        "has bfloat16 (3,), the template nothing; build the template from the "
        "settings that the run was saved with",
        f"8 step_00000008.damaged record.json has 2 bytes instead of {size}",
        f"7 step_00000007.damaged record.json has 2 bytes instead of {size}",
        "4",
    ]
    names = sorted(path.name for path in folder.iterdir())
    assert [name for name in names if "damaged" not in name] == [
        "step_00000001",
        "step_00000004",
        "step_00000007",
    ]
    assert_restores_in_one_process(folder, 7)


FAILURES = """
def fail(*arguments, **options):
    raise OSError(28, "No space left on device")

async def fail_later(*arguments, **options):
    fail()

def told(call):
    start = time.monotonic()
    try:
        call()
    except OSError as error:
        assert time.monotonic() - start < 60  # a limit of orbax is 300, ours 1200
        kind = type(error).__name__
        print(kind, str(error).replace(str(folder), "FOLDER").split(" (")[-1])

checkpoints = Checkpoints(folder)
checkpoints.save(1, state_of(1), blocking=True)

write = serialization.async_serialize_from_host
for failing in (0, 1):
    if process == failing:
        serialization.async_serialize_from_host = fail_later
    checkpoints.save(2, state_of(2))
    told(checkpoints.wait)
    serialization.async_serialize_from_host = write
    assert checkpoints.steps() == [1]
    checkpoints.wait()

whole, manifest.write = manifest.write, fail
told(lambda: checkpoints.save(2, state_of(2), blocking=True))
manifest.write = whole
begin, Path.mkdir = Path.mkdir, fail
told(lambda: checkpoints.save(2, state_of(2), blocking=True))
Path.mkdir = begin
if process == 0:
    assert os.listdir(folder) == ["step_00000001"], os.listdir(folder)

checkpoints.save(2, state_of(2), blocking=True)
# One of them is late, by more than it may.
agreement.TIMEOUT_SECONDS = 2
if process == 1:
    time.sleep(4)
told(checkpoints.latest_step)
"""


def test_a_failure_of_one_process_is_told_by_both(tmp_path):
    first, second = printed(run_processes(FAILURES, tmp_path))
    space = "OSError: [Errno 28] No space left on device"
    tail = "); the last good checkpoint is FOLDER/step_00000001; free space or repair"
    for lines, process in ((first, 0), (second, 1)):
        assert len(lines) == 5, lines
        for failing, line in enumerate(lines[:2]):
            cause = space if failing == process else f"process {failing}: {space}"
            assert line.startswith(f"CheckpointFailed {cause}{tail}"), line
        # The manifest and the folder are the business of process 0.
        for line in lines[2:4]:
            assert line.startswith("CheckpointFailed ")
            assert f"{space}{tail}" in line
        assert lines[4].startswith("TimeoutError "), lines[4]
    assert_restores_in_one_process(tmp_path, 2)


KILLED = """
write = serialization.async_serialize_from_host
async def die(*arguments, **options):
    if process == VICTIM:
        os.kill(os.getpid(), signal.SIGKILL)
    return await write(*arguments, **options)

checkpoints = Checkpoints(folder)
checkpoints.save(1, state_of(1), blocking=True)
serialization.async_serialize_from_host = die
checkpoints.save(2, state_of(2))
try:
    checkpoints.wait()
except CheckpointFailed as error:
    print(error)
    os._exit(1)
"""


@pytest.mark.parametrize("victim", [0, 1])
def test_a_process_killed_in_a_save_ends_the_other_one_too(tmp_path, victim):
    script = KILLED.replace("VICTIM", str(victim))
    # Its limit is far below agreement.TIMEOUT_SECONDS.
    done = run_processes(script, tmp_path)
    assert done[victim].returncode == -signal.SIGKILL
    # Told by us, or ended by the coordinator of jax.distributed.
    assert done[1 - victim].returncode in (1, -signal.SIGABRT), done[1 - victim].stderr
    assert Checkpoints(tmp_path).steps() == [1]
    assert_restores_in_one_process(tmp_path, 1)
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(2, state_of(2))
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000002"]
