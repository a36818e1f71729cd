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

from sparsejax.ops.backend import Backend, GemmSpec, current_platform
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
        """The nine GEMMs, in the order 1a, 1b, 2, 3, 4a, 4b, 5a, 5b, 6."""
        t, d, f = self.tokens, self.d_model, self.d_hidden
        pattern = self.sparsity.weights
        weight = {"sparse_operand": "rhs", "pattern": pattern} if pattern else {}

        def gemm(name: str, m: int, k: int, n: int, **facts) -> GemmSpec:
            shared = {"dtype": self.dtype, "device": self.device}
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
    spec = GatedFFNSpec.of(x, w_gate, w_up, w_down, sparsity)
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
        )
    packed = jax.lax.stop_gradient(packed)
    return _gated_ffn(backends, x, w_gate, w_up, w_down, packed)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gated_ffn(backends, x, w_gate, w_up, w_down, packed):
    return _fwd(backends, x, w_gate, w_up, w_down, packed)[0]


def _fwd(backends, x, w_gate, w_up, w_down, packed):
    wg, wu, wd = (w.astype(x.dtype) for w in (w_gate, w_up, w_down))
    # (T, F) = (T, d) @ (d, F)
    gate = multiply_by_weight(backends[0], x, wg, packed and packed.gate)
    up = multiply_by_weight(backends[1], x, wu, packed and packed.up)
    # (T, d) = (T, F) @ (F, d)
    y = multiply(backends[2], jax.nn.silu(gate) * up, wd)
    return y, (x, gate, up, w_gate, w_up, w_down, packed)


def _bwd(backends, saved, dy):
    x, gate, up, w_gate, w_up, w_down, packed = saved
    wg, wu, wd = (w.astype(dy.dtype) for w in (w_gate, w_up, w_down))
    # (T, F) = (T, d) @ (d, F)
    da = multiply_by_weight(backends[3], dy, wd.T, packed and packed.down)
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
    return dx.astype(x.dtype), dw_gate, dw_up, dw_down, None


_gated_ffn.defvjp(_fwd, _bwd)
