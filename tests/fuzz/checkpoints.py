"""Cases of a checkpoint folder: files damaged, lost, swapped, folders renamed.

Whatever was done to it, no checkpoint that is whole may be lost or change, and what is
restored has the bits that were saved for the step that it says it is.
"""

import hashlib
import json
import os
import re
import shutil
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from numpy.random import Generator

from sparsejax.checkpoints.checkpoint import Checkpoints
from tests.fuzz.judge import Wrong, clear_error, judging, require
from tests.fuzz.mutations import damaged, mutated_json, one_of
from tests.support.micro_run import arrays_of

STEPS = (1, 2, 3)
NAMES = (
    "step_x",
    "step_",
    "step_00000003_1",
    "step_00000002_1",
    "step_00000003_9",
    "step_1",
    "step_00000004",
    "step_00000099",
    "step_9.writing",
    "step_00000003.damaged",
    "step_00000003.deleting",
    "step_00000002.orbax-checkpoint-tmp-1",
    "step_99999999999999999999999",
    "step_-1",
    "step_٣",
    "step_00000005_99999999999999999999",
    "tmp",
    ".step_00000009",
)


def prepare(folder: Path) -> Path:
    """Checkpoints of three steps with contents of their own, the second permanent."""
    with Checkpoints(folder, keep=None) as checkpoints:
        for step in STEPS:
            _save(checkpoints, step, permanent=step == 2)
    return folder


def case(generator: Generator, folder: Path, saved: Path) -> str:
    root = folder / "checkpoints"
    shutil.copytree(saved, root)
    for _ in range(generator.integers(4)):
        damage(generator, root)
    keep = one_of(generator, (None, 1, 2, 3))
    every = one_of(generator, (0, 0, 2))
    before = look(root, saved)
    if generator.random() < 0.3:
        _read_everything(root, before)
    with Checkpoints(root, keep=keep, keep_every=every) as checkpoints:
        outcome = _restore(checkpoints, root, saved, before)
        between = look(root, saved)
        if outcome.startswith(("restored", "nothing left")):
            step = (checkpoints.latest_step() or 0) + int(generator.integers(3))
            try:
                _save(checkpoints, step)
                checkpoints.wait()
            except Exception as error:
                raise Wrong(f"not saved: {error!r:.500}") from error
            _check_kept(root, saved, between, keep, every, step)
    return outcome


def state_of(step: int) -> dict[str, jax.Array]:
    state = np.random.default_rng(step)
    return {
        "w": jnp.asarray(state.random((2, 3), np.float32)),
        "large": jnp.asarray(state.random(3000, np.float32)),
        "half": jnp.asarray(state.random(5, np.float32), jnp.bfloat16),
        "step": jnp.asarray(step),
        "empty": jnp.zeros((0, 4)),
        "key": jax.random.key(step),
    }


@dataclass(frozen=True, kw_only=True)
class Folder:
    """The content of a folder of checkpoints."""

    trees: dict[str, str]
    """The hash of all that lies under each name."""
    whole: dict[str, int]
    """The step of every checkpoint that has all of its bytes, and its own name."""


def look(root: Path, saved: Path) -> Folder:
    names = sorted(os.listdir(root))
    trees = {name: _hash(root / name) for name in names}
    whole = {name: _step(name) for name in names}
    return Folder(
        trees=trees,
        whole={
            name: step
            for name, step in whole.items()
            if step is not None and _is_whole(root / name, step, saved)
        },
    )


def _step(name: str) -> int | None:
    parts = re.fullmatch(r"step_(\d+)(_\d+)?", name)
    return int(parts[1]) if parts else None


def _is_whole(path: Path, step: int, saved: Path) -> bool:
    """Whether everything that was saved for the step is there, to the last bit."""
    original = saved / f"step_{step:08d}"
    files = [file for file in original.rglob("*") if file.is_file()]
    return bool(files) and all(
        (path / file.relative_to(original)).is_file()
        and (path / file.relative_to(original)).read_bytes() == file.read_bytes()
        for file in files
    )


def _hash(path: Path) -> str:
    """Returns the hash of a file, of a link, or of everything below a folder."""
    if path.is_symlink():
        content = b"link " + os.fsencode(os.readlink(path))
    elif path.is_dir():
        parts = [f"{p.name} {_hash(p)}" for p in sorted(path.iterdir())]
        content = b"folder " + os.fsencode("\n".join(parts))
    else:
        content = b"file " + path.read_bytes()
    return hashlib.sha256(content).hexdigest()


def _save(checkpoints: Checkpoints, step: int, permanent: bool = False) -> None:
    checkpoints.save(
        step,
        state_of(step),
        data_state={"taken": step},
        metadata={"step": step},
        permanent=permanent,
    )


def _restore(checkpoints: Checkpoints, root: Path, saved: Path, before: Folder) -> str:
    """Sets aside, restores the newest, and compares all that is known of it."""
    try:
        aside = checkpoints.set_aside_damaged()
    except Exception as error:
        after = look(root, saved)
        require(_same_trees(before, after), "trees are lost in an error")
        require(before.whole == after.whole, "a whole checkpoint was renamed")
        return clear_error(error)
    after = look(root, saved)
    with judging():
        require(
            before.whole == after.whole,
            f"of the whole {before.whole} there are {after.whole}",
        )
        require(_same_trees(before, after), f"{before.trees} became {after.trees}")
        for found in aside:
            require(found.path.name in after.trees, f"no {found.path}")
        newest = max(after.whole.values(), default=None)
        latest = checkpoints.latest_step()
        require(latest == newest, f"the newest is {latest} instead of {newest}")
    if newest is None:
        try:
            checkpoints.restore(template=state_of(0))
        except Exception as error:
            clear_error(error)
            return "nothing left"
        raise Wrong("something was restored from no whole checkpoint")
    _check_restored(checkpoints, newest)
    return "restored the one before" if aside else "restored the newest"


