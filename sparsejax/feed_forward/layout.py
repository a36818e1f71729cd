"""An FFN on a mesh: where its operands lie, and the collectives between its GEMMs.

    X, Y  (T, d)   tokens split over the axes `tokens`
    W1    (d, F)   F split over `hidden`, and each part again over `stored`
    W2    (F, d)   likewise; S(W1) and S(W2^T) as their weights

A device multiplies its tokens with its F / hidden neurons. Just before, it gathers
their weights over `stored` (FSDP): a packed weight as it is packed, 9 bits for every 16
of a bfloat16 weight. Y and dX are sums over `hidden` (tensor parallelism); dW1 and dW2
are summed over the tokens and scattered over `stored`. The groups of four of a weight
run along d, which is never split.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec
from jaxtyping import Array, PyTree

from sparsejax.feed_forward.sparsity import FFNSparsity
from sparsejax.ops.fp8_matmul import QuantisedWeight
from sparsejax.sparsity.compressed import Compressed, pack_positions, unpack_positions
from sparsejax.sparsity.packed import Packed
from sparsejax.sparsity.patterns import NM


@dataclass(frozen=True, kw_only=True)
class FFNLayout:
    """The names of the mesh axes that split an FFN's operands.

    Raises:
      ValueError: the mesh lacks a named axis or has explicit axes, or an axis is named
        with two meanings.
    """

    mesh: Mesh | AbstractMesh
    tokens: tuple[str, ...] = ("data", "fsdp")
    """The axes that split the tokens."""
    hidden: str = "tensor"
    """The axis that splits the F neurons; every device along it sees the same
    tokens."""
    stored: str = "fsdp"
    """The axis over which the stored weights are split further; one of `tokens`."""

    def __post_init__(self) -> None:
        check_axis_types(self.mesh)
        for axis in (*self.tokens, self.hidden, self.stored):
            if axis not in self.mesh.axis_names:
                raise ValueError(
                    f"axis {axis!r} is not one of the mesh, {self.mesh.axis_names}; "
                    f"name its axes in FFNLayout, or give the mesh one of size 1"
                )
        if self.hidden in self.tokens or self.stored not in self.tokens:
            raise ValueError(
                f"hidden={self.hidden!r} must not be among tokens={self.tokens}, and "
                f"stored={self.stored!r} must be: a device of `stored` has tokens of "
                f"its own, and one of `hidden` the tokens of its neighbours"
            )

    @property
    def token_shards(self) -> int:
        """The number of parts that the tokens are split into."""
        sizes = dict(self.mesh.shape)
        shards = 1
        for axis in self.tokens:
            shards *= sizes[axis]
        return shards

    @property
    def hidden_shards(self) -> int:
        """The number of parts that the neurons are split into while they are
        computed."""
        return dict(self.mesh.shape)[self.hidden]

    @property
    def stored_shards(self) -> int:
        """The number of parts that each device's neurons are split into while their
        weights are stored."""
        return dict(self.mesh.shape)[self.stored]

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


def check_axis_types(mesh: Mesh | AbstractMesh) -> None:
    """Raises ValueError where the mesh has explicit axes, which `jax.make_mesh` makes
    unasked. Arrays would then carry their sharding in their types, and it would have to
    be the one that the operations expect; with automatic axes they are brought
    there."""
    explicit = [
        name
        for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if kind == AxisType.Explicit
    ]
    if explicit:
        sizes = tuple(mesh.shape[name] for name in mesh.axis_names)
        raise ValueError(
            f"mesh has the explicit axes {', '.join(explicit)}, and all have to be "
            f"automatic; write jax.make_mesh({sizes}, {mesh.axis_names}, axis_types="
            f"(jax.sharding.AxisType.Auto,) * {len(sizes)}), or use "
            f"distributed.mesh.make_mesh"
        )


def token_spec(layout: FFNLayout | None) -> PartitionSpec:
    """Returns the spec of arrays whose first axis is the tokens; they are the same on
    all devices along `hidden`."""
    return PartitionSpec() if layout is None else PartitionSpec(layout.tokens)


def device_spec(layout: FFNLayout | None) -> PartitionSpec:
    """Returns the spec of arrays that differ on every device, concatenated along the
    first axis."""
    if layout is None:
        return PartitionSpec()
    return PartitionSpec((*layout.tokens, layout.hidden))


def weight_spec(
    layout: FFNLayout | None, hidden_axis: int, stacked: int = 0
) -> PartitionSpec:
    """Returns the spec of a weight with two axes behind `stacked` axes of layers; F is
    axis `hidden_axis` of the two (0 or 1, or counted from the end)."""
    if layout is None:
        return PartitionSpec()
    split = (layout.hidden, layout.stored)
    axes = (split if i == hidden_axis % 2 else None for i in range(2))
    return PartitionSpec(*(None,) * stacked, *axes)


def packed_specs(layout: FFNLayout | None, packed: PyTree) -> PyTree:
    """Returns the specs of the weights as GEMMs read them, those of a `PackedFFN`: the
    `weight_spec` of every 2:4 weight, and those of the arrays of a quantised one."""
    if packed is None:
        return None
    return type(packed)(
        **{name: _specs_of(layout, name, w) for name, w in packed._asdict().items()}
    )


def _specs_of(layout: FFNLayout | None, name: str, weight: Any) -> Any:
    if weight is None:
        return None
    if not isinstance(weight, QuantisedWeight):
        return weight_spec(layout, _hidden_axis(weight))
    axis = 0 if name == "down" else 1
    own, transposed = weight_spec(layout, axis), weight_spec(layout, 1 - axis)
    specs: Any = {"values": own, "transposed": transposed, "step": PartitionSpec()}
    return QuantisedWeight(**specs)


def _hidden_axis(c: Compressed | Packed) -> int:
    """Returns the axis of F, which is the axis without groups."""
    return 0 if c.axis == -1 else 1


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
        return Packed(
            gather_weight(layout, c.values, 0), gather_weight(layout, c.metadata, 0)
        )
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
    if layout is None or key is None:
        return key
    device = lax.axis_index((*layout.tokens, layout.hidden))
    return jax.random.fold_in(key, device)


def own_experts(layout: FFNLayout | None, experts: int) -> tuple[Any, int]:
    """Returns the index of this device's first expert, and how many experts it has."""
    if layout is None:
        return 0, experts
    count = experts // layout.hidden_shards
    return lax.axis_index(layout.hidden) * count, count


def gather_experts(layout: FFNLayout | None, scores: Array) -> Array:
    """Returns scores (tokens, all experts), gathered from each device's (tokens, its
    experts)."""
    if layout is None or layout.hidden_shards == 1:
        return scores
    return lax.all_gather(scores, layout.hidden, axis=1, tiled=True)
