"""Steps timed before a run, and the phases that are trained dense because of it."""

import json
from dataclasses import replace

import pytest

from sparsejax.checkpoints.checkpoint import Checkpoints
from sparsejax.config import Interleaved, PhaseConfig
from sparsejax.config.schedule import Phase, phases, steps_left, with_dense
from sparsejax.data.corpus import load_corpus
from sparsejax.distributed.processes import Exchange
from sparsejax.feed_forward.sparsity import DENSE, FFNSparsity
from sparsejax.sparsity.patterns import NM, BlockDiagonal
from sparsejax.training import step_times
from sparsejax.training.step_times import (
    NEW_PROCESS_SECONDS,
    PhaseTime,
    StepTimes,
    from_json,
    phases_run_dense,
    time_steps,
    to_json,
)
from sparsejax.training.train import train
from tests.support.micro_run import (
    assert_same_bits,
    micro_config,
    read_records,
    write_text,
)
from tests.support.whole_runs import Killed, kill_at

pytestmark = pytest.mark.usefixtures("quick_loop")

SPARSE = FFNSparsity(weights=NM(2, 4))


def phase_time(
    phase=1, step_ms=80.0, dense_after_ms=100.0, dense_ms=100.0
) -> PhaseTime:
    return PhaseTime(
        phase=phase,
        step_ms=step_ms,
        fastest_ms=step_ms - 1,
        slowest_ms=step_ms + 1,
        dense_ms=dense_ms,
        dense_after_ms=dense_after_ms,
    )


def times_of(*sparse: PhaseTime) -> StepTimes:
    return StepTimes(
        device="a GPU",
        devices=1,
        dense_ms=100.0,
        fastest_dense_ms=99.0,
        slowest_dense_ms=101.0,
        sparse=sparse,
        seconds=9.0,
    )


def run_of(*steps: int) -> tuple[Phase, ...]:
    """Dense, sparse, dense, sparse, ... phases of so many steps."""
    return tuple(
        Phase(
            kind="sparse" if number % 2 else "dense",
            steps=count,
            sparsity=SPARSE if number % 2 else DENSE,
        )
        for number, count in enumerate(steps)
    )


@pytest.mark.parametrize(
    ("sparse", "steps", "expected"),
    [
        (phase_time(step_ms=80.0), (10, 50, 40), ()),
        (phase_time(step_ms=101.0), (10, 50, 40), (1,)),
        (phase_time(step_ms=100.0), (10, 50, 40), (1,)),
        # 50 steps save 10 ms each; 40 dense ones after them lose 12 or 13
        (phase_time(step_ms=90.0, dense_after_ms=112.0), (10, 50, 40), ()),
        (phase_time(step_ms=90.0, dense_after_ms=113.0), (10, 50, 40), (1,)),
        (phase_time(step_ms=90.0, dense_after_ms=113.0), (10, 50), ()),
        # Faster dense steps afterwards are noise, and pay for nothing.
        (phase_time(step_ms=101.0, dense_after_ms=50.0), (10, 50, 40), (1,)),
    ],
)
def test_a_phase_that_loses_time_is_run_dense(sparse, steps, expected):
    chosen = phases_run_dense(
        times_of(sparse), run_of(*steps), new_process_minutes=None
    )
    assert chosen == expected


def test_a_new_process_for_the_tail_bounds_what_the_lower_clock_costs():
    # 1,000 steps save 50 s in all; 20,000 after them would lose 100 s.
    times, steps = times_of(phase_time(step_ms=50.0, dense_after_ms=105.0)), 20_000
    of = run_of(10, 1000, steps)
    minutes = steps * times.dense_ms / 60_000
    assert NEW_PROCESS_SECONDS < 50
    assert phases_run_dense(times, of, new_process_minutes=None) == (1,)
    assert phases_run_dense(times, of, new_process_minutes=minutes) == ()
    assert phases_run_dense(times, of, new_process_minutes=minutes + 1) == (1,)


def test_each_sparse_phase_is_judged_by_its_own_time():
    times = times_of(phase_time(1, 90.0), phase_time(3, 120.0))
    of = run_of(10, 10, 10, 10)
    run_dense = phases_run_dense(times, of, new_process_minutes=None)
    assert run_dense == (3,)
    dense = with_dense(of, run_dense)
    assert [phase.sparsity for phase in dense] == [DENSE, SPARSE, DENSE, DENSE]
    assert [phase.kind for phase in dense] == [phase.kind for phase in of]
    assert (times.speedup(1), times.speedup(3)) == (100 / 90, 100 / 120)
    assert times.speedup(0) is None


def test_a_phase_pays_for_the_dense_steps_up_to_the_next_that_stays_sparse():
    # Each saves 100 ms; ten dense steps after it lose 50 ms, twenty 100 ms.
    times = lambda last_ms: times_of(
        phase_time(1, 90.0, dense_after_ms=105.0), phase_time(3, last_ms)
    )
    of = run_of(10, 10, 10, 10, 10)
    chosen = lambda last_ms: phases_run_dense(
        times(last_ms), of, new_process_minutes=None
    )
    assert chosen(90.0) == ()
    # Trained dense, the later phase and its tail follow the first as well.
    assert chosen(101.0) == (1, 3)
    longer = run_of(10, 40, 10, 10, 10)
    assert phases_run_dense(times(101.0), longer, new_process_minutes=None) == (3,)


