"""The GEMM benchmark at tiny sizes, its kernels emulated, times what it has checked."""

import json
from dataclasses import fields, replace
from functools import cache, partial
from typing import get_args

import jax.numpy as jnp
import numpy as np
import pytest

from experiments.bench import gemm
from experiments.bench.gemm_cases import comparison, energies, squares
from experiments.bench.gemm_cases import grouped as grouped_cases
from experiments.bench.gemm_cases.dense_rows_configs import (
    CONFIGS,
    FASTEST_CONFIG,
)
from experiments.bench.sparse_modes import sparse_modes
from pallas_kernels import tuning, tuning_cache
from pallas_kernels.sm90.sparse_matmul_configs import default_config
from sparsejax.feed_forward.operands.token_sparsity import fixed_token_order
from sparsejax.feed_forward.sparsity import FFNSparsity
from sparsejax.feed_forward.spec import FFNSpec
from sparsejax.ops import grouped_loops, grouped_matmul
from sparsejax.ops.kernels.hopper_shapes import tuned_gemm
from sparsejax.sparsity.patterns import NM
from sparsejax.tuning import ffn_gemms
from tests.support.devices import hopper

MATRIX = gemm.Config(shapes=("32,64,64",), rounds=1, results=None)
EXPERTS = gemm.Config(case="experts", shapes=("512,64,256,2",), rounds=2, results=None)


@pytest.fixture
def tuned(monkeypatch, tmp_path):
    hopper.pretend(monkeypatch)
    monkeypatch.setattr(tuning, "FOLDER", tmp_path / "tuned")
    monkeypatch.setenv(tuning_cache.VARIABLE, str(tmp_path / "cache"))
    tuning.forget()
    yield
    tuning.forget()


@pytest.fixture
def grouped(monkeypatch, tmp_path):
    monkeypatch.setattr(grouped_loops, "CHUNK_ROWS", grouped_loops.CHUNK_ROWS)
    return gemm.Config(
        case="grouped",
        shapes=("40,16,64,4",),
        v=8,
        rounds=2,
        results=tmp_path / "rows.jsonl",
    )


