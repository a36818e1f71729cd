"""2:4 matrices in the order in which sparse tensor cores read them.

Values stay in logical order. The positions, two bits each, are put together in words
that each thread of a warpgroup loads as it needs them. Source: PTX ISA, "Sparse matrix
storage" of `wgmma.mma_async.sp`.
"""

import math
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, UInt8, UInt32

from sparsejax.sparsity.compressed import Compressed
from sparsejax.sparsity.patterns import NM, TWO_FOUR

BLOCK = 64
"""The number of rows, and of columns, whose positions are stored together."""

WGMMA_ORDER = "wgmma.mma_async.sp"
"""The name of the order that `pack` makes and that Hopper's instruction of this name
reads."""


def in_blocks(size: int) -> int:
    """Returns `size` rows or columns, rounded up to whole blocks."""
    return math.ceil(size / BLOCK) * BLOCK


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Packed:
    """A (..., rows, k) matrix that is 2:4 along k; a pytree. It takes 9 / 16 of the
    memory of dense bfloat16.

    Made by `pack`, or by a kernel; the constructor does not check.
    """

    values: Array
    """The kept entries in order, as in `Compressed`: (..., rows, k / 2)."""
    metadata: Array
    """The positions of the kept entries; in `WGMMA_ORDER` (..., ceil(rows / 64), k /
    64, 128) uint32, where thread t of a warpgroup reads word t.

    With w = t // 32, q = t % 32 // 4 and p = t % 4 the lower half of the word is for
    row 16 w + q of the block, the upper one for row 16 w + q + 8: columns 16 p to
    16 p + 15, four bits per group of four, the first position in the lower two.
    """

    layout: str = field(default=WGMMA_ORDER, metadata={"static": True})
    """The name of the order that values and metadata are in. Kernels refuse any but
    their own."""

    axis: ClassVar[int] = -1
    """The reduction axis, counted from the end as in `Compressed`."""
    pattern: ClassVar[NM] = TWO_FOUR

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the dense matrix."""
        return (*self.values.shape[:-1], 2 * self.values.shape[-1])

    @property
    def ndim(self) -> int:
        return self.values.ndim

    @property
    def dtype(self):
        return self.values.dtype


def pack(c: Compressed) -> Packed:
    """Returns the packed form of `c`, or of its transpose where `c` is 2:4 along the
    last axis but one.

    Raises:
      ValueError: `c` is not 2:4, it is sparse along another axis than the last two, or
        the size of its sparse axis is not a multiple of 64.
    """
    if c.pattern != TWO_FOUR:
        raise ValueError(f"pattern={c.pattern} is not 2:4, all that tensor cores read")
    if c.axis not in (-1, -2):
        raise ValueError(
            f"axis={c.axis} is none of the last two, those of a matrix; move the axis "
            f"that is 2:4 there and compress along it"
        )
    values, positions = c.values, c.metadata
    if c.axis == -2:
        values, positions = values.swapaxes(-1, -2), positions.swapaxes(-1, -2)
    kept = values.shape[-1]
    if kept % (BLOCK // 2):
        raise ValueError(
            f"k={2 * kept}, the size of the sparse axis, is not a multiple of {BLOCK}; "
            f"pad it to {in_blocks(2 * kept)}"
        )
    return Packed(values, _words(positions))


def unpack(p: Packed) -> Compressed:
    """Returns the matrix in logical order, sparse along the last axis.

    Raises:
      ValueError: the matrix is packed in another order than `WGMMA_ORDER`.
    """
    if p.layout != WGMMA_ORDER:
        raise ValueError(
            f"layout={p.layout!r} is not {WGMMA_ORDER!r}, the order that `pack` makes; "
            f"unpack it where it was packed"
        )
    return Compressed(p.values, _positions(p), None, TWO_FOUR, -1)


@partial(jax.jit, inline=True)
def _words(positions: UInt8[Array, "*batch rows half_k"]) -> UInt32[Array, "..."]:
    *batch, rows, kept = positions.shape
    row_blocks = math.ceil(rows / BLOCK)
    # (block, warp, half, row, block, quarter, eight positions)
    shape = (*batch, row_blocks, 4, 2, 8, 2 * kept // BLOCK, 4, 8)
    # Rows of the last block that are none have legal positions too: the first two.
    none = jnp.arange(kept, dtype=positions.dtype) % 2
    none = jnp.broadcast_to(none, (*batch, row_blocks * BLOCK - rows, kept))
    positions = jnp.concatenate([positions, none], axis=-2)
    positions = positions.reshape(shape).astype(jnp.uint32)
    halves = jnp.zeros(shape[:-1], jnp.uint32)
    for i in range(8):
        halves |= lax.index_in_dim(positions, i, -1, keepdims=False) << (2 * i)
    lower, upper = (
        lax.index_in_dim(halves, i, halves.ndim - 4, keepdims=False) for i in range(2)
    )
    words = jnp.moveaxis(lower | (upper << 16), -2, -4)
    return words.reshape(*words.shape[:-3], 128)


@partial(jax.jit, inline=True)
def _positions(p: Packed) -> UInt8[Array, "*batch rows half_k"]:
    *batch, row_blocks, k_blocks, _ = p.metadata.shape
    words = p.metadata.reshape(*batch, row_blocks, k_blocks, 4, 8, 4)
    halves = jnp.stack([words & 0xFFFF, words >> 16], axis=-3).astype(jnp.uint16)
    # (block, block, warp, half, row, quarter) to rows first
    halves = jnp.moveaxis(halves, -5, -2)
    # Without it XLA transposes positions, eight times as much.
    halves = lax.optimization_barrier(
        halves.reshape(*batch, row_blocks * BLOCK, k_blocks * 4, 1)
    )
    shifts = 2 * lax.broadcasted_iota(
        jnp.uint16, (*halves.shape[:-1], 8), halves.ndim - 1
    )
    positions = ((halves >> shifts) & 3).astype(jnp.uint8)
    rows = p.values.shape[-2]
    return positions.reshape(*batch, row_blocks * BLOCK, -1)[..., :rows, :]
