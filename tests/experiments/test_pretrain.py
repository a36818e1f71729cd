"""The main job: its command line, its errors, micro runs end to end, its processes."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from experiments import compare_recipes, pretrain
from sparsejax.checkpoints.checkpoint import Checkpoints
from sparsejax.config import RECIPES, MeshConfig, TrainConfig
from sparsejax.config_file import from_json, read_schedule, to_json
from sparsejax.interchange.export import export_huggingface
from sparsejax.presets import PRESETS
from sparsejax.routing.routers import ActivationEnergy, TokenHash
from sparsejax.sparsity.patterns import VNM
from sparsejax.training.step import Run
from tests.support.exported_models import MODELS, some_model
from tests.support.micro_run import (
    arguments_of,
    assert_same_bits,
    micro_config,
    read_records,
    with_phases,
    without_speed,
)
from tests.support.shard_files import write_shard
from tests.support.tokenizer_file import write_tokenizer

pytestmark = pytest.mark.usefixtures("quick")

SCRIPT = Path(pretrain.__file__)
ONE_HEAD = ["--model.heads", "1", "--model.kv-heads", "1"]


# The command line.


def test_flags_override_the_preset():
    options = pretrain.parse(
        "--preset gpt-124m --recipe paper --steps 3 --model.d-model 32 "
        "--model.heads 2 --model.kv-heads 1 --phases.activations 128:2:32 "
        "--phases.no-fold --phases.token-sparsity mvue --data.text a*.txt "
        "--no-plot".split()
    )
    config = options.config
    gpt = PRESETS["gpt-124m"]()
    assert config == replace(
        gpt,
        recipe="paper",
        steps=3,
        model=replace(gpt.model, d_model=32, heads=2, kv_heads=1),
        phases=replace(
            gpt.phases,
            fold=False,
            sparsity=replace(
                RECIPES["paper"], activations=VNM(128, 2, 32), token_sparsity="mvue"
            ),
        ),
        data=replace(gpt.data, text="a*.txt"),
        plot=False,
    )
    assert (options.run_folder, options.resume, options.dry_run) == (None, None, False)


def test_every_setting_is_a_flag(text):
    config = with_phases(micro_config(text, plot=True), fold=False)
    assert pretrain.parse(arguments_of(config)).config == config


def test_weights_of_a_folder_bring_their_model(tmp_path):
    export_huggingface(some_model(MODELS["swiglu"]), tmp_path, sequence_length=16)
    begin = ["--init-from", str(tmp_path)]
    options = pretrain.parse([*begin, "--recipe", "weights", "--model.dtype=bfloat16"])
    assert options.config.model == replace(MODELS["swiglu"], dtype="bfloat16")
    assert options.config.recipe == "weights" and options.init_from == tmp_path
    for more, reason in [
        (["--recipe", "dense", "--model.layers", "3"], "model.layers=3 is not that of"),
        (["--resume", "runs/a"], "goes on with a run, and --init-from"),
        (["--branch", "runs/a"], "leave one of them out"),
        ([], "--recipe weights"),  # silu has no zeros for the default recipe
    ]:
        with pytest.raises(ValueError, match=reason):
            pretrain.parse([*begin, *more])


def test_no_flags_are_the_tiny_preset():
    assert pretrain.parse([]).config == TrainConfig()


def test_help_explains_the_flags_with_their_units(capsys):
    with pytest.raises(SystemExit) as caught:
        pretrain.parse(["--help"])
    assert caught.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    for part in (
        "--preset {tiny,wide-200m,gpt-124m,llama-1b,llama-7b}",
        "--recipe {default,paper,activations,weights,s2d,dense}",
        "--model.d-hidden",
        "--dry-run",
        "--resume",
        "Optimiser steps.",
        "Tokens the model sees per sequence",
        "Steps between checkpoints",
        "Share of the steps over which the learning rate rises",
        "Print the plan and stop: the data is read",
    ):
        assert part in shown, part


def test_a_flag_that_does_not_exist_ends_with_a_message(capsys):
    with pytest.raises(SystemExit) as caught:
        pretrain.run(["--colour", "red"])
    assert caught.value.code != 0
    assert "--colour" in capsys.readouterr().err


def stopped_run(folder: Path, config: TrainConfig) -> list[str]:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(to_json(config)))
    return ["--resume", str(folder)]


def test_a_branch_has_the_settings_of_its_trunk_and_those_that_are_given(
    text, tmp_path, capsys
):
    config = micro_config(text, recipe="paper", steps=4, eval_every=0)
    trunk = tmp_path / "trunk"
    pretrain.main(config, trunk)
    branch = ["--branch", f"{trunk}@3"]
    assert pretrain.parse(branch).config == config
    steps = [*branch, "--steps", "6", "--optimizer.schedule", "wsd"]
    longer = pretrain.parse(steps).config
    wsd = replace(config.optimizer, schedule="wsd")
    assert longer == replace(config, steps=6, optimizer=wsd)
    assert pretrain.parse([*branch, "--recipe", "weights"]).config == replace(
        config, recipe="weights", phases=replace(config.phases, sparsity=None)
    )
    capsys.readouterr()
    assert pretrain.run([*steps, "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert f"a branch: begins with step 3 of {trunk}" in shown
    assert pretrain.run([*steps, "--run-folder", str(tmp_path / "branch")]) == 0
    shown = capsys.readouterr().out
    assert "a branch of ../trunk, from step 3: learning rate there " in shown
    records = read_records(tmp_path / "branch")
    assert [r["step"] for r in records if r["event"] == "step"] == [4, 5, 6]
    for given, message in (
        ([f"{trunk}@2"], "no checkpoint of step 2 to branch from; take one of 1, 3, 4"),
        ([str(tmp_path)], f"--branch {tmp_path}: there is no "),
        ([f"{trunk}@3", "--seed", "1"], "whose seed is 0, and a branch of it cannot"),
        ([f"{trunk}@3", "--resume", str(trunk)], "begins one; leave one of them out"),
    ):
        assert pretrain.run(["--branch", *given]) == 1
        assert message in capsys.readouterr().err


def test_the_phases_of_a_run_are_read_from_a_file(text, tmp_path, capsys):
    path = tmp_path / "phases.toml"
    path.write_text(
        '[[phase]]\nname = "first"\nshare = 0.5\nsparsity.weights = "2:4"\n'
        'every.steps = 2\n[[phase]]\nname = "second"\n'
    )
    schedule = read_schedule(path)
    options = pretrain.parse(["--preset", "wide-200m", "--schedule", str(path)])
    assert options.config == PRESETS["wide-200m"]().with_schedule(schedule)
    config = micro_config(text, steps=4, eval_every=0)
    arguments = [*arguments_of(config), "--schedule", str(path)]
    # What the recipe's phases would be is not read.
    of_recipe = [
        arguments.index(f"--phases.{name}")
        for name in ("warmup-share", "sparse-share", "weights", "activations")
    ]
    for index in sorted(of_recipe, reverse=True):
        del arguments[index : index + 2]
    assert pretrain.run([*arguments, "--dry-run"]) == 0
    shown = capsys.readouterr().out
    for part in (
        "schedule: 4 steps x",
        "│ first ",
        "one in 2 of them",
        "FFN, first ph",
    ):
        assert part in shown, part
    folder = tmp_path / "run"
    assert pretrain.run([*arguments, "--run-folder", str(folder)]) == 0
    kinds = [r["kind"] for r in read_records(folder) if r["event"] == "step"]
    assert kinds == ["first", "first", "second", "second"]
    assert pretrain.parse(["--resume", str(folder)]).config == config.with_schedule(
        schedule
    )
    assert pretrain.run(["--resume", str(folder)]) == 0
    capsys.readouterr()
    for given, message in (
        (["--schedule", "none.toml"], "none.toml does not hold a schedule: "),
        (["--schedule", str(path), "--recipe", "paper"], "has no meaning beside"),
        (["--schedule", str(path), "--resume", str(folder)], "leave --schedule"),
    ):
        try:
            status = pretrain.run(given)
        except SystemExit as ended:
            status = ended.code
        assert status in (1, 2)
        error = " ".join(capsys.readouterr().err.replace("│", " ").split())
        assert message in error


def test_a_resume_has_the_settings_of_its_run(text, tmp_path):
    config = micro_config(text)
    resume = stopped_run(tmp_path / "run", config)
    options = pretrain.parse(resume)
    assert (options.config, options.resume) == (config, tmp_path / "run")
    changed = "--log-every 7 --plot --steps 24 --mesh.fsdp 2".split()
    allowed = pretrain.parse([*resume, *changed])
    assert allowed.config == replace(
        config, log_every=7, plot=True, steps=24, mesh=MeshConfig(fsdp=2)
    )


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
    assert pretrain.run(["--resume", str(tmp_path)]) == 1
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
    assert pretrain.run([*resume, *extra]) == 1
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
        (["--phases.experts-per-token", "2"], "has no meaning in recipe 'default'; l"),
        (["--model.d-model", "6", *ONE_HEAD], "d_model=6 is not a multiple of 4"),
        (["--model.d-hidden", "10"], "d_hidden=10 is not a multiple of m=4"),
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
    assert pretrain.run(arguments) == 1
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
    assert pretrain.run([*arguments, "--dry-run"]) == 1
    captured = capsys.readouterr()
    assert message in captured.err and captured.out == ""
    assert not (tmp_path / "runs").exists()
    assert pretrain.run(arguments) == 1
    assert capsys.readouterr().err == captured.err


def test_a_dry_run_says_what_it_read(text, capsys):
    of_text = ["--data.text", text, "--batch-size", "8"]
    assert pretrain.run(["--dry-run", *of_text]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"^data: 8 files, \d+ tokens \(bytes\) from ", shown, re.M)
    assert f" from {text}; held out: " in shown
    # Without data a model is planned whose vocabulary no text of ours has.
    assert pretrain.run(["--dry-run", "--preset", "llama-1b"]) == 0
    shown = capsys.readouterr().out
    assert "data: none is named, and without it a run ends here: the tok" in shown
    assert "set --model.vocab-size 256" in shown


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
        pretrain.run([flag, value])
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
            "JaxRuntimeError: RESOURCE_EXHAUSTED: Out of memory; --dry-run says",
        ),
    ],
)
def test_too_little_memory_is_one_line_with_the_way_out(
    error, message, capsys, monkeypatch
):
    monkeypatch.setattr(pretrain, "main", raising(error))
    assert pretrain.run([]) == 1
    shown = capsys.readouterr().err
    assert message in shown and "--model.remat full" in shown
    assert shown.count("\n") == 1


def test_an_error_of_ours_keeps_its_traceback(monkeypatch):
    error = jax.errors.JaxRuntimeError("INTERNAL: something else")
    monkeypatch.setattr(pretrain, "main", raising(error))
    with pytest.raises(jax.errors.JaxRuntimeError, match="something else"):
        pretrain.run([])


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
    assert pretrain.run([*arguments, "--run-folder", str(tmp_path / "run")]) == 1
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
    monkeypatch.setattr(pretrain.before_training, "why_untimed", lambda *_: None)
    monkeypatch.setattr(pretrain, "load_corpus", lambda *_, **__: pytest.fail("reads"))
    assert pretrain.run(given) == 1
    assert "runs: Not a directory" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["--preset tiny", "comparison"])
def test_a_folder_that_cannot_be_made_ends_it_before_anything_else(
    command, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(pretrain, "train", lambda *_: pytest.fail("trains"))
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / "run"
    if command == "comparison":
        (tmp_path / "some.toml").write_text("seeds = [0]\n[runs.a]")
        status = compare_recipes.run(
            [f"{tmp_path / 'some.toml'}", "--folder", f"{folder}"]
        )
    else:
        status = pretrain.run([*command.split(), "--run-folder", str(folder)])
    assert status == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == (
        f"ValueError: the run folder {folder} cannot be made ({tmp_path / 'file'}: Not "
        f"a directory); choose another, or make this one writable\n"
    )


# Micro runs, end to end.


def test_the_main_job_writes_its_files_and_says_what_it_did(text, tmp_path, capsys):
    config = micro_config(text, plot=True, sample_length=5)
    outcome = pretrain.main(config, tmp_path / "run")
    assert outcome.completed
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert names >= {"checkpoints", "config.json", "metrics.jsonl", "loss.png"}
    assert not any("draft" in name for name in names)
    assert (tmp_path / "run" / "loss.png").stat().st_size > 10_000
    saved = from_json(json.loads((tmp_path / "run" / "config.json").read_text()))
    assert saved == config
    records = pretrain.read_metrics(tmp_path / "run")
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
    pretrain.main(config, tmp_path / "run")
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
    pretrain.main(micro_config(text), folder)
    records = read_records(folder)
    capsys.readouterr()
    assert pretrain.run(["--resume", str(folder), "--sample-length", "3"]) == 0
    assert "greedy sample" in capsys.readouterr().out
    assert read_records(folder) == records


# Processes of their own.


def test_a_process_joins_the_others_before_it_trains(monkeypatch):
    happened = []
    monkeypatch.setattr(pretrain, "join", lambda **said: happened.append(said))
    ended = SimpleNamespace(resume_in_new_process=False)
    main = lambda *_, **__: happened.append("main") or ended
    monkeypatch.setattr(pretrain, "main", main)
    assert pretrain.run(["--distributed", "--heartbeat-seconds", "7"]) == 0
    assert happened == [{"heartbeat_seconds": 7}, "main"]
    assert pretrain.run(["--heartbeat-seconds", "7"]) == 0
    assert happened[2:] == ["main"]


def command(*arguments: str) -> subprocess.Popen:
    """With nothing that tests have compiled."""
    environment = dict(os.environ)
    environment.pop("JAX_COMPILATION_CACHE_DIR")
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), *arguments],
        env=environment | {"JAX_PLATFORMS": "cpu"},
        cwd=SCRIPT.parent.parent,
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
    assert f"stopped by SIGTERM; go on with --resume {ended}" in output
    latest = Checkpoints(checkpoints).latest_step()
    steps = [r["step"] for r in read_records(ended) if r["event"] == "step"]
    assert latest == steps[-1] < 200
    assert f"last good checkpoint: {Checkpoints(checkpoints).path()}" in output

    assert pretrain.run(["--resume", str(ended)]) == 0
    expected = pretrain.main(config, whole)
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
