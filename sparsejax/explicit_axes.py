"""Computing inside automatic axes where arrays lie on a mesh with explicit ones.

`jax.make_mesh` makes explicit axes unasked: arrays then carry their sharding in their
types, and every operation has to say the sharding of its result where it is not the
only one possible. Groups of four, routing and k-means would have to say it everywhere.
They run inside automatic axes instead, where XLA finds the shardings, and their results
get theirs at the end.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

type Specs = PyTree
"""A `PartitionSpec` for each result, or for all results below it."""


def with_automatic_axes[M: Mesh | AbstractMesh](mesh: M) -> M:
    """Returns the mesh with automatic axes in the place of explicit ones."""
    kinds = (
        AxisType.Auto if kind == AxisType.Explicit else kind for kind in mesh.axis_types
    )
    return mesh.update(axis_types=tuple(kinds))  # pyrefly: ignore[bad-return]


def explicit_mesh(*operands: PyTree) -> Mesh | AbstractMesh | None:
    """Returns the mesh with explicit axes that an array of the operands lies on, or
    that is set around the call (`jax.set_mesh`); None where there is none. It is the
    mesh of devices where an array that is no tracer tells it."""
    found = None
    for leaf in jax.tree.leaves(operands):
        sharding = jax.typeof(leaf).sharding
        if not _is_explicit(sharding.mesh):
            continue
        if not isinstance(leaf, jax.core.Tracer):
            return leaf.sharding.mesh
        found = sharding.mesh
    if found is None and _is_explicit(jax.sharding.get_abstract_mesh()):
        return jax.sharding.get_abstract_mesh()
    return found


def spec_of(array: Any) -> PartitionSpec:
    """Returns how the type of an array says that it is split; not at all where its mesh
    has no explicit axes."""
    return jax.typeof(array).sharding.spec


def split_along(array: Any, axis: int) -> Any:
    """Returns what the type of an array says of one of its axes: the mesh axes that
    split it, or None."""
    spec = tuple(spec_of(array))
    return (*spec, *(None,) * (jnp.ndim(array) - len(spec)))[axis]


def spec_along(axis: int, split: Any, *, ndim: int) -> PartitionSpec:
    """Returns the spec of an array that is split along one axis only, over the mesh
    axes `split`."""
    entries = [None] * ndim
    entries[axis] = split
    return PartitionSpec(*entries)


def automatically(function: Callable, *operands: PyTree, out: Specs) -> Any:
    """Returns `function(*operands)`, computed inside automatic axes.

    Args:
      function: a function of arrays, which must not read others from around it.
      operands: pytrees of arrays. Where one of them lies on a mesh with explicit axes,
        those that lie on no mesh are brought there, whole on every device.
      out: how the results are split over that mesh; not read where there is none.
    """
    mesh = explicit_mesh(operands)
    if mesh is None:
        return function(*operands)
    run = jax.sharding.auto_axes(
        function,
        axes=_explicit_axes(mesh),
        out_sharding=jax.tree.map(
            lambda spec: NamedSharding(mesh, spec),
            out,
            is_leaf=lambda x: isinstance(x, PartitionSpec),
        ),
    )
    is_there = lambda x: _is_explicit(jax.typeof(x).sharding.mesh)
    if isinstance(mesh, Mesh):
        whole = NamedSharding(mesh, PartitionSpec())
        put = lambda x: x if is_there(x) else jax.device_put(x, whole)
        operands = jax.tree.map(put, operands)
    return run(*operands)


def inside_automatic_axes(out: Callable[[PartitionSpec], Specs]) -> Callable:
    """Decorates a method of an NNX module that takes one array, and more by name: where
    an array, or the state of the module, lies on a mesh with explicit axes, the method
    runs inside automatic ones. The state keeps its shardings.

    Args:
      out: called with the spec of the first array; returns how the results are split.
    """

    def decorate(method: Callable) -> Callable:
        @wraps(method)
        def call(module: nnx.Module, x: Any, **named: Any) -> Any:
            if explicit_mesh(x, list(named.values()), nnx.state(module)) is None:
                return method(module, x, **named)
            arrays = {name: of for name, of in named.items() if hasattr(of, "dtype")}
            others = {name: of for name, of in named.items() if name not in arrays}
            graph, state = nnx.split(module)
            before, structure = jax.tree.flatten(state)
            moved: list[bool] = []

            def run(x, arrays, leaves):
                copy = nnx.merge(graph, jax.tree.unflatten(structure, leaves))
                result = method(copy, x, **arrays, **others)
                after = jax.tree.leaves(nnx.state(copy))
                moved[:] = (a is not b for a, b in zip(after, leaves, strict=True))
                return result, after

            specs = out(spec_of(x)), list(map(spec_of, before))
            result, after = automatically(run, x, arrays, before, out=specs)
            if any(moved):
                pairs = zip(before, after, moved, strict=True)
                leaves = [new if is_moved else old for old, new, is_moved in pairs]
                nnx.update(module, jax.tree.unflatten(structure, leaves))
            return result

        return call

    return decorate


def _explicit_axes(mesh: Mesh | AbstractMesh) -> tuple[str, ...]:
    named = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return tuple(name for name, kind in named if kind == AxisType.Explicit)


def _is_explicit(mesh: Mesh | AbstractMesh) -> bool:
    return bool(_explicit_axes(mesh))
