"""The benchmark of whole steps times what it has checked, and says where time goes."""

import itertools
import json
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from experiments.bench import step
from experiments.bench.sparse_modes import sparse_modes
from pallas_kernels import tuning
from sparsejax.config.config_file import from_plain
from sparsejax.config.presets import PRESETS
from sparsejax.config.schedule import Phase
from sparsejax.cost_model import parameter_count
from sparsejax.feed_forward.sparsity import DENSE, FFNSparsity
from sparsejax.ops import fp8_linear
from sparsejax.sparsity.patterns import NM
from tests.support.devices import hopper

pytestmark = pytest.mark.usefixtures("quick")

SEQUENCE = 128


@pytest.fixture
def config(text):
    return step.Config(
        preset="tiny",
        layers=1,
        batch_size=4,
        micro_batches=2,
        text=text,
        precisions=(),
        rounds=2,
        steps=1,
        results=None,
    )


def test_rows(config, tmp_path):
    config = replace(config, results=tmp_path / "new" / "rows.jsonl")
    rows = step.main(config)
    assert [json.loads(line) for line in config.results.open()] == rows
    dense, sparse = rows
    assert [row["name"] for row in rows] == ["dense", "2:4 weights"]
    assert (dense["speedup"], dense["spread"]) == (1.0, [1.0, 1.0])
    assert "error" not in dense and "alone" not in sparse
    assert dense["over_dense_alone"] * dense["step_ms"] == pytest.approx(
        dense["alone"]["step_ms"]
    )
    assert dense["alone_after_sparse"]["step_ms"] > 0
    for name, spread in (("speedup", "spread"), ("over_dense_alone", "spread_alone")):
        low, high = sparse[spread]
        assert 0 < low <= sparse[name] <= high
    assert sparse["over_dense_alone"] / dense["over_dense_alone"] == pytest.approx(
        dense["step_ms"] / sparse["step_ms"]
    )
    computed = [from_plain(FFNSparsity, row["sparsity"]) for row in rows]
    assert computed == [DENSE, FFNSparsity(weights=NM(2, 4))]
    # On a CPU the sparse step is the masked one, rounded in float32.
    assert sparse["error"] == pytest.approx({"loss": 0, "gradient_norm": 0}, abs=1e-5)
    model = replace(PRESETS["tiny"]().model, layers=1)
    state = 3 * 4 * parameter_count(model).total
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
        assert (row["experts"], row["v"], row["switch_seconds"]) == (None,) * 3


def test_every_step_is_timed_in_8_bit_floats_too(config, monkeypatch):
    programs = {}
    compiled = step.Steps._compiled

    def kept(self, of_step, *, without=None):
        by_name = compiled(self, of_step, without=without)
        kind = "masked" if without else "timed"
        programs.update({(kind, name): of.as_text() for name, of in by_name.items()})
        return by_name

    monkeypatch.setattr(step.Steps, "_compiled", kept)
    rows = step.main(replace(config, precisions=("fp8",)))
    by_name = {row["name"]: row for row in rows}
    names = ["dense", "2:4 weights", "dense, fp8", "2:4 weights, fp8"]
    assert list(by_name) == names
    assert [row["precision"] for row in rows] == ["dtype", "dtype", "fp8", "fp8"]
    fp8 = by_name["dense, fp8"]
    for row in rows:
        low, high = row["spread_fp8"]
        assert 0 < low <= row["over_fp8_dense"] <= high
        assert row["over_fp8_dense"] * row["step_ms"] == pytest.approx(
            fp8["over_fp8_dense"] * fp8["step_ms"]
        )
        # They step on one state.
        assert row["state_gib"] == pytest.approx(rows[0]["state_gib"], rel=0.01)
    # On a CPU the sparse step is the masked one, which rounds to 8 bits too.
    nothing = {"loss": 0, "gradient_norm": 0}
    assert by_name[names[3]]["error"] == pytest.approx(nothing, abs=1e-4)
    # The dense one is held against the dense one that does not.
    assert 1e-6 < by_name[names[2]]["error"]["gradient_norm"] < 0.3
    for (kind, name), program in programs.items():
        rounds = name in names[2:] and (kind, name) != ("masked", names[2])
        assert ("f8e4m3" in program) == rounds
    assert len(programs) == 2 * len(names) - 1


def test_a_lost_scale_of_8_bit_floats_stops_the_benchmark(config, monkeypatch):
    right = fp8_linear.quantise

    def without_step(x, dtype):
        return right(x, dtype)._replace(step=jnp.ones(x.shape[:-2]))

    monkeypatch.setattr(fp8_linear, "quantise", without_step)
    with pytest.raises(AssertionError, match="dense, fp8: "):
        step.main(replace(config, modes=(), precisions=("fp8",)))


