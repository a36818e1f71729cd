"""Sparsity patterns as frozen types: N:M, V:N:M and block-diagonal."""

import re
from dataclasses import astuple, dataclass

from sparsejax.annotations import check_fields


@dataclass(frozen=True)
class NM:
    """The pattern that keeps `n` of every `m` consecutive entries along the reduction
    axis.

    Raises:
      ValueError: not ints, or not `1 <= n <= m <= 256` (positions are stored in one
        byte).
    """

    n: int
    m: int

    def __post_init__(self) -> None:
        check_fields(self)
        if not 1 <= self.n <= self.m:
            raise ValueError(
                f"n={self.n} is not in [1, {self.m}], required by an N:M pattern with "
                f"m={self.m}; keep at least one and at most m entries"
            )
        if self.m > 256:
            raise ValueError(
                f"m={self.m} is above 256, the groups whose positions fit in one byte; "
                f"use a smaller group"
            )

    @property
    def density(self) -> float:
        """The fraction of entries that are kept, n / m."""
        return self.n / self.m

    def check_divides(self, size: int, name: str) -> None:
        """Raises ValueError where `size`, the size of the axis `name`, is not whole
        groups."""
        _check_groups(self, size, name)


@dataclass(frozen=True)
class VNM:
    """The pattern that keeps four columns of every `v` x `m` block, and `n` of those
    four in each row. With n = 4, the pattern V:4:M, a row keeps all of the chosen
    columns: it is dense inside of them.

    Source: arXiv 2310.02065.

    Raises:
      ValueError: not ints, or not `v >= 1`, `1 <= n <= 4`, `4 <= m <= 65536`.
    """

    v: int
    n: int
    m: int

    def __post_init__(self) -> None:
        check_fields(self)
        if self.v < 1:
            raise ValueError(
                f"v={self.v} is not positive: it counts the rows that share their four "
                f"columns; use v=1 for a choice per row"
            )
        if not 1 <= self.n <= 4:
            raise ValueError(
                f"n={self.n} is not in [1, 4]: it counts what a row keeps of the four "
                f"chosen columns; sparse tensor cores need n=2, and n=4 keeps all four"
            )
        if not 4 <= self.m <= 65_536:
            raise ValueError(
                f"m={self.m} is not in [4, 65536]: four of m columns are chosen and "
                f"their offsets are stored in two bytes; m=4 is plain N:4"
            )

    @property
    def density(self) -> float:
        """The fraction of entries that are kept, n / m."""
        return self.n / self.m

    @property
    def dense_inside(self) -> bool:
        """Whether a row keeps all of its chosen columns, n = 4."""
        return self.n == 4

    @property
    def experts(self) -> int:
        """The number E of equal neuron clusters: `m = 4 E`.

        Raises:
          ValueError: `m` is not a multiple of four, so there are no equal clusters.
        """
        if self.m % 4:
            raise ValueError(
                f"m={self.m} is not a multiple of 4, required by a router, which keeps "
                f"4 columns of each m = 4 E; use m={-(-self.m // 4) * 4}"
            )
        return self.m // 4

    def check_divides(self, size: int, name: str) -> None:
        """Raises ValueError where `size`, the size of the axis `name`, is not whole
        blocks.

        The rows need no such check: the last block of rows may be short.
        """
        _check_groups(self, size, name)


@dataclass(frozen=True)
class BlockDiagonal:
    """A weight of `groups` equal blocks on its diagonal, and nothing outside of them:
    the inputs and the outputs are cut into so many groups, and group i of the outputs
    reads group i of the inputs alone.

    Raises:
      ValueError: not an int, or not `2 <= groups <= 256`.
    """

    groups: int

    def __post_init__(self) -> None:
        check_fields(self)
        if not 2 <= self.groups <= 256:
            raise ValueError(
                f"groups={self.groups} is not in [2, 256]: it counts the blocks on the "
                f"diagonal of a weight; one block is a dense weight, which needs no "
                f"pattern"
            )

    @property
    def density(self) -> float:
        """Kept fraction, 1 / groups."""
        return 1 / self.groups

    def check_divides(self, size: int, name: str) -> None:
        """Raises ValueError where the axis `name` of `size` is not equal groups."""
        if size % self.groups:
            padded = -(-size // self.groups) * self.groups
            raise ValueError(
                f"{name}={size} is not a multiple of the {self.groups} groups of "
                f"{self}; pad to {padded}, or use fewer groups"
            )

    def check_divides_residual(self, size: int, name: str) -> None:
        """Raises ValueError where the axis `name` of `size`, the width of the residual
        stream, is not equal shares that each group reads of each group."""
        square = self.groups**2
        if size % square:
            raise ValueError(
                f"{name}={size} is not a multiple of {self.groups}^2, required by "
                f"{self}: a group reads as many features of every group that is "
                f"written; pad to {-(-size // square) * square}, or use fewer groups"
            )


Pattern = NM | VNM
"""A pattern of which a mask keeps so many of every group of an axis."""

StaticPattern = NM | BlockDiagonal
"""A pattern of the entries that a weight has while it is trained sparse, chosen
once."""

DIAGONAL = "diagonal:"
"""The beginning of a block-diagonal pattern's name."""


def named_pattern(text: str) -> Pattern | BlockDiagonal:
    """Returns the pattern of a name: N:M as in "2:4", V:N:M as in "128:2:32", or
    diagonal:G as in "diagonal:4".

    Raises:
      ValueError: the text is none of them, or names a pattern that cannot be.
    """
    if re.fullmatch(rf"{DIAGONAL}\d{{1,9}}", text):
        return BlockDiagonal(int(text.removeprefix(DIAGONAL)))
    if not re.fullmatch(r"\d{1,9}(:\d{1,9}){1,2}", text):
        raise ValueError(
            f"{text!r} names no pattern; write N:M as '2:4', V:N:M as '128:2:32' (or "
            f"'128:4:32', dense inside an expert), or the number of blocks on a "
            f"diagonal as 'diagonal:4'"
        )
    numbers = [int(number) for number in text.split(":")]
    return NM(*numbers) if len(numbers) == 2 else VNM(*numbers)


def name_of(pattern: Pattern | BlockDiagonal) -> str:
    """Returns the name of a pattern, which `named_pattern` reads."""
    prefix = DIAGONAL if isinstance(pattern, BlockDiagonal) else ""
    return prefix + ":".join(map(str, astuple(pattern)))


TWO_FOUR = NM(2, 4)
"""The pattern that sparse tensor cores run."""


def _check_groups(pattern: Pattern, size: int, name: str) -> None:
    if size % pattern.m:
        padded = -(-size // pattern.m) * pattern.m
        smaller = " or use NM(2, 4)" if pattern.m > 4 and size % 4 == 0 else ""
        raise ValueError(
            f"{name}={size} is not a multiple of m={pattern.m}, required by {pattern}; "
            f"pad to {padded}{smaller}"
        )
