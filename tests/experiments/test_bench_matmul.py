"""The GEMM benchmark at a tiny size, its kernels emulated."""

import json

import jax.numpy as jnp
import pytest

import hopper
from experiments import bench_matmul
from pallas_kernels import sparse_matmul_sm90, tuning


@pytest.fixture
def tuned(monkeypatch, tmp_path):
    hopper.pretend(monkeypatch)
    monkeypatch.setattr(tuning, "FOLDER", tmp_path / "tuned")
    tuning.entries.cache_clear()
    yield
    tuning.entries.cache_clear()


def test_rows_hold_what_was_measured_and_tuning_is_kept(tuned, tmp_path):
    results = tmp_path / "rows.jsonl"
    config = bench_matmul.Config(
        shapes=("32,64,128", "1,64,64"), tune=True, rounds=2, results=results
    )
    rows = bench_matmul.main(config)
    assert [json.loads(line) for line in results.read_text().splitlines()] == rows
    row = rows[0]
    assert row["shape"] == {"T": 32, "d": 64, "F": 128}
    assert row["error"] <= 1.1 * row["dense_error"]
    low, high = row["spread"]
    assert 0 < low <= row["speedup"] <= high
    assert row["peer_us"] is None and row["speedup_vs_peer"] is None
    shapes = {(s.n, s.k, s.m) for s in tuning.entries(row["device"])}
    assert shapes == {(32, 64, 128), (1, 64, 64)}


def test_a_wrong_kernel_is_never_timed(tuned, monkeypatch, tmp_path):
    right = sparse_matmul_sm90.sparse_matmul

    def wrong(*operands, config):
        return right(*operands, config=config) + jnp.bfloat16(0.25)

    monkeypatch.setattr(sparse_matmul_sm90, "sparse_matmul", wrong)
    config = bench_matmul.Config(shapes=("32,64,64",), results=None)
    with pytest.raises(AssertionError, match="error"):
        bench_matmul.main(config)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("32,64", "'32,64' is not T,d,F; give for example"),
        ("32,60,64", "k=60 is not a multiple of 64"),
    ],
)
def test_a_shape_that_cannot_be_timed_is_refused(text, message):
    config = bench_matmul.Config(shapes=(text,), results=None)
    with pytest.raises(ValueError, match=message):
        bench_matmul.main(config)
