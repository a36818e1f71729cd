"""Flax NNX layers: RMS normalisation, causal attention, the FFN with sparse GEMMs.

Parameters are float32 masters; every layer computes in its `dtype`. The layers of a
model may be stacked: a `SparseFFN` whose weights carry a leading layer axis packs,
rescales and clusters all its layers at once, and is called one layer at a time by the
scan over them.
"""

from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Key

from pallas_kernels.device import Device
from sparsejax.annotations import check_value
from sparsejax.ops.backend import Backend
from sparsejax.ops.ffn import ffn
from sparsejax.ops.ffn_layout import FFNLayout
from sparsejax.ops.ffn_spec import DENSE, FFNSparsity, check_divisible
from sparsejax.ops.ffn_weights import PackedFFN, pack_ffn
from sparsejax.ops.gated_ffn import GatedActivation, check_gated, gated_ffn
from sparsejax.pruning import soft_threshold_scale
from sparsejax.router import (
    balanced_clusters,
    contiguous_order,
    nearest_centre,
    token_hash,
)
from sparsejax.sharding import BATCH, constrain

Activation = Literal["relu2"] | GatedActivation


class SoftThresholdScale(nnx.Variable[jax.Array]):
    """beta of the soft threshold, one per sparse weight: frozen state, not trained."""


class RouterCentres(nnx.Variable[jax.Array]):
    """One unit vector per expert, the centre of its neurons: state, not trained."""


class PackedWeights(nnx.Variable[PackedFFN]):
    """Compressed weights made from the masters: see `micro_batches`."""


def fan_in_normal(
    key: Key[Array, ""], shape: tuple[int, int], scale: float = 1.0
) -> Float[Array, "d_in d_out"]:
    """A float32 weight, truncated normal with deviation scale / sqrt(d_in)."""
    initialise = jax.nn.initializers.variance_scaling(
        scale**2, "fan_in", "truncated_normal"
    )
    return initialise(key, shape, jnp.float32)


class RMSNorm(nnx.Module):
    """x / sqrt(mean(x^2) + epsilon) * scale, in float32, returned in `dtype`.

    Source: Zhang and Sennrich 2019, arXiv 1910.07467.
    """

    def __init__(self, d: int, epsilon: float, dtype: DTypeLike) -> None:
        self.scale = nnx.Param(jnp.ones((d,), jnp.float32))
        self.epsilon = epsilon
        self.dtype = jnp.dtype(dtype)

    def __call__(self, x: Float[Array, "*batch d"]) -> Float[Array, "*batch d"]:
        return _rms_norm(x, self.scale[...], self.epsilon, self.dtype)


# Recomputed in the backward, from x: autodiff would save two float32 copies of x.
@partial(jax.checkpoint, static_argnums=(2, 3), prevent_cse=False)
def _rms_norm(
    x: jax.Array, scale: jax.Array, epsilon: float, dtype: jnp.dtype
) -> jax.Array:
    x = x.astype(jnp.float32)
    mean_square = jnp.mean(x * x, axis=-1, keepdims=True)
    scale = jnp.expand_dims(scale, range(x.ndim - 1))
    return (x * jax.lax.rsqrt(mean_square + epsilon) * scale).astype(dtype)


def rotary_embedding(
    x: Float[Array, "batch sequence heads head_dim"],
    positions: Int[Array, " sequence"],
    *,
    base: float,
) -> Float[Array, "batch sequence heads head_dim"]:
    """`x` with each pair (x_i, x_{i + head_dim/2}) turned by position * frequency_i.

    frequency_i = base^(-2 i / head_dim). Angles and rotation are float32, the result is
    in x.dtype. Scores of two rotated vectors depend on the difference of their
    positions only. Source: Su et al. 2021, arXiv 2104.09864; pairs are half a head
    apart, not neighbours, so that the rotation moves whole vector registers.
    """
    half = x.shape[-1] // 2
    frequency = base ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = positions.astype(jnp.float32)[:, None] * frequency[None, :]
    cos, sin = jnp.cos(angle)[None, :, None, :], jnp.sin(angle)[None, :, None, :]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate(
        [first * cos - second * sin, second * cos + first * sin], axis=-1
    )
    return rotated.astype(x.dtype)


