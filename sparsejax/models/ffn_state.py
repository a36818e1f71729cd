"""The state of layers that is not trained, a Flax NNX variable for each kind."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from sparsejax.sparsity.masks import soft_threshold_scale


class SoftThresholdScale(nnx.Variable[jax.Array]):
    """The scale beta of the soft threshold, float32, one per sparse weight: frozen
    state, not trained."""


class RouterState(nnx.Variable[jax.Array]):
    """An array that a router keeps: state that is not trained."""


class ObservedState(nnx.Variable[jax.Array]):
    """An array that training steps observe: state that is not trained."""


class WeightsAsRead(nnx.Variable[Any]):
    """The weights of a layer in the form that its GEMMs read, 2:4, in the compute dtype
    or in 8-bit floats, made from the masters: see `micro_batches`."""


class EmbeddingAsHead(nnx.Variable[jax.Array]):
    """The embedding as the head of a tied model reads it, with a gradient of its own:
    see `micro_batches`."""


def variables(
    kind: type[nnx.Variable[jax.Array]], arrays: Mapping[str, jax.Array]
) -> nnx.Dict:
    """Returns arrays as variables of one kind, by the same names."""
    return nnx.Dict({name: kind(array) for name, array in arrays.items()})


def arrays_of(kept: nnx.Dict) -> dict[str, jax.Array]:
    """Returns the arrays of such variables, by their names."""
    return {name: kept[name][...] for name in kept}


def set_arrays(kept: nnx.Dict, arrays: Mapping[str, jax.Array]) -> None:
    """Gives such variables other arrays, in place.

    Raises:
      ValueError: the arrays have other names than the variables.
    """
    if set(arrays) != set(kept):
        raise ValueError(
            f"arrays {sorted(arrays)} cannot take the place of {sorted(kept)}; a "
            f"router keeps arrays of the same names from its `initial_state` on"
        )
    for name, array in arrays.items():
        kept[name].set_value(array)


def soft_threshold_scales(
    into_hidden: Sequence[Float[Array, "*layers d_model d_hidden"]],
    w_down: Float[Array, "*layers d_hidden d_model"],
) -> Float[Array, "*layers matrices"]:
    """Returns beta of an FFN's present weights, in the order (gate,) up, down. GEMMs 1
    and 3 both reduce over d_model: axis -2 of W1, the last axis of W2."""
    scales = [soft_threshold_scale(w, axis=-2) for w in into_hidden]
    scales.append(soft_threshold_scale(w_down, axis=-1))
    return jnp.stack(scales, axis=-1)
