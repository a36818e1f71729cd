"""Every command that the documentation gives is run: as a dry run, at a tiny size, or,
of a benchmark that needs GPUs, as far as its settings. In one test, since the commands
share what the first of them make."""

import ast
import importlib
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import tyro

from sparsejax.command import main
from sparsejax.data.tokenizers import ByteTokenizer
from sparsejax.distributed.processes import join
from sparsejax.interchange.export import export_huggingface
from tests.fuzz.__main__ import Options as FuzzOptions
from tests.fuzz.cases import FAMILIES, run_chunk
from tests.support.files.exported_models import MODELS, some_model
from tests.support.files.synthetic_runs import ladder, write_comparison
from tests.support.whole_runs import quick_runs
from tests.support.wide_console import widen

ROOT = Path(__file__).parent.parent
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "experiments" / "README.md",
    *sorted(set((ROOT / "docs").glob("*.md")) - {ROOT / "docs" / "first-day.md"}),
    *sorted((ROOT / "docs" / "results").glob("*.md")),
]
"""But for the first day, whose commands `test_first_day` runs in their order."""
WEIGHTS = ROOT / "docs" / "weights.md"
SCRIPTS = sorted(
    [
        *(ROOT / "experiments").rglob("*.py"),
        *(ROOT / "sparsejax" / "command").glob("*.py"),
    ]
)
Command = tuple[str, ...]
"""The words of one, without comments."""
ASSIGNMENT = re.compile(r"[A-Z_]+=")
BEGINS = re.compile(r"([A-Z_]+=\S+ )*(uv run|pip install|srun) ")
OF_HELP = re.compile(r"sparsejax \w+( |$)")
"""How a command of the package begins in what its help says."""


# What the documents say.


def commands_of(path: Path) -> list[Command]:
    """The commands of a file: of a document those in its text; in a script the lines of
    its docstring that begin like one."""
    text = path.read_text()
    if path.suffix != ".py":
        return commands_in(text)
    docstring = ast.get_docstring(ast.parse(text)) or ""
    lines = [line.strip() for line in _joined(docstring)]
    begins = lambda line: BEGINS.match(line) or OF_HELP.match(line)
    return list(_split(filter(begins, lines)))


def commands_in(text: str) -> list[Command]:
    """The commands of a document's text: every line of its blocks and what else begins
    like a command."""
    fenced = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
    blocks = [of for kind, of in fenced.findall(text) if kind in ("", "sh", "bash")]
    prose = fenced.sub("", text)
    indented = r"(?<=\n\n)((?: {4}.*\n|\n(?= {4}))+)"
    blocks += re.findall(indented, prose)
    spans = re.findall(r"`([^`]+)`", re.sub(indented, "", prose))
    spans = [" ".join(span.split()) for span in spans]
    lines = [line for block in blocks for line in _joined(block)]
    return list(_split([*lines, *(span for span in spans if BEGINS.match(span))]))


def _joined(text: str) -> list[str]:
    return text.replace("\\\n", " ").splitlines()


def _split(lines: Iterator[str] | list[str]) -> Iterator[Command]:
    for line in lines:
        words = shlex.split(line, comments=True)
        while "&&" in words:
            yield tuple(words[: words.index("&&")])
            words = words[words.index("&&") + 1 :]
        if words:
            yield tuple(words)


# How each program is run.


def as_ci_does(words: Command, launcher: Command) -> None:
    """The words stand in a line of .ci/run, in this order."""
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    paths = [word for word in words if "/" in word]
    assert all((ROOT / path).exists() for path in paths)
    wanted = [word for word in words if word not in paths and word not in ("-n", "0")]
    for line in lines:
        there = iter(line.split())
        if all(word in there for word in wanted):
            return
    raise AssertionError(f"CI runs no {shlex.join(wanted)}")


def as_ci_builds_it(words: Command, launcher: Command) -> None:
    """CI builds the site that the command serves."""
    assert words == ("mkdocs", "serve")
    as_ci_does(("mkdocs", "build", "--strict"), launcher)


