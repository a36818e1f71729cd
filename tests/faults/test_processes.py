"""Runs of two processes: one is killed or told to stop, and the run is resumed."""

import signal
from pathlib import Path

import numpy as np
import pytest

from sparsejax.checkpoints.checkpoint import Checkpoints
from tests.faults.runs import assert_ended_alike, finish, has_trained, start_pair
from tests.support.devices.xla_flags import QUICK_COMPILATION
from tests.support.micro_run import (
    arguments_of,
    micro_config,
    read_records,
    write_text,
)

TWO_DEVICES = {
    "XLA_FLAGS": f"{QUICK_COMPILATION} --xla_force_host_platform_device_count=2"
}
"""For one process that has as many devices as two."""


@pytest.fixture(scope="module")
def command(tmp_path_factory) -> list[str]:
    text = write_text(tmp_path_factory.mktemp("text"))
    return arguments_of(micro_config(text, steps=40, eval_every=0, checkpoint_every=4))


@pytest.fixture(scope="module")
def undisturbed(command, tmp_path_factory) -> Path:
    """The folder of a run of two processes."""
    folder = tmp_path_factory.mktemp("pair") / "run"
    for process in start_pair([*command, "--run-folder", str(folder)], folder):
        ended = process.wait()
        assert ended.status == 0, ended
    return folder


def losses(folder: Path) -> tuple[list[int], list[float]]:
    records = [r for r in read_records(folder) if r["event"] in ("step", "validation")]
    return [r["step"] for r in records], [r["loss"] for r in records]


def assert_same_curve(ours: Path, theirs: Path) -> None:
    (steps, found), (expected_steps, expected) = losses(ours), losses(theirs)
    assert steps == expected_steps
    # Two devices give the same sums, but XLA may fuse the program of two processes
    # differently: float32 rounding, carried through 40 steps.
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_two_processes_train_as_one_with_their_devices(command, undisturbed, tmp_path):
    folder = tmp_path / "run"
    finish([*command, "--run-folder", str(folder)], folder, environment=TWO_DEVICES)
    assert_same_curve(folder, undisturbed)


def test_a_lost_process_ends_the_other_and_both_resume_to_the_same_bits(
    command, undisturbed, tmp_path
):
    folder = tmp_path / "run"
    arguments = [*command, "--run-folder", str(folder)]
    for victim, step in ((1, 10), (0, 24)):
        pair = start_pair(arguments, folder)
        pair[victim].wait_until(has_trained(folder, step))
        pair[victim].kill()
        assert pair[victim].wait().status == -signal.SIGKILL
        ended = pair[1 - victim].wait(seconds=60)
        good = Checkpoints(folder / "checkpoints").last_good()
        told = (
            f"ProcessLost: process {1 - victim} of 2 cannot go on at step "
            in ended.errors
            and f"The last good checkpoint is {good}" in ended.errors
            and f"start all of them anew with --resume {folder}" in ended.errors
        )
        # With process 0 goes the coordinator, of which JAX may be the first to tell.
        told |= victim == 0 and "another task died" in ended.errors
        assert told, ended
        assert ended.status == 1 or (victim, ended.status) == (0, -signal.SIGABRT)
        arguments = ["--resume", str(folder)]

    for process in start_pair(arguments, folder):
        ended = process.wait()
        assert ended.status == 0, ended
    assert_ended_alike(folder, undisturbed)


def test_a_pair_that_one_sigterm_stopped_goes_on_as_one_process(
    command, undisturbed, tmp_path
):
    folder = tmp_path / "run"
    pair = start_pair([*command, "--run-folder", str(folder)], folder)
    pair[1].wait_until(has_trained(folder, 18))
    pair[1].terminate()
    first, second = (process.wait() for process in pair)
    assert first.status == second.status == 0, (first, second)
    saved = Checkpoints(folder / "checkpoints").path()
    assert f"stopped by SIGTERM or Ctrl-C; go on with --resume {folder}" in first.output
    assert f"last good checkpoint: {saved}" in first.output
    step = losses(folder)[0][-1]
    assert 18 <= step < 40 and saved.name == f"step_{step:08d}"

    finish(["--resume", str(folder)], folder, environment=TWO_DEVICES)
    assert_same_curve(folder, undisturbed)
