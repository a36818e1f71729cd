"""Which neurons belong together, which tokens go to them, and in which row.

Terms: an expert is a cluster of F / E neurons; a token is dispatched to g of the E
experts; the rows of an expert are padded to a multiple of v, so that every tile of v
rows has one expert.
"""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Dispatch:
    """Tokens sorted by expert, each expert's rows padded to whole tiles of v.

    R, the number of rows, is static: the most that any distribution of the tokens
    needs. Rows that no token needs are padding, at the end of each expert and after
    the last one.
    """

    row_token: Array
    """(R,) int32: the token of the row; 0 where padding."""
    row_valid: Array
    """(R,) bool: False where padding."""
    token_rows: Array
    """(tokens, g) int32: the row of the token's j-th expert."""
    group_sizes: Array
    """(experts,) int32: rows per expert without padding; their sum is tokens g."""
    tile_expert: Array
    """(R / v,) int32: the expert of each tile; E - 1 after the last used tile."""
    v: int = field(metadata={"static": True})
    experts: int = field(metadata={"static": True})


def dispatch(
    expert_index: Int[Array, "tokens g"],
    experts: int,
    v: int,
    *,
    token_order: Int[Array, " tokens"] | None = None,
) -> Dispatch:
    """The rows of all tokens, sorted by expert.

    Inside an expert the rows follow `token_order`, then the choice j. Empty experts
    take no tile. Integer arithmetic only: the same on every backend.

    Args:
      expert_index: the g experts of each token, each in [0, experts).
      experts: E.
      v: rows per tile.
      token_order: a permutation of the tokens; None: 0, 1, ...
    Returns:
      the dispatch, with R = max(v, T g + min(E, T g) (v - 1) rounded down to v).
    """
    tokens, choices = expert_index.shape
    entries = tokens * choices
    rows = max(v, (entries + min(experts, entries) * (v - 1)) // v * v)
    if token_order is None:
        token_order = jnp.arange(tokens, dtype=jnp.int32)
    token_order = token_order.astype(jnp.int32)

    entry_expert = expert_index[token_order].reshape(-1).astype(jnp.int32)
    entry_token = jnp.repeat(token_order, choices)
    entry_choice = jnp.tile(jnp.arange(choices, dtype=jnp.int32), tokens)

    every_expert = jnp.arange(experts, dtype=jnp.int32)
    group_sizes = jnp.sum(
        entry_expert[:, None] == every_expert[None, :], axis=0, dtype=jnp.int32
    )
    tiles = (group_sizes + v - 1) // v
    tile_ends = jnp.cumsum(tiles, dtype=jnp.int32)
    entry_starts = jnp.cumsum(group_sizes, dtype=jnp.int32) - group_sizes
    shift = (tile_ends - tiles) * v - entry_starts

    order = jnp.argsort(entry_expert, stable=True)
    row = jnp.arange(entries, dtype=jnp.int32) + shift[entry_expert[order]]
    token, choice = entry_token[order], entry_choice[order]
    tile = jnp.arange(rows // v, dtype=jnp.int32)
    tile_expert = jnp.sum(tile[:, None] >= tile_ends[None, :], axis=1, dtype=jnp.int32)
    return Dispatch(
        row_token=jnp.zeros(rows, jnp.int32).at[row].set(token, unique_indices=True),
        row_valid=jnp.zeros(rows, bool).at[row].set(True, unique_indices=True),
        token_rows=jnp.zeros((tokens, choices), jnp.int32)
        .at[token, choice]
        .set(row, unique_indices=True),
        group_sizes=group_sizes,
        tile_expert=jnp.minimum(tile_expert, experts - 1),
        v=v,
        experts=experts,
    )


@jax.custom_vjp
def gather_rows(
    x: Float[Array, "tokens d"], dispatch: Dispatch
) -> Float[Array, "rows d"]:
    """The token of every row; zeros in padding rows. Transpose: `combine_rows`."""
    rows = x[dispatch.row_token]
    return jnp.where(dispatch.row_valid[:, None], rows, jnp.zeros((), x.dtype))


@jax.custom_vjp
def combine_rows(
    y: Float[Array, "rows d"], dispatch: Dispatch
) -> Float[Array, "tokens d"]:
    """For every token the sum of its g rows, in float32, in the order of its choices.

    Padding rows are not read. Transpose: `gather_rows`. Returns y.dtype.
    """
    total = jnp.zeros((), jnp.promote_types(y.dtype, jnp.float32))
    for choice in range(dispatch.token_rows.shape[1]):
        total = total + y[dispatch.token_rows[:, choice]].astype(total.dtype)
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


def expert_of_row(dispatch: Dispatch) -> Int[Array, " rows"]:
    """The expert of every row, padding included."""
    return jnp.repeat(dispatch.tile_expert, dispatch.v)
