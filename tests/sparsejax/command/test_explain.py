"""`sparsejax explain` on GPUs that need not be here."""

from sparsejax.command import main

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


def test_what_does_not_fit_is_refused(capsys):
    wrong = ["explain", *SIZES[:4], "--d-hidden", "10", "--sparsity.activations", "2:4"]
    assert main.run(wrong) == 1
    assert capsys.readouterr().err.startswith("ValueError: d_hidden=10 ")
    assert main.run(["explain", *SIZES, "--device", "H100"]) == 1
    assert "a GPU named 'H100'; take one of" in capsys.readouterr().err