def test_all_cases_write_rows_of_one_format(tuned, grouped, monkeypatch):
    results, parts, tried = grouped.results, [], []
    plain = hopper.PlainKernels(hopper.H200)

    def over_rows(a, b, ends, *, group_tile, parts_of_share, multiprocessors):
        parts.append(parts_of_share)
        return plain.dense_expert_weight_gradient(
            a, b, ends, group_tile=group_tile, expert_axis=0
        )

    def rows_matmul(
        a, b, tile_expert, used, *, expert_axis, b_k_major, config, multiprocessors
    ):
        assert multiprocessors == 132
        tried.append(config)
        of_row = jnp.repeat(tile_expert, len(a) // len(tile_expert))
        w = jnp.moveaxis(b, expert_axis, 0)[of_row]
        equation = "rk,rnk->rn" if b_k_major else "rk,rkn->rn"
        out = jnp.einsum(equation, a, w, preferred_element_type=jnp.float32)
        return out.astype(a.dtype)

    monkeypatch.setattr(grouped_cases.dense_over_rows, "dense_over_rows", over_rows)
    monkeypatch.setattr(grouped_cases.dense_rows, "dense_rows", rows_matmul)
    configs = (
        replace(MATRIX, results=results),
        replace(EXPERTS, gemms=("2",), results=results),
        # Which kernels run, too.
        replace(grouped, shapes=("512,128,512,4",), v=128),
    )
    rows = [row for config in configs for row in gemm.main(config)]
    assert [json.loads(line) for line in results.read_text().splitlines()] == rows
    names = [field.name for field in fields(gemm.Row)]
    assert all(list(row) == names for row in rows)
    assert sorted(parts) == [1, 2]  # traced side by side
    why = partial(grouped_cases.dense_rows.why_invalid, group_tile=128, reads=False)
    fitting = {of for of in CONFIGS if why(of) is None}
    assert len(fitting) > 2 and set(tried) == fitting
    ran = [(row["case"], row["gemm"], row["implementation"]) for row in rows]
    assert ran == [
        ("matrix", "1", "mosaic_sm90"),
        ("experts", "2", "mosaic_sm90"),
        *(
            ("grouped", number, name)
            for number in "1234"
            for name in ("ragged_dot", "xla", "mosaic_sm90", FASTEST_CONFIG)
        ),
        *(("grouped", "5", name) for name in ("ragged_dot", "xla", "mosaic_sm90")),
        *(
            ("grouped", "5", f"mosaic_sm90, {count} parts of a share")
            for count in (1, 2)
        ),
    ]
    # The share of one of four experts, over the time that is stated.
    executed = [row for row in rows if row["executed_tflops"] is not None]
    assert len(executed) == 21
    for row in executed:
        tflops = 2 * 512 * 128 * 512 / 4 / row["time_us"] / 1e6
        assert row["executed_tflops"] == round(tflops, 1)
    for row in rows:
        low, high = row["spread"]
        assert 0 < low <= row["speedup"] <= high
        low, high = row["time_us_range"]
        assert 0 < low <= row["time_us"] <= high


def test_a_shape_that_its_case_does_not_know_is_refused(tuned):
    with pytest.raises(ValueError, match="'512,64,256' is not T,d,F,E; give for"):
        gemm.main(replace(EXPERTS, shapes=("512,64,256",)))
    with pytest.raises(ValueError, match="'32,64,64,2' is not T,d,F; give for"):
        gemm.main(replace(MATRIX, shapes=("32,64,64,2",)))


def test_flags_that_do_not_fit_the_case_are_refused(tuned, grouped):
    with pytest.raises(ValueError, match="'grouped' has no configs to search"):
        gemm.main(replace(grouped, tune=True))
    with pytest.raises(ValueError, match="'grouped' has no GEMM 6; choose from 1, 2,"):
        gemm.main(replace(grouped, gemms=("6",)))
    with pytest.raises(ValueError, match="'matrix' has none; leave it out"):
        gemm.main(replace(MATRIX, share_of_first=0.5))


# A matrix.


def test_rows_hold_what_was_measured_and_tuning_is_kept(tuned, tmp_path):
    results = tmp_path / "rows.jsonl"
    config = gemm.Config(
        shapes=("32,64,128", "1,64,64"), tune=True, rounds=2, results=results
    )
    rows = gemm.main(config)
    assert [json.loads(line) for line in results.read_text().splitlines()] == rows
    row = rows[0]
    assert row["shape"] == {"T": 32, "d": 64, "F": 128}
    assert row["error"] <= 1.1 * row["dense_error"]
    low, high = row["spread"]
    assert 0 < low <= row["speedup"] <= high
    assert row["pack_us"] > 0 and row["copy_us"] > 0 and row["speedup_with_pack"] > 0
    assert row["peer_us"] is None and row["speedup_vs_peer"] is None
    shapes = {(g.tokens, g.d_in, g.d_out) for g in tuning.entries(row["device"])}
    assert shapes == {(32, 64, 128), (1, 64, 64)}


def test_a_developer_tunes_what_is_shipped(tuned):
    config = replace(MATRIX, tune=True, shipped=True)
    device = gemm.main(config)[0]["device"]
    assert len(tuning.shipped(device)) == 1 and not tuning.own(device)
    with pytest.raises(ValueError, match="add --tune"):
        gemm.main(replace(config, tune=False))


def test_every_gemm_is_timed_and_tuned(tuned, monkeypatch):
    monkeypatch.setattr(tuning, "candidates", lambda *of: [default_config(*of)])
    gemms = get_args(ffn_gemms.Gemm)
    config = replace(MATRIX, shapes=("128,64,192",), gemms=gemms, tune=True)
    rows = gemm.main(config)
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
    asked = {tuned_gemm(of_ffn) for of_ffn in spec.gemms()}
    assert set(known) == asked


@pytest.mark.parametrize("number", get_args(ffn_gemms.Gemm))
def test_packing_and_multiplying_gives_the_same_product(tuned, number, monkeypatch):
    monkeypatch.setattr(ffn_gemms, "DENSE_FEATURES", 0.0)
    problem = ffn_gemms.make_problem(number, 128, 64, 192)
    expected = problem.exact(slice(None))
    b = problem.b
    if number in ("5", "6"):  # the tokens of both operands come in another order
        b = b[jnp.argsort(fixed_token_order(128))]
    got = problem.pack_and_multiply(problem.source, b)
    error = jnp.linalg.norm(got.astype(jnp.float32) - expected)
    assert error <= 2**-7 * jnp.linalg.norm(expected)


def test_a_wrong_kernel_is_never_timed(tuned, monkeypatch):
    right = hopper.PlainKernels.matmul

    def wrong(*operands, **options):
        return right(*operands, **options) + jnp.bfloat16(0.25)

    monkeypatch.setattr(hopper.PlainKernels, "matmul", wrong)
    with pytest.raises(AssertionError, match="error"):
        gemm.main(MATRIX)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("32,64", "'32,64' is not T,d,F; give for example"),
        ("32,60,64", "GEMM 1 of T,d,F 32,60,64 .* k=60 is not a multiple of 64"),
    ],
)
def test_a_shape_that_cannot_be_timed_is_refused(text, message, monkeypatch):
    hopper.see_device(monkeypatch)
    with pytest.raises(ValueError, match=message):
        gemm.main(replace(MATRIX, shapes=(text,)))


