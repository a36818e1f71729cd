"""Runs that are killed at random moments resume to the bits of an undisturbed one."""

import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.runs import Process, assert_ended_alike, finish
from tests.support.micro_run import arguments_of, micro_config, write_text

AT_RANDOM = 6
"""Kills of a recipe's run at any of its times."""
IN_A_SAVE = {"experts": 4, "paper": 0}
"""Kills of a recipe's run while a checkpoint is being written, which does not depend
on the recipe."""
DRAWS = 40
"""Attempts at all of them: a process may end, or a save, before it is killed."""


def undisturbed(recipe: str, base: Path) -> tuple[list[str], Path, float]:
    """Returns the command of a run, the folder that it left, and its seconds."""
    text = write_text(base)
    config = micro_config(text, recipe=recipe, checkpoint_every=1, eval_every=0)
    command = arguments_of(config)
    for name in ("compiles", "run"):
        start = time.monotonic()
        finish([*command, "--run-folder", str(base / name)], base / name)
        seconds = time.monotonic() - start
    return command, base / "run", seconds


@pytest.mark.parametrize("recipe", IN_A_SAVE)
def test_a_run_killed_at_any_moment_resumes_to_the_same_bits(recipe, tmp_path):
    command, expected, seconds = undisturbed(recipe, tmp_path)
    draw = random.Random(recipe)
    remaining = ["in a save"] * IN_A_SAVE[recipe] + ["at random"] * AT_RANDOM
    for attempt in range(DRAWS):
        if not remaining:
            return
        folder = tmp_path / f"{attempt}"
        process = Process([*command, "--run-folder", str(folder)], folder)
        if remaining[-1] == "at random":
            moment = draw.uniform(0, seconds)
            time.sleep(moment)
        else:
            moment = draw.randrange(12), draw.uniform(0, 0.02)
            wait_for_save(process, folder / "checkpoints", moment[0])
            time.sleep(moment[1])
        process.kill()
        if process.wait().status == 0:
            continue
        print(f"killed {remaining[-1]}: {moment} of {seconds} s")
        if remaining[-1] == "at random" or is_saving(folder / "checkpoints"):
            remaining.pop()
        resume(command, folder)
        assert_ended_alike(folder, expected)
    raise AssertionError(f"after {DRAWS} draws there remain {remaining}")


def resume(command: list[str], folder: Path) -> None:
    arguments = ["--resume", str(folder)]
    if not (folder / "config.json").exists():  # killed before its first step
        arguments = [*command, "--run-folder", str(folder)]
    finish(arguments, folder)


def wait_for_save(process: Process, checkpoints: Path, ordinal: int) -> None:
    """Until a save is under way that follows `ordinal` other ones; or the end."""
    seen: set[str] = set()
    while len(seen) <= ordinal and not process.has_ended():
        seen |= {path.name for path in saves(checkpoints)}
        time.sleep(0.001)


def saves(checkpoints: Path) -> Iterator[Path]:
    return checkpoints.glob("*.writing")


def is_saving(checkpoints: Path) -> bool:
    return any(saves(checkpoints))
