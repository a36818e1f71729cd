"""The FFN benchmark at tiny sizes: its rows, and that it refuses wrong results."""

import dataclasses
import json
import time

import numpy as np
import pytest

from experiments.bench import ffn
from experiments.bench.ffn import Config
from experiments.bench.sparse_modes import sparse_modes
from pallas_kernels import tuning
from sparsejax.config import RecipeConfig
from sparsejax.sparsity.patterns import NM
from sparsejax.training.train import train
from sparsejax.tuning.timing import Timing, over_alone, time_interleaved
from tests.support.devices import hopper
from tests.support.micro_run import micro_config
from tests.support.whole_runs import quick_runs

TINY = Config(tokens=40, d_model=8, d_hidden=64, v=8, rounds=2, results=None)


def test_modes_that_choose_by_8_bit_floats_are_compared_where_they_are_named():
    names = [name for name in sparse_modes(experts=4, v=8) if "fp8" in name]
    rows = ffn.main(dataclasses.replace(TINY, only=tuple(names)), arguments=[])
    assert [row["mode"] for row in rows] == ["dense", *names]
    assert all(row["error"]["y"] < 1e-5 for row in rows[1:])


def test_rows_are_complete_and_appended(tmp_path):
    results = tmp_path / "new" / "rows.jsonl"
    config = dataclasses.replace(TINY, results=results)
    rows = ffn.main(config, arguments=["--tokens", "40", "--results", "my rows"])
    assert [row["mode"] for row in rows] == list(ffn.modes(config))
    assert [json.loads(line) for line in results.read_text().splitlines()] == rows
    by_mode = {row["mode"]: row for row in rows}
    dense, skip = by_mode["dense"], by_mode["skip_blocks"]
    assert (dense["ratio"], dense["ratio_min"], dense["ratio_max"]) == (1, 1, 1)
    assert (dense["executed_share"], skip["executed_share"]) == (1.0, 0.25)
    # GEMMs 1 and 3 dense, the other four grouped
    assert by_mode["V:N:M, nearest centre"]["executed_share"] == (2 + 4 / 4) / 6
    assert skip["shape"] == {
        "tokens": 40,
        "d_model": 8,
        "d_hidden": 64,
        "experts": 4,
        "v": 8,
    }
    assert dense["shape"]["experts"] is None
    assert "tokens_per_expert" not in dense
    assert len(skip["tokens_per_expert"]) == 4 and sum(skip["tokens_per_expert"]) == 40
    assert not any("fp8" in mode for mode in by_mode)
    twice = by_mode["V:N:M, true mass, 2 of 2E"]
    assert (
        len(twice["tokens_per_expert"]) == 8 and sum(twice["tokens_per_expert"]) == 80
    )
    assert twice["router_mass"] == twice["oracle_mass"] > skip["router_mass"] > 0
    arguments = "--tokens 40 --results 'my rows'"
    assert skip["command"] == f"python -m experiments.bench.ffn {arguments}"
    for row in rows:
        assert row["ratio_min"] <= row["ratio"] <= row["ratio_max"]
        low, high = row["spread_alone"]
        assert 0 < low <= row["over_dense_alone"] <= high
        assert row["time_ms_min"] <= row["time_ms"] <= row["time_ms_max"]
        flops = 6 * 2 * 40 * 8 * 64
        expected = flops / row["time_ms"] / 1e6
        assert row["dense_equivalent_gflops"] == pytest.approx(expected, abs=0.06)


@pytest.mark.parametrize("output", range(4))
def test_wrong_implementation_is_caught(output, tmp_path):
    def wrong(sparsity, inputs, *, backend):
        results = list(ffn.step(sparsity, inputs))
        results[output] = results[output].at[0].multiply(1.1)
        return tuple(results)

    config = dataclasses.replace(TINY, results=tmp_path / "rows.jsonl")
    name = ("y", "dx", "dw_up", "dw_down")[output]
    with pytest.raises(AssertionError, match=f"mode 'dense': {name} differs"):
        ffn.main(config, run_step=wrong)
    assert not config.results.exists()


def test_mode_that_forgets_its_mask_is_caught():
    def forgetful(sparsity, inputs, *, backend):
        masked = dataclasses.replace(sparsity, activations=None)
        two_four = sparsity.activations == NM(2, 4)
        return ffn.step(masked if two_four else sparsity, inputs)

    with pytest.raises(AssertionError, match="mode '2:4 activations': y differs"):
        ffn.main(TINY, run_step=forgetful)


@pytest.fixture(scope="module")
def finished(text, tmp_path_factory):
    """A run of 16 x 64 whose last phase is sparse, and its model's first statistics."""
    folder = tmp_path_factory.mktemp("run")
    phases = RecipeConfig(warmup_share=0.25, sparse_share=0.75)
    config = micro_config(text, recipe="activations", phases=phases, steps=4)
    with quick_runs():
        train(config, folder)
    return folder


