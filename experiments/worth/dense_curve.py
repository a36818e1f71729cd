"""The loss of a dense model against the tokens it was trained on, and its inverse.

The curve is L(D) = E + A D^-b, fitted to completed cooldowns of one model. In x =
ln(D / D0) it is

    L = c - a phi(x),    phi(x) = (1 - exp(-b x)) / b,    a > 0, b >= 0,

whose limit at b = 0 is a straight line in ln D. Given b it is linear in c and a, so
that b alone is searched.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np
from jaxtyping import Float64

LARGEST_EXPONENT = 3.0
"""The largest exponent b that is tried. Exponents of loss against tokens that others
report lie between 0.05 and 0.6."""
_GRID = 61
_GOLDEN = (5**0.5 - 1) / 2
_NARROWINGS = 40
_STRAIGHT = 1e-9
"""The exponent below which a curve is a straight line to the last bit of the loss."""


@dataclass(frozen=True)
class DenseCurves:
    """Curves of the same budgets, one for each replicate of their losses."""

    centre: float
    """ln D0, the mean of ln D over the budgets."""
    offset: Float64[np.ndarray, " replicates"]
    slope: Float64[np.ndarray, " replicates"]
    """The slope a at D0, in nats per unit of ln D."""
    exponent: Float64[np.ndarray, " replicates"]
    """The exponent b."""

    @classmethod
    def fit(
        cls,
        tokens: Float64[np.ndarray, " budgets"],
        losses: Float64[np.ndarray, "replicates budgets"],
        weights: Float64[np.ndarray, " budgets"],
    ) -> Self:
        """Returns the least-squares fits.

        Args:
          tokens: D of each budget.
          losses: losses in nats per token.
          weights: weight of each budget, such as its number of seeds.
        Raises:
          ValueError: there are fewer than three different budgets, or in the first
            replicate, that of the losses themselves, more tokens do not lower the loss.
        """
        if len(set(tokens)) < 3:
            raise ValueError(
                f"a curve of loss against tokens needs completed cooldowns of at least "
                f"three different lengths, and there are {len(set(tokens))}; train "
                f"more lengths of the dense model"
            )
        x = np.log(tokens)
        centre = float(x.mean())
        x = x - centre
        grid = np.linspace(0.0, LARGEST_EXPONENT, _GRID)
        errors = np.stack(
            [_linear(x, losses, weights, np.full(len(losses), b))[2] for b in grid]
        )
        best = grid[errors.argmin(axis=0)]
        cell = grid[1] - grid[0]
        low, high = np.maximum(best - cell, 0.0), best + cell
        for _ in range(_NARROWINGS):
            left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
            left_is_better = (
                _linear(x, losses, weights, left)[2]
                < _linear(x, losses, weights, right)[2]
            )
            high = np.where(left_is_better, right, high)
            low = np.where(left_is_better, low, left)
        exponent = (low + high) / 2
        offset, slope, _ = _linear(x, losses, weights, exponent)
        if slope[0] <= 0:
            raise ValueError(
                f"the dense losses {np.round(losses[0], 4).tolist()} do not fall with "
                f"tokens {tokens.astype(int).tolist()}, so that none can be turned "
                f"into a number of tokens; look at the runs, or train longer ones"
            )
        return cls(centre, offset, slope, exponent)

    def loss(self, tokens: float) -> Float64[np.ndarray, " replicates"]:
        """Returns the loss L(D) of each curve, in nats per token."""
        x = np.full(len(self.slope), np.log(tokens) - self.centre)
        return self.offset - self.slope * _phi(x, self.exponent)

    def tokens(
        self, losses: Float64[np.ndarray, " replicates"]
    ) -> Float64[np.ndarray, " replicates"]:
        """Returns the tokens after which each curve has the given loss; infinite where
        it never has, and nan for a curve that does not fall."""
        falls = self.slope > 0
        phi = (self.offset - losses) / np.where(falls, self.slope, 1.0)
        left = 1 - self.exponent * phi
        reached = falls & (left > 0)
        straight = self.exponent < _STRAIGHT
        curved = -np.log(np.where(reached, left, 1.0)) / np.where(
            straight, 1.0, self.exponent
        )
        x = np.where(straight, phi, curved)
        tokens = np.exp(np.where(reached, x, 0.0) + self.centre)
        return np.where(falls, np.where(reached, tokens, np.inf), np.nan)


def _phi(x: np.ndarray, exponent: np.ndarray) -> np.ndarray:
    straight = exponent < _STRAIGHT
    safe = np.where(straight, 1.0, exponent)
    return np.where(straight, x, -np.expm1(-safe * x) / safe)


def _linear(
    x: np.ndarray, losses: np.ndarray, weights: np.ndarray, exponent: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns c, a and the weighted squared error of each replicate, given its
    exponent."""
    share = weights / weights.sum()
    phi = _phi(x[None, :], exponent[:, None])
    phi_mean, loss_mean = phi @ share, losses @ share
    phi_off, loss_off = phi - phi_mean[:, None], losses - loss_mean[:, None]
    slope = -((phi_off * loss_off) @ share) / ((phi_off**2) @ share)
    error = ((loss_off + slope[:, None] * phi_off) ** 2) @ share
    return loss_mean + slope * phi_mean, slope, error
