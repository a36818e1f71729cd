"""Hopper's kernels as functions of arrays: what they do under vmap, and how they look
up the rows of experts and the residual rows of dense features."""

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, Literal

import jax

from pallas_kernels.sm90 import dense_over_rows, dense_rows
from pallas_kernels.sm90.over_tokens import DenseFeatures
from pallas_kernels.sm90.threads.activation_tiles import ByExpert
from sparsejax.ops.kernels.base import ExpertRows, ResidualRows


@lru_cache
def one_by_one(kernel: Callable[..., Any], /, **options: Any) -> Callable[..., Any]:
    """Returns a kernel with hashable options as a function of arrays. It has no
    batching rule: under vmap one call follows the other. The same kernel and options
    give the same function, so that a program with many calls traces it once."""
    return jax.custom_batching.sequential_vmap(partial(kernel, **options))


@lru_cache
def rows_in_one_call(
    kernel: Callable[..., jax.Array], /, **options: Any
) -> Callable[..., jax.Array]:
    """Returns a kernel with hashable options, which gives each row of its last operand
    a row of the product, as a function of arrays. Under vmap over that operand alone,
    as where a batch shares its weights, one call takes the rows of all; where another
    operand is mapped, too, one call follows the other, as in `one_by_one`."""
    call = jax.custom_batching.custom_vmap(partial(kernel, **options))

    @call.def_vmap
    def under_vmap(
        size: int, mapped: list[bool], *operands: jax.Array
    ) -> tuple[jax.Array, bool]:
        del size
        if any(mapped[:-1]):
            axes = [0 if each else None for each in mapped]
            return jax.vmap(one_by_one(kernel, **options), axes)(*operands), True
        *shared, rows = operands
        product = call(*shared, rows.reshape(-1, rows.shape[-1]))
        return product.reshape(*rows.shape[:-1], product.shape[-1]), True

    return call


def looking_up(
    found: tuple[jax.Array, ...], *operands: jax.Array, kernel: Callable, experts: int
) -> Any:
    """Calls a kernel on its operands and on the rows in `found`, which `lookups`
    returned; where it returned none, the kernel gets None in their place."""
    return kernel(*operands, _by_expert(experts, found))


def over_tokens(
    found: tuple[jax.Array, ...],
    slots: tuple[jax.Array, ...],
    *operands: jax.Array,
    kernel: Callable,
    experts: int,
    residual_rows: int,
    by_segments: bool,
) -> Any:
    """Calls a kernel of `pallas_kernels.sm90.over_tokens` with what `lookups` and
    `slots` returned."""
    dense = (DenseFeatures(slots[0], residual_rows),) if slots else ()
    if not found:
        return kernel(*operands, *dense, by_segments=by_segments)
    by_expert = _by_expert(experts, found)
    return kernel(*operands, *dense, by_segments=by_segments, by_expert=by_expert)


def rows_by_expert(
    x: jax.Array,
    w: jax.Array,
    tile_expert: jax.Array,
    used_tiles: jax.Array,
    *entries: jax.Array,
    combine: Callable[[jax.Array, jax.Array], jax.Array] | None = None,
    **options: Any,
) -> jax.Array:
    """Calls `dense_rows.dense_rows` on what `used` returned, with the matrix in
    `entries` for the epilogue that `combine` names."""
    other = dense_rows.OtherRows(entries[0], combine) if combine is not None else None
    return dense_rows.dense_rows(x, w, tile_expert, used_tiles, other=other, **options)


def over_joined_rows(
    lhs: jax.Array,
    rhs: jax.Array,
    ends: jax.Array,
    places: jax.Array,
    *,
    parts: int,
    operand: Literal["a", "b"],
    **options: Any,
) -> jax.Array:
    """Calls `dense_over_rows.dense_over_rows` on rows of sets of experts."""
    joined = dense_over_rows.Joined(places, parts, operand)
    return dense_over_rows.dense_over_rows(lhs, rhs, ends, joined=joined, **options)


def _by_expert(experts: int, found: tuple[jax.Array, ...]) -> ByExpert | None:
    if not found:
        return None
    tile_expert, *row_token = found
    return ByExpert(row_token[0] if row_token else None, tile_expert, experts)


def experts_of(rows: ExpertRows | None) -> int:
    """Returns the number of experts of the rows; 0 where `rows` is None."""
    return 0 if rows is None else rows.experts


def lookups(rows: ExpertRows | None, *, by_token: bool) -> tuple[jax.Array, ...]:
    """Returns the expert of each tile and, with `by_token`, where the matrix has a row
    per token, the token of each row; an empty tuple where `rows` is None."""
    if rows is None:
        return ()
    return (rows.tile_expert, rows.row_token) if by_token else (rows.tile_expert,)


def used(rows: ExpertRows | None) -> tuple[jax.Array, ...]:
    """Returns the expert of each tile, or its experts, and the number of used tiles; an
    empty tuple where `rows` is None."""
    return () if rows is None else (rows.tile_expert, rows.used_tiles)


def slots(residual: ResidualRows | None) -> tuple[jax.Array, ...]:
    """Returns the residual row of each feature; an empty tuple where no feature has
    one."""
    return () if residual is None else (residual.slots,)


def tile_rows(rows: ExpertRows) -> int:
    """Returns the number of rows of a tile."""
    return rows.row_token.size // rows.tile_expert.shape[0]
