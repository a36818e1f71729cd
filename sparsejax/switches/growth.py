"""A smaller model that takes the place of a run's in some phases, and how it grows.

A model whose linear layers have static weights becomes dense: their other entries begin
at zero. Weights that were stored as blocks on a diagonal are put where they belong in
whole ones; those that were masked lie there already.

An FFN grows by neurons behind those that it has: their columns of W1 (and Wg) are as at
initialisation, their rows of W2 are zero. A model grows by layers behind those that it
has: layer l becomes a copy of layer l modulo the layers before, whose two output
projections, W_out of attention and W2 of the FFN, are zero. Either way the model
computes what it did before, up to the rounding of longer sums. Moments of what is new
are zero. Where it grows and becomes dense at once, it becomes dense first.

FFN growth in the way of function-preserving widening is from arXiv 1511.05641, and
repeated layers from arXiv 2405.15319; with zero outputs as here a new layer begins as
the identity.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import PyTree

from sparsejax.config import ModelConfig
from sparsejax.models.block_diagonal import ENDS_OF_BRANCHES, stacked_dense_weight
from sparsejax.models.neuron_axes import NEURON_AXES


def same_size(left: ModelConfig, right: ModelConfig) -> bool:
    """Returns whether two models have the same parameters, and are the same but for the
    precision of their linear layers."""
    return replace(left, precision=right.precision) == right


def check_grows(before: ModelConfig, after: ModelConfig) -> None:
    """Raises ValueError where a model of the size `before` cannot grow to the size
    `after`."""
    for name in ("d_hidden", "layers"):
        small, large = getattr(before, name), getattr(after, name)
        if small > large:
            raise ValueError(
                f"a state with {name}={small} cannot go on in a phase with "
                f"{name}={large}: a model grows and does not shrink; give the phase "
                f"{small} or more, or begin with an earlier checkpoint"
            )
    if after.static_weights not in (None, before.static_weights):
        raise ValueError(
            f"a state with static_weights={before.static_weights} cannot go on in a "
            f"phase with static_weights={after.static_weights}: a model becomes dense "
            f"once and stays so; leave the pattern out of the phase, or begin with an "
            f"earlier checkpoint"
        )


def grown(params: nnx.State, fresh: nnx.State) -> nnx.State:
    """Returns the parameters of a smaller model in their places in a larger one, whose
    other parameters come from `fresh`, its initialisation."""

    def of_leaf(path: tuple, new: jax.Array, present: jax.Array) -> jax.Array:
        return _grown_leaf(_name(path), _without_groups(path, present, new), new)

    return jax.tree_util.tree_map_with_path(of_leaf, fresh, params)


def padded(state: PyTree, shapes: PyTree) -> PyTree:
    """Returns the moments of a smaller model, padded with zeros to the shapes of a
    larger one."""

    def of_leaf(
        path: tuple, like: jax.ShapeDtypeStruct, present: jax.Array
    ) -> jax.Array:
        present = _without_groups(path, present, like)
        if present.shape == like.shape:
            return present
        sizes = zip(present.shape, like.shape, strict=True)
        return jnp.pad(present, [(0, large - small) for small, large in sizes])

    return jax.tree_util.tree_map_with_path(of_leaf, shapes, state)


def _without_groups(
    path: tuple, present: jax.Array, like: jax.Array | jax.ShapeDtypeStruct
) -> jax.Array:
    """Returns a weight, or a moment of it, as a whole one where it is stored as blocks
    on a diagonal, with one axis more than `like`, what it becomes."""
    if present.ndim == like.ndim:
        return present
    return stacked_dense_weight(_name(path), present)


def _grown_leaf(name: str, present: jax.Array, fresh: jax.Array) -> jax.Array:
    """Returns one parameter as `grown` makes it. The parameters of blocks have the
    layers as their first axis."""
    if present.shape == fresh.shape:
        return present
    layers, axis = present.shape[0], NEURON_AXES.get(name)
    repeated = present[jnp.arange(fresh.shape[0]) % layers]
    if name in ENDS_OF_BRANCHES:
        repeated = repeated.at[layers:].set(0)
    if axis is None or repeated.shape == fresh.shape:
        return repeated
    new = jnp.split(fresh, [present.shape[axis]], axis=axis)[1]
    if name in ENDS_OF_BRANCHES:
        new = jnp.zeros_like(new)
    return jnp.concatenate([repeated, new], axis=axis)


def _name(path: tuple) -> str:
    """Returns the last name of a leaf's path, without the attribute of its Variable."""
    names = [str(getattr(key, "key", getattr(key, "name", key))) for key in path]
    return next(name for name in reversed(names) if name not in ("value", "raw_value"))
