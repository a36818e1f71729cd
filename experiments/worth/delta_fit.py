"""The excess of tokens of an arm as a function of size and length, and its
extrapolation.

The excess delta = ln(D / D_eq) of an arm (see `equal_loss_rows`) is fitted by

    delta = a + b ln(N / N0) + c ln(r / r0)

over rungs of N parameters and lengths of r = D / N tokens per parameter, N0 and r0
being the geometric means of the rows.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from jaxtyping import Float64

from experiments.worth.bootstrap import (
    DEVIATIONS_IN_INTERVAL,
    INTERVAL,
    REPLICATES,
    Replicates,
)


@dataclass(frozen=True, kw_only=True)
class Excess:
    """The excess of one arm at one size and length."""

    parameters: int
    """N, of the dense model."""
    tokens_per_parameter: float
    """r, the arm's tokens over N."""
    delta: float
    deviation: float
    """The standard deviation of delta."""

    @classmethod
    def of_ratio(
        cls,
        parameters: int,
        tokens_per_parameter: float,
        ratio: float,
        low: float,
        high: float,
    ) -> Self:
        """Returns the excess of a ratio D / D_eq with its 90 % interval. Raises
        ValueError where the interval has no width or no finite end."""
        if not 0 < low < high < math.inf:
            raise ValueError(
                f"the interval from {low} to {high} of a ratio of tokens says nothing "
                f"of its spread; train a second seed, or leave the length out"
            )
        return cls(
            parameters=parameters,
            tokens_per_parameter=tokens_per_parameter,
            delta=math.log(ratio),
            deviation=math.log(high / low) / DEVIATIONS_IN_INTERVAL,
        )


@dataclass(frozen=True)
class DeltaFit:
    """The fit as it is, and that of each replicate, which draws every excess anew from
    a normal distribution of its deviation."""

    excesses: tuple[Excess, ...]
    deltas: Float64[np.ndarray, "replicates excesses"]

    @classmethod
    def draw(cls, excesses: Sequence[Excess], generator: np.random.Generator) -> Self:
        """Returns the fit of the excesses, and its replicates.

        Raises:
          ValueError: there are fewer than two lengths, so that nothing can be said of
            any other.
        """
        lengths = {round(of.tokens_per_parameter, 1) for of in excesses}
        if len(lengths) < 2:
            raise ValueError(
                f"an excess is known at {len(lengths)} length only; train the arm and "
                f"the dense model at more tokens per parameter"
            )
        mean = np.array([of.delta for of in excesses])
        deviation = np.array([of.deviation for of in excesses])
        drawn = generator.normal(mean, deviation, (REPLICATES, len(mean)))
        return cls(tuple(excesses), np.vstack([mean, drawn]))

    @property
    def sizes(self) -> list[int]:
        """The sizes N of the rungs, ascending."""
        return sorted({of.parameters for of in self.excesses})

    def size_slope(self) -> tuple[float, float, float] | None:
        """Returns b with the ends of its 90 % interval; None where there is one rung
        only."""
        if len(self.sizes) < 2:
            return None
        slope = self._solved(self._columns())[:, 1]
        low, high = np.percentile(slope[1:], INTERVAL)
        return float(slope[0]), float(low), float(high)

    @property
    def is_size_resolved(self) -> bool:
        """Whether the 90 % interval of b leaves out 0."""
        slope = self.size_slope()
        return slope is not None and not slope[1] <= 0 <= slope[2]

    def at(self, parameters: float, tokens_per_parameter: float) -> Replicates:
        """Returns delta at a size and a length.

        Where the dependence on the size is not resolved, delta is taken to have none,
        and to be that of the rung with the largest: every rung then has a constant of
        its own, and all have the slope c.
        """
        length = math.log(tokens_per_parameter) - self._centres()[1]
        if self.is_size_resolved:
            point = [1.0, math.log(parameters) - self._centres()[0], length]
            return self._solved(self._columns()) @ np.array(point)
        of_rung = [[of.parameters == n for of in self.excesses] for n in self.sizes]
        columns = np.vstack([np.array(of_rung, np.float64), self._columns()[2]])
        solved = self._solved(columns)
        worst = int(solved[0, :-1].argmax())
        return solved[:, worst] + solved[:, -1] * length

    def _centres(self) -> tuple[float, float]:
        """Returns ln N0 and ln r0."""
        sizes = [math.log(of.parameters) for of in self.excesses]
        lengths = [math.log(of.tokens_per_parameter) for of in self.excesses]
        return float(np.mean(sizes)), float(np.mean(lengths))

    def _columns(self) -> Float64[np.ndarray, "3 excesses"]:
        """Returns what a, b and c are multiplied by at each excess."""
        size, length = self._centres()
        return np.array(
            [
                np.ones(len(self.excesses)),
                [math.log(of.parameters) - size for of in self.excesses],
                [math.log(of.tokens_per_parameter) - length for of in self.excesses],
            ]
        )

    def _solved(
        self, columns: Float64[np.ndarray, "coefficients excesses"]
    ) -> Float64[np.ndarray, "replicates coefficients"]:
        """Returns the least-squares coefficients of each replicate; an excess counts by
        the inverse square of its deviation."""
        if (rank := np.linalg.matrix_rank(columns)) < len(columns):
            raise ValueError(
                f"the excesses of {len(self.excesses)} rows determine {rank} of "
                f"{len(columns)} coefficients, as their sizes and lengths do not vary "
                f"independently; train the arm and the dense model at more than one "
                f"length of a size"
            )
        weights = 1 / np.array([of.deviation for of in self.excesses])
        solved, *_ = np.linalg.lstsq(
            (columns * weights).T, (self.deltas * weights).T, rcond=None
        )
        return solved.T