def whole_ci(words: Command, launcher: Command) -> None:
    script = ROOT / words[0]
    assert os.access(script, os.X_OK)
    subprocess.run(["bash", "-n", str(script)], check=True)


def one_case(words: Command, launcher: Command) -> None:
    assert words[:3] == ("python", "-m", "tests.fuzz")
    options = tyro.cli(FuzzOptions, args=words[3:])
    family = options.family or next(iter(FAMILIES))
    _, ended, failures, _ = run_chunk(Path.cwd(), family, options.seed, 1)
    assert ended.total() == 1 and not failures


def script(words: Command) -> None:
    """A script as it runs when it is called, in this process."""
    program, *arguments = words
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [program, *arguments])
        try:
            runpy.run_path(str(ROOT / program), run_name="__main__")
        except SystemExit as ended:
            assert not ended.code


SMALL = (
    "--steps 4 --batch-size 2 --model.layers 1 --model.d-model 16 --model.d-hidden 64 "
    "--model.heads 1 --model.kv-heads 1 --data.sequence-length 8 --sample-length 4"
)
RUN = "runs/tiny-experts-20260101-120000"
"""The run that the documents plot and resume."""


def train_planned_or_small(words: Command, launcher: Command) -> None:
    """A run, planned for the processes that are launched, on data that is there; the
    one without any setting to its end."""
    program, *given = words if words[0] != "sparsejax" else words[1:]
    call = script if program.endswith(".py") else installed
    if not given:
        call((program, *SMALL.split(), "--run-folder", RUN))
        names = {path.name for path in Path(RUN).iterdir()}
        assert names >= {"config.json", "loss.png", "model.safetensors"}
        return
    # The small run has saved its last step, and not those of the documents.
    given = [re.sub(r"^(runs/.*)@\d+$", r"\1", word) for word in given]
    # The folder that all hosts see is here.
    given = [word.replace("/shared/", "shared/") for word in given]
    extra = [] if "--dry-run" in given else ["--dry-run"]
    if launcher:
        count = lambda flag: int(launcher[launcher.index(flag) + 1])
        processes = count("--nodes") * count("--ntasks-per-node")
        fsdp = int(given[given.index("--mesh.fsdp") + 1])
        extra += ["--mesh.data", str(processes // fsdp)]
    call((program, *given, *extra))


def installed(words: Command) -> None:
    """A subcommand of the package, in this process."""
    assert main.run(list(words)) == 0


def planned(words: Command, launcher: Command) -> None:
    script((*words, "--dry-run"))


def as_it_stands(words: Command, launcher: Command) -> None:
    script(words)


def as_installed(words: Command, launcher: Command) -> None:
    """The command of the package: a run small or planned, what only a GPU could do as
    far as its refusal, an export into a new folder."""
    if words[1] == "train":
        train_planned_or_small(words, launcher)
        return
    # The small run has saved its last step, and not those of the documents.
    arguments = [re.sub(r"^(runs/.*)@\d+$", r"\1", word) for word in words[1:]]
    if words[1] == "tune":
        assert main.run(arguments) == 1
        return
    if words[1] == "export" and Path(words[3]).exists():
        arguments[2] += "-again"
    installed(tuple(arguments))


def into_a_new_folder(words: Command, launcher: Command) -> None:
    """Runs the command as it stands; what an earlier one has made of another text is
    left as it is."""
    place = words.index("--folder") + 1
    while Path(words[place]).exists():
        words = (*words[:place], f"{words[place]}-again", *words[place + 1 :])
    script(words)


def settings_only(words: Command, launcher: Command) -> Any:
    """Checks that a script that needs a GPU understands what it is called with. What it
    does is run in tests of its own, at tiny sizes."""
    module = importlib.import_module(words[0].removesuffix(".py").replace("/", "."))
    if hasattr(module, "parse"):
        return module.parse(list(words[1:]))
    return tyro.cli(module.Config, args=words[1:])


def settings(words: Command, launcher: Command) -> None:
    """Checks likewise that a benchmark understands its command, and that its rows go
    where git does not look."""
    config = settings_only(words, launcher)
    if "--results" not in words:
        assert config.results.parent == Path("runs")


HOW: dict[str, Callable[[Command, Command], Any]] = {
    "pip": as_ci_does,
    "ruff": as_ci_does,
    "pyrefly": as_ci_does,
    "pytest": as_ci_does,
    "mkdocs": as_ci_builds_it,
    ".ci/run": whole_ci,
    "python": one_case,
    "experiments/tokenize_text.py": into_a_new_folder,
    "experiments/pretrain.py": train_planned_or_small,
    "sparsejax": as_installed,
    "experiments/plot.py": as_it_stands,
    "experiments/compare_recipes.py": planned,
    "experiments/bench/ffn.py": settings,
    "experiments/bench/gemm.py": settings,
    "experiments/bench/mesh.py": settings,
    "experiments/bench/step.py": settings,
    "experiments/equal_loss.py": as_it_stands,
    "experiments/predict_ratio.py": as_it_stands,
    "experiments/predict_step.py": settings,
    "experiments/compare_models.py": settings,
    "experiments/gradient_precision.py": settings,
    "experiments/integrations/maxtext_llama.py": settings_only,
    "experiments/integrations/tunix_llama.py": settings_only,
    "experiments/tune_table.py": settings_only,
}
"""By program, in the order in which they have to be run."""
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
ADDED = {
    "--extra": PROJECT["project"]["optional-dependencies"],
    "--group": PROJECT["dependency-groups"],
}
"""The extras and groups that may be installed beside the package, by flag of uv."""


def taken_apart(command: Command) -> tuple[dict[str, str], Command, Command]:
    """The environment that is set, what launches the program, and the program with its
    arguments; no program where only the environment is set."""
    words = list(command)
    environment = {}
    while words and ASSIGNMENT.match(words[0]):
        name, _, environment[name] = words.pop(0).partition("=")
    launcher: Command = ()
    if words[:1] == ["srun"]:
        launcher = tuple(words[: words.index("uv")])
        words = words[words.index("uv") :]
    if words[:2] == ["uv", "run"]:
        words = words[2:]
        while words[0] in ADDED:
            assert words[1] in ADDED[words[0]]
            words = words[2:]
    return environment, launcher, tuple(words)


# The tests.


def test_commands_are_found_in_blocks_in_prose_and_in_docstrings(tmp_path):
    document = tmp_path / "document.md"
    document.write_text(
        "Text `of code`, `uv run\nspan.py` and `NAME=1 uv run set.py --a`:\n\n"
        "    uv run one.py --a 'b c' \\\n        --d    # a comment\n\n"
        "    made-up && uv run two.py\n\n* an item,\n    which goes on\n\n"
        "```text\nuv run no.py\n```\n\nPlain words.\n\n"
        "```sh\nuv run three.py\n```\n\n```python\nuv = run(1)\n```\n"
    )
    script = tmp_path / "script.py"
    script.write_text('"""What it does.\n\n    uv run it.py --x\n    y = x\n"""\n')
    assert commands_of(document) == [
        ("uv", "run", "three.py"),
        ("uv", "run", "one.py", "--a", "b c", "--d"),
        ("made-up",),
        ("uv", "run", "two.py"),
        ("uv", "run", "span.py"),
        ("NAME=1", "uv", "run", "set.py", "--a"),
    ]
    assert commands_of(script) == [("uv", "run", "it.py", "--x")]
    launched = taken_apart(
        ("A=1", "srun", "-n", "2", "uv", "run", "--extra", "hf", "x")
    )
    assert launched == ({"A": "1"}, ("srun", "-n", "2"), ("x",))


def make_place(folder: Path) -> None:
    """Makes what the documents suppose to be there: a text, a tokenizer, a comparison's
    runs, a model of `transformers`; the experiments beside them."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    bytes_model = some_model(MODELS["reglu2"])
    export_huggingface(
        bytes_model,
        folder / "my-model",
        sequence_length=16,
        tokenizer=ByteTokenizer(),
    )
    export_huggingface(
        some_model(MODELS["swiglu"]),
        folder / "my-silu-model",
        sequence_length=16,
        tokenizer=ByteTokenizer(),
    )
    (folder / "tasks").mkdir()
    (task,) = re.findall(r"```yaml\n(task: .*?)```", WEIGHTS.read_text(), re.DOTALL)
    (folder / "tasks" / "next-word.yaml").write_text(task)
    (row,) = re.findall(r'`({"text": .*})`', WEIGHTS.read_text())
    (folder / "tasks" / "next-word.jsonl").write_text(row + "\n")
    # Some write where they read: what the checkout holds is not theirs to write.
    shutil.copytree(ROOT / "experiments", folder / "experiments")
    (folder / "shared").mkdir()
    (folder / "shared" / "tokens").symlink_to(folder / "tokens")
    comparison = {"baseline": "dense", "runs": {"dense": ["dense/seed-0"]}}
    ablations = folder / "runs" / "ablations"
    (ablations / "dense").mkdir(parents=True)
    (ablations / "comparison.json").write_text(json.dumps(comparison))
    (ablations / "dense" / "seed-0").symlink_to(folder / RUN)
    for name in ("ladder-5m", "changes-5m"):
        write_comparison(folder / "runs" / name, ladder())
    # As large as a batch of `gpt-124m` in words, of `llama-1b` in byte pairs.
    generator = np.random.default_rng(0)
    letters = generator.choice(list("abcdefghijklmnopqrstuvwxyz"), (30_000, 6))
    words = ["".join(word) for word in letters]
    for index in range(60):
        path = folder / "corpus" / str(index % 7) / f"{index}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(" ".join(generator.choice(words, 12_000)))
        path.with_suffix(".py").hardlink_to(path)
    vocabulary = {word: index for index, word in enumerate(dict.fromkeys(words))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=words[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))


def test_every_command_of_the_documentation_runs(tmp_path, monkeypatch, subtests):
    make_place(tmp_path)
    monkeypatch.chdir(tmp_path)
    documented = [
        taken_apart(command)
        for path in (*DOCUMENTS, *SCRIPTS)
        for command in commands_of(path)
    ]
    commands = {(words, launcher) for _, launcher, words in documented if words}
    # Of a program that is new in a document, HOW has to say how it is run.
    order = list(HOW)
    assert {words[0] for words, _ in commands} == set(order)
    # Without arguments a program makes what the same one with arguments reads.
    key = lambda command: (order.index(command[0][0]), len(command[0]), command)
    before = when_written(ROOT / "experiments" / "results")
    with quick_runs() as patch:
        widen(patch)
        for words, launcher in sorted(commands, key=key):
            with subtests.test(shlex.join(words)):
                HOW[words[0]](words, launcher)
    # Other tests run meanwhile, and note of a run whether the checkout is as committed.
    assert when_written(ROOT / "experiments" / "results") == before


def when_written(folder: Path) -> dict[Path, int]:
    """When each file in the folder was last written."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path: path.stat().st_mtime_ns for path in files}


def test_the_environment_that_is_set_by_hand_joins_processes(monkeypatch):
    given = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda **how: given.append(how))
    documented = [
        taken_apart(command) for path in DOCUMENTS for command in commands_of(path)
    ]
    (environment,) = (variables for variables, _, words in documented if not words)
    for name, value in environment.items():
        assert name in (join.__doc__ or "")
        monkeypatch.setenv(name, value)
    join()
    assert given[0]["num_processes"] == 2 and given[0]["process_id"] == 0
