"""Cases of the command line: flags with odd values, odd flags, folders to resume."""

import io
import os
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

from numpy.random import Generator

from sparsejax.command.train import read_options as parse
from sparsejax.config import TrainConfig
from sparsejax.config.config_file import changed_settings, to_json
from sparsejax.config.presets import PRESETS
from tests.fuzz import configs
from tests.fuzz.judge import judging, require
from tests.fuzz.mutations import (
    HUGE,
    ODD_NUMBERS,
    ODD_TEXTS,
    damaged,
    one_of,
    plausible,
)

SWITCHES = ("--dry-run", "--plot", "--no-plot", "--deterministic", "--distributed")
ODD_FLAGS = ("-h", "--help", "--", "-", "--model", "--model.", "--=", "-1")


def case(generator: Generator, folder: Path, material: None) -> str:
    flags = [_flag(generator, folder) for _ in range(generator.integers(6))]
    arguments = [_typeable(argument) for flag in flags for argument in flag]
    if generator.random() < 0.1 and arguments:
        arguments.pop(int(generator.integers(len(arguments))))
    said, shown = io.StringIO(), io.StringIO()
    try:
        with redirect_stderr(said), redirect_stdout(shown):
            options = parse(arguments)
    except SystemExit as error:
        text = said.getvalue()
        with judging():
            if error.code == 0:
                require("usage" in shown.getvalue().lower(), f"{arguments}: no help")
                return "help"
            require(error.code == 2, f"{arguments} exit with {error.code}")
            require("Traceback" not in text, f"{arguments} say {text}")
            require(len(text) >= 15, f"{arguments} are refused with {text!r}")
        return "usage"
    configs.check_round_trip(options.config)
    with judging():
        _check_applied(arguments, options.config)
    configs.check_plan(generator, options.config)
    return "settings and plan"


def _check_applied(arguments: list[str], config: TrainConfig) -> None:
    """A setting differs from the preset's only where a flag names it, and a number is
    the one that was given."""
    if "--resume" in " ".join(arguments):
        return
    start = PRESETS[config.preset]()
    changed = changed_settings(start, config)
    if "recipe" in changed:
        # Its sparsity goes with it.
        of_recipe = start.with_recipe(config.recipe)
        others = changed_settings(of_recipe, config)
        changed = others | {"recipe": changed["recipe"]}
    for name, (_, value) in changed.items():
        flag = _flag_of(name)
        words = [word.replace("_", "-") for word in arguments]
        require(
            any(flag.split(".")[-1].strip("-") in word for word in words),
            f"{name} became {value!r} without a flag in {arguments}",
        )
        if words.count(flag) == 1 and isinstance(value, int | float):
            given = arguments[words.index(flag) + 1 :][:1]
            if given and not isinstance(value, bool):
                require(
                    float(given[0]) == value,
                    f"{name} is {value!r}, and {given[0]!r} was given",
                )


def _flag_of(name: str) -> str:
    """The flag of a setting with this dotted name."""
    name = name.replace("phases.sparsity.", "phases.")
    return "--" + name.replace("_", "-")


def _flag(generator: Generator, folder: Path) -> list[str]:
    settings = _flat(to_json(one_of(generator, list(PRESETS.values()))()))
    name = one_of(generator, list(settings))
    flag = _flag_of(name)
    match int(generator.integers(14)):
        case 0:
            return [damaged(generator, flag.encode()).decode("latin-1"), "1"]
        case 1:
            return [flag]
        case 2:
            return [one_of(generator, SWITCHES)]
        case 3:
            return ["--resume", _run_folder(generator, folder)]
        case 4:
            return ["--run-folder", one_of(generator, ODD_TEXTS)]
        case 5:
            return ["--preset", one_of(generator, (*PRESETS, *ODD_TEXTS))]
        case 6:
            return [f"{flag}={one_of(generator, ODD_TEXTS)}"]
        case 7:
            return [
                one_of(generator, ("-h", "--help", "--", "-", "--model", *ODD_TEXTS))
            ]
        case 8:
            return ["--heartbeat-seconds", _text(one_of(generator, ODD_NUMBERS))]
        case 9 | 10:
            odd = one_of(generator, (*ODD_TEXTS, *ODD_NUMBERS))
            return [flag, _text(odd)]
        case _:
            return [flag, _text(plausible(generator, settings[name]))]


def _run_folder(generator: Generator, folder: Path) -> str:
    run = folder / one_of(generator, ("run", "run [1]", "ü"))
    run.mkdir(exist_ok=True)
    saved = run / "config.json"
    match int(generator.integers(7)):
        case 0:
            return one_of(generator, ODD_TEXTS)
        case 1 if not os.path.lexists(saved):
            saved.mkdir()
        case 2 if not os.path.lexists(saved):
            saved.symlink_to(folder / "nowhere")
        case 3 if not os.path.lexists(saved):
            saved.symlink_to(saved)
        case 4:
            (folder / "file").write_text("no folder")
            return str(folder / "file")
        case _ if not os.path.lexists(saved):
            configs.write(generator, saved)
    return str(run)


def _flat(settings: dict, prefix: str = "") -> dict:
    flat = {}
    for name, value in settings.items():
        nested = isinstance(value, dict)
        flat |= _flat(value, f"{name}.") if nested else {prefix + name: value}
    return flat


def _typeable(text: str) -> str:
    """Leaves out the characters that no system passes to a program."""
    return text.replace("\x00", "").replace("\ud800", "")


def _text(value: object) -> str:
    return "1" + 400 * "0" if value == HUGE else str(value)
