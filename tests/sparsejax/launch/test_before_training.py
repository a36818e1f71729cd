"""The questions that a GPU is asked before a run: its preset, and the times of its
steps."""

import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from sparsejax.command.train import read_options
from sparsejax.config import RECIPES, RecipeConfig
from sparsejax.config.presets import PRESETS
from sparsejax.cost_model import BREAK_EVEN_SPEEDS
from sparsejax.distributed.own_process import Terminated, in_own_process
from sparsejax.launch import before_training
from sparsejax.terminal import console
from sparsejax.training import step_times
from sparsejax.training.step_times import PhaseTime, StepTimes
from tests.support.commands import run_train
from tests.support.micro_run import arguments_of, micro_config, read_records

ROOT = Path(__file__).parents[3]


@pytest.fixture
def on_a_gpu(monkeypatch, tmp_path):
    """Pretends that this machine has a GPU, which is its CPU."""
    monkeypatch.setattr(before_training, "accelerator_here", lambda: "a GPU")
    monkeypatch.setenv("SPARSEJAX_CACHE", str(tmp_path / "cache"))
    # Set for this process by what is tested; the one that is started reads it, too.
    monkeypatch.setattr(before_training, "keep_programs", lambda: None)


def times_of(step_ms: float) -> StepTimes:
    sparse = PhaseTime(
        phase=1,
        step_ms=step_ms,
        fastest_ms=step_ms - 1,
        slowest_ms=step_ms + 1,
        dense_ms=100.0,
        dense_after_ms=100.0,
    )
    return StepTimes(
        device="a GPU",
        devices=1,
        dense_ms=100.0,
        fastest_dense_ms=99.0,
        slowest_dense_ms=101.0,
        sparse=(sparse,),
        seconds=9.0,
    )


def test_a_gpu_trains_a_model_on_which_its_tensor_cores_pay(on_a_gpu, monkeypatch):
    wide = PRESETS["wide-200m"]()
    assert read_options([]).config == wide
    assert (wide.model.dtype, wide.recipe) == ("bfloat16", "experts")
    assert read_options(["--preset", "tiny"]).config == PRESETS["tiny"]()
    monkeypatch.setattr(before_training, "accelerator_here", lambda: None)
    assert read_options([]).config == PRESETS["tiny"]()


def test_another_recipe_than_the_presets_drops_what_only_that_one_reads(
    on_a_gpu, monkeypatch
):
    wide = PRESETS["wide-200m"]()
    lengths = RecipeConfig(
        warmup_share=wide.phases.warmup_share, sparse_share=wide.phases.sparse_share
    )
    own = replace(RECIPES["experts"], skipped_energy=None)
    with_own = replace(wide, phases=replace(lengths, sparsity=own))
    monkeypatch.setitem(PRESETS, "wide-200m", lambda: with_own)
    for recipe in ("dense", "two-four"):
        config = read_options(["--recipe", recipe]).config
        assert config == replace(wide, recipe=recipe, phases=lengths)
    assert read_options(["--recipe", "experts"]).config == with_own


@pytest.fixture
def asked_anew():
    before_training.accelerator_here.cache_clear()
    yield
    before_training.accelerator_here.cache_clear()


def test_a_machine_without_cuda_is_asked_nothing(asked_anew, monkeypatch):
    monkeypatch.setattr(before_training, "find_spec", lambda name: None)
    monkeypatch.setattr(before_training, "in_own_process", pytest.fail)
    assert before_training.accelerator_here() is None


def test_a_process_of_its_own_is_asked_where_cuda_is_installed(asked_anew, monkeypatch):
    monkeypatch.setattr(before_training, "find_spec", lambda name: object())
    # It is asked, and has the CPU of this machine.
    assert before_training.accelerator_here() is None


@pytest.mark.parametrize(
    ("changes", "why"),
    [({"recipe": "dense"}, "no phase is sparse"), ({}, None)],
)
def test_what_has_nothing_to_time_is_not_timed(changes, why, on_a_gpu, tmp_path):
    config = micro_config("*.txt", **changes)
    assert before_training.why_untimed(config, tmp_path) == why
    (tmp_path / "checkpoints" / "step_00000002.writing").mkdir(parents=True)
    assert before_training.why_untimed(config, tmp_path) == why
    (tmp_path / "checkpoints" / "step_00000002").mkdir()
    assert before_training.why_untimed(config, tmp_path) is not None


def timed_briefly(function, *arguments):
    """`function`, in the process that times: no test reads how steady its times are."""
    step_times.WARM_SECONDS = step_times.ROUND_SECONDS = 0.05
    return function(*arguments)


def test_a_run_is_planned_and_trained_by_its_times(
    on_a_gpu, quick, text, tmp_path, capsys, monkeypatch
):
    """The whole way, on the CPU, where steps on masks are slower than dense ones or, in
    noise, are not: whatever was timed is what is said and done."""
    in_one_that_times = partial(in_own_process, timed_briefly)
    monkeypatch.setattr(before_training, "in_own_process", in_one_that_times)
    config = micro_config(text, steps=16)
    folder = tmp_path / "run"
    arguments = [*arguments_of(config), "--run-folder", str(folder)]
    assert run_train(arguments) == 0
    shown = " ".join(capsys.readouterr().out.split())
    (told,) = [r for r in read_records(folder) if r["event"] == "step_times"]
    assert f"dense {told['dense_ms']:.1f} ms" in shown
    assert f"sparse phase: {told['sparse'][0]['step_ms']:.1f} ms" in shown
    assert ("is trained dense" in shown) == (told["run_dense"] == [1])
    of_steps = [r["sparse"] for r in read_records(folder) if r["event"] == "step"]
    assert any(of_steps) == (told["run_dense"] == [])


