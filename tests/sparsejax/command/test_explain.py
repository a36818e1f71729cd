"""`sparsejax explain` on devices that need not be here."""

import pytest

from sparsejax.command import main
from tests.support.devices import accelerators

H100 = "NVIDIA H100 80GB HBM3"
SIZES = "--tokens 16384 --d-model 4096 --d-hidden 16384".split()


def test_each_gemm_is_explained_with_its_times(capsys):
    patterns = "--sparsity.weights 2:4 --sparsity.activations 128:2:32".split()
    assert main.run(["explain", *SIZES, *patterns, "--device", H100]) == 0
    shown = capsys.readouterr().out
    for gemm in ("Y1 = X W1", "Y = A W2", "dA = dY W2^T", "dX = dY1 W1^T"):
        assert f"{gemm} " in shown
    assert "2:4 activation of 8 experts on the sparse tensor cores (6%)" in shown
    assert "faster than dense by what is known" in shown


def test_where_nothing_sparse_runs_the_reason_is_said(capsys):
    arguments = ["explain", *SIZES, "--sparsity.weights", "2:4"]
    assert main.run([*arguments, "--device", "NVIDIA A100-SXM4-80GB"]) == 0
    shown = capsys.readouterr().out
    assert "no faster than dense: none of its sparse GEMMs runs on sparse ten" in shown
    assert main.run([*arguments, "--activation", "swiglu", "--device", H100]) == 0
    assert "G = X Wg" in capsys.readouterr().out


def test_experts_that_are_skipped_elsewhere_are_told_with_what_runs_them(
    capsys, monkeypatch
):
    accelerators.installed(monkeypatch, "tokamax")
    experts = [
        *("--sparsity.activations", "128:4:32", "--sparsity.router", "token_hash"),
        *("--sparsity.skip-blocks", "--sparsity.weight-gradients", "expert_columns"),
    ]
    explain = ["explain", *SIZES, *experts, "--device"]
    assert main.run([*explain, "TPU v6 lite"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("tokamax: tokamax's ragged dot (mosaic) over 8 experts") == 6
    assert "fewer FLOPs than dense; no times of its GEMMs are known" in shown
    few = [size if size != "16384" else "4096" for size in explain]
    assert main.run([*few, "NVIDIA A100-SXM4-80GB"]) == 0
    shown = capsys.readouterr().out
    assert "100% of the dense FLOPs executed" in shown
    assert "why (1, 2, 3, 4): xla: dense: XLA's loop over chunks of 2048 rows" in shown
    assert "why (5, 6): xla: dense: XLA's loop over chunks of 2048 rows" in shown
    assert "no faster than dense: none of its sparse GEMMs runs on sparse" in shown


def test_what_does_not_fit_is_refused(capsys):
    wrong = ["explain", *SIZES[:4], "--d-hidden", "10", "--sparsity.activations", "2:4"]
    assert main.run(wrong) == 1
    assert capsys.readouterr().err.startswith("ValueError: d_hidden=10 ")
    assert main.run(["explain", *SIZES, "--device", "H100"]) == 1
    assert "a device named 'H100'; take one of" in capsys.readouterr().err


@pytest.mark.parametrize("size", ["tokens", "d-model", "d-hidden"])
@pytest.mark.parametrize("value", ["0", "-4", str(10**30)])
def test_sizes_that_no_ffn_has_are_refused(size, value, capsys):
    sizes = {"tokens": "64", "d-model": "64", "d-hidden": "256"} | {size: value}
    arguments = [part for name, of in sizes.items() for part in (f"--{name}", of)]
    with pytest.raises(SystemExit, match="2"):
        main.run(["explain", *arguments])
    name = size.replace("-", "_")
    printed = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert f"{name}={value} must be at least 1" in printed
