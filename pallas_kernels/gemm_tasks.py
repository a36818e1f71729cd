"""Which tile of a GEMM a block works on, and where its operands are.

Everything here is traced in the kernel. A `Walk` has all tasks in their order, a
block's own ones are every so many of them (`OwnTasks`).
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.row_parts import RowParts


class Task(NamedTuple):
    """One tile of C, of a whole cluster."""

    row: Any
    """Of tiles of C along m."""
    column: Any
    """Of tiles along n."""
    expert: Any = None
    """None: there are no experts."""
    first_step: Any = 0
    """Along k, in steps as the kernel takes them."""
    steps: Any = None
    """How many; None: all that k has."""
    index: Any = None
    """Its own, where other tasks have the same tile: one for each part of k."""
    part: Any = None
    """Which of them it has."""
    parts_after: Any = None
    """How many follow."""


@dataclass(frozen=True)
class Tiling:
    """A C in tiles."""

    tile_m: int
    """Of a cluster."""
    tile_n: int
    rows: int
    """Of tiles along m."""
    columns: int
    width: int
    """Tiles of one axis that are visited together."""
    columns_first: bool

    def snake(self, index) -> tuple[Any, Any]:
        """Row and column of a tile: of neighbours in both axes, neighbours."""
        return plgpu.planar_snake(
            index, (self.rows, self.columns), int(self.columns_first), self.width
        )


@dataclass(frozen=True)
class Walk(ABC):
    """The order of the tasks."""

    tiling: Tiling
    """Of C."""

    @property
    @abstractmethod
    def count(self) -> Any:
        """Of all tasks."""

    @abstractmethod
    def task(self, index) -> Task:
        """One of them."""


@dataclass(frozen=True)
class EveryTile(Walk):
    """Of one GEMM."""

    @property
    def count(self) -> int:
        return self.tiling.rows * self.tiling.columns

    def task(self, index) -> Task:
        return Task(*self.tiling.snake(index))


@dataclass(frozen=True)
class ByExpert(Walk):
    """Rows or columns of C are tokens sorted by expert, in group tiles of one expert
    each; of these only the first so many are used."""

    tile_expert: Any
    """Of each group tile."""
    used_tiles: Any
    """One number."""
    group_tile: int
    """Tokens of a group tile."""
    tokens_are_rows: bool
    """Of C, else columns."""

    @property
    def count(self) -> Any:
        return self._along * self._others

    def task(self, index) -> Task:
        """`width` tiles along the tokens with all of the other axis, then the next."""
        width = self.tiling.width
        block, rest = index // (width * self._others), index % (width * self._others)
        start = block * width
        width = jnp.minimum(width, self._along - start)
        # Not % and //: on a mesh these guard against zero by what no kernel can do.
        by_token, other = start + lax.rem(rest, width), lax.div(rest, width)
        expert = self.tile_expert[by_token * self._size // self.group_tile]
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
    """One C for each expert, summed over its tokens: ranges of k, see `row_parts`."""

    parts: RowParts
    ends: Any
    """Of each expert the first group tile after its own."""
    steps_of_tile: int
    """Of the kernel along k, in a group tile."""

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
    """Those of a block: its cluster has every `clusters`th, itself its rows of them."""

    walk: Walk
    clusters: int
    """Of the grid."""
    blocks: int
    """Of a cluster, side by side along m."""
    first: Any
    """The cluster's first task."""

    @classmethod
    def of(cls, walk: Walk, clusters: int, blocks: int) -> "OwnTasks":
        """Of the block that runs this, in a grid ("grid", "cluster")."""
        return cls(walk, clusters, blocks, lax.axis_index("grid"))

    @property
    def count(self) -> Any:
        return (self.walk.count - self.first + self.clusters - 1) // self.clusters

    def task(self, index) -> tuple[Task, Any, Any]:
        """One of them; row and column where the block's part of C begins."""
        task = self.walk.task(self.first + index * self.clusters)
        tiling = self.walk.tiling
        row = task.row * self.blocks + lax.axis_index("cluster")
        tile_m = tiling.tile_m // self.blocks
        return task, row * tile_m, task.column * tiling.tile_n


def tiling_of(shape, config) -> Tiling:
    """How `config` cuts the C of `shape` up."""
    tile_m = config.tile_m * config.cluster
    return Tiling(
        tile_m=tile_m,
        tile_n=config.tile_n,
        rows=pl.cdiv(shape.m, tile_m),
        columns=pl.cdiv(shape.n, config.tile_n),
        width=config.width,
        columns_first=config.columns_first,
    )