# Experts, an operand 2:4.


def test_every_gemm_of_experts_is_compared_and_timed(tuned, tmp_path):
    results = tmp_path / "rows.jsonl"
    rows = gemm.main(replace(EXPERTS, results=results))
    assert [json.loads(line) for line in results.read_text().splitlines()] == rows
    names = [f"GEMM {number} of 2 experts" for number in "12456"]
    assert [row["name"] for row in rows] == names
    for row in rows:
        low, high = row["spread"]
        assert 0 < low <= row["speedup"] <= high and row["error"] < 3e-3
        assert row["shape"] == {"T": 512, "d": 64, "F": 256, "E": 2, "V": 128}


def test_what_an_ffn_with_experts_will_ask_for_is_kept(tuned):
    rows = gemm.main(replace(EXPERTS, tune=True))
    known = tuning.entries(hopper.H200.kind)
    spec = FFNSpec(
        tokens=512,
        d_model=64,
        d_hidden=256,
        dtype="bfloat16",
        sparsity=sparse_modes(experts=2, v=128)["skip_blocks, all six"],
        device=hopper.H200,
    )
    for of_ffn in spec.gemms():
        assert tuned_gemm(of_ffn) in known
    assert [row["pack_us"] > 0 for row in rows] == [True] * 5
    with pytest.raises(ValueError, match=r"share_of_first=0\.9 is not usual"):
        gemm.main(replace(EXPERTS, tune=True, share_of_first=0.9))


def test_a_wrong_product_of_experts_stops_the_benchmark(tuned, monkeypatch):
    right = hopper.PlainKernels.expert_rows_matmul
    monkeypatch.setattr(
        hopper.PlainKernels,
        "expert_rows_matmul",
        lambda *a, **k: 1.05 * right(*a, **k),
    )
    with pytest.raises(AssertionError, match="relative error"):
        gemm.main(replace(EXPERTS, gemms=("2",)))


def test_one_expert_may_have_nearly_all_tokens(tuned):
    config = replace(
        EXPERTS, shapes=("512,64,256,4",), gemms=("2", "6"), share_of_first=0.9
    )
    assert [row["share_of_first"] for row in gemm.main(config)] == [0.9] * 2
    with pytest.raises(ValueError, match="share_of_first=1.5"):
        gemm.main(replace(config, share_of_first=1.5))


def test_a_size_without_a_kernel_is_refused(tuned):
    with pytest.raises(ValueError, match="v=64, .* group_tile=64"):
        gemm.main(replace(EXPERTS, v=64, gemms=("2",)))


# Experts, dense operands.


def test_dense_gemms_are_grouped_in_both_forms(grouped):
    rows = gemm.main(grouped)
    assert [json.loads(line) for line in grouped.results.open()] == rows
    names = [(row["gemm"], row["implementation"]) for row in rows]
    assert names == [(n, name) for n in "12345" for name in ("ragged_dot", "xla")]
    for number in "12345":
        (dense_us,) = {row["dense_us"] for row in rows if row["gemm"] == number}
        assert dense_us > 0
    assert all(row["time_us"] > 0 for row in rows)


def test_the_first_group_may_have_nearly_all_rows(grouped, monkeypatch):
    found, routed = [], comparison.routed

    def noted(*args):
        found.append(routed(*args))
        return found[-1]

    monkeypatch.setattr(comparison, "routed", noted)
    rows = gemm.main(replace(grouped, share_of_first=0.9))
    assert [row["share_of_first"] for row in rows] == [0.9] * 10
    assert found[0].group_sizes[0] > 0.7 * 40
    with pytest.raises(ValueError, match=r"share_of_first=1\.5 of 4 experts"):
        gemm.main(replace(grouped, share_of_first=1.5))


