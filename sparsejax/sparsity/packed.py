"""2:4 matrices in the order in which kernels read them: that of Hopper's sparse tensor
cores, or the order that another set of kernels brings.

In Hopper's order values stay in logical order. The positions, two bits each, are put
together in words that each thread of a warpgroup loads as it needs them. Source: PTX
ISA, "Sparse matrix storage" of `wgmma.mma_async.sp`.
"""

import math
from collections.abc import Callable
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


def in_blocks(size: int) -> int:
    """Returns `size` rows or columns, rounded up to whole blocks."""
    return math.ceil(size / BLOCK) * BLOCK


@dataclass(frozen=True)
class Layout:
    """An order of values and metadata, with the functions that bring a matrix into it
    and back. Two layouts are equal only where their functions are the same objects, so
    that a module makes its layout once, outside of all functions."""

    name: str
    pack: Callable[[Compressed], "Packed"] = field(repr=False)
    """Returns the packed form of a matrix that is 2:4 along its last axis.
    Raises ValueError for a size that it has no room for."""
    unpack: Callable[["Packed"], Compressed] = field(repr=False)
    """Returns the matrix in logical order, 2:4 along its last axis."""


def _in_wgmma_order(c: Compressed) -> "Packed":
    kept = c.values.shape[-1]
    if kept % (BLOCK // 2):
        raise ValueError(
            f"k={2 * kept}, the size of the sparse axis, is not a multiple of {BLOCK}; "
            f"pad it to {in_blocks(2 * kept)}"
        )
    return Packed(c.values, _words(c.metadata))


def _from_wgmma_order(p: "Packed") -> Compressed:
    return Compressed(p.values, _positions(p), None, TWO_FOUR, -1)


WGMMA_ORDER = Layout("wgmma.mma_async.sp", _in_wgmma_order, _from_wgmma_order)
"""The order that Hopper's instruction of this name reads."""


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

    layout: Layout = field(default=WGMMA_ORDER, metadata={"static": True})
    """The order that values and metadata are in. Kernels refuse any but their own."""

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


def pack(c: Compressed, layout: Layout = WGMMA_ORDER) -> Packed:
    """Returns the packed form of `c`, or of its transpose where `c` is 2:4 along the
    last axis but one, in an order of kernels.

    Raises:
      ValueError: `c` is not 2:4, it is sparse along another axis than the last two, or
        the order has no room for its size: Hopper's takes multiples of 64 along the
        sparse axis.
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
    return layout.pack(Compressed(values, positions, None, TWO_FOUR, -1))


def unpack(p: Packed) -> Compressed:
    """Returns the matrix in logical order, sparse along the last axis."""
    return p.layout.unpack(p)


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
