"""The mesh of a run: which axis of which array lies on which devices.

    data     replicas; the batch is split over data and fsdp
    fsdp     parameters and moments are split; a layer's weights are gathered to be read
    tensor   heads, neurons and vocabulary are split

A mesh may lack any of the three; nothing is split over an axis that it lacks. The FFN
runs under shard_map (`feed_forward.layout`); everything else is compiled by XLA from
the annotations that `constrain` and `state_shardings` set.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from functools import partial

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int, PyTree

from sparsejax.config import MeshConfig, ModelConfig
from sparsejax.explicit_axes import automatically, with_automatic_axes
from sparsejax.feed_forward.layout import FFNLayout
from sparsejax.feed_forward.sparsity import FFNSparsity

AXES = ("data", "fsdp", "tensor")
AXIS_TYPES = (AxisType.Auto,) * len(AXES)
BATCH = ("data", "fsdp")
"""The mesh axes that split the sequences of a batch."""

_NEURONS = ("tensor", "fsdp")
# By the name of a parameter: what splits its last two axes. The FFN's weights are never
# split along d_model, the axis of their groups of four. Norm scales and biases are
# whole on every device.
_PARAMETER_AXES = {
    "embedding": ("tensor", "fsdp"),
    "embedding_as_head": ("tensor", "fsdp"),
    "head": ("fsdp", "tensor"),
    "w_query": ("fsdp", "tensor"),
    "w_key": ("fsdp", "tensor"),
    "w_value": ("fsdp", "tensor"),
    "w_out": ("tensor", "fsdp"),
    "w_up": (None, _NEURONS),
    "w_gate": (None, _NEURONS),
    "w_down": (_NEURONS, None),
}
# Attention's where they are blocks on a diagonal: each device has all of some blocks.
_BLOCK_AXES = {
    name: ("tensor", "fsdp", None) for name in ("w_query", "w_key", "w_value", "w_out")
}
STACKED_BLOCKS = 4
"""The number of axes that such weights have in a training state: layers, blocks, and
the two of a block."""


def make_mesh(config: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Returns the mesh of the given devices; None stands for all devices of all
    processes.

    Raises:
      ValueError: the axes do not multiply to the number of devices.
    """
    devices = jax.devices() if devices is None else devices
    resolved = config.resolve(len(devices))
    sizes = (resolved.data, resolved.fsdp, resolved.tensor)
    return jax.make_mesh(sizes, AXES, axis_types=AXIS_TYPES, devices=devices)


def batch_parts(mesh: Mesh | AbstractMesh | None) -> int:
    """Returns the number of parts that the mesh splits the sequences of a batch into; 1
    without a mesh."""
    return 1 if mesh is None else math.prod(mesh.shape.get(axis, 1) for axis in BATCH)


def ffn_layout(mesh: Mesh | None) -> FFNLayout | None:
    """Returns how the FFN lies on the mesh; None where a single device holds all of it.

    Raises:
      ValueError: the mesh has none of the axes that this module knows.
    """
    return None if mesh is None or mesh.size == 1 else FFNLayout(mesh=mesh)


def constrain(
    x: Array, mesh: Mesh | AbstractMesh | None, *axes: str | tuple[str, ...] | None
) -> Array:
    """Returns `x` split over the mesh, with one entry of `axes` for each axis of x;
    without a mesh it is not split."""
    if mesh is None or mesh.size == 1:
        return x
    sharding = sharding_of(with_automatic_axes(mesh), *axes)
    return jax.lax.with_sharding_constraint(x, sharding)


def stored_axes(name: str) -> tuple[str | tuple[str, ...] | None, ...]:
    """Returns the mesh axes that split the last axes of a parameter of this name in a
    training state."""
    return _PARAMETER_AXES[name]


def split_over(
    weights: Array,
    *axes: str | tuple[str, ...] | None,
    mesh: Mesh | AbstractMesh | None,
) -> Array:
    """Returns weights, of one layer or stacked, whose last axes are split over `axes`
    and which lie whole otherwise."""
    if mesh is None or mesh.size == 1:
        return weights
    split = (*(None,) * (weights.ndim - len(axes)), *axes)
    of = lambda weights: constrain(weights, mesh, *split)
    return automatically(of, weights, out=sharding_of(mesh, *split).spec)


def sharding_of(
    mesh: Mesh | AbstractMesh, *axes: str | tuple[str, ...] | None
) -> NamedSharding:
    """Returns the sharding of an array; the entry for each of its axes names the mesh
    axes that split it; those of size 1, and those that the mesh lacks, are left out.

    Equal shardings so have one spelling: `jit` compiles anew where specs differ,
    although they may say the same.
    """
    sizes = dict(mesh.shape)
    spec: list[str | tuple[str, ...] | None] = []
    for entry in axes:
        names = (entry,) if isinstance(entry, str) else entry or ()
        split = tuple(name for name in names if sizes.get(name, 1) > 1)
        spec.append(split if len(split) > 1 else split[0] if split else None)
    while spec and spec[-1] is None:
        spec.pop()
    return NamedSharding(mesh, PartitionSpec(*spec))


