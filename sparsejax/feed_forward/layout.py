"""An FFN on a mesh: where its operands lie, and the collectives between its GEMMs.

    X, Y  (T, d)   tokens split over the axes `tokens`
    W1    (d, F)   F split over `hidden`, and each part again over `stored`
    W2    (F, d)   likewise; S(W1) and S(W2^T) as their weights

A mesh may lack any of these axes, and nothing is split over those that it lacks. A
device multiplies its tokens with its F / hidden neurons. Just before, it gathers
their weights over `stored` (FSDP): a packed weight as it is packed, 9 bits for every 16
of a bfloat16 weight. Y and dX are sums over `hidden` (tensor parallelism); dW1 and dW2
are summed over the tokens and scattered over `stored`. The groups of four of a weight
run along d, which is never split.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, PyTree

from sparsejax.explicit_axes import automatically, with_automatic_axes
from sparsejax.feed_forward.sparsity import FFNSparsity
from sparsejax.ops.fp8_matmul import QuantisedWeight
from sparsejax.sparsity.compressed import Compressed, pack_positions, unpack_positions
from sparsejax.sparsity.packed import Packed
from sparsejax.sparsity.patterns import NM


@dataclass(frozen=True, kw_only=True)
class FFNLayout:
    """The names of the mesh axes that split an FFN's operands.

    A default name that the mesh lacks is dropped: over ("data", "tensor"), `stored` is
    None, and over ("tensor",) the tokens are split over (). Axes of the mesh that none
    of the fields names hold copies. Explicit axes become automatic.

    Raises:
      ValueError: the mesh lacks an axis that is named and is no default, or has none
        of the default axes, or an axis is named with two meanings.
    """

    mesh: Mesh | AbstractMesh
    tokens: tuple[str, ...] = ("data", "fsdp")
    """The axes that split the tokens."""
    hidden: str | None = "tensor"
    """The axis that splits the F neurons; every device along it sees the same
    tokens."""
    stored: str | None = "fsdp"
    """The axis over which the stored weights are split further; one of `tokens`."""

    def __post_init__(self) -> None:
        names = self.mesh.axis_names
        default = {of.name: of.default for of in fields(self)}
        given = {name: getattr(self, name) for name in ("tokens", "hidden", "stored")}
        is_named = {*self.tokens, self.hidden}.intersection(names)
        if all(given[name] == default[name] for name in given) and not is_named:
            raise ValueError(
                f"the mesh has the axes {names} and none of "
                f"{(*self.tokens, self.hidden)}; name its axes, as FFNLayout(mesh="
                f"mesh, tokens=({names[0]!r},), hidden=None, stored=None)"
            )
        for name, value in given.items():
            named = value if isinstance(value, tuple) else (value,)
            kept = tuple(axis for axis in named if axis in names)
            if value == default[name]:
                value = kept if isinstance(value, tuple) else next(iter(kept), None)
                object.__setattr__(self, name, value)
            elif missing := [axis for axis in named if axis not in (*names, None)]:
                raise ValueError(
                    f"{name}={value!r} names the axis {missing[0]!r}, which is not one "
                    f"of the mesh, {names}; name one of these, or leave it out "
                    f"({'()' if isinstance(value, tuple) else 'None'})"
                )
        object.__setattr__(self, "mesh", with_automatic_axes(self.mesh))
        if self.hidden in self.tokens or self.stored not in (*self.tokens, None):
            raise ValueError(
                f"hidden={self.hidden!r} must not be among tokens={self.tokens}, and "
                f"stored={self.stored!r} must be: a device of `stored` has tokens of "
                f"its own, and one of `hidden` the tokens of its neighbours"
            )

    @property
    def token_shards(self) -> int:
        """The number of parts that the tokens are split into."""
        return math.prod(map(self._size, self.tokens))

    @property
    def hidden_shards(self) -> int:
        """The number of parts that the neurons are split into while they are
        computed."""
        return self._size(self.hidden)

    @property
    def stored_shards(self) -> int:
        """The number of parts that each device's neurons are split into while their
        weights are stored."""
        return self._size(self.stored)

    def _size(self, axis: str | None) -> int:
        return 1 if axis is None else self.mesh.shape[axis]

    @property
    def whole(self) -> "FFNLayout":
        """The layout in which each device holds the weights of all of its neurons."""
        return replace(self, stored=None)

    @property
    def own(self) -> tuple[str, ...]:
        """The axes along which devices differ in what they compute."""
        return self.tokens if self.hidden is None else (*self.tokens, self.hidden)

    @property
    def shards(self) -> dict[str, int]:
        """The number of parts that the tokens and the neurons are split into, as
        keyword arguments of an `FFNCall`."""
        return {
            "token_shards": self.token_shards,
            "hidden_shards": self.hidden_shards,
        }

    def check(self, tokens: int, d_hidden: int, sparsity: FFNSparsity) -> None:
        """Raises ValueError where the mesh would cut tokens, neurons, groups of four or
        experts apart."""
        names = " x ".join(self.tokens)
        if tokens % self.token_shards:
            raise ValueError(
                f"{tokens} tokens are not a multiple of {self.token_shards}, the size "
                f"of the mesh axes {names}; change the batch or the mesh"
            )
        parts = self.hidden_shards * self.stored_shards
        if d_hidden % parts:
            raise ValueError(
                f"d_hidden={d_hidden} is not a multiple of {parts}, the size of the "
                f"mesh axes {self.hidden} x {self.stored} that split it; pad it to "
                f"{-(-d_hidden // parts) * parts} or change the mesh"
            )
        pattern = sparsity.activations
        if isinstance(pattern, NM) and d_hidden // self.hidden_shards % pattern.m:
            raise ValueError(
                f"d_hidden={d_hidden} over mesh axis {self.hidden} of size "
                f"{self.hidden_shards} leaves {d_hidden // self.hidden_shards} neurons "
                f"per device, and groups of {pattern.m} in activations={pattern} must "
                f"not straddle devices; make {self.hidden} smaller"
            )
        if sparsity.experts and sparsity.experts % self.hidden_shards:
            raise ValueError(
                f"{sparsity.experts} experts of activations={pattern} are not a "
                f"multiple of mesh axis {self.hidden} of size {self.hidden_shards}, "
                f"and an expert must not straddle devices; use more experts or make "
                f"{self.hidden} smaller"
            )


def check_placed(layout: FFNLayout | None, **arrays: PyTree) -> None:
    """Raises ValueError where arrays were put on other devices than those of the
    layout, and says how to bring them there. Arrays that nobody has put anywhere are
    moved by jax; what arrays inside of a jitted function lie on, jax checks itself."""
    if layout is None or isinstance(layout.mesh, AbstractMesh):
        return
    there = set(layout.mesh.devices.flat)
    for name, tree in arrays.items():
        for array in jax.tree.leaves(tree):
            if isinstance(array, jax.core.Tracer) or not isinstance(array, jax.Array):
                continue
            if array.committed and array.devices() != there:
                raise ValueError(
                    f"{name} lies on {_devices(array.devices())}, and the mesh of the "
                    f"layout is {_devices(there)}; bring the model there before its "
                    f"first step: nnx.update(model, jax.device_put(nnx.state(model), "
                    f"NamedSharding(mesh, PartitionSpec()))), which puts all of it on "
                    f"each device, and what it is called with likewise"
                )


def _devices(devices: set[jax.Device]) -> str:
    """Returns devices in words, for an error."""
    first = min(devices, key=lambda device: device.id)
    count = len(devices)
    return f"device {first}" if count == 1 else f"{count} devices from {first} on"


def on_mesh(
    layout: FFNLayout | None,
    local: Callable,
    in_specs: tuple,
    out_specs: Any,
) -> Callable:
    """Returns a function that runs `local` on every device's part of its operands;
    without a layout it is `local` itself."""
    if layout is None:
        return local
    # Derivatives are written out by the callers: nothing differentiates through this,
    # so the replication that check_vma would track has no use.
    return jax.shard_map(
        local,
        mesh=layout.mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        check_vma=False,
    )


def token_spec(layout: FFNLayout | None) -> PartitionSpec:
    """Returns the spec of arrays whose first axis is the tokens; they are the same on
    all devices along `hidden`."""
    return _over(() if layout is None else layout.tokens)


def _over(axes: tuple[str, ...]) -> PartitionSpec:
    """Returns the spec of arrays whose first axis is split over these axes."""
    return PartitionSpec(axes) if axes else PartitionSpec()


def device_spec(layout: FFNLayout | None) -> PartitionSpec:
    """Returns the spec of arrays that differ on every device, concatenated along the
    first axis."""
    return _over(() if layout is None else layout.own)


def weight_spec(
    layout: FFNLayout | None, hidden_axis: int, stacked: int = 0
) -> PartitionSpec:
    """Returns the spec of a weight with two axes behind `stacked` axes of layers; F is
    axis `hidden_axis` of the two (0 or 1, or counted from the end)."""
    if layout is None:
        return PartitionSpec()
    split = tuple(axis for axis in (layout.hidden, layout.stored) if axis is not None)
    axes = (split or None if i == hidden_axis % 2 else None for i in range(2))
    return PartitionSpec(*(None,) * stacked, *axes)


def packed_specs(layout: FFNLayout | None, packed: PyTree) -> PyTree:
    """Returns the specs of the weights as GEMMs read them, those of a `PackedFFN`: the
    `weight_spec` of every 2:4 or dense weight, and those of the arrays of a quantised
    one."""
    if packed is None:
        return None
    specs = {name: _specs_of(layout, name, w) for name, w in packed._asdict().items()}
    return type(packed)(**specs)


def _specs_of(layout: FFNLayout | None, name: str, weight: Any) -> Any:
    if weight is None:
        return None
    if name == "dense":
        into, down = weight_spec(layout, 1), weight_spec(layout, 0)
        gate = None if weight.gate is None else into
        return type(weight)(up=into, down=down, gate=gate)
    if not isinstance(weight, QuantisedWeight):
        return weight_spec(layout, _hidden_axis(weight))
    axis = 0 if name == "down" else 1
    own, transposed = weight_spec(layout, axis), weight_spec(layout, 1 - axis)
    specs: Any = {"values": own, "transposed": transposed, "step": PartitionSpec()}
    return QuantisedWeight(**specs)


def _hidden_axis(c: Compressed | Packed) -> int:
    """Returns the axis of F, which is the axis without groups."""
    return 0 if c.axis == -1 else 1


def gathered_ffn(layout: FFNLayout | None, packed: PyTree, *, stacked: int) -> PyTree:
    """Returns the weights as GEMMs read them, those of a `PackedFFN`, gathered over
    `stored`: as they lie in `layout.whole`.

    Args:
      stacked: the number of axes in front of the two of each weight.
    """
    if packed is None or layout is None or layout.stored_shards == 1:
        return packed

    def of(spec: PartitionSpec, weight: PyTree) -> PyTree:
        spec = PartitionSpec(*(None,) * stacked, *spec) if spec else spec
        place = NamedSharding(layout.mesh, spec)
        put = lambda w: lax.with_sharding_constraint(w, place)
        return automatically(lambda w: jax.tree.map(put, w), weight, out=spec)

    specs = packed_specs(layout.whole, packed)
    is_spec = lambda of: isinstance(of, PartitionSpec)
    return jax.tree.map(of, specs, packed, is_leaf=is_spec)


def gather_weight(layout: FFNLayout | None, w: Array, hidden_axis: int) -> Array:
    """Returns the weight of all neurons of this device, gathered from the parts that
    the devices along `stored` hold."""
    if layout is None or layout.stored_shards == 1:
        return w
    # As integers, so that no backend converts, or touches the bits of, what it moves.
    bits = lax.bitcast_convert_type(w, jnp.dtype(f"uint{8 * w.dtype.itemsize}"))
    bits = lax.all_gather(bits, layout.stored, axis=hidden_axis, tiled=True)
    return lax.bitcast_convert_type(bits, w.dtype)


def gather_packed(
    layout: FFNLayout | None, c: Compressed | Packed | None
) -> Compressed | Packed | None:
    """Returns a 2:4 weight gathered as by `gather_weight`; what is moved is half the
    values, and two bits for each of them."""
    if c is None or layout is None or layout.stored_shards == 1:
        return c
    if isinstance(c, Packed):
        values, metadata = (
            gather_weight(layout, of, 0) for of in (c.values, c.metadata)
        )
        return replace(c, values=values, metadata=metadata)
    hidden_axis = _hidden_axis(c)
    values = gather_weight(layout, c.values, hidden_axis)
    packed = pack_positions(c.metadata, axis=c.axis)
    packed = lax.all_gather(packed, layout.stored, axis=hidden_axis, tiled=True)
    size = c.values.shape[c.axis]
    metadata = unpack_positions(packed, size, axis=c.axis)
    return Compressed(values, metadata, None, c.pattern, c.axis)


def gather_quantised(
    layout: FFNLayout | None, w: QuantisedWeight, hidden_axis: int
) -> QuantisedWeight:
    """Returns a weight in 8-bit floats gathered as by `gather_weight`. A forward or a
    backward reads one of its two orders, so that a byte of each entry is moved: XLA
    drops the other."""
    return QuantisedWeight(
        gather_weight(layout, w.values, hidden_axis),
        gather_weight(layout, w.transposed, 1 - hidden_axis),
        w.step,
    )


def sum_over_neurons(layout: FFNLayout | None, partial_sum: Array) -> Array:
    """Returns Y or dX as the sum of what each device's neurons contribute, in the dtype
    of these parts."""
    if layout is None or layout.hidden_shards == 1:
        return partial_sum
    return lax.psum(partial_sum, layout.hidden)


def sum_over_tokens(layout: FFNLayout | None, dw: Array, hidden_axis: int) -> Array:
    """Returns the gradient of a weight's stored part, summed over what each device's
    tokens contribute, in the dtype of these parts."""
    if layout is None:
        return dw
    if layout.stored_shards > 1:
        dw = lax.psum_scatter(
            dw, layout.stored, scatter_dimension=hidden_axis, tiled=True
        )
    others = tuple(axis for axis in layout.tokens if axis != layout.stored)
    replicas = layout.token_shards // layout.stored_shards
    return lax.psum(dw, others) if replicas > 1 else dw


def own_key(layout: FFNLayout | None, key: Array | None) -> Array | None:
    """Returns a random key for this device, so that no two devices draw alike."""
    if layout is None or key is None or not layout.own:
        return key
    device = lax.axis_index(layout.own)
    return jax.random.fold_in(key, device)


def own_experts(layout: FFNLayout | None, experts: int) -> tuple[Any, int]:
    """Returns the index of this device's first expert, and how many experts it has."""
    if layout is None or layout.hidden is None:
        return 0, experts
    count = experts // layout.hidden_shards
    return lax.axis_index(layout.hidden) * count, count


def gather_experts(layout: FFNLayout | None, scores: Array) -> Array:
    """Returns scores (tokens, all experts), gathered from each device's (tokens, its
    experts)."""
    if layout is None or layout.hidden_shards == 1:
        return scores
    return lax.all_gather(scores, layout.hidden, axis=1, tiled=True)
