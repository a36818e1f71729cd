"""The weights of an FFN as its GEMMs read them: dense, and packed 2:4."""

from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from sparsejax.dtypes import Precision
from sparsejax.explicit_axes import automatically, spec_along, split_along
from sparsejax.feed_forward.layout import (
    FFNLayout,
    check_placed,
    gathered_ffn,
    on_mesh,
    weight_spec,
)
from sparsejax.feed_forward.sparsity import FFNSparsity
from sparsejax.ops import dense_matmul, fp8_matmul
from sparsejax.ops.backend import Backend, Decision
from sparsejax.ops.fp8_matmul import (
    Quantised,
    QuantisedWeight,
    quantise,
    quantise_weight,
)
from sparsejax.ops.kernels import registry
from sparsejax.ops.kernels.registry import KernelSetName
from sparsejax.ops.sparse_matmul import pack_weight, sparse_matmul, why_not_packed
from sparsejax.sparsity.compressed import Compressed, compress, decompress
from sparsejax.sparsity.masks import magnitude_mask, soft_threshold
from sparsejax.sparsity.packed import Packed, unpack
from sparsejax.sparsity.patterns import NM, name_of


class FFNWeights[T](NamedTuple):
    """The weights of an FFN; or one value of another type for each of them, such as its
    gradient or its spec on a mesh."""

    up: T
    """The value for W1 (d_model, d_hidden), or for Wu of a gated FFN."""
    down: T
    """The value for W2 (d_hidden, d_model)."""
    gate: T | None = None
    """The value for Wg (d_model, d_hidden) of a gated FFN; None of a plain FFN."""


class PackedFFN(NamedTuple):
    """The weights of an FFN in the form that its GEMMs read: the matrices beta S(W),
    compressed along d_model, the axis that GEMMs 1 and 3 reduce over, and `Packed`
    where sparse tensor cores will read them; or weights in 8-bit floats, all of them
    where the FFN is dense, and those that GEMM 1 or the router reads where it is
    sparse. Beside them stand the dense weights, where they are rounded to the compute
    dtype."""

    up: Compressed | Packed | QuantisedWeight | None = None
    """S(W1), of logical shape (d_model, d_hidden), with groups along axis -2; `Packed`
    holds its transpose. Or W1 in 8-bit floats. None where W1 is read dense."""
    down: Compressed | Packed | QuantisedWeight | None = None
    """S(W2^T)^T, of logical shape (d_hidden, d_model), with groups along axis -1; None
    where GEMM 3 reads a dense weight. Or W2 in 8-bit floats."""
    gate: Compressed | Packed | QuantisedWeight | None = None
    """S(Wg) or Wg of a gated FFN, stored as `up`; None of a plain FFN."""
    dense: FFNWeights[jax.Array] | None = None
    """The weights in the compute dtype; None where the masters have it, or where every
    GEMM that reads a weight reads it in 8-bit floats."""


class ReadWeights(NamedTuple):
    """The weights as a device's GEMMs read them: dense ones in the compute dtype, and
    S(W) compressed where they are sparse, else None. In a backward with exact gradients
    `up` and `gate` are S(W), for GEMM 4 reads no other form of them."""

    up: jax.Array
    down: jax.Array
    gate: jax.Array | None = None
    packed_up: Compressed | Packed | None = None
    packed_down: Compressed | Packed | None = None
    packed_gate: Compressed | Packed | None = None
    quantised: FFNWeights[QuantisedWeight | None] = FFNWeights(None, None)
    """The weights in 8-bit floats; None each where neither a GEMM nor the router reads
    it so."""

    def dense(
        self, gemm: Decision, name: Literal["up", "down", "gate"]
    ) -> jax.Array | QuantisedWeight:
        """Returns the weight `name` as `gemm` reads it where it reads it dense."""
        quantised: QuantisedWeight | None = getattr(self.quantised, name)
        if gemm.spec.fp8 and quantised is not None:
            return quantised
        return getattr(self, name)

    def rounded(self, name: Literal["up", "gate"]) -> QuantisedWeight:
        """Returns a weight into the hidden layer in 8-bit floats, beta S(W) where it is
        sparse: as it was rounded before the call, or else rounded now."""
        quantised: QuantisedWeight | None = getattr(self.quantised, name)
        if quantised is not None:
            return quantised
        packed = getattr(self, f"packed_{name}")
        return quantise_weight(as_dense(getattr(self, name), packed, up=True))


