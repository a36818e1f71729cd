"""The state of an FFN that is not trained, a Flax NNX variable for each kind."""

import jax
from flax import nnx

from sparsejax.feed_forward.experts.observed import Observed
from sparsejax.feed_forward.operands.weights import PackedFFN
from sparsejax.routing.routers import State


class SoftThresholdScale(nnx.Variable[jax.Array]):
    """The scale beta of the soft threshold, float32, one per sparse weight: frozen
    state, not trained."""


class RouterState(nnx.Variable[State]):
    """The arrays that a router keeps, by name: state that is not trained."""


class ObservedState(nnx.Variable[Observed]):
    """The arrays that training steps observe, by name: state that is not trained."""


class PackedWeights(nnx.Variable[PackedFFN]):
    """The 2:4 weights that were compressed from the masters: see `micro_batches`."""
