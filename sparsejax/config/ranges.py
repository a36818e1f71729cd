"""The ranges of settings that are numbers."""

from dataclasses import dataclass
from decimal import Decimal
from functools import cache
from math import isqrt
from typing import Annotated, Any, get_type_hints

FLOAT32_MAX = 3.4028234663852886e38


@dataclass(frozen=True, kw_only=True)
class Interval:
    """The numbers that a setting may be: those between the bounds that are not None."""

    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None

    def __contains__(self, value: float) -> bool:
        return (
            (self.least is None or value >= self.least)
            and (self.above is None or value > self.above)
            and (self.most is None or value <= self.most)
            and (self.below is None or value < self.below)
        )

    def __str__(self) -> str:
        bounds = {
            "at least": self.least,
            "above": self.above,
            "at most": self.most,
            "below": self.below,
        }
        stated = (f"{how} {n}" for how, n in bounds.items() if n is not None)
        return " and ".join(stated)


INT32_MAX = 2**31 - 1
Count = Annotated[int, Interval(least=1, most=INT32_MAX)]
CountOrNone = Annotated[int | None, Interval(least=1, most=INT32_MAX)]
CountOrZero = Annotated[int, Interval(least=0, most=INT32_MAX)]
Seed = Annotated[int, Interval(least=0, most=2**32 - 1)]
Share = Annotated[float, Interval(least=0, most=1)]
Positive = Annotated[float, Interval(above=0, most=FLOAT32_MAX)]
NotNegative = Annotated[float, Interval(least=0, most=FLOAT32_MAX)]
Decay = Annotated[float, Interval(least=0, below=1)]


def check_intervals(settings: Any, section: str = "") -> None:
    """Raises ValueError where a field annotated with an `Interval` lies outside it. A
    field that is None is not checked.

    Args:
      settings: a dataclass.
      section: what precedes the field's name in its dotted name, with the dot.
    """
    for name, interval in _intervals(type(settings)).items():
        value = getattr(settings, name)
        if value is not None and value not in interval:
            raise ValueError(f"{section}{name}={value} must be {interval}")


def check_shares(
    settings: Any, section: str, first: str, second: str, *, otherwise: str
) -> None:
    """Raises ValueError where two shares of a run's steps are together more than 1. The
    message names the largest second share that fits beside the first.

    Args:
      settings: a dataclass.
      section: what precedes a field's name in its dotted name, with the dot.
      first, second: the names of the fields that hold the shares.
      otherwise: what else may be changed, as the end of a sentence.
    """
    share, other = getattr(settings, first), getattr(settings, second)
    if share + other <= 1:
        return
    flag = f"--{section}{second}".replace("_", "-")
    # By its decimals: a rounded rest could be too large again.
    rest = float(1 - Decimal(str(share)))
    raise ValueError(
        f"{section}{first}={share} + {second}={other} exceed 1; they are shares of the "
        f"run's steps: give {flag} {rest} or less, or {otherwise}"
    )


def largest_divisor(number: int, *, most: int) -> int:
    """Returns the largest divisor of `number` that is at most `most`; both are positive
    integers."""
    small = [d for d in range(1, isqrt(number) + 1) if number % d == 0]
    return max(d for each in small for d in (each, number // each) if d <= most)


@cache
def _intervals(kind: type) -> dict[str, Interval]:
    hints = get_type_hints(kind, include_extras=True)
    return {
        name: extra
        for name, hint in hints.items()
        for extra in getattr(hint, "__metadata__", ())
        if isinstance(extra, Interval)
    }