def pack_ffn(
    w_up: Float[Array, "*layers d_model d_hidden"],
    w_down: Float[Array, "*layers d_hidden d_model"],
    *,
    w_gate: Float[Array, "*layers d_model d_hidden"] | None = None,
    sparsity: FFNSparsity,
    precision: Precision = "dtype",
    scales: Float[Array, "*layers matrices"] | None = None,
    dtype: jnp.dtype,
    layout: FFNLayout | None = None,
    whole: bool = False,
    backend: Backend | None = None,
) -> PackedFFN | None:
    """Returns the weights as GEMMs read them: beta S(W) of every weight, compressed, or
    the weights that GEMMs of 8-bit floats read, and what is read dense in the compute
    dtype. Returns None where they are read as they are.

    S is the soft threshold of arXiv 2409.09099, beta its frozen scale. Packing reads
    and writes each weight once: do it once per optimiser step, not per micro-batch.
    Where GEMMs 1 and 3 can run on sparse tensor cores, the result is in their order.

    Args:
      w_up, w_down, w_gate: float32 masters; leading axes are stacked layers. `w_gate`
        is None of a plain FFN.
      sparsity: the sparsity of the FFN, which names the pattern of the weights.
      precision: the precision of the FFN, as in `FFNCall.precision`.
      scales: beta of (up, down), or of (gate, up, down) for a gated FFN; not read where
        the weights are dense.
      dtype: the compute dtype, which packed values and dense copies have.
      layout: how the weights lie on a mesh of several devices; None on one device.
      whole: whether each device gets the weights of all of its neurons, for calls with
        `layout.whole`. Else it has those that it stores.
      backend: what will run the GEMMs; None for the fastest that can.
    Raises:
      ValueError: `scales` does not have one beta for each weight, or a weight was put
        on other devices than those of the layout.
    """
    check_placed(layout, w_up=w_up, w_down=w_down, w_gate=w_gate)
    gathers = whole and layout is not None and layout.stored_shards > 1
    held = partial(gathered_ffn, layout if gathers else None, stacked=w_up.ndim - 2)
    up = gate = dense = None
    if sparsity.rounds_up_weight(precision):
        up = quantise_weight(w_up)
        gate = None if w_gate is None else quantise_weight(w_gate)
    if up is not None and sparsity.is_dense:
        return held(PackedFFN(up, quantise_weight(w_down), gate))
    if w_up.dtype != dtype or gathers:
        read = FFNWeights(w_up, w_down, w_gate)
        dense = jax.tree.map(lambda w: jax.lax.stop_gradient(w).astype(dtype), read)
    if sparsity.weights is None:
        made = up is not None or dense is not None
        return held(PackedFFN(up=up, gate=gate, dense=dense)) if made else None
    if scales is None:
        raise ValueError(
            f"weights={sparsity.weights} needs scales, the frozen beta of each weight; "
            f"compute it once with soft_threshold_scale"
        )
    scales_of = [scales[..., i, None, None] for i in range(scales.shape[-1])]
    *gate_scale, up_scale, down_scale = scales_of
    if len(gate_scale) != (w_gate is not None):
        raise ValueError(
            f"{scales.shape[-1]} scales for {2 + (w_gate is not None)} weight matrices;"
            f" pass one beta for each of (gate,) up, down"
        )
    pattern = sparsity.weights
    d_model, d_hidden = w_up.shape[-2:]
    shards = 1 if layout is None else layout.hidden_shards * layout.stored_shards

    def packed(w: jax.Array, scale: jax.Array, *, axis: int, by_expert: bool):
        # Rows that lie together: those of a device, and of an expert.
        together = [d_hidden // shards]
        if sparsity.experts and by_expert:
            together.append(d_hidden // sparsity.experts)
        pack_one, neurons = partial(_compress, pattern=pattern), -3 - axis
        kernels = next((name for name in registry.names() if name == backend), None)
        if (backend is None or kernels) and not any(
            why_not_packed(rows, d_model, str(w_up.dtype), dtype, kernels)
            for rows in together
        ):
            pack_one = partial(_pack_on_each_device, layout, kernels=kernels)
            neurons = -2
        # On explicit axes its neurons stay where the weight has them.
        out = spec_along(neurons, split_along(w, -3 - axis), ndim=w.ndim)
        return automatically(
            partial(pack_one, axis=axis, dtype=dtype), w, scale, out=out
        )

    into_hidden = partial(packed, axis=-2, by_expert=sparsity.skip_blocks)
    down = None
    if sparsity.backward_weights is not None:
        down = packed(w_down, down_scale, axis=-1, by_expert=sparsity.da_by_expert)
    gate = None if w_gate is None else into_hidden(w_gate, gate_scale[0])
    up = into_hidden(w_up, up_scale)
    return held(PackedFFN(up=up, down=down, gate=gate, dense=dense))


IN_8_BITS = "weights in 8-bit floats"
"""What `check_packed` calls quantised weights."""


def check_packed(
    packed: PackedFFN,
    weights: FFNWeights[jax.Array],
    *,
    sparsity: FFNSparsity,
    quantises: bool,
    dtype: jnp.dtype,
) -> None:
    """Raises ValueError where packed weights were made for another call of an FFN than
    this one. Those of a finer dtype than the call's are read in the call's.

    Args:
      packed: what the call was given.
      weights: the masters of the call.
      sparsity: the sparsity of the call.
      quantises: whether it reads W1 in 8-bit floats.
      dtype: its compute dtype.
    """
    shapes = {name: w.shape for name, w in weights._asdict().items() if w is not None}
    read, kind = set[str](), ""
    if sparsity.weights is not None:
        read = set(shapes) - (set() if sparsity.backward_weights else {"down"})
        kind = f"{name_of(sparsity.weights)} weights"
    elif quantises:
        read = set(shapes) - (set() if sparsity.is_dense else {"down"})
        kind = IN_8_BITS
    for name in ("up", "down", "gate") if kind else ():
        wanted = f"{kind}, {shapes[name]}" if name in read else None
        given = getattr(packed, name)
        _check_one(f"packed.{name}", _described(given, is_down=name == "down"), wanted)
        if isinstance(given, Compressed | Packed):
            _check_rounding(f"packed.{name}", given.dtype, dtype)
    for name, copy in () if packed.dense is None else packed.dense._asdict().items():
        wanted = f"dense weights, {shapes[name]}" if name in shapes else None
        given = None if copy is None else f"dense weights, {copy.shape}"
        _check_one(f"packed.dense.{name}", given, wanted)
        if copy is not None:
            _check_rounding(f"packed.dense.{name}", copy.dtype, dtype)


def _check_one(name: str, given: str | None, wanted: str | None) -> None:
    if given != wanted:
        raise ValueError(
            f"{name} is {given}, and this call reads {wanted}; make packed by pack_ffn "
            f"with the weights, sparsity and precision of the call"
        )


def _check_rounding(name: str, given: jnp.dtype, dtype: jnp.dtype) -> None:
    """Raises ValueError where weights are rounded to fewer bits than the call's."""
    if jnp.finfo(given).nmant < jnp.finfo(dtype).nmant:
        raise ValueError(
            f"{name} is rounded to {given}, and this call computes in {dtype}; make "
            f"packed by pack_ffn with dtype=jnp.{dtype}"
        )


def _described(
    weight: Compressed | Packed | QuantisedWeight | None, *, is_down: bool
) -> str | None:
    """Returns what a packed weight is, as `check_packed` names it; `is_down` says that
    it is W2, whose rows are neurons."""
    if weight is None:
        return None
    if isinstance(weight, QuantisedWeight):
        return f"{IN_8_BITS}, {weight.values.shape}"
    shape = weight.shape
    if isinstance(weight, Packed) and not is_down:
        shape = shape[::-1]
    return f"{name_of(weight.pattern)} weights, {shape}"


def _compress(
    w: jax.Array, scale: jax.Array, *, pattern: NM, axis: int, dtype: jnp.dtype
) -> Compressed:
    pruned = (scale * soft_threshold(w, axis=axis)).astype(dtype)
    mask = magnitude_mask(w, pattern, axis=axis)
    return compress(pruned, pattern, mask=mask, axis=axis)


def _pack_on_each_device(
    layout: FFNLayout | None,
    w: jax.Array,
    scale: jax.Array,
    *,
    axis: int,
    dtype: jnp.dtype,
    kernels: KernelSetName | None,
) -> Packed:
    stacked = w.ndim - 2
    run = on_mesh(
        layout,
        partial(pack_weight, axis=axis, dtype=dtype, kernels=kernels),
        in_specs=(weight_spec(layout, -3 - axis, stacked), PartitionSpec()),
        out_specs=weight_spec(layout, 0, stacked),
    )
    return run(w, scale)


def as_dense(
    w: jax.Array, packed: Compressed | Packed | None, *, up: bool
) -> jax.Array:
    """Returns W1 or Wg (`up`), or W2, as a dense GEMM reads it: beta S(W), masked,
    where it is sparse."""
    if packed is None:
        return w
    if isinstance(packed, Packed):
        masked = decompress(unpack(packed))
        masked = masked.T if up else masked
    else:
        masked = decompress(packed)
    return masked.astype(w.dtype)


def multiply(
    gemm: Decision,
    lhs: jax.Array,
    rhs: jax.Array | QuantisedWeight,
    *,
    out_dtype: jnp.dtype | None = None,
) -> jax.Array:
    """Returns `lhs @ rhs` of two dense operands; a sparse activation comes masked. A
    GEMM of 8-bit floats rounds what is not in them yet."""
    if gemm.spec.fp8:
        return _multiply_fp8(gemm, lhs, rhs, out_dtype or lhs.dtype)
    run = dense_matmul.implementations()[gemm.backend].run
    return run(lhs, rhs, out_dtype=out_dtype)


def _multiply_fp8(
    gemm: Decision, lhs: jax.Array, rhs: jax.Array | QuantisedWeight, out_dtype: Any
) -> jax.Array:
    run = fp8_matmul.implementations()[gemm.backend].run
    of_lhs, of_rhs = fp8_matmul.formats(gemm.spec)
    if isinstance(rhs, QuantisedWeight):
        transposed = Quantised(rhs.transposed, rhs.step)
    else:
        transposed = quantise(rhs.T, of_rhs)
    return run(quantise(lhs, of_lhs), transposed, out_dtype=out_dtype)


def multiply_by_weight(
    gemm: Decision,
    x: jax.Array,
    w: jax.Array | QuantisedWeight,
    packed: Compressed | Packed | None,
) -> jax.Array:
    """Returns `x @ w`, or `x @ S(w)` where the weight is packed."""
    if packed is None:
        return multiply(gemm, x, w)
    return sparse_matmul(x, packed, backend=gemm.backend)