def test_steps_with_experts_run_on_clustered_neurons(config):
    modes = ("V:N:M, true mass, 2 of 2E, all six", "skip_blocks, all six")
    # The text is bytes whatever vocabulary is timed.
    config = replace(config, modes=modes, experts=2, v=8, vocab_size=2048, kv_heads=1)
    dense, *sparse = step.main(config)
    assert [row["name"] for row in (dense, *sparse)] == ["dense", *modes]
    assert [row["experts"] for row in sparse] == [4, 2]
    sizes = {(row["vocab_size"], row["kv_heads"]) for row in (dense, *sparse)}
    assert sizes == {(2048, 1)}
    for row in sparse:
        assert row["v"] == 8 and row["switch_seconds"] > 0
        assert row["error"] == pytest.approx({"loss": 0, "gradient_norm": 0}, abs=1e-4)


def test_steps_with_static_weights_are_checked_against_whole_ones(config):
    config = replace(config, modes=(), recipes=("s2d",), static_weights=("2:4",))
    dense, *static = step.main(config)
    assert [row["name"] for row in static] == ["recipe s2d", "static 2:4"]
    patterns = [row["static_weights"] for row in (dense, *static)]
    assert patterns == [None, "diagonal:4", "2:4"]
    for row in static:
        assert row["error"] == pytest.approx({"loss": 0, "gradient_norm": 0}, abs=1e-5)
    quarter, masked = (row["state_gib"] / dense["state_gib"] for row in static)
    assert quarter < 0.6 and masked == pytest.approx(1)
    with pytest.raises(ValueError, match="'two': 'two' names no pattern"):
        step.main(replace(config, static_weights=("two",)))


def test_another_sparsity_gets_the_centres_of_the_clusters(config):
    train = step._train_config(config)
    modes = sparse_modes(experts=2, v=8)
    names = "2:4 weights", "skip_blocks"
    as_phases = {
        name: Phase(kind=name, steps=1, sparsity=modes[name]) for name in names
    }
    steps = step.Steps(train, as_phases)
    w_up = steps.run.model(steps._of(step.DENSE_STEP), DENSE).blocks.ffn.w_up[...][0]
    units = w_up / jnp.linalg.norm(w_up, axis=0, keepdims=True)
    means = units.reshape(len(w_up), 2, -1).mean(axis=2).T
    model = steps.run.model(steps._of("skip_blocks"), modes["skip_blocks"])
    centres = model.blocks.ffn.router_state["centres"][0]
    np.testing.assert_allclose(
        centres, means / jnp.linalg.norm(means, axis=1, keepdims=True), atol=1e-5
    )
    # Alike neurons lie together: their mean is longer than that of any half.
    any_half = units[:, ::2].mean(axis=1)
    assert jnp.linalg.norm(means, axis=1).min() > jnp.linalg.norm(any_half)
    assert steps.run.model(steps._of("2:4 weights"), modes["2:4 weights"])


@pytest.mark.parametrize("remat", ["none", "full", "dots"])
@pytest.mark.parametrize("scan_layers", [False, True])
@pytest.mark.parametrize("backend", [None, "reference"])
def test_settings_reach_the_runs(config, backend, scan_layers, remat):
    config = replace(config, backend=backend, scan_layers=scan_layers, remat=remat)
    train = step._train_config(replace(config, logits_of_loss="dtype"))
    got = train.backend, train.model.scan_layers, train.model.remat
    assert got == (backend, scan_layers, remat)
    assert train.model.logits_of_loss == "dtype"


def test_sizes_are_the_presets_unless_given(config):
    preset = replace(config, preset="llama-1b", layers=None)
    for given, layers, neurons, kv_heads, vocabulary in (
        (preset, 25, 8192, 16, 128_256),
        (replace(preset, layers=4), 4, 8192, 16, 128_256),
        (replace(preset, d_hidden=16_384), 25, 16_384, 16, 128_256),
        (replace(preset, kv_heads=4), 25, 8192, 4, 128_256),
        (replace(preset, vocab_size=16_384), 25, 8192, 16, 16_384),
    ):
        model = step._train_config(given).model
        sizes = model.layers, model.d_hidden, model.kv_heads, model.vocab_size
        assert sizes == (layers, neurons, kv_heads, vocabulary)


def test_what_is_no_mode_is_refused(config):
    with pytest.raises(ValueError, match="'weights' is no mode; choose from 2:4 wei"):
        step.main(replace(config, modes=("weights",)))


def test_the_dense_step_is_timed_alone_before_the_process_runs_a_sparse_one(
    config, monkeypatch
):
    done = []

    def noted(owner, name, say):
        function = getattr(owner, name)

        def run(*arguments, **options):
            done.append(say(*arguments))
            return function(*arguments, **options)

        monkeypatch.setattr(owner, name, run)

    noted(step.Steps, "call", lambda self, name, *_: f"run {name}")
    noted(step, "time_interleaved", lambda calls: f"time {', '.join(calls)}")
    step.main(config)
    start = done[: done.index("run 2:4 weights")]
    assert [name for name, _ in itertools.groupby(start)] == [
        "time dense",
        "run dense",
    ]
    timed = [event for event in done if event.startswith("time")]
    assert timed == ["time dense", "time dense, 2:4 weights", "time dense"]


