"""The lowest cost at which any dense arm of a comparison reaches a loss.

An arm may need fewer seconds than the dense model of a comparison and still be no gain:
a dense model of another width or depth, or one that grows, may need fewer yet. A cost
is counted in tokens of the comparison's dense model, as R counts it.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from experiments.worth.bootstrap import Replicates
from experiments.worth.dense_curve import DenseCurves

_ROUNDING = 1e-6
"""The share of a run's cost that rounding may add to that of its own loss."""


@dataclass(frozen=True)
class Length:
    """One length of a dense arm: the loss that it ends with, and what it costs."""

    loss: Replicates
    cost: Replicates | float


@dataclass(frozen=True)
class DenseRivals:
    """The dense arms of a comparison, and what a loss costs with each of them."""

    reference: str
    """The arm of the comparison's dense model."""
    curves: DenseCurves
    """The losses of that model against its tokens."""
    lengths: Sequence[float]
    """The tokens of that model's runs."""
    others: Mapping[str, Sequence[Length]]
    """The lengths of every other dense arm, the shortest first."""

    @property
    def arms(self) -> set[str]:
        """The names of all dense arms."""
        return {self.reference, *self.others}

    def best(self, losses: Replicates, rivals: Collection[str]) -> "Best":
        """Returns the dense arm that reaches the first of the losses at the lowest
        cost.

        Args:
          losses: the loss of an arm, and its replicates.
          rivals: the names of the dense arms that count.
        """
        costs = {}
        if self.reference in rivals:
            costs[self.reference] = self.curves.tokens(losses)
        others = {name: of for name, of in self.others.items() if name in rivals}
        costs |= {name: cost_of(losses, of) for name, of in others.items()}
        lowest = np.min([np.full_like(losses, np.inf), *costs.values()], axis=0)
        if not np.isfinite(lowest[0]):
            return Best(None, lowest, lowest, extrapolated=False)
        name = min(costs, key=lambda name: costs[name][0])
        supposed = self._supposed(losses, others.values())
        return Best(
            name,
            lowest,
            np.min([lowest, *supposed], axis=0),
            extrapolated=self._is_outside(name, float(lowest[0])),
        )

    def _is_outside(self, name: str, cost: float) -> bool:
        """Returns whether a cost is below that of an arm's shortest run, or above that
        of its longest."""
        costs = self.lengths
        if name != self.reference:
            costs = [float(np.ravel(of.cost)[0]) for of in self.others[name]]
        low, high = min(costs) * (1 - _ROUNDING), max(costs) * (1 + _ROUNDING)
        return not low <= cost <= high

    def _supposed(
        self, losses: Replicates, arms: Iterable[Sequence[Length]]
    ) -> list[Replicates]:
        """Returns what the losses cost with each of the arms that has a single length,
        if its loss falls as `_fall` says: it ended below a loss and has passed it
        before, or above it and would pass it later, nobody knows when."""
        fall = self._fall()
        single = [lengths[0] for lengths in arms if len(lengths) == 1]
        with np.errstate(over="ignore"):
            return [of.cost * np.exp((of.loss - losses) / fall) for of in single]

    def _fall(self) -> Replicates:
        """Returns by how much the losses of dense arms fall for each factor e of the
        cost: the median over the arms with several lengths, the reference among them,
        of the fall between the last two; nan where that is none."""
        *_, shorter, longer = sorted(set(self.lengths))
        pairs = [Length(self.curves.loss(of), of) for of in (shorter, longer)]
        last = [pairs, *(of[-2:] for of in self.others.values() if len(of) > 1)]
        falls = [
            (before.loss - after.loss) / np.log(after.cost / before.cost)
            for before, after in last
        ]
        fall = np.median(falls, axis=0)
        return np.where(fall > 0, fall, np.nan)


@dataclass(frozen=True)
class Best:
    """The dense arm that reaches a loss at the lowest cost."""

    name: str | None
    """The name of the arm; None where no arm reaches the loss."""
    costs: Replicates
    """The lowest cost of each replicate of the loss: infinite where no arm reaches it,
    and nan where the reference's curve does not fall."""
    likely: Replicates
    """The same, but where an arm with a single length would reach the loss at a lower
    cost if its loss falls as that of the others does, that cost."""
    extrapolated: bool
    """Whether `costs` is outside those of the arm's runs, so that it rests on how the
    arm's loss falls before or beyond them."""

    @property
    def is_least(self) -> bool:
        """Whether another arm may reach the loss at a lower cost: one with a single
        length, whose fall nobody knows."""
        return bool(self.likely[0] < self.costs[0])


def cost_of(losses: Replicates, lengths: Sequence[Length]) -> Replicates:
    """Returns the cost at which an arm reaches each of the losses.

    Between two of its lengths the loss of an arm is taken to fall in a straight line
    against the logarithm of the cost, before the shortest as between the first two, and
    beyond the longest as between the last two. Losses fall less and less, so that this
    is the least that a loss before or beyond may cost. Where the last two do not fall,
    a loss below all lengths costs infinitely much. Of an arm with one length no more is
    known than that it costs as much as that one.
    """
    first = lengths[0]
    costs = np.where(losses >= first.loss, first.cost, np.inf)
    pairs = list(pairwise(lengths))
    for number, (shorter, longer) in enumerate(pairs):
        falls = shorter.loss > longer.loss
        whole = np.where(falls, shorter.loss - longer.loss, 1.0)
        way = (shorter.loss - losses) / whole
        with np.errstate(over="ignore"):  # Infinite, as of an arm that does not fall.
            cost = shorter.cost * (longer.cost / shorter.cost) ** way
        within = falls
        if number < len(pairs) - 1:
            within &= way <= 1.0
        if number:
            within &= way >= 0.0
        costs = np.where(
            within, np.where(way < 0, cost, np.minimum(cost, costs)), costs
        )
    return costs
