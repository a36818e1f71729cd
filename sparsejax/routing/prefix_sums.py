"""Exclusive prefix sums: for each entry, the sum of the entries before it."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

BLOCK = 16
MOST_AT_ONCE = 256
"""The number of entries up to which all sums are taken at once, in a masked sum of
O(n^2)."""


def sums_before(
    x: Int[Array, "... n"] | Bool[Array, "... n"],
) -> Int[Array, "... n"]:
    """Returns for each entry the sum of the entries before it along the last axis,
    int32.

    The sums are taken in blocks of 16, and over these in blocks again: on a GPU these
    are a few short kernels, where a cumulative sum or a sort takes long.
    """
    *rest, n = x.shape
    if n <= BLOCK:
        return _all_at_once(x)
    fill = [(0, 0)] * len(rest) + [(0, -n % BLOCK)]
    blocks = jnp.pad(x, fill).reshape(*rest, -1, BLOCK)
    of_blocks = jnp.sum(blocks, axis=-1, dtype=jnp.int32)
    few = of_blocks.shape[-1] <= MOST_AT_ONCE
    earlier = (_all_at_once if few else sums_before)(of_blocks)
    within = _all_at_once(blocks)
    return (within + earlier[..., None]).reshape(*rest, -1)[..., :n]


def _all_at_once(x: Array) -> Int[Array, "... n"]:
    square = (1,) * (x.ndim - 1) + 2 * x.shape[-1:]
    entry, other = (lax.broadcasted_iota(jnp.int32, square, x.ndim - i) for i in (1, 0))
    before = jnp.where(other < entry, x[..., None, :], 0)
    return jnp.sum(before, axis=-1, dtype=jnp.int32)
