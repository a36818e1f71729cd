"""Masks from scores: N:M and V:N:M; the soft threshold and its scale.

Masks are boolean, True = kept. Everywhere ties go to the lower index, -0.0 equals
0.0, NaN counts as largest, and a group keeps exactly `n` entries, zeros included.

What takes several operations is under `jit(inline=True)`: called outside of a jit it
is one program, not one per operation; inside it is traced once per shape, and becomes
part of what calls it.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Num

from sparsejax.annotations import check_value
from sparsejax.dtypes import accumulation_dtype
from sparsejax.sparsity.patterns import NM, TWO_FOUR, VNM


def nm_mask(
    scores: Num[Array, "..."], pattern: NM = TWO_FOUR, *, axis: int = -1
) -> Bool[Array, "..."]:
    """Returns the mask of the `n` largest signed scores of every `m` along `axis`.

    It is made by comparisons alone, without a sort, so that XLA fuses the mask into
    what uses it.

    Args:
      scores: any shape and real dtype.
      pattern: n kept of every m.
      axis: the reduction axis; its size is a multiple of m.
    Returns:
      boolean, shape of `scores`; True in exactly n places of every group.
    Raises:
      ValueError: the pattern is not N:M, or the size of the axis is not a multiple of
        m.
    """
    check_value("pattern", pattern, NM)
    return _nm_mask(scores, pattern, axis)


@partial(jax.jit, static_argnames=("pattern", "axis"), inline=True)
def _nm_mask(scores, pattern: NM, axis: int):
    grouped, group_axis = split_groups(scores, pattern, axis)
    return (group_ranks(grouped, group_axis) < pattern.n).reshape(scores.shape)


def magnitude_mask(
    w: Num[Array, "..."], pattern: NM = TWO_FOUR, *, axis: int = -1
) -> Bool[Array, "..."]:
    """Returns the mask of the `n` largest magnitudes of every `m` along `axis`; see
    `nm_mask`."""
    return nm_mask(jnp.abs(w), pattern, axis=axis)


def vnm_mask(
    w: Num[Array, "... rows cols"], pattern: VNM
) -> Bool[Array, "... rows cols"]:
    """Returns the V:N:M mask by magnitude.

    In every v x m block it chooses the four columns of largest L1 norm, and then keeps
    in each row the n largest magnitudes of those four. Norms are summed in float32, so
    two backends may differ where norms agree to rounding. Leading axes are independent
    matrices.

    Args:
      w: the last block of rows may be short; `cols` is a multiple of m.
      pattern: the block and what is kept of it.
    Returns:
      boolean, shape of `w`; n per row of every block, in at most four columns.
    Raises:
      ValueError: the pattern is not V:N:M, fewer than two axes, or `cols` is not a
        multiple of m.
    Source: arXiv 2410.16135, with magnitude as the importance.
    """
    check_value("pattern", pattern, VNM)
    if w.ndim < 2:
        raise ValueError(
            f"w has shape {w.shape}; a V:N:M block needs rows and columns, so give at "
            f"least two axes"
        )
    pattern.check_divides(w.shape[-1], "cols")
    magnitude = jnp.abs(w)
    blocks = split_row_blocks(magnitude, pattern)
    norms = jnp.sum(blocks, axis=-3, dtype=accumulation_dtype(w.dtype))
    chosen = group_ranks(norms, norms.ndim - 1) < 4
    chosen = repeat_row_blocks(chosen, pattern, w.shape[-2])
    grouped = magnitude.reshape(chosen.shape)
    # Keys of magnitudes are never negative: -1 ranks a column behind the chosen four.
    candidates = jnp.where(chosen, ordered_keys(grouped), -1)
    ranks = group_ranks(candidates, candidates.ndim - 1)
    return (ranks < pattern.n).reshape(w.shape)


@partial(jax.jit, static_argnames="axis", inline=True)
def soft_threshold(w: Float[Array, "..."], *, axis: int = -1) -> Float[Array, "..."]:
    """Returns S(w): 2:4 along `axis`, continuous in `w`.

        S(w)_i = sign(w_i) max(|w_i| - t, 0),  t = second smallest |w| of the group

    Zero wherever `magnitude_mask` is False, so a group has at most two survivors. NaN
    stays NaN. The gradient is that of the equation; training uses
    `straight_through(soft_threshold)`.

    Args:
      w: any shape; the size of `axis` is a multiple of four.
      axis: the reduction axis.
    Returns:
      shape and dtype of `w`; exactly +0.0 where pruned.
    Raises:
      ValueError: the size of the axis is not a multiple of four.
    Source: arXiv 2409.09099 (S-STE).
    """
    grouped, group_axis = split_groups(w, TWO_FOUR, axis)
    magnitude = jnp.abs(grouped)
    ranks = group_ranks(magnitude, group_axis)
    # Third in descending order is the second smallest. Taking it by rank instead of
    # by min and max keeps a single NaN from spreading over its group.
    threshold = jnp.zeros((), w.dtype)
    for j in range(4):
        member = lax.slice_in_dim(magnitude, j, j + 1, axis=group_axis)
        rank = lax.slice_in_dim(ranks, j, j + 1, axis=group_axis)
        threshold = jnp.where(rank == 2, member, threshold)
    shrunk = grouped - jnp.sign(grouped) * threshold
    return jnp.where(ranks < 2, shrunk, jnp.zeros((), w.dtype)).reshape(w.shape)


def soft_threshold_scale(
    w: Float[Array, "... rows cols"], *, axis: int = -1
) -> Float[Array, "..."]:
    """Returns beta, the scale that brings `soft_threshold(w)` closest to `w`.

        beta = argmin_b |w - b S(w)|^2 = <w, S(w)> / <S(w), S(w)>

    1.483 on Gaussian weights of any variance. Where S(w) is all zero: 1. Meant to be
    computed once, when the sparse phase begins, and then frozen.

    Args:
      w: a weight or a stack of weights, one beta for each.
      axis: the reduction axis of S.
    Returns:
      float32, the leading axes of `w`.
    Raises:
      ValueError: fewer than two axes, or a size that is not a multiple of four.
    Source: arXiv 2409.09099 (S-STE).
    """
    if w.ndim < 2:
        raise ValueError(
            f"w has shape {w.shape}; the scale is taken over the last two axes, so "
            f"give at least two"
        )
    return _scale(w, axis)


@partial(jax.jit, static_argnames="axis", inline=True)
def _scale(w, axis: int):
    w = w.astype(jnp.float32)
    shrunk = soft_threshold(w, axis=axis)
    product = jnp.sum(w * shrunk, axis=(-2, -1))
    square = jnp.sum(shrunk * shrunk, axis=(-2, -1))
    return jnp.where(square == 0, 1.0, product / jnp.where(square == 0, 1.0, square))


def flip_rate(
    before: Bool[Array, "..."], after: Bool[Array, "..."]
) -> Float[Array, ""]:
    """Returns the fraction of mask entries that differ between the two masks, float32
    (arXiv 2404.01847)."""
    return jnp.mean(before != after, dtype=jnp.float32)


def split_groups(
    x: Num[Array, "..."], pattern: NM, axis: int
) -> tuple[Num[Array, "..."], int]:
    """Returns `x` with `axis` split in (groups, m), and the position of the m axis."""
    axis = axis % x.ndim
    pattern.check_divides(x.shape[axis], f"size of axis {axis}")
    groups = x.shape[axis] // pattern.m
    shape = (*x.shape[:axis], groups, pattern.m, *x.shape[axis + 1 :])
    return x.reshape(shape), axis + 1


@partial(jax.jit, static_argnames="axis", inline=True)
def group_ranks(grouped: Num[Array, "..."], axis: int) -> Num[Array, "..."]:
    """Returns the position of each entry in the descending order of its group, int32; a
    group is the whole `axis`."""
    keys = ordered_keys(grouped)
    index = lax.broadcasted_iota(jnp.int32, keys.shape, axis)
    ranks = jnp.zeros(keys.shape, jnp.int32)
    # Unrolled over the group: element-wise throughout, hence fusible.
    for j in range(keys.shape[axis]):
        other = lax.slice_in_dim(keys, j, j + 1, axis=axis)
        ranks += (other > keys) | ((other == keys) & (j < index))
    return ranks


def ordered_keys(x: Num[Array, "..."]) -> Num[Array, "..."]:
    """Returns signed integers in the order of `x`: -0.0 equals 0.0, NaN is largest.

    Floats are compared through their bits, because backends disagree on whether a
    comparison flushes subnormals. Magnitudes get keys that are not negative.
    """
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x.astype(jnp.int32) if x.dtype.itemsize < 4 else x
    integer = jnp.dtype(f"int{8 * x.dtype.itemsize}")
    bits = lax.bitcast_convert_type(x, integer)
    largest = jnp.array(jnp.iinfo(integer).max, integer)
    magnitude = bits & largest
    keys = jnp.where(bits < 0, -magnitude, magnitude)
    return jnp.where(jnp.isnan(x), largest, keys)


def split_row_blocks(x: Num[Array, "... rows cols"], pattern: VNM) -> Array:
    """Returns x as (..., row blocks, v, cols / m, m), the last block of rows filled
    with zeros."""
    *batch, rows, cols = x.shape
    blocks = -(-rows // pattern.v)
    fill = [(0, 0)] * len(batch) + [(0, blocks * pattern.v - rows), (0, 0)]
    shape = (*batch, blocks, pattern.v, cols // pattern.m, pattern.m)
    return jnp.pad(x, fill).reshape(shape)


def repeat_row_blocks(x: Num[Array, "... blocks groups m"], pattern: VNM, rows: int):
    """Returns the values that belong to blocks of rows, repeated for each row of its
    block: (..., rows, groups, m)."""
    return jnp.repeat(x, pattern.v, axis=-3)[..., :rows, :, :]
