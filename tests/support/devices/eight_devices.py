"""Meshes of eight devices, and FFNs laid out on them."""

import jax
from jax.sharding import AxisType

from sparsejax.feed_forward.layout import FFNLayout

MESHES = {"data": (8, 1, 1), "fsdp": (1, 8, 1), "tensor": (1, 1, 8), "all": (2, 2, 2)}
"""The sizes of the axes `data`, `fsdp` and `tensor`."""


def layout_of(shape: tuple[int, int, int]) -> FFNLayout:
    axes = ("data", "fsdp", "tensor")
    return FFNLayout(mesh=jax.make_mesh(shape, axes, axis_types=(AxisType.Auto,) * 3))
