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
from jaxlib.mlir.dialects import nvvm

TILE = 256
"""Rows and columns of C that two multiprocessors have at a time, near enough: bits must
not depend on how a config cuts C up."""

MOST_PARTS = 8
"""Of all rows: each waits for the one before it."""


class Part(NamedTuple):
    """Rows of one expert."""

    expert: Any
    first: Any
    """Group tile."""
    length: Any
    """In group tiles."""
    number: Any
    """Of the expert's parts."""
    after: Any
    """How many of these follow."""


@dataclass(frozen=True)
class RowParts:
    """Of all experts, in the order of the rows. Those of one expert are of about one
    length, `size`; each has one at least.

    Where `ends` is asked for, it has of each expert the first group tile after its own.
    """

    experts: int
    tiles: int
    """Group tiles of all rows."""
    size: int
    """In group tiles."""

    @classmethod
    def of(
        cls, m: int, n: int, tiles: int, experts: int, multiprocessors: int
    ) -> "RowParts":
        """Where C is (m, n): all rows together are one part, unless C has tiles for
        half of the multiprocessors or fewer.

        Then twice as many as fill them, so that half of the rows do so too, but none
        shorter than an equal share. Where C had tiles for more than half, adding took
        what the others gained (H200).
        """
        tiles_of_c = pl.cdiv(m, TILE) * pl.cdiv(n, TILE)
        at_once = multiprocessors // 2
        parts = 1
        if 2 * tiles_of_c <= at_once:
            parts = min(2 * at_once // tiles_of_c, MOST_PARTS, experts)
        return cls(experts, tiles, pl.cdiv(tiles, parts))

    @property
    def may_cut(self) -> bool:
        """Whether an expert may have two."""
        return self._of_expert(self.tiles) > 1

    @property
    def most(self) -> int:
        """How many there may be."""
        return self.experts + self.may_cut * (self.tiles // self.size)

    def count(self, ends) -> Any:
        """How many there are."""
        if not self.may_cut:
            return self.experts

        def add(expert, count):
            _, own = _rows(ends, expert)
            return count + jnp.maximum(1, self._of_expert(own))

        return lax.fori_loop(0, self.experts, add, jnp.int32(0))

    def part(self, ends, index) -> Part:
        """One of them."""
        if not self.may_cut:
            return Part(index, *_rows(ends, index), jnp.int32(0), jnp.int32(0))

        def look(expert, found):
            before, *_ = found
            _, own = _rows(ends, expert)
            count = jnp.maximum(1, self._of_expert(own))
            here = (before <= index) & (index < before + count)
            new = expert, index - before, count
            kept = (jnp.where(here, x, y) for x, y in zip(new, found[1:], strict=True))
            return before + count, *kept

        start = (jnp.int32(0),) * 4
        _, expert, number, count = lax.fori_loop(0, self.experts, look, start)
        first, own = _rows(ends, expert)
        # Not //: on a mesh it guards against zero by what no kernel can do.
        begin, end = (lax.div(own * (number + i), count) for i in range(2))
        return Part(expert, first + begin, end - begin, number, count - 1 - number)

    def _of_expert(self, own):
        """Parts of an expert with so many group tiles, to the nearest number."""
        return (2 * own + self.size) // (2 * self.size)


@plgpu.inline_mgpu(arg_types=())
def order_copies(_) -> None:
    """What a warpgroup's threads know of main memory its next copies to it know too:
    they are of another proxy, to which a flag that was waited for says nothing."""
    nvvm.fence_proxy(nvvm.ProxyKind.async_global)


def _rows(ends, expert) -> tuple[Any, Any]:
    """An expert's first group tile, and how many it has."""
    first = jnp.where(expert > 0, ends[jnp.maximum(expert - 1, 0)], 0)
    return first, ends[expert] - first


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
        cls, parts: RowParts, tiles_of_c: int, blocks: int, warpgroups: int
    ) -> "Turns":
        """Of a grid in which every warpgroup writes rows of C of its own."""
        if not parts.may_cut:
            return cls()
        shape = (parts.most * tiles_of_c, blocks, warpgroups)
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
            order_copies()

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
