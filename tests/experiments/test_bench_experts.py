"""The benchmark of experts' 2:4 GEMMs times what it has checked."""

import json
from dataclasses import replace

import pytest

import hopper
from experiments import bench_experts
from experiments.sparse_modes import sparse_modes
from pallas_kernels import tuning, tuning_cache
from sparsejax.ops.ffn_spec import FFNSpec
from sparsejax.ops.kernels.hopper_shapes import shape_of

TINY = bench_experts.Config(
    tokens=512, d_model=64, d_hidden=256, experts=(2,), rounds=2, results=None
)


def test_every_gemm_is_compared_and_timed(monkeypatch, tmp_path):
    hopper.pretend(monkeypatch)
    results = tmp_path / "rows.jsonl"
    rows = bench_experts.main(replace(TINY, results=results))
    assert [json.loads(line) for line in results.read_text().splitlines()] == rows
    names = [f"GEMM {gemm} of 2 experts" for gemm in "12456"]
    assert [row["name"] for row in rows] == names
    for row in rows:
        low, high = row["spread"]
        assert 0 < low <= row["speedup"] <= high and row["error"] < 3e-3


def test_what_an_ffn_will_ask_for_is_kept(monkeypatch, tmp_path):
    hopper.pretend(monkeypatch)
    monkeypatch.setattr(tuning, "FOLDER", tmp_path)
    monkeypatch.setenv(tuning_cache.VARIABLE, str(tmp_path / "cache"))
    tuning.forget()
    rows = bench_experts.main(replace(TINY, tune=True))
    known = tuning.entries(hopper.H200.kind)
    spec = FFNSpec(
        tokens=512,
        d_model=64,
        d_hidden=256,
        dtype="bfloat16",
        sparsity=sparse_modes(experts=2, v=128)["skip_blocks, all six"],
        device=hopper.H200,
    )
    for gemm in spec.gemms():
        assert shape_of(gemm) in known
    assert [row["pack_us"] > 0 for row in rows] == [True] * 5
    with pytest.raises(ValueError, match=r"share_of_first=0\.9 is not usual"):
        bench_experts.main(replace(TINY, tune=True, share_of_first=0.9))
    tuning.forget()


def test_a_wrong_product_stops_the_benchmark(monkeypatch):
    hopper.pretend(monkeypatch)
    right = hopper.PlainKernels.expert_rows_matmul
    monkeypatch.setattr(
        hopper.PlainKernels,
        "expert_rows_matmul",
        lambda *a, **k: 1.05 * right(*a, **k),
    )
    with pytest.raises(AssertionError, match="relative error"):
        bench_experts.main(replace(TINY, gemms=("2",)))


def test_one_expert_may_have_nearly_all_tokens(monkeypatch):
    hopper.pretend(monkeypatch)
    config = replace(TINY, experts=(4,), gemms=("2", "6"), share_of_first=0.9)
    assert [row["share_of_first"] for row in bench_experts.main(config)] == [0.9] * 2
    with pytest.raises(ValueError, match="share_of_first=1.5"):
        bench_experts.main(replace(config, share_of_first=1.5))


def test_a_size_without_a_kernel_is_refused(monkeypatch):
    hopper.pretend(monkeypatch)
    with pytest.raises(ValueError, match="v=64, .* group_tile=64"):
        bench_experts.main(replace(TINY, v=64, gemms=("2",)))
