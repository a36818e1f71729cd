"""How the rows of experts are cut up where a GEMM sums over them, a C for each expert.

If each task was a tile of C over all rows of its expert, one with most of the rows and
fewer tiles than there are multiprocessors would leave these idle. So a task is a tile
over the rows of a part: an expert with several equal shares has several parts. They are
added where the tile lies, in their order (`Turns`), so the same groups give the same
bits, whichever block comes first.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Int

TILE = 256
"""Rows and columns of C that two multiprocessors have at a time, near enough: bits must
not depend on how a config cuts C up."""

WRITE_ROWS = 700
"""In the time that it takes to write a tile, about so many rows are multiplied: 7 us on
an H200."""

MOST_PARTS = 8
"""Of an expert that has all rows: each waits for the one before it."""


class Parts(NamedTuple):
    """Of all experts, in the order of the rows."""

    table: Int[Array, "5 parts"]
    """Of each: the expert, first group tile, group tiles, number among those of the
    expert, how many of these follow."""
    used: Int[Array, "1"]
    """How many there are, at least one of each expert."""


def part_size(
    m: int, n: int, tiles: int, group_tile: int, experts: int, multiprocessors: int
) -> int:
    """How long a part is, in group tiles, where C is (m, n) and `tiles` group tiles are
    distributed over the experts.

    An equal share, or longer where C alone has tiles for all multiprocessors: then what
    takes the fewest rounds if one expert has all rows, or half of them.
    """
    tiles_of_c = pl.cdiv(m, TILE) * pl.cdiv(n, TILE)
    at_once = max(1, multiprocessors // 2)

    def time(parts: int, rows: float) -> float:
        rounds = pl.cdiv(parts * tiles_of_c, at_once)
        return rounds * (rows / parts + WRITE_ROWS)

    def cost(parts: int) -> float:
        rows = tiles * group_tile
        return time(parts, rows) + 2 * time(pl.cdiv(parts, 2), rows / 2)

    parts = min(range(1, MOST_PARTS + 1), key=cost)
    return pl.cdiv(tiles, min(parts, experts))


def cut_rows(ends: Int[Array, " experts"], tiles: int, size: int) -> Parts:
    """An expert's rows as equal parts of about `size` group tiles.

    Args:
      ends: of each expert the first group tile after its own.
      tiles: no expert ends after so many.
    """
    experts = ends.shape[0]
    first = jnp.pad(ends[:-1], (1, 0))
    own = ends - first
    counts = jnp.maximum(1, (2 * own + size) // (2 * size))
    last = jnp.cumsum(counts, dtype=jnp.int32)
    splits = (2 * tiles + size) // (2 * size) > 1
    index = jnp.arange(experts + splits * (tiles // size), dtype=jnp.int32)
    expert = jnp.sum(index[:, None] >= last[None], axis=1, dtype=jnp.int32)
    expert = jnp.minimum(expert, experts - 1)
    first, own, counts, last = (x[expert] for x in (first, own, counts, last))
    number = index - (last - counts)
    begin, end = (own * (number + i) // counts for i in range(2))
    table = [expert, first + begin, end - begin, number, counts - 1 - number]
    return Parts(jnp.stack(table).astype(jnp.int32), last[-1:])


@dataclass(frozen=True)
class Turns:
    """Of the parts of a tile of C; in the kernel. A flag says that a part is added.

    A task waits for an earlier one only, and the grid must have no more blocks than can
    run at a time: then some block can always go on.
    """

    flags: Any = None
    """(tasks, blocks of a cluster, warpgroups); None where nothing has two parts."""
    tiles_of_c: int = 0

    @classmethod
    def of(
        cls, parts: int, experts: int, tiles_of_c: int, blocks: int, warpgroups: int
    ) -> "Turns":
        """Of a grid in which every warpgroup writes rows of C of its own."""
        if parts == experts:
            return cls()
        shape = (parts * tiles_of_c, blocks, warpgroups)
        return cls(pl.get_global(plgpu.SemaphoreType.REGULAR(shape)), tiles_of_c)

    def adds(self, task) -> Any:
        """Whether the task adds to C, or else writes it; None where none does."""
        return None if self.flags is None else task.part > 0

    def wait(self, task) -> None:
        """Until the warpgroup's part of C has all parts before the task's."""
        if self.flags is None:
            return

        @pl.when(task.part > 0)
        def _():
            pl.semaphore_wait(self._flag(task.index - self.tiles_of_c))

    def done(self, task) -> None:
        """The warpgroup has issued the last write of its task."""
        if self.flags is None:
            return

        @pl.when(task.parts_after > 0)
        def _():
            plgpu.wait_smem_to_gmem(0)
            pl.semaphore_signal(self._flag(task.index))

    def _flag(self, index):
        own = lax.axis_index("cluster"), lax.axis_index("warpgroup")
        return self.flags.at[index, *own]
