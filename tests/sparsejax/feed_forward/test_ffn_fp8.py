"""Dense FFNs whose GEMMs multiply 8-bit floats against their equations in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparsejax.feed_forward.ffn import ffn
from sparsejax.feed_forward.gated_ffn import gated_ffn
from sparsejax.feed_forward.operands.weights import pack_ffn
from sparsejax.feed_forward.sparsity import DENSE, FFNSparsity
from sparsejax.feed_forward.spec import FFNSpec
from sparsejax.ops.fp8_matmul import FORWARD, GRADIENT
from sparsejax.sparsity.patterns import NM
from tests.support.devices.hopper import A100, H200
from tests.support.oracles.fp8_oracle import rounded

TOKENS, D_MODEL, D_HIDDEN = 24, 16, 40


def inputs() -> tuple[np.ndarray, ...]:
    generator = np.random.default_rng(0)
    shapes = (
        (TOKENS, D_MODEL),
        (D_MODEL, D_HIDDEN),
        (D_MODEL, D_HIDDEN),
        (D_HIDDEN, D_MODEL),
        (TOKENS, D_MODEL),
    )
    return tuple(generator.standard_normal(s).astype(np.float32) / 2 for s in shapes)


def first(activation: str, g: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns s(G), or relu(Y1)^2, and its derivative."""
    if activation == "swiglu":
        sigmoid = 1 / (1 + np.exp(-g))
        return g * sigmoid, sigmoid * (1 + g * (1 - sigmoid))
    return np.maximum(g, 0) ** 2, 2 * np.maximum(g, 0)


def expected(activation: str, precision: str) -> list[np.ndarray]:
    """Returns Y, dX and the gradients of the weights, of the equations in `spec` and
    `gated_ffn` with operands rounded to 8-bit floats."""
    x, w_gate, w_up, w_down, dy = (a.astype(np.float64) for a in inputs())
    gated = activation != "relu2"
    forward = lambda a, b: rounded(a, FORWARD) @ rounded(b, FORWARD)
    backward = lambda a, b: rounded(a, GRADIENT) @ rounded(b, FORWARD)
    of_weight = lambda a, b: a.T @ b
    if precision == "fp8_all":
        of_weight = lambda a, b: rounded(a, FORWARD).T @ rounded(b, GRADIENT)
    # What one GEMM writes and the next one reads is float32.
    single = lambda a: a.astype(np.float32).astype(np.float64)
    up = single(forward(x, w_up))
    g = single(forward(x, w_gate)) if gated else up
    s, slope = first(activation, g)
    a = single(s * up if gated else s)
    da = single(backward(dy, w_down.T))
    d_up = single(da * (s if gated else slope))
    dx = backward(d_up, w_up.T)
    gradients = [of_weight(x, d_up), of_weight(a, dy)]
    if gated:
        d_gate = single(da * up * slope)
        dx = dx + backward(d_gate, w_gate.T)
        gradients = [of_weight(x, d_gate), *gradients]
    return [forward(a, w_down), dx, *gradients]


@pytest.mark.parametrize("packed", [False, True], ids=["", "packed-before"])
@pytest.mark.parametrize("precision", ["fp8", "fp8_all"])
@pytest.mark.parametrize("activation", ["relu2", "swiglu", "reglu2"])
def test_an_ffn_of_8_bit_floats_is_its_equations(activation, precision, packed):
    x, w_gate, *weights, dy = map(jnp.asarray, inputs())
    weights = weights if activation == "relu2" else [w_gate, *weights]

    @jax.jit
    def run(x, weights, dy):
        def of(x, weights):
            *gate, up, down = weights
            how = {"precision": precision}
            if packed:
                how["packed"] = pack_ffn(
                    up,
                    down,
                    w_gate=gate[0] if gate else None,
                    sparsity=DENSE,
                    precision=precision,
                    dtype=jnp.dtype("float32"),
                )
            if activation == "relu2":
                return ffn(x, up, down, **how)
            return gated_ffn(x, *gate, up, down, activation=activation, **how)

        y, pull_back = jax.vjp(of, x, weights)
        dx, gradients = pull_back(dy)
        return [y, dx, *gradients]

    got = run(x, weights, dy)
    wanted = expected(activation, precision)
    assert len(got) == len(wanted)
    for ours, theirs in zip(got, wanted, strict=True):
        # Sums in float32; where one rounds across a boundary of 8 bits, an operand
        # differs by 1/8 of it, which in a sum of 16 to 40 products stays below this.
        off = np.linalg.norm(np.asarray(ours) - theirs) / np.linalg.norm(theirs)
        assert off < 2e-3, off


def test_a_sparse_ffn_reads_no_8_bit_floats():
    x, _, w_up, w_down, _ = map(jnp.asarray, inputs())
    sparsity = FFNSparsity(activations=NM(2, 4))
    plain = ffn(x, w_up, w_down, sparsity=sparsity)
    asked = ffn(x, w_up, w_down, sparsity=sparsity, precision="fp8_all")
    np.testing.assert_array_equal(asked, plain)


def test_the_plan_names_the_formats_gemm_by_gemm():
    sizes = {"tokens": 4096, "d_model": 1024, "d_hidden": 4096, "dtype": "bfloat16"}
    formats = {
        "fp8": ["e4m3fn x e4m3fn"] * 2 + ["e5m2 x e4m3fn"] * 2 + [None] * 2,
        "fp8_all": ["e4m3fn x e4m3fn"] * 2
        + ["e5m2 x e4m3fn"] * 2
        + ["e4m3fn x e5m2"] * 2,
    }
    for precision, wanted in formats.items():
        for device in (H200, A100):
            spec = FFNSpec(precision=precision, device=device, **sizes)
            for decision, named in zip(spec.explain(), wanted, strict=True):
                assert decision.executed_share == 1
                if named is None:
                    assert "8-bit" not in decision.path
                    continue
                assert named in decision.path
                assert ("no tensor cores" in decision.path) == (device == A100)
    with pytest.raises(
        ValueError, match="precision='fp4' must be one of 'dtype', 'fp8'"
    ):
        FFNSpec(precision="fp4", **sizes)
