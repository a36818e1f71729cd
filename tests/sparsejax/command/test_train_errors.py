"""Commands that the main job refuses, and how it says so."""

import re
from dataclasses import replace

import jax
import pytest

from experiments import compare_recipes
from sparsejax.checkpoints.checkpoint import Checkpoints
from sparsejax.command import train
from sparsejax.launch import job
from tests.support.commands import run_train
from tests.support.files.shard_files import write_shard
from tests.support.files.tokenizer_file import write_tokenizer
from tests.support.micro_run import (
    arguments_of,
    micro_config,
    stopped_run,
)

pytestmark = pytest.mark.usefixtures("quick")

ONE_HEAD = ["--model.heads", "1", "--model.kv-heads", "1"]


def test_a_flag_that_does_not_exist_ends_with_a_message(capsys):
    with pytest.raises(SystemExit) as caught:
        run_train(["--colour", "red"])
    assert caught.value.code != 0
    assert "--colour" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "config.json does not hold the settings of a run: Expecting"),
        (
            '{"steps": "9"}',
            "config.json does not hold .*: setting steps='9' must be an",
        ),
        ('{"model": {"width": 9}}', "setting model.width is unknown"),
    ],
)
def test_a_damaged_config_is_one_line(content, message, tmp_path, capsys):
    (tmp_path / "config.json").write_text(content)
    assert run_train(["--resume", str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert re.search(message, error)
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--batch-size", "8"], "whose batch_size is 4 and cannot become 8"),
        (["--model.d-hidden", "32"], "whose model.d_hidden is 64 and cannot become 32"),
        (
            ["--preset", "llama-1b"],
            "whose preset is 'tiny' and cannot become 'llama-1b'",
        ),
        (["--run-folder", "elsewhere"], "leave --run-folder out"),
    ],
)
def test_a_resume_with_other_settings_is_refused(
    extra, message, text, tmp_path, capsys
):
    resume = stopped_run(tmp_path / "run", micro_config(text))
    assert run_train([*resume, *extra]) == 1
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1 and captured.out == ""
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["config.json"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--resume", "nowhere"], "--resume nowhere: there is no nowhere/config.json"),
        (["--batch-size", "10", "--micro-batches", "4"], "not a multiple of micro"),
        (["--data.text", "[a-z]/nothing*.txt"], "text='[a-z]/nothing*.txt': no file"),
        (["--backend", "mosaic_sm90", "--recipe", "weights"], "mosaic_sm90"),
        (["--recipe", "paper", "--phases.activations", "128:2:12"], "required by"),
        (
            ["--phases.experts", "8"],
            "--phases.experts is a part of the pattern: ",
        ),
        (
            ["--phases.block_rows=8"],
            "--phases.activations V:2:M, where M is four ",
        ),
        (["--recipe", "weights", "--phases.activations", "2:4"], "makes another rec"),
        (
            ["--recipe", "two-four", "--phases.experts-per-token", "2"],
            "has no meaning in recipe 'two-four'; l",
        ),
        (
            ["--recipe", "two-four", "--model.d-model", "6", *ONE_HEAD],
            "d_model=6 is not a multiple of 4",
        ),
        (["--model.d-hidden", "10"], "d_hidden=10 is not a multiple of m=32"),
        (["--steps", "3000000000"], "steps=3000000000 must be at least 1 and at most"),
        (["--seed", "-1"], "seed=-1 must be at least 0"),
        (["--keep-every", "3"], "keep_every=3 is not a multiple of checkpoint_every"),
        (["--mesh.fsdp", "7"], "mesh.fsdp=7 x mesh.tensor=1 is not the number of"),
        (
            ["--dry-run", "--mesh.tensor", "3"],
            "heads=2 is not a multiple of mesh.tensor",
        ),
        (["--dry-run", "--mesh.data", "5"], "x 1, whose devices share the sequences"),
        (
            "--dry-run --preset llama-1b --mesh.fsdp 8 --micro-batches 64".split(),
            "set --micro-batches 32, leave it out (then it is 8), or change the mesh",
        ),
    ],
)
def test_an_error_is_one_line_and_status_one(
    arguments, message, text, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    arguments = [text if argument == "TEXT" else argument for argument in arguments]
    assert run_train(arguments) == 1
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1 and "Traceback" not in error
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data.text", "nothing*.txt"], "text='nothing*.txt': no file"),
        (["--data.shards", "nowhere"], "nowhere"),
        (["--data.shards", "."], "token 1 is 300, and model.vocab_size=256 has ids"),
        (["--data.tokenizer", "none.json"], "tokenizer='none.json' is not a file"),
        (["--data.tokenizer", "tokenizer.json"], "set --model.vocab-size 320"),
        (["--data.text", "TEXT", "--model.vocab-size", "4096"], "-size 256, or give"),
        (["--data.text", "TEXT", "--data.sequence-length", "9999"], "in a row, and"),
        (["--data.text", "TEXT"], "batch_size=32 exceeds the 11 held-out windows"),
        (
            ["--data.text", "TEXT", "--batch-size", "96", "--micro-batches", "24"],
            "batch_size=96 exceeds the 80 training windows",
        ),
    ],
)
def test_a_dry_run_ends_with_what_is_wrong_with_the_data(
    arguments, message, text, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    write_tokenizer(tmp_path / "tokenizer.json")
    write_shard(tmp_path / "train", [0, 300] * 200, "npy uint16")
    write_shard(tmp_path / "val", [0] * 200, "npy uint16")
    arguments = [text if argument == "TEXT" else argument for argument in arguments]
    assert run_train([*arguments, "--dry-run"]) == 1
    captured = capsys.readouterr()
    assert message in captured.err and captured.out == ""
    assert not (tmp_path / "runs").exists()
    assert run_train(arguments) == 1
    assert capsys.readouterr().err == captured.err


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("--steps", "many", "invalid literal for int() with base 10: 'many'"),
        ("--steps", "1.5", "invalid literal for int()"),
        ("--model.dtype", "float8", "invalid choice 'float8'"),
        ("--preset", "llama-2b", "invalid choice: 'llama-2b'"),
        ("--model.heads", "0", "model.heads=0 must be at least 1"),
        ("--model.heads", "3", "d_model=128 is not a multiple of heads=3"),
        ("--optimizer.peak-learning-rate", "nan", "peak_learning_rate=nan must be"),
        ("--optimizer.beta1", "1", "optimizer.beta1=1.0 must be at least 0 and below"),
        ("--phases.sparse-share", "2", "phases.sparse_share=2.0 must be at least 0"),
        ("--phases.router", "truemass", "must be one of 'nearest_centre', 'token_hash"),
        ("--phases.activations", "2:3", "activations=NM(n=2, m=3) is not 2:4"),
        ("--phases.weights", "two", "'two' names no pattern; write N:M as '2:4'"),
        ("--mesh.data", "-1", "mesh.data=-1 must be at least 0"),
    ],
)
def test_a_value_that_cannot_be_ends_with_its_name_and_status_two(
    flag, value, message, capsys
):
    with pytest.raises(SystemExit) as caught:
        run_train([flag, value])
    assert caught.value.code == 2
    error = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert message in error and "Traceback" not in error


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            MemoryError("Unable to allocate 9 TiB"),
            "MemoryError: Unable to allocate 9 TiB",
        ),
        (
            jax.errors.JaxRuntimeError(
                "RESOURCE_EXHAUSTED: Out of memory.\nmore lines"
            ),
            "JaxRuntimeError: RESOURCE_EXHAUSTED: Out of memory; `sparsejax plan` says",
        ),
    ],
)
def test_too_little_memory_is_one_line_with_the_way_out(
    error, message, capsys, monkeypatch
):
    monkeypatch.setattr(job, "main", raising(error))
    assert run_train([]) == 1
    shown = capsys.readouterr().err
    assert message in shown and "--model.remat full" in shown
    assert shown.count("\n") == 1


