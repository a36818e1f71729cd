"""Checkpoints that a killed process cannot damage: save, keep, restore bit for bit."""

import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from jaxtyping import Array, PyTree

FORMAT_VERSION = 1
"""Of what a checkpoint holds and under which names; raised when older code cannot read
what newer code writes."""

# step_00001000, and step_00001000_1 where the same step was saved a second time.
_COMMITTED = re.compile(r"step_(\d+)(?:_(\d+))?")
# What an interrupted save (orbax's suffix) or an interrupted deletion (ours) leaves.
_LEFTOVER = re.compile(r"step_\d+(_\d+)?\.(orbax-checkpoint-tmp.*|deleting)")


@dataclass(frozen=True, kw_only=True)
class Restored:
    """What `Checkpoints.restore` read."""

    step: int
    state: PyTree[Array]
    data_state: Any
    metadata: dict[str, Any]


class Checkpoints:
    """The checkpoints of one run, in one folder of a local or mounted file system.

    Every checkpoint is a folder `step_<step>`, written under another name and renamed
    when complete, so a folder of that name is always whole. Only then are older ones
    deleted: all but the newest `keep` and those saved as permanent.

    Use as a context manager, or call `close`: a save may still be under way.

    Args:
      folder: created by the first `save`; may be absent when only reading.
      keep: how many of the newest checkpoints stay; None keeps all.
    Raises:
      ValueError: keep is not positive, or the folder is a URL.
      NotImplementedError: more than one process.
    """

    def __init__(self, folder: str | os.PathLike[str], *, keep: int | None = 3) -> None:
        if keep is not None and keep < 1:
            raise ValueError(
                f"keep={keep} would delete every checkpoint; use at least 1, or None "
                f"to keep all"
            )
        if "://" in os.fspath(folder):
            raise ValueError(
                f"folder={os.fspath(folder)!r} is a URL; checkpoints are committed by "
                f"renaming a folder, so give a folder of a mounted file system"
            )
        if jax.process_count() > 1:
            raise NotImplementedError(
                f"checkpoints are written by a single process, and this run has "
                f"{jax.process_count()}; use one process for all devices of a host"
            )
        self._folder = Path(folder).expanduser().absolute()
        self._keep = keep
        self._pending: Path | None = None
        self._checkpointer = ocp.AsyncCheckpointer(ocp.CompositeCheckpointHandler())

    def save(
        self,
        step: int,
        state: PyTree[Array],
        *,
        data_state: Any = None,
        metadata: dict[str, Any] | None = None,
        permanent: bool = False,
        blocking: bool = False,
    ) -> None:
        """Writes a checkpoint, in the background unless `blocking`.

        The values are copied before this returns, so the arrays may be donated. Saving
        the newest step again replaces it: the earlier one is deleted once the new one
        is complete, and a permanent step stays permanent.

        Args:
          step: steps done; not below the newest step in the folder.
          state: pytree of `jax.Array`, typed random keys included.
          data_state: state of the data iterator, JSON.
          metadata: anything else as JSON (tuples come back as lists): phase, resolved
            config, fingerprint of the corpus.
          permanent: never deleted by the keep policy.
          blocking: return only when the checkpoint is complete and on disk.
        Raises:
          ValueError: a leaf that is no array, metadata that is not JSON, or a step that
            would be older than the newest. The error of an earlier background save is
            raised here as well, or by `wait`.
        """
        self.wait()
        if step < 0:
            raise ValueError(f"step={step} is negative; it counts the steps done")
        newest = self.latest_step()
        if newest is not None and step < newest:
            raise ValueError(
                f"step={step} is below step {newest}, the newest checkpoint in "
                f"{self._folder}, and would not be the one that a resume takes; "
                f"continue from step {newest} or use another folder"
            )
        leaves = _named_leaves(state)
        described = {name: _describe(name, leaf) for name, leaf in leaves.items()}
        permanent = permanent or (newest == step and self._is_permanent(step))
        record = {
            "format_version": FORMAT_VERSION,
            "step": step,
            "permanent": permanent,
            "state": described,
            "data_state": _checked_json("data_state", data_state),
            "metadata": _checked_json("metadata", metadata or {}),
        }
        items: dict[str, Any] = {"record": ocp.args.JsonSave(record)}
        if stored := _storable(leaves):
            items["state"] = ocp.args.StandardSave(stored)
        self._prepare_folder()
        target = self._unused_path(step)
        self._checkpointer.save(target, args=ocp.args.Composite(**items))
        self._pending = target
        if blocking:
            self.wait()

    def wait(self) -> None:
        """Returns when no save is under way; raises the error of one that failed."""
        pending, self._pending = self._pending, None
        self._checkpointer.wait_until_finished()
        if pending is not None:
            # Before anything older goes, the new one must survive a power failure.
            _flush(pending)
            self._delete_superseded()

    def close(self) -> None:
        """Waits for the last save and ends the background threads."""
        try:
            self.wait()
        finally:
            self._checkpointer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def steps(self) -> list[int]:
        """The steps of all complete checkpoints, ascending."""
        return sorted(self._newest_paths())

    def latest_step(self) -> int | None:
        """The newest step with a complete checkpoint; None where there is none."""
        return max(self._newest_paths(), default=None)

    def path(self, step: int | None = None) -> Path:
        """The folder of a step, by default of the newest.

        Raises:
          ValueError: there is no such checkpoint.
        """
        paths = self._newest_paths()
        if not paths:
            raise ValueError(
                f"there is no complete checkpoint in {self._folder}; give the folder "
                f"that holds `step_...` folders, or start a new run"
            )
        step = max(paths) if step is None else step
        if step not in paths:
            raise ValueError(
                f"there is no checkpoint of step={step} in {self._folder}; there are "
                f"{sorted(paths)}"
            )
        return paths[step]

    def metadata(self, step: int | None = None) -> dict[str, Any]:
        """The metadata saved with a step, by default with the newest.

        Raises:
          ValueError: no such checkpoint, or one of an unknown format.
        """
        return self._record(step)["metadata"]

    def restore(self, step: int | None = None, *, template: PyTree) -> Restored:
        """The checkpoint of a step, by default the newest, bit for bit as it was saved.

        Args:
          step: one of `steps()`.
          template: the structure to restore into, with `jax.ShapeDtypeStruct` or arrays
            as leaves. Where a leaf has a sharding the array is put there, whatever mesh
            it was saved from; otherwise on the first device.
        Returns:
          State in the template's structure, data state, metadata and step.
        Raises:
          ValueError: no such checkpoint, one of an unknown format, or a template that
            differs from it in structure, shape or dtype; the first difference is named.
        """
        path = self.path(step)
        record = self._record(step)
        leaves = _named_leaves(template)
        _check_same(path, record["state"], leaves)
        stored = {
            name: _stored_spec(leaf) for name, leaf in leaves.items() if leaf.size
        }
        arrays = {}
        if stored:
            arrays = self._checkpointer.restore(
                path,
                args=ocp.args.Composite(state=ocp.args.StandardRestore(stored)),
            ).state
        state = [
            _rebuild(arrays.get(name), leaf, record["state"][name])
            for name, leaf in leaves.items()
        ]
        return Restored(
            step=record["step"],
            state=jax.tree.unflatten(jax.tree.structure(template), state),
            data_state=record["data_state"],
            metadata=record["metadata"],
        )

    def _record(self, step: int | None) -> dict[str, Any]:
        """Everything but the arrays, of a format that we know."""
        path = self.path(step)
        try:
            record = self._checkpointer.restore(
                path, args=ocp.args.Composite(record=ocp.args.JsonRestore())
            ).record
            version = record["format_version"]
        except (FileNotFoundError, KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{path} is not a checkpoint of sparsejax, or is damaged: its record "
                f"cannot be read ({error}); remove the folder to use the one before"
            ) from error
        if version != FORMAT_VERSION:
            raise ValueError(
                f"format_version={version} of {path} is unknown to this sparsejax, "
                f"which reads {FORMAT_VERSION}; use the version that wrote it"
            )
        return record

    def _is_permanent(self, step: int) -> bool:
        try:
            return self._record(step)["permanent"]
        except ValueError:
            return True  # What we cannot read is not ours to delete.

    def _committed(self) -> list[tuple[int, int, Path]]:
        """Step, revision and path of every complete checkpoint, ascending."""
        if not self._folder.is_dir():
            return []
        matches = (
            (_COMMITTED.fullmatch(path.name), path) for path in self._folder.iterdir()
        )
        return sorted((int(m[1]), int(m[2] or 0), path) for m, path in matches if m)

    def _newest_paths(self) -> dict[int, Path]:
        """For each step the newest revision, which comes last."""
        return {step: path for step, _, path in self._committed()}

    def _unused_path(self, step: int) -> Path:
        # A new name, because a folder cannot replace another one in a single operation:
        # until the new one is complete the old one must stay where it is.
        revisions = [r for s, r, _ in self._committed() if s == step]
        suffix = f"_{max(revisions) + 1}" if revisions else ""
        return self._folder / f"step_{step:08d}{suffix}"

    def _prepare_folder(self) -> None:
        """Creates the folder and clears what interrupted saves and deletions left.

        For the writer alone, with no save of its own under way: to a reader, what
        another process is writing looks just the same.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        for path in self._folder.iterdir():
            if _LEFTOVER.fullmatch(path.name):
                shutil.rmtree(path)

    def _delete_superseded(self) -> None:
        newest = self._newest_paths()
        doomed = [p for _, _, p in self._committed() if p not in newest.values()]
        if self._keep is not None:
            older = sorted(newest)[: -self._keep]
            doomed += [newest[s] for s in older if not self._is_permanent(s)]
        for path in doomed:
            # Renamed first: a half-deleted folder must not look like a checkpoint.
            shutil.rmtree(path.rename(path.with_name(f"{path.name}.deleting")))


def _named_leaves(tree: PyTree) -> dict[str, Any]:
    """The leaves under the names that the checkpoint stores them by.

    A flat dictionary rather than the tree itself: names and structure are then ours,
    empty containers and None cost nothing, and any pytree can be a template.
    """
    leaves = jax.tree.leaves_with_path(tree)
    named = {jax.tree_util.keystr(path): leaf for path, leaf in leaves}
    if len(named) != len(leaves):
        names = [jax.tree_util.keystr(path) for path, _ in leaves]
        double = next(name for name in names if names.count(name) > 1)
        raise ValueError(
            f"two leaves of the state are named {double}; rename one, so that a "
            f"checkpoint can tell them apart"
        )
    return named


def _describe(name: str, leaf: Any) -> dict[str, Any]:
    if not isinstance(leaf, jax.Array):
        raise ValueError(
            f"state{name} is {type(leaf).__name__}, not jax.Array; convert it with "
            f"jnp.asarray, or put it into the metadata"
        )
    described = {"shape": list(leaf.shape), "dtype": str(leaf.dtype)}
    if _is_key(leaf):
        described["key_impl"] = str(jax.random.key_impl(leaf))
    return described


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _storable(leaves: dict[str, Array]) -> dict[str, Array]:
    """Plain arrays with at least one entry, the only ones that orbax stores."""
    return {
        name: jax.random.key_data(leaf) if _is_key(leaf) else leaf
        for name, leaf in leaves.items()
        if leaf.size
    }


def _stored_spec(leaf: Any) -> jax.ShapeDtypeStruct:
    """Shape, dtype and place of the stored array behind a leaf of the template."""
    sharding = getattr(leaf, "sharding", None)
    if _is_key(leaf):
        # A key's sharding does not fit its data, which has one more axis.
        spec = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        leaf, sharding = jax.eval_shape(jax.random.key_data, spec), None
    if sharding is None:
        sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _rebuild(array: Array | None, leaf: Any, described: dict[str, Any]) -> Array:
    """The leaf that was saved, from the array that was stored for it, if any."""
    if array is None:
        array = jnp.zeros(_stored_spec(leaf).shape, _stored_spec(leaf).dtype)
    elif not _is_key(leaf):
        return array
    if _is_key(leaf):
        array = jax.random.wrap_key_data(array, impl=described["key_impl"])
    sharding = getattr(leaf, "sharding", None)
    return array if sharding is None else jax.device_put(array, sharding)


def _check_same(path: Path, saved: dict[str, Any], template: dict[str, Any]) -> None:
    """Raises for the first leaf that differs, in the template's order."""
    for name, leaf in template.items():
        if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
            raise ValueError(
                f"state{name} of the template is {type(leaf).__name__}; every leaf has "
                f"to be an array or a jax.ShapeDtypeStruct"
            )
    theirs = {n: f"{s['dtype']} {tuple(s['shape'])}" for n, s in saved.items()}
    ours = {n: f"{leaf.dtype} {tuple(leaf.shape)}" for n, leaf in template.items()}
    for name in [*ours, *theirs]:
        in_checkpoint, in_template = (
            side.get(name, "nothing") for side in (theirs, ours)
        )
        if in_checkpoint != in_template:
            raise ValueError(
                f"{path} does not fit the template: at state{name} the checkpoint has "
                f"{in_checkpoint}, the template {in_template}; build the template from "
                f"the settings that the run was saved with"
            )
    for name, leaf in template.items():
        # JAX would cut these to 32 bits without a word.
        if (
            not _is_key(leaf)
            and jax.dtypes.canonicalize_dtype(leaf.dtype) != leaf.dtype
        ):
            raise ValueError(
                f"state{name} of {path} is {leaf.dtype}, which JAX cannot hold as it "
                f"is set up; restore it with jax_enable_x64"
            )


def _checked_json(name: str, value: Any) -> Any:
    try:
        json.dumps(value)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{name} cannot be stored as JSON ({error}); arrays belong into the state, "
            f"other things have to be turned into numbers, text, lists and dicts"
        ) from error
    return value


def _flush(folder: Path) -> None:
    """Forces a finished checkpoint and its name onto the disk."""
    for path in [*folder.rglob("*"), folder, folder.parent]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
