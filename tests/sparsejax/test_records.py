"""Records written and read back; of whole runs in test_loop."""

import json

import pytest

from sparsejax.records import append_record, records_until, write_whole

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
