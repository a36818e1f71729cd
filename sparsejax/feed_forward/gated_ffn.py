"""The gated feed-forward network: nine GEMMs.

    1a G = X Wg     1b U = X Wu     2  Y = A Wd     with A = s(G) * U
    3  dA = dY Wd^T
    4a dX += dG Wg^T    4b dX += dU Wu^T    with dG = dA * U * s'(G), dU = dA s(G)
    5a dWg = X^T dG     5b dWu = X^T dU     6  dWd = A^T dY

"swiglu" has s = silu, "reglu2" s = relu^2. As in the squared-ReLU FFN, GEMMs 1 and 3
may read S(W), GEMMs 2 and 4 the dense weight; with exact gradients 3 is dense and 4
reads S(W). relu^2 leaves zeros, and dG and dU are zero where A is, so that GEMMs 2, 4,
5 and 6 may have 2:4 activations; SiLU leaves none. With either a token may use the
neurons of its experts only, V:4:M.
"""

from dataclasses import dataclass
from functools import partial

from jaxtyping import Array, Float, Int, Key

from sparsejax.annotations import check_value
from sparsejax.dtypes import Precision, check_compute_dtype, dtype_in_jax
from sparsejax.feed_forward.activation import ACTIVATIONS, Activation, GatedActivation
from sparsejax.feed_forward.call import call_ffn
from sparsejax.feed_forward.layout import FFNLayout
from sparsejax.feed_forward.operands.experts import ExpertOperands
from sparsejax.feed_forward.operands.weights import (
    FFNWeights,
    PackedFFN,
)
from sparsejax.feed_forward.packing import why_not_packed_anew
from sparsejax.feed_forward.sparsity import DENSE, FFNSparsity
from sparsejax.feed_forward.spec import FFNCall
from sparsejax.ops.backend import Backend, current_device
from sparsejax.ops.gemm_spec import GemmSpec


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
        precision: Precision = "dtype",
        token_shards: int = 1,
        hidden_shards: int = 1,
        distinct_experts: bool = True,
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
            precision=precision,
            device=current_device(),
            token_shards=token_shards,
            hidden_shards=hidden_shards,
            distinct_experts=distinct_experts,
        )

    def __post_init__(self) -> None:
        check_gated(self.activation, self.sparsity)
        super().__post_init__()

    def gemms(self) -> tuple[GemmSpec, ...]:
        """Returns the nine GEMMs of one device, in the order 1a, 1b, 2, 3, 4a, 4b, 5a,
        5b, 6."""
        s = self.sparsity
        into_hidden = ("S(Wg)", "S(Wu)") if s.d_input_weights else ("Wg", "Wu")
        # dX is the sum of two products in float32.
        part = partial(
            self.activation_gemm,
            float32_out=True,
            weight_transposed=True,
            why_not_packed=self.why_not_packed or why_not_packed_anew(s),
        )
        return (
            self.weight_gemm("gate", "1a G = X Wg", by_expert=s.skip_blocks),
            self.weight_gemm("up", "1b U = X Wu", by_expert=s.skip_blocks),
            self.activation_gemm(
                "down", "2  Y = A Wd", why_not_packed=self.why_not_packed
            ),
            self.weight_gemm("d_hidden", "3  dA = dY Wd^T", by_expert=s.da_by_expert),
            part("d_input_gate", f"4a dX = dG {into_hidden[0]}^T"),
            part("d_input", f"4b dX += dU {into_hidden[1]}^T"),
            self.gradient_gemm("d_gate", "5a dWg = X^T dG", "gradient"),
            self.gradient_gemm("d_up", "5b dWu = X^T dU", "gradient"),
            self.gradient_gemm("d_down", "6  dWd = A^T dY", "input"),
        )

    @property
    def why_not_packed(self) -> str | None:
        if self.sparsity.experts and self.sparsity.in_expert is not None:
            return "no kernel packs rows of experts of a gated FFN"
        return None


def check_gated(activation: GatedActivation, sparsity: FFNSparsity) -> None:
    """Raises ValueError where there is no gated FFN of that activation, or where it
    cannot have the sparsity."""
    check_value("activation", activation, GatedActivation)
    watched = list(sparsity.observes)
    if sparsity.learns:
        watched.append(f"what router={sparsity.router.name!r} learns")
    if watched:
        raise ValueError(
            f"training steps observe {', '.join(watched)} in squared-ReLU FFNs alone, "
            f"not in one of activation={activation!r}; leave out the setting that "
            f"needs it, or use activation='relu2'"
        )
    if activation != "swiglu":
        return
    two_four = {"activations": sparsity.activations if sparsity.in_expert else None}
    for name, value in (two_four | {"token_sparsity": sparsity.token_sparsity}).items():
        if value is not None:
            raise ValueError(
                f"{name}={value} in a SwiGLU FFN: silu leaves no zeros, so that its "
                f"activations can be sparse by whole experts alone, VNM(v, 4, m), and "
                f"its weights; set {name}=None, or activation='reglu2' or 'relu2'"
            )


def gated_ffn(
    x: Float[Array, "tokens d_model"],
    w_gate: Float[Array, "d_model d_hidden"],
    w_up: Float[Array, "d_model d_hidden"],
    w_down: Float[Array, "d_hidden d_model"],
    *,
    activation: GatedActivation = "swiglu",
    sparsity: FFNSparsity = DENSE,
    precision: Precision = "dtype",
    packed: PackedFFN | None = None,
    scales: Float[Array, "3"] | None = None,
    expert_index: Int[Array, "tokens experts_per_token"] | None = None,
    distinct_experts: bool = False,
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
      activation: the name of s. "swiglu" is silu, which allows sparse weights and
        V:4:M activations; "reglu2" is relu^2, which allows 2:4 ones as well.
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
        x,
        w_gate,
        w_up,
        w_down,
        sparsity,
        activation=activation,
        precision=precision,
        # Such a router chooses inside the call.
        distinct_experts=distinct_experts or sparsity.router.inside,
        **shards,
    )
    y, _ = call_ffn(
        spec,
        x,
        FFNWeights(up=w_up, down=w_down, gate=w_gate),
        packed=packed,
        scales=scales,
        experts=ExpertOperands(expert_index),
        key=key,
        layout=layout,
        backend=backend,
    )
    return y