def local_rows(mesh: Mesh, size: int) -> list[int]:
    """Returns which of `size` sequences, split over the mesh, this process has to
    read."""
    sharding = sharding_of(mesh, BATCH)
    indices = sharding.addressable_devices_indices_map((size,)).values()
    parts = [range(*index[0].indices(size)) for index in indices if index is not None]
    return sorted({row for part in parts for row in part})


def place_rows(
    local: Int[np.ndarray, "..."], mesh: Mesh, *, axis: int, size: int
) -> Int[Array, "..."]:
    """Returns the array of `size` sequences along `axis`, split over the mesh.

    `local` has all of them, or just the `local_rows` of this process.
    """
    rows = range(size) if local.shape[axis] == size else local_rows(mesh, size)
    shape = (*local.shape[:axis], size, *local.shape[axis + 1 :])
    sharding = sharding_of(mesh, *(None,) * axis, BATCH)

    def part(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None
        first, end, _ = index[axis].indices(size)
        start = bisect_left(rows, first)
        here = slice(start, start + end - first)
        return local[(*index[:axis], here, *index[axis + 1 :])]

    return jax.make_array_from_callback(shape, sharding, part)


def state_shardings(state: PyTree, mesh: Mesh) -> PyTree:
    """Returns the sharding of every leaf of a training state: parameters and their
    moments are split by their name, all other leaves lie whole on every device."""
    of = partial(_sharding_in_state, mesh=mesh)
    return jax.tree_util.tree_map_with_path(of, state)


def constrain_gradient(
    path: tuple,
    gradient: Array,
    *,
    mesh: Mesh | AbstractMesh | None,
    whole_over_fsdp: bool = False,
) -> Array:
    """Returns the gradient of a parameter in a training state, split as the parameter
    is.

    Args:
      path: the path of the parameter.
      whole_over_fsdp: whether fsdp splits nothing but the embedding.
    """
    if mesh is None or mesh.size == 1:
        return gradient
    kept = ("data", "tensor") if whole_over_fsdp else AXES
    sharding = _sharding_in_state(path, gradient, mesh=mesh, kept=kept)
    return jax.lax.with_sharding_constraint(gradient, sharding)


def _sharding_in_state(
    path: tuple,
    leaf: jax.ShapeDtypeStruct | Array,
    *,
    mesh: Mesh | AbstractMesh,
    kept: Sequence[str] = AXES,
) -> NamedSharding:
    """Returns the sharding of one leaf of a training state. Matrices other than the
    embedding are split over the mesh axes in `kept` only."""
    for entry in path:
        name = str(getattr(entry, "key", ""))
        axes = _PARAMETER_AXES.get(name)
        if leaf.ndim == STACKED_BLOCKS:
            axes = _BLOCK_AXES.get(name, axes)
        if axes is None:
            continue
        if name != "embedding":
            axes = [_among(kept, of) for of in axes]
        return sharding_of(mesh, *(None,) * (leaf.ndim - len(axes)), *axes)
    return sharding_of(mesh)


def _among(kept: Sequence[str], entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """Returns those of the mesh axes that split an axis of an array which are kept."""
    named = (entry,) if isinstance(entry, str) else entry or ()
    return tuple(axis for axis in named if axis in kept)


def check_shardable(
    model: ModelConfig,
    sparsities: Sequence[FFNSparsity],
    mesh: MeshConfig,
    *,
    micro_batch: int,
) -> None:
    """Raises ValueError for what the mesh would cut apart, naming axis and size.

    Args:
      model: the sizes of the model.
      sparsities: the sparsities of the run's phases.
      mesh: resolved; its devices need not exist.
      micro_batch: sequences per micro-batch.
    """
    if micro_batch % mesh.token_shards:
        raise ValueError(
            f"a micro-batch of {micro_batch} sequences (batch_size / micro_batches) is "
            f"not a multiple of mesh.data x mesh.fsdp = {mesh.data} x {mesh.fsdp}; "
            f"change batch_size, micro_batches or the mesh"
        )
    for name, axis in (
        ("heads", "tensor"),
        ("kv_heads", "tensor"),
        ("vocab_size", "tensor"),
        ("d_model", "fsdp"),
    ):
        size, parts = getattr(model, name), getattr(mesh, axis)
        if size % parts:
            raise ValueError(
                f"model.{name}={size} is not a multiple of mesh.{axis}={parts}, which "
                f"splits it; change one of them"
            )
    if model.groups % mesh.tensor and model.groups > 1:
        raise ValueError(
            f"model.static_weights={model.static_weights} are {model.groups} groups, "
            f"not a multiple of mesh.tensor={mesh.tensor}, and a device has all of a "
            f"group's attention; use more groups, or mesh.data and mesh.fsdp in the "
            f"place of mesh.tensor"
        )
    if model.d_model // model.groups % mesh.fsdp:
        raise ValueError(
            f"model.d_model={model.d_model} in {model.groups} groups is not a multiple "
            f"of mesh.fsdp={mesh.fsdp} in each, which splits it; use fewer groups, or "
            f"mesh.data in the place of mesh.fsdp"
        )
    sizes = (mesh.data, mesh.fsdp, mesh.tensor)
    layout = FFNLayout(mesh=AbstractMesh(sizes, AXES, axis_types=AXIS_TYPES))
    for sparsity in sparsities:
        layout.check(micro_batch, model.d_hidden // model.groups, sparsity)
