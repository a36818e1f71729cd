"""The switch of a model and its optimiser between two steps of different sparsity.

A switch happens between two optimiser steps, in this order:
  leaving 2:4 weights: fold, W1 := beta S(W1), so that the dense network computes what
    the sparse one did (W2 needs none: GEMM 2 has read W2 itself all along);
  entering V:N:M activations: neurons are clustered by their columns of W1 and
    relabelled, W1, W2 and their optimiser moments alike;
  entering 2:4 weights: beta of every weight is computed and from then on frozen.

An FFN whose sparsity does not change is not touched, and everything that can be refused
is refused before anything is changed.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from itertools import takewhile
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.tree_util import GetAttrKey, SequenceKey
from jaxtyping import Array, Int, PyTree

from sparsejax.explicit_axes import automatically, spec_of
from sparsejax.feed_forward.sparsity import FFNSparsity
from sparsejax.models.sparse_ffn import SparseFFN
from sparsejax.sparsity.masks import soft_threshold

type Path = tuple[str, ...]
"""The place of a parameter in a model, name by name."""


def switch[O](
    model: nnx.Module, optimizer: O, sparsity: FFNSparsity, *, fold: bool = True
) -> O:
    """Brings every `SparseFFN` of the model to `sparsity`, in place.

    Args:
      model: a module that contains `SparseFFN`s, stacked or not, or is one.
      optimizer: an `nnx.Optimizer` of the model, which is updated in place, or the
        state of an optax optimiser, or None where there is none; it holds the moments
        of this model, and of no larger one. A leaf belongs to the parameter with the
        longest path that the leaf's own path ends with, but for what an optimiser has
        below it, such as an array for each axis. Leaves of an FFN's weights are
        permuted with its neurons, all others stay as they are.
      sparsity: the sparsity of the next steps.
      fold: on leaving 2:4 weights, set W1 to beta S(W1), which the forward has used.
    Returns:
      the optimiser given, or the state for the relabelled neurons.
    Raises:
      ValueError: the model has no `SparseFFN`, the sparsity does not fit one of them,
        or a leaf of the state cannot be permuted. Nothing has been changed then.
    """
    ffns = _ffns_to_change(model, sparsity)
    entering_experts = {
        path: ffn for path, ffn in ffns.items() if _has_to_cluster(ffn, sparsity)
    }
    moments = _Moments.of(model, optimizer, entering_experts)
    entering_weights = []
    for ffn in ffns.values():
        before = ffn.sparsity
        if before.weights and not sparsity.weights and fold:
            fold_weights(ffn)
        if sparsity.weights and not before.weights:
            entering_weights.append(ffn)
        ffn.compute_as(sparsity)
    optimizer = moments.follow(
        {path: ffn.cluster() for path, ffn in entering_experts.items()}
    )
    for ffn in entering_weights:
        ffn.refresh_scales()
    return optimizer


def set_sparsity(model: nnx.Module, sparsity: FFNSparsity) -> None:
    """Brings every `SparseFFN` of a model without an optimiser to `sparsity`, in place
    and without folding.

    It is `switch` but for these: a model that leaves 2:4 weights computes with its
    masters again, as one does who looks at it without its masks.

    Raises:
      ValueError: as in `switch`; or neurons would have to be clustered, which renumbers
        them, and the moments of an optimiser would have to follow.
    """
    for path, ffn in _ffns_to_change(model, sparsity).items():
        if _has_to_cluster(ffn, sparsity):
            raise ValueError(
                f"activations={sparsity.activations} has {sparsity.experts} experts, "
                f"for which the neurons of {_name_of(path)} have to be clustered and "
                f"renumbered, and an optimiser's moments with them; call "
                f"switch(model, optimizer, sparsity), with None where there is no "
                f"optimiser"
            )
    switch(model, None, sparsity, fold=False)


def relabel_neurons[O](
    model: nnx.Module, optimizer: O, *, warm_start: bool = False
) -> O:
    """Clusters the neurons of every `SparseFFN` that has experts, in place.

    The dense function of the model stays as it is.

    Args:
      model: a module that contains `SparseFFN`s, or is one.
      optimizer: as in `switch`.
      warm_start: begin at the present grouping and not at a spread-out one.
    Returns:
      the optimiser given, or the state for the relabelled neurons.
    Raises:
      ValueError: no FFN has experts, or a leaf of the state cannot be permuted. Nothing
        has been changed then.
    """
    ffns = {
        path: ffn
        for path, ffn in _sparse_ffns_by_path(model).items()
        if ffn.sparsity.experts is not None
    }
    if not ffns:
        raise ValueError(
            "no SparseFFN of the model has experts to cluster for; switch to a "
            "sparsity with activations=VNM(v, 2, m) first"
        )
    moments = _Moments.of(model, optimizer, ffns)
    return moments.follow(
        {path: ffn.cluster(warm_start=warm_start) for path, ffn in ffns.items()}
    )


def _has_to_cluster(ffn: SparseFFN, sparsity: FFNSparsity) -> bool:
    """Returns whether the neurons of an FFN that enters `sparsity` are not grouped for
    it yet: it has no experts, others, or a router that left like neurons apart."""
    if sparsity.experts is None:
        return False
    apart = sparsity.router.clusters and not ffn.sparsity.router.clusters
    return apart or sparsity.experts != ffn.sparsity.experts


def fold_weights(ffn: SparseFFN) -> None:
    """Sets W to beta S(W), in place, for the weights that GEMM 1 reads (W1; Wg and Wu
    if gated)."""
    for index, w in enumerate(ffn.into_hidden):
        weight, scale = w[...], ffn.scales[...][..., index, None, None]
        folded = lambda w, scale: scale * soft_threshold(w, axis=-2)
        w[...] = automatically(folded, weight, scale, out=spec_of(weight))


def _sparse_ffns_by_path(model: nnx.Module) -> dict[Path, SparseFFN]:
    return {
        tuple(map(str, path)): part
        for path, part in nnx.iter_modules(model)
        if isinstance(part, SparseFFN)
    }


def _ffns_to_change(model: nnx.Module, sparsity: FFNSparsity) -> dict[Path, SparseFFN]:
    """Returns the FFNs of the model whose sparsity is not `sparsity`, by their path.

    Raises:
      ValueError: the model has no FFN, or one of them cannot have the sparsity.
    """
    ffns = _sparse_ffns_by_path(model)
    if not ffns:
        raise ValueError(
            f"a {type(model).__name__} without any SparseFFN has no sparsity to set; "
            f"build it with SparseFFN, or pass the module that contains them"
        )
    for ffn in ffns.values():
        ffn.check(sparsity)
    return {path: ffn for path, ffn in ffns.items() if ffn.sparsity != sparsity}


class _Neurons(NamedTuple):
    """The FFN whose neurons a leaf of an optimiser's state holds, and the axis that
    they lie along."""

    ffn: Path
    axis: int
    """The axis of the leaf that counts the neurons, from the end, with the layers on
    the first axis."""
    copies: int
    """How often all neurons lie one after the other along it."""
    layers_axis: int
    """The axis of the leaf that counts the layers, where they are stacked."""


class _Moments[O](NamedTuple):
    """The state of an optimiser, and which of its leaves follow an FFN's neurons."""

    optimizer: O
    state: PyTree
    neurons: Mapping[int, _Neurons]
    """The neurons that a leaf holds, by the leaf's number in
    `jax.tree.leaves(state)`."""

    @classmethod
    def of(
        cls,
        model: nnx.Module,
        optimizer: O,
        ffns: Mapping[Path, SparseFFN],
    ) -> "_Moments[O]":
        """Returns the state with the leaves that belong to the weights of `ffns`.

        Raises:
          ValueError: a leaf that belongs to these weights, or may belong to them,
            cannot be permuted; or the state is that of a larger model.
        """
        state = optimizer
        if isinstance(optimizer, nnx.Optimizer):
            state = nnx.state(optimizer)
        if not ffns:
            return cls(optimizer, state, {})
        shapes = {
            tuple(map(str, path)): param.get_value().shape
            for path, param in nnx.to_flat_state(nnx.state(model, nnx.Param))
        }
        weights = {
            (*path, *map(str, name)): _Neurons(path, *axis)
            for path, ffn in ffns.items()
            for name, axis in ffn.neuron_axes.items()
            if (*path, *map(str, name)) in shapes
        }
        if not weights:  # none of them is trained
            return cls(optimizer, state, {})
        smallest = min(math.prod(shapes[path]) for path in weights)
        _check_of_one_model(optimizer, weights)
        neurons = {}
        leaves, _ = jax.tree_util.tree_flatten_with_path(state)
        for number, (keys, leaf) in enumerate(leaves):
            names, shape = _names(keys), jnp.shape(leaf)
            param, _ = _longest_within(names, shapes)
            if param in weights:
                path, axis, copies, layers_axis = weights[param]
                # Which axis a factored moment lacks is known with layers in front.
                layers = len(shapes[param]) - (0 if layers_axis else 2)
                own_axis = _axis_in(shape, shapes[param], axis, layers, names)
                if own_axis is not None:
                    found = _Neurons(path, own_axis, copies, layers_axis)
                    neurons[number] = found
            elif param is None and math.prod(shape) >= smallest:
                raise ValueError(
                    f"{_name_of(names)}, a leaf of shape {shape} of the optimiser's "
                    f"state, belongs to no parameter of the model by its path, but is "
                    f"large enough to hold the moments of an FFN, whose neurons are "
                    f"about to be renumbered; {WITHOUT_MOMENTS}"
                )
        return cls(optimizer, state, neurons)

    def follow(self, orders: Mapping[Path, Int[Array, "*layers d_hidden"]]) -> O:
        """Returns the optimiser after neuron order[i] of an FFN has become its neuron
        i."""
        if not self.neurons:
            return self.optimizer
        leaves, structure = jax.tree.flatten(self.state)
        for number, (path, axis, copies, layers_axis) in self.neurons.items():
            order = repeated(orders[path], copies)
            by_layer = jnp.moveaxis(leaves[number], layers_axis, 0)
            renumbered = take_neurons(by_layer, order, axis)
            leaves[number] = jnp.moveaxis(renumbered, 0, layers_axis)
        state = jax.tree.unflatten(structure, leaves)
        if not isinstance(self.optimizer, nnx.Optimizer):
            return state
        nnx.update(self.optimizer, state)
        return self.optimizer