@pytest.mark.parametrize(
    ("step_ms", "flags", "said", "sparse"),
    [
        (80.0, [], "1.25 times as fast as dense", True),
        (125.0, [], "skips nothing on a GPU, would lose time and is trained", False),
        (125.0, ["--keep-slower"], "loses time here, and is kept", True),
    ],
)
def test_the_plan_says_what_is_trained_and_the_end_how_fast_it_was(
    step_ms, flags, said, sparse, on_a_gpu, quick, text, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(
        before_training, "times_of_steps", lambda *_, **__: times_of(step_ms)
    )
    monkeypatch.setattr(console, "RECORDS_OF_SPEED", 1)
    folder = tmp_path / "run"
    arguments = arguments_of(micro_config(text))
    arguments = [flag for flag in arguments if "keep-slower" not in flag]
    arguments += ["--run-folder", str(folder), *flags]
    assert run_train(arguments) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert said in shown
    # A run's own speed stands at its end, where it had sparse steps.
    assert ("times as fast, in this run" in shown) == sparse
    steps = [r for r in read_records(folder) if r["event"] == "step"]
    assert any(r["sparse"] for r in steps) == sparse


@pytest.mark.parametrize(
    ("step_ms", "recipe", "warned"),
    [(96.0, "experts", True), (80.0, "experts", False), (96.0, "two-four", False)],
)
def test_experts_that_gain_too_little_time_to_be_worth_their_loss_are_named(
    step_ms, recipe, warned, on_a_gpu, quick, text, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(
        before_training, "times_of_steps", lambda *_, **__: times_of(step_ms)
    )
    arguments = arguments_of(micro_config(text, recipe=recipe))
    assert run_train([*arguments, "--run-folder", str(tmp_path / "run")]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert f"{100 / step_ms:.2f} times as fast as dense" in shown
    assert (
        f"only where sparse steps were {BREAK_EVEN_SPEEDS[0]} times" in shown
    ) == warned


@pytest.mark.parametrize("flag", ["--tune", "--no-tune"])
def test_kernels_are_tuned_where_steps_are_timed(
    flag, on_a_gpu, quick, text, tmp_path, monkeypatch
):
    """In a process of their own, so that dense steps are timed at the full clock: here
    in this one, to see it."""
    happened = []

    def in_own_process(function, *arguments):
        happened.append("a process")
        return function(*arguments)

    monkeypatch.setattr(before_training, "in_own_process", in_own_process)
    monkeypatch.setattr(
        "sparsejax.tuning.tune.tune_for_all",
        lambda gemms, *, tune, report: happened.append((len(gemms), tune)),
    )
    monkeypatch.setattr(
        before_training,
        "time_steps",
        lambda config, corpus: happened.append("timed") or times_of(80.0),
    )
    arguments = arguments_of(micro_config(text, recipe="weights"))
    arguments += ["--run-folder", str(tmp_path / "run"), flag]
    assert run_train(arguments) == 0
    timed = ["a process", "timed"]
    tuned = ["a process", (6, True)] if flag == "--tune" else []
    assert happened == [*tuned, *timed]


def test_sigterm_while_steps_are_timed_ends_well(
    on_a_gpu, text, tmp_path, capsys, monkeypatch
):
    def terminated(*_, **__):
        raise Terminated

    monkeypatch.setattr(before_training, "in_own_process", terminated)
    arguments = [*arguments_of(micro_config(text)), "--run-folder", str(tmp_path / "r")]
    assert run_train(arguments) == 0
    shown = capsys.readouterr().out
    assert "stopped by SIGTERM or Ctrl-C before the first step" in shown


def test_all_processes_go_by_what_the_first_has_timed():
    times = times_of(80.0)
    assert before_training.agreed(times) == times


def test_nothing_before_the_timing_asks_this_process_for_devices(text, tmp_path):
    """A process that has asked JAX for its devices holds their memory: the one that
    times the steps would have none left. Here to ask is an error."""
    program = """
import sys
from sparsejax.command.train import read_options
from sparsejax.launch import before_training
from sparsejax.data.corpus import load_corpus
before_training.accelerator_here = lambda: "a GPU"
asked = []
before_training.in_own_process = lambda *arguments: asked.append(arguments)
options = read_options(sys.argv[1:])
config = options.config
assert before_training.why_untimed(config, None) is None
corpus = load_corpus(config.data, vocab_size=config.model.vocab_size)
before_training.times_of_steps(config, corpus)
assert len(asked) == 2
import jax
try:
    jax.devices()
except RuntimeError:
    print("none asked for")
"""
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments_of(micro_config(text))],
        env=os.environ | {"JAX_PLATFORMS": "nowhere", "SPARSEJAX_CACHE": str(tmp_path)},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.stdout.splitlines()[-1:] == ["none asked for"], done.stderr
