"""The GEMM benchmark at a tiny size, its kernels emulated."""

import json
from dataclasses import replace
from typing import get_args

import jax.numpy as jnp
import pytest

import hopper
from experiments import bench_matmul
from pallas_kernels import tuning, tuning_cache
from pallas_kernels.sparse_matmul_configs import default_config
from sparsejax import ffn_gemms
from sparsejax.ops.ffn_spec import FFNSparsity, FFNSpec
from sparsejax.ops.kernels.hopper_shapes import shape_of
from sparsejax.ops.token_sparsity import fixed_token_order
from sparsejax.patterns import NM


@pytest.fixture
def tuned(monkeypatch, tmp_path):
    hopper.pretend(monkeypatch)
    monkeypatch.setattr(tuning, "FOLDER", tmp_path / "tuned")
    monkeypatch.setenv(tuning_cache.VARIABLE, str(tmp_path / "cache"))
    tuning.forget()
    yield
    tuning.forget()


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


def test_a_developer_tunes_what_is_shipped(tuned):
    config = bench_matmul.Config(
        shapes=("32,64,64",), tune=True, shipped=True, rounds=1, results=None
    )
    device = bench_matmul.main(config)[0]["device"]
    assert len(tuning.shipped(device)) == 1 and not tuning.own(device)
    with pytest.raises(ValueError, match="add --tune"):
        bench_matmul.main(replace(config, tune=False))


def test_every_gemm_is_timed_and_tuned(tuned, monkeypatch):
    monkeypatch.setattr(tuning, "candidates", lambda *of: [default_config(*of)])
    gemms = get_args(ffn_gemms.Gemm)
    config = bench_matmul.Config(
        shapes=("128,64,192",), gemms=gemms, tune=True, rounds=1, results=None
    )
    rows = bench_matmul.main(config)
    names = [row["name"] for row in rows]
    assert names == ["GEMM 1 or 3", "GEMM 2", "GEMM 4", "GEMM 5", "GEMM 6"]
    assert all(row["shape"] == {"T": 128, "d": 64, "F": 192} for row in rows)
    # What is tuned is what the FFN asks for.
    known = tuning.entries(rows[0]["device"])
    sparsity = FFNSparsity(
        weights=NM(2, 4), activations=NM(2, 4), token_sparsity="magnitude"
    )
    spec = FFNSpec(
        tokens=128, d_model=64, d_hidden=192, dtype="bfloat16", sparsity=sparsity
    )
    asked = {shape_of(gemm) for gemm in spec.gemms()}
    assert set(known) == asked


@pytest.mark.parametrize("gemm", get_args(ffn_gemms.Gemm))
def test_packing_and_multiplying_gives_the_same_product(tuned, gemm, monkeypatch):
    monkeypatch.setattr(ffn_gemms, "DENSE_FEATURES", 0.0)
    problem = ffn_gemms.make_problem(gemm, 128, 64, 192)
    expected = problem.exact(slice(None))
    b = problem.b
    if gemm in ("5", "6"):  # the tokens of both operands come in another order
        b = b[jnp.argsort(fixed_token_order(128))]
    got = problem.pack_and_multiply(problem.source, b)
    error = jnp.linalg.norm(got.astype(jnp.float32) - expected)
    assert error <= 2**-7 * jnp.linalg.norm(expected)


def test_a_wrong_kernel_is_never_timed(tuned, monkeypatch, tmp_path):
    right = hopper.PlainKernels.matmul

    def wrong(*operands, **options):
        return right(*operands, **options) + jnp.bfloat16(0.25)

    monkeypatch.setattr(hopper.PlainKernels, "matmul", wrong)
    config = bench_matmul.Config(shapes=("32,64,64",), results=None)
    with pytest.raises(AssertionError, match="error"):
        bench_matmul.main(config)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("32,64", "'32,64' is not T,d,F; give for example"),
        ("32,60,64", "GEMM 1 of T,d,F 32,60,64 .* k=60 is not a multiple of 64"),
    ],
)
def test_a_shape_that_cannot_be_timed_is_refused(text, message):
    config = bench_matmul.Config(shapes=(text,), results=None)
    with pytest.raises(ValueError, match=message):
        bench_matmul.main(config)
