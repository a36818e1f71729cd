"""Training runs in processes of their own, which tests start, end and compare."""

import atexit
import gc
import multiprocessing
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
from jax._src import compiler

from sparsejax.checkpoints.checkpoint import Checkpoints
from sparsejax.command import main
from sparsejax.config.config_file import read_config
from sparsejax.reports import metrics
from sparsejax.reports.metrics import DensePeak
from sparsejax.training.run import Run
from tests.support.devices.xla_flags import QUICK_COMPILATION
from tests.support.micro_run import arrays_of, read_records, without_speed

LIMIT_SECONDS = 120
"""For what takes a few seconds on an idle machine."""

# JAX is imported once, by the server; each process is a fork of it.
_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload([__name__])


@dataclass(frozen=True, kw_only=True)
class Ended:
    status: int
    """Exit status; -SIGNAL where a signal ended it."""
    output: str
    errors: str


class Process:
    """`sparsejax train ARGUMENTS` in a process of its own.

    Args:
      files: where its standard output and errors go, as FILES.out and FILES.err.
      environment: added to that of this process.
      prepare: what the process does first.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        files: Path,
        *,
        environment: Mapping[str, str] | None = None,
        prepare: Callable[[], None] | None = None,
    ) -> None:
        self._outputs = [files.with_suffix(suffix) for suffix in (".out", ".err")]
        settings = {
            "jax_platforms": "cpu",
            "jax_compilation_cache_dir": jax.config.jax_compilation_cache_dir,
            "jax_persistent_cache_min_compile_time_secs": 0,
        }
        self._process: BaseProcess = _SERVER.Process(
            target=_run,
            args=(list(arguments), self._outputs, settings, environment, prepare),
            daemon=True,
        )
        self._process.start()

    def kill(self) -> None:
        self._process.kill()

    def terminate(self) -> None:
        self._process.terminate()

    def has_ended(self) -> bool:
        return self._process.exitcode is not None

    def wait(self, *, seconds: float = LIMIT_SECONDS) -> Ended:
        """Until it has ended, which it has to within `seconds`."""
        self._process.join(seconds)
        status = self._process.exitcode
        if status is None:
            self._process.kill()
            self._process.join()
        output, errors = (path.read_text(errors="replace") for path in self._outputs)
        assert status is not None, f"still running after {seconds} s: {output}{errors}"
        return Ended(status=status, output=output, errors=errors)

    def wait_until(self, happened: Callable[[], bool]) -> None:
        """Until it has happened; fails where the process ends before."""
        deadline = time.monotonic() + LIMIT_SECONDS
        while not happened():
            late = time.monotonic() > deadline
            assert not late and not self.has_ended(), self.wait(seconds=0)
            time.sleep(0.002)


def _run(
    arguments: list[str],
    outputs: list[Path],
    settings: dict[str, object],
    environment: Mapping[str, str] | None,
    prepare: Callable[[], None] | None,
) -> None:
    # What the server imported is no garbage; looking for some would copy all of it.
    gc.freeze()
    gc.set_threshold(50_000, 10, 10)
    for descriptor, path in enumerate(outputs, start=1):
        with path.open("wb") as file:
            os.dup2(file.fileno(), descriptor)
    os.environ.update(environment or {})
    if prepare is not None:
        prepare()
    for name, value in settings.items():
        jax.config.update(name, value)
    # Of the processes of a run JAX lets only process 0 write to the cache, where each
    # would have its own entries.
    writes = SimpleNamespace(process_id=0, client=None)
    compiler.distributed = SimpleNamespace(global_state=writes)
    # The measured peak is five GEMMs of size 2048, longer than the run.
    metrics.dense_peak = lambda dtype: DensePeak(tflops=1.0, source="test")
    try:
        main.leave(main.run(["train", *arguments]))
    finally:
        # As an interpreter does; multiprocessing does not. JAX leaves its run here.
        atexit._run_exitfuncs()


DISTRIBUTED = ("--distributed", "--heartbeat-seconds", "10")
"""The flags of a process that is one of several."""


def environments(processes: int) -> list[dict[str, str]]:
    """Returns the environment in which each process of a run finds the others."""
    with socket.socket() as unused:
        unused.bind(("localhost", 0))
        port = unused.getsockname()[1]
    return [
        {
            "JAX_COORDINATOR_ADDRESS": f"localhost:{port}",
            "JAX_NUM_PROCESSES": str(processes),
            "JAX_PROCESS_ID": str(process),
        }
        for process in range(processes)
    ]


def start_pair(arguments: list[str], files: Path) -> list[Process]:
    """Two processes with a device each."""
    one_device = {"XLA_FLAGS": QUICK_COMPILATION}
    return [
        Process(
            [*arguments, *DISTRIBUTED],
            files.with_name(f"{files.name}{process}"),
            environment=environment | one_device,
        )
        for process, environment in enumerate(environments(2))
    ]


def finish(
    arguments: Sequence[str],
    files: Path,
    *,
    environment: Mapping[str, str] | None = None,
    prepare: Callable[[], None] | None = None,
) -> Ended:
    """Returns the output of a process that ran to its end and ended well."""
    ended = Process(arguments, files, environment=environment, prepare=prepare).wait()
    assert ended.status == 0, ended
    return ended


def has_trained(folder: Path, step: int) -> Callable[[], bool]:
    """Whether the records say that the run in `folder` has done `step`."""

    def happened() -> bool:
        path = folder / "metrics.jsonl"
        return path.exists() and f'"step": {step},' in path.read_text()

    return happened


_built = lru_cache(Run)


def final_arrays(folder: Path) -> dict[str, np.ndarray]:
    """The state at the end of the run in `folder`, read on one device."""
    run = _built(read_config(folder / "config.json"))
    with Checkpoints(folder / "checkpoints") as checkpoints:
        template = run.template(run.phases[-1].sparsity)
        restored = checkpoints.restore(template=template)
    assert restored.step == run.config.steps
    return arrays_of(restored.state)


def assert_ended_alike(ours: Path, theirs: Path) -> None:
    """Same bits in the state at the end and in the weights, same records."""
    left, right = final_arrays(ours), final_arrays(theirs)
    assert left.keys() == right.keys()
    for name, array in left.items():
        assert array.dtype == right[name].dtype, name
        assert array.tobytes() == right[name].tobytes(), name
    weights = "model.safetensors"
    assert (ours / weights).read_bytes() == (theirs / weights).read_bytes()
    assert trained(ours) == trained(theirs)


def trained(folder: Path) -> list[dict]:
    """The records of what was computed. Saves are not: SIGTERM adds one."""
    records = without_speed(read_records(folder))
    return [record for record in records if record["event"] != "checkpoint"]
