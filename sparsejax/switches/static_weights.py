"""Static random 2:4 weights by masks, for what a loss is like; the GEMMs stay dense.

Every 4 x 4 block of a linear layer's weight keeps n entries in each row and n in each
column, by one of all the patterns that do, drawn at random. So every output reads the
same number of inputs and every input is read by the same number of outputs, and the
weight is n:4 along both of its axes, as the forward and the backward of sparse tensor
cores need it. There are 24 such patterns for n = 1, 90 for n = 2, 24 for n = 3.

No mask is kept. The entries outside of it are zero from the initialisation on, and
their gradients are set to zero in every step, so that they and their moments remain
zero, and a dense phase after it begins with them there. The masks are drawn anew in
every step from the run's key, which never changes: the same ones on every mesh and in
every resume.

Source: random static masks before dense training are those of arXiv 2304.05511 and
2303.10464, which are unstructured; the balance is ours.
"""

from functools import cache
from itertools import combinations, product

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Key

from sparsejax.sparsity.patterns import NM, StaticPattern

LINEAR_LAYERS = (
    "w_query",
    "w_key",
    "w_value",
    "w_out",
    "w_up",
    "w_gate",
    "w_down",
)
"""The weights of the linear layers, those of attention and of the FFN, by name."""

MASKS = 2**32 - 2
"""Folded into the run's key for the masks; the number of no step."""


def balanced_mask(
    key: Key[Array, ""], shape: tuple[int, ...], n: int
) -> Bool[Array, "*layers d_in d_out"]:
    """Returns a random mask whose 4 x 4 blocks keep `n` entries in each row and in each
    column.

    Args:
      shape: of the weight, its last two axes multiples of four.
      n: 1, 2 or 3.
    """
    patterns = jnp.asarray(_balanced_blocks(n))
    *layers, d_in, d_out = shape
    blocks = (*layers, d_in // 4, d_out // 4)
    chosen = jax.random.randint(key, blocks, 0, len(patterns))
    # (..., d_in / 4, d_out / 4, 4, 4)
    return jnp.swapaxes(patterns[chosen], -3, -2).reshape(shape)


@cache
def _balanced_blocks(n: int) -> Bool[np.ndarray, "patterns 4 4"]:
    """Returns all 4 x 4 masks with n entries in each row and in each column."""
    rows = [[i in row for i in range(4)] for row in combinations(range(4), n)]
    every = np.array(list(product(rows, repeat=4)))
    return every[(every.sum(axis=1) == n).all(axis=1)]


def initial_weights(
    params: nnx.State, pattern: StaticPattern | None, key: Key[Array, ""]
) -> nnx.State:
    """Returns the parameters at initialisation, without the entries that there are not.
    Those that stay are as in a layer of that fan-in, larger by density^-1/2. Weights
    that are stored as blocks on a diagonal, or whole, stay as they are."""
    if not isinstance(pattern, NM):
        return params
    scaled = jax.tree_util.tree_map_with_path(
        lambda path, w: w * pattern.density**-0.5 if layer_of(path) else w, params
    )
    return within_masks(scaled, pattern, key)


def within_masks(
    tree: nnx.State, pattern: StaticPattern | None, key: Key[Array, ""]
) -> nnx.State:
    """Returns parameters, or their gradients, with zeros outside of the masks.

    Args:
      key: the run's.
    """
    if not isinstance(pattern, NM):
        return tree
    key = jax.random.fold_in(key, MASKS)

    def of_leaf(path: tuple, leaf: jax.Array) -> jax.Array:
        name = layer_of(path)
        if name is None:
            return leaf
        own = jax.random.fold_in(key, LINEAR_LAYERS.index(name))
        return jnp.where(balanced_mask(own, leaf.shape, pattern.n), leaf, 0)

    return jax.tree_util.tree_map_with_path(of_leaf, tree)


def layer_of(path: tuple) -> str | None:
    """Returns the name of the linear layer whose weight a leaf is, or None."""
    names = [str(getattr(entry, "key", "")) for entry in path]
    return next((name for name in names if name in LINEAR_LAYERS), None)