WITHOUT_MOMENTS = (
    "switch with optimizer=None and initialise the optimiser anew from the model's "
    "parameters, or permute this leaf yourself and leave it out of the state"
)


def _axis_in(
    shape: tuple[int, ...],
    of_param: tuple[int, ...],
    axis: int,
    layers: int,
    names: Sequence[str],
) -> int | None:
    """Returns the axis of a leaf, counted from the end, that counts a parameter's
    neurons; None where the leaf does not have the neurons.

    A leaf has the parameter's shape, or that shape without one axis (the factored
    moments of Adafactor), or is a single number that stands for no moment.

    Args:
      shape: the shape of the leaf.
      of_param: the shape of the parameter.
      axis: the axis of the neurons in the parameter, counted from the end.
      layers: how many leading axes of the parameter stack layers.
      names: the path of the leaf, for the error.
    Raises:
      ValueError: the shape is another one, or leaves open which axis is missing.
    """
    if shape == of_param:
        return axis
    if math.prod(shape) <= 1:
        return None
    rank = len(of_param)
    found = {
        # An axis that goes away behind the neurons' brings them nearer to the end.
        axis + 1 if gone > rank + axis else (None if gone == rank + axis else axis)
        for gone in range(layers, rank)
        if of_param[:gone] + of_param[gone + 1 :] == shape
    }
    if len(found) == 1:
        return found.pop()
    raise ValueError(
        f"{_name_of(names)}, a leaf of shape {shape} of the optimiser's state, belongs "
        f"to an FFN weight of shape {of_param}, whose neurons are about to be "
        f"renumbered, and its shape does not say where they are; {WITHOUT_MOMENTS}"
    )


