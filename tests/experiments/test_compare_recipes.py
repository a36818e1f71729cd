"""A comparison: its plan, its runs and what becomes of them when started again, and its
rows."""

import json
import math
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from experiments import compare_recipes
from experiments.compare_recipes import main
from experiments.comparing.comparison_file import Comparison, Trial, read_comparison
from experiments.comparing.side_by_side import RunsFailed
from sparsejax.distributed.own_process import in_own_process
from sparsejax.launch import job
from sparsejax.terminal import console
from sparsejax.training import train as loop
from tests.support.micro_run import micro_config, read_records, with_phases
from tests.support.whole_runs import Killed, shared_run

FILES = Path(compare_recipes.__file__).parent / "comparisons"
CLOCKED = ("seconds", "date", "commit")

pytestmark = pytest.mark.usefixtures("quick")


# The plan.


@pytest.mark.parametrize(
    "path", sorted(FILES.glob("*.toml")), ids=lambda path: path.stem
)
def test_every_comparison_can_be_planned(path, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert compare_recipes.run([str(path), "--dry-run"]) == 0
    shown = capsys.readouterr().out
    names = dict.fromkeys(trial.name for trial in read_comparison(path).trials)
    lines = shown.splitlines()
    positions = [lines.index(name) for name in names]
    assert positions == sorted(positions)
    assert shown.count("FLOPs per token") == len(names) >= 5
    assert list(tmp_path.iterdir()) == []


def test_bytes_for_another_vocabulary_are_refused_before_any_run(tmp_path, capsys):
    path = tmp_path / "other.toml"
    path.write_text('seeds = [0]\n[base]\npreset = "gpt-124m"\n[runs.a]\n')
    folder = tmp_path / "runs"
    for more in (["--dry-run"], ["--folder", str(folder)]):
        assert compare_recipes.run([str(path), *more]) == 1
        told = " ".join(capsys.readouterr().err.split())
        assert "run 'a': the tokenizer bytes has 256 tokens, far fewer than" in told
    assert not folder.exists()


def test_some_runs_of_a_comparison_come_with_their_baseline(capsys):
    whole = read_comparison(FILES / "venom-268m.toml")
    some = whole.only(["two-of-eight-longer"], [1])
    planned = [(trial.name, trial.seed) for trial in some.trials]
    assert planned == [("dense", 1), ("two-of-eight-longer", 1)]
    assert set(some.trials) < set(whole.trials)
    assert whole.only([], []) == whole
    assert {trial.seed for trial in whole.only(["paper"], []).trials} == {0, 1}
    with pytest.raises(ValueError, match="only='papers' .* dense, .*paper"):
        whole.only(["papers"], [])
    with pytest.raises(ValueError, match="seeds=2 .* 0, 1"):
        whole.only([], [2])
    with pytest.raises(ValueError, match="only='two-four' has the seeds 0 and none"):
        whole.only(["two-of-eight-longer", "two-four"], [1])
    path = str(FILES / "venom-268m.toml")
    assert compare_recipes.run([path, "--dry-run", "--only", "paper"]) == 0
    assert capsys.readouterr().out.count("FLOPs per token") == 2
    assert compare_recipes.run([path, "--dry-run", "--only", "pape"]) == 1


# The runs.


def micro_comparison(text: str) -> Comparison:
    """Dense and 2:4 activations to the end, two orders of the data, six steps."""
    base = micro_config(text, steps=6, recipe="dense", eval_every=0)
    sparse = with_phases(
        replace(base, recipe="activations"), warmup_share=0.5, mask_reuse=False
    )
    # The same initial weights: drawing others would be compiled anew.
    trials = tuple(
        Trial(
            name=config.recipe,
            seed=seed,
            config=replace(config, data=replace(config.data, seed=seed)),
        )
        for seed in (0, 1)
        for config in (base, sparse)
    )
    return Comparison(name="micro", baseline="dense", trials=trials)


@pytest.fixture(scope="module")
def compiled_once():
    """For all runs alike, which are therefore in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "Run", shared_run)
        patch.setattr(compare_recipes, "in_own_process", lambda f, *of: f(*of))
        yield


@pytest.fixture(scope="module")
def finished(text, quick, compiled_once, tmp_path_factory) -> tuple[Path, list[dict]]:
    """The folder of a comparison that nothing disturbed, and its rows."""
    folder = tmp_path_factory.mktemp("finished")
    return folder, main(micro_comparison(text), folder, None)


def rows_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def without_clock(rows: list[dict]) -> list[dict]:
    return [{k: v for k, v in row.items() if k not in CLOCKED} for row in rows]


def losses_of(folder: Path) -> dict[tuple[str, int], float]:
    """By event and step, read line by line from a run's metrics.jsonl."""
    found = {}
    for record in read_records(folder):
        if record["event"] == "validation":
            found["validation", record["step"]] = record["loss"]
        if record["event"] == "switch":
            found["before", record["step"]] = record["before"]
            found["after", record["step"]] = record["after"]
    return found


def test_a_row_holds_what_the_run_recorded(finished):
    folder, rows = finished
    assert rows_of(folder / "rows.jsonl") == rows
    order = [("dense", 0), ("activations", 0), ("dense", 1), ("activations", 1)]
    assert [(row["name"], row["seed"]) for row in rows] == order
    for row in rows:
        losses = losses_of(folder / row["name"] / f"seed-{row['seed']}")
        dense = losses_of(folder / "dense" / f"seed-{row['seed']}")
        assert row["loss"] == losses["validation", 6]
        assert row["to_baseline"] == row["loss"] - dense["validation", 6]
        assert (row["tokens"], row["steps"]) == (6 * 4 * 16, 6)
        assert (row["comparison"], row["baseline"]) == ("micro", "dense")
        assert (row["device"], row["preset"]) == ("cpu", "tiny")
        assert row["date"] and row["jax"] and row["diverged_at"] is None
        assert 0 < row["seconds"] < 60
        changed = row["settings"]
        assert changed["model.d_model"] == 16
        assert not {"seed", "data.seed"} & changed.keys()
        if row["name"] == "dense":
            assert changed["recipe"] == "dense"
            assert row["validation"] == {"dense": row["loss"]}
            assert row["switches"] == []
            continue
        assert changed["phases.sparsity.mask_reuse"] is False
        end = losses["validation", 3]
        assert row["validation"] == {"warm-up": end, "sparse": row["loss"]}
        (switch,) = row["switches"]
        assert (switch["from"], switch["to"], switch["step"]) == (
            "warm-up",
            "sparse",
            3,
        )
        assert switch["before"] == losses["before", 3] == end
        assert switch["after"] == losses["after", 3]
    # The sparse run is another run, and so is the other seed.
    assert len({row["loss"] for row in rows}) == 4


def test_the_runs_and_the_figure_are_in_the_folder(finished):
    folder, _ = finished
    for name in ("dense", "activations"):
        for seed in (0, 1):
            files = {path.name for path in (folder / name / f"seed-{seed}").iterdir()}
            assert files >= {"config.json", "metrics.jsonl", "checkpoints"}
    assert (folder / "comparison.png").stat().st_size > 10_000


@contextmanager
def interrupted(patch: pytest.MonkeyPatch, run: int, step: int, act) -> Iterator[None]:
    """Inside, `act` is called when the given run of this process records the step."""
    runs = []

    def train(config, folder, *, observe, **options):
        runs.append(folder)

        def watch(record):
            observe(record)
            here = (len(runs), record["event"], record["step"])
            if here == (run, "step", step):
                act()

        return undisturbed(config, folder, observe=watch, **options)

    undisturbed = job.train
    with patch.context() as patched:
        patched.setattr(job, "train", train)
        yield


def kill():
    raise Killed


def terminate():
    os.kill(os.getpid(), signal.SIGTERM)


def of_seed_0(comparison: Comparison) -> Comparison:
    return replace(comparison, trials=comparison.trials[:2])


def test_a_comparison_that_is_started_again_goes_on(
    finished, text, tmp_path, capsys, monkeypatch
):
    comparison, results = of_seed_0(micro_comparison(text)), tmp_path / "rows.jsonl"
    folder = tmp_path / "runs"
    with interrupted(monkeypatch, run=2, step=3, act=kill):
        with pytest.raises(Killed):
            main(comparison, folder, results)
    assert [row["name"] for row in rows_of(results)] == ["dense"]
    with (folder / "activations" / "seed-0" / "metrics.jsonl").open("a") as file:
        file.write('{"event": "st')
    capsys.readouterr()

    with interrupted(monkeypatch, run=1, step=3, act=terminate):
        stopped = main(comparison, folder, results)
    assert [row["name"] for row in stopped] == ["dense"]
    shown = capsys.readouterr().out
    assert "dense, seed 0: has ended, skipped" in shown
    assert "step 2: continues from" in shown
    assert "the same command again goes on with the comparison" in shown
    assert not (folder / "comparison.png").exists()

    rows = main(comparison, folder, results)
    assert "step 4: continues from" in capsys.readouterr().out
    _, expected = finished
    assert without_clock(rows) == without_clock(expected[:2])
    assert rows_of(results) == rows
    assert (folder / "comparison.png").is_file()


def test_a_run_trains_in_a_process_of_its_own(finished, text, tmp_path, monkeypatch):
    monkeypatch.setattr(compare_recipes, "in_own_process", in_own_process)
    train = lambda *_, branch: pytest.fail("trains here")
    monkeypatch.setattr(job, "main", train)
    comparison = micro_comparison(text)
    rows = main(replace(comparison, trials=comparison.trials[:1]), tmp_path, None)
    assert without_clock(rows) == without_clock(finished[1][:1])


def test_a_run_may_take_several_processes(finished, text, tmp_path, monkeypatch):
    comparison, called = of_seed_0(micro_comparison(text)), []
    train = compare_recipes.in_own_process

    def in_two(function, config, *where):
        called.append(config.recipe)
        first = called.count(config.recipe) == 1
        return None if first else train(function, config, *where)

    monkeypatch.setattr(compare_recipes, "in_own_process", in_two)
    rows = main(comparison, tmp_path, None)
    assert called == ["dense", "dense", "activations", "activations"]
    assert without_clock(rows) == without_clock(finished[1][:2])


def test_a_finished_comparison_trains_nothing_and_records_nothing_twice(
    finished, text, tmp_path, capsys, monkeypatch
):
    folder, rows = finished
    before, kept = (folder / "rows.jsonl").read_text(), tmp_path / "new" / "kept.jsonl"
    monkeypatch.setattr(job, "main", lambda *_: pytest.fail("trains"))
    for _ in range(2):
        assert main(micro_comparison(text), folder, kept) == rows
        assert (folder / "rows.jsonl").read_text() == kept.read_text() == before
    shown = capsys.readouterr().out
    assert shown.count("has ended, skipped") == 2 * 4
    assert f"{rows[1]['to_baseline']:+.4f}" in shown


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": 9}, "whose steps is 6, and the comparison gives it 9"),
        ({"eval_batches": 1}, "whose eval_batches is 2, and the comparison gives it 1"),
    ],
    ids=["steps", "eval_batches"],
)
def test_a_folder_with_a_run_of_other_settings_is_refused(
    change, message, finished, text, monkeypatch
):
    folder, _ = finished
    comparison = micro_comparison(text)
    *others, last = comparison.trials
    other = replace(last, config=replace(last.config, **change))
    monkeypatch.setattr(job, "main", lambda *_: pytest.fail("trains"))
    with pytest.raises(ValueError, match=message) as caught:
        main(replace(comparison, trials=(*others, other)), folder, None)
    assert str(caught.value).startswith(f"{folder / 'activations' / 'seed-1'} holds")
    assert "choose another --folder" in str(caught.value)


