"""The names by which a policy of `jax.checkpoint` keeps arrays for the backward."""

from functools import partial

import jax
from jax.ad_checkpoint import checkpoint_name

ROUTES = "routes"
"""The name of which rows the tokens got: a few whole numbers for each token, without
which a backward has to choose experts anew."""

HIDDEN = "ffn_hidden"
"""The name of the hidden values that an FFN's backward reads. A policy that keeps the
outputs of GEMMs needs it, since to such a policy a kernel is no GEMM."""

ROTATED = "rotated"
"""The name of queries and keys that have been rotated, which attention's backward
reads. Where they are kept, nothing reads the outputs of their GEMMs."""

MIXED = "mixed_values"
"""The name of attention's result, which the gradient of W_out reads, where its
operations are XLA's."""


def under_name[T](name: str, arrays: T) -> T:
    """Returns a pytree of arrays that have the name."""
    return jax.tree.map(partial(checkpoint_name, name=name), arrays)
