"""Compressed arrays: the kept values and their positions, in logical order."""

import operator
from dataclasses import dataclass, field
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Num, UInt8

from sparsejax.annotations import check_value
from sparsejax.sparsity.masks import (
    group_ranks,
    magnitude_mask,
    repeat_row_blocks,
    split_groups,
    split_row_blocks,
    vnm_mask,
)
from sparsejax.sparsity.patterns import NM, TWO_FOUR, VNM, Pattern


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Compressed:
    """An N:M or V:N:M array without its pruned entries; a pytree.

    Made by `compress`, which checks; the constructor does not, because transformations
    of JAX build pytrees of anything. The dense shape is read from `values`, so that
    stacking, `vmap` and `scan` over leading axes need no book-keeping.
    """

    values: Array
    """The kept entries in order; the dense shape, but `axis` has the size K n / m."""
    metadata: Array
    """The position of each kept entry in its group of m (V:N:M: among the four chosen
    columns), uint8, in the shape of `values`."""
    columns: Array | None
    """The chosen columns of a V:N:M array as ascending offsets in their block, (...,
    ceil(rows / v), cols / m, 4) uint16; None of an N:M array."""
    pattern: Pattern = field(metadata={"static": True})
    axis: int = field(metadata={"static": True})
    """The reduction axis, counted from the end: always negative."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The dense shape."""
        shape = list(self.values.shape)
        shape[self.axis] = shape[self.axis] // self.pattern.n * self.pattern.m
        return tuple(shape)

    @property
    def ndim(self) -> int:
        return self.values.ndim

    @property
    def dtype(self):
        return self.values.dtype

    @property
    def density(self) -> float:
        """The fraction of entries that are kept."""
        return self.pattern.density


def compress(
    w: Num[Array, "..."],
    pattern: Pattern = TWO_FOUR,
    *,
    mask: Bool[Array, "..."] | None = None,
    axis: int = -1,
) -> Compressed:
    """Returns the entries of `w` where `mask` is True, with their positions.

    Kept values are copied bit for bit, except that XLA's CPU backend flushes bfloat16
    subnormals. There is no sort and no gather, so that XLA fuses it.

    Args:
      w: any shape; for V:N:M (..., rows, cols), leading axes independent.
      pattern: N:M or V:N:M.
      mask: exactly n per group, and for V:N:M at most four columns per block. None:
        `magnitude_mask` or `vnm_mask`. A concrete mask is checked, which waits for the
        device; a traced one is trusted, and a wrong one gives wrong values.
      axis: the reduction axis; V:N:M only along the last.
    Returns:
      the compressed array.
    Raises:
      ValueError: `pattern` is no pattern, a size is not a multiple of m, the mask does
        not fit `w` or the pattern, or V:N:M is asked for along another axis than the
        last.
    Source: 2:4 as in sparse tensor cores; V:N:M as in arXiv 2310.02065.
    """
    check_value("pattern", pattern, Pattern)
    axis = operator.index(axis) % w.ndim - w.ndim
    if mask is not None and mask.shape != w.shape:
        raise ValueError(
            f"mask has shape {mask.shape}, not {w.shape} of w; True = kept, one entry "
            f"for each of w"
        )
    if isinstance(pattern, VNM):
        if axis != -1:
            raise ValueError(
                f"axis={axis} is not the last, required by {pattern}; transpose w"
            )
        given = mask is not None
        mask = mask if mask is not None else vnm_mask(w, pattern)
        return _compress_vnm(w, mask, pattern, check=given)
    if mask is None:
        mask = magnitude_mask(w, pattern, axis=axis)
    else:
        _check_counts(split_groups(mask, pattern, axis), pattern)
    return _compress_nm(w, mask, pattern, axis)


