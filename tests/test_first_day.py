"""The first day of a user: what the guide does, in its order, with fewer steps."""

import re
import tomllib
from collections.abc import Callable
from pathlib import Path

from sparsejax import __version__
from sparsejax.command import main
from sparsejax.command.train import read_options
from sparsejax.config.schedule import phases
from tests.support.files.event_files import scalars
from tests.support.whole_runs import quick_runs
from tests.test_commands import SMALL, Command, as_ci_does, commands_in

ROOT = Path(__file__).parent.parent
GUIDE = (ROOT / "docs" / "first-day.md").read_text()
PROGRAM = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def installed_as_in_ci(words: Command) -> None:
    """CI builds the wheel and installs it in an empty environment, by these commands
    and flags; the wheel and its extras are those of this version."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    names = ("build", "venv", "pip", "install")
    called = [word for word in words if word in names or word.startswith("--")]
    as_ci_does(tuple(called), ())
    for word in words:
        if ".whl" in word:
            wheel, _, given = word.removesuffix("]").partition("[")
            assert wheel == f"dist/sparsejax-{__version__}-py3-none-any.whl"
            assert set(given.split(",")) <= set(extras)


def there(words: Command) -> None:
    """The folder of the environment that the commands before have made."""
    assert words in {("cd", "../first-day"), (".", "bin/activate")}
    assert ("uv", "venv", "../first-day") in commands_in(GUIDE)


def with_few_steps(words: Command) -> None:
    """A subcommand of the package; one that trains has a few steps of a small model, or
    of the model that it begins with."""
    arguments = list(words[1:])
    if arguments[0] == "train":
        place = arguments.index("--steps")
        del arguments[place : place + 2]
        small = SMALL.split()
        if "--init-from" in arguments:
            small = small[: small.index("--model.layers")]
        arguments += small
    assert main.run(arguments) == 0


def curves_are_there(words: Command) -> None:
    """TensorBoard finds the loss of each run below the folder that it is given."""
    assert words[:2] == ("uvx", "tensorboard")
    folders = sorted(Path(words[words.index("--logdir") + 1]).glob("*/tensorboard"))
    assert [folder.parent.name for folder in folders] == ["first", "second"]
    for folder in folders:
        assert {"train/loss", "train/phase"} <= {tag for _, tag, _ in scalars(folder)}


HOW: dict[str, Callable[[Command], None]] = {
    "pip": lambda words: as_ci_does(words, ()),
    "uv": installed_as_in_ci,
    "cd": there,
    ".": there,
    "sparsejax": with_few_steps,
    "uvx": curves_are_there,
}


def test_the_first_day_works_from_its_first_step_to_its_last(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    with quick_runs():
        for index, part in enumerate(PROGRAM.split(GUIDE)):
            if index % 2:
                exec(part, names)
                continue
            for words in commands_in(part):
                HOW[words[0]](words)
    assert names["config"].architectures == ["ArceeForCausalLM"]
    assert names["tokenizer"]("def ")["input_ids"] == list(b"def ")
    assert float(names["losses"][-1]) < 0.5 * float(names["losses"][0])
    assert type(names["model"].mlp) is names["MLP"]


def test_the_guide_names_the_steps_of_each_phase():
    train = next(words for words in commands_in(GUIDE) if words[1] == "train")
    planned = phases(read_options(train[2:]).config)
    named = re.search(
        r"(\d+) dense steps, (\d+) in which a token uses two of eight experts, "
        r"(\d+) dense",
        GUIDE,
    )
    assert named is not None
    assert [int(steps) for steps in named.groups()] == [
        phase.steps for phase in planned
    ]
