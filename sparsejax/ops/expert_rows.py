"""The rows of experts, copied from the tokens and summed back into them.

`router.gather_rows` and `router.combine_rows`, and where GEMMs run on Hopper's sparse
tensor cores a kernel that does either in one pass. Nothing here is differentiated: the
FFN's backward is written out.
"""

from collections.abc import Sequence

import jax
from jaxtyping import Array, Float

from sparsejax import router
from sparsejax.ops.backend import Backend
from sparsejax.router import Dispatch


def gather_rows(
    backends: Sequence[Backend], x: Float[Array, "tokens d"], routed: Dispatch
) -> Float[Array, "rows d"]:
    """The token of every row; zeros in padding rows."""
    if "mosaic_sm90" not in backends:
        return router.gather_rows(x, routed)
    return _sum_rows(x, router.token_of_row(routed)[:, None])


def combine_rows(
    backends: Sequence[Backend], y: Float[Array, "rows d"], routed: Dispatch
) -> Float[Array, "tokens d"]:
    """For every token the sum of its rows, in float32, in the order of its choices."""
    if "mosaic_sm90" not in backends:
        return router.combine_rows(y, routed)
    return _sum_rows(y, routed.token_rows)


# The kernels have no batching rules.


@jax.custom_batching.sequential_vmap
def _sum_rows(x, index):
    from pallas_kernels import row_sums_sm90

    return row_sums_sm90.sum_rows(x, index)
