"""The GEMMs of the printed plan: those of experts, and those of 8-bit floats."""

import pytest

from pallas_kernels import tuning
from pallas_kernels.device import CPU, Device
from sparsejax.config.presets import PRESETS
from sparsejax.cost_model import parameter_count
from tests.support.commands import run_train
from tests.support.devices import accelerators, hopper

pytestmark = pytest.mark.usefixtures("quick")

UNTIMED = "GEMMs by expert that nobody timed at this size on this device"


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_a_gpu_without_a_kernel_for_experts_is_told(platform, capsys, monkeypatch):
    device = hopper.A100 if platform == "gpu" else CPU
    hopper.see_device(monkeypatch, device)
    wide = ["--preset", "llama-1b", "--mesh.data", "1"]
    for recipe, said in (("paper", platform == "gpu"), ("two-four", False)):
        assert run_train(["--recipe", recipe, "--dry-run", *wide]) == 0
        assert (UNTIMED in capsys.readouterr().out) == said
    hopper.pretend(monkeypatch)
    paper = "--preset llama-1b --recipe paper --mesh.data 1 --dry-run"
    assert run_train(paper.split()) == 0
    shown = capsys.readouterr().out
    assert "2:4 activation of 4 experts on the sparse tensor cores" in shown
    dense = "6  dW2 = A^T dY    mosaic_sm90: dense GEMM of each of 4 experts on the"
    assert dense in shown
    assert UNTIMED not in shown
    # They run where nobody timed them, too.
    monkeypatch.setattr(tuning, "entries", lambda kind: {})
    assert run_train(paper.split()) == 0
    shown = capsys.readouterr().out
    assert "2:4 activation of 4 experts on the sparse tensor cores" in shown
    assert UNTIMED in shown


def test_what_is_dense_inside_an_expert_is_told_likewise(capsys, monkeypatch):
    inside = (
        "--recipe paper --phases.activations 128:4:16 --phases.skip-blocks "
        "--mesh.data 1 --preset llama-1b --dry-run"
    )

    def shown_on(device: Device, *packages: str) -> str:
        hopper.see_device(monkeypatch, device)
        accelerators.installed(monkeypatch, *packages)
        assert run_train(inside.split()) == 0
        shown = capsys.readouterr().out
        assert UNTIMED in shown
        return shown

    shown = shown_on(hopper.A100)
    assert "2  Y = A W2        xla: grouped GEMM over 4 experts, a loop over" in shown
    assert "tokamax: needs the package tokamax; install sparsejax[tokamax]" in shown
    shown = shown_on(hopper.A100, "tokamax", *accelerators.TRITON)
    assert "2  Y = A W2        tokamax: tokamax's ragged dot (triton) over 4" in shown
    assert "why: tokamax: the first that can run it; mosaic_sm90: needs a" in shown
    shown = shown_on(accelerators.B200, "tokamax")
    assert "2  Y = A W2        tokamax: tokamax's ragged dot (mosaic) over 4" in shown
    assert "6  dW2 = A^T dY    xla: grouped GEMM over 4 experts, a loop over" in shown
    assert "by Triton alone, which is missing; install sparsejax[tokamax-gpu]" in shown
    shown = shown_on(hopper.H200)
    rows = "2  Y = A W2        mosaic_sm90: dense rows by the weights of 4 experts on"
    assert rows in shown


def planned(capsys, *arguments: str) -> str:
    assert run_train([*arguments, "--dry-run"]) == 0
    return capsys.readouterr().out


def made_ready(shown: str) -> str:
    """The GiB of weights that are made ready once per step, dense."""
    (row,) = (line for line in shown.splitlines() if line.startswith("│ packed "))
    return row.split("│")[2].strip()


def test_the_plan_says_which_gemms_are_of_8_bit_floats(capsys):
    of_model = "--preset", "llama-1b", "--recipe", "dense", "--model.precision", "fp8"
    shown = planned(capsys, *of_model, "--device", "NVIDIA H200")
    assert "dense GEMM of 8-bit floats, e5m2 x e4m3fn" in shown
    assert "attention's four weights, dense phase: GEMMs of 8-bit floats" in shown
    assert "bfloat16 for those of weights" in shown
    plain = planned(capsys, *of_model[:-2], "--device", "NVIDIA H200")
    assert "8-bit" not in plain and "attention's four weights" not in plain
    ready = float(made_ready(shown)), float(made_ready(plain))
    model = PRESETS["llama-1b"]().model
    count = parameter_count(model)
    # 8-bit floats in two orders, or bfloat16: two bytes of each weight in both.
    read = 2 * (count.attention + count.ffn + count.head) / 2**30
    assert ready == pytest.approx((read, read), 0.01)
    a100 = planned(capsys, *of_model, "--device", "NVIDIA A100-SXM4-80GB")
    assert "A100-SXM4-80GB has no tensor cores for 8-bit floats" in a100


def test_a_phase_s_precision_is_that_of_its_memory_and_communication(tmp_path, capsys):
    """8-bit floats in the only phase are 8-bit floats of the whole run."""
    schedule = tmp_path / "schedule.toml"
    schedule.write_text('[[phase]]\nname = "eight"\nprecision = "fp8"\n')

    def planned(*arguments: str) -> list[str]:
        there = ["--device", "NVIDIA H200", "--devices", "4", "--mesh.fsdp", "4"]
        of_model = ["--preset", "llama-1b", *there, "--dry-run", *arguments]
        assert run_train(of_model) == 0
        shown = capsys.readouterr().out
        return shown[shown.index("memory, GiB") :].splitlines()

    of_phase = planned("--schedule", str(schedule))
    of_run = planned("--recipe", "dense", "--model.precision", "fp8")
    of_none = planned("--recipe", "dense")
    sent = lambda lines: next(line for line in lines if "gathered weights" in line)
    assert sent(of_phase) == sent(of_run) != sent(of_none)


def test_the_product_of_a_router_of_8_bit_floats_is_told(capsys, monkeypatch):
    hopper.pretend(monkeypatch)
    rounded = "--recipe experts --preset llama-1b --mesh.data 1 --dry-run"
    by_energy = f"{rounded} --phases.router activation_energy --phases.no-skip-blocks"
    for command, share, of_router in ((by_energy, 38, False), (rounded, 25, True)):
        assert run_train(command.split()) == 0
        shown = capsys.readouterr().out
        assert f"FFN, sparse phase: {share}% of the dense FLOPs executed" in shown
        for told in ("as many as GEMM 1 has, in 8-bit floats", "for the router"):
            assert (told in shown) == of_router
        assert "chooses by GEMM 1 itself" not in shown
    hopper.see_device(monkeypatch, hopper.A100)
    for command, advised in ((by_energy, False), (rounded, True)):
        assert run_train(command.split()) == 0
        shown = capsys.readouterr().out
        assert ("A100" in shown.partition("take as long")[2].split(";")[0]) == advised
        assert ("--phases.no-skip-blocks chooses by GEMM 1" in shown) == advised
