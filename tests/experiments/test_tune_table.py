"""The measurements for a GPU's table, and that no two GEMMs are timed at once."""

import queue
import threading
from types import SimpleNamespace

import pytest

from experiments import tune_table
from pallas_kernels import tuning, tuning_cache
from pallas_kernels.tuned_gemm import TunedGemm
from sparsejax.ops.kernels.hopper_shapes import tuned_gemm
from sparsejax.tuning import tune
from tests.support.devices import hopper

GEMMS = [
    TunedGemm(tokens=tokens, d_in=64, d_out=64) for tokens in (32, 64, 128, 256, 512)
]


@pytest.fixture
def tables(monkeypatch, tmp_path):
    """An H100, of which nothing is known, and what the H200's table names."""
    hopper.pretend(monkeypatch, hopper.H100)
    monkeypatch.setattr(tune_table, "current_device", lambda: hopper.H100)
    monkeypatch.setattr(tuning, "FOLDER", tmp_path / "tuned")
    monkeypatch.setenv(tuning_cache.VARIABLE, str(tmp_path / "cache"))
    tuning.forget()
    entries = [hopper.timed(gemm, 1.0, 2.0) for gemm in GEMMS]
    tuning.save_shipped(hopper.H200.kind, entries)
    yield
    tuning.forget()


def test_what_other_tables_and_the_presets_have_is_to_do_and_what_is_known_is_not(
    tables,
):
    config = tune_table.Config(presets=(), shipped=True)
    assert tune_table._todo(config) == (hopper.H100.kind, GEMMS)
    tuning.save_shipped(hopper.H100.kind, [hopper.timed(GEMMS[0], 1.0, 2.0)])
    tuning.save(hopper.H100.kind, [hopper.timed(GEMMS[1], 1.0, 2.0)])
    assert tune_table._todo(config)[1] == GEMMS[1:]
    own = tune_table.Config(presets=(), shipped=False)
    assert tune_table._todo(own)[1] == GEMMS[2:]
    narrow = tune_table.Config(presets=(), d_model=(32,))
    assert tune_table._todo(narrow)[1] == []
    of_preset = tune_table._todo(tune_table.Config(like=(), presets=("gpt-124m",)))[1]
    widths = {tune.sizes_of(tuned_gemm(spec))[2] for spec in of_preset}
    assert len(of_preset) > 5 and widths == {768}


def test_only_a_hopper_gpu_is_tuned(tables, monkeypatch):
    monkeypatch.setattr(tune_table, "current_device", lambda: hopper.A100)
    with pytest.raises(ValueError, match="needs a Hopper GPU, not NVIDIA A100"):
        tune_table._todo(tune_table.Config())


def test_what_is_compiled_side_by_side_is_timed_alone(monkeypatch):
    workers, rounds = 2, 3
    compiling, timing, done = [], [], []

    def trial(job):
        assert not timing
        compiling.append(job)
        wrong, right = SimpleNamespace(), SimpleNamespace()
        return tune.Trial(
            gemm=job,
            sparse={"wrong": wrong, "right": right},
            dense=None,
            pack=None,
            gemms_packed=1,
            is_correct=lambda call: call is right,
        )

    def measured(trial):
        assert not timing and set(done) | {trial.gemm} <= set(compiling)
        assert len(compiling) == min(len(GEMMS), workers * (1 + len(done) // workers))
        timing.append(trial.gemm)
        assert list(trial.sparse) == ["right"]
        done.append(timing.pop())
        return hopper.timed(trial.gemm, 1.0, 2.0)

    monkeypatch.setattr(tune, "trial_of_entry", trial)
    monkeypatch.setattr(tune, "measured", measured)
    compiled, timed = threading.Barrier(workers), threading.Barrier(workers)
    alone, found = threading.Lock(), queue.Queue()
    threads = [
        threading.Thread(
            target=tune_table._work,
            args=(GEMMS[number::workers], rounds, compiled, alone, timed, found),
        )
        for number in range(workers)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    entries = [found.get_nowait() for _ in GEMMS]
    assert {entry.gemm for entry in entries} == set(GEMMS) == set(done)


def test_the_death_of_a_process_that_tunes_is_told():
    alive, dead = SimpleNamespace(exitcode=None), SimpleNamespace(exitcode=-9)
    with pytest.raises(ChildProcessError, match="fewer processes"):
        tune_table._next(queue.Queue(), [alive, dead])