def repeated(
    order: Int[Array, "*layers d_hidden"], copies: int
) -> Int[Array, "*layers copies_of_d_hidden"]:
    """Returns the order of neurons that lie so many times one after the other."""
    neurons = order.shape[-1]
    return jnp.concatenate([order + copy * neurons for copy in range(copies)], axis=-1)


def take_neurons(
    leaf: jax.Array, order: Int[Array, "*layers d_hidden"], axis: int
) -> jax.Array:
    """Returns the array with neuron order[i] in the place of neuron i along `axis`,
    which counts from the end. With stacked layers each layer has its own order."""
    take = partial(jnp.take, axis=axis)
    # Layer by layer: on a mesh, a layer that is permuted is whole on every device.
    by_layer = lambda *stacked: jax.lax.map(lambda of: take(*of), stacked)
    how = take if order.ndim == 1 else by_layer
    return automatically(how, leaf, order, out=spec_of(leaf))


def _names(keys: Sequence[object]) -> Path:
    """Returns a leaf's path as names, without the attribute of the Variable that holds
    it."""
    if keys and getattr(keys[-1], "name", None) in ("value", "raw_value"):
        keys = keys[:-1]
    return tuple(str(_name(key)) for key in keys)


def _name(key: object) -> object:
    for attribute in ("key", "name", "idx"):
        if hasattr(key, attribute):
            return getattr(key, attribute)
    return key


