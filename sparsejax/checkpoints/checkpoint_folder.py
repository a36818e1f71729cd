"""The folder of a run's checkpoints: their names, which are complete, which stay.

    step_00001000            a complete checkpoint, and step_00001000_1 where the same
                             step was saved a second time
    step_00001000.writing    a save under way, or what is left of one
    step_00001000.deleting   likewise of a deletion
    step_00001000.damaged    set aside: it is not what was saved

Nothing here knows of other processes.
"""

import itertools
import os
import re
import shutil
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from sparsejax.checkpoints import manifest
from sparsejax.checkpoints.checkpoint_record import RECORD, check_format, read_record

_COMMITTED = re.compile(r"step_(\d+)(?:_(\d+))?")
# What an interrupted save (ours, or orbax's of format 1) or an interrupted deletion
# leaves.
_LEFTOVER = re.compile(r"step_\d+(_\d+)?\.(writing|orbax-checkpoint-tmp.*|deleting)")


def named_checkpoint(text: str) -> tuple[Path, int | None]:
    """Reads "RUN@STEP" as a run folder and a step, and "RUN" as the folder and None,
    which stands for its latest checkpoint."""
    stated = re.fullmatch(r"(.+)@(\d+)", text)
    return (Path(text), None) if stated is None else (Path(stated[1]), int(stated[2]))


def check_there(folder: Path) -> None:
    """Raises ValueError where there is no such folder."""
    if not folder.is_dir():
        raise ValueError(
            f"there is no folder {folder}; give that of a run, or of a model"
            f"{runs_beside(folder)}"
        )


def runs_beside(folder: Path) -> str:
    """Returns which three runs beside a folder, which need not be there, are the
    newest, as the end of a message; an empty text where there are none."""
    runs = [path.parent for path in folder.parent.glob("*/checkpoints")]
    newest = sorted(runs, key=lambda run: run.stat().st_mtime, reverse=True)[:3]
    return f"; there are {', '.join(map(str, newest))}" if newest else ""


def latest_step(folder: Path) -> int | None:
    """Returns the step of the newest complete checkpoint in a folder, which need not
    exist; None where there is none."""
    return CheckpointFolder(folder, keep=None, keep_every=0).latest_step()


