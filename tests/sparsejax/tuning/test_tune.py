"""The tuning before a run: which GEMMs, how, and what becomes of the times."""

from dataclasses import replace
from types import SimpleNamespace

import jax
import pytest

from pallas_kernels import tuning, tuning_cache
from pallas_kernels.device import CPU
from pallas_kernels.sm90.sparse_matmul_configs import default_config
from sparsejax.config import TrainConfig
from sparsejax.config.presets import PRESETS
from sparsejax.feed_forward.gated_ffn import GatedFFNSpec
from sparsejax.feed_forward.sparsity import FFNSparsity
from sparsejax.feed_forward.spec import FFNSpec
from sparsejax.ops.kernels import registry
from sparsejax.ops.kernels.hopper_shapes import tuned_gemm
from sparsejax.routing.routers import ActivationEnergy
from sparsejax.sparsity.patterns import NM, VNM
from sparsejax.tuning import ffn_gemms, tune
from tests.support.devices import hopper

TWO_FOUR = NM(2, 4)
ALL_SIX = FFNSparsity(
    weights=TWO_FOUR, activations=TWO_FOUR, token_sparsity="magnitude"
)
EXPERTS = FFNSparsity(
    weights=TWO_FOUR,
    activations=VNM(128, 2, 8),
    skip_blocks=True,
    weight_gradients="expert_columns",
    token_sparsity="magnitude",
)
BY_ENERGY = replace(
    EXPERTS, skip_blocks=False, router=ActivationEnergy(), experts_per_token=2
)
SMALL = {"tokens": 256, "d_model": 64, "d_hidden": 256, "dtype": "bfloat16"}


@pytest.fixture(autouse=True)
def nothing_is_tuned(tmp_path, monkeypatch):
    monkeypatch.setattr(tuning, "FOLDER", tmp_path / "tuned")
    monkeypatch.setattr(tuning, "_given", {})
    monkeypatch.setenv(tuning_cache.VARIABLE, str(tmp_path / "cache"))
    tuning.forget()
    yield
    tuning.forget()


def gemms(sparsity: FFNSparsity, **changes):
    return FFNSpec(
        sparsity=sparsity, **SMALL | {"device": hopper.H200} | changes
    ).gemms()


def tuned_gemms(specs):
    return {tuned_gemm(spec) for spec in specs}


def test_what_nobody_has_measured_on_this_gpu_is_missing():
    specs = gemms(ALL_SIX)
    # GEMMs 1 and 3 are one.
    found = tune.missing(specs, hopper.H200)
    assert set(found) == tuned_gemms(specs) and len(found) == 5
    first, second, *others = found
    tuning.save(hopper.H200.kind, [hopper.timed(first, 1.0, 2.0)])
    tuning.save_shipped(hopper.H200.kind, [hopper.timed(second, 1.0, 2.0)])
    assert list(tune.missing(specs, hopper.H200)) == others
    # Near their number of tokens they are known too; on another GPU they are not.
    assert len(tune.missing(gemms(ALL_SIX, tokens=320), hopper.H200)) == 3
    assert len(tune.missing(gemms(ALL_SIX, tokens=1024), hopper.H200)) == 5
    assert len(tune.missing(gemms(ALL_SIX, device=hopper.H100), hopper.H100)) == 5


@pytest.mark.parametrize(
    ("changes", "count"),
    [
        ({"device": CPU}, 0),
        ({"device": hopper.A100}, 0),
        ({"dtype": "float32"}, 0),
        ({"d_model": 96}, 0),  # k of GEMM 1, n of the others
        ({"d_hidden": 288}, 0),
        ({"token_shards": 4}, 5),
    ],
)
def test_what_no_kernel_could_run_is_not_missing(changes, count):
    specs = gemms(ALL_SIX, **changes)
    assert len(tune.missing(specs, hopper.H200)) == count


def as_timed(trial: tune.Trial) -> tuning.Entry:
    """Correct at the first config, at a made-up time."""
    config, call = next(iter(trial.sparse.items()))
    assert trial.is_correct(call)
    assert jax.block_until_ready((trial.dense(), trial.pack()))
    return replace(hopper.timed(trial.gemm, 3.0, 7.0), config=config)


