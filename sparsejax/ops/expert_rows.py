"""The rows of experts, copied from the tokens and summed back into them.

With a set of kernels, either is one pass of its `sum_rows`; without one, XLA runs
`dispatch.gather_rows` and `dispatch.combine_rows`. Nothing here is differentiated: the
FFN's backward is written out.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from sparsejax.ops.kernels.base import ExpertRows, KernelSet
from sparsejax.routing import dispatch
from sparsejax.routing.dispatch import Dispatch, tiles_of_experts, used_tiles
from sparsejax.routing.expert_sets import RowsOfSets


def gather_rows(
    kernels: KernelSet | None, x: Float[Array, "tokens d"], routed: Dispatch
) -> Float[Array, "rows d"]:
    """Returns for every row a copy of its token, and zeros for padding rows."""
    if kernels is None:
        return dispatch.gather_rows(x, routed)
    return kernels.sum_rows(x, dispatch.token_of_row(routed)[:, None])


def combine_rows(
    kernels: KernelSet | None, y: Float[Array, "rows d"], routed: Dispatch
) -> Float[Array, "tokens d"]:
    """Returns for every token the sum of its rows, taken in float32 and in the order of
    the token's choices."""
    if kernels is None:
        return dispatch.combine_rows(y, routed)
    return kernels.sum_rows(y, routed.token_rows)


def looked_up(routed: Dispatch) -> ExpertRows:
    """Returns the rows of a dispatch in the form in which kernels look them up."""
    return ExpertRows(
        tile_expert=routed.tile_expert,
        used_tiles=used_tiles(routed),
        ends=jnp.cumsum(tiles_of_experts(routed), dtype=jnp.int32),
        row_token=dispatch.token_of_row(routed),
        experts=routed.experts,
    )


def sets_looked_up(joined: RowsOfSets) -> ExpertRows:
    """Returns the rows of sets of experts in the form in which kernels look them up."""
    return ExpertRows(
        tile_expert=joined.tile_experts,
        used_tiles=used_tiles(joined.of_sets),
        ends=joined.ends,
        row_token=dispatch.token_of_row(joined.of_sets),
        places=joined.places,
        experts=joined.experts,
    )
