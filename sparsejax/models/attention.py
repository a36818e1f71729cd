"""Causal grouped-query attention with rotary positions, as a Flax NNX module.

The parameters are float32 masters; the layer computes in its `dtype`.
"""

from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from pallas_kernels.device import Device
from sparsejax.annotations import check_sizes, check_value
from sparsejax.distributed.mesh import BATCH, constrain, split_over
from sparsejax.dtypes import Precision
from sparsejax.explicit_axes import inside_automatic_axes
from sparsejax.kept_names import MIXED, ROTATED, under_name
from sparsejax.models.block_diagonal import (
    check_groups,
    contiguous_groups,
    multiply,
    residual_groups,
)
from sparsejax.models.ffn_state import WeightsAsRead
from sparsejax.models.initializers import fan_in_normal
from sparsejax.models.norm import RMSNorm
from sparsejax.models.repeatable_attention import (
    ask_for_repeatable_gradients,
    bits_repeat,
)
from sparsejax.ops.fp8_linear import fp8_linear
from sparsejax.ops.fp8_matmul import QuantisedWeight, quantise_weight
from sparsejax.ops.linear import as_read, linear, rounded_copy


def rotary_embedding(
    x: Float[Array, "batch sequence heads head_dim"],
    positions: Int[Array, " sequence"],
    *,
    base: float,
) -> Float[Array, "batch sequence heads head_dim"]:
    """Returns `x` with each pair (x_i, x_{i + head_dim/2}) turned by position *
    frequency_i.

    frequency_i = base^(-2 i / head_dim). Angles and rotation are float32, the result is
    in x.dtype. Scores of two rotated vectors depend on the difference of their
    positions only. Source: Su et al. 2021, arXiv 2104.09864; pairs are half a head
    apart, not neighbours, so that the rotation moves whole vector registers.
    """
    half = x.shape[-1] // 2
    frequency = base ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = positions.astype(jnp.float32)[:, None] * frequency[None, :]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    # Whole heads at once: of two halves XLA writes the gradients one by one, and joins
    # them in one more pass over Q and K.
    pairs = x.astype(jnp.float32).reshape(*x.shape[:-1], 2, half)
    cosines = jnp.stack([cos, cos], axis=-2)[None, :, None]
    sines = jnp.stack([-sin, sin], axis=-2)[None, :, None]
    rotated = pairs * cosines + jnp.flip(pairs, axis=-2) * sines
    return rotated.reshape(x.shape).astype(x.dtype)


def attention_implementation(
    head_dim: int, dtype: DTypeLike, device: jax.Device | Device | None = None
) -> tuple[Literal["cudnn", "xla"], str]:
    """Returns the implementation of `jax.nn.dot_product_attention` to ask for, and the
    reason.

    cuDNN's flash attention never stores the sequence x sequence scores; XLA's does.
    """
    device = jax.devices()[0] if device is None else device
    dtype = jnp.dtype(dtype)
    if device.platform != "gpu":
        return "xla", f"cuDNN needs a GPU, this is {device.platform}"
    if dtype not in (jnp.bfloat16, jnp.float16):
        return "xla", f"cuDNN attention takes bfloat16 or float16, not {dtype}"
    # Limits of cuDNN's flash attention as checked in jax._src.cudnn, jax 0.11.2.
    hopper_or_later = float(device.compute_capability or 0) >= 9.0
    widest = 256 if hopper_or_later else 128
    if head_dim % 8 or head_dim > widest:
        return "xla", (
            f"cuDNN attention takes a head_dim that is a multiple of 8 up to {widest} "
            f"on this GPU, not {head_dim}"
        )
    return "cudnn", f"{dtype}, head_dim={head_dim}: flash attention is available"


class KVCache(NamedTuple):
    """The rotated keys and the values of the tokens so far, by position: of one layer
    (batch, capacity, kv_heads, head_dim), or with a leading axis of the layers."""

    keys: Float[Array, "*layers batch capacity kv_heads head_dim"]
    values: Float[Array, "*layers batch capacity kv_heads head_dim"]


