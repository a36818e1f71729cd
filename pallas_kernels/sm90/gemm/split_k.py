"""Split-k for weight gradients of experts: C[e] is a sum over the rows of expert e.

If each task was a tile of C over all rows of its expert, an expert with most of the
rows and fewer tiles than there are multiprocessors would leave most of these idle. So a
task is a tile over a part of the rows: an expert that has the rows of several equal
shares has several parts. Their sums are added where the tile lies, in the order of the
parts (`OrderedReduction`), so that the same groups give the same bits, whichever block
comes first.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import nvvm

TILE = 256
"""The nominal rows and columns of a tile, by which the number of parts is chosen. It is
fixed, so that results do not depend on the config."""

MOST_PARTS = 8
"""The most parts that all rows are cut into: each part waits for the one before it."""


class Part(NamedTuple):
    """Consecutive rows of one expert, which one task sums over."""

    expert: Any
    """The expert that the rows belong to."""
    first: Any
    """The index of the group tile where the part begins."""
    length: Any
    """The number of group tiles of the part."""
    number: Any
    """The number of the part among the parts of its expert, from 0."""
    after: Any
    """The number of parts of the same expert that follow it."""


@dataclass(frozen=True)
class RowParts:
    """The parts of all experts, in the order of the rows. An expert's parts have about
    equal lengths, near `size`; every expert has one part at least.

    `ends`, which methods take, is int32 (experts,): the first group tile after each
    expert's own.
    """

    experts: int
    """The number of experts."""
    tiles: int
    """The number of group tiles that all rows fill."""
    size: int
    """The approximate length of a part, in group tiles."""

    @classmethod
    def of(
        cls,
        m: int,
        n: int,
        tiles: int,
        experts: int,
        multiprocessors: int,
        *,
        parts_of_share: int = 1,
    ) -> "RowParts":
        """Returns the parts for C (m, n) of each expert.

        Experts are cut up only if C has tiles for at most half of the multiprocessors.
        Then all rows together are cut into twice as many parts as fill the GPU, so that
        one expert with half of the rows still fills it, but into no parts shorter than
        an equal share. Where C had tiles for more than half, adding the parts took what
        the idle multiprocessors gained (H200).

        With two or more `parts_of_share` an expert with an equal share of the rows has
        as many parts. Where the tiles of all experts need a second round of the
        multiprocessors for a few of them, the last round is then shorter.
        """
        tiles_of_c = pl.cdiv(m, TILE) * pl.cdiv(n, TILE)
        at_once = multiprocessors // 2
        parts = 1
        if 2 * tiles_of_c <= at_once:
            parts = min(2 * at_once // tiles_of_c, MOST_PARTS, experts)
        if parts_of_share > 1:
            parts = max(parts, parts_of_share * experts)
        return cls(experts, tiles, pl.cdiv(tiles, parts))

    @property
    def may_cut(self) -> bool:
        """Whether any expert may have two parts or more."""
        return self._of_expert(self.tiles) > 1

    @property
    def most(self) -> int:
        """The greatest number of parts that all experts together may have."""
        return self.experts + self.may_cut * (self.tiles // self.size)

    def count(self, ends) -> Any:
        """Returns how many parts all experts together have."""
        if not self.may_cut:
            return self.experts

        def add(expert, count):
            _, own = _rows(ends, expert)
            return count + jnp.maximum(1, self._of_expert(own))

        return lax.fori_loop(0, self.experts, add, jnp.int32(0))

    def part(self, ends, index) -> Part:
        """Returns the part with a number among those of all experts."""
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
        """Returns how many parts an expert with `own` group tiles has, to the nearest
        whole number: possibly 0, which callers raise to 1."""
        return (2 * own + self.size) // (2 * self.size)


@plgpu.inline_mgpu(arg_types=())
def order_copies(_) -> None:
    """Makes what a warpgroup has waited for visible to its next copies.

    Copies by TMA go through another proxy of memory than the threads' own accesses. So
    that a thread has seen a flag does not order a copy after it, and this fence does.
    """
    nvvm.fence_proxy(nvvm.ProxyKind.async_global)


def _rows(ends, expert) -> tuple[Any, Any]:
    """Returns (first group tile, number of group tiles) of an expert."""
    first = jnp.where(expert > 0, ends[jnp.maximum(expert - 1, 0)], 0)
    return first, ends[expert] - first


@dataclass(frozen=True)
class OrderedReduction:
    """The addition of the parts of a tile of C in their order, inside the kernel. The
    first part writes the tile, each later one waits for the flag of the part before it
    and adds.

    A task waits for an earlier task only, and the grid must have no more blocks than
    can run at a time: then some block can always go on.
    """

    flags: Any = None
    """The semaphores in main memory, (tasks, blocks of a cluster, warpgroups), which
    say that a part has been added; None where no tile has two parts."""
    tiles_of_c: int = 0
    """The number of tiles of one C: as many tasks lie between two parts of one tile."""

    @classmethod
    def of(
        cls, parts: RowParts, tiles_of_c: int, blocks: int, warpgroups: int
    ) -> "OrderedReduction":
        """Returns the reduction for a grid of clusters with so many `blocks`, in which
        each of a block's `warpgroups` writes rows of C of its own."""
        if not parts.may_cut:
            return cls()
        shape = (parts.most * tiles_of_c, blocks, warpgroups)
        return cls(pl.get_global(plgpu.SemaphoreType.REGULAR(shape)), tiles_of_c)

    def adds(self, task) -> Any:
        """Returns whether a task adds to C instead of writing it; None where no task
        adds."""
        return None if self.flags is None else task.part > 0

    def wait(self, task) -> None:
        """Waits until the warpgroup's rows of C hold all parts before the task's."""
        if self.flags is None:
            return

        @pl.when(task.part > 0)
        def _():
            pl.semaphore_wait(self._flag(task.index - self.tiles_of_c))
            order_copies()

    def done(self, task) -> None:
        """Lets the next part of the same tile go on. Called when the warpgroup has
        issued the last write of its task; waits until the writes have arrived."""
        if self.flags is None:
            return

        @pl.when(task.parts_after > 0)
        def _():
            plgpu.wait_smem_to_gmem(0)
            pl.semaphore_signal(self._flag(task.index))

    def _flag(self, index):
        own = lax.axis_index("cluster"), lax.axis_index("warpgroup")
        return self.flags.at[index, *own]
