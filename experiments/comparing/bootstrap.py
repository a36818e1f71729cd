"""The losses of a comparison, and how far chance may have moved them: a bootstrap over
seeds and over the batches of the validation.

The loss of a run is taken to be that of its arm and length, plus an effect of its seed
that is the same for all of them, plus a deviation. A seed decides the order of the text
and the numbers that a model begins with, and runs of one seed are lower or higher
together.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float64

from experiments.comparing.finished_runs import FinishedRun

REPLICATES = 2000
INTERVAL = (5.0, 95.0)
"""The percentiles of the replicates between which 90 % of them lie."""

DEVIATIONS_IN_INTERVAL = 3.2897
"""The width of the central 90 % of a normal distribution, in standard deviations."""

type Replicates = Float64[np.ndarray, " replicates"]
"""A figure as it is, and then that of each bootstrap replicate."""


def replicates[Group](
    groups: Mapping[Group, Sequence[FinishedRun]], generator: np.random.Generator
) -> dict[Group, Replicates]:
    """Returns the mean loss of each group of runs, those of one arm and length, without
    the effects of its seeds: first as it is, then of each bootstrap replicate.

    A replicate draws the batches of the validation anew, the same for all runs, where
    all runs record the loss of each. For each of a group's seeds it also draws a
    deviation, from those of all groups with two seeds or more.
    """
    runs = [run for of in groups.values() for run in of]
    counts = {len(run.batch_losses) for run in runs}
    batches = counts.pop() if len(counts) == 1 else 0
    drawn = None
    if batches > 1:
        drawn = generator.integers(batches, size=(REPLICATES, batches))
    effects, deviations = seed_effects(list(groups.values()))
    losses = {}
    for key, of in groups.items():
        mean = float(np.mean([run.loss - effects[run.seed] for run in of]))
        replicate = np.full(REPLICATES, mean)
        if drawn is not None:
            by_batch = np.mean([run.batch_losses for run in of], axis=0)
            replicate += by_batch[drawn].mean(axis=1) - by_batch.mean()
        if len(deviations):
            size = (REPLICATES, len(of))
            replicate += generator.choice(deviations, size).mean(axis=1)
        losses[key] = np.concatenate([[mean], replicate])
    return losses


def seed_effects(
    groups: Sequence[Sequence[FinishedRun]],
) -> tuple[dict[int, float], Float64[np.ndarray, " runs"]]:
    """Returns what each seed adds to a loss, and the deviations that are left of the
    runs whose group has two seeds or more.

    The effects are those of least squares within the groups, and 0 on average over
    seeds that occur together. Seeds of which no group has two have none. The deviations
    are made larger by sqrt(n / f), for n runs leave f of them free once groups and
    seeds are fitted; where they leave none free, seeds are taken to have no effects.
    """
    several = [of for of in groups if len(of) > 1]
    seeds = sorted({run.seed for of in groups for run in of})
    none = dict.fromkeys(seeds, 0.0)
    if not several:
        return none, np.zeros(0)
    rows, losses = [], []
    for of in several:
        own = np.array([[float(run.seed == seed) for seed in seeds] for run in of])
        rows.append(own - own.mean(axis=0))
        loss = np.array([run.loss for run in of])
        losses.append(loss - loss.mean())
    columns, wanted = np.concatenate(rows), np.concatenate(losses)
    within = len(wanted) - len(several)
    # The shortest of all solutions: effects of seeds that occur together sum to 0.
    found, _, rank, _ = np.linalg.lstsq(columns, wanted, rcond=None)
    if within == rank:
        return none, wanted * math.sqrt(len(wanted) / within)
    effects = dict(zip(seeds, map(float, found), strict=True))
    free = within - int(rank)
    return effects, (wanted - columns @ found) * math.sqrt(len(wanted) / free)