class CheckpointFolder:
    """The checkpoints that a folder holds, and which of them are deleted."""

    def __init__(self, folder: Path, *, keep: int | None, keep_every: int) -> None:
        """Makes the view of a folder; the arguments are those of
        `checkpoint.Checkpoints`."""
        self.folder = folder
        self._keep = keep
        self._keep_every = keep_every

    def committed(self) -> list[tuple[int, int, Path]]:
        """Returns the step, revision and path of every complete checkpoint,
        ascending."""
        if not self.folder.is_dir():
            return []
        matches = (
            (_COMMITTED.fullmatch(path.name), path) for path in self.folder.iterdir()
        )
        return sorted((int(m[1]), int(m[2] or 0), path) for m, path in matches if m)

    def newest_paths(self) -> dict[int, Path]:
        """Returns the path of the newest revision of each step, in ascending order of
        the steps."""
        return {step: path for step, _, path in self.committed()}

    def latest_step(self) -> int | None:
        """Returns the newest step with a complete checkpoint, None where there is
        none."""
        return max(self.newest_paths(), default=None)

    def path(self, step: int | None) -> Path:
        """Returns the path of a step's newest revision; None stands for the newest
        step.

        Raises:
          ValueError: the step has no complete checkpoint.
        """
        paths = self.newest_paths()
        if not paths:
            raise ValueError(
                f"there is no complete checkpoint in {self.folder}; give the folder "
                f"that holds `step_...` folders, or start a new run"
            )
        step = max(paths) if step is None else step
        if step not in paths:
            raise ValueError(
                f"there is no checkpoint of step={step} in {self.folder}; there are "
                f"{sorted(paths)}"
            )
        return paths[step]

    def find(self, step: int | None) -> tuple[str, dict[str, Any]]:
        """Returns the name and the record of a step's newest revision; None stands for
        the newest step.

        Raises:
          ValueError: the step has no complete checkpoint, or its record is damaged or
            belongs to another step.
        """
        path = self.path(step)
        record = read_record(path)
        saved, named = record["step"], _named_step(path)
        if saved != named:
            raise ValueError(
                f"{path} is the checkpoint of step={saved}, and was renamed; give it "
                f"its name back, or remove it"
            )
        return path.name, record

    def check_intact(self, step: int) -> None:
        """Compares a step's newest revision with its manifest, to the last bit. Nothing
        is renamed, as a reader needs it.

        Raises:
          ValueError: there is none, it has a format that this version does not read, or
            it is damaged.
        """
        path = self.path(step)
        check_format(path)
        if (reason := _find_damage(path, step)) is not None:
            raise ValueError(f"{path} is damaged ({reason}); use another step")

    def unused_path(self, step: int) -> Path:
        """Returns a path for a new checkpoint of a step."""
        # A new name, because a folder cannot replace another one in a single operation:
        # until the new one is complete the old one must stay where it is.
        revisions = [r for s, r, _ in self.committed() if s == step]
        suffix = f"_{max(revisions) + 1}" if revisions else ""
        return self.folder / f"step_{step:08d}{suffix}"

    def set_aside_damaged(self) -> list[tuple[str, int, str]]:
        """Renames the newest checkpoints that are damaged, down to the first intact
        one, and returns the new name, the step and the reason of each.

        Raises:
          ValueError: one has a format that this version does not read.
        """
        found = []
        for step, _, path in reversed(self.committed()):
            check_format(path)
            reason = _find_damage(path, step)
            if reason is None:
                break
            found.append((_set_aside(path).name, step, reason))
        return found

    def remove_leftovers(self) -> None:
        """Removes what interrupted saves and deletions left behind.

        For the writer alone, with no save of its own under way: to a reader, what
        another process is writing looks just the same.
        """
        for path in self.folder.iterdir():
            if _LEFTOVER.fullmatch(path.name):
                remove(path)

    def delete_superseded(self, written: Path) -> None:
        """Deletes the checkpoints that are not to be kept, now that `written` is
        complete."""
        newest = self.newest_paths()
        doomed = [
            path
            for step, _, path in self.committed()
            if path != newest[step]
            and (newest[step] == written or _is_intact(newest[step], step))
        ]
        if self._keep is not None:
            older = sorted(newest)[: -self._keep]
            doomed += [newest[s] for s in older if not self._stays(s)]
        for path in doomed:
            # Renamed first: a half-deleted folder must not look like a checkpoint. What
            # cannot be renamed now is superseded at the next save as well.
            with suppress(OSError):
                remove(path.rename(path.with_name(f"{path.name}.deleting")))

    def _stays(self, step: int) -> bool:
        every = self._keep_every
        return (every > 0 and step % every == 0) or self.is_permanent(step)

    def is_permanent(self, step: int) -> bool:
        """Returns whether the checkpoint of a step was saved as permanent."""
        try:
            return read_record(self.path(step))["permanent"]
        except ValueError:
            return True  # What we cannot read is not ours to delete.


def unfinished(target: Path) -> Path:
    """Returns the folder in which a checkpoint is written before it gets its name."""
    return target.with_name(f"{target.name}.writing")


def remove(folder: Path) -> None:
    """Deletes a folder, as far as that is possible."""
    # What cannot be removed (a reader may have it open) goes at the next save.
    shutil.rmtree(folder, ignore_errors=True)


def remove_failed(folder: Path) -> None:
    """Removes the folder that a failed save wrote.

    orbax reports the first error while its other writes are still under way, and these
    make their folders anew; so it is removed until it stays away for a moment.
    """
    deadline, absences = time.monotonic() + 10, 0
    while absences < 5 and time.monotonic() < deadline:
        absences = 0 if folder.exists() else absences + 1
        remove(folder)
        time.sleep(0.05)


def _set_aside(path: Path) -> Path:
    suffixes = itertools.chain([""], (f"_{n}" for n in itertools.count(1)))
    targets = (path.with_name(f"{path.name}.damaged{suffix}") for suffix in suffixes)
    target = next(target for target in targets if not os.path.lexists(target))
    path.rename(target)
    manifest.flush(path.parent)
    return target


def _find_damage(path: Path, step: int) -> str | None:
    """Returns how a checkpoint differs from what was saved as `step`, the step in its
    name; None where it does not differ."""
    reason = manifest.find_damage(path)
    if reason is None and (saved := read_record(path)["step"]) != step:
        return f"{RECORD} is of step {saved}: the folder was renamed"
    return reason


def _is_intact(path: Path, step: int) -> bool:
    """Returns whether a folder holds a copy of a step that is intact to the last bit; a
    link to a folder does not count."""
    try:
        return not path.is_symlink() and _find_damage(path, step) is None
    except (OSError, ValueError):
        return False  # As far as we can read.


def _named_step(path: Path) -> int:
    """Returns the step in the name of a complete checkpoint."""
    named = _COMMITTED.fullmatch(path.name)
    assert named is not None
    return int(named[1])
