"""Runs on damaged checkpoints and on full disks."""

import os
import resource
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import pytest

from sparsejax.config import ModelConfig
from tests.faults.runs import Process, assert_ended_alike, finish
from tests.support.micro_run import arguments_of, micro_config, write_text


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """The folder of a run that nothing disturbed."""
    text = write_text(tmp_path_factory.mktemp("text"))
    folder = tmp_path_factory.mktemp("run") / "run"
    model = ModelConfig(
        vocab_size=256, d_model=64, layers=1, heads=2, kv_heads=1, d_hidden=64
    )
    command = arguments_of(micro_config(text, model=model, eval_every=0))
    finish([*command, "--run-folder", str(folder)], folder)
    return folder


def flip_a_bit(file: Path) -> str:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    return "does not fit its checksum"


def cut(file: Path) -> str:
    size = file.stat().st_size
    os.truncate(file, size - 1)
    return f"has {size - 1} bytes instead of {size}"


@pytest.mark.parametrize("damage", [flip_a_bit, cut])
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(
    damage, finished, tmp_path
):
    folder = shutil.copytree(finished, tmp_path / "run")
    checkpoints = folder / "checkpoints"
    newest = checkpoints / "step_00000012"
    arrays = max(newest.rglob("d/*"), key=lambda file: file.stat().st_size)
    reason = f"{arrays.relative_to(newest)} {damage(arrays)}"
    ended = finish(["--resume", str(folder)], folder)
    lines = ended.output.splitlines()
    assert f"step 10: continues from {checkpoints / 'step_00000010'}" in lines
    assert (
        f"{newest}.damaged is damaged ({reason}) and set aside; the run goes on from "
        f"step 10"
    ) in lines
    assert_ended_alike(folder, finished)


# A full disk.


@pytest.fixture
def begun(finished, tmp_path) -> Path:
    """A run with one checkpoint, of step 3, that has yet to do the rest."""
    folder = shutil.copytree(finished, tmp_path / "begun" / "run")
    (folder / "model.safetensors").unlink()
    for path in (folder / "checkpoints").iterdir():
        if path.name != "step_00000003":
            shutil.rmtree(path)
    return folder


@pytest.mark.parametrize("limit", ["disk", "file size"])
def test_a_full_disk_ends_the_run_with_its_last_checkpoint_intact(
    limit, begun, finished, tmp_path
):
    with ExitStack() as opened:
        disk = opened.enter_context(Disk.at(tmp_path / "disk"))
        if limit == "disk" and disk.is_mounted:
            disk.copy(begun)
            disk.resize(disk.used() + (64 << 10))
            enter, inside = disk.enter, disk.seen_from_outside()
            fill = enter
        else:  # a limit that gives the same errors from the same calls
            inside = tmp_path / "disk"
            shutil.copytree(begun, inside / "run")
            # Less than the embedding, in however many files the arrays are written;
            # more than the process has to say.
            fill, enter = partial(_limit_files, 48 << 10), None
        folder = tmp_path / "disk" / "run"
        good = folder / "checkpoints" / "step_00000003"

        ended = Process(["--resume", str(folder)], tmp_path / "full", prepare=fill)
        ended = ended.wait()
        assert ended.status == 1, ended
        # The writer's threads may say something after us.
        lines = ended.errors.splitlines()
        [line] = [line for line in lines if line.startswith("CheckpointFailed: ")]
        assert line.startswith("CheckpointFailed: the checkpoint of step 4 in ")
        assert ("No space left" if fill is enter else "too large") in line
        assert f"the last good checkpoint is {good}; free space" in line
        checkpoints = inside / "run" / "checkpoints"
        assert [path.name for path in checkpoints.iterdir()] == ["step_00000003"]

        if fill is enter:
            disk.resize(16 << 20)
        arguments = ["--resume", str(folder)]
        ended = finish(arguments, tmp_path / "free", prepare=enter)
        assert f"step 3: continues from {good}" in ended.output.splitlines()
        assert "damaged" not in ended.output
        assert_ended_alike(inside / "run", finished)


def test_weights_that_cannot_be_written_end_it_with_one_line(finished, tmp_path):
    folder = shutil.copytree(finished, tmp_path / "run")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").mkdir()
    ended = Process(["--resume", str(folder)], folder).wait()
    assert ended.status == 1
    good = folder / "checkpoints" / "step_00000012"
    assert ended.errors.startswith(
        f"OSError: the run ended well and its last good checkpoint is {good}, but its "
        f"results could not be written ({folder / 'model.safetensors'}: "
    )
    assert ended.errors.endswith(f"then --resume {folder}\n")
    assert ended.errors.count("\n") == 1


class Disk:
    """A file system at `folder`, which only the processes see that `enter` it."""

    def __init__(self, folder: Path, shell: subprocess.Popen[str]) -> None:
        self._folder = folder
        self._shell = shell
        self.is_mounted = self._answer() == "mounted"
        self.enter = partial(_enter, shell.pid)

    @staticmethod
    @contextmanager
    def at(folder: Path) -> Iterator["Disk"]:
        folder.mkdir()
        mount = 'mount -t tmpfs tmpfs "$0" && echo mounted && exec sh'
        command = ["unshare", "--map-root-user", "--mount", "sh", "-c", mount]
        if shutil.which("unshare") is None:
            command = ["false"]
        with subprocess.Popen(
            [*command, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as shell:
            yield Disk(folder, shell)

    def copy(self, folder: Path) -> None:
        self._tell(f"cp -r '{folder}' '{self._folder}'")

    def resize(self, size: int) -> None:
        self._tell(f"mount -o remount,size={size} '{self._folder}'")

    def used(self) -> int:
        status = os.statvfs(self.seen_from_outside())
        return (status.f_blocks - status.f_bfree) * status.f_frsize

    def seen_from_outside(self) -> Path:
        return Path(f"/proc/{self._shell.pid}/root{self._folder}")

    def _tell(self, command: str) -> None:
        assert self._shell.stdin is not None
        self._shell.stdin.write(f"{command}; echo $?\n")
        self._shell.stdin.flush()
        assert self._answer() == "0"

    def _answer(self) -> str:
        assert self._shell.stdout is not None
        return self._shell.stdout.readline().strip()


def _enter(process: int) -> None:
    for kind, flag in (("user", os.CLONE_NEWUSER), ("mnt", os.CLONE_NEWNS)):
        with open(f"/proc/{process}/ns/{kind}") as namespace:
            os.setns(namespace.fileno(), flag)


def _limit_files(size: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
