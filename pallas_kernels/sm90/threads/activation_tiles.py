"""The tiles, 64 features wide, that the kernels of 2:4 activations work on.

This file says which activations may be packed, runs a kernel on every tile, and finds a
tile in memory.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith
from jaxtyping import Array, Int

from pallas_kernels.sm90.threads import prune_2to4
from pallas_kernels.sm90.threads.prune_2to4 import TILE, constant

_SCALAR = plgpu.Layout.WG_SPLAT


class ByExpert(NamedTuple):
    """Rows that are tokens of a matrix, each with the features of its expert alone. The
    matrix has the features of all experts, equally many for each, one after the
    other."""

    row_token: Int[Array, " rows"] | None
    """The token of each row, int32, -1 for a row of zeros. None: the matrix itself has
    these rows."""
    tile_expert: Int[Array, " tiles"]
    """The expert of each group tile, int32; a group tile is a multiple of 64 rows."""
    experts: int

    @property
    def arrays(self) -> tuple[jax.Array, ...]:
        """The arrays that a kernel reads, int32."""
        tile_expert = self.tile_expert.astype(jnp.int32)
        if self.row_token is None:
            return (tile_expert,)
        return tile_expert, self.row_token.astype(jnp.int32)

    def check(self, rows: int) -> None:
        """Raises ValueError where blocks of 64 rows would have two experts."""
        tiles = self.tile_expert.size
        if rows % (TILE * tiles):
            raise ValueError(
                f"{rows} rows in {tiles} group tiles: a group tile must be a multiple "
                f"of {TILE} rows"
            )


class Source(NamedTuple):
    """The place where a kernel finds a block of 64 rows of a `ByExpert`."""

    row_token: ir.Value | None
    expert: ir.Value
    """The expert of the block's rows."""

    @classmethod
    def of_block(
        cls, arrays: Sequence[ir.Value], row_block: ir.Value, rows: int
    ) -> "Source":
        """Returns the place of a block's rows, found in the `ByExpert.arrays` of `rows`
        rows."""
        tile_expert, *row_token = arrays
        (tiles,) = ir.MemRefType(tile_expert.type).shape
        tile = arith.divui(row_block, constant(rows // tiles // TILE))
        (expert,) = prune_2to4.load(tile_expert, None, tile, 1)
        return cls(row_token[0] if row_token else None, expert)

    def token(self, row: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Returns (token index, is_valid) of a row; index 0 where the row is
        padding."""
        assert self.row_token is not None
        (token,) = prune_2to4.load(self.row_token, None, row, 1)
        exists = prune_2to4.below(constant(-1), token)
        return arith.select(exists, token, constant(0)), exists

    def feature(self, feature: ir.Value, features: int) -> ir.Value:
        """Returns the index, among the features of all experts, of one of the
        `features` that this expert has."""
        return arith.addi(arith.muli(self.expert, constant(features)), feature)


def why_unsupported(features: int, dtype: str) -> str | None:
    """Returns why activations cannot be packed, whatever the number of tokens, or None
    where they can."""
    if features % TILE or not features:
        return f"{features} features are not a multiple of {TILE}"
    if dtype not in ("bfloat16", "float16"):
        return f"packs activations in bfloat16 and float16, not {dtype}"
    return None


def check(features: int, dtype: jnp.dtype) -> None:
    """Raises ValueError where `why_unsupported` has a reason."""
    if reason := why_unsupported(features, str(dtype)):
        raise ValueError(reason)


def on_tiles(
    kernel,
    grid: tuple[int, int],
    out_type: tuple,
    *operands,
    name: str,
    scratch: tuple = (),
):
    """Runs `kernel` on every tile of a grid, (blocks of tokens, blocks of 64 features),
    and returns its results. How many tokens a block has is up to the kernel.

    The tiles are launched in a row: along the second axis of a launch there may be no
    more than 65,535 blocks, 4.19 million tokens.
    """
    tokens, features = grid
    return plgpu.kernel(
        partial(_on_tile, kernel, features, len(operands) + len(out_type)),
        out_type=out_type,
        scratch_types=scratch,
        grid=(tokens * features,),
        grid_names=("tile",),
        kernel_name=f"activations_{name}",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup
        ),
    )(*operands)


def _on_tile(kernel, features: int, arrays: int, *refs) -> None:
    tile = lax.axis_index("tile")
    blocks = lax.div(tile, jnp.int32(features)), lax.rem(tile, jnp.int32(features))
    scratch = [plgpu.RefType()] * (len(refs) - arrays)

    @plgpu.inline_mgpu(
        arg_types=(_SCALAR, _SCALAR, *[plgpu.RefType()] * arrays, *scratch)
    )
    def run(_, token_block, feature_block, *refs):
        kernel(token_block.registers.item(), feature_block.registers.item(), *refs)

    run(*blocks, *refs)


def half(column: ir.Value) -> ir.Value:
    """Returns the column among the kept values that belongs to a column of the dense
    matrix: half of it."""
    return arith.divui(column, constant(2))


def tile_start(row_block: ir.Value, k_block: ir.Value, metadata: ir.Value) -> ir.Value:
    """Returns the index of a tile's first word of metadata."""
    _, k_blocks, words = ir.MemRefType(metadata.type).shape
    tile = arith.addi(arith.muli(row_block, constant(k_blocks)), k_block)
    return arith.muli(tile, constant(words))


def words_of_row(metadata: ir.Value) -> int:
    """Returns how many words of metadata a row of tiles has."""
    _, k_blocks, words = ir.MemRefType(metadata.type).shape
    return k_blocks * words
