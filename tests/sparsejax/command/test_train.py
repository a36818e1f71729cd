"""The main job from end to end: micro runs, and processes that are ended."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from sparsejax.checkpoints.checkpoint import Checkpoints
from sparsejax.command import train
from sparsejax.config.config_file import from_json
from sparsejax.launch import job
from sparsejax.reports.records import read_metrics
from sparsejax.routing.routers import ActivationEnergy, TokenHash
from sparsejax.sparsity.patterns import VNM
from sparsejax.training.run import Run
from tests.support.commands import run_train
from tests.support.micro_run import (
    arguments_of,
    assert_same_bits,
    micro_config,
    read_records,
    with_phases,
    without_speed,
)

pytestmark = pytest.mark.usefixtures("quick")

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "experiments" / "pretrain.py"


def test_the_main_job_writes_its_files_and_says_what_it_did(text, tmp_path, capsys):
    config = micro_config(text, plot=True, sample_length=5)
    outcome = job.main(config, tmp_path / "run")
    assert outcome.completed
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert names >= {"checkpoints", "config.json", "metrics.jsonl", "loss.png"}
    assert not any("draft" in name for name in names)
    assert (tmp_path / "run" / "loss.png").stat().st_size > 10_000
    saved = from_json(json.loads((tmp_path / "run" / "config.json").read_text()))
    assert saved == config
    records = read_metrics(tmp_path / "run")
    shown = capsys.readouterr().out
    unigram = records[0]["unigram_loss"]
    assert f"unigram model: {unigram:.3f} nats per token" in shown
    assert f"data: {outcome.corpus.description}\n" in shown
    ends = {3: "warm-up", 9: "sparse", 12: "dense"}
    for record in records:
        if record["event"] == "validation" and record["step"] in ends:
            row = [record["kind"], str(record["step"]), f"{record['loss']:.4f}"]
            assert row[0] == ends[record["step"]]
            assert any(
                [cell.strip() for cell in line.split("│")[1:4]] == row
                for line in shown.splitlines()
            )
        if record["event"] == "switch":
            assert f"switch to {record['to']}; validation loss before" in shown
            jumped = f"a jump of {record['jump']:.3f}: the next steps are spent"
            assert (jumped in shown) == record["large"]
    prompt = outcome.corpus.tokenizer.decode(outcome.corpus.validation[0][:16])
    assert f"greedy sample (prompt, then the model):\n{prompt}" in shown
    assert f"run folder: {tmp_path / 'run'}" in shown
    assert "nothing is trained" not in shown
    job.main(config, tmp_path / "run")
    assert "has taken its 12 steps: nothing is trained" in capsys.readouterr().out


@pytest.mark.parametrize(
    "change",
    [
        lambda c: replace(
            c, recipe="weights", model=replace(c.model, activation="swiglu")
        ),
        lambda c: with_phases(
            replace(c, recipe="paper"), router=TokenHash(), skip_blocks=True
        ),
        lambda c: with_phases(
            replace(c, recipe="paper"),
            router=ActivationEnergy(),
            activations=VNM(8, 2, 32),
            experts_per_token=2,
        ),
        lambda c: with_phases(
            replace(c, recipe="activations"),
            token_sparsity="magnitude",
            dense_features=0.0,
            permute_tokens=False,
            mask_reuse=False,
        ),
        lambda c: replace(
            c,
            model=replace(c.model, dtype="bfloat16", remat="dots", tie_embeddings=True),
        ),
    ],
    ids=[
        "swiglu",
        "hash, skipping",
        "mass, two of eight",
        "activations, naive backward",
        "bfloat16",
    ],
)
def test_every_variant_trains(change, text, tmp_path):
    config = replace(change(micro_config(text)), checkpoint_every=0, eval_every=6)
    job.main(config, tmp_path / "run")
    records = read_records(tmp_path / "run")
    losses = [r["loss"] for r in records if r["event"] == "step"]
    assert len(losses) == 12
    assert losses[-1] < losses[0] - 0.5
    sparse = [r["loss"] for r in records if r["event"] == "step" and r["phase"] == 1]
    assert sparse[-1] < sparse[0]
    ffn = next(r for r in records if r["event"] == "ffn" and r["kind"] == "sparse")
    if config.recipe == "paper":
        counts = ffn["tokens_per_expert"]
        chosen = config.sparsity.experts_per_token * config.data.sequence_length
        assert all(sum(layer) % chosen == 0 for layer in counts)


def test_a_finished_run_that_is_resumed_reports_it_again(text, tmp_path, capsys):
    folder = tmp_path / "run"
    job.main(micro_config(text), folder)
    records = read_records(folder)
    capsys.readouterr()
    assert run_train(["--resume", str(folder), "--sample-length", "3"]) == 0
    assert "greedy sample" in capsys.readouterr().out
    assert read_records(folder) == records


def test_a_process_joins_the_others_before_it_trains(monkeypatch):
    happened = []
    monkeypatch.setattr(train, "join", lambda **said: happened.append(said))
    ended = SimpleNamespace(resume_in_new_process=False)
    main = lambda *_, **__: happened.append("main") or ended
    monkeypatch.setattr(job, "main", main)
    assert run_train(["--distributed", "--heartbeat-seconds", "7"]) == 0
    assert happened == [{"heartbeat_seconds": 7}, "main"]
    assert run_train(["--heartbeat-seconds", "7"]) == 0
    assert happened[2:] == ["main"]


@pytest.mark.parametrize(("step", "is_left"), [(1, True), (2, False)])
def test_a_new_process_traces_the_steps_that_are_left(
    step, is_left, monkeypatch, tmp_path
):
    state = SimpleNamespace(step=np.int32(step))
    ended = SimpleNamespace(resume_in_new_process=True, state=state, folder=tmp_path)
    monkeypatch.setattr(job, "main", lambda *_, **__: ended)
    begun = []
    begin = lambda options, *_: begun.append(options.profile)
    monkeypatch.setattr(train, "resume_in_new_process", begin)
    assert run_train(["--steps", "9", "--profile", "2:2"]) == 0
    assert [profile is not None for profile in begun] == [is_left]


def command(*arguments: str) -> subprocess.Popen:
    """With nothing that tests have compiled."""
    environment = dict(os.environ)
    environment.pop("JAX_COMPILATION_CACHE_DIR")
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), *arguments],
        env=environment | {"JAX_PLATFORMS": "cpu"},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for_step(process: subprocess.Popen, folder: Path, step: int) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise AssertionError(f"ended early: {process.communicate()}")
        if (folder / "metrics.jsonl").exists():
            lines = (folder / "metrics.jsonl").read_text().splitlines()[:-1]
            if any(json.loads(line)["step"] >= step for line in lines):
                return
        time.sleep(0.02)
    process.kill()
    raise AssertionError(f"no step {step}: {process.communicate()}")


def test_processes_that_are_ended_resume_to_the_same_bits(text, tmp_path):
    # Nothing is shared with the processes: each compiles by itself.
    settings = {"steps": 200, "recipe": "weights", "eval_every": 0}
    config = micro_config(text, checkpoint_every=10, **settings)
    config = with_phases(config, warmup_share=0.03, sparse_share=0.96)
    ended, whole = tmp_path / "ended", tmp_path / "whole"
    checkpoints = ended / "checkpoints"

    killed = command(*arguments_of(config), "--run-folder", str(ended))
    wait_for_step(killed, ended, 25)
    killed.kill()
    killed.communicate(timeout=60)
    assert killed.returncode == -signal.SIGKILL
    latest = Checkpoints(checkpoints).latest_step()
    assert latest is not None and 10 <= latest < 200

    terminated = command("--resume", str(ended))
    wait_for_step(terminated, ended, latest + 25)
    terminated.terminate()
    output, errors = terminated.communicate(timeout=60)
    assert terminated.returncode == 0, errors
    assert f"stopped by SIGTERM or Ctrl-C; go on with --resume {ended}" in output
    latest = Checkpoints(checkpoints).latest_step()
    steps = [r["step"] for r in read_records(ended) if r["event"] == "step"]
    assert latest == steps[-1] < 200
    assert f"last good checkpoint: {Checkpoints(checkpoints).path()}" in output

    assert run_train(["--resume", str(ended)]) == 0
    expected = job.main(config, whole)
    run = Run(config)
    template = run.template(run.phases[-1].sparsity)
    with Checkpoints(checkpoints) as saved:
        restored = saved.restore(template=template)
    assert restored.step == 200
    assert_same_bits(restored.state, expected.state)

    def trained(folder: Path) -> list[dict]:
        records = without_speed(read_records(folder))
        return [record for record in records if record["event"] != "checkpoint"]

    assert trained(ended) == trained(whole)
