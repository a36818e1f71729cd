"""The GEMMs of the printed plan: those of experts."""

import pytest

from pallas_kernels import tuning
from pallas_kernels.device import CPU
from tests.support import hopper
from tests.support.commands import run_train

pytestmark = pytest.mark.usefixtures("quick")

SLOWER = "a GEMM by expert on xla is a loop of dense ones: steps with it were slower"
UNTIMED = "kernels of experts that nobody timed at this size on this GPU"


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_a_gpu_without_a_kernel_for_experts_is_told(platform, capsys, monkeypatch):
    device = hopper.A100 if platform == "gpu" else CPU
    hopper.see_device(monkeypatch, device)
    for recipe, said in (("paper", platform == "gpu"), ("default", False)):
        assert run_train(["--recipe", recipe, "--dry-run"]) == 0
        assert (SLOWER in capsys.readouterr().out) == said
    hopper.pretend(monkeypatch)
    paper = "--preset llama-1b --recipe paper --mesh.data 1 --dry-run"
    assert run_train(paper.split()) == 0
    shown = capsys.readouterr().out
    assert "2:4 activation of 4 experts on the sparse tensor cores" in shown
    dense = "6  dW2 = A^T dY    mosaic_sm90: dense GEMM of each of 4 experts on the"
    assert dense in shown
    assert SLOWER not in shown and UNTIMED not in shown
    # They run where nobody timed them, too.
    monkeypatch.setattr(tuning, "entries", lambda kind: {})
    assert run_train(paper.split()) == 0
    shown = capsys.readouterr().out
    assert "2:4 activation of 4 experts on the sparse tensor cores" in shown
    assert SLOWER not in shown and UNTIMED in shown


def test_what_is_dense_inside_an_expert_is_told_likewise(capsys, monkeypatch):
    inside = (
        "--recipe paper --phases.activations 128:4:16 --phases.skip-blocks "
        "--mesh.data 1 --preset llama-1b --dry-run"
    )
    hopper.see_device(monkeypatch, hopper.A100)
    assert run_train(inside.split()) == 0
    shown = capsys.readouterr().out
    assert "2  Y = A W2        xla: grouped GEMM over 4 experts, a loop over" in shown
    assert SLOWER in shown and UNTIMED not in shown
    hopper.see_device(monkeypatch, hopper.H200)
    assert run_train(inside.split()) == 0
    shown = capsys.readouterr().out
    rows = "2  Y = A W2        mosaic_sm90: dense rows by the weights of 4 experts on"
    assert rows in shown
    assert UNTIMED in shown and SLOWER not in shown