def test_a_phase_with_no_step_left_is_not_judged():
    left = steps_left(run_of(10, 10, 10, 10), 25)
    assert [phase.steps for phase in left] == [0, 0, 5, 10]
    times = times_of(phase_time(1, 120.0), phase_time(3, 120.0))
    assert phases_run_dense(times, left, new_process_minutes=None) == (3,)


def test_a_phase_with_steps_in_between_takes_their_weighted_mean(tmp_path, monkeypatch):
    seen = []

    def time_one(self, sparsity):
        seen.append((self.phase.kind, sparsity, self.phase.held))
        return [100.0, 104.0, 108.0] if sparsity == DENSE else [60.0, 64.0, 68.0]

    monkeypatch.setattr(step_times._Stepper, "time_one", time_one)
    mixed = PhaseConfig(
        name="mixed", share=0.5, sparsity=SPARSE, every=Interleaved(steps=4)
    )
    config = micro_config(write_text(tmp_path))
    config = config.with_schedule((mixed, PhaseConfig(name="tail")))
    corpus = load_corpus(config.data, vocab_size=config.model.vocab_size)
    times = time_steps(config, corpus.head(500))
    (of,) = times.sparse
    assert (of.phase, of.fastest_ms, of.step_ms, of.slowest_ms) == (0, 70, 74, 78)
    assert times.dense_ms == of.dense_after_ms == 104
    assert seen == [
        ("mixed", DENSE, DENSE),
        ("mixed", SPARSE, SPARSE),
        ("mixed", DENSE, SPARSE),
        ("mixed", DENSE, DENSE),
    ]


def test_each_phase_is_held_against_dense_steps_of_its_own_precision(
    tmp_path, monkeypatch
):
    seen = []

    def time_one(self, sparsity):
        seen.append((self.phase.precision, sparsity.is_dense))
        fp8 = self.phase.precision == "fp8"
        return [70.0 if fp8 else 100.0] if sparsity.is_dense else [80.0]

    monkeypatch.setattr(step_times._Stepper, "time_one", time_one)
    config = micro_config(write_text(tmp_path)).with_schedule(
        (
            PhaseConfig(name="warm-up", share=0.25),
            PhaseConfig(name="a", share=0.25, sparsity=SPARSE, precision="fp8"),
            PhaseConfig(name="b", share=0.25, sparsity=SPARSE),
            PhaseConfig(name="tail"),
        )
    )
    corpus = load_corpus(config.data, vocab_size=config.model.vocab_size)
    times = time_steps(config, corpus.head(500))
    assert [(of.phase, of.dense_ms) for of in times.sparse] == [(1, 70), (2, 100)]
    assert [of.dense_after_ms for of in times.sparse] == [70, 100]
    assert (times.dense_ms, times.speedup(1), times.speedup(2)) == (70, 70 / 80, 1.25)
    of_run = steps_left(phases(config), 0)
    assert phases_run_dense(times, of_run, new_process_minutes=None) == (1,)
    dense = [("fp8", True), (None, True)]
    assert seen == [*dense, ("fp8", False), dense[0], (None, False), dense[1]]


def test_times_survive_json_and_damaged_ones_are_refused():
    times = times_of(phase_time(1), phase_time(3))
    plain = json.loads(json.dumps(to_json(times)))
    assert from_json(plain) == times
    plain["sparse"][1]["step_ms"] = "fast"
    with pytest.raises(ValueError, match=r"sparse\[1\]\.step_ms='fast'"):
        from_json(plain)
    with pytest.raises(ValueError, match="sparse='none' must be a list"):
        from_json(plain | {"sparse": "none"})


@pytest.mark.parametrize("recipe", ["two-four", "dense"])
def test_steps_are_timed_as_they_will_run(recipe, tmp_path, monkeypatch):
    monkeypatch.setattr("sparsejax.training.step_times.WARM_SECONDS", 0.01)
    monkeypatch.setattr("sparsejax.training.step_times.ROUND_SECONDS", 0.01)
    config = micro_config(write_text(tmp_path), recipe=recipe)
    corpus = load_corpus(config.data, vocab_size=config.model.vocab_size)
    times = time_steps(config, corpus.head(500))
    assert [of.phase for of in times.sparse] == ([1] if recipe == "two-four" else [])
    assert 0 < times.fastest_dense_ms <= times.dense_ms <= times.slowest_dense_ms
    for of in times.sparse:
        assert 0 < of.fastest_ms <= of.step_ms <= of.slowest_ms
        assert of.dense_after_ms > 0
    assert times.seconds > times.dense_ms / 1e3


