"""One row for all experts of a token: tokens sorted by the set of their experts.

Where a token has a row for each of its g experts (`dispatch`), it is copied to g places
and g results are summed. There are only (E choose g) sets of experts. If the tokens are
sorted by set, and each set's rows padded to whole tiles, then a tile has g experts, and
a row the neurons of all of them side by side: g F / E.
"""

from dataclasses import dataclass, field
from functools import partial
from itertools import combinations
from math import comb

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from sparsejax.kept_names import ROUTES, under_name
from sparsejax.routing.dispatch import Dispatch, dispatch, used_tiles
from sparsejax.routing.prefix_sums import sums_before


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RowsOfSets:
    """The tokens sorted by the set of their experts."""

    of_sets: Dispatch
    """The rows, one for each token, with the sets in the place of experts."""
    tile_experts: Array
    """The experts of each tile in ascending order, (tiles, g) int32."""
    places: Array
    """For each expert in turn the tiles that hold rows of it, each as tile * g + j,
    where the expert is the tile's j-th: (tiles * g,) int32. What follows after the last
    expert's is not defined."""
    ends: Array
    """The first of the places after each expert's own, (experts,) int32."""
    experts: int = field(metadata={"static": True})

    @property
    def experts_per_token(self) -> int:
        """The number g of the experts of a token."""
        return self.tile_experts.shape[1]


def set_count(experts: int, experts_per_token: int) -> int:
    """Returns the number of sets that a token's g of E experts can be."""
    return comb(experts, experts_per_token)


@partial(jax.jit, static_argnames=("experts", "v"), inline=True)
def rows_of_sets(
    expert_index: Int[Array, "tokens g"], experts: int, v: int
) -> RowsOfSets:
    """Returns the rows of tokens that have g different experts each.

    Inside a set the rows follow the order of the tokens. The arithmetic is that of
    integers, and so the result is the same on every backend.

    Args:
      expert_index: the experts of each token, in any order; all differ and lie in [0,
        experts).
      experts: E.
      v: the rows of a tile.
    """
    choices = expert_index.shape[1]
    number = _number_of_set(expert_index.astype(jnp.int32), experts)
    of_sets = dispatch(number[:, None], set_count(experts, choices), v)
    members = jnp.asarray(_members(experts, choices))
    tile_experts = members[of_sets.tile_expert]
    tiles = tile_experts.shape[0]
    in_use = (jnp.arange(tiles, dtype=jnp.int32) < used_tiles(of_sets))[:, None]
    # Beyond the used tiles there is no expert.
    expert = jnp.where(in_use, tile_experts, experts).reshape(-1)
    mine = expert[None, :] == jnp.arange(experts, dtype=jnp.int32)[:, None]
    counts = jnp.sum(mine, axis=1, dtype=jnp.int32)
    ends = jnp.cumsum(counts, dtype=jnp.int32)
    own_place = (ends - counts)[:, None] + sums_before(mine)
    entries = jnp.arange(tiles * choices, dtype=jnp.int32)
    # Each entry that is not in use writes out of bounds at a place of its own.
    nowhere = tiles * choices + entries
    place = jnp.where(
        expert < experts, jnp.sum(jnp.where(mine, own_place, 0), axis=0), nowhere
    )
    places = jnp.zeros(tiles * choices, jnp.int32)
    places = places.at[place].set(entries, mode="drop", unique_indices=True)
    rows = RowsOfSets(of_sets, tile_experts, places, ends, experts)
    return under_name(ROUTES, rows)


def _number_of_set(expert_index: Int[Array, "tokens g"], experts: int) -> Array:
    """Returns the number of each token's set in the order of `_members`: the i-th
    smallest of its experts e, from 0, adds (e choose i + 1)."""
    choices = expert_index.shape[1]
    smaller = expert_index[:, None, :] < expert_index[:, :, None]
    place = jnp.sum(smaller, axis=2, dtype=jnp.int32)
    table = [[comb(e, i + 1) for i in range(choices)] for e in range(experts)]
    added = jnp.asarray(np.array(table, np.int32))[expert_index, place]
    return jnp.sum(added, axis=1, dtype=jnp.int32)


def _members(experts: int, choices: int) -> np.ndarray:
    """Returns the experts of every set in ascending order, (sets, g) int32: the sets in
    the order of their largest expert, then of the next one."""
    sets = sorted(combinations(range(experts), choices), key=lambda of: of[::-1])
    return np.array(sets, np.int32)
