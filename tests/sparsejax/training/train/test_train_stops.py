"""What stops a run: non-finite numbers, signals, the new process of its tail."""

import math
import signal
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from sparsejax.checkpoints.checkpoint import Checkpoints
from sparsejax.reports import metrics
from sparsejax.training import throughput
from sparsejax.training import train as loop
from sparsejax.training.progress import NonFiniteLoss
from sparsejax.training.run import Run
from sparsejax.training.train import train
from tests.support.micro_run import (
    assert_same_bits,
    micro_config,
    read_records,
    without_speed,
)
from tests.support.whole_runs import Killed, kill_at, with_sparse_kernels

pytestmark = pytest.mark.usefixtures("quick_loop")


def poison(monkeypatch, *, step: int, name: str, value: float) -> None:
    """Makes one entry of the report of one step non-finite, and the masters NaN."""
    original = Run._step

    def poisoned(self, sparsity, *held):
        honest = original(self, sparsity, *held)

        def run(state, tokens):
            state, report = honest(state, tokens)
            if int(state.step) == step:
                report = {**report, name: jnp.float32(value)}
                params = jax.tree.map(lambda x: x * jnp.nan, state.params)
                state = replace(state, params=params)
            return state, report

        return run

    monkeypatch.setattr(Run, "_step", poisoned)


@pytest.mark.parametrize(
    ("name", "value"), [("loss", math.nan), ("gradient_norm", math.inf)]
)
def test_what_is_not_finite_stops_the_run_before_it_is_saved(
    name, value, text, tmp_path, monkeypatch, uninterrupted
):
    config, folder, expected = uninterrupted("two-four")
    with monkeypatch.context() as patch:
        patch.setattr(loop, "Run", Run)
        # Step 8 ends in a validation and a checkpoint.
        poison(patch, step=8, name=name, value=value)
        with pytest.raises(NonFiniteLoss) as caught:
            train(config, tmp_path)
    message = str(caught.value)
    assert f"{name}={value}" in message
    assert "at step 8, phase 1 (sparse)" in message
    good = tmp_path / "checkpoints" / "step_00000006"
    assert str(good) in message and good.is_dir()
    assert Checkpoints(tmp_path / "checkpoints").latest_step() == 6
    last = read_records(tmp_path)[-1]
    assert (last["event"], last["at"]) == ("non_finite_loss", 8)
    # The cause gone, the run goes on from there as if nothing had happened.
    resumed = train(config, tmp_path)
    assert_same_bits(resumed.state, expected.state)
    ours, theirs = read_records(tmp_path), read_records(folder)
    assert without_speed(ours) == without_speed(theirs)


def test_it_is_noticed_between_records_as_well(text, tmp_path, monkeypatch):
    settings = {"log_every": 100, "eval_every": 0, "checkpoint_every": 0}
    monkeypatch.setattr(loop, "Run", Run)
    poison(monkeypatch, step=2, name="loss", value=math.nan)
    with pytest.raises(NonFiniteLoss, match="at step 2, .* There is no checkpoint yet"):
        train(micro_config(text, **settings), tmp_path)


def test_a_non_finite_validation_stops_the_run_before_the_switch(
    text, tmp_path, monkeypatch, uninterrupted
):
    config, _, _ = uninterrupted("two-four")
    monkeypatch.setattr(Run, "validate", lambda *_, **__: math.nan)
    with pytest.raises(NonFiniteLoss, match="validation_loss=nan at step 3, phase 0"):
        train(config, tmp_path)
    assert Checkpoints(tmp_path / "checkpoints").latest_step() == 2


def test_a_huge_learning_rate_never_leaves_a_non_finite_checkpoint(text, tmp_path):
    config = micro_config(text, checkpoint_every=1, eval_every=0)
    optimizer = replace(config.optimizer, peak_learning_rate=1e30)
    config = replace(config, optimizer=optimizer)
    with pytest.raises(NonFiniteLoss):
        train(config, tmp_path)
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        template = Run(config).template(Run(config).phases[0].sparsity)
        for step in checkpoints.steps():
            state = checkpoints.restore(step, template=template).state
            finite = jax.tree.map(lambda x: bool(jnp.isfinite(x).all()), state.params)
            assert all(jax.tree.leaves(finite)), step


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_stop_finishes_the_step_and_saves_it(
    number, uninterrupted, tmp_path
):
    config, _, expected = uninterrupted("two-four")
    before = signal.getsignal(number)

    def observe(record: dict) -> None:
        if (record["event"], record["step"]) == ("step", 5):
            signal.raise_signal(number)

    outcome = train(config, tmp_path, observe=observe)
    assert not outcome.completed
    # Step 5 was being written down when the signal came: step 6 is the last.
    assert int(outcome.state.step) == 6
    assert signal.getsignal(number) == before
    assert Checkpoints(tmp_path / "checkpoints").latest_step() == 6
    assert_same_bits(train(config, tmp_path).state, expected.state)


