"""The place of an FFN's neurons in its parameters."""

from typing import NamedTuple

NEURON_AXES = {"w_up": -1, "w_gate": -1, "w_down": -2}
"""The axis of an FFN's weight that counts its neurons."""


class NeuronAxis(NamedTuple):
    """The place of an FFN's neurons in a parameter."""

    axis: int
    """The axis that counts them, from the end, with the layers on the first axis."""
    copies: int = 1
    """How often all neurons lie one after the other along it: twice where a gate and an
    up projection are one parameter."""
    layers_axis: int = 0
    """The axis that counts the layers, where they are stacked."""
