"""The gated feed-forward network: nine GEMMs.

    1a G = X Wg     1b U = X Wu     2  Y = A Wd     with A = s(G) * U
    3  dA = dY Wd^T
    4a dX += dG Wg^T    4b dX += dU Wu^T    with dG = dA * U * s'(G), dU = dA s(G)
    5a dWg = X^T dG     5b dWu = X^T dU     6  dWd = A^T dY

"swiglu" has s = silu, "reglu2" s = relu^2. As in the squared-ReLU FFN, GEMMs 1 and 3
may read S(W), GEMMs 2 and 4 the dense weight. relu^2 leaves zeros, and dG and dU are
zero where A is, so that GEMMs 2, 4, 5 and 6 may have 2:4 activations; SiLU leaves none.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Key

from sparsejax.annotations import check_value
from sparsejax.formats import decompress
from sparsejax.ops.backend import (
    Backend,
    GemmSpec,
    Role,
    current_device,
)
from sparsejax.ops.ffn_choice import warn_if_slower
from sparsejax.ops.ffn_frame import Execution, Static, run
from sparsejax.ops.ffn_layout import FFNLayout
from sparsejax.ops.ffn_plan import FFNPlan
from sparsejax.ops.ffn_spec import (
    DENSE,
    Activation,
    FFNCall,
    FFNSparsity,
    check_dtype,
    dense_feature_count,
    dtype_in_jax,
    why_not_packed_anew,
    why_not_packed_over_tokens,
)
from sparsejax.ops.ffn_weights import (
    FFNWeights,
    PackedFFN,
    ReadWeights,
    multiply,
    multiply_by_weight,
    pack_ffn,
)
from sparsejax.ops.packed_activations import (
    GatedActivations,
    counted_gated,
    token_groups,
    weight_gradient_down,
    weight_gradient_up,
)
from sparsejax.ops.weight_gradients import weight_gradients
from sparsejax.packing import unpack
from sparsejax.patterns import TWO_FOUR, Pattern
from sparsejax.pruning import magnitude_mask

GatedActivation = Literal["swiglu", "reglu2"]


@dataclass(frozen=True, kw_only=True)
class GatedFFNSpec(FFNCall):
    """The static facts of one gated FFN call."""

    activation: GatedActivation = "swiglu"

    @property
    def kind(self) -> Activation:
        return self.activation

    @classmethod
    def of(
        cls,
        x: Float[Array, "tokens d_model"],
        w_gate: Float[Array, "d_model d_hidden"],
        w_up: Float[Array, "d_model d_hidden"],
        w_down: Float[Array, "d_hidden d_model"],
        sparsity: FFNSparsity,
        *,
        activation: GatedActivation = "swiglu",
        token_shards: int = 1,
        hidden_shards: int = 1,
    ) -> "GatedFFNSpec":
        """Reads the shapes of a call. Raises ValueError where they do not fit, or where
        a dtype is none that an FFN computes in."""
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
        for name, weight in (("w_gate", w_gate), ("w_up", w_up), ("w_down", w_down)):
            check_dtype(name, dtype_in_jax(weight))
        return cls(
            tokens=x.shape[0],
            d_model=d_model,
            d_hidden=d_hidden,
            dtype=dtype_in_jax(x),
            sparsity=sparsity,
            activation=activation,
            device=current_device(),
            token_shards=token_shards,
            hidden_shards=hidden_shards,
        )

    def __post_init__(self) -> None:
        check_gated(self.activation, self.sparsity)
        super().__post_init__()

    def gemms(self) -> tuple[GemmSpec, ...]:
        """Nine GEMMs of one device, in the order 1a, 1b, 2, 3, 4a, 4b, 5a, 5b, 6."""
        t, d = self.tokens // self.token_shards, self.d_model
        f = self.d_hidden // self.hidden_shards
        s = self.sparsity
        along_tokens = TWO_FOUR if s.token_sparsity else None
        weight = _sparse("rhs", s.weights)
        activation = partial(_sparse, "lhs", s.activations)

        def gradient(operand: str) -> dict[str, Any]:
            return {"over_tokens": True} | _sparse(
                operand,
                along_tokens,
                why_not_packed=why_not_packed_over_tokens(s),
                whole_features=dense_feature_count(f, s.dense_features),
            )

        # dX is the sum of two products in float32.
        part = activation(
            float32_out=True,
            rhs_transposed=True,
            why_not_packed=why_not_packed_anew(s),
        )

        def gemm(
            role: Role, name: str, m: int, k: int, n: int, **facts: Any
        ) -> GemmSpec:
            shared = {"dtype": self.dtype, "device": self.device}
            return GemmSpec(role=role, name=name, m=m, k=k, n=n, **shared, **facts)

        return (
            gemm("gate", "1a G = X Wg", t, d, f, **weight),
            gemm("up", "1b U = X Wu", t, d, f, **weight),
            gemm("down", "2  Y = A Wd", t, f, d, **activation()),
            gemm("d_hidden", "3  dA = dY Wd^T", t, d, f, **weight),
            gemm("d_input_gate", "4a dX = dG Wg^T", t, f, d, **part),
            gemm("d_input", "4b dX += dU Wu^T", t, f, d, **part),
            gemm("d_gate", "5a dWg = X^T dG", d, t, f, **gradient("rhs")),
            gemm("d_up", "5b dWu = X^T dU", d, t, f, **gradient("rhs")),
            gemm("d_down", "6  dWd = A^T dY", f, t, d, **gradient("lhs")),
        )


def check_gated(activation: GatedActivation, sparsity: FFNSparsity) -> None:
    """Raises ValueError where there is no such gated FFN, or it cannot have the
    sparsity."""
    check_value("activation", activation, GatedActivation)
    if activation == "swiglu":
        for name in ("activations", "token_sparsity"):
            if (value := getattr(sparsity, name)) is not None:
                raise ValueError(
                    f"{name}={value} in a SwiGLU FFN: silu leaves no zeros, so only "
                    f"weights can be sparse; set {name}=None, or activation='reglu2' "
                    f"or 'relu2'"
                )
    if sparsity.experts:
        raise ValueError(
            f"activations={sparsity.activations} in a gated FFN: a router needs "
            f"activation='relu2'; use NM(2, 4) activations"
        )


def _sparse(operand: str, pattern: Pattern | None, **facts: Any) -> dict[str, Any]:
    """What a `GemmSpec` says of its sparse operand, nothing where there is none."""
    return {"sparse_operand": operand, "pattern": pattern, **facts} if pattern else {}


def gated_ffn(
    x: Float[Array, "tokens d_model"],
    w_gate: Float[Array, "d_model d_hidden"],
    w_up: Float[Array, "d_model d_hidden"],
    w_down: Float[Array, "d_hidden d_model"],
    *,
    activation: GatedActivation = "swiglu",
    sparsity: FFNSparsity = DENSE,
    packed: PackedFFN | None = None,
    scales: Float[Array, "3"] | None = None,
    key: Key[Array, ""] | None = None,
    layout: FFNLayout | None = None,
    backend: Backend | None = None,
) -> Float[Array, "tokens d_model"]:
    """`(s(x S(Wg)) * (x S(Wu))) Wd`, its gradient straight through S and masks.

    Numerics, arguments and errors as `ffn`. Of four neighbouring neurons the two with
    the largest |A| stay where the activations are 2:4.

    Args:
      activation: s. "swiglu" is silu, which allows sparse weights alone; "reglu2" is
        relu^2, which allows 2:4 activations as well.
      scales: the frozen beta of (Wg, Wu, Wd^T), for packing here if `packed` is None.
      key: for `token_sparsity` "mvue" and "mvue_approximate".
    Raises:
      ValueError: shapes or dtypes do not fit, an argument that `sparsity` needs is
        missing, or the activation does not allow it.
      NotImplementedError: the named backend cannot run a GEMM; says why.
    Source: arXiv 2002.05202 (gates), 2503.16672 (activations), 2409.09099 (S). The
      nine-GEMM form is ours.
    """
    check_value("layout", layout, FFNLayout | None)
    shards = {}
    if layout is not None:
        layout.check(x.shape[0], w_up.shape[1], sparsity)
        shards = layout.shards
    spec = GatedFFNSpec.of(
        x, w_gate, w_up, w_down, sparsity, activation=activation, **shards
    )
    _check_arguments(sparsity, scales, packed, key)
    if spec.tokens == 0 and not sparsity.is_dense:
        # As in `ffn`.
        options = {"activation": activation, "layout": layout, "backend": backend}
        return gated_ffn(x, w_gate, w_up, w_down, **options)
    plan = FFNPlan.of(spec, backend)
    if backend is None:
        warn_if_slower(plan.gemms)
    if sparsity.weights is None:
        packed = None
    elif packed is None and scales is not None:
        packed = pack_ffn(
            w_up,
            w_down,
            w_gate=w_gate,
            sparsity=sparsity,
            scales=scales,
            dtype=jnp.dtype(spec.dtype),
            layout=layout,
            backend=backend,
        )
    key = key if sparsity.needs_key else None
    packed = jax.lax.stop_gradient(packed)
    weights = FFNWeights(up=w_up, down=w_down, gate=w_gate)
    return run(Static(plan, layout, GATED), x, weights, packed, None, key)


def _check_arguments(sparsity: FFNSparsity, scales, packed, key) -> None:
    if sparsity.weights and packed is None and scales is None:
        raise ValueError(
            f"weights={sparsity.weights} needs scales, the frozen beta of each of "
            f"the three weights (or packed weights): compute it once with "
            f"pruning.soft_threshold_scale and keep it"
        )
    if sparsity.needs_key and key is None:
        raise ValueError(
            f"token_sparsity={sparsity.token_sparsity!r} draws random numbers; pass "
            f"key, a new one at every step"
        )


def forward(
    static: Static, x: jax.Array, w: ReadWeights, expert_index: None
) -> tuple[jax.Array, tuple[jax.Array, jax.Array] | GatedActivations]:
    """Y (tokens, d_model); and G and U, or where they are packed what is kept."""
    plan = static.plan
    sparsity, kernels = plan.sparsity, plan.kernels
    assert plan.gate is not None and w.gate is not None
    # (T, F) = (T, d) @ (d, F)
    hidden = gate, up = (
        multiply_by_weight(plan.gate, x, w.gate, w.packed_gate),
        multiply_by_weight(plan.up, x, w.up, w.packed_up),
    )
    if plan.packs_activations:
        assert kernels is not None
        kept = kernels.keep_gated_features(gate, up)
        # (T, d) = (T, F) @ (F, d)
        y = kernels.matmul(kept.a, w.down, b_k_major=False, transpose_out=False)
        return y, counted_gated(kept)
    a = _activate(plan.activation, gate, up)
    if sparsity.activations is not None:
        mask = magnitude_mask(a, TWO_FOUR)
        # Where G is 0, so are A, dG and dU.
        kept = lax.optimization_barrier(jnp.where(mask, gate, 0))
        hidden = (kept if sparsity.mask_reuse else gate), up
        a = _activate(plan.activation, kept, up)
    # (T, d) = (T, F) @ (F, d)
    return multiply(plan.down, a, w.down), hidden


def _activate(activation: Activation, gate: jax.Array, up: jax.Array) -> jax.Array:
    """A."""
    if activation == "swiglu":
        return jax.nn.silu(gate) * up
    hidden = jax.nn.relu(gate)
    return hidden * hidden * up


def backward(
    static: Static,
    x: jax.Array,
    hidden: tuple[jax.Array, jax.Array] | GatedActivations,
    w: ReadWeights,
    dy: jax.Array,
    key: jax.Array | None,
) -> tuple[jax.Array, FFNWeights]:
    """dX (tokens, d_model), and the gradients of the weights in float32."""
    plan = static.plan
    # (T, F) = (T, d) @ (d, F)
    da = multiply_by_weight(plan.d_hidden, dy, w.down.T, w.packed_down)
    if isinstance(hidden, GatedActivations):
        dx, dw = _backward_packed(plan, x, hidden, w, dy, da, key)
    else:
        dx, dw = _backward_masked(plan, x, hidden, w, dy, da, key)
    return dx.astype(x.dtype), dw


def _backward_masked(
    plan: FFNPlan,
    x: jax.Array,
    hidden: tuple[jax.Array, jax.Array],
    w: ReadWeights,
    dy: jax.Array,
    da: jax.Array,
    key: jax.Array | None,
) -> tuple[jax.Array, FFNWeights]:
    """dX and the weight gradients, all in float32, from dense G and U."""
    sparsity = plan.sparsity
    assert plan.d_input_gate is not None and w.gate is not None
    a, pull_back = jax.vjp(partial(_activate, plan.activation), *hidden)
    selected = dgate, dup = pull_back(da)
    if sparsity.activations is not None and not sparsity.mask_reuse:
        selected = [jnp.where(magnitude_mask(g, TWO_FOUR), g, 0) for g in selected]
    accumulate = jnp.promote_types(x.dtype, jnp.float32)
    # (T, d) = (T, F) @ (F, d), the sum of both in float32
    through_gate, through_up = selected
    dx = multiply(plan.d_input_gate, through_gate, w.gate.T, out_dtype=accumulate)
    more = multiply(plan.d_input, through_up, w.up.T, out_dtype=accumulate)
    return dx + more, weight_gradients(plan, x, [dgate, dup], a, dy, key)


def _backward_packed(
    plan: FFNPlan,
    x: jax.Array,
    kept: GatedActivations,
    w: ReadWeights,
    dy: jax.Array,
    da: jax.Array,
    key: jax.Array | None,
) -> tuple[jax.Array, FFNWeights]:
    """The same where A, dG and dU are packed: dense only for dense GEMMs 5 and 6."""
    kernels = plan.kernels
    assert kernels is not None and w.gate is not None
    if plan.over_tokens:
        groups = token_groups(plan.sparsity, x.shape[0], kept.nonzeros)
        gradients, over_tokens = kernels.gated_gradients_over_tokens(
            da, kept.hidden, kept.up, groups.residual, by_segments=groups.by_segments
        )
        dw_gate, dw_up = (
            weight_gradient_up(kernels, groups, x, g) for g in over_tokens.gradients
        )
        dw_down = weight_gradient_down(kernels, groups, over_tokens.a, dy)
        dw = FFNWeights(up=dw_up, down=dw_down, gate=dw_gate)
    else:
        gradients = kernels.gated_gradients(da, kept.hidden, kept.up)
        *into_hidden, a = (decompress(unpack(p)) for p in (*gradients, kept.a))
        dw = weight_gradients(plan, x, into_hidden, a, dy, key)
    # (T, d) = (T, F) @ (F, d), Wg and Wu as they are stored
    multiply_by = partial(
        kernels.matmul,
        b_k_major=True,
        transpose_out=False,
        out_dtype=jnp.dtype(jnp.float32),
    )
    dgate, dup = gradients
    return multiply_by(dgate, w.gate) + multiply_by(dup, w.up), dw


GATED = Execution(forward, backward)
