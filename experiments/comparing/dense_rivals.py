"""The lowest cost at which any dense arm of a comparison reaches a loss.

An arm may need fewer seconds than the dense model of a comparison and still be no gain:
a dense model of another width or depth, or one that grows, may need fewer yet. A cost
is counted in tokens of the comparison's dense model, as R counts it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from experiments.comparing.bootstrap import Replicates
from experiments.comparing.dense_curve import DenseCurves


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
    others: Mapping[str, Sequence[Length]]
    """The lengths of every other dense arm, the shortest first."""

    def may_cost_less(self, loss: float, arm: str, lowest: float) -> bool:
        """Returns whether a dense arm other than `arm` may reach the loss at a lower
        cost than `lowest`, that of `best`: one with a single length, which ended below
        the loss and has passed it before, nobody knows when. It may where it does if
        its loss falls as the reference's does in the middle of its lengths, by as much
        for each factor e of the cost."""
        slope = float(self.curves.slope[0])
        return any(
            len(lengths) == 1
            and lengths[0].loss[0] < loss
            and np.ravel(lengths[0].cost)[0]
            * np.exp((lengths[0].loss[0] - loss) / slope)
            < lowest
            for name, lengths in self.others.items()
            if name != arm
        )

    def best(self, losses: Replicates, arm: str) -> tuple[str | None, Replicates]:
        """Returns the dense arm that reaches the first of the losses at the lowest
        cost, None where no one does, and the lowest cost of each loss: infinite where
        no one has it, and nan where the reference's curve does not fall.

        Args:
          losses: the loss of an arm, and its replicates.
          arm: the name of that arm, which is no rival of its own.
        """
        costs = {self.reference: self.curves.tokens(losses)}
        costs |= {name: cost_of(losses, of) for name, of in self.others.items()}
        costs.pop(arm, None)
        lowest = np.min([np.full_like(losses, np.inf), *costs.values()], axis=0)
        if not np.isfinite(lowest[0]):
            return None, lowest
        return min(costs, key=lambda name: costs[name][0]), lowest


def cost_of(losses: Replicates, lengths: Sequence[Length]) -> Replicates:
    """Returns the cost at which an arm reaches each of the losses.

    Between two of its lengths the loss of an arm is taken to fall in a straight line
    against the logarithm of the cost, and before the shortest as between the first two.
    A loss below all of its lengths costs infinitely much: it has not been reached. Of
    an arm with one length no more is known than that it costs as much as that one.
    """
    first = lengths[0]
    costs = np.where(losses >= first.loss, first.cost, np.inf)
    for number, (shorter, longer) in enumerate(pairwise(lengths)):
        falls = shorter.loss > longer.loss
        whole = np.where(falls, shorter.loss - longer.loss, 1.0)
        way = (shorter.loss - losses) / whole
        cost = shorter.cost * (longer.cost / shorter.cost) ** way
        within = falls & (way <= 1.0)
        if number:
            within &= way >= 0.0
        costs = np.where(
            within, np.where(way < 0, cost, np.minimum(cost, costs)), costs
        )
    return costs