@pytest.mark.parametrize("wrong", ["loss", "gradient_norm"])
def test_a_wrong_sparse_step_is_never_timed(config, wrong, monkeypatch):
    right = step.Steps.masked

    def one_percent_off(self, mode):
        report = right(self, mode)
        return report | {wrong: 1.01 * report[wrong]}

    time_interleaved = step.time_interleaved

    def timed(calls, **options):
        assert list(calls) == ["dense"], "was timed"
        return time_interleaved(calls, **options)

    monkeypatch.setattr(step.Steps, "masked", one_percent_off)
    monkeypatch.setattr(step, "time_interleaved", timed)
    with pytest.raises(AssertionError, match=rf"2:4 weights: {wrong} \d.*, not \d"):
        step.main(config)


def test_the_sparse_step_runs_on_the_kernels_of_a_gpu_that_has_them(
    config, monkeypatch
):
    tiny = PRESETS["tiny"]()
    bfloat16 = replace(tiny, model=replace(tiny.model, dtype="bfloat16"))
    monkeypatch.setitem(PRESETS, "tiny", lambda: bfloat16)
    monkeypatch.setattr(tuning, "LEAST_FLOPS", 0)
    monkeypatch.setattr(tuning, "entries", lambda kind: {})
    calls = hopper.pretend(monkeypatch)
    dense, sparse = step.main(config)
    assert {"compress", "sparse_matmul"} <= set(calls)
    assert all(gemm.endswith(": xla") for gemm in dense["gemms"])
    backends = [gemm.split(": ")[1] for gemm in sparse["gemms"]]
    assert backends == ["mosaic_sm90", "xla"] * 2 + ["xla"] * 2
    assert sparse["mfu_executed"] < sparse["mfu_dense_equivalent"]


def test_a_dense_step_on_kernels_is_compared_with_that_of_xla(config, monkeypatch):
    tiny = PRESETS["tiny"]()
    bfloat16 = replace(tiny, model=replace(tiny.model, dtype="bfloat16"))
    monkeypatch.setitem(PRESETS, "tiny", lambda: bfloat16)
    calls = hopper.pretend(monkeypatch)
    config = replace(config, backend="mosaic_sm90", modes=())
    (dense,) = step.main(config)
    assert "squared relu of dense_rows" in calls
    backends = [gemm.split(": ")[1] for gemm in dense["gemms"]]
    assert backends == ["mosaic_sm90", "xla"] * 2 + ["xla"] * 2
    assert dense["error"].keys() == {"loss", "gradient_norm"}
    right = step.Steps.masked
    monkeypatch.setattr(
        step.Steps,
        "masked",
        lambda self, mode: {k: 1.01 * v for k, v in right(self, mode).items()},
    )
    with pytest.raises(AssertionError, match=r"dense: loss \d.*, not \d"):
        step.main(config)


COMPARISON = """
seeds = [0]
[base]
preset = "tiny"
[runs.dense]
recipe = "dense"
[runs.two-of-four]
[[runs.two-of-four.phases.schedule]]
name = "experts"
share = 0.5
[runs.two-of-four.phases.schedule.sparsity]
activations = "64:4:16"
experts_per_token = 2
router = "activation_energy"
[[runs.two-of-four.phases.schedule]]
name = "dense"
"""


def test_the_sparse_phases_of_a_comparisons_runs_are_timed(config, tmp_path):
    file = tmp_path / "comparison.toml"
    file.write_text(COMPARISON)
    of_runs = replace(config, modes=(), comparison=file, runs=("two-of-four",))
    dense, sparse = step.main(of_runs)
    assert sparse["name"] == "two-of-four, experts"
    assert (sparse["experts"], sparse["experts_per_token"], sparse["v"]) == (4, 2, 64)
    assert dense["experts_per_token"] is None


def test_the_model_may_be_that_of_a_run(config, tmp_path):
    """The run's widths and sequence length are taken where no option names others."""
    file = tmp_path / "comparison.toml"
    wide = "[runs.wide]\nmodel.d_hidden = 384\ndata.sequence_length = 64\n"
    file.write_text(f"{COMPARISON}\n{wide}")
    given = replace(config, modes=(), comparison=file)
    (row,) = step.main(replace(given, model_of="wide"))
    assert (row["model_of"], row["preset"]) == ("wide", None)
    assert row["comparison"] == "comparison"
    assert (row["layers"], row["d_hidden"]) == (1, 384)
    assert row["tokens_per_micro_batch"] == 2 * 64
    with pytest.raises(ValueError, match="'none' is no run of"):
        step.main(replace(given, model_of="none"))


@pytest.mark.parametrize(
    ("runs", "message"),
    [
        (("four-of-two",), "'four-of-two' is no run of .*choose from dense, two-of"),
        (("dense",), "runs='dense' has no sparse phase"),
    ],
)
def test_runs_that_cannot_be_timed_are_named(runs, message, config, tmp_path):
    file = tmp_path / "comparison.toml"
    file.write_text(COMPARISON)
    with pytest.raises(ValueError, match=message):
        step.main(replace(config, comparison=file, runs=runs))


def test_runs_need_a_comparison_file(config):
    with pytest.raises(ValueError, match="give comparison too"):
        step.main(replace(config, runs=("two-of-four",)))