def _longest_within(names: Path, params: Collection[Path]) -> tuple[Path | None, int]:
    """Returns the parameter with the longest path that `names` ends with, and the place
    where it begins there; that may be followed by what an optimiser has below it."""
    for end in range(len(names), 0, -1):
        for start in range(end):
            if names[start:end] in params:
                return names[start:end], start
    return None, 0


def _check_of_one_model(optimizer: object, weights: Collection[Path]) -> None:
    """Raises ValueError where a state holds several moments of one kind for a weight:
    it is that of a model of which this one is a part.

    What lies between the last field of a state, such as `mu`, and a weight's path is
    the place of the model in what was given to the optimiser: one for all weights. In a
    state without fields it begins after the numbers of tuples.
    """
    if isinstance(optimizer, nnx.Optimizer):
        optimizer = optimizer.opt_state  # its own state has no fields
    places: dict[Path, Path] = {}
    for keys, _ in jax.tree_util.tree_flatten_with_path(optimizer)[0]:
        weight, start = _longest_within(_names(keys), weights)
        if weight is not None:
            above = keys[:start]
            fields = [at for at, key in enumerate(above) if isinstance(key, GetAttrKey)]
            parts = takewhile(lambda key: isinstance(key, SequenceKey), above)
            begin = fields[-1] + 1 if fields else len(list(parts))
            places.setdefault(_names(above[begin:]), weight)
    if len(places) > 1:
        first, second, *_ = (
            _name_of((*place, *weight)) for place, weight in places.items()
        )
        raise ValueError(
            f"the optimiser's state has moments of {first} and of {second}: it is that "
            f"of a larger model than the one to switch, and which of them belong to "
            f"this one cannot be told; give the whole model, or optimizer=None, and "
            f"initialise the optimiser anew. An optimiser of your own that keeps "
            f"several moments of a weight has to name them by fields, as a NamedTuple "
            f"does"
        )


def _name_of(path: Sequence[str]) -> str:
    return ".".join(path) or "the model"
