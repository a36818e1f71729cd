"""The settings of the main job: from flags, from files, and from a run it resumes."""

import re
from dataclasses import replace

import pytest

from sparsejax.command.train import read_options
from sparsejax.config import RECIPES, MeshConfig, TrainConfig
from sparsejax.config.config_file import read_schedule
from sparsejax.config.presets import PRESETS
from sparsejax.interchange.export import export_huggingface
from sparsejax.launch import job
from sparsejax.sparsity.patterns import VNM
from tests.support.commands import run_train
from tests.support.files.exported_models import MODELS, some_model
from tests.support.micro_run import (
    arguments_of,
    micro_config,
    read_records,
    stopped_run,
    with_phases,
)

pytestmark = pytest.mark.usefixtures("quick")


def test_flags_override_the_preset():
    options = read_options(
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
    assert read_options(arguments_of(config)).config == config


def test_weights_of_a_folder_bring_their_model(text, tmp_path, capsys):
    export_huggingface(some_model(MODELS["swiglu"]), tmp_path, sequence_length=16)
    begin = ["--init-from", str(tmp_path)]
    options = read_options([*begin, "--recipe", "weights", "--model.dtype=bfloat16"])
    assert options.config.model == replace(MODELS["swiglu"], dtype="bfloat16")
    assert options.config.recipe == "weights" and options.init_from == tmp_path
    sparsity = read_options(begin).config.sparsity
    assert sparsity == replace(RECIPES["experts"], skipped_energy=None)
    planned = [*begin, "--recipe", "weights", "--data.text", text, "--dry-run"]
    assert run_train([*planned, "--data.sequence-length=16", "--batch-size=4"]) == 0
    assert f"begins with the weights of {tmp_path}, and" in capsys.readouterr().out
    for more, reason in [
        (["--recipe", "dense", "--model.layers", "3"], "model.layers=3 is not that of"),
        (["--resume", "runs/a"], "goes on with a run, and --init-from"),
        (["--branch", "runs/a"], "leave one of them out"),
        # silu has no zeros
        (["--recipe", "two-four"], "--recipe weights .* or .*--init-from --relufy"),
        # What contradicts the folder is told before what does not fit the recipe.
        (["--model.activation", "relu2"], "activation='relu2' is not that of"),
        (
            ["--recipe", "paper", "--model.activation=reglu2"],
            "activation='reglu2' is not that of",
        ),
    ]:
        with pytest.raises(ValueError, match=reason):
            read_options([*begin, *more])
    # The way out that `paper` names is one.
    dense_inside = ["--recipe", "paper", "--phases.activations", "128:4:16"]
    config = read_options([*begin, *dense_inside]).config
    assert config.model == MODELS["swiglu"]
    vnm = VNM(128, 4, 16)
    assert config.sparsity == replace(RECIPES["paper"], activations=vnm)


def test_a_gate_of_silu_becomes_squared_relu_and_begins_dense(text, tmp_path, capsys):
    export_huggingface(
        some_model(MODELS["qwen2"]), tmp_path / "silu", sequence_length=16
    )
    export_huggingface(
        some_model(MODELS["reglu2"]), tmp_path / "relu", sequence_length=16
    )
    begin = ["--init-from", str(tmp_path / "silu"), "--relufy"]
    config = read_options(begin).config
    assert config.model == replace(MODELS["qwen2"], activation="reglu2")
    assert config.recipe == "experts" and config.phases.warmup_share == 0.2
    # The dense tail is as long as without.
    assert config.phases.sparse_share == 0.7
    shares = ["--phases.warmup-share", "0.3", "--phases.sparse-share", "0.5"]
    longer = read_options([*begin, *shares]).config
    assert longer.phases.warmup_share == 0.3
    planned = [*begin, "--data.text", text, "--dry-run"]
    assert run_train([*planned, "--data.sequence-length=16", "--batch-size=4"]) == 0
    assert "silu, squared ReLU in the place of SiLU, and" in capsys.readouterr().out
    sparse = tmp_path / "sparse.toml"
    sparse.write_text('[[phase]]\nname = "a"\nsparsity = { weights = "2:4" }\n')
    for arguments, reason in [
        (["--relufy"], "add --init-from FOLDER, or leave --relufy out"),
        (["--init-from", str(tmp_path / "relu"), "--relufy"], "activation='reglu2'"),
        ([*begin, "--phases.warmup-share", "0"], "'sparse' is sparse from the first"),
        ([*begin, "--schedule", str(sparse)], "'a' is sparse from the first step"),
        (
            [*begin, "--recipe", "dense", "--model.activation", "swiglu"],
            "activation='swiglu' is not that of",
        ),
    ]:
        with pytest.raises(ValueError, match=reason):
            read_options(arguments)


def test_no_flags_are_the_tiny_preset():
    assert read_options([]).config == TrainConfig()


def test_help_explains_the_flags_with_their_units(capsys):
    with pytest.raises(SystemExit) as caught:
        read_options(["--help"])
    assert caught.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    for part in (
        "--preset {tiny,wide-200m,gpt-124m,llama-1b,llama-7b}",
        "--recipe {experts,two-four,paper,activations,weights,s2d,dense}",
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


def test_a_branch_has_the_settings_of_its_trunk_and_those_that_are_given(
    text, tmp_path, capsys
):
    config = micro_config(text, recipe="paper", steps=4, eval_every=0)
    trunk = tmp_path / "trunk"
    job.main(config, trunk)
    branch = ["--branch", f"{trunk}@3"]
    assert read_options(branch).config == config
    steps = [*branch, "--steps", "6", "--optimizer.schedule", "wsd"]
    longer = read_options(steps).config
    wsd = replace(config.optimizer, schedule="wsd")
    assert longer == replace(config, steps=6, optimizer=wsd)
    assert read_options([*branch, "--recipe", "weights"]).config == replace(
        config, recipe="weights", phases=replace(config.phases, sparsity=None)
    )
    capsys.readouterr()
    assert run_train([*steps, "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert f"a branch: begins with step 3 of {trunk}" in shown
    assert run_train([*steps, "--run-folder", str(tmp_path / "branch")]) == 0
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
        assert run_train(["--branch", *given]) == 1
        assert message in capsys.readouterr().err


def test_the_phases_of_a_run_are_read_from_a_file(text, tmp_path, capsys):
    path = tmp_path / "phases.toml"
    path.write_text(
        '[[phase]]\nname = "first"\nshare = 0.5\nsparsity.weights = "2:4"\n'
        'every.steps = 2\n[[phase]]\nname = "second"\n'
    )
    schedule = read_schedule(path)
    options = read_options(["--preset", "wide-200m", "--schedule", str(path)])
    assert options.config == PRESETS["wide-200m"]().with_schedule(schedule)
    config = micro_config(text, steps=4, eval_every=0)
    arguments = [*arguments_of(config), "--schedule", str(path)]
    # What the recipe's phases would be is not read.
    of_recipe = [
        arguments.index(f"--phases.{name}")
        for name in ("warmup-share", "sparse-share", "weights", "activations")
    ]
    of_recipe.append(arguments.index("--recipe"))
    for index in sorted(of_recipe, reverse=True):
        del arguments[index : index + 2]
    assert run_train([*arguments, "--dry-run"]) == 0
    shown = capsys.readouterr().out
    for part in (
        "schedule: 4 steps x",
        "│ first ",
        "one in 2 of them",
        "FFN, first ph",
    ):
        assert part in shown, part
    folder = tmp_path / "run"
    assert run_train([*arguments, "--run-folder", str(folder)]) == 0
    kinds = [r["kind"] for r in read_records(folder) if r["event"] == "step"]
    assert kinds == ["first", "first", "second", "second"]
    assert read_options(["--resume", str(folder)]).config == config.with_schedule(
        schedule
    )
    assert run_train(["--resume", str(folder)]) == 0
    capsys.readouterr()
    for given, message in (
        (
            ["--schedule", "none.toml"],
            "there is no schedule none.toml; give a file of ",
        ),
        (["--schedule", str(path), "--recipe", "paper"], "has no meaning beside"),
        (["--schedule", str(path), "--resume", str(folder)], "leave --schedule"),
    ):
        try:
            status = run_train(given)
        except SystemExit as ended:
            status = ended.code
        assert status in (1, 2)
        error = " ".join(capsys.readouterr().err.replace("│", " ").split())
        assert message in error


def test_a_resume_has_the_settings_of_its_run(text, tmp_path):
    config = micro_config(text)
    resume = stopped_run(tmp_path / "run", config)
    options = read_options(resume)
    assert (options.config, options.resume) == (config, tmp_path / "run")
    changed = "--log-every 7 --plot --steps 24 --mesh.fsdp 2".split()
    allowed = read_options([*resume, *changed])
    assert allowed.config == replace(
        config, log_every=7, plot=True, steps=24, mesh=MeshConfig(fsdp=2)
    )
    assert read_options([*resume, "--recipe", config.recipe]).config == config
    for recipe in {"weights", "dense", "paper"} - {config.recipe}:
        message = f"recipe is '{config.recipe}' and cannot become '{recipe}'"
        with pytest.raises(ValueError, match=message):
            read_options([*resume, "--recipe", recipe])


def test_a_dry_run_says_what_it_read(text, capsys):
    of_text = ["--data.text", text, "--batch-size", "8"]
    assert run_train(["--dry-run", *of_text]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"^data: 8 files, \d+ tokens \(bytes\) from ", shown, re.M)
    assert f" from {text}; held out: " in shown
    # Without data a model is planned whose vocabulary no text of ours has.
    assert run_train(["--dry-run", "--preset", "llama-1b"]) == 0
    shown = capsys.readouterr().out
    assert "data: none is named, and without it a run ends here: the tok" in shown
    assert "set --model.vocab-size 256" in shown
