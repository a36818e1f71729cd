"""The record of GPU runs: what it holds, and when it is out of date."""

import json
from argparse import Namespace

import jax
import pytest

from tests.support.devices.gpu_record import (
    append,
    files_with_gpu_tests,
    is_of_whole_files,
    kernel_hash,
    what_is_stale,
)


@pytest.fixture
def record(tmp_path):
    return tmp_path / "gpu_tests.jsonl"


def test_a_run_is_recorded_and_speaks_for_these_kernels(record):
    assert "no recorded run" in what_is_stale(record)
    row = append(["a.py", "a.py", "b.py"], [], record)
    assert json.loads(record.read_text()) == row
    assert row["kernels"] == kernel_hash()
    assert row["device"] == jax.devices()[0].device_kind
    assert (row["passed"], row["failed"]) == (3, 0)
    assert what_is_stale(record, ["a.py", "b.py"]) is None


def test_failures_and_other_kernels_are_told(record):
    row = append(["a.py"], ["a.py", "b.py"], record)
    assert "2 GPU tests failed" in what_is_stale(record, ["a.py", "b.py"])
    record.write_text(json.dumps(row | {"kernels": "others"}) + "\n")
    assert "have changed since the recorded run" in what_is_stale(record)


def test_runs_of_some_files_count_together_on_one_kind_of_gpu(record):
    append(["a.py"], ["b.py"], record)
    assert "1 GPU tests failed" in what_is_stale(record, ["a.py", "b.py", "c.py"])
    row = append(["b.py"], [], record)
    stale = what_is_stale(record, ["a.py", "b.py", "c.py"])
    assert "not run 1 of the files" in stale and "c.py" in stale
    assert what_is_stale(record, ["a.py", "b.py"]) is None
    with record.open("a") as file:
        file.write(json.dumps(row | {"device": "another"}) + "\n")
    assert "a.py" in what_is_stale(record, ["a.py", "b.py"])


@pytest.mark.parametrize(
    ("args", "options", "whole"),
    [
        (["tests"], {}, True),
        (["tests/a.py::test"], {}, False),
        (["tests"], {"keyword": "some"}, False),
        (["tests"], {"maxfail": 1}, False),
    ],
)
def test_a_run_that_leaves_tests_of_a_file_out_is_none(args, options, whole):
    option = Namespace(**({"keyword": "", "maxfail": 0} | options))
    assert is_of_whole_files(Namespace(args=args, option=option)) == whole


def test_files_with_gpu_tests_are_found(tmp_path):
    (tmp_path / "tests" / "inner").mkdir(parents=True)
    (tmp_path / "tests" / "inner" / "test_a.py").write_text("@pytest.mark." + "gpu")
    (tmp_path / "tests" / "test_b.py").write_text("@pytest.mark.other")
    assert files_with_gpu_tests(tmp_path / "tests") == ["tests/inner/test_a.py"]
    assert len(files_with_gpu_tests()) > 10


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
