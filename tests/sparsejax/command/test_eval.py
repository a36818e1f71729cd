"""`sparsejax eval` of a run and of what it is exported as."""

import json
import sys

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from sparsejax.command import main
from sparsejax.training.train import train
from tests.support.micro_run import micro_config


def evaluated(capsys, *arguments: str) -> dict:
    assert main.run(["eval", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_run_and_its_export_have_one_loss(uninterrupted, text, tmp_path, capsys):
    _, folder, outcome = uninterrupted("two-four")
    out = tmp_path / "out"
    assert main.run(["export", str(folder), str(out)]) == 0
    capsys.readouterr()
    own = evaluated(capsys, str(folder))
    assert own["tokens"] == sum(len(of) - 1 for of in outcome.corpus.validation)
    assert own["bytes"] == own["tokens"]
    of_run = evaluated(capsys, str(folder), "--text", text)
    of_export = evaluated(capsys, str(out), "--text", text)
    # The same weights and windows, through a file of float32.
    assert of_export == pytest.approx(of_run, rel=1e-5)
    assert of_run["tokens"] > own["tokens"]
    earlier = evaluated(capsys, f"{folder}@3", "--windows", "8")
    last = evaluated(capsys, str(folder), "--windows", "8")
    assert last["loss"] < earlier["loss"]
    assert main.run(["eval", str(folder), "--windows", "8"]) == 0
    shown = capsys.readouterr().out
    assert f"loss {last['loss']:.4f} +- {last['loss_error']:.4f} nats" in shown
    assert f"{last['bits_per_byte']:.4f} bits per byte" in shown
    assert main.run(["eval", str(out)]) == 1
    assert "is no run, and holds no text out; give --text" in capsys.readouterr().err
    (out / "tokenizer.json").unlink()
    assert main.run(["eval", str(out), "--text", text]) == 1
    assert "has no tokenizer, and --text is text" in capsys.readouterr().err


def test_a_run_whose_text_has_changed_is_not_evaluated_on_it(tmp_path, capsys):
    """What is held out of the shorter text the run has trained on."""
    file = tmp_path / "a.txt"
    file.write_text("".join(f"line {number} of the text\n" for number in range(2000)))
    folder = tmp_path / "run"
    config = micro_config(str(file), recipe="dense", steps=2)
    train(config, folder)
    assert evaluated(capsys, str(folder), "--windows", "2")["tokens"] > 0
    file.write_text(file.read_text()[:20_000])
    assert main.run(["eval", str(folder)]) == 1
    assert "trained on other tokens than 1 files, 20000" in capsys.readouterr().err
    assert evaluated(capsys, str(folder), "--text", str(file))["tokens"] > 0


def test_tasks_without_their_package_say_how_to_install_it(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delitem(sys.modules, "sparsejax.reports.harness", raising=False)
    assert main.run(["eval", "my-model", "--tasks", "x"]) == 1
    assert (
        "needs the package `lm-eval`; run `uv sync --extra" in capsys.readouterr().err
    )


def test_what_json_has_no_word_for_is_null_and_a_model_of_nan_is_refused(
    uninterrupted, tmp_path, capsys
):
    _, folder, _ = uninterrupted("two-four")
    text = tmp_path / "two.txt"
    text.write_text("ab")
    found = evaluated(capsys, str(folder), "--text", str(text))
    assert found["tokens"] == 1 and found["loss_error"] is None
    out = tmp_path / "out"
    assert main.run(["export", str(folder), str(out)]) == 0
    weights = load_file(out / "model.safetensors")
    weights["model.norm.weight"] *= np.nan
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    assert main.run(["eval", str(out), "--text", str(text), "--json"]) == 1
    assert "on this text is nan: its logits are not" in capsys.readouterr().err
