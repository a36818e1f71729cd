"""Records written and read back; of whole runs in test_loop."""

import errno
import json
import os
import tempfile
from pathlib import Path

import pytest

from sparsejax.reports.records import (
    append_record,
    check_writable,
    records_until,
    write_whole,
)

KINDS = ["warm-up", "sparse"]


def test_of_the_records_those_up_to_a_step_are_left(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert records_until(path, 9, KINDS) == ""
    for step, phase in ((1, 0), (2, 0), (3, 1)):
        where = {"step": step, "phase": phase, "kind": KINDS[phase]}
        append_record(path, {"event": "step", "loss": 1.5} | where)
    with path.open("a") as file:
        file.write('{"event": "step", "step": 1, "ph')
    lines = path.read_text().splitlines(keepends=True)
    assert records_until(path, 2, KINDS) == "".join(lines[:2])
    assert records_until(path, 3, KINDS) == "".join(lines[:3])
    assert records_until(path, 3, KINDS[:1]) == "".join(lines[:2])
    assert json.loads(lines[2])["kind"] == "sparse"


def test_a_file_is_replaced_as_a_whole_or_not_at_all(tmp_path):
    path = tmp_path / "config.json"
    write_whole(path, "before")
    (tmp_path / "config.draft").mkdir()
    with pytest.raises(IsADirectoryError):
        write_whole(path, "after")
    assert path.read_text() == "before"
    (tmp_path / "config.draft").rmdir()
    write_whole(path, "after")
    assert [file.name for file in tmp_path.iterdir()] == ["config.json"]
    assert path.read_text() == "after"


def test_a_place_that_can_be_written_is_left_as_it_was(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    for folder in (
        tmp_path / "there",
        tmp_path / "new" / "run",
        Path("runs/a"),
        Path(),
    ):
        check_writable(folder)
    assert [path.name for path in tmp_path.rglob("*")] == ["there"]


@pytest.mark.parametrize(
    ("folder", "reason"),
    [
        ("file", "file cannot be written in (TMP/file: Not a directory)"),
        ("file/runs/a", "file/runs/a cannot be made (TMP/file: Not a directory)"),
        ("nowhere", "nowhere cannot be written in (TMP/nowhere: No such file or"),
        ("nowhere/run", "nowhere/run cannot be made (TMP/nowhere: No such file or"),
        ("n" * 300, f"{'n' * 300} cannot be made (TMP: File name too long)"),
    ],
    ids=["a file", "in a file", "a dangling link", "behind one", "too long"],
)
def test_a_place_that_cannot_be_written_is_named_with_the_reason(
    folder, reason, tmp_path
):
    (tmp_path / "file").write_text("")
    (tmp_path / "nowhere").symlink_to("absent")
    with pytest.raises(ValueError) as caught:
        check_writable(tmp_path / folder)
    expected = f"the run folder TMP/{reason}".replace("TMP", str(tmp_path))
    assert str(caught.value).startswith(expected)
    assert str(caught.value).endswith("; choose another, or make this one writable")


@pytest.mark.parametrize("code", [errno.EACCES, errno.ENOSPC, errno.EROFS])
def test_a_place_without_permission_or_space_is_named(code, tmp_path, monkeypatch):
    # A test may run as root, who may write anywhere.
    def refuse(**_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    with pytest.raises(ValueError, match=f"cannot be made .*: {os.strerror(code)}"):
        check_writable(tmp_path / "runs" / "a")
