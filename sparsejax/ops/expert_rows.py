"""The rows of experts, copied from the tokens and summed back into them.

`dispatch.gather_rows` and `dispatch.combine_rows`, and where there is a set of kernels
one that does either in one pass. Nothing here is differentiated: the FFN's backward is
written out.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from sparsejax.ops.kernels.base import ExpertRows, KernelSet
from sparsejax.routing import dispatch
from sparsejax.routing.dispatch import Dispatch


def gather_rows(
    kernels: KernelSet | None, x: Float[Array, "tokens d"], routed: Dispatch
) -> Float[Array, "rows d"]:
    """Returns the token of every row; zeros in padding rows."""
    if kernels is None:
        return dispatch.gather_rows(x, routed)
    return kernels.sum_rows(x, dispatch.token_of_row(routed)[:, None])


def combine_rows(
    kernels: KernelSet | None, y: Float[Array, "rows d"], routed: Dispatch
) -> Float[Array, "tokens d"]:
    """Returns for every token the sum of its rows, in float32, in the order of its
    choices."""
    if kernels is None:
        return dispatch.combine_rows(y, routed)
    return kernels.sum_rows(y, routed.token_rows)


def used_tiles(routed: Dispatch) -> Int[Array, ""]:
    """Returns how many tiles of the dispatch hold any row."""
    return jnp.sum(_tiles_of_experts(routed))


def looked_up(routed: Dispatch) -> ExpertRows:
    """Returns the rows as kernels look them up."""
    return ExpertRows(
        tile_expert=routed.tile_expert,
        used_tiles=used_tiles(routed),
        ends=jnp.cumsum(_tiles_of_experts(routed), dtype=jnp.int32),
        row_token=dispatch.token_of_row(routed),
        experts=routed.experts,
    )


def _tiles_of_experts(routed: Dispatch) -> jax.Array:
    return -(-routed.group_sizes // routed.v)
