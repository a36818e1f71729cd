"""The processes of a run: how they find each other, exchange texts, and agree to
end."""

import fcntl
import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import distributed
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sparsejax.distributed.stop_signals import stop_signals

_locks = itertools.count()


def join(*, heartbeat_seconds: int = 100) -> None:
    """Makes this process one of its run: `jax.distributed.initialize`.

    SLURM, Open MPI, Kubernetes and Cloud TPU say themselves how many processes there
    are, and which one this is. Elsewhere the environment does: JAX_COORDINATOR_ADDRESS
    (host:port of process 0), JAX_NUM_PROCESSES, JAX_PROCESS_ID. To be called before
    JAX is used.

    Args:
      heartbeat_seconds: after this silence a process counts as dead, and all end.
    Raises:
      ValueError: the environment says too little or nonsense, or not all came.
    """
    count = _number("JAX_NUM_PROCESSES", least=1)
    index = _number("JAX_PROCESS_ID", least=0)
    if count is not None and index is not None and index >= count:
        raise ValueError(
            f"JAX_PROCESS_ID={index} is not below JAX_NUM_PROCESSES={count}; the "
            f"processes are numbered from 0"
        )
    try:
        jax.distributed.initialize(
            num_processes=count,
            process_id=index,
            heartbeat_timeout_seconds=heartbeat_seconds,
        )
    except (ValueError, RuntimeError) as error:
        raise ValueError(
            f"the processes of this run did not find each other ({error}); start them "
            f"with srun or mpirun, or set JAX_COORDINATOR_ADDRESS=HOST:PORT, "
            f"JAX_NUM_PROCESSES and JAX_PROCESS_ID in each"
        ) from error


def _number(variable: str, *, least: int) -> int | None:
    text = os.environ.get(variable)
    if text is None:
        return None
    if not text.isdecimal() or int(text) < least:
        raise ValueError(
            f"{variable}={text!r} is not a number from {least}; set it for every "
            f"process, or leave it to the launcher"
        )
    return int(text)


class ProcessLost(RuntimeError):
    """Another process of the run died or is out of reach, so this one cannot go on."""


def is_loss_of_contact(error: Exception) -> bool:
    """Returns whether an error comes from a collective or from the coordinator, and not
    from a full memory."""
    if isinstance(error, jax.errors.JaxRuntimeError):
        return "RESOURCE_EXHAUSTED" not in str(error)
    # On CPU the collectives are gloo's, whose errors come as ValueErrors.
    return isinstance(error, TimeoutError) or "Gloo" in str(error)


class Exchange:
    """Texts that every process of a run gives to all others.

    They pass through the coordinator of `jax.distributed`, not through the devices: a
    background thread may exchange texts while the devices are in the middle of a step.

    Args:
      name: the same on all processes, and of no other exchange of the run.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._previous: str | None = None

    def gather(self, key: str, text: str, *, timeout_seconds: float) -> list[str]:
        """Returns the texts of all processes in the order of the processes, once all
        have given theirs.

        Args:
          key: the same on all processes, and used once.
          text: what this process gives.
          timeout_seconds: how long to wait for the others.
        Raises:
          TimeoutError: a process has died, or did not call this in time.
        """
        count = jax.process_count()
        if count == 1:
            return [text]
        client = distributed.global_state.client
        if client is None:
            raise RuntimeError(
                f"this run has {count} processes, but jax.distributed.initialize was "
                f"not called; without it they cannot exchange anything"
            )
        place = f"sparsejax/{self._name}/{key}/"
        try:
            client.key_value_set(f"{place}{jax.process_index()}", text)
            client.wait_at_barrier(place, int(1000 * timeout_seconds))
            found = dict(client.key_value_dir_get(place))
        except jax.errors.JaxRuntimeError as error:
            raise TimeoutError(
                f"not all of the {count} processes came to {place} within "
                f"{timeout_seconds:.0f} seconds of the first "
                f"({' '.join(str(error).split())}); see what the others printed last, "
                f"then start all of them anew"
            ) from error
        # All have passed the previous place, or they would not be here.
        if self._previous is not None and jax.process_index() == 0:
            client.key_value_delete(self._previous)
        self._previous = place
        return [found[f"{place}{process}"] for process in range(count)]


@contextmanager
def alone_in(folder: Path, *, timeout_seconds: float) -> Iterator[None]:
    """Keeps other runs out of `folder`, which it creates.

    The lock is held by process 0 and ends with it, whatever ends it.

    Args:
      folder: the run folder.
      timeout_seconds: how long to wait for the other processes.
    Raises:
      ValueError: another run has the lock.
      TimeoutError: see `Exchange.gather`.
    """
    with ExitStack() as held:
        refusal = ""
        if jax.process_index() == 0:
            folder.mkdir(parents=True, exist_ok=True)
            file = held.enter_context((folder / "run.lock").open("a"))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                refusal = (
                    f"a run trains in {folder} at this moment; wait until it has "
                    f"ended, stop it with SIGTERM, or give another folder"
                )
            except OSError:
                pass  # a file system without locks keeps nobody out
        key = str(next(_locks))
        refusals = Exchange("run.lock").gather(
            key, refusal, timeout_seconds=timeout_seconds
        )
        if refusals[0]:
            raise ValueError(refusals[0])
        yield


@contextmanager
def until_stopped(mesh: Mesh) -> Iterator[Callable[[], bool]]:
    """Yields a function that returns whether SIGTERM or SIGINT (Ctrl-C) has arrived;
    all processes of a run call it once per step, and get the same answer. A second
    SIGINT has the effect that it had before this call."""
    arrived = []
    agree = _Agreement(mesh) if jax.process_count() > 1 else bool
    with stop_signals(arrived.append) as handled:
        yield lambda: agree(handled and bool(arrived))


class _Agreement:
    """An answer that all processes share: whether any of them said yes one call ago.

    The devices exchange the answers while they compute the next step, so that no step
    waits for them.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._on_each = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
        self._any = jax.jit(jnp.any, out_shardings=NamedSharding(mesh, PartitionSpec()))
        self._asked: jax.Array | None = None

    def __call__(self, yes: bool) -> bool:
        before = self._asked
        answers = jax.make_array_from_callback(
            (self._on_each.mesh.size,), self._on_each, lambda _: np.array([yes])
        )
        self._asked = self._any(answers)
        return before is not None and bool(before)