@pytest.mark.parametrize(
    "specs",
    [
        gemms(ALL_SIX),
        gemms(ALL_SIX, tokens=250),
        gemms(EXPERTS),
        gemms(BY_ENERGY),
        gemms(replace(EXPERTS, dense_features=0.0), token_shards=2, tokens=512),
        GatedFFNSpec(
            sparsity=ALL_SIX, activation="reglu2", device=hopper.H200, **SMALL
        ).gemms(),
    ],
    ids=[
        "all neurons",
        "odd tokens",
        "experts",
        "two experts each",
        "no whole features",
        "gated",
    ],
)
def test_every_gemm_that_an_ffn_asks_for_is_timed_as_it_is(specs, monkeypatch):
    hopper.pretend(monkeypatch)
    monkeypatch.setattr(
        tuning, "candidates", lambda shape, count: [default_config(shape, count)]
    )
    asked = set(tune.missing(specs, hopper.H200))
    assert asked
    said: list[str] = []
    found = tune.tune_missing(specs, report=said.append, measure=as_timed)
    assert {entry.gemm for entry in found} == asked
    assert tuning.own(hopper.H200.kind) == {entry.gemm: entry for entry in found}
    # A line of each, with seconds, and one before and after all.
    assert len(said) == len(asked) + 2
    assert (
        said[0]
        == f"tuning {len(asked)} GEMMs that nobody has timed on this NVIDIA H200"
    )
    assert all(line.endswith(" s)") and "dense 7 us" in line for line in said[1:-1])
    assert said[-1].startswith(f"tuned {len(asked)} GEMMs in ")
    # Nothing is measured twice.
    said.clear()
    assert tune.tune_missing(specs, report=said.append, measure=as_timed) == []
    assert said == []


def test_the_fastest_correct_config_is_kept_with_the_times_of_the_same_run(monkeypatch):
    gemm = tuned_gemm(gemms(ALL_SIX)[0])
    configs = tuning.candidates(gemm.shape(), 132)[:3]
    wrong, slow, fast = (lambda: 0), (lambda: 1), (lambda: 2)
    ms = {wrong: 0.1, slow: 3.0, fast: 2.0, "dense": 5.0, "pack": 1.0}
    asked = []

    def time_queued(calls, *, baseline, rounds):
        asked.append(list(calls))
        timings = [
            SimpleNamespace(name=name, time_ms=ms[call]) for name, call in calls.items()
        ]
        return timings, {}

    monkeypatch.setattr(tune, "time_queued", time_queued)
    trial = tune.Trial(
        gemm=gemm,
        sparse=dict(zip(configs, (wrong, slow, fast), strict=True)),
        dense="dense",
        pack="pack",
        gemms_packed=2,
        is_correct=lambda call: call is not wrong,
    )
    entry = tune.measured(trial)
    assert (entry.gemm, entry.config) == (gemm, configs[2])
    assert (entry.sparse_us, entry.dense_us, entry.pack_us) == (2000.0, 5000.0, 500.0)
    # What is wrong is not timed; the dense GEMM in turn with what is not.
    assert asked == [["dense", str(configs[1]), str(configs[2])], ["pack"]]
    with pytest.raises(ValueError, match="no config computes"):
        tune.measured(replace(trial, is_correct=lambda call: False))


@pytest.mark.parametrize("sparsity", [ALL_SIX, EXPERTS], ids=["all neurons", "experts"])
def test_a_kernel_that_computes_something_else_ends_the_run(sparsity, monkeypatch):
    hopper.pretend(monkeypatch)
    monkeypatch.setattr(
        tuning, "candidates", lambda shape, count: [default_config(shape, count)]
    )
    of = tune.trial_of(gemms(sparsity)[1])
    (call,) = of.sparse.values()
    assert of.is_correct(call)
    shifted = tune.trial_of(gemms(sparsity)[1])
    assert not shifted.is_correct(lambda: 1.05 * call())


def test_a_gemm_that_does_not_fit_the_memory_stays_an_estimate(monkeypatch):
    hopper.see_device(monkeypatch)
    monkeypatch.setattr(tune, "trial_of", lambda spec: spec)
    first, *_ = specs = gemms(ALL_SIX)

    def measure(spec):
        if spec is first:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")
        return hopper.timed(tuned_gemm(spec), 1.0, 2.0)

    said: list[str] = []
    assert len(tune.tune_missing(specs, report=said.append, measure=measure)) == 4
    assert "could not be timed (RESOURCE_EXHAUSTED: out of memory)" in said[1]


@pytest.mark.parametrize("device", [CPU, hopper.A100], ids=lambda of: of.kind)
def test_other_devices_tune_nothing(device, monkeypatch):
    hopper.see_device(monkeypatch, device)
    said: list[str] = []
    assert tune.tune_missing(gemms(ALL_SIX), report=said.append) == []
    assert said == []


def on_a_cpu(monkeypatch, kernels) -> None:
    """Registers a second set of kernels, for CPUs."""
    registered = registry.Registered(
        name="of_another_device",
        why_unavailable=lambda device: None if device.platform == "cpu" else "no CPU",
        load=lambda device: kernels,
    )
    monkeypatch.setattr(registry, "REGISTERED", (*registry.REGISTERED, registered))


