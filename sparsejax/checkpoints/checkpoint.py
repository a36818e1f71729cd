"""Checkpoints that neither a killed process, a full disk nor a flipped bit can spoil.

A checkpoint is a folder:
  state/          see `stored_state`, as orbax writes it; absent without arrays
  record.json     see `checkpoint_record`
  manifest.json   see `manifest`; written last
"""

import itertools
import json
import math
import os
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import jax
import orbax.checkpoint as ocp
from jaxtyping import Array, PyTree

from sparsejax.checkpoints import agreement, manifest
from sparsejax.checkpoints.agreement import (
    Agreement,
    CheckpointFailed,
    OtherProcessFailed,
    cause,
)
from sparsejax.checkpoints.checkpoint_folder import (
    CheckpointFolder,
    remove,
    remove_failed,
    unfinished,
)
from sparsejax.checkpoints.checkpoint_record import (
    FORMAT_VERSION,
    RECORD,
    checked_json,
    is_sealed,
)
from sparsejax.checkpoints.stored_state import (
    check_fits,
    describe,
    named_leaves,
    rebuild,
    storable,
    stored_spec,
    with_present_names,
)
from sparsejax.distributed.processes import ProcessLost

_instances = itertools.count()


@dataclass(frozen=True, kw_only=True)
class Restored:
    """A checkpoint as `Checkpoints.restore` read it."""

    step: int
    state: PyTree[Array]
    data_state: Any
    metadata: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Damaged:
    """A checkpoint that `Checkpoints.set_aside_damaged` renamed."""

    path: Path
    """The path that the checkpoint was renamed to."""
    step: int
    reason: str
    """The kind of damage, with the name of the file that is not as it was written."""