def test_a_run_that_diverges_is_a_result(finished, text, tmp_path, capsys, monkeypatch):
    comparison = of_seed_0(micro_comparison(text))

    def check(self, step, report):
        if (self.config.recipe, step) == ("activations", 5):
            self.refuse_non_finite(step, {"loss": math.nan})

    monkeypatch.setattr(loop._Loop, "check", check)
    rows = main(comparison, tmp_path, tmp_path / "rows.jsonl")
    dense, diverged = rows
    assert dense["loss"] == finished[1][0]["loss"]
    assert diverged["diverged_at"] == 5
    assert (diverged["loss"], diverged["to_baseline"]) == (None, None)
    assert diverged["validation"] == {
        "warm-up": losses_of(tmp_path / "activations" / "seed-0")["validation", 3]
    }
    assert rows_of(tmp_path / "rows.jsonl") == rows
    shown = capsys.readouterr().out
    assert "│ diverged at step 5 │" in shown
    assert "NonFiniteLoss: loss=nan at step 5" in shown
    monkeypatch.setattr(job, "main", lambda *_: pytest.fail("trains"))
    assert main(comparison, tmp_path, None) == rows


def test_a_branch_of_a_run_that_diverged_stops_no_other(text, tmp_path, capsys):
    base = micro_config(text, steps=4, recipe="dense", eval_every=0)
    wild = replace(base.optimizer, schedule="wsd", decay_share=0.0)
    trunk = replace(base, optimizer=replace(wild, peak_learning_rate=1e30))
    leaf = replace(base, optimizer=replace(wild, decay_share=0.5))
    trials = (
        Trial(name="trunk", seed=0, config=trunk),
        Trial(name="leaf", seed=0, config=leaf, trunk="trunk", begin=2),
        Trial(name="later", seed=0, config=base),
    )
    comparison = Comparison(name="wild", baseline="later", trials=trials)
    for _ in range(2):  # The same command again ends alike.
        with pytest.raises(RunsFailed, match=r"^1 of .*leaf, seed 0: .*no checkpoint"):
            main(comparison, tmp_path, None)
    assert (tmp_path / "later" / "seed-0" / "model.safetensors").exists()
    assert "console.txt" not in capsys.readouterr().out