def _check_restored(checkpoints: Checkpoints, step: int) -> None:
    with judging():
        restored = checkpoints.restore(template=state_of(0))
        metadata = checkpoints.metadata()
        require(restored.step == step, f"step {restored.step} instead of {step}")
        require(metadata == {"step": step}, f"{metadata} of step {step}")
        require(restored.metadata == metadata, f"{restored.metadata} of step {step}")
        require(restored.data_state == {"taken": step}, f"{restored.data_state}")
        _check_bits(restored.state, step)


def _check_bits(state: dict[str, jax.Array], step: int) -> None:
    expected = arrays_of(state_of(step))
    for name, array in arrays_of(state).items():
        same = array.tobytes() == expected[name].tobytes()
        require(same and array.dtype == expected[name].dtype, f"{name} of step {step}")


def _same_trees(before: Folder, after: Folder) -> bool:
    return Counter(before.trees.values()) == Counter(after.trees.values())


def _check_kept(
    root: Path, saved: Path, before: Folder, keep: int | None, every: int, step: int
) -> None:
    """After a save of `step`: nothing is lost but what the keep policy deletes."""
    after = look(root, saved)
    with judging():
        with Checkpoints(root) as checkpoints:
            require(checkpoints.set_aside_damaged() == [], "the save is damaged")
            require(checkpoints.latest_step() == step, f"{step} is not the newest")
            new = checkpoints.path().name
            _check_restored(checkpoints, step)
        require(new not in before.trees, f"{new} was there before")
        # The policy counts folders, whatever is in them.
        steps = sorted({*filter(None, map(_step, before.trees)), step})
        kept = steps if keep is None else steps[-keep:]
        for name, old in before.whole.items():
            stays = old in kept or old == 2 or (every and old % every == 0)
            there = old in after.whole.values() or old == step
            require(there or not stays, f"whole {name} is lost, keep={keep}")
        for name, tree in before.trees.items():
            require(after.trees.get(name, tree) == tree, f"{name} has changed")
            is_ours = re.fullmatch(r"step_\d+(_\d+)?(\..*)?", name)
            if ".damaged" in name or not is_ours:
                require(name in after.trees, f"{name} was deleted")


def _read_everything(root: Path, before: Folder) -> None:
    """Reads all checkpoints as one who sets nothing aside: each is an error, or what
    was saved."""
    with Checkpoints(root) as checkpoints:
        for step in checkpoints.steps():
            try:
                checkpoints.metadata(step)
                restored = checkpoints.restore(step, template=state_of(0))
            except Exception as error:
                clear_error(error)
                continue
            with judging():
                if step in before.whole.values():
                    require(restored.step == step, f"{restored.step}, not {step}")
                    _check_bits(restored.state, step)


def damage(generator: Generator, root: Path) -> None:
    """One thing done to the folder."""
    checkpoints = sorted(path for path in root.iterdir() if path.is_dir())
    if not checkpoints:
        return
    path = one_of(generator, checkpoints)
    files = sorted(file for file in path.rglob("*") if file.is_file())
    texts = [file for file in files if file.suffix == ".json"]
    match int(generator.integers(16)):
        case 0:
            shutil.rmtree(path) if not path.is_symlink() else path.unlink()
        case 1:
            _add(generator, root / one_of(generator, NAMES), path)
        case 2:
            target = root / one_of(generator, (*NAMES, "step_9", "step_00000001"))
            if not os.path.lexists(target):
                path.rename(target)
        case 3:
            other = one_of(generator, checkpoints)
            spare = root / "spare"
            path.rename(spare)
            if os.path.lexists(other):
                other.rename(path)
            spare.rename(other)
        case 4 if files:
            file = one_of(generator, files)
            file.unlink()
            if generator.random() < 0.5:
                file.mkdir()
        case 5 if files:
            file = one_of(generator, files)
            content = file.read_bytes()
            file.unlink()
            target = one_of(generator, ("nowhere", file.name, "/dev/null", "real"))
            file.symlink_to(target)
            if target == "real" and file.name != "real":
                (file.parent / "real").write_bytes(content)
        case 6 if files:
            file = one_of(generator, files)
            other = one_of(generator, checkpoints) / file.relative_to(path)
            if other.is_file():
                file.write_bytes(other.read_bytes())
        case 7 if files:
            one, two = one_of(generator, files), one_of(generator, files)
            content = one.read_bytes()
            one.write_bytes(two.read_bytes())
            two.write_bytes(content)
        case 8 if files:
            file = one_of(generator, files)
            (file.parent / f"copy of {file.name}").write_bytes(file.read_bytes())
        case 9 | 10 | 11 if texts:
            file = one_of(generator, texts)
            try:
                content = json.loads(file.read_bytes())
            except (ValueError, RecursionError):
                return
            changed = mutated_json(generator, content, int(generator.integers(1, 3)))
            indent = one_of(generator, (None, 1))
            file.write_text(json.dumps(changed, indent=indent))
        case _ if files:
            file = one_of(generator, files)
            file.write_bytes(damaged(generator, file.read_bytes()))


def _add(generator: Generator, path: Path, other: Path) -> None:
    """A folder, file or link of a confusing name."""
    if os.path.lexists(path):
        return
    match int(generator.integers(5)):
        case 0:
            path.mkdir()
        case 1:
            path.write_bytes(b"no folder")
        case 2:
            path.symlink_to(other)
        case 3:
            path.mkdir()
            for name in ("manifest.json", "record.json"):
                (path / name).write_text('{"format_version": 2}')
        case _:
            shutil.copytree(other, path, symlinks=True)
