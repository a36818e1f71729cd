"""A feed-forward module of another model that computes as a `SparseFFN`, on its own
kernels.

Nothing is copied: the module's parameters stay where they are, under their paths, in
their shapes and on their devices, so that its checkpoints, its sharding and the state
of its optimiser remain what they were. A `Kernel` is one of them as a `SparseFFN` sees
it, (d_in, d_out).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from sparsejax.feed_forward.activation import ActivationName
from sparsejax.feed_forward.layout import FFNLayout
from sparsejax.feed_forward.sparsity import DENSE, FFNSparsity
from sparsejax.models.ffn_state import SoftThresholdScale
from sparsejax.models.neuron_axes import NeuronAxis
from sparsejax.models.sparse_ffn import SparseFFN
from sparsejax.ops.backend import Backend

type Path = tuple[str | int, ...]
"""The place of a parameter below a module, name by name."""


@dataclass(frozen=True)
class Stored:
    """How a module stores one of an FFN's weights: as a parameter of its own, or as the
    half of one that also holds another weight."""

    path: Path
    transposed: bool = False
    """Whether the parameter is (d_out, d_in)."""
    half: int | None = None
    """0 or 1 where the parameter holds two weights, this one first or second."""
    halves_axis: int | None = None
    """The axis of the parameter, from its end, that has one entry for each of the two
    weights; None where they lie one after the other along the axis of d_out."""
    layers_axis: int = 0
    """The axis that counts the layers where the parameter stacks them. All other axes
    are those of one layer."""

    @property
    def out_axis(self) -> int:
        """The axis of the parameter, from its end, that d_out lies along."""
        return -2 if self.transposed else -1

    def read(self, parameter: jax.Array) -> Float[Array, "*layers d_in d_out"]:
        """Returns the weight that the parameter holds."""
        weight = parameter = self._moved(parameter, self.layers_axis, 0)
        if self.half is not None and self.halves_axis is not None:
            weight = jnp.take(parameter, self.half, axis=self.halves_axis)
        elif self.half is not None:
            weight = jnp.split(parameter, 2, axis=self.out_axis)[self.half]
        return weight.swapaxes(-1, -2) if self.transposed else weight

    def written(
        self, parameter: jax.Array, weight: Float[Array, "*layers d_in d_out"]
    ) -> jax.Array:
        """Returns the parameter with another weight in its place."""
        parameter = self._moved(parameter, self.layers_axis, 0)
        return self._moved(self._replaced(parameter, weight), 0, self.layers_axis)

    def _moved(self, parameter: jax.Array, axis: int, to: int) -> jax.Array:
        """Returns a parameter that stacks layers with their axis elsewhere; that of one
        layer, which a loop over the layers sees, as it is."""
        rank = 2 if self.halves_axis is None else 3
        return (
            parameter if parameter.ndim == rank else jnp.moveaxis(parameter, axis, to)
        )

    def _replaced(self, parameter: jax.Array, weight: jax.Array) -> jax.Array:
        weight = weight.swapaxes(-1, -2) if self.transposed else weight
        if self.half is None:
            return weight
        if self.halves_axis is not None:
            halves = [
                jnp.take(parameter, index, axis=self.halves_axis) for index in (0, 1)
            ]
            halves[self.half] = weight
            return jnp.stack(halves, axis=self.halves_axis)
        halves = jnp.split(parameter, 2, axis=self.out_axis)
        halves[self.half] = weight
        return jnp.concatenate(halves, axis=self.out_axis)

    def neuron_axis(self, *, of_output: bool) -> NeuronAxis:
        """Returns where the neurons lie in the parameter: along d_out (`of_output`) or
        along d_in."""
        layers = {"layers_axis": self.layers_axis}
        if self.half is not None and self.halves_axis is None:
            return NeuronAxis(self.out_axis, copies=2, **layers)
        if of_output:
            return NeuronAxis(self.out_axis, **layers)
        return NeuronAxis(-1 if self.transposed else -2, **layers)


@dataclass(frozen=True, kw_only=True)
class Form:
    """How a module is an FFN: its activation, and where its weights are."""

    activation: ActivationName
    d_model: int
    d_hidden: int
    up: Stored
    down: Stored
    gate: Stored | None = None
    dtype: str
    """The dtype of its output, which is the compute dtype of the adopted FFN."""
    follows_x: bool = False
    """Whether the module computes in the dtype of x, so that x must have `dtype`."""

    def stacked(self, layers_axis: int) -> "Form":
        """Returns the form of layers that are stacked along an axis of all their
        parameters."""
        of = lambda stored: stored and replace(stored, layers_axis=layers_axis)
        kernels = {"up": of(self.up), "down": of(self.down), "gate": of(self.gate)}
        return replace(self, **kernels)

    def __str__(self) -> str:
        """Returns the form in words, such as "swiglu, (gate_proj.kernel,
        up_proj.kernel, down_proj.kernel), 16 to 64 neurons"."""
        stored = [of for of in (self.gate, self.up, self.down) if of is not None]
        names = dict.fromkeys(".".join(map(str, of.path)) for of in stored)
        return (
            f"{self.activation} of {', '.join(names)}; d_model {self.d_model}, "
            f"d_hidden {self.d_hidden}, {self.dtype}"
        )