def test_one_trunk_gives_the_losses_of_several_lengths(
    text, compiled_once, tmp_path, monkeypatch
):
    """Also where the baseline is a branch itself, and when it is stopped in one."""
    base = micro_config(text, steps=6, recipe="dense", eval_every=0, keep_every=2)
    optimizer = replace(base.optimizer, schedule="wsd", decay_share=0.0)
    trunk = replace(base, optimizer=optimizer)
    decay = lambda steps: replace(
        trunk, steps=steps, optimizer=replace(optimizer, decay_share=2 / steps)
    )
    trials = (
        Trial(name="trunk", seed=0, config=trunk),
        Trial(name="six", seed=0, config=decay(6), trunk="trunk", begin=4),
        Trial(name="eight", seed=0, config=decay(8), trunk="trunk", begin=6),
    )
    comparison = Comparison(name="lengths", baseline="six", trials=trials)
    folder = tmp_path / "runs"
    with interrupted(monkeypatch, run=2, step=5, act=kill):
        with pytest.raises(Killed):
            main(comparison, folder, None)
    # The baseline has not ended: nothing can be compared with it yet.
    assert not (folder / "rows.jsonl").exists()
    rows = main(comparison, folder, None)
    assert [row["name"] for row in rows] == ["trunk", "six", "eight"]
    assert [row.get("branch") for row in rows] == [None, "trunk@4", "trunk@6"]
    assert rows[1]["to_baseline"] == 0.0
    for row, steps in zip(rows, (6, 6, 8), strict=True):
        losses = losses_of(folder / row["name"] / "seed-0")
        assert row["loss"] == losses["validation", steps]
        assert row["to_baseline"] == row["loss"] - rows[1]["loss"]
        assert (row["steps"], row["tokens"]) == (steps, steps * 4 * 16)
    # A branch's seconds are its trunk's and its own.
    assert rows[2]["seconds"] > rows[0]["seconds"]
    assert main(comparison, folder, None) == rows
    moved = folder.rename(tmp_path / "moved")
    assert main(comparison, moved, None) == rows
    begins = {"begin": 2, "trunk": "trunk"}
    for change, message in (
        (
            begins,
            r"seed-0 holds a branch of ../../trunk/seed-0 at step 6, not .* step 2",
        ),
        ({"trunk": None}, "holds a branch of .* and in the comparison eight is none"),
    ):
        other = replace(comparison, trials=(*trials[:2], replace(trials[2], **change)))
        with pytest.raises(ValueError, match=message):
            main(other, moved, None)


