"""The losses of a comparison, and how far chance may have moved them: a bootstrap over
seeds and over the batches of the validation.

The loss of a run is taken to be that of its arm and length, plus an effect of its seed
that is the same for all of them, plus a deviation. A seed decides the order of the text
and the numbers that a model begins with, and runs of one seed are lower or higher
together.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from jaxtyping import Bool, Float64

from experiments.comparing.finished_runs import FinishedRun

REPLICATES = 2000
INTERVAL = (5.0, 95.0)
"""The percentiles of the replicates between which 90 % of them lie."""

DEVIATIONS_IN_INTERVAL = 3.2897
"""The width of the central 90 % of a normal distribution, in standard deviations."""

ROUNDING = 1e-10
"""Singular values below this share of the largest one are 0 but for rounding."""

type Replicates = Float64[np.ndarray, " replicates"]
"""A figure as it is, and then that of each bootstrap replicate."""


@dataclass(frozen=True)
class SeedFit:
    """What each seed adds to the losses of all groups alike, by least squares.

    A group's runs have one arm and one length. The effects are 0 on average over seeds
    that occur together in groups, and 0 for a seed that occurs in no group of several.
    Where fitting them would leave no degree of freedom, seeds are taken to have none.
    """

    seeds: tuple[int, ...]
    by_loss: Float64[np.ndarray, "seeds runs"]
    """The effects are this matrix times the losses of all runs, group by group."""
    is_of_several: Bool[np.ndarray, " runs"]
    """Which of the runs have another one in their group."""
    left: Float64[np.ndarray, "runs runs"]
    """What is left of the losses without the mean of their group and the effects is
    this matrix times the losses."""
    free: int
    """The degrees of freedom of what is left."""

    @classmethod
    def of(cls, groups: Sequence[Sequence[FinishedRun]]) -> Self:
        """Returns the fit for these runs, whatever their losses are."""
        runs = [run for of in groups for run in of]
        seeds = tuple(sorted({run.seed for run in runs}))
        of_seed = np.array(
            [[run.seed == seed for seed in seeds] for run in runs], float
        )
        sizes = [len(of) for of in groups]
        index = np.repeat(np.arange(len(groups)), sizes)
        same = index[:, None] == index
        within = np.eye(len(runs)) - same / same.sum(axis=1)
        columns = within @ of_seed
        rank = int(np.linalg.matrix_rank(columns, rtol=ROUNDING))
        free = len(runs) - len(groups)
        # The shortest of all solutions: effects of seeds that occur together sum to 0.
        by_loss = np.linalg.pinv(columns, rtol=ROUNDING) @ within
        if free == rank:
            by_loss, rank = np.zeros_like(by_loss), 0
        left = within - columns @ by_loss
        return cls(seeds, by_loss, same.sum(axis=1) > 1, left, free - rank)

    def effects(self, losses: Float64[np.ndarray, "... runs"]) -> np.ndarray:
        """Returns what each seed adds, float64 (..., seeds)."""
        return losses @ self.by_loss.T

    def deviations(self, losses: Float64[np.ndarray, " runs"]) -> np.ndarray:
        """Returns what is left of the losses of the n runs in groups of several, times
        sqrt(n / free), so that its variance is not biased; empty without such
        groups."""
        found = (self.left @ losses)[self.is_of_several]
        return found * math.sqrt(len(found) / self.free) if self.free else found


def replicates[Group](
    groups: Mapping[Group, Sequence[FinishedRun]], generator: np.random.Generator
) -> dict[Group, Replicates]:
    """Returns the mean loss of each group of runs, those of one arm and length, without
    the effects of its seeds: first as it is, then of each bootstrap replicate.

    A replicate draws the batches of the validation anew, the same for all runs, where
    all runs record the loss of each. For each run it also draws a deviation, from those
    of all groups with two seeds or more, and the effects of seeds follow from these.
    """
    fit = SeedFit.of(list(groups.values()))
    runs = [run for of in groups.values() for run in of]
    losses = np.array([run.loss for run in runs])
    drawn = _drawn_batches(runs, generator)
    noise = np.zeros((1 + REPLICATES, len(runs)))
    if len(deviations := fit.deviations(losses)):
        noise[1:] = generator.choice(deviations, (REPLICATES, len(runs)))
    of_seed = [fit.seeds.index(run.seed) for run in runs]
    adjusted = losses + drawn + noise - fit.effects(losses + noise)[:, of_seed]
    ends = np.cumsum([len(of) for of in groups.values()])
    parts = np.split(adjusted, ends[:-1], axis=1)
    return {key: of.mean(axis=1) for key, of in zip(groups, parts, strict=True)}


def _drawn_batches(
    runs: Sequence[FinishedRun], generator: np.random.Generator
) -> Float64[np.ndarray, "replicates runs"]:
    """Returns what other batches of the validation add to the loss of each run: nothing
    at first, then the same batches for all runs; nothing where some runs do not record
    the loss of each batch, or other numbers of them."""
    change = np.zeros((1 + REPLICATES, len(runs)))
    counts = {len(run.batch_losses) for run in runs}
    batches = counts.pop() if len(counts) == 1 else 0
    if batches > 1:
        drawn = generator.integers(batches, size=(REPLICATES, batches))
        for column, run in enumerate(runs):
            by_batch = np.array(run.batch_losses)
            change[1:, column] = by_batch[drawn].mean(axis=1) - by_batch.mean()
    return change