class Kernel:
    """A weight of an adopted FFN, read and assigned as an `nnx.Param` is."""

    def __init__(self, ffn: "AdoptedFFN", stored: Stored) -> None:
        self._variable = _variable(ffn, stored.path)
        self._stored = stored

    def __getitem__(self, index: Any) -> jax.Array:
        """Returns the weight, (..., d_in, d_out), or a part of it."""
        weight = self._stored.read(self._variable[...])
        return weight if index is ... else weight[index]

    def __setitem__(self, index: Any, weight: jax.Array) -> None:
        """Replaces the whole weight, `kernel[...] = weight`."""
        if index is not ...:
            raise IndexError(f"index {index} is not ..., and a weight is set whole")
        self._variable[...] = self._stored.written(self._variable[...], weight)


class AdoptedFFN(SparseFFN):
    """A `SparseFFN` whose weights are the parameters of another module.

    `adopt` makes a module one, by giving it a class that is derived from this one and
    from its own; `release` gives it back what it was. Arguments that the module's own
    call takes besides x have no effect.
    """

    form: Form
    _original: type[nnx.Module]
    _replaced: Mapping[str, Any]
    """The attributes of the module that had the names of a `SparseFFN`'s."""

    def __call__(
        self,
        x: Float[Array, "*batch d_model"],
        *arguments: Any,
        token_ids: Int[Array, "*batch"] | None = None,
        key: Array | None = None,
        **settings: Any,
    ) -> Float[Array, "*batch d_model"]:
        """Returns the FFN of every token: `SparseFFN.__call__`.

        Raises:
          ValueError: as there; or the module has computed in the dtype of x, and x has
            another one than `sparsify` was told.
        """
        del arguments, settings
        if self.form.follows_x and x.dtype != self.form.dtype:
            raise ValueError(
                f"x has dtype {x.dtype}, in which this module would have computed, and "
                f"sparsify made it compute in {self.form.dtype}; give x that dtype, or "
                f"call sparsify with dtype={str(x.dtype)!r}"
            )
        return super().__call__(x, token_ids=token_ids, key=key)

    def check(self, sparsity: FFNSparsity) -> None:
        """Raises ValueError as `SparseFFN.check` does, and where training steps would
        have to observe something, which the model around may drop from a loop over its
        layers."""
        super().check(sparsity)
        kept = list(sparsity.observes)
        if sparsity.learns:
            kept.append(f"what router={sparsity.router.name!r} has learned")
        if kept:
            raise ValueError(
                f"the module of another model cannot keep {', '.join(kept)} from step "
                f"to step; leave out what needs it, as skipped_energy, or build the "
                f"model with SparseFFN"
            )

    @property
    def neuron_axes(self) -> dict[Path, NeuronAxis]:
        """The parameters below the module that have its neurons, and where."""
        form = self.form
        into = [of for of in (form.gate, form.up) if of is not None]
        axes = {of.path: of.neuron_axis(of_output=True) for of in into}
        return axes | {form.down.path: form.down.neuron_axis(of_output=False)}


