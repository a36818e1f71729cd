"""The command: help, refusals, and the console script that the package installs."""

import json
import os
import re
import subprocess
import sysconfig
from importlib.metadata import entry_points
from pathlib import Path

import pytest

import sparsejax.command
from sparsejax.command import main
from sparsejax.reports.provenance import commit
from tests.support.files.exported_models import TOKENS
from tests.support.oracles import llama_oracle


def test_help_lists_every_command(capsys):
    assert main.run([]) == main.run(["--help"]) == 0
    said = capsys.readouterr().out
    for name, does in main.COMMANDS.items():
        assert re.search(rf"^  {name} +{re.escape(does)}$", said, re.MULTILINE)


def test_a_reader_that_has_read_enough_of_a_help_is_no_error():
    script = Path(sysconfig.get_path("scripts")) / "sparsejax"
    pipe = subprocess.PIPE
    with subprocess.Popen([script, "plan", "--help"], stdout=pipe, stderr=pipe) as run:
        run.stdout.close()
        assert run.stderr.read() == b"" and run.wait() == 0


def test_every_command_is_a_module_and_every_module_a_command():
    folder = Path(sparsejax.command.__file__).parent
    modules = {path.stem for path in folder.glob("*.py")} - {"__init__", "main"}
    assert modules == set(main.COMMANDS)


def test_what_cannot_be_done_is_one_line(capsys, tmp_path):
    assert main.run(["fly"]) == 2
    assert "no command 'fly'" in capsys.readouterr().err
    assert main.run(["export", str(tmp_path), str(tmp_path / "out")]) == 1
    said = capsys.readouterr().err
    assert said.startswith("ValueError: ") and said.count("\n") == 1


def test_a_run_is_exported(uninterrupted, tmp_path, capsys):
    _, folder, _ = uninterrupted("two-four")
    out = tmp_path / "out"
    assert main.run(["export", str(folder), str(out), "--dtype", "bfloat16"]) == 0
    assert "after step 12" in capsys.readouterr().out
    config = json.loads((out / "config.json").read_text())
    assert config["torch_dtype"] == "bfloat16"
    assert llama_oracle.logits(out, TOKENS).shape == (TOKENS.size, 256)


def test_a_run_and_its_export_say_the_same(uninterrupted, tmp_path, capsys):
    _, folder, _ = uninterrupted("two-four")
    out = tmp_path / "out"
    assert main.run(["export", str(folder), str(out)]) == 0
    capsys.readouterr()
    options = ["--prompt", "the ", "token", "--tokens", "8", "--temperature", "0"]
    said = []
    for model in (folder, out, f"{folder}@12"):
        assert main.run(["sample", str(model), *options]) == 0
        said.append(capsys.readouterr().out)
    assert len(set(said)) == 1 and said[0].startswith("--- prompt 1 of 2\nthe ")
    assert "\n--- prompt 2 of 2\ntoken" in said[0]
    (out / "tokenizer.json").unlink()
    assert main.run(["sample", str(out), *options]) == 1
    assert "--tokenizer" in capsys.readouterr().err


def test_a_sample_ends_where_the_folder_says(uninterrupted, tmp_path, capsys):
    _, folder, _ = uninterrupted("two-four")
    out = tmp_path / "out"
    assert main.run(["export", str(folder), str(out)]) == 0
    sample = ["sample", str(out), "--prompt", "the ", "--tokens", "8"]
    sample += ["--temperature", "0"]
    capsys.readouterr()

    def said(*more: str) -> str:
        assert main.run([*sample, *more]) == 0
        return capsys.readouterr().out.removesuffix("\n")

    whole = said()
    assert len(whole) == len("the ") + 8
    end = whole[4 + 2]
    path = out / "generation_config.json"
    told = json.loads(path.read_text()) | {"eos_token_id": [ord(end), 7]}
    path.write_text(json.dumps(told))
    assert said() == whole[: whole.index(end, 4)]
    assert said("--no-end") == whole


def test_the_console_script_is_installed():
    (script,) = entry_points(group="console_scripts", name="sparsejax")
    assert script.load() is main.main
    program = Path(sysconfig.get_path("scripts")) / "sparsejax"
    done = subprocess.run([program], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("usage: sparsejax COMMAND")


def test_the_commit_is_that_of_this_checkout():
    told = commit()
    if not (Path(main.__file__).parents[2] / ".git").exists():
        assert told is None
        return
    head = subprocess.run(
        ["git", "rev-parse", "HEAD"],
        cwd=os.path.dirname(main.__file__),
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert told is not None and head.startswith(told.rstrip("+"))


@pytest.mark.parametrize(
    ("command", "advice"),
    [
        ("eval", "a lower --batch-size or --sequence-length needs less"),
        ("sample", "fewer prompts or --tokens need less"),
        ("train", "fewer --sequences-per-device"),
    ],
)
def test_out_of_memory_names_the_flags_that_the_command_has(command, advice):
    assert advice in main.reason_of(MemoryError("out of memory"), command)
    assert main.reason_of(KeyError("x"), command) is None


def test_a_plan_refuses_the_trace_that_the_run_would_refuse(capsys):
    assert main.run(["train", "--dry-run", "--steps", "20", "--profile", "5:50"]) == 1
    assert "goes beyond the last step" in capsys.readouterr().err