def test_the_head_of_a_corpus_is_a_corpus_of_its_own(tmp_path):
    config = micro_config(write_text(tmp_path))
    corpus = load_corpus(config.data, vocab_size=256)
    head = corpus.head(100)
    assert [part.size for part in (*head.train, *head.validation)] == [100, 100]
    assert head.train[0].base is None
    assert bytes(head.train[0]) == bytes(corpus.train[0][:100])


def test_the_head_of_many_shards_is_of_the_longest(tmp_path):
    config = micro_config(write_text(tmp_path))
    corpus = load_corpus(config.data, vocab_size=256)
    sizes = (3, 50, 20, 40)
    parts = tuple(corpus.train[0][:size] for size in sizes)
    shards = replace(corpus, train=parts, validation=parts[:1])
    assert [part.size for part in shards.head(75).train] == [50, 25]
    assert [part.size for part in shards.head(1000).train] == [50, 40, 20, 3]
    assert [part.size for part in shards.head(75).validation] == [3]


@pytest.fixture
def slower() -> StepTimes:
    return times_of(phase_time(step_ms=110.0))


def test_a_run_trains_dense_what_was_timed_slower(slower, tmp_path):
    config = micro_config(write_text(tmp_path))
    outcome = train(config, tmp_path / "run", step_times=slower)
    dense = replace(config, recipe="dense")
    alone = train(dense, tmp_path / "dense")
    assert_same_bits(outcome.state, alone.state)
    records = read_records(tmp_path / "run")
    (told,) = [record for record in records if record["event"] == "step_times"]
    assert told["run_dense"] == [1]
    assert (told["dense_ms"], told["sparse"][0]["step_ms"]) == (100.0, 110.0)
    assert {record["kind"] for record in records} == {"warm-up", "sparse", "dense"}


@pytest.mark.parametrize("changes", [{"keep_slower": True}, {}])
def test_a_faster_phase_or_one_that_is_to_be_kept_runs_sparse(
    changes, slower, tmp_path
):
    config = micro_config(write_text(tmp_path), **changes)
    times = slower if changes else times_of(phase_time(step_ms=90.0))
    outcome = train(config, tmp_path / "run", step_times=times)
    plain = train(replace(config, keep_slower=False), tmp_path / "plain")
    assert_same_bits(outcome.state, plain.state)
    assert phases(config)[1].sparsity != DENSE


def test_a_resume_does_as_the_run_began_whatever_it_is_told(slower, tmp_path):
    config = micro_config(write_text(tmp_path))
    whole = train(config, tmp_path / "whole", step_times=slower)
    for given in (None, times_of(phase_time(step_ms=50.0))):
        folder = tmp_path / f"stopped-{given is None}"
        with pytest.raises(Killed):
            train(config, folder, observe=kill_at("step", 5), step_times=slower)
        assert Checkpoints(folder / "checkpoints").metadata()["run_dense"] == [1]
        resumed = train(config, folder, step_times=given)
        assert_same_bits(resumed.state, whole.state)
    # ... also one that began without times.
    with pytest.raises(Killed):
        train(config, tmp_path / "sparse", observe=kill_at("step", 5))
    resumed = train(config, tmp_path / "sparse", step_times=slower)
    assert_same_bits(resumed.state, train(config, tmp_path / "plain").state)


def test_processes_take_as_many_steps_as_the_first_one_says(tmp_path, monkeypatch):
    """Steps are collective: counts that each process chose by its own clock would leave
    one of them waiting for the others."""
    counts = []
    steps = step_times._Stepper.steps

    def counting(stepper, count, sparsity):
        counts.append(count)
        return steps(stepper, min(count, 1), sparsity)

    monkeypatch.setattr(step_times._Stepper, "steps", counting)
    seconds = str(step_times.ROUND_SECONDS / 7)
    monkeypatch.setattr(Exchange, "gather", lambda *_, **__: [seconds, "1e-3"])
    config = micro_config(write_text(tmp_path), recipe="dense")
    corpus = load_corpus(config.data, vocab_size=config.model.vocab_size)
    time_steps(config, corpus)
    warm = round(7 * step_times.WARM_SECONDS / step_times.ROUND_SECONDS)
    assert counts == [1, 1, warm, 7, 7, 7]


@pytest.mark.parametrize("pattern", [BlockDiagonal(2), NM(2, 4)])
def test_a_run_that_begins_with_static_weights_is_timed(pattern, tmp_path, monkeypatch):
    monkeypatch.setattr(step_times._Stepper, "time_one", lambda *_: [1.0, 2.0, 3.0])
    static = PhaseConfig(name="static", share=0.3, static_weights=pattern)
    sparse = PhaseConfig(name="sparse", share=0.4, sparsity=SPARSE)
    config = micro_config(write_text(tmp_path))
    config = config.with_schedule((static, sparse, PhaseConfig(name="tail")))
    corpus = load_corpus(config.data, vocab_size=config.model.vocab_size)
    assert [of.phase for of in time_steps(config, corpus.head(500)).sparse] == [1]