@partial(jax.jit, inline=True)
def decompress(c: Compressed) -> Num[Array, "..."]:
    """Returns the dense array: kept values bit for bit, exactly +0.0 elsewhere.

    It is built of comparisons, so that XLA fuses it into what reads it, and is
    differentiable in `c.values`.
    """
    pattern = c.pattern
    if isinstance(pattern, NM):
        kept = NM(pattern.n, pattern.n)
        values, group_axis = split_groups(c.values, kept, c.axis)
        positions, _ = split_groups(c.metadata, kept, c.axis)
        dense = _unpack(values, positions.astype(jnp.int32), pattern.m, group_axis)
        return dense.reshape(c.shape)
    rows, kept_cols = c.values.shape[-2:]
    grouped = (*c.values.shape[:-1], kept_cols // pattern.n, pattern.n)
    values, metadata = c.values.reshape(grouped), c.metadata.reshape(grouped)
    assert c.columns is not None
    columns = repeat_row_blocks(c.columns, pattern, rows).astype(jnp.int32)
    offsets = jnp.zeros(grouped, jnp.int32)
    for position in range(4):
        offsets = jnp.where(
            metadata == position, columns[..., position : position + 1], offsets
        )
    return _unpack(values, offsets, pattern.m, len(grouped) - 1).reshape(c.shape)


def pack_positions(
    metadata: UInt8[Array, "..."], *, axis: int = -1
) -> UInt8[Array, "..."]:
    """Returns the positions 0 to 3 as two bits each, four consecutive ones along `axis`
    per byte.

    The first of four is in the lowest bits. An axis of size K becomes ceil(K / 4). This
    is what a 2:4 weight needs on the wire: with its kept bfloat16 values 9 / 16 of the
    dense weight.
    """
    axis = axis % metadata.ndim
    fill = [(0, 0)] * metadata.ndim
    fill[axis] = (0, -metadata.shape[axis] % 4)
    fours, four_axis = split_groups(jnp.pad(metadata, fill), NM(4, 4), axis)
    packed = jnp.zeros((), jnp.uint8)
    for j in range(4):
        member = lax.index_in_dim(fours, j, four_axis, keepdims=False)
        packed = packed | (member << (2 * j))
    return packed


def unpack_positions(
    packed: UInt8[Array, "..."], size: int, *, axis: int = -1
) -> UInt8[Array, "..."]:
    """Returns the positions that `pack_positions` has packed, for an axis of `size`."""
    axis = axis % packed.ndim
    members = [(packed >> (2 * j)) & 3 for j in range(4)]
    fours = jnp.stack(members, axis=axis + 1)
    shape = (*packed.shape[:axis], -1, *packed.shape[axis + 1 :])
    return lax.slice_in_dim(fours.reshape(shape), 0, size, axis=axis)


@partial(jax.jit, static_argnames=("pattern", "axis"), inline=True)
def _compress_nm(w, mask, pattern: NM, axis: int) -> Compressed:
    shape = list(w.shape)
    shape[axis] = shape[axis] // pattern.m * pattern.n
    grouped, group_axis = split_groups(w, pattern, axis)
    kept, _ = split_groups(mask, pattern, axis)
    position = lax.broadcasted_iota(jnp.int32, grouped.shape, group_axis)
    values, metadata = (
        _pack(x, kept, pattern.n, group_axis).reshape(shape)
        for x in (grouped, position.astype(jnp.uint8))
    )
    return Compressed(values, metadata, None, pattern, axis)


def _compress_vnm(w, mask, pattern: VNM, *, check: bool) -> Compressed:
    if w.ndim < 2:
        raise ValueError(
            f"w has shape {w.shape}; a V:N:M block needs rows and columns, so give at "
            f"least two axes"
        )
    *batch, rows, cols = w.shape
    pattern.check_divides(cols, "cols")
    grouped = (*batch, rows, cols // pattern.m, pattern.m)
    kept = mask.reshape(grouped)
    last = len(grouped) - 1
    used = jnp.any(split_row_blocks(mask, pattern), axis=-3)
    if check:
        _check_counts((kept, last), pattern)
        _check_columns(used, pattern)
    # Where fewer than four columns are used, the lowest unused ones fill up.
    chosen = group_ranks(used, last) < 4
    offset = lax.broadcasted_iota(jnp.int32, chosen.shape, last).astype(jnp.uint16)
    columns = _pack(offset, chosen, 4, last)
    kept_cols = cols // pattern.m * pattern.n
    position = jnp.cumsum(chosen, axis=-1, dtype=jnp.int32) - 1
    position = repeat_row_blocks(position, pattern, rows).astype(jnp.uint8)
    values, metadata = (
        _pack(x, kept, pattern.n, last).reshape(*batch, rows, kept_cols)
        for x in (w.reshape(grouped), position)
    )
    return Compressed(values, metadata, columns, pattern, -1)


@partial(jax.jit, static_argnames=("n", "axis"), inline=True)
def _pack(x, kept, n: int, axis: int):
    """Returns the n kept entries of every group along `axis`, in order."""
    shape = list(x.shape)
    shape[axis] = n
    slot = lax.broadcasted_iota(jnp.int32, shape, axis)
    packed = jnp.zeros(shape, x.dtype)
    members = [
        lax.slice_in_dim(kept, j, j + 1, axis=axis) for j in range(x.shape[axis])
    ]
    before = jnp.zeros(members[0].shape, jnp.int32)
    # Selects, not sums: 0.0 + -0.0 would lose the sign.
    for j, member in enumerate(members):
        entry = lax.slice_in_dim(x, j, j + 1, axis=axis)
        packed = jnp.where(member & (before == slot), entry, packed)
        before += member
    return packed


@partial(jax.jit, static_argnames=("m", "axis"), inline=True)
def _unpack(packed, positions, m: int, axis: int):
    """Returns groups of m along `axis` that hold the packed entries at their positions,
    and zeros elsewhere."""
    shape = list(packed.shape)
    shape[axis] = m
    index = lax.broadcasted_iota(jnp.int32, shape, axis)
    dense = jnp.zeros(shape, packed.dtype)
    for j in range(packed.shape[axis]):
        entry = lax.slice_in_dim(packed, j, j + 1, axis=axis)
        position = lax.slice_in_dim(positions, j, j + 1, axis=axis)
        dense = jnp.where(position == index, entry, dense)
    return dense


def _check_counts(grouped: tuple[Array, int], pattern: Pattern) -> None:
    mask, axis = grouped
    if isinstance(mask, jax.core.Tracer):
        return
    counts = np.sum(np.asarray(mask), axis=axis)
    if (wrong := np.argwhere(counts != pattern.n)).size:
        first = tuple(int(i) for i in wrong[0])
        raise ValueError(
            f"mask keeps {counts[first]} entries in group {first}, not n={pattern.n}, "
            f"required by {pattern}; use magnitude_mask, nm_mask or vnm_mask"
        )


def _check_columns(used: Array, pattern: VNM) -> None:
    if isinstance(used, jax.core.Tracer):
        return
    counts = np.sum(np.asarray(used), axis=-1)
    if (wrong := np.argwhere(counts > 4)).size:
        first = tuple(int(i) for i in wrong[0])
        raise ValueError(
            f"mask uses {counts[first]} columns in block {first}, more than the four "
            f"of {pattern}; choose the columns per block of v rows, as vnm_mask does"
        )