class Attention(nnx.Module):
    """Causal grouped-query attention with rotary positions.

    softmax(Q K^T / sqrt(head_dim) + causal mask) V, scores and softmax in float32. Q
    and K are rotated, and before that normalised head by head if asked for.
    """

    def __init__(
        self,
        d_model: int,
        heads: int,
        *,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        qk_norm: bool = False,
        norm_epsilon: float = 1e-6,
        qkv_bias: bool = False,
        rope_base: float = 10_000.0,
        dtype: DTypeLike = jnp.float32,
        out_scale: float = 1.0,
        groups: int = 1,
        precision: Precision = "dtype",
        mesh: Mesh | None = None,
        rngs: nnx.Rngs,
    ) -> None:
        """Makes the projections, truncated normal by their fan-in, and biases of zero.

        Args:
          d_model: width of the residual stream; without `head_dim` a multiple of
            `heads`.
          heads: query heads; a multiple of `kv_heads`.
          kv_heads: key and value heads; None for as many as `heads`.
          head_dim: width of each head; None for d_model / heads.
          qk_norm: whether queries and keys are normalised over the features of a head,
            with one scale for all heads of queries, and one for those of keys.
          norm_epsilon: the epsilon of these norms.
          qkv_bias: whether queries, keys and values have biases.
          rope_base: base of the rotary frequencies.
          dtype: compute dtype; the parameters are float32.
          out_scale: factor of the initial deviation of the output projection.
          groups: with two or more all four weights are block-diagonal, with as many
            blocks (`block_diagonal`).
          precision: the precision of the GEMMs with the four weights. New tokens with a
            cache are computed in `dtype` in any case.
          mesh: a mesh with the axes of `distributed.mesh`, which splits batch and
            heads; None for one device.
          rngs: random streams; `params` is drawn from.
        Raises:
          ValueError: a size is no integer of at least 1, `rngs` are no random streams,
            `heads` does not divide d_model, `kv_heads` does not divide
            `heads`, the groups do not divide the widths, or block-diagonal weights are
            to be in 8-bit floats.
        """
        kv_heads = heads if kv_heads is None else kv_heads
        check_sizes(d_model=d_model, heads=heads, kv_heads=kv_heads)
        if head_dim is not None:
            check_sizes(head_dim=head_dim)
        check_value("rngs", rngs, nnx.Rngs)
        self.heads, self.kv_heads = heads, kv_heads
        shares = head_dim is None and d_model % heads
        if shares or heads % kv_heads:
            raise ValueError(
                f"d_model={d_model}, heads={heads}, kv_heads={kv_heads}: d_model "
                f"must be a multiple of heads, unless there is a head_dim, and heads "
                f"one of kv_heads"
            )
        self.head_dim = head_dim or d_model // heads
        width, kv_width = heads * self.head_dim, self.kv_heads * self.head_dim
        widths = {"heads x head_dim": width, "kv_heads x head_dim": kv_width}
        check_groups(groups, precision, d_model, widths)
        self.rope_base = rope_base
        self.dtype = jnp.dtype(dtype)
        self.groups = groups
        self.precision: Precision = precision
        self.mesh = mesh
        # Only in the copies of a model that `micro_batches` makes and drops.
        self.as_read: WeightsAsRead | None = nnx.data(None)
        initial = partial(fan_in_normal, groups=groups)
        self.w_query = nnx.Param(initial(rngs.params(), (d_model, width)))
        self.w_key = nnx.Param(initial(rngs.params(), (d_model, kv_width)))
        self.w_value = nnx.Param(initial(rngs.params(), (d_model, kv_width)))
        self.w_out = nnx.Param(initial(rngs.params(), (width, d_model), out_scale))
        norm = partial(RMSNorm, self.head_dim, norm_epsilon, dtype)
        self.query_norm = nnx.data(norm() if qk_norm else None)
        self.key_norm = nnx.data(norm() if qk_norm else None)
        bias = lambda width: nnx.data(
            nnx.Param(jnp.zeros((width,), jnp.float32)) if qkv_bias else None
        )
        self.bias_query, self.bias_key = bias(width), bias(kv_width)
        self.bias_value = bias(kv_width)

    @inside_automatic_axes(lambda spec: spec)
    def __call__(
        self, x: Float[Array, "batch sequence d_model"]
    ) -> Float[Array, "batch sequence d_model"]:
        """Returns the attention of every token to itself and to those before it, in the
        compute dtype."""
        shape, x = x.shape, self._read(x)
        positions = jnp.arange(x.shape[1])
        rotate = partial(rotary_embedding, positions=positions, base=self.rope_base)
        query, key, value = self._query_key_value(x, precision=self.precision)
        query, key = rotate(query), rotate(key)
        if self.query_norm is None:
            # The backward of a norm reads what it was given: two arrays would be kept.
            query, key = under_name(ROTATED, (query, key))
        implementation, _ = attention_implementation(self.head_dim, self.dtype)
        if implementation == "cudnn" and bits_repeat():
            ask_for_repeatable_gradients()
        mixed = jax.nn.dot_product_attention(
            query, key, value, is_causal=True, implementation=implementation
        )
        if implementation == "xla":
            mixed = under_name(MIXED, mixed)
        out = self._write(mixed.reshape(*shape[:-1], -1), precision=self.precision)
        return constrain(out, self.mesh, BATCH, None, None)

    def with_cache(
        self,
        x: Float[Array, "batch new d_model"],
        cache: KVCache,
        positions: Int[Array, "batch new"],
    ) -> tuple[Float[Array, "batch new d_model"], KVCache]:
        """Returns the attention of new tokens to themselves and to those in the cache,
        and the cache with their keys and values.

        Args:
          x: the new tokens' rows of the residual stream.
          cache: the cache of one layer, (batch, capacity, kv_heads, head_dim).
          positions: the new tokens' positions in their sequence, where their keys and
            values are put; a token sees what the cache then holds up to its own.
        """
        shape, x = x.shape, self._read(x)

        @jax.vmap
        def rotate(heads: jax.Array, at: jax.Array) -> jax.Array:
            return rotary_embedding(heads[None], at, base=self.rope_base)[0]

        query, key, value = self._query_key_value(x)
        query, key = rotate(query, positions), rotate(key, positions)
        rows = jnp.arange(x.shape[0])[:, None]
        cache = KVCache(
            keys=cache.keys.at[rows, positions].set(key),
            values=cache.values.at[rows, positions].set(value),
        )
        seen = jnp.arange(cache.keys.shape[1])[None, None, None, :]
        mixed = jax.nn.dot_product_attention(
            query,
            cache.keys,
            cache.values,
            mask=seen <= positions[:, None, :, None],
            implementation="xla",
        )
        return self._write(mixed.reshape(*shape[:-1], -1)), cache

    def _read(self, x: jax.Array) -> jax.Array:
        """Returns what the projections read of the residual stream."""
        x = x.astype(self.dtype)
        return residual_groups(x, self.groups) if self.groups > 1 else x

    def _write(self, mixed: jax.Array, *, precision: Precision = "dtype") -> jax.Array:
        """Returns the product with W_out, (..., d_model)."""
        if self.groups > 1:
            mixed = contiguous_groups(mixed, self.groups)
        return self._multiply(mixed, "w_out", "tensor", None, precision=precision)

    def _query_key_value(
        self, x: jax.Array, *, precision: Precision = "dtype"
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns the heads of queries, keys and values, not rotated yet."""
        project = partial(self._project, x, precision=precision)
        query = project("w_query", self.bias_query, self.heads)
        key = project("w_key", self.bias_key, self.kv_heads)
        value = project("w_value", self.bias_value, self.kv_heads)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        return query, key, value

    def _project(
        self,
        x: jax.Array,
        name: str,
        bias: nnx.Param | None,
        heads: int,
        *,
        precision: Precision,
    ) -> jax.Array:
        projected = self._multiply(x, name, None, "tensor", precision=precision)
        if bias is not None:
            along = jnp.expand_dims(bias[...], range(projected.ndim - 1))
            projected = projected + along.astype(self.dtype)
        by_head = projected.reshape(*projected.shape[:-1], heads, self.head_dim)
        return constrain(by_head, self.mesh, BATCH, None, "tensor", None)

    def _multiply(
        self, x: jax.Array, name: str, *axes: str | None, precision: Precision
    ) -> jax.Array:
        """Returns the product of x with a weight, whose two axes the mesh splits over
        `axes` while it is read: over fsdp it is gathered as it is read, and not
        before."""
        w = getattr(self, name)[...]
        all_read = {} if self.as_read is None else self.as_read.get_value()
        if precision != "dtype":
            quantised = all_read.get(name)
            if quantised is None:
                quantised = quantise_weight(w)
            quantised = QuantisedWeight(
                constrain(quantised.values, self.mesh, *axes),
                constrain(quantised.transposed, self.mesh, *reversed(axes)),
                quantised.step,
            )
            return fp8_linear(x, w, quantised, precision=precision)
        read = as_read(w, all_read.get(name), self.dtype)
        if self.groups > 1:
            return multiply(x, w, constrain(read, self.mesh, "tensor", None, None))
        return linear(x, w, constrain(read, self.mesh, *axes))

    def weights_as_read(
        self, *, whole: bool = False
    ) -> dict[str, QuantisedWeight | jax.Array | None]:
        """Returns the weights in the form that the calls read, by name: in 8-bit floats
        or in the compute dtype, and None where that is the parameter itself. With
        `whole` all are returned, gathered over fsdp."""
        axes = dict.fromkeys(("w_query", "w_key", "w_value"), (None, "tensor"))
        axes |= {"w_out": ("tensor", None)}
        return {name: self._as_read(name, of, whole) for name, of in axes.items()}

    def _as_read(
        self, name: str, axes: tuple[str | None, ...], whole: bool
    ) -> QuantisedWeight | jax.Array | None:
        w = getattr(self, name)[...]
        if self.groups > 1:
            axes = "tensor", None, None
        held = partial(split_over, mesh=self.mesh) if whole else lambda w, *_: w
        if self.precision != "dtype":
            quantised = quantise_weight(w)
            return QuantisedWeight(
                held(quantised.values, *axes),
                held(quantised.transposed, *reversed(axes)),
                quantised.step,
            )
        if whole:
            return held(as_read(w, None, self.dtype), *axes)
        return rounded_copy(w, self.dtype)