@pytest.fixture
def sparse_kernels(monkeypatch):
    """Pretends that every sparse GEMM has a kernel."""
    found = with_sparse_kernels(metrics.ffn_decisions)
    monkeypatch.setattr(metrics, "ffn_decisions", found)


def test_a_caller_may_resume_in_a_new_process_after_sparse_kernels(
    uninterrupted, sparse_kernels, tmp_path
):
    config, _, expected = uninterrupted("two-four")
    config = replace(config, new_process_minutes=0)
    stopped = train(config, tmp_path, stop_after_sparse=True)
    assert (stopped.resume_in_new_process, stopped.completed) == (True, False)
    assert (stopped.folder, int(stopped.state.step)) == (tmp_path, 9)
    ended = train(config, tmp_path, stop_after_sparse=True)
    assert (ended.resume_in_new_process, ended.completed) == (False, True)
    assert_same_bits(ended.state, expected.state)


@pytest.mark.parametrize(
    ("asked", "minutes", "kernels"),
    [(False, 0, True), (True, 1, True), (True, 0, False)],
)
def test_where_nobody_asks_or_nothing_is_gained_it_goes_on(
    asked, minutes, kernels, request, uninterrupted, tmp_path
):
    """A short dense phase, or no sparse kernels before it."""
    if kernels:
        request.getfixturevalue("sparse_kernels")
    config, _, _ = uninterrupted("two-four")
    config = replace(config, new_process_minutes=minutes)
    outcome = train(config, tmp_path, stop_after_sparse=asked)
    assert outcome.completed and not outcome.resume_in_new_process


@pytest.mark.parametrize(("minutes", "stops"), [(4.9, True), (5.1, False)])
def test_what_is_left_is_estimated_from_the_pace(
    minutes, stops, uninterrupted, sparse_kernels, monkeypatch, tmp_path
):
    config, _, _ = uninterrupted("two-four")
    config = replace(config, new_process_minutes=minutes)
    # The three dense steps would take five minutes.
    rate = 3 * config.tokens_per_step / 300
    monkeypatch.setattr(throughput.Clock, "tokens_per_second", lambda *_: rate)
    outcome = train(config, tmp_path, stop_after_sparse=True)
    assert outcome.resume_in_new_process is stops


def test_sigterm_in_the_wait_for_the_last_save_is_heard(
    uninterrupted, sparse_kernels, monkeypatch, tmp_path
):
    config, _, _ = uninterrupted("two-four")
    config = replace(config, new_process_minutes=0)
    saved: list[int] = []
    wait = Checkpoints.wait

    def wait_and_be_told(self) -> None:
        wait(self)
        if saved[-1:] == [9]:
            signal.raise_signal(signal.SIGTERM)
            saved.append(10)

    def observe(record: dict) -> None:
        if record["event"] == "checkpoint":
            saved.append(record["step"])

    monkeypatch.setattr(Checkpoints, "wait", wait_and_be_told)
    outcome = train(config, tmp_path, stop_after_sparse=True, observe=observe)
    assert 10 in saved and int(outcome.state.step) == 9
    assert not outcome.completed and not outcome.resume_in_new_process


def test_a_run_that_is_told_to_stop_is_not_resumed_in_a_new_process(
    uninterrupted, sparse_kernels, tmp_path
):
    config, _, _ = uninterrupted("two-four")
    config = replace(config, new_process_minutes=0)

    def observe(record: dict) -> None:
        if (record["event"], record["step"]) == ("step", 8):
            signal.raise_signal(signal.SIGTERM)

    outcome = train(config, tmp_path, observe=observe, stop_after_sparse=True)
    assert int(outcome.state.step) == 9
    assert not outcome.completed and not outcome.resume_in_new_process


class SignalledBatches:
    """Batches of which the fifth comes together with SIGTERM."""

    def __init__(self, batches) -> None:
        self.batches = batches
        self.taken = 0

    def __next__(self):
        self.taken += 1
        if self.taken == 5:
            signal.raise_signal(signal.SIGTERM)
        return next(self.batches)

    def get_state(self):
        return self.batches.get_state()


def test_sigterm_between_records_is_saved_too(
    text, tmp_path, monkeypatch, uninterrupted
):
    _, _, expected = uninterrupted("two-four")
    settings = {"log_every": 100, "eval_every": 0, "checkpoint_every": 0}
    config = micro_config(text, **settings)
    batches = Run.batches
    with monkeypatch.context() as patch:
        patch.setattr(Run, "batches", lambda run: SignalledBatches(batches(run)))
        outcome = train(config, tmp_path)
    assert not outcome.completed
    assert Checkpoints(tmp_path / "checkpoints").latest_step() == 5
    assert_same_bits(train(config, tmp_path).state, expected.state)


def test_the_handler_of_sigterm_is_given_back(uninterrupted, tmp_path):
    config, _, _ = uninterrupted("two-four")
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Killed):
        train(config, tmp_path, observe=kill_at("step", 1))
    assert signal.getsignal(signal.SIGTERM) is before
