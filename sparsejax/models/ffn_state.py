"""The state of layers that is not trained, a Flax NNX variable for each kind."""

from typing import Any

import jax
from flax import nnx

from sparsejax.feed_forward.experts.observed import Observed
from sparsejax.routing.routers import State


class SoftThresholdScale(nnx.Variable[jax.Array]):
    """The scale beta of the soft threshold, float32, one per sparse weight: frozen
    state, not trained."""


class RouterState(nnx.Variable[State]):
    """The arrays that a router keeps, by name: state that is not trained."""


class ObservedState(nnx.Variable[Observed]):
    """The arrays that training steps observe, by name: state that is not trained."""


class WeightsAsRead(nnx.Variable[Any]):
    """The weights of a layer in the form that its GEMMs read, 2:4 or in 8-bit floats,
    made from the masters: see `micro_batches`."""
