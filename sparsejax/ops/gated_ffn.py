"""The gated feed-forward network (SwiGLU) with 2:4 weights: nine GEMMs.

    1a G = X Wg     1b U = X Wu     2  Y = A Wd     with A = silu(G) * U
    3  dA = dY Wd^T
    4a dX += dG Wg^T    4b dX += dU Wu^T    with dG = dA * U * silu'(G), dU = dA silu(G)
    5a dWg = X^T dG     5b dWu = X^T dU     6  dWd = A^T dY

As in the squared-ReLU FFN, GEMMs 1 and 3 read S(W), GEMMs 2 and 4 the dense weight.
SiLU gives no zeros, so there is no activation sparsity.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from sparsejax.ops.backend import (
    Backend,
    GemmSpec,
    current_device_kind,
    current_platform,
)
from sparsejax.ops.ffn_layout import (
    FFNLayout,
    device_spec,
    gather_packed,
    gather_weight,
    on_mesh,
    packed_specs,
    sum_over_neurons,
    sum_over_tokens,
    token_spec,
    weight_spec,
)
from sparsejax.ops.ffn_spec import DENSE, FFNCall, FFNSparsity
from sparsejax.ops.ffn_weights import (
    PackedFFN,
    multiply,
    multiply_by_weight,
    pack_ffn,
)


class GatedFFNSpec(FFNCall):
    """The static facts of one gated FFN call."""

    @classmethod
    def of(
        cls,
        x: Float[Array, "tokens d_model"],
        w_gate: Float[Array, "d_model d_hidden"],
        w_up: Float[Array, "d_model d_hidden"],
        w_down: Float[Array, "d_hidden d_model"],
        sparsity: FFNSparsity,
        *,
        token_shards: int = 1,
        hidden_shards: int = 1,
    ) -> "GatedFFNSpec":
        """Reads the shapes of a call. Raises ValueError where they do not fit."""
        if x.ndim != 2 or w_up.ndim != 2:
            raise ValueError(
                f"x {x.shape} and w_up {w_up.shape} must be matrices; flatten batch "
                f"axes or use jax.vmap"
            )
        d_model, d_hidden = w_up.shape
        chained = x.shape[1] == d_model and w_down.shape == (d_hidden, d_model)
        if not chained or w_gate.shape != w_up.shape:
            raise ValueError(
                f"shapes do not chain: x {x.shape} needs w_gate {w_gate.shape} and "
                f"w_up {w_up.shape} of (d_model, d_hidden), and w_down {w_down.shape} "
                f"of (d_hidden, d_model)"
            )
        return cls(
            tokens=x.shape[0],
            d_model=d_model,
            d_hidden=d_hidden,
            dtype=str(x.dtype),
            sparsity=sparsity,
            device=current_platform(),
            device_kind=current_device_kind(),
            token_shards=token_shards,
            hidden_shards=hidden_shards,
        )

    def __post_init__(self) -> None:
        if self.sparsity.activations or self.sparsity.token_sparsity:
            raise ValueError(
                f"a gated FFN has no sparse activations (silu is nowhere zero), got "
                f"activations={self.sparsity.activations}, "
                f"token_sparsity={self.sparsity.token_sparsity!r}; use weights=NM(2, 4)"
                f" alone, or the squared-ReLU FFN"
            )
        super().__post_init__()

    def gemms(self) -> tuple[GemmSpec, ...]:
        """Nine GEMMs of one device, in the order 1a, 1b, 2, 3, 4a, 4b, 5a, 5b, 6."""
        t, d = self.tokens // self.token_shards, self.d_model
        f = self.d_hidden // self.hidden_shards
        pattern = self.sparsity.weights
        weight = {"sparse_operand": "rhs", "pattern": pattern} if pattern else {}

        def gemm(name: str, m: int, k: int, n: int, **facts) -> GemmSpec:
            shared = {
                "dtype": self.dtype,
                "device": self.device,
                "device_kind": self.device_kind,
            }
            return GemmSpec(name=name, m=m, k=k, n=n, **shared, **facts)

        return (
            gemm("1a G = X Wg", t, d, f, **weight),
            gemm("1b U = X Wu", t, d, f, **weight),
            gemm("2  Y = A Wd", t, f, d),
            gemm("3  dA = dY Wd^T", t, d, f, **weight),
            gemm("4a dX = dG Wg^T", t, f, d),
            gemm("4b dX += dU Wu^T", t, f, d),
            gemm("5a dWg = X^T dG", d, t, f, over_tokens=True),
            gemm("5b dWu = X^T dU", d, t, f, over_tokens=True),
            gemm("6  dWd = A^T dY", f, t, d, over_tokens=True),
        )


def gated_ffn(
    x: Float[Array, "tokens d_model"],
    w_gate: Float[Array, "d_model d_hidden"],
    w_up: Float[Array, "d_model d_hidden"],
    w_down: Float[Array, "d_hidden d_model"],
    *,
    sparsity: FFNSparsity = DENSE,
    packed: PackedFFN | None = None,
    scales: Float[Array, "3"] | None = None,
    layout: FFNLayout | None = None,
    backend: Backend | None = None,
) -> Float[Array, "tokens d_model"]:
    """`(silu(x S(Wg)) * (x S(Wu))) Wd`, its gradient straight through S.

    Numerics, arguments and errors as `ffn`; only `sparsity.weights` may be set.

    Args:
      scales: the frozen beta of (Wg, Wu, Wd^T), for packing here if `packed` is None.
    Raises:
      ValueError: shapes do not fit, or the sparsity is not one of weights.
      NotImplementedError: the named backend cannot run a GEMM; says why.
    Source: arXiv 2002.05202 (SwiGLU), 2409.09099 (S). The nine-GEMM form is ours.
    """
    shards = {}
    if layout is not None:
        layout.check(x.shape[0], w_up.shape[1], sparsity)
        shards = layout.shards
    spec = GatedFFNSpec.of(x, w_gate, w_up, w_down, sparsity, **shards)
    backends = tuple(decision.backend for decision in spec.explain(backend))
    if sparsity.weights is None:
        packed = None
    elif packed is None:
        if scales is None:
            raise ValueError(
                f"weights={sparsity.weights} needs scales, the frozen beta of each of "
                f"the three weights (or packed weights): compute it once with "
                f"pruning.soft_threshold_scale and keep it"
            )
        packed = pack_ffn(
            w_up,
            w_down,
            w_gate=w_gate,
            sparsity=sparsity,
            scales=scales,
            dtype=x.dtype,
            layout=layout,
            backend=backend,
        )
    packed = jax.lax.stop_gradient(packed)
    return _gated_ffn(backends, layout, x, w_gate, w_up, w_down, packed)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gated_ffn(backends, layout, x, w_gate, w_up, w_down, packed):
    return _fwd(backends, layout, x, w_gate, w_up, w_down, packed)[0]


def _fwd(backends, layout, x, w_gate, w_up, w_down, packed):
    weights = (w_gate, w_up, w_down)
    tokens = token_spec(layout)
    forward = on_mesh(
        layout,
        partial(_forward, backends, layout),
        in_specs=(tokens, *_weight_specs(layout, packed)),
        out_specs=(tokens, device_spec(layout)),
    )
    y, (gate, up) = forward(x, weights, packed)
    return y, (x, gate, up, weights, packed)


def _bwd(backends, layout, saved, dy):
    x, gate, up, weights, packed = saved
    tokens = token_spec(layout)
    weight_specs, packed_specs = _weight_specs(layout, packed)
    backward = on_mesh(
        layout,
        partial(_backward, backends, layout),
        in_specs=(tokens, device_spec(layout), weight_specs, packed_specs, tokens),
        out_specs=(tokens, weight_specs),
    )
    dx, dw = backward(x, (gate, up), weights, packed, dy)
    return dx, *dw, None


def _weight_specs(layout, packed):
    """Of (Wg, Wu, Wd) and of the packed weights."""
    into, out = weight_spec(layout, 1), weight_spec(layout, 0)
    return (into, into, out), packed_specs(layout, packed)


def _as_read(layout, dtype, weights, packed):
    """This device's weights as the GEMMs read them, dense and packed."""
    dense = [
        gather_weight(layout, w.astype(dtype), hidden_axis)
        for w, hidden_axis in zip(weights, (1, 1, 0), strict=True)
    ]
    if packed is None:
        return dense, (None, None, None)
    in_order = packed.gate, packed.up, packed.down
    return dense, [gather_packed(layout, c) for c in in_order]


