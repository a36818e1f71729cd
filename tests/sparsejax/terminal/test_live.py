"""The live view of a run, from records that nobody has run."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from sparsejax.config import DataConfig, PhaseConfig, TrainConfig
from sparsejax.cost_model import flops_per_token
from sparsejax.feed_forward.sparsity import FFNSparsity
from sparsejax.sparsity.patterns import NM
from sparsejax.terminal import console, live
from sparsejax.terminal.live import Standing

SPARSE = FFNSparsity(weights=NM(2, 4))
SCHEDULE = (
    PhaseConfig(name="warm-up", share=0.1),
    PhaseConfig(name="sparse", share=0.6, sparsity=SPARSE),
    PhaseConfig(name="dense"),
)
TOKENS = 1000


def config_of(schedule=SCHEDULE) -> TrainConfig:
    config = replace(
        TrainConfig(),
        steps=100,
        batch_size=10,
        data=DataConfig(sequence_length=TOKENS // 10),
    )
    return config.with_schedule(schedule)


def step(number: int, phase: int, rate: float | None, **values) -> dict:
    kind = SCHEDULE[phase].name
    speed = {} if rate is None else {"tokens_per_second": rate, "mfu_executed": 0.41}
    where = {"event": "step", "step": number, "phase": phase, "kind": kind}
    values = {"loss": 2.5, "gradient_norm": 1.0} | values
    return where | {"sparse": phase == 1} | speed | values


def standing_after(*records: dict, config=None, peak_is_known=True) -> Standing:
    standing = Standing(config or config_of(), peak_is_known=peak_is_known)
    for record in records:
        standing.see(record)
    return standing


TIMED = {
    "event": "step_times",
    "step": 0,
    "dense_ms": 30.0,
    "sparse": [{"phase": 1, "step_ms": 20.0, "dense_ms": 30.0}],
    "run_dense": (),
}


@pytest.mark.parametrize(
    ("records", "seconds"),
    [
        # Nothing is known before the second record of a step.
        ([], None),
        ([step(1, 0, None)], None),
        # 95 steps as fast as the dense ones, 2 seconds each.
        ([step(5, 0, 500.0)], 190),
        # The median: a slow start does not count.
        ([step(3, 0, 10.0), step(4, 0, 500.0), step(5, 0, 500.0)], 190),
        # The 60 sparse ones to come as timed before the run, 1.5 times as fast.
        ([TIMED, step(5, 0, 500.0)], 2 * (5 + 60 / 1.5 + 30)),
        # The sparse phase has its own speed, the dense one to come the warm-up's.
        ([TIMED, step(10, 0, 500.0), step(30, 1, 1000.0)], 40 * 1 + 30 * 2),
        # The dense one too, once it runs: slower than before the sparse one.
        ([step(9, 0, 500.0), step(50, 1, 1e3), step(90, 2, 250.0)], 10 * 4),
        # Resumed in the sparse phase: what is timed says how fast dense ones are.
        ([TIMED, step(30, 1, 1500.0)], (40 + 30 * 1.5) / 1.5),
        ([step(100, 2, 500.0)], 0),
    ],
)
def test_the_time_left_is_the_sum_of_the_phases_each_at_its_speed(records, seconds):
    left = standing_after(*records).seconds_left()
    assert left == (None if seconds is None else pytest.approx(seconds))


def test_a_phase_that_is_trained_dense_is_as_fast_as_dense_ones():
    standing = standing_after(TIMED | {"run_dense": (1,)}, step(5, 0, 500.0))
    assert standing.seconds_left() == pytest.approx(190)
    assert standing.speedup(1) is None


def test_a_smaller_model_is_faster_by_its_flops():
    small = {"layers": 2, "d_hidden": 128}
    config = config_of((PhaseConfig(name="narrow", share=0.5, **small), *SCHEDULE[2:]))
    standing = standing_after(step(10, 0, 500.0), config=config)
    length = config.data.sequence_length
    whole, own = (
        flops_per_token(model, length).total()
        for model in (config.model, replace(config.model, **small))
    )
    assert whole / own > 1.2
    expected = 40 * 2 + 50 * 2 * whole / own
    assert standing.seconds_left() == pytest.approx(expected)


def test_the_speed_over_dense_is_the_runs_own_or_as_timed():
    assert standing_after(step(30, 1, 700.0)).speedup(1) is None
    assert standing_after(TIMED, step(30, 1, 700.0)).speedup(1) == 1.5
    own = standing_after(TIMED, step(9, 0, 500.0), step(30, 1, 700.0))
    assert own.speedup(1) == pytest.approx(1.4) and own.speedup(0) is None


def shown(standing: Standing, width: int = 78) -> list[str]:
    screen = io.StringIO()
    Console(file=screen, width=width).print(standing.rendered(elapsed=65))
    return [line.rstrip() for line in screen.getvalue().splitlines()]


def test_the_view_at_a_fixed_width():
    records = TIMED, step(9, 0, 500.0), step(40, 1, 1000.0)
    bar, speed, times = shown(standing_after(*records))
    assert bar.startswith("sparse ━") and bar.endswith(" step 40 of 100")
    assert len(bar) == 78
    assert speed == "loss 2.500  1,000 tokens/s  MFU 41.0%  2.00x dense"
    assert times == "0:01:05 gone  0:01:30 left  dense from step 70, in 0:00:30"


def test_at_a_switch_the_view_is_of_the_steps_to_come():
    bar, speed, _ = shown(standing_after(TIMED, step(70, 1, 1000.0)))
    assert bar.startswith("dense ━") and "x dense" not in speed
    bar, speed, times = shown(standing_after(TIMED, step(10, 0, 500.0)))
    assert bar.startswith("sparse ━") and speed.endswith("1.50x dense")
    assert times.endswith("dense from step 70, in 0:01:20")


def test_what_is_not_known_is_not_shown():
    _, speed, times = shown(standing_after())
    assert speed == "loss -"
    assert times == "0:01:05 gone  -:--:-- left  sparse from step 10, in -:--:--"
    last = standing_after(step(90, 2, 500.0), peak_is_known=False)
    _, speed, times = shown(last)
    assert speed == "loss 2.500  500 tokens/s"
    assert times == "0:01:05 gone  0:00:20 left"


def test_a_terminal_gets_the_view_and_a_file_a_line_per_record(monkeypatch):
    config = config_of()

    def output(is_terminal: bool) -> str:
        screen = io.StringIO()
        terminal = Console(
            file=screen, force_terminal=is_terminal, width=80, color_system=None
        )
        monkeypatch.setattr(console, "STDOUT", terminal)
        with console.progress(config) as observe:
            observe(step(5, 0, 500.0))
            observe({"event": "validation", "step": 5, "kind": "warm-up", "loss": 2.0})
        return screen.getvalue()

    line = "step 5/100 warm-up: loss 2.500, 500 tokens/s\n"
    validation = "step 5 warm-up: validation loss 2.0000\n"
    assert output(False) == line + validation
    on_terminal = output(True)
    assert line not in on_terminal
    assert "step 5 warm-up: validation loss 2.0000" in on_terminal
    assert "sparse from step 10, in 0:00:10" in on_terminal


def test_the_peak_of_a_cpu_is_not_known(monkeypatch):
    seen = []
    monkeypatch.setattr(
        live, "Standing", lambda config, **known: seen.append(known) or _Nothing()
    )
    with live.view(config_of(), Console(file=io.StringIO())):
        pass
    assert seen == [{"peak_is_known": False}]


class _Nothing:
    def rendered(self, elapsed):
        return ""