def test_a_row_names_all_places_that_its_run_was_trained_in(finished, text, tmp_path):
    folder, rows = finished
    noted = folder / "dense" / "seed-0" / "provenance.jsonl"
    here = noted.read_text()
    elsewhere = json.loads(here) | {"device": "abacus", "commit": None}
    noted.write_text(json.dumps(elsewhere) + "\n" + here)
    try:
        first, *others = main(micro_comparison(text), folder, None)
    finally:
        noted.write_text(here)
    assert first == rows[0] | {"device": "abacus, cpu"}
    assert others == rows[1:]


def test_a_finished_run_that_lost_its_records_is_not_guessed_at(finished, text):
    folder, _ = finished
    metrics = folder / "activations" / "seed-1" / "metrics.jsonl"
    whole = metrics.read_text()
    lines = [line for line in whole.splitlines() if '"validation"' not in line]
    metrics.write_text("\n".join(lines) + "\n")
    try:
        with pytest.raises(ValueError, match="lacks a validation at step 3, 6; delete"):
            main(micro_comparison(text), folder, None)
    finally:
        metrics.write_text(whole)


def test_the_command_runs_a_file(finished, text, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    asked = []
    monkeypatch.setattr(compare_recipes, "main", lambda *given: asked.append(given))
    monkeypatch.setenv("XLA_FLAGS", "--first")
    path = tmp_path / "some.toml"
    path.write_text("seeds = [0]\n[base]\ndeterministic = true\n[runs.a]")
    assert compare_recipes.run([str(path)]) == 0
    # Nothing that git tracks is written unless it is named.
    assert asked == [(read_comparison(path), Path("runs/some"), None)]
    assert os.environ["XLA_FLAGS"] == f"--first {console.DETERMINISTIC}"
    elsewhere = ["--folder", "f", "--results", "rows.jsonl"]
    assert compare_recipes.run([str(path), *elsewhere]) == 0
    assert asked[1][1:] == (Path("f"), Path("rows.jsonl"))

    path.write_text("seeds = 3")
    assert compare_recipes.run([str(path)]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"ValueError: {path} does not hold a comparison: seeds=3")
    assert error.count("\n") == 1