def _forward(backends, layout, x, weights, packed):
    (wg, wu, wd), (packed_gate, packed_up, _) = _as_read(
        layout, x.dtype, weights, packed
    )
    # (T, F) = (T, d) @ (d, F)
    gate = multiply_by_weight(backends[0], x, wg, packed_gate)
    up = multiply_by_weight(backends[1], x, wu, packed_up)
    # (T, d) = (T, F) @ (F, d)
    y = multiply(backends[2], jax.nn.silu(gate) * up, wd)
    return sum_over_neurons(layout, y), (gate, up)


def _backward(backends, layout, x, hidden, weights, packed, dy):
    gate, up = hidden
    w_gate, w_up, w_down = weights
    (wg, wu, wd), (_, _, packed_down) = _as_read(layout, dy.dtype, weights, packed)
    # (T, F) = (T, d) @ (d, F)
    da = multiply_by_weight(backends[3], dy, wd.T, packed_down)
    a, pull_back = jax.vjp(lambda gate, up: jax.nn.silu(gate) * up, gate, up)
    dgate, dup = pull_back(da)
    # (T, d) = (T, F) @ (F, d), the sum of both in float32
    accumulate = jnp.promote_types(x.dtype, jnp.float32)
    dx = multiply(backends[4], dgate, wg.T, out_dtype=accumulate)
    dx += multiply(backends[5], dup, wu.T, out_dtype=accumulate)
    # (d, F) = (d, T) @ (T, F)
    dw_gate = multiply(backends[6], x.T, dgate, out_dtype=w_gate.dtype)
    dw_up = multiply(backends[7], x.T, dup, out_dtype=w_up.dtype)
    # (F, d) = (F, T) @ (T, d)
    dw_down = multiply(backends[8], a.T, dy, out_dtype=w_down.dtype)
    dw = (
        sum_over_tokens(layout, dw_gate, 1),
        sum_over_tokens(layout, dw_up, 1),
        sum_over_tokens(layout, dw_down, 0),
    )
    return sum_over_neurons(layout, dx.astype(x.dtype)), dw


_gated_ffn.defvjp(_fwd, _bwd)