def test_weights_and_inputs_of_a_run_are_timed(finished, tmp_path):
    results = tmp_path / "rows.jsonl"
    only = ("2:4 activations along tokens",)
    config = dataclasses.replace(
        TINY, run=finished, tokens=100, only=only, results=results
    )
    rows = ffn.main(config)
    assert rows[0]["shape"]["d_model"] == 16 and rows[0]["shape"]["d_hidden"] == 64
    assert {row["inputs"] for row in rows} == {f"of run {finished.name}"}
    settings, inputs = ffn.of_run(config)
    assert inputs.x.shape == (100, 16) and inputs.dy.shape == (100, 16)
    y_up = np.asarray(inputs.x, np.float64) @ np.asarray(inputs.w_up, np.float64)
    assert settings.zeros == pytest.approx(np.mean(y_up <= 0), abs=1e-3)
    # An RMS norm's output, not random numbers.
    scale = np.linalg.norm(inputs.x, axis=1) / 16**0.5
    np.testing.assert_allclose(scale, 1, atol=0.1)


def test_centres_of_a_run_are_those_of_its_clustered_neurons(finished):
    config = dataclasses.replace(TINY, run=finished, tokens=100)
    settings, inputs = ffn.of_run(config)
    w_up = np.asarray(inputs.w_up, np.float64)
    units = w_up / np.linalg.norm(w_up, axis=0)
    means = units.reshape(16, settings.experts, -1).mean(axis=2).T
    lengths = np.linalg.norm(means, axis=1)
    np.testing.assert_allclose(inputs.centres, means / lengths[:, None], atol=1e-5)
    # Alike neurons lie together: their mean is longer than that of any quarter.
    quarters = units.reshape(16, -1, settings.experts).mean(axis=1)
    assert lengths.min() > np.linalg.norm(quarters, axis=0).max()


def test_what_is_no_run_of_a_squared_relu_model_is_refused(finished, tmp_path):
    with pytest.raises(ValueError, match="there is no .*config.json; give"):
        ffn.of_run(dataclasses.replace(TINY, run=tmp_path))
    config = json.loads((finished / "config.json").read_text())
    config["model"]["activation"] = "reglu2"
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="model.activation='reglu2'; this is about"):
        ffn.of_run(dataclasses.replace(TINY, run=tmp_path))


def test_packed_activations_are_compared_with_masks(monkeypatch):
    monkeypatch.setattr(tuning, "entries", lambda kind: {})
    calls = hopper.pretend(monkeypatch)
    mode = "all six GEMMs 2:4"
    config = dataclasses.replace(
        TINY,
        tokens=128,
        d_model=64,
        d_hidden=256,
        dtype="bfloat16",
        backend="mosaic_sm90",
        only=(mode,),
    )
    dense, sparse = ffn.main(config)
    assert {"compress", "keep_features", "backward", "keep_tokens"} <= set(calls)
    assert (dense["mode"], sparse["mode"]) == ("dense", mode)
    assert all(gemm.endswith(": xla") for gemm in dense["gemms"])
    assert all(gemm.endswith(": mosaic_sm90") for gemm in sparse["gemms"])
    assert set(sparse["error"]) == {"y", "dx", "dw_up", "dw_down"}
    assert sparse["temporaries_mib"] > 0


@pytest.mark.parametrize("zeros", [0.5, 0.9])
def test_a_share_of_the_hidden_units_is_zero(zeros):
    config = dataclasses.replace(TINY, tokens=400, d_model=256, zeros=zeros)
    inputs = ffn.make_inputs(config)
    hidden = np.maximum(np.asarray(inputs.x) @ np.asarray(inputs.w_up), 0)
    assert np.mean(hidden == 0) == pytest.approx(zeros, abs=0.02)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"only": ("2:4",)}, "'2:4' is no mode; choose from 2:4 weights, 2:4"),
        ({"zeros": 1.0}, "zeros=1.0 is not between 0 and 1"),
        ({"tokens": 42}, "tokens=42 is not a multiple of four"),
    ],
)
def test_what_cannot_be_timed_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        ffn.main(dataclasses.replace(TINY, **changes))


def test_over_alone_is_of_the_medians_and_of_the_worst_and_the_best_pair():
    baseline, other = (
        Timing(
            name="",
            time_ms=ms[1],
            time_ms_min=ms[0],
            time_ms_max=ms[2],
            ratio=1.0,
            ratio_min=1.0,
            ratio_max=1.0,
            rounds=3,
        )
        for ms in ((8.0, 9.0, 10.0), (2.0, 3.0, 4.0))
    )
    found = over_alone(other, baseline)
    assert found == {"over_dense_alone": 3.0, "spread_alone": [2.0, 5.0]}


def test_ratios_compare_times_of_one_round():
    pauses = {"fast": 0.002, "slow": 0.02}
    calls = {name: lambda s=s: time.sleep(s) for name, s in pauses.items()}
    fast, slow = time_interleaved(calls, baseline="fast", rounds=3)
    assert (fast.name, fast.ratio, fast.rounds) == ("fast", 1.0, 3)
    assert slow.time_ms >= 20 and slow.time_ms_min >= 20
    assert 1 < slow.ratio_min <= slow.ratio <= slow.ratio_max


def test_warmup_is_not_counted():
    waits = iter([0.05, 0.0, 0.0])
    (timing,) = time_interleaved(
        {"only": lambda: time.sleep(next(waits))}, baseline="only", rounds=2
    )
    assert timing.time_ms_max < 50
    assert next(waits, None) is None


def test_timing_errors():
    with pytest.raises(ValueError, match="baseline='b' is not one of a"):
        time_interleaved({"a": int}, baseline="b", rounds=1)
    with pytest.raises(ValueError, match="rounds=0 leaves nothing"):
        time_interleaved({"a": int}, baseline="a", rounds=0)
