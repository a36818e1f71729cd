"""A state as a checkpoint stores it: plain arrays by name, each with a description."""

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree


def named_leaves(tree: PyTree) -> dict[str, Any]:
    """Returns the leaves under the names that the checkpoint stores them by.

    They are a flat dictionary rather than the tree itself: names and structure are then
    ours, empty containers and None cost nothing, and any pytree can be a template.

    Raises:
      ValueError: two leaves have one name.
    """
    leaves = jax.tree.leaves_with_path(tree)
    named = {jax.tree_util.keystr(path): leaf for path, leaf in leaves}
    if len(named) != len(leaves):
        names = [jax.tree_util.keystr(path) for path, _ in leaves]
        double = next(name for name in names if names.count(name) > 1)
        raise ValueError(
            f"two leaves of the state are named {double}; rename one, so that a "
            f"checkpoint can tell them apart"
        )
    return named


FORMER = {
    # Before routers kept other arrays than centres.
    r"(?<!\['router_state'\])\['centres'\]\.value$": (
        r"['router_state']['centres'].value"
    ),
    # When all of the arrays were one variable.
    r"\['(router_state|observed)'\]\.value\['(\w+)'\]$": r"['\1']['\2'].value",
}
"""The ends of names under which older checkpoints store a leaf, as regular expressions,
and the end that the name has now. An array with a former name whose leaf exists no more
is not read."""


def with_present_names(saved: dict[str, Any]) -> dict[str, str]:
    """Returns, for the name of each saved leaf, the name that the leaf has now."""

    def present(name: str) -> str:
        for former, now in FORMER.items():
            name = re.sub(former, now, name)
        return name

    return {name: present(name) for name in saved}


def describe(name: str, leaf: Any) -> dict[str, Any]:
    """Returns the shape, the dtype and the kind of random key of the leaf `name`, as
    JSON.

    Raises:
      ValueError: the leaf is no `jax.Array`.
    """
    if not isinstance(leaf, jax.Array):
        raise ValueError(
            f"state{name} is {type(leaf).__name__}, not jax.Array; convert it with "
            f"jnp.asarray, or put it into the metadata"
        )
    described = {"shape": list(leaf.shape), "dtype": str(leaf.dtype)}
    if _is_key(leaf):
        described["key_impl"] = str(jax.random.key_impl(leaf))
    return described


def is_description(leaf: Any) -> bool:
    """Returns whether a value has the form of what `describe` returns."""
    return isinstance(leaf, dict) and (
        type(leaf.get("shape")) is list
        and all(type(size) is int for size in leaf["shape"])
        and type(leaf.get("dtype")) is str
        and type(leaf.get("key_impl", "")) is str
    )


def storable(leaves: dict[str, Array]) -> dict[str, Array]:
    """Returns plain arrays with at least one entry, the only ones that orbax stores."""
    return {
        name: jax.random.key_data(leaf) if _is_key(leaf) else leaf
        for name, leaf in leaves.items()
        if leaf.size
    }


def stored_spec(leaf: Any) -> jax.ShapeDtypeStruct:
    """Returns the shape, dtype and sharding of the stored array behind a leaf of the
    template."""
    sharding = getattr(leaf, "sharding", None)
    if sharding is None:
        sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    if _is_key(leaf):
        # The data have one more axis, which a sharding of the keys leaves whole.
        spec = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        leaf = jax.eval_shape(jax.random.key_data, spec)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def check_fits(path: Path, saved: dict[str, Any], template: dict[str, Any]) -> None:
    """Raises ValueError for the first leaf, in the template's order, that differs, or
    that JAX cannot hold as it is set up.

    Args:
      path: the checkpoint, for the message.
      saved: what `describe` returned, by name.
      template: the leaves of the template, by name.
    """
    for name, leaf in template.items():
        if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
            raise ValueError(
                f"state{name} of the template is {type(leaf).__name__}; every leaf has "
                f"to be an array or a jax.ShapeDtypeStruct"
            )
    theirs = {n: f"{s['dtype']} {tuple(s['shape'])}" for n, s in saved.items()}
    ours = {n: f"{leaf.dtype} {tuple(leaf.shape)}" for n, leaf in template.items()}
    for name in [*ours, *theirs]:
        in_checkpoint, in_template = (
            side.get(name, "nothing") for side in (theirs, ours)
        )
        if in_checkpoint != in_template:
            raise ValueError(
                f"{path} does not fit the template: at state{name} the checkpoint has "
                f"{in_checkpoint}, the template {in_template}; build the template from "
                f"the settings that the run was saved with"
            )
    for name, leaf in template.items():
        # JAX would cut these to 32 bits without a word.
        if (
            not _is_key(leaf)
            and jax.dtypes.canonicalize_dtype(leaf.dtype) != leaf.dtype
        ):
            raise ValueError(
                f"state{name} of {path} is {leaf.dtype}, which JAX cannot hold as it "
                f"is set up; restore it with jax_enable_x64"
            )


def rebuild(
    path: Path, array: Array | None, leaf: Any, described: dict[str, Any]
) -> Array:
    """Returns the leaf that was saved, from the array that was stored for it.

    Args:
      path: the checkpoint, for the message.
      array: the stored array; None of a leaf without entries.
      leaf: the leaf of the template, which `check_fits` let pass.
      described: what `describe` returned for the leaf that was saved.
    Raises:
      ValueError: the description is of another kind of random key.
    """
    if array is None:
        spec = stored_spec(leaf)
        empty = jnp.zeros(spec.shape, spec.dtype)
        array = jax.device_put(empty, spec.sharding)
    if _is_key(leaf):
        return _as_key(path, array, leaf, described.get("key_impl"))
    return array


def _as_key(path: Path, data: Array, leaf: Any, impl: str | None) -> Array:
    """Returns the random key of the leaf's type that has the given data."""
    try:
        key = jax.random.wrap_key_data(data, impl=impl)
    except (ValueError, TypeError):
        key = None
    if key is None or key.dtype != leaf.dtype:
        raise ValueError(
            f"{path} is damaged: its record says key_impl={impl!r} of a random key of "
            f"type {leaf.dtype}; use another step, or resume the run, which sets "
            f"damaged checkpoints aside"
        )
    return key


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
