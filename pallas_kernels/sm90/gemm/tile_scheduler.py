"""The tile of a GEMM that a block works on, and where its operands are.

Everything here is traced in the kernel. A `Walk` has all tasks in their order; those
of one cluster of blocks are every so many of them (`OwnTasks`). Numbers are int32, or
Python integers where they are known before the kernel runs.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.sm90.gemm.split_k import RowParts


class Task(NamedTuple):
    """One tile of C, for all blocks of a cluster together, over all of k or a part."""

    row: Any
    """The index of the tile along m."""
    column: Any
    """The index of the tile along n."""
    expert: Any = None
    """The expert whose operands are multiplied, or a tuple of those that a row has the
    neurons of; None where there are no experts."""
    first_step: Any = 0
    """The step along k where the task begins, in the kernel's steps."""
    steps: Any = None
    """The number of steps that the task takes; None for all that k has."""
    index: Any = None
    """The number of the task among all tasks; None unless k is split, since several
    tasks then have the same tile."""
    part: Any = None
    """The part of its expert's k that the task sums, from 0; None unless k is split."""
    parts_after: Any = None
    """The number of parts of the same expert that follow it; None unless k is split."""


@dataclass(frozen=True)
class Tiling:
    """The cut of C (m, n) into tiles."""

    tile_m: int
    """The number of rows of C in the tile of a whole cluster."""
    tile_n: int
    """The number of columns of C in a tile."""
    rows: int
    """The number of tiles along m."""
    columns: int
    """The number of tiles along n."""
    grid_tile_width: int
    """The number of tiles along the minor axis that are visited before the next ones
    along the other."""
    grid_minor_dim: Literal["m", "n"]
    """The minor axis: the one along which successive tiles lie."""

    def snake(self, index) -> tuple[Any, Any]:
        """Returns (row, column) of the tile that is visited at a position of the order.
        Consecutive tiles are neighbours, so that the part of A or B that they share is
        still in the L2 cache."""
        return plgpu.planar_snake(
            index,
            (self.rows, self.columns),
            "mn".index(self.grid_minor_dim),
            self.grid_tile_width,
        )


@dataclass(frozen=True)
class Walk(ABC):
    """The tasks of a GEMM, in their order."""

    tiling: Tiling
    """The cut of C into tiles; with one C for each expert, of each of them."""

    @property
    @abstractmethod
    def count(self) -> Any:
        """The number of tasks."""

    @abstractmethod
    def task(self, index) -> Task:
        """Returns the task at a position of the order."""


@dataclass(frozen=True)
class EveryTile(Walk):
    """The tasks of a GEMM without experts: each is a tile of C over all of k."""

    @property
    def count(self) -> int:
        return self.tiling.rows * self.tiling.columns

    def task(self, index) -> Task:
        return Task(*self.tiling.snake(index))


@dataclass(frozen=True)
class ByExpert(Walk):
    """The tasks of a GEMM whose tokens, rows or columns of C, are sorted by expert, or
    by set of experts, in group tiles of one expert or set each. Only the first group
    tiles are used; all others have no tasks."""

    tile_expert: Any
    """A reference to the expert of each group tile, int32 (group tiles,), or to those
    of each set, (group tiles, experts of a set)."""
    used_tiles: Any
    """A reference to the number of used group tiles, int32 (1,)."""
    group_tile: int
    """The number of tokens of a group tile."""
    tokens_are_rows: bool
    """Whether the tokens are rows of C, or else columns."""

    @property
    def count(self) -> Any:
        return self._along * self._others

    def task(self, index) -> Task:
        """Returns a task; first come `grid_tile_width` tiles along the tokens, with all
        tiles along the other axis, then as many of the next tokens."""
        width = self.tiling.grid_tile_width
        block, rest = index // (width * self._others), index % (width * self._others)
        start = block * width
        width = jnp.minimum(width, self._along - start)
        # Not % and //: on a mesh these guard against zero by what no kernel can do.
        by_token, other = start + lax.rem(rest, width), lax.div(rest, width)
        group_tile = by_token * self._size // self.group_tile
        if len(self.tile_expert.shape) == 1:
            expert = self.tile_expert[group_tile]
        else:
            parts = range(self.tile_expert.shape[1])
            expert = tuple(self.tile_expert[group_tile, part] for part in parts)
        if self.tokens_are_rows:
            return Task(by_token, other, expert)
        return Task(other, by_token, expert)

    @property
    def _size(self) -> int:
        return self.tiling.tile_m if self.tokens_are_rows else self.tiling.tile_n

    @property
    def _others(self) -> int:
        return self.tiling.columns if self.tokens_are_rows else self.tiling.rows

    @property
    def _along(self) -> Any:
        return self.used_tiles[0] * (self.group_tile // self._size)


@dataclass(frozen=True)
class OverTokensOfExpert(Walk):
    """The tasks of weight gradients: one C for each expert, summed over its tokens. A
    task has a tile of one C and a part of its expert's tokens; see `split_k`."""

    parts: RowParts
    ends: Any
    """A reference to the first group tile after each expert's own, int32 (experts,)."""
    steps_of_tile: int
    """The number of the kernel's steps along k that a group tile has."""

    @property
    def count(self) -> Any:
        return self.parts.count(self.ends) * self.tiling.rows * self.tiling.columns

    def task(self, index) -> Task:
        tiles = self.tiling.rows * self.tiling.columns
        part = self.parts.part(self.ends, index // tiles)
        return Task(
            *self.tiling.snake(index % tiles),
            expert=part.expert,
            first_step=part.first * self.steps_of_tile,
            steps=part.length * self.steps_of_tile,
            index=index,
            part=part.number,
            parts_after=part.after,
        )


@dataclass(frozen=True)
class OwnTasks:
    """The tasks of one block: every `clusters`th task is its cluster's, and the block
    has its own rows or columns of these tiles."""

    walk: Walk
    clusters: int
    """The number of clusters of the grid."""
    blocks: int
    """The number of blocks of a cluster."""
    along: Literal["m", "n"]
    """The axis along which the blocks of a cluster lie side by side."""
    first: Any
    """The position of the cluster's first task."""

    @classmethod
    def of(
        cls, walk: Walk, clusters: int, blocks: int, along: Literal["m", "n"] = "m"
    ) -> "OwnTasks":
        """Returns the tasks of the block that runs this, in a grid with the axes "grid"
        and "cluster"."""
        return cls(walk, clusters, blocks, along, lax.axis_index("grid"))

    @property
    def count(self) -> Any:
        """The number of tasks of the block."""
        return (self.walk.count - self.first + self.clusters - 1) // self.clusters

    def task(self, index) -> tuple[Task, Any, Any]:
        """Returns one of the block's tasks, and (row, column) of C where the block's
        part of that tile begins."""
        task = self.walk.task(self.first + index * self.clusters)
        tiling = self.walk.tiling
        row, column = task.row * tiling.tile_m, task.column * tiling.tile_n
        block = lax.axis_index("cluster")
        if self.along == "m":
            return task, row + block * (tiling.tile_m // self.blocks), column
        return task, row, column + block * (tiling.tile_n // self.blocks)


def tiling_of(shape, config) -> Tiling:
    """Returns the cut of the C of a `Shape` into tiles by a `Config`."""
    tile_m = config.tile_m * config.cluster
    return Tiling(
        tile_m=tile_m,
        tile_n=config.tile_n,
        rows=pl.cdiv(shape.m, tile_m),
        columns=pl.cdiv(shape.n, config.tile_n),
        grid_tile_width=config.grid_tile_width,
        grid_minor_dim=config.grid_minor_dim,
    )