def _kernel_property(attribute: str, role: str) -> property:
    """Returns the property by which an adopted FFN has a weight under the name that it
    has in a `SparseFFN`. A module's own attribute of that name stays in its dictionary,
    where Flax finds it."""

    def get(ffn: AdoptedFFN) -> Kernel | None:
        stored = getattr(ffn.form, role)
        return None if stored is None else Kernel(ffn, stored)

    def keep(ffn: AdoptedFFN, value: Any) -> None:
        vars(ffn)[attribute] = value

    return property(get, keep)


for _role in ("up", "down", "gate"):
    setattr(AdoptedFFN, f"w_{_role}", _kernel_property(f"w_{_role}", _role))

_STATE = (
    "scales",
    "router_state",
    "as_read",
    "observed",
    "share_of_step",
    "sparsity",
    "form",
)
_SETTINGS = (
    "d_model",
    "d_hidden",
    "activation",
    "dtype",
    "groups",
    "precision",
    "backend",
    "layout",
)
_OWN = (*_STATE, *_SETTINGS, "_original", "_replaced")
"""The attributes that an adopted FFN adds to the module."""


def adopt(
    module: nnx.Module,
    form: Form,
    *,
    backend: Backend | None = None,
    layout: FFNLayout | None = None,
) -> AdoptedFFN:
    """Makes a module of a form compute as a dense `SparseFFN`, in place, and returns
    it.

    Args:
      module: any Flax NNX module; see `sparsify.form_of` for its form.
      form: where the module has its weights, and what it computes of them.
      backend: what runs its sparse GEMMs; None for the fastest that can.
      layout: how it lies on a mesh of several devices; None on one device.
    """
    original = type(module)
    replaced = {name: vars(module)[name] for name in _OWN if name in vars(module)}
    for name in replaced:
        delattr(module, name)
    module.__class__ = _adopted_class(original)
    assert isinstance(module, AdoptedFFN)
    module.form = form
    module._original, module._replaced = original, nnx.static(replaced)
    module.d_model, module.d_hidden = form.d_model, form.d_hidden
    module.activation = form.activation
    module.dtype = jnp.dtype(form.dtype)
    module.groups = 1
    module.precision = "dtype"
    module.backend, module.layout = backend, layout
    module.scales = SoftThresholdScale(module._scales())
    module.router_state = nnx.data(None)
    module.as_read = nnx.data(None)
    module.observed, module.share_of_step = nnx.data(None), None
    module.sparsity = DENSE
    return module


def release(ffn: AdoptedFFN) -> nnx.Module:
    """Gives an adopted FFN, which has to be dense, its own class and attributes back,
    in place, and returns it."""
    original, replaced = ffn._original, ffn._replaced
    for name in _OWN:
        delattr(ffn, name)
    module: nnx.Module = ffn
    module.__class__ = original
    for name, value in replaced.items():
        setattr(module, name, value)
    return module


@cache
def _adopted_class(original: type[nnx.Module]) -> type[AdoptedFFN]:
    return type(f"Sparse{original.__name__}", (AdoptedFFN, original), {})


def _variable(module: nnx.Module, path: Path) -> nnx.Variable:
    """Returns the parameter at a path below the module."""
    found: Any = module
    for name in path:
        # A property of an adopted FFN may have the name of a module's own attribute.
        if isinstance(found, nnx.Module) and name in vars(found):
            found = vars(found)[name]
        else:
            found = found[name]
    return found