class Checkpoints:
    """The checkpoints of one run, in one folder of a local or mounted file system.

    Every checkpoint is a folder `step_<step>`, written under another name and renamed
    when complete and on the disk, so a folder of that name is always whole. Only then
    are older ones deleted: all but the newest `keep`, those whose step is a multiple of
    `keep_every`, and those saved as permanent.

    Use it as a context manager, or call `close`: a save may still be under way.

    A run of several processes shares one folder. All of them make this object, and call
    every method at the same points with the same arguments; only `last_good` and
    `raise_if_failed` may be called by some of them. Process 0 decides: what it finds in
    the folder, or the error that it meets, is what all get.

    Args:
      folder: created by the first `save`; may be absent when only reading.
      keep: how many of the newest checkpoints stay; None keeps all.
      keep_every: checkpoints of a step that is a multiple of it stay too; 0: none.
    Raises:
      ValueError: keep is not positive, keep_every is negative, or the folder is a URL.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        keep: int | None = 3,
        keep_every: int = 0,
    ) -> None:
        if keep is not None and keep < 1:
            raise ValueError(
                f"keep={keep} would delete every checkpoint; use at least 1, or None "
                f"to keep all"
            )
        if keep_every < 0:
            raise ValueError(
                f"keep_every={keep_every} is negative; give a number of steps, or 0 to "
                f"keep none for its step"
            )
        if "://" in os.fspath(folder):
            raise ValueError(
                f"folder={os.fspath(folder)!r} is a URL; checkpoints are committed by "
                f"renaming a folder, so give a folder of a mounted file system"
            )
        self._folder = Path(folder).expanduser().absolute()
        self._held = CheckpointFolder(self._folder, keep=keep, keep_every=keep_every)
        name = f"checkpoints{next(_instances)}"
        self._agreement = Agreement(name)
        # One thread: a save starts when the one before has ended.
        self._background = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._pending: Future[None] | None = None
        # Every process by name: orbax then synchronizes through the coordinator, which
        # has timeouts, and not through the devices.
        processes = ocp.options.MultiprocessingOptions(
            active_processes=set(range(jax.process_count())),
            barrier_sync_key_prefix=name,
        )
        self._writer = ocp.AsyncCheckpointer(
            ocp.StandardCheckpointHandler(multiprocessing_options=processes),
            async_options=ocp.options.AsyncOptions(
                timeout_secs=agreement.TIMEOUT_SECONDS,
                barrier_sync_fn=lambda *, key, timeout_ms: self._agreement.report(),
            ),
            multiprocessing_options=processes,
        )
        # Each process reads on its own.
        self._reader = ocp.Checkpointer(
            ocp.PyTreeCheckpointHandler(),
            multiprocessing_options=ocp.options.MultiprocessingOptions(
                primary_host=jax.process_index(),
                active_processes={jax.process_index()},
            ),
        )

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

        Returns once the values are copied to the host, so the arrays may be donated;
        where a save is under way, it waits for that one first. Saving the newest step
        again replaces it: the earlier one is deleted once the new one is complete, and
        a permanent step stays permanent.

        Args:
          step: steps done; not below the newest step in the folder.
          state: pytree of `jax.Array`, typed random keys included. With several
            processes the arrays are global, sharded or replicated.
          data_state: state of the data iterator, JSON; that of process 0 is kept.
          metadata: anything else as JSON (tuples come back as lists): phase, resolved
            config, fingerprint of the corpus; that of process 0 is kept. None: nothing.
          permanent: never deleted by the keep policy.
          blocking: return only when the checkpoint is complete and on disk.
        Raises:
          ValueError: a leaf that is no array, metadata that is not JSON, or a step that
            would be older than the newest.
          CheckpointFailed: this save, or an earlier one in the background, has failed.
        """
        self.wait()
        if step < 0:
            raise ValueError(f"step={step} is negative; it counts the steps done")
        leaves = named_leaves(state)
        record = {
            "format_version": FORMAT_VERSION,
            "step": step,
            "permanent": permanent,
            "state": {name: describe(name, leaf) for name, leaf in leaves.items()},
            "data_state": checked_json("data_state", data_state),
            "metadata": checked_json("metadata", metadata or {}),
        }
        stored = storable(leaves)
        target = self._folder / self._agreement.decide(lambda: self._begin(record))
        failure = None
        if stored:
            try:
                arrays = unfinished(target) / "state"
                self._writer.save(arrays, args=ocp.args.StandardSave(stored))
            except Exception as error:
                # The others have to be told, which the background does.
                failure = error
        self._pending = self._background.submit(self._finish, step, target, failure)
        if blocking or failure is not None:
            self.wait()

    def wait(self) -> None:
        """Waits until no save is under way; on every process the last one is then
        complete.

        Raises:
          CheckpointFailed: the last save failed, and this was not raised before.
        """
        if self._pending is not None:
            try:
                self._pending.result()
            finally:
                if self._pending.done():
                    self._pending = None

    @property
    def saving(self) -> bool:
        """Whether a save of this process is under way."""
        return self._pending is not None and not self._pending.done()

    def raise_if_failed(self) -> None:
        """Raises CheckpointFailed where `wait` would, but waits for nothing."""
        if self._pending is not None and self._pending.done():
            self.wait()

    def close(self) -> None:
        """Waits for the last save and ends the background threads."""
        try:
            self.wait()
        finally:
            self._background.shutdown()
            self._writer.close()
            self._reader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # A save that waits for a lost process never ends, and is none.
        if not isinstance(error, ProcessLost):
            self.close()

    def set_aside_damaged(self) -> list[Damaged]:
        """Renames damaged checkpoints to `<name>.damaged`, from the newest down to the
        first that agrees with its manifest to the last bit.

        Afterwards the newest checkpoint is an intact one, if there is any. Only the run
        that will write into the folder may call this.

        Returns:
          the checkpoints that were renamed, the newest first.
        Raises:
          ValueError: a checkpoint of an unknown format.
          OSError: a file that cannot be read, for a reason that says nothing about its
            content, like a missing permission.
        """
        self.wait()
        found = self._agreement.decide(self._held.set_aside_damaged)
        return [
            Damaged(path=self._folder / name, step=step, reason=reason)
            for name, step, reason in found
        ]

    def last_good(self) -> Path | None:
        """Returns the folder of the newest complete checkpoint that this process sees;
        None where there is none."""
        complete = [path for *_, path in self._held.committed() if is_sealed(path)]
        return complete[-1] if complete else None

    def steps(self) -> list[int]:
        """Returns the steps of all complete checkpoints, ascending."""
        return self._agreement.decide(lambda: sorted(self._held.newest_paths()))

    def latest_step(self) -> int | None:
        """Returns the newest step with a complete checkpoint; None where there is
        none."""
        return self._agreement.decide(self._held.latest_step)

    def path(self, step: int | None = None) -> Path:
        """Returns the folder of the checkpoint of a step; None stands for the newest
        step.

        Raises:
          ValueError: there is no such checkpoint.
        """
        return self._folder / self._agreement.decide(lambda: self._held.path(step).name)

    def check_intact(self, step: int) -> None:
        """Compares a checkpoint with its manifest, to the last bit. Nothing is renamed:
        a run may ask this of another run's checkpoint.

        Raises:
          ValueError: no such checkpoint, one of an unknown format, or a damaged one.
        """
        self._agreement.decide(lambda: self._held.check_intact(step))

    def metadata(self, step: int | None = None) -> dict[str, Any]:
        """Returns the metadata saved with a step; None stands for the newest step.

        Raises:
          ValueError: no such checkpoint, or one of an unknown format.
        """
        return self._agreement.decide(lambda: self._held.find(step)[1]["metadata"])

    def restore(
        self, step: int | None = None, *, template: PyTree, part: bool = False
    ) -> Restored:
        """Returns the checkpoint of a step, bit for bit as it was saved.

        The arrays are not compared with the manifest; `set_aside_damaged` and
        `check_intact` do that.

        Args:
          step: one of `steps()`; None for the newest.
          template: the structure to restore into, with `jax.ShapeDtypeStruct` or arrays
            as leaves. Where a leaf has a sharding the array is put there, whatever mesh
            it was saved from; otherwise on the first device of each process.
          part: leaves of the checkpoint that the template lacks are not read.
        Returns:
          the state in the template's structure, the data state, the metadata and the
            step.
        Raises:
          ValueError: no such checkpoint, one of an unknown format or so damaged that it
            cannot be read, or a template that differs from it in structure, shape or
            dtype; the first difference is named.
        """
        name, record = self._agreement.decide(lambda: self._held.find(step))
        path = self._folder / name
        leaves = named_leaves(template)
        present = with_present_names(record["state"])
        described = {
            present[name]: leaf
            for name, leaf in record["state"].items()
            if present[name] in leaves or not (part or present[name] != name)
        }
        check_fits(path, described, leaves)
        stored = {
            name: stored_spec(leaves[present[name]])
            for name, leaf in record["state"].items()
            if present[name] in leaves and math.prod(leaf["shape"])
        }
        arrays = {}
        if stored:
            arrays = {
                present[name]: array for name, array in self._read(path, stored).items()
            }
        state = [
            rebuild(path, arrays.get(name), leaf, described[name])
            for name, leaf in leaves.items()
        ]
        return Restored(
            step=record["step"],
            state=jax.tree.unflatten(jax.tree.structure(template), state),
            data_state=record["data_state"],
            metadata=record["metadata"],
        )

    def _read(self, path: Path, stored: dict[str, jax.ShapeDtypeStruct]) -> Any:
        """Returns the arrays of a checkpoint by name."""
        try:
            places = ocp.checkpoint_utils.construct_restore_args(stored)
            args = ocp.args.PyTreeRestore(stored, places, partial_restore=True)
            return self._reader.restore(path / "state", args=args)
        except (MemoryError, jax.errors.JaxRuntimeError):
            raise
        except Exception as error:  # Damage shows in many ways.
            raise ValueError(
                f"{path} is damaged: its arrays cannot be read ({cause(error)}); use "
                f"another step, or resume the run, which sets damaged checkpoints aside"
            ) from error

    def _begin(self, record: dict[str, Any]) -> str:
        """Prepares the folder that a save will write into, and returns the name that
        the checkpoint will have.

        Raises:
          ValueError: the step is older than the newest checkpoint.
          CheckpointFailed: the folder cannot be written to.
        """
        step, newest = record["step"], self._held.latest_step()
        if newest is not None and step < newest:
            raise ValueError(
                f"step={step} is below step {newest}, the newest checkpoint in "
                f"{self._folder}, and would not be the one that a resume takes; "
                f"continue from step {newest} or use another folder"
            )
        permanent = record["permanent"] or (
            newest == step and self._held.is_permanent(step)
        )
        target = self._held.unused_path(step)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._held.remove_leftovers()
            unfinished(target).mkdir()
            text = json.dumps({**record, "permanent": permanent})
            (unfinished(target) / RECORD).write_text(text)
        except OSError as error:
            remove(unfinished(target))
            raise self._failed(step, error) from error
        return target.name

    def _finish(self, step: int, target: Path, failure: Exception | None) -> None:
        """Completes a save that is under way; runs in the background."""
        try:
            if failure is not None:
                raise failure
            self._writer.wait_until_finished()
            if jax.process_index() == 0:
                self._commit(target)
            self._agreement.report()
        except Exception as error:
            if not isinstance(error, OtherProcessFailed):
                with suppress(OtherProcessFailed):
                    self._agreement.report(cause(error))
            # Only now: every process has stopped, or is about to.
            if jax.process_index() == 0:
                remove_failed(unfinished(target))
            raise self._failed(step, error) from error

    def _commit(self, target: Path) -> None:
        manifest.write(unfinished(target), FORMAT_VERSION)
        os.rename(unfinished(target), target)
        # Before anything older goes, the new one must survive a power failure.
        manifest.flush(self._folder)
        self._held.delete_superseded(target)

    def _failed(self, step: int, error: Exception) -> CheckpointFailed:
        good = self.last_good()
        earlier = "there is none before it"
        if good is not None:
            earlier = f"the last good checkpoint is {good}"
        return CheckpointFailed(
            f"the checkpoint of step {step} in {self._folder} could not be written "
            f"({cause(error)}); {earlier}; free space or repair the disk, then resume"
        )