@pytest.mark.parametrize("experts", [1, 4])
def test_squares_by_the_kernel_are_timed_with_every_config_that_fits(
    grouped, monkeypatch, experts
):
    config = replace(
        grouped,
        case="squares",
        gemms=None,
        v=128,
        shapes=(f"512,128,{256 * experts},{experts}",),
    )
    with pytest.raises(ValueError, match="it needs a Hopper GPU, and this is cpu"):
        gemm.main(config)
    hopper.see_device(monkeypatch)
    tried: dict[bool, set] = {False: set(), True: set()}

    @cache
    def result(reads, factor):
        a, b, tile_expert, other, activation, axis = operands[reads]
        of_row = np.repeat(tile_expert, len(a) // len(tile_expert))
        w = jnp.moveaxis(b, axis, 0)[of_row].astype(jnp.float32)
        equation = "rk,rnk->rn" if reads else "rk,rkn->rn"
        acc = jnp.einsum(equation, a.astype(jnp.float32), w)
        if not reads:
            return activation(acc).astype(jnp.bfloat16)
        entries = other.combine(acc, other.entries.astype(jnp.float32))
        return (factor * entries).astype(jnp.bfloat16)

    def emulated(a, b, tile_expert, used, *, expert_axis, b_k_major, **options):
        other, activation = options["other"], options["activation"]
        assert b_k_major == (other is not None) and options["multiprocessors"] == 132
        tried[b_k_major].add(options["config"])
        operands[b_k_major] = a, b, tile_expert, other, activation, expert_axis
        return result(b_k_major, factor)

    operands: dict[bool, tuple] = {}
    factor = 1.0
    monkeypatch.setattr(squares.dense_rows, "dense_rows", emulated)
    monkeypatch.setattr(squares, "compile_all", as_they_are)
    names = [(row["gemm"], row["implementation"]) for row in gemm.main(config)]
    kernels = ["mosaic_sm90", FASTEST_CONFIG]
    assert names == [(number, name) for number in ("1", "3") for name in kernels]
    for reads, configs in tried.items():
        why = partial(squares.dense_rows.why_invalid, group_tile=config.v, reads=reads)
        fitting = [of for of in CONFIGS if why(of) is None]
        assert len(fitting) > 2 and configs == {None, *fitting}
    factor = 1.05
    with pytest.raises(AssertionError, match="relative error"):
        gemm.main(config)


def as_they_are(calls):
    return {name: partial(run, *operands) for name, (run, operands) in calls.items()}


def test_energies_are_compared_with_those_of_rounded_operands(grouped, monkeypatch):
    config = replace(grouped, case="energies", gemms=None, shapes=("64,128,512,4",))
    (row,) = gemm.main(config)
    assert (row["gemm"], row["implementation"]) == ("1", "xla")
    assert row["error"] < 1e-2
    with pytest.raises(ValueError, match="'energies' has no GEMM 2; choose from 1"):
        gemm.main(replace(config, gemms=("2",)))
    monkeypatch.setattr(
        energies, "rounded_product", lambda x, w: x @ w.values.astype(x.dtype) + 1
    )
    with pytest.raises(AssertionError, match="relative error"):
        gemm.main(config)


def test_energies_by_the_kernel_have_every_config_that_fits(grouped, monkeypatch):
    hopper.see_device(monkeypatch)
    plain = hopper.PlainKernels(hopper.H200)

    def emulated(a, b, *, experts, config, multiprocessors):
        tried.append(config.tile_n)
        return plain.expert_energies(a, b, experts=experts)

    monkeypatch.setattr(energies.expert_energies, "expert_energies", emulated)
    for width, tiles in ((512, {128}), (1024, {128, 256})):
        tried: list[int] = []
        shape = f"64,128,{width},4"
        config = replace(grouped, case="energies", gemms=None, shapes=(shape,))
        rows = gemm.main(config)
        names = [row["implementation"] for row in rows]
        assert names == ["xla", "mosaic_sm90"]
        assert set(tried) == tiles


def test_a_wrong_grouped_product_stops_the_benchmark(grouped, monkeypatch):
    right = grouped_matmul.grouped_matmul
    monkeypatch.setattr(
        grouped_matmul, "grouped_matmul", lambda *a, **k: 1.05 * right(*a, **k)
    )
    with pytest.raises(AssertionError, match="relative error"):
        gemm.main(grouped)