def attention_implementation(
    head_dim: int, dtype: DTypeLike, device: jax.Device | Device | None = None
) -> tuple[Literal["cudnn", "xla"], str]:
    """The implementation of `jax.nn.dot_product_attention` to ask for, and the reason.

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


class Attention(nnx.Module):
    """Causal grouped-query attention with rotary positions, without biases.

    softmax(Q K^T / sqrt(head_dim) + causal mask) V, scores and softmax in float32.
    """

    def __init__(
        self,
        d_model: int,
        heads: int,
        *,
        kv_heads: int | None = None,
        rope_base: float = 10_000.0,
        dtype: DTypeLike = jnp.float32,
        out_scale: float = 1.0,
        mesh: Mesh | None = None,
        rngs: nnx.Rngs,
    ) -> None:
        """`out_scale` multiplies the initial deviation of the output projection; `mesh`
        has the axes of `sharding` and splits batch and heads."""
        self.heads = heads
        self.kv_heads = heads if kv_heads is None else kv_heads
        if d_model % heads or self.heads % self.kv_heads:
            raise ValueError(
                f"d_model={d_model}, heads={heads}, kv_heads={self.kv_heads}: d_model "
                f"must be a multiple of heads, and heads one of kv_heads"
            )
        self.head_dim = d_model // heads
        self.rope_base = rope_base
        self.dtype = jnp.dtype(dtype)
        self.mesh = mesh
        kv_width = self.kv_heads * self.head_dim
        self.w_query = nnx.Param(fan_in_normal(rngs.params(), (d_model, d_model)))
        self.w_key = nnx.Param(fan_in_normal(rngs.params(), (d_model, kv_width)))
        self.w_value = nnx.Param(fan_in_normal(rngs.params(), (d_model, kv_width)))
        self.w_out = nnx.Param(
            fan_in_normal(rngs.params(), (d_model, d_model), out_scale)
        )

    def __call__(
        self, x: Float[Array, "batch sequence d_model"], *, offset: int = 0
    ) -> Float[Array, "batch sequence d_model"]:
        """Attention of every token to itself and those before it; `offset` is the
        position of the first."""
        x = x.astype(self.dtype)
        positions = offset + jnp.arange(x.shape[1])
        rotate = partial(rotary_embedding, positions=positions, base=self.rope_base)
        query = rotate(self._project(x, self.w_query, self.heads))
        key = rotate(self._project(x, self.w_key, self.kv_heads))
        value = self._project(x, self.w_value, self.kv_heads)
        implementation, _ = attention_implementation(self.head_dim, self.dtype)
        mixed = jax.nn.dot_product_attention(
            query, key, value, is_causal=True, implementation=implementation
        )
        # Gathered over fsdp in the compute dtype, and not before.
        w_out = constrain(self.w_out[...].astype(self.dtype), self.mesh, "tensor", None)
        return constrain(mixed.reshape(x.shape) @ w_out, self.mesh, BATCH, None, None)

    def _project(self, x: jax.Array, w: nnx.Param, heads: int) -> jax.Array:
        gathered = constrain(w[...].astype(self.dtype), self.mesh, None, "tensor")
        projected = x @ gathered
        by_head = projected.reshape(*x.shape[:-1], heads, self.head_dim)
        return constrain(by_head, self.mesh, BATCH, None, "tensor", None)


class SparseFFN(nnx.Module):
    """The feed-forward network, dense or sparse as `sparsity` says.

    relu2: relu(X W1)^2 W2, W1 = `w_up` (d_model, d_hidden), W2 = `w_down`.
    swiglu: (silu(X Wg) * X Wu) Wd, weights may be sparse, activations not.
    reglu2: (relu(X Wg)^2 * X Wu) Wd, both may be, without a router.

    State that is not trained: `scales`, beta per sparse weight in the order (gate,) up,
    down; `centres` (experts, d_model), where the activation pattern is V:N:M. Expert e
    owns the neurons [e d_hidden / experts, (e + 1) d_hidden / experts). Both belong to
    the weights: restore them together with these, or make them anew (`refresh_scales`,
    `cluster`). Every call compresses 2:4 weights anew; `micro_batches` has what does so
    once for several calls.

    Sources: arXiv 2602.06183 (weights, router), 2503.16672 (activations),
    2002.05202 (SwiGLU).
    """

    def __init__(
        self,
        d_model: int,
        d_hidden: int,
        *,
        activation: Activation = "relu2",
        sparsity: FFNSparsity = DENSE,
        dtype: DTypeLike = jnp.float32,
        down_scale: float = 1.0,
        backend: Backend | None = None,
        layout: FFNLayout | None = None,
        rngs: nnx.Rngs,
    ) -> None:
        """`down_scale` multiplies the initial deviation of w_down; `backend` names what
        runs the sparse GEMMs (None: the best supported); `layout` says how the FFN lies
        on a mesh of several devices.

        Raises:
          ValueError: a choice that is none, or a sparsity that does not fit: `check`.
        """
        check_value("activation", activation, Activation)
        check_value("backend", backend, Backend | None)
        self.d_model = d_model
        self.d_hidden = d_hidden
        self.activation = activation
        self.dtype = jnp.dtype(dtype)
        self.backend = backend
        self.layout = layout
        self.w_up = nnx.Param(fan_in_normal(rngs.params(), (d_model, d_hidden)))
        self.w_down = nnx.Param(
            fan_in_normal(rngs.params(), (d_hidden, d_model), down_scale)
        )
        self.w_gate = nnx.data(
            nnx.Param(fan_in_normal(rngs.params(), (d_model, d_hidden)))
            if activation != "relu2"
            else None
        )
        self.scales = SoftThresholdScale(self._scales())
        self.centres: RouterCentres | None = nnx.data(None)
        # Only in the copies of a model that `micro_batches` makes and drops.
        self.packed: PackedWeights | None = nnx.data(None)
        self.sparsity = DENSE
        self.compute_as(sparsity)

    def __call__(
        self,
        x: Float[Array, "*batch d_model"],
        *,
        token_ids: Int[Array, "*batch"] | None = None,
        key: Key[Array, ""] | None = None,
    ) -> Float[Array, "*batch d_model"]:
        """The FFN of every token, in `dtype`.

        `token_ids` is read by router "token_hash", `key` by the random estimators of
        `sparsity.token_sparsity`.
        """
        if self.w_up[...].ndim != 2:
            raise ValueError(
                f"w_up of shape {self.w_up[...].shape} stacks several layers; call one "
                f"layer at a time, as a scan over the leading axis does"
            )
        if x.shape[-1] != self.d_model:
            raise ValueError(
                f"x of shape {x.shape} does not end in d_model={self.d_model}; "
                f"transpose it or build SparseFFN({x.shape[-1]}, {self.d_hidden})"
            )
        tokens = x.reshape(-1, self.d_model).astype(self.dtype)
        packed = None if self.packed is None else self.packed.get_value()
        if self.activation != "relu2":
            assert self.w_gate is not None
            out = gated_ffn(
                tokens,
                self.w_gate[...],
                self.w_up[...],
                self.w_down[...],
                activation=self.activation,
                sparsity=self.sparsity,
                packed=packed,
                scales=self.scales[...],
                key=key,
                layout=self.layout,
                backend=self.backend,
            )
        else:
            out = ffn(
                tokens,
                self.w_up[...],
                self.w_down[...],
                sparsity=self.sparsity,
                packed=packed,
                scales=self.scales[...],
                expert_index=self.route(tokens, token_ids),
                key=key,
                layout=self.layout,
                backend=self.backend,
            )
        return out.reshape(x.shape)

    def route(
        self,
        x: Float[Array, "tokens d_model"],
        token_ids: Int[Array, "*batch"] | None = None,
    ) -> Int[Array, "tokens experts_per_token"] | None:
        """The experts of each token; None where there are none, or where the FFN itself
        finds them after GEMM 1 (router "true_mass"). No gradient passes.

        Raises:
          ValueError: router "token_hash" without `token_ids`.
        """
        experts, choices = self.sparsity.experts, self.sparsity.experts_per_token
        if experts is None or self.sparsity.router == "true_mass":
            return None
        if self.sparsity.router == "token_hash":
            if token_ids is None:
                raise ValueError(
                    "router='token_hash' hashes token ids, but token_ids is None; pass "
                    "token_ids of x's leading shape or choose router='nearest_centre'"
                )
            return token_hash(token_ids.reshape(-1), experts, experts_per_token=choices)
        assert self.centres is not None
        return nearest_centre(
            jax.lax.stop_gradient(x), self.centres[...], experts_per_token=choices
        )

    def check(self, sparsity: FFNSparsity) -> None:
        """Raises ValueError where groups or experts do not divide the widths, or where
        a gated FFN cannot have these activations."""
        check_value("sparsity", sparsity, FFNSparsity)
        if self.activation != "relu2":
            check_gated(self.activation, sparsity)
        check_divisible(self.d_model, self.d_hidden, sparsity)

    def compute_as(self, sparsity: FFNSparsity, *, keep_centres: bool = False) -> None:
        """Sets what the next call computes, and changes no weight and no beta.

        This is the part of `switching.switch` that is about one FFN's calls; a training
        loop calls that function, which also sees to betas and clusters.

        Centres appear with a V:N:M pattern, as the mean directions of contiguous blocks
        of neurons (a valid router, if a poor one, before any `cluster`); they are kept
        while the number of experts stays and dropped without such a pattern, unless
        `keep_centres`: then single steps of another sparsity can lie in between.

        Raises:
          ValueError: see `check`; nothing has been changed then.
        """
        self.check(sparsity)
        experts = sparsity.experts
        if experts is None:
            self.centres = self.centres if keep_centres else None
        elif self.centres is None or self.sparsity.experts != experts:
            self.centres = RouterCentres(_block_centres(self.w_up[...], experts))
        self.sparsity = sparsity

    def packed_weights(self) -> PackedFFN | None:
        """The 2:4 weights beta S(W), compressed from the present masters and betas;
        None where the weights are dense. See `ops.ffn_weights.pack_ffn`."""
        return pack_ffn(
            self.w_up[...],
            self.w_down[...],
            w_gate=None if self.w_gate is None else self.w_gate[...],
            sparsity=self.sparsity,
            scales=self.scales[...],
            dtype=self.dtype,
            layout=self.layout,
            backend=self.backend,
        )

    def refresh_scales(self) -> None:
        """Sets every beta to <W, S(W)> / <S(W), S(W)> of the present weight.

        To be called when the sparse phase begins; beta is frozen from then on, because
        recomputing it makes the masks unstable (arXiv 2409.09099).
        """
        self.scales[...] = self._scales()

    def cluster(
        self, *, warm_start: bool = False
    ) -> Int[Array, " d_hidden"] | Int[Array, "layers d_hidden"]:
        """Groups like neurons into the experts, renumbers them, and sets the centres.

        Neuron i becomes the former neuron order[i] in W1's columns and W2's rows, which
        leaves the dense function as it was. The optimiser's moments of both must be
        permuted alike, with the returned order.

        Args:
          warm_start: begin at the present grouping and not at a spread-out one.
        Returns:
          order, int32; (layers, d_hidden) if the layers are stacked.
        Raises:
          ValueError: the activation pattern is not V:N:M.
        """
        experts = self.sparsity.experts
        if experts is None or self.centres is None:
            raise ValueError(
                f"activations={self.sparsity.activations} has no experts to cluster "
                f"for; switch to a sparsity with activations=VNM(v, 2, m) first"
            )
        present = jnp.repeat(
            jnp.arange(experts, dtype=jnp.int32), self.d_hidden // experts
        )

        mesh = None if self.layout is None else self.layout.mesh

        def of_layer(weights: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, ...]:
            # Every device clusters all neurons: the same clusters on every mesh.
            w_up, w_down = (constrain(w, mesh, None, None) for w in weights)
            assignment, centres = balanced_clusters(
                w_up, experts, initial=present if warm_start else None
            )
            order = contiguous_order(assignment, experts)
            return order, centres, w_up[:, order], w_down[order, :]

        weights = self.w_up[...], self.w_down[...]
        # One layer after the other: k-means holds several copies of W1.
        by_layer = partial(jax.lax.map, of_layer) if weights[0].ndim == 3 else of_layer
        order, centres, w_up, w_down = by_layer(weights)
        self.w_up[...], self.w_down[...] = w_up, w_down
        self.centres[...] = centres
        return order

    @property
    def into_hidden(self) -> list[nnx.Param]:
        """The weights that GEMM 1 reads, in the order of `scales`: (gate,) up."""
        return [self.w_up] if self.w_gate is None else [self.w_gate, self.w_up]

    def _scales(self) -> jax.Array:
        into_hidden = self.into_hidden
        stack = self.w_up[...].shape[:-2]
        if self.d_model % 4:
            # Groups of four do not divide d: such a layer cannot have 2:4 weights.
            return jnp.ones((*stack, len(into_hidden) + 1), jnp.float32)
        # GEMMs 1 and 3 both reduce over d: axis -2 of W1, the last axis of W2.
        scales = [soft_threshold_scale(w[...], axis=-2) for w in into_hidden]
        scales.append(soft_threshold_scale(self.w_down[...], axis=-1))
        return jnp.stack(scales, axis=-1)


def sparse_ffns(module: nnx.Module) -> list[SparseFFN]:
    """Every `SparseFFN` in the module, the module itself included."""
    return [part for _, part in nnx.iter_modules(module) if isinstance(part, SparseFFN)]


def _block_centres(w_up: jax.Array, experts: int) -> jax.Array:
    """Unit mean directions of `experts` equal blocks of columns, (..., experts, d)."""
    tiny = jnp.finfo(jnp.float32).tiny
    w_up = w_up.astype(jnp.float32)
    norm = jnp.linalg.norm(w_up, axis=-2, keepdims=True)
    unit = w_up / jnp.maximum(norm, tiny)
    blocks = unit.reshape(*unit.shape[:-1], experts, unit.shape[-1] // experts)
    centres = jnp.swapaxes(blocks.mean(axis=-1), -1, -2)
    norm = jnp.linalg.norm(centres, axis=-1, keepdims=True)
    return centres / jnp.maximum(norm, tiny)
