"""FFNs whose GEMMs multiply 8-bit floats against their equations in float64: all GEMMs
of a dense FFN, and GEMM 1 of a sparse one."""

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
from sparsejax.routing.routers import ActivationEnergy
from sparsejax.sparsity.patterns import VNM
from tests.support.devices.hopper import A100, H200, see_device
from tests.support.oracles.ffn_cases import (
    jitted,
    make_experts,
    make_inputs,
    name_of,
    oracle,
    representative_sparsities,
)
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


def by_energy(n: int) -> FFNSparsity:
    return FFNSparsity(
        activations=VNM(8, n, 16),
        experts_per_token=2,
        router=ActivationEnergy(),
        weight_gradients="expert_columns",
    )


SPARSE = (*representative_sparsities(), by_energy(2), by_energy(4))


@pytest.mark.parametrize("packed", [False, True], ids=["", "packed-before"])
@pytest.mark.parametrize(
    "sparsity", [s for s in SPARSE if s.up_is_dense and not s.is_dense], ids=name_of
)
def test_a_sparse_ffn_rounds_what_gemm_1_reads_and_nothing_else(sparsity, packed):
    given = make_inputs()
    experts = make_experts(sparsity)
    y_up = rounded(given[0], FORWARD) @ rounded(given[1], FORWARD)
    wanted = oracle(sparsity, *given, experts, y_up=y_up.astype(np.float32))
    how = {"sparsity": sparsity, "precision": "fp8_all", "dtype": jnp.dtype("float32")}
    single = [a.astype(np.float32) for a in given]
    made = pack_ffn(*single[1:3], **how) if packed else None
    got = jitted(sparsity, *single, experts, packed=made, precision="fp8_all")
    for ours, theirs in zip(got, wanted, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)
    # The rounding is seen: without it Y is another one.
    plain, *_ = jitted(sparsity, *single, experts)
    assert np.abs(plain - wanted[0]).max() > 1e-2


@pytest.mark.parametrize(
    "sparsity", [s for s in SPARSE if not s.up_is_dense], ids=name_of
)
def test_a_sparse_ffn_without_such_a_gemm_1_reads_no_8_bit_floats(sparsity):
    single = [a.astype(np.float32) for a in make_inputs()]
    experts = make_experts(sparsity)
    plain = jitted(sparsity, *single, experts)
    asked = jitted(sparsity, *single, experts, precision="fp8_all")
    for ours, theirs in zip(asked, plain, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_a_sparse_gated_ffn_rounds_what_gemms_1a_and_1b_read():
    x, w_gate, w_up, w_down, dy = inputs()
    sparsity = FFNSparsity(activations=VNM(8, 4, 8))
    experts = np.arange(TOKENS)[:, None] % 2
    used = experts == np.arange(D_HIDDEN)[None] // (D_HIDDEN // 2)
    forward = lambda a, b: rounded(a, FORWARD) @ rounded(b, FORWARD)
    g, up = forward(x, w_gate), forward(x, w_up)
    s, slope = first("swiglu", g)
    da = (dy @ w_down.T) * used
    d_gate, d_up = da * up * slope, da * s
    wanted = [
        (s * up * used) @ w_down,
        d_gate @ w_gate.T + d_up @ w_up.T,
        x.T @ d_gate,
        x.T @ d_up,
        (s * up * used).T @ dy,
    ]

    @jax.jit
    def run(x, weights, dy):
        call = lambda x, w: gated_ffn(
            x, *w, sparsity=sparsity, precision="fp8", expert_index=jnp.asarray(experts)
        )
        y, pull_back = jax.vjp(call, x, weights)
        dx, gradients = pull_back(dy)
        return [y, dx, *gradients]

    got = run(x, [w_gate, w_up, w_down], dy)
    for ours, theirs in zip(got, wanted, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("precision", "count"), [("dtype", 0), ("fp8", 1)])
def test_gemm_1_of_a_sparse_ffn_reaches_a_gpu_as_one_of_8_bit_floats(
    monkeypatch, precision, count
):
    jax.clear_caches()  # of traces made for a CPU
    see_device(monkeypatch)
    x, w_up, w_down, dy = (jnp.asarray(a, jnp.bfloat16) for a in make_inputs())

    def both(x, w_up, w_down, dy):
        run = lambda *of: ffn(*of, sparsity=by_energy(4), precision=precision)
        y, pull_back = jax.vjp(run, x, w_up, w_down)
        return y, pull_back(dy)

    traced = jax.jit(both).trace(x, w_up, w_down, dy)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    gemms = [line for line in text.splitlines() if "dot_general" in line]
    assert sum("f8E4M3FN" in line for line in gemms) == count


def test_the_plan_of_a_sparse_ffn_names_8_bit_floats_in_gemm_1():
    sizes = {"tokens": 4096, "d_model": 1024, "d_hidden": 4096, "dtype": "bfloat16"}
    sparsity = FFNSparsity(
        activations=VNM(128, 4, 32),
        experts_per_token=2,
        router=ActivationEnergy(),
        weight_gradients="expert_columns",
    )
    spec = FFNSpec(precision="fp8_all", device=H200, sparsity=sparsity, **sizes)
    named = ["8-bit" in decision.path for decision in spec.explain()]
    assert named == [True] + [False] * 5


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
