"""The process of a run replaces itself after phases on sparse tensor cores."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.runs import assert_ended_alike
from tests.support.micro_run import arguments_of, micro_config, read_records, write_text

ROOT = Path(__file__).parents[2]
TOLD = "the dense phase goes on in a new process"
# The measured peak is five GEMMs of size 2048, longer than the run.
PRETRAIN = """
import sys
from experiments import pretrain
from sparsejax.reports import metrics
peak = metrics.DensePeak(tflops=1.0, source="test")
metrics.dense_peak = lambda dtype: peak
pretrain.leave(pretrain.run(sys.argv[1:]))
"""
WITH_SPARSE_KERNELS = f"""
from sparsejax.reports import metrics
from tests.support.whole_runs import with_sparse_kernels
metrics.ffn_decisions = with_sparse_kernels(metrics.ffn_decisions)
{PRETRAIN}
"""


def start(
    program: str, arguments: list[str], environment: dict[str, str]
) -> subprocess.Popen[str]:
    settings = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        env=os.environ | settings | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def outputs_of(program: str, arguments: list[str], processes: int) -> list[str]:
    """Of each process of a run that ends well."""
    if processes == 1:
        started = [start(program, arguments, {})]
    else:
        with socket.socket() as unused:
            unused.bind(("localhost", 0))
            port = unused.getsockname()[1]
        together = {
            "JAX_COORDINATOR_ADDRESS": f"localhost:{port}",
            "JAX_NUM_PROCESSES": str(processes),
        }
        started = [
            start(
                program,
                [*arguments, "--distributed", "--heartbeat-seconds", "10"],
                together | {"JAX_PROCESS_ID": str(process)},
            )
            for process in range(processes)
        ]
    outputs = [process.communicate(timeout=240)[0] for process in started]
    for process, output in zip(started, outputs, strict=True):
        assert process.returncode == 0, output
    return outputs


@pytest.mark.parametrize("processes", [1, 2])
def test_a_run_resumes_in_a_new_process_after_its_sparse_phase(processes, tmp_path):
    arguments = arguments_of(
        micro_config(write_text(tmp_path), new_process_minutes=0.0)
    )
    here, anew = tmp_path / "here", tmp_path / "anew"
    undisturbed = outputs_of(
        PRETRAIN, [*arguments, "--run-folder", str(here)], processes
    )
    assert not any(TOLD in output for output in undisturbed)
    first, *others = outputs_of(
        WITH_SPARSE_KERNELS, [*arguments, "--run-folder", str(anew)], processes
    )
    assert first.count(TOLD) == 1
    assert f"step 9: continues from {anew}" in first.split(TOLD)[1]
    assert first.split(TOLD)[1].count("run folder:") == 1
    assert "SIGTERM" not in first
    assert not any(TOLD in output for output in others)
    steps = [r["step"] for r in read_records(anew) if r["event"] == "step"]
    assert steps == list(range(1, 13))
    assert_ended_alike(anew, here)
