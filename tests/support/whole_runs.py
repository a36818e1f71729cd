"""Whole runs of `train` in the process of a test: quick, undisturbed, killed."""

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import lru_cache
from pathlib import Path

import pytest

from sparsejax.config import TrainConfig
from sparsejax.config.config_file import MAY_CHANGE
from sparsejax.data.corpus import Corpus
from sparsejax.reports import metrics
from sparsejax.reports.metrics import DensePeak
from sparsejax.training.run import Run
from sparsejax.training.step_times import PhaseTime, StepTimes
from sparsejax.training.train import Outcome, train
from tests.support.micro_run import micro_config, with_phases


class Killed(Exception):
    pass


def kill_at(event: str, step: int) -> Callable[[dict], None]:
    """An observer that raises Killed at this record."""

    def observe(record: dict) -> None:
        if (record["event"], record["step"]) == (event, step):
            raise Killed

    return observe


def step_times(*sparse: PhaseTime) -> StepTimes:
    """Times of steps on an unknown device, where a dense one takes a millisecond."""
    return StepTimes(
        device="abacus",
        devices=1,
        dense_ms=1.0,
        fastest_dense_ms=1.0,
        slowest_dense_ms=1.0,
        sparse=sparse,
        seconds=1.0,
    )


def kills_at_switches(steps: Iterable[int]) -> list[tuple[str, int]]:
    """The moments of a kill just after each switch, and after its checkpoint."""
    return [(event, step) for step in steps for event in ("switch", "checkpoint")]


def trained_through_kills(
    config: TrainConfig, folder: Path, kills: Iterable[tuple[str, int]]
) -> Outcome:
    """The end of a run that was killed at each of these records, and resumed."""
    for event, step in sorted(kills, key=lambda kill: kill[1]):
        with pytest.raises(Killed):
            train(config, folder, observe=kill_at(event, step))
    ended = train(config, folder)
    assert ended.completed
    return ended


def with_sparse_kernels(decisions: Callable[..., tuple]) -> Callable[..., tuple]:
    """`ffn_decisions` as where every sparse GEMM has a kernel; nothing else knows."""

    def pretended(model, sparsity, *arguments, **options):
        found = decisions(model, sparsity, *arguments, **options)
        if sparsity.is_dense:
            return found
        return tuple(replace(decision, backend="mosaic_sm90") for decision in found)

    return pretended


@contextmanager
def quick_runs() -> Iterator[pytest.MonkeyPatch]:
    """No GEMM of size 2048 before each run; yields what other patches of the same tests
    are made with."""
    with pytest.MonkeyPatch.context() as patch:
        peak = DensePeak(tflops=1.0, source="test")
        patch.setattr(metrics, "dense_peak", lambda dtype: peak)
        yield patch


@lru_cache
def _compiled_run(config: TrainConfig) -> Run:
    return Run(config)


def shared_run(config: TrainConfig, *, corpus: Corpus | None = None) -> Run:
    """A `Run` that shares its compiled functions with every other that trains alike."""
    # `steps` may change too, but phases and learning rates are built from it.
    written = MAY_CHANGE - {"steps"}
    alike = {f.name: f.default for f in fields(TrainConfig) if f.name in written}
    run = copy.copy(_compiled_run(replace(config, **alike)))
    run.config = config
    run.corpus = corpus or run.corpus
    return run


VARIANTS = {
    "two-four": lambda c: c,
    "paper": lambda c: with_phases(replace(c, recipe="paper"), recluster_every=2),
    # Of 64 neurons 48 are drawn; an expert's 16 would all be in the dense tile.
    "mvue": lambda c: with_phases(
        replace(c, micro_batches=2), token_sparsity="mvue", fold=False
    ),
}


def undisturbed(
    text: str, tmp_path_factory
) -> Callable[[str], tuple[TrainConfig, Path, Outcome]]:
    """By variant: configuration, folder and outcome of a run that nothing disturbed."""

    @lru_cache
    def of(variant: str) -> tuple[TrainConfig, Path, Outcome]:
        config = VARIANTS[variant](micro_config(text))
        folder = tmp_path_factory.mktemp(variant)
        return config, folder, train(config, folder)

    return of
