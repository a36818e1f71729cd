"""The ladder's comparison at a tiny size, one step for each 144, from its file to R."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from experiments import compare_recipes, equal_loss
from experiments.comparing.comparison_file import Comparison, Trial, read_comparison
from experiments.comparing.finished_runs import read_finished
from experiments.worth.equal_loss_rows import parameters
from sparsejax.config import ModelConfig, PhaseConfig
from sparsejax.sparsity.patterns import VNM
from sparsejax.training import train as loop
from tests.support.micro_run import WORDS
from tests.support.whole_runs import shared_run

FILES = Path(compare_recipes.__file__).parent / "comparisons"
SMALL_FIRST = ("grow-ffn", "grow-depth", "s2d-25")
ARMS = ("dense-10", "dense-50", "two-of-eight-20", *(f"{of}-20" for of in SMALL_FIRST))
EACH = 144

pytestmark = pytest.mark.usefixtures("quick")


def whole(name: str) -> Comparison:
    return read_comparison(FILES / f"{name}.toml")


def test_every_length_has_its_tokens_and_every_arm_three_lengths():
    comparison = whole("ladder-5m")
    cooled = [t for t in comparison.trials if t.trunk and t.seed == 0]
    dense = next(t for t in cooled if t.name == "dense-20").config
    count = parameters(dense.model)
    assert 4.5e6 < count < 5e6
    lengths: dict[str | None, set[str]] = {}
    for trial in cooled:
        config = trial.config
        per = config.steps * config.tokens_per_step / count
        arm, _, length = trial.name.rpartition("-")
        assert trial.arm == arm and per == pytest.approx(int(length), rel=0.01)
        lengths.setdefault(arm, set()).add(length)
        # The cooldown is the last fifth, and the trunk is left before it.
        assert config.optimizer.decay_share == 0.2
        assert trial.begin <= 0.8 * config.steps
        held_out = config.eval_batches * config.validation_batch_size
        assert held_out * config.data.sequence_length >= 4e6
        assert config.data.split_by == "package" and config.data.drop_duplicates
    assert all(found >= {"20", "60", "200"} for found in lengths.values())
    assert len(lengths) == 14 and lengths["dense"] >= {"10", "50", "170"}
    trunks = [t for t in comparison.trials if t.trunk is None]
    for trunk in trunks:
        optimizer = trunk.config.optimizer
        assert optimizer.decay_share == 0
        assert round(optimizer.warmup_share * trunk.config.steps) == 144


def test_every_arm_has_three_learning_rates_and_dense_four_seeds():
    trials = whole("ladder-5m-rates").trials
    rates: dict[str, set[float]] = {}
    for trial in trials:
        arm = trial.name.rpartition("-")[0]
        rates.setdefault(arm, set()).add(trial.config.optimizer.peak_learning_rate)
        assert trial.config.steps == 2880
    trained = {trial.arm for trial in whole("ladder-5m").trials if trial.trunk}
    assert set(rates) == trained and all(len(of) == 3 for of in rates.values())
    assert [t.seed for t in trials if t.name == "dense-mid"] == [0, 1, 2, 3]


def tiny(trial: Trial, text: str) -> Trial:
    """The trial with a model of 16 x 64 and one step of each 144."""
    config = trial.config
    schedule = tuple(map(_tiny_phase, config.phases.schedule))
    small = replace(
        config.with_schedule(schedule) if schedule else config,
        model=ModelConfig(
            d_model=16,
            layers=config.model.layers // 3,
            heads=2,
            kv_heads=2,
            d_hidden=config.model.d_hidden // 16,
        ),
        data=replace(config.data, text=text, sequence_length=16, validation_share=0.3),
        steps=config.steps // EACH,
        checkpoint_every=config.checkpoint_every // EACH,
        keep_every=config.keep_every // EACH,
        batch_size=4,
        eval_batches=2,
        log_every=5,
    )
    return replace(trial, config=small, begin=trial.begin // EACH)


def _tiny_phase(phase: PhaseConfig) -> PhaseConfig:
    sparsity = phase.sparsity
    if sparsity.activations is not None:
        sparsity = replace(sparsity, activations=VNM(8, 2, 32))
    neurons = None if phase.d_hidden is None else phase.d_hidden // 16
    return replace(phase, sparsity=sparsity, d_hidden=neurons)


def write_packages(folder: Path) -> str:
    """Eight packages of three files, one of which all of them have; the glob."""
    generator = np.random.default_rng(0)
    for package in range(8):
        (folder / str(package)).mkdir(parents=True)
        for file in range(3):
            words = " ".join(generator.choice(WORDS, 300))
            (folder / str(package) / f"{file}.py").write_text(words)
        (folder / str(package) / "vendored.py").write_text("the same " * 100)
    return f"{folder}/**/*.py"


def test_the_ladder_runs_from_its_file_to_R(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(loop, "Run", shared_run)
    monkeypatch.setattr(compare_recipes, "in_own_process", lambda f, *of: f(*of))
    text = write_packages(tmp_path / "corpus")
    some = whole("ladder-5m").only(ARMS, [0])
    comparison = replace(some, trials=tuple(tiny(t, text) for t in some.trials))
    folder = tmp_path / "runs"
    rows = compare_recipes.main(comparison, folder, None)
    assert len(rows) == 12 and all(row["loss"] < 5.6 for row in rows)
    assert "left out: 7 copies" in capsys.readouterr().out

    results = tmp_path / "rows.jsonl"
    arguments = [str(folder), "--results", str(results)]
    assert equal_loss.run(arguments) == 0
    found = {}
    for line in results.read_text().splitlines():
        row = json.loads(line)
        found[row["arm"], round(row["tokens"] / 64)] = row
    assert set(found) == {
        *(("dense", steps) for steps in (10, 20, 50)),
        *((arm, 20) for arm in ("two-of-eight", *SMALL_FIRST)),
    }
    # Of 20 steps the trunk's first was warm-up and the next 14 sparse.
    assert found["two-of-eight", 20]["sparse_share"] == pytest.approx(0.7)
    for arm in SMALL_FIRST:
        assert found[arm, 20]["sparse_share"] == 0
        run = next(of for of in read_finished(folder)[0] if of.arm == arm)
        assert [stretch.steps for stretch in run.stretches] == [15, 5]
        small, large = (stretch.model for stretch in run.stretches)
        assert parameters(small) < parameters(large)
