"""The process of a run replaces itself after phases on sparse tensor cores."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.runs import (
    DISTRIBUTED,
    Process,
    assert_ended_alike,
    environments,
    start_pair,
)
from tests.support.micro_run import arguments_of, micro_config, read_records, write_text

ROOT = Path(__file__).parents[2]
TOLD = "the dense phase goes on in a new process"
# The measured peak is five GEMMs of size 2048, longer than the run.
WITH_SPARSE_KERNELS = """
import sys
from sparsejax.command import main
from sparsejax.reports import metrics
from tests.support.whole_runs import with_sparse_kernels
metrics.ffn_decisions = with_sparse_kernels(metrics.ffn_decisions)
peak = metrics.DensePeak(tflops=1.0, source="test")
metrics.dense_peak = lambda dtype: peak
main.leave(main.run(["train", *sys.argv[1:]]))
"""


def start(arguments: list[str], environment: dict[str, str]) -> subprocess.Popen[str]:
    settings = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, "-c", WITH_SPARSE_KERNELS, *arguments],
        env=os.environ | settings | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def started(processes: int, arguments: list[str], folder: Path) -> list[Process]:
    if processes == 1:
        return [Process(arguments, folder)]
    return start_pair(arguments, folder)


def outputs_of(arguments: list[str], processes: int) -> list[str]:
    """Returns the output of each process of a run, which has to end well.
    The processes are new ones, since they replace themselves by a command."""
    if processes == 1:
        new = [start(arguments, {})]
    else:
        new = [
            start([*arguments, *DISTRIBUTED], environment)
            for environment in environments(processes)
        ]
    outputs = [process.communicate(timeout=240)[0] for process in new]
    for process, output in zip(new, outputs, strict=True):
        assert process.returncode == 0, output
    return outputs


@pytest.mark.parametrize("processes", [1, 2])
def test_a_run_resumes_in_a_new_process_after_its_sparse_phase(processes, tmp_path):
    arguments = arguments_of(
        micro_config(write_text(tmp_path), new_process_minutes=0.0)
    )
    here, anew = tmp_path / "here", tmp_path / "anew"
    undisturbed = started(processes, [*arguments, "--run-folder", str(here)], here)
    for process in undisturbed:
        ended = process.wait()
        assert ended.status == 0 and TOLD not in ended.output, ended
    first, *others = outputs_of([*arguments, "--run-folder", str(anew)], processes)
    assert first.count(TOLD) == 1
    assert f"step 9: continues from {anew}" in first.split(TOLD)[1]
    assert first.split(TOLD)[1].count("run folder:") == 1
    assert "SIGTERM" not in first
    assert not any(TOLD in output for output in others)
    steps = [r["step"] for r in read_records(anew) if r["event"] == "step"]
    assert steps == list(range(1, 13))
    assert_ended_alike(anew, here)
