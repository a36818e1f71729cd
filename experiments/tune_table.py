"""Makes the table of a GPU that this package ships, on that GPU.

    uv run --extra cuda experiments/tune_table.py --shipped

A Hopper GPU without a table of its own takes its kernels' configs and times from
another one's, as an estimate. This script measures on the GPU that is here what the
tables of other GPUs have, and the GEMMs of the presets, each as `sparsejax.tuning.tune`
does for a run: every config is compared with float32, then timed in turn with the dense
GEMM. What the table has already is left alone, so that a second call goes on where the
first one ended.

Compiling takes most of the time: several processes compile at once, each one GEMM; then
they time their GEMMs one after the other, while the GPU does nothing else.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier, Lock
from queue import Empty

import tyro

from pallas_kernels import tuning
from pallas_kernels.tuned_gemm import TunedGemm
from sparsejax.config import PresetName, RecipeName
from sparsejax.config.presets import PRESETS
from sparsejax.distributed.own_process import in_own_process
from sparsejax.ops.backend import current_device
from sparsejax.ops.gemm_spec import GemmSpec
from sparsejax.reports.provenance import commit
from sparsejax.tuning import tune
from sparsejax.tuning.tune import Trial

RECIPES: tuple[RecipeName, ...] = ("weights", "activations", "two-four", "paper")


@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of the tuning: which GEMMs are measured, and where the times are
    kept."""

    like: tuple[str, ...] = ("NVIDIA H200",)
    """Names of the GPUs whose tables name the GEMMs."""
    presets: tuple[PresetName, ...] = ("wide-200m", "gpt-124m")
    """Presets whose GEMMs, of every recipe on one GPU, are measured too."""
    d_model: tuple[int, ...] = ()
    """Widths d_model of the tables' GEMMs that are measured; none given: every
    width."""
    shipped: bool = False
    """Whether the times are kept in the table of this package, not in your cache
    folder."""
    processes: int = 9
    """Number of processes that compile at once. Each holds the operands of one GEMM."""


def main(config: Config) -> list[tuning.Entry]:
    """Measures, prints and keeps the entries that are missing, and returns them.

    Raises:
      ValueError: the GPU here is no Hopper.
      ChildProcessError: one of the processes has failed; its error stands above.
    """
    # Else the first process would take most of the memory.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    kind, todo = in_own_process(_todo, config)
    print(f"{len(todo)} GEMMs to time on this {kind}", flush=True)
    save = tuning.save_shipped if config.shipped else tuning.save
    found: list[tuning.Entry] = []
    for entry in _side_by_side(todo, config.processes):
        save(kind, [entry])
        found.append(entry)
        print(
            f"{len(found)} of {len(todo)}: {entry.gemm.tokens} tokens x "
            f"{entry.gemm.d_in} x {entry.gemm.d_out}, {entry.gemm.experts} experts: "
            f"2:4 {entry.sparse_us:,.1f} us, dense {entry.dense_us:,.1f} us, packing "
            f"{entry.pack_us:,.1f} us",
            flush=True,
        )
    return found


def _todo(config: Config) -> tuple[str, list[TunedGemm | GemmSpec]]:
    """Returns the kind of GPU here, and the GEMMs whose times on it are not known."""
    device = current_device()
    if (reason := device.why_not_hopper()) is not None:
        raise ValueError(f"there is nothing to tune: {reason}")
    known = (tuning.shipped if config.shipped else tuning.entries)(device.kind)
    todo: dict[TunedGemm, TunedGemm | GemmSpec] = {}
    for preset in config.presets:
        for recipe in RECIPES:
            of_recipe = PRESETS[preset]().with_recipe(recipe)
            todo |= tune.runnable(tune.gemms_of_run(of_recipe))
    for other in config.like:
        gemms = tuning.shipped(other)
        todo |= {gemm: gemm for gemm in gemms if _is_chosen(config, gemm)}
    return device.kind, [todo[gemm] for gemm in todo if gemm not in known]


def _is_chosen(config: Config, gemm: TunedGemm) -> bool:
    return not config.d_model or tune.sizes_of(gemm)[2] in config.d_model


def _side_by_side(
    jobs: Sequence[TunedGemm | GemmSpec], processes: int
) -> Iterator[tuning.Entry]:
    """Yields the entries as they are found by several processes."""
    if not jobs:
        return
    context = get_context("spawn")
    count = min(processes, len(jobs))
    rounds = -(-len(jobs) // count)
    compiled, timed = context.Barrier(count), context.Barrier(count)
    alone, found = context.Lock(), context.Queue()
    workers = [
        context.Process(
            target=_work,
            args=(jobs[number::count], rounds, compiled, alone, timed, found),
            daemon=True,
        )
        for number in range(count)
    ]
    for worker in workers:
        worker.start()
    for _ in jobs:
        yield _next(found, workers)
    for worker in workers:
        worker.join()


def _next(found: Queue, workers: Sequence[BaseProcess]) -> tuning.Entry:
    while True:
        with suppress(Empty):
            return found.get(timeout=1)
        if any(worker.exitcode for worker in workers):
            raise ChildProcessError(
                "a process that tunes has died; call again to go on from here, with "
                "fewer processes if memory was short"
            )


def _work(
    jobs: Sequence[TunedGemm | GemmSpec],
    rounds: int,
    compiled: Barrier,
    alone: Lock,
    timed: Barrier,
    found: Queue,
) -> None:
    """Tunes one of the jobs in each round, compiled while all others compile theirs,
    and timed while all others wait."""
    for turn in range(rounds):
        trial = _trial(jobs[turn]) if turn < len(jobs) else None
        compiled.wait()
        if trial is not None:
            with alone:
                found.put(replace(tune.measured(trial), commit=commit()))
        del trial  # its operands, before those of the next are made
        timed.wait()


def _trial(job: TunedGemm | GemmSpec) -> Trial:
    """Returns the trial of a GEMM, with the configs that are correct."""
    if isinstance(job, TunedGemm):
        trial = tune.trial_of_entry(job)
    else:
        trial = tune.trial_of(job)
    correct = {
        config: call for config, call in trial.sparse.items() if trial.is_correct(call)
    }
    return replace(trial, sparse=correct, is_correct=lambda _: True)


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
