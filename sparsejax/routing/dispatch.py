"""The rows of a grouped GEMM that the tokens of an FFN get, and the way there and back.

A token is dispatched to g of the E experts and has a row for each of them. The rows of
an expert lie together and are padded to a multiple of v, so that every tile of v rows
has one expert.
"""

from dataclasses import dataclass, field
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from sparsejax.dtypes import accumulation_dtype
from sparsejax.kept_names import ROUTES, under_name
from sparsejax.routing.prefix_sums import sums_before


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Dispatch:
    """The tokens sorted by expert, each expert's rows padded to whole tiles of v.

    The number of rows R is static: it is the most that any distribution of the tokens
    needs. Rows that no token needs are padding. They lie at the end of each expert and
    after the last one.
    """

    row_token: Array
    """The token of each row, (R,) int32; 0 in padding rows."""
    row_valid: Array
    """Whether a row holds a token, (R,) bool; False in padding rows."""
    token_rows: Array
    """The row of each token's j-th choice, (tokens, g) int32; R where it has none."""
    group_sizes: Array
    """The rows of each expert without padding, (experts,) int32."""
    tile_expert: Array
    """The expert of each tile, (R / v,) int32; E - 1 after the last used tile."""
    v: int = field(metadata={"static": True})
    experts: int = field(metadata={"static": True})


def row_count(tokens: int, experts_per_token: int, experts: int, v: int) -> int:
    """Returns R, the rows that any distribution of the T tokens fits in.

    R = max(v, T g + min(E, T g) (v - 1) rounded down to a multiple of v), where g is
    `experts_per_token` or E, whichever is smaller.
    """
    most = tokens * min(experts_per_token, experts)
    return max(v, (most + min(experts, most) * (v - 1)) // v * v)


@partial(jax.jit, static_argnames=("experts", "v"), inline=True)
def dispatch(
    expert_index: Int[Array, "tokens g"],
    experts: int,
    v: int,
    *,
    token_order: Int[Array, " tokens"] | None = None,
) -> Dispatch:
    """Returns the rows of every token, sorted by expert.

    Inside an expert the rows follow `token_order`, then the choice j. Empty experts
    take no tile. The arithmetic is that of integers, and so the result is the same on
    every backend.

    Args:
      expert_index: the g experts of each token. A choice outside [0, experts) gets no
        row (it is an expert of another device), nor does one that repeats an earlier
        choice of its token.
      experts: E.
      v: the rows of a tile.
      token_order: a permutation of the tokens; None stands for 0, 1, ...
    Returns:
      the dispatch, with R = `row_count`, its arrays under the name `ROUTES`.
    """
    tokens, choices = expert_index.shape
    entries = tokens * choices
    rows = row_count(tokens, choices, experts, v)
    ordered = token_order is not None
    if token_order is None:
        token_order = jnp.arange(tokens)
    token_order = token_order.astype(jnp.int32)

    expert_index = _first_choices(expert_index.astype(jnp.int32))
    expert = expert_index[token_order].reshape(-1)
    # (E, T g): whether an entry is of the expert
    mine = expert[None, :] == jnp.arange(experts, dtype=jnp.int32)[:, None]
    group_sizes = jnp.sum(mine, axis=1, dtype=jnp.int32)
    tiles = (group_sizes + v - 1) // v
    tile_ends = jnp.cumsum(tiles, dtype=jnp.int32)
    starts = (tile_ends - tiles) * v
    row = jnp.sum(
        jnp.where(mine, starts[:, None] + sums_before(mine), 0), axis=0, dtype=jnp.int32
    )
    here = (expert >= 0) & (expert < experts)
    # Each entry without a row writes out of bounds at a place of its own.
    place = jnp.where(here, row, rows + jnp.arange(entries, dtype=jnp.int32))
    token = jnp.full(rows, -1, jnp.int32)
    token = token.at[place].set(
        jnp.repeat(token_order, choices), mode="drop", unique_indices=True
    )
    token_rows = jnp.where(here, row, rows).reshape(tokens, choices)
    if ordered:
        token_rows = token_rows.at[token_order].set(token_rows, unique_indices=True)
    tile = jnp.arange(rows // v, dtype=jnp.int32)
    tile_expert = jnp.sum(tile[:, None] >= tile_ends[None, :], axis=1, dtype=jnp.int32)
    rows_of_tokens = Dispatch(
        row_token=jnp.maximum(token, 0),
        row_valid=token >= 0,
        token_rows=token_rows,
        group_sizes=group_sizes,
        tile_expert=jnp.minimum(tile_expert, experts - 1),
        v=v,
        experts=experts,
    )
    return under_name(ROUTES, rows_of_tokens)


def _first_choices(expert_index: Int[Array, "tokens g"]) -> Int[Array, "tokens g"]:
    """Returns the choices, with -1 (no expert) where an earlier choice of the token is
    the same."""
    choices = expert_index.shape[1]
    same = expert_index[:, :, None] == expert_index[:, None, :]
    repeats = jnp.any(same & np.tri(choices, k=-1, dtype=bool)[None], axis=2)
    return jnp.where(repeats, -1, expert_index)


@jax.custom_vjp
@partial(jax.jit, inline=True)
def gather_rows(
    x: Float[Array, "tokens d"], dispatch: Dispatch
) -> Float[Array, "rows d"]:
    """Returns for every row a copy of its token, and zeros for padding rows.
    `combine_rows` is the transpose."""
    rows = x[dispatch.row_token]
    return jnp.where(dispatch.row_valid[:, None], rows, jnp.zeros((), x.dtype))


@jax.custom_vjp
@partial(jax.jit, inline=True)
def combine_rows(
    y: Float[Array, "rows d"], dispatch: Dispatch
) -> Float[Array, "tokens d"]:
    """Returns for every token the sum of its g rows, in float32, in the order of its
    choices.

    Padding rows are not read, and a choice without a row adds nothing. The sums are
    returned in the dtype of y. `gather_rows` is the transpose.
    """
    total = jnp.zeros((), accumulation_dtype(y.dtype))
    for choice in range(dispatch.token_rows.shape[1]):
        row = dispatch.token_rows[:, choice]
        own = y.at[row].get(mode="fill", fill_value=0)
        total = total + own.astype(total.dtype)
    return total.astype(y.dtype)


# Each is the other's transpose. Written out because autodiff would turn the gather
# into a scatter-add of floats: slower, and in an order that may change between runs.
gather_rows.defvjp(
    lambda x, dispatch: (gather_rows(x, dispatch), dispatch),
    lambda dispatch, dout: (combine_rows(dout, dispatch), None),
)
combine_rows.defvjp(
    lambda y, dispatch: (combine_rows(y, dispatch), dispatch),
    lambda dispatch, dout: (gather_rows(dout, dispatch), None),
)


def token_of_row(dispatch: Dispatch) -> Int[Array, " rows"]:
    """Returns the token of every row, -1 for padding rows."""
    return jnp.where(dispatch.row_valid, dispatch.row_token, -1)


def expert_of_row(dispatch: Dispatch) -> Int[Array, " rows"]:
    """Returns the expert of every row, padding rows included."""
    return jnp.repeat(dispatch.tile_expert, dispatch.v)


def tiles_of_experts(dispatch: Dispatch) -> Int[Array, " experts"]:
    """Returns how many tiles the rows of each expert take."""
    return -(-dispatch.group_sizes // dispatch.v)


def used_tiles(dispatch: Dispatch) -> Int[Array, ""]:
    """Returns how many tiles hold any row."""
    return jnp.sum(tiles_of_experts(dispatch))
