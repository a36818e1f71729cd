"""What the processes of a run tell one another, without the devices."""

import os

import jax
from jax._src import distributed


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
        """The texts of all processes in their order, once all have given theirs.

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