def test_an_error_of_ours_keeps_its_traceback(monkeypatch):
    error = jax.errors.JaxRuntimeError("INTERNAL: something else")
    monkeypatch.setattr(job, "main", raising(error))
    with pytest.raises(jax.errors.JaxRuntimeError, match="something else"):
        run_train([])


def raising(error: Exception):
    def fail(*_, **__):
        raise error

    return fail


def test_a_loss_that_is_not_finite_is_one_line_with_the_last_checkpoint(
    text, tmp_path, capsys
):
    config = micro_config(text, checkpoint_every=1, eval_every=0)
    optimizer = replace(config.optimizer, peak_learning_rate=1e30)
    arguments = arguments_of(replace(config, optimizer=optimizer))
    assert run_train([*arguments, "--run-folder", str(tmp_path / "run")]) == 1
    error = capsys.readouterr().err
    good = Checkpoints(tmp_path / "run" / "checkpoints").path()
    assert error.startswith("NonFiniteLoss: ") and error.count("\n") == 1
    assert f"The last good checkpoint is {good}; nothing was overwritten" in error


@pytest.mark.parametrize("given", [[], ["--run-folder", "runs/a"]])
def test_no_step_is_timed_for_a_run_that_could_not_be_written(
    given, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").write_text("")
    monkeypatch.setattr(train.before_training, "why_untimed", lambda *_: None)
    monkeypatch.setattr(train, "load_corpus", lambda *_, **__: pytest.fail("reads"))
    assert run_train(given) == 1
    assert "runs: Not a directory" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["--preset tiny", "comparison"])
def test_a_folder_that_cannot_be_made_ends_it_before_anything_else(
    command, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(job, "train", lambda *_: pytest.fail("trains"))
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / "run"
    if command == "comparison":
        (tmp_path / "some.toml").write_text("seeds = [0]\n[runs.a]")
        status = compare_recipes.run(
            [f"{tmp_path / 'some.toml'}", "--folder", f"{folder}"]
        )
    else:
        status = run_train([*command.split(), "--run-folder", str(folder)])
    assert status == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == (
        f"ValueError: the run folder {folder} cannot be made ({tmp_path / 'file'}: Not "
        f"a directory); choose another, or make this one writable\n"
    )
