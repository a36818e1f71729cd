"""The record of GPU runs: what it holds, and when it is out of date."""

import json

import jax

from tests.support.gpu_record import append, kernel_hash, what_is_stale


def test_a_run_is_recorded_and_speaks_for_these_kernels(tmp_path):
    record = tmp_path / "gpu_tests.jsonl"
    assert "no recorded run" in what_is_stale(record)
    row = append({"passed": 5, "failed": 0}, record)
    assert json.loads(record.read_text()) == row
    assert row["kernels"] == kernel_hash()
    assert row["device"] == jax.devices()[0].device_kind
    assert what_is_stale(record) is None


def test_failures_and_other_kernels_are_told(tmp_path):
    record = tmp_path / "gpu_tests.jsonl"
    row = append({"passed": 5, "failed": 2}, record)
    assert "2 GPU tests failed" in what_is_stale(record)
    record.write_text(json.dumps(row | {"kernels": "others"}) + "\n")
    assert "have changed since the recorded run" in what_is_stale(record)


def test_any_change_of_a_kernel_changes_the_hash(tmp_path):
    (tmp_path / "a.py").write_text("x")
    first = kernel_hash(tmp_path)
    (tmp_path / "a.py").write_text("y")
    second = kernel_hash(tmp_path)
    (tmp_path / "a.py").rename(tmp_path / "b.py")
    renamed = kernel_hash(tmp_path)
    (tmp_path / "sm90").mkdir()
    (tmp_path / "b.py").rename(tmp_path / "sm90" / "b.py")
    moved = kernel_hash(tmp_path)
    (tmp_path / "sm90" / "b.py").write_text("z")
    assert len({first, second, renamed, moved, kernel_hash(tmp_path)}) == 5