def test_a_second_set_of_kernels_is_tuned_on_its_own_device(monkeypatch):
    on_a_cpu(monkeypatch, hopper.PlainKernels(hopper.H200))
    monkeypatch.setattr(
        tuning, "candidates", lambda shape, count: [default_config(shape, count)]
    )
    specs = gemms(ALL_SIX, device=CPU)
    asked = set(tune.missing(specs, CPU))
    assert asked == tuned_gemms(specs)
    found = tune.tune_missing(specs, report=lambda line: None, measure=as_timed)
    assert {entry.gemm for entry in found} == asked == set(tuning.own(CPU.kind))
    assert tune.missing(specs, CPU) == {}


def test_kernels_without_configs_are_not_tuned(monkeypatch):
    on_a_cpu(monkeypatch, SimpleNamespace(why_unsupported=lambda gemm: None))
    specs = gemms(ALL_SIX, device=CPU)
    assert tune.missing(specs, CPU) == {}
    assert tune.tune_missing(specs, report=pytest.fail) == []
    with pytest.raises(ValueError, match="no kernel of cpu has configs to compare"):
        ffn_gemms.make_problem("1", 256, 64, 256)


def test_a_run_asks_for_its_sparse_phases_on_one_device():
    llama = PRESETS["llama-1b"]()
    llama = replace(llama, recipe="weights", mesh=replace(llama.mesh, data=0))
    micro_batch = llama.sequences_per_device * jax.device_count()
    tokens = micro_batch * llama.data.sequence_length
    specs = tune.gemms_of_run(llama)
    assert len(specs) == 6 and specs[0].pattern == TWO_FOUR
    assert specs[0].tokens == tokens // jax.device_count()
    assert tune.gemms_of_run(replace(llama, recipe="dense")) == []
    assert tune.gemms_of_run(replace(llama, backend="xla")) == []
    assert tune.gemms_of_run(TrainConfig())


def test_other_processes_take_the_entries_of_the_first(monkeypatch):
    hopper.see_device(monkeypatch)
    specs, given = gemms(ALL_SIX), []
    tuned = hopper.timed(tuned_gemm(specs[0]), 1.0, 2.0)

    class Pair:
        def __init__(self, name):
            assert name == "tuning"

        def gather(self, key, text, *, timeout_seconds):
            assert timeout_seconds >= 600
            given.append(text)
            return [given[0], ""]

    def tune_missing(specs, *, report):
        tuning.save(hopper.H200.kind, [tuned])
        report("tuned")

    said: list[str] = []
    monkeypatch.setattr(tune, "Exchange", Pair)
    monkeypatch.setattr(tune, "tune_missing", tune_missing)
    tune.tune_for_all(specs, tune=True, report=said.append)
    assert said == ["tuned"] and given == []  # alone
    monkeypatch.setattr(tune.jax, "process_count", lambda: 2)
    tune.tune_for_all(specs, tune=False, report=said.append)
    assert len(given) == 1 and said == ["tuned"]
    # The other one had measured for itself, long ago.
    monkeypatch.setattr(tune.jax, "process_index", lambda: 1)
    tuning.save(hopper.H200.kind, [replace(tuned, sparse_us=9.0)])
    tune.tune_for_all(specs, tune=True, report=said.append)
    assert given[1] == "" and said == ["tuned"]
    assert tuning.entries(hopper.H200.kind) == {tuned.gemm: tuned}


def test_an_entry_of_a_table_names_its_gemm():
    specs = {
        tuned_gemm(spec): spec
        for sparsity in (ALL_SIX, EXPERTS)
        for spec in gemms(sparsity, d_hidden=1024)
        if tune.runnable([spec])
    }
    assert len(specs) == 10
    for gemm, spec in specs.items():
        number, tokens, d_model, neurons = tune.sizes_of(gemm)
        assert spec.name[0] in ("13" if number == "1" else number)
        assert (tokens, d_model) == (256, 64)
        assert neurons == (1024 if spec.experts is None else 512)


def test_every_gemm_that_is_shipped_has_sizes_that_make_it(monkeypatch):
    monkeypatch.undo()
    tuning.forget()
    gemms = [g for g in tuning.shipped(hopper.H200.kind) if not g.group_tile]
    assert gemms
    for gemm in gemms:
        made = ffn_gemms._tuned_gemm(*tune.sizes_of(gemm), ffn_gemms.DENSE_FEATURES)
        assert replace(made, float32_out=gemm.float32_out) == gemm
