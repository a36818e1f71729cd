"""The benchmark of whole steps times what it has checked, and says where time goes."""

import json
from dataclasses import replace

import pytest

import hopper
from experiments import bench_step
from pallas_kernels import tuning
from sparsejax import metrics, plan
from sparsejax.presets import PRESETS

pytestmark = pytest.mark.usefixtures("quick")

SEQUENCE = 128


@pytest.fixture
def config(text):
    return bench_step.Config(
        preset="tiny",
        layers=1,
        batch_size=4,
        micro_batches=2,
        text=text,
        rounds=2,
        steps=1,
        results=None,
    )


def test_rows(config, tmp_path):
    config = replace(config, results=tmp_path / "new" / "rows.jsonl")
    rows = bench_step.main(config)
    assert [json.loads(line) for line in config.results.open()] == rows
    dense, sparse = rows
    assert [row["name"] for row in rows] == ["dense", "weights"]
    assert (dense["speedup"], dense["spread"]) == (1.0, [1.0, 1.0])
    assert "error" not in dense
    low, high = sparse["spread"]
    assert 0 < low <= sparse["speedup"] <= high
    # On a CPU the sparse step is the masked one, rounded in float32.
    assert sparse["error"] == pytest.approx({"loss": 0, "gradient_norm": 0}, abs=1e-5)
    model = replace(PRESETS["tiny"]().model, layers=1)
    state = 3 * 4 * plan.parameter_count(model).total
    for row in rows:
        assert row["tokens_per_micro_batch"] == 2 * SEQUENCE
        assert row["tokens_per_second"] * row["step_ms"] == pytest.approx(
            1e3 * 4 * SEQUENCE
        )
        assert row["mfu_executed"] == row["mfu_dense_equivalent"] > 0
        assert row["state_gib"] * 2**30 == pytest.approx(state, rel=0.01)
        assert row["temporaries_gib"] > 0
        assert [gemm[0] for gemm in row["gemms"]] == list("123456")
        assert all(gemm.endswith(": xla") for gemm in row["gemms"])
        assert "kernel_ms" not in row


@pytest.mark.parametrize("wrong", ["loss", "gradient_norm"])
def test_a_wrong_sparse_step_is_never_timed(config, wrong, monkeypatch):
    right = bench_step.Steps.masked

    def one_percent_off(self):
        report = right(self)
        return report | {wrong: 1.01 * report[wrong]}

    def timed(*arguments, **options):
        pytest.fail("was timed")

    monkeypatch.setattr(bench_step.Steps, "masked", one_percent_off)
    monkeypatch.setattr(bench_step, "time_interleaved", timed)
    with pytest.raises(AssertionError, match=rf"^{wrong} \d.*, not \d"):
        bench_step.main(config)


def test_the_sparse_step_runs_on_the_kernels_of_a_gpu_that_has_them(
    config, monkeypatch
):
    tiny = PRESETS["tiny"]()
    bfloat16 = replace(tiny, model=replace(tiny.model, dtype="bfloat16"))
    monkeypatch.setitem(PRESETS, "tiny", lambda: bfloat16)
    monkeypatch.setattr(tuning, "LEAST_FLOPS", 0)
    monkeypatch.setattr(tuning, "entries", lambda kind: {})
    calls = hopper.pretend(monkeypatch)
    monkeypatch.setattr(metrics, "current_device_kind", lambda: "NVIDIA H200")
    dense, sparse = bench_step.main(config)
    assert {"compress", "sparse_matmul"} <= set(calls)
    assert all(gemm.endswith(": xla") for gemm in dense["gemms"])
    backends = [gemm.split(": ")[1] for gemm in sparse["gemms"]]
    assert backends == ["mosaic_sm90", "xla"] * 2 + ["xla"] * 2
    assert sparse["mfu_executed"] < sparse["mfu_dense_equivalent"]
