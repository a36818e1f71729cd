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
from typing import Any

from jaxtyping import Array, Float, Key

from sparsejax.annotations import check_value
from sparsejax.dtypes import check_compute_dtype
from sparsejax.feed_forward.activation import ACTIVATIONS, Activation, GatedActivation
from sparsejax.feed_forward.call import call_ffn
from sparsejax.feed_forward.layout import FFNLayout
from sparsejax.feed_forward.operands.weights import (
    FFNWeights,
    PackedFFN,
)
from sparsejax.feed_forward.spec import (
    DENSE,
    FFNCall,
    FFNSparsity,
    dense_feature_count,
    dtype_in_jax,
    why_not_packed_anew,
    why_not_packed_over_tokens,
)
from sparsejax.ops.backend import (
    Backend,
    GemmSpec,
    Role,
    current_device,
)
from sparsejax.sparsity.patterns import TWO_FOUR, Pattern


@dataclass(frozen=True, kw_only=True)
class GatedFFNSpec(FFNCall):
    """The static facts of one call of a gated FFN."""

    activation: GatedActivation = "swiglu"

    @property
    def kind(self) -> Activation:
        return ACTIVATIONS[self.activation]

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
        """Returns the spec of a call, read from its operands. Raises ValueError where
        their shapes do not fit, or where an FFN does not compute in one of their
        dtypes."""
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
            check_compute_dtype(name, dtype_in_jax(weight))
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
        """Returns the nine GEMMs of one device, in the order 1a, 1b, 2, 3, 4a, 4b, 5a,
        5b, 6."""
        t, d = self.tokens // self.token_shards, self.d_model
        f = self.d_hidden // self.hidden_shards
        s = self.sparsity
        along_tokens = TWO_FOUR if s.token_sparsity else None
        weight = _sparse("weight", s.weights)
        activation = partial(_sparse, "input", s.activations)

        def gradient(operand: str) -> dict[str, Any]:
            return {"is_weight_gradient": True} | _sparse(
                operand,
                along_tokens,
                why_not_packed=why_not_packed_over_tokens(s),
                dense_features=dense_feature_count(f, s.dense_features),
            )

        # dX is the sum of two products in float32.
        part = activation(
            float32_out=True,
            weight_transposed=True,
            why_not_packed=why_not_packed_anew(s),
        )

        def gemm(
            role: Role, name: str, d_in: int, d_out: int, **facts: Any
        ) -> GemmSpec:
            shared = {"tokens": t, "dtype": self.dtype, "device": self.device}
            return GemmSpec(
                role=role, name=name, d_in=d_in, d_out=d_out, **shared, **facts
            )

        return (
            gemm("gate", "1a G = X Wg", d, f, **weight),
            gemm("up", "1b U = X Wu", d, f, **weight),
            gemm("down", "2  Y = A Wd", f, d, **activation()),
            gemm("d_hidden", "3  dA = dY Wd^T", d, f, **weight),
            gemm("d_input_gate", "4a dX = dG Wg^T", f, d, **part),
            gemm("d_input", "4b dX += dU Wu^T", f, d, **part),
            gemm("d_gate", "5a dWg = X^T dG", d, f, **gradient("gradient")),
            gemm("d_up", "5b dWu = X^T dU", d, f, **gradient("gradient")),
            gemm("d_down", "6  dWd = A^T dY", f, d, **gradient("input")),
        )


def check_gated(activation: GatedActivation, sparsity: FFNSparsity) -> None:
    """Raises ValueError where there is no gated FFN of that activation, or where it
    cannot have the sparsity."""
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
    """Returns the fields of a `GemmSpec` that describe its sparse operand, none where
    the operand is dense."""
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
    """Returns `(s(x S(Wg)) * (x S(Wu))) Wd`; its gradient goes straight through S and
    masks.

    Numerics, and the arguments and errors that are not listed, are those of `ffn`.
    Where the activations are 2:4, the two with the largest |A| of four neighbouring
    neurons stay.

    Args:
      w_gate, w_up, w_down: Wg, Wu and Wd, usually float32 masters.
      activation: the name of s. "swiglu" is silu, which allows sparse weights alone;
        "reglu2" is relu^2, which allows 2:4 activations as well.
      scales: the frozen beta of (Wg, Wu, Wd^T), for packing here if `packed` is None.
      key: a random key for `token_sparsity` "mvue" and "mvue_approximate".
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
    return call_ffn(
        spec,
        x,
        FFNWeights(up=w_up, down=w_down, gate=w_gate),
        packed=packed,
        scales=scales,
        expert_index=None,
        key=key,
        layout=layout,
        backend=backend,
    )
