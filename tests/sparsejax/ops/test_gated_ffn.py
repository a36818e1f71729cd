"""The gated FFN: nine GEMMs against a NumPy oracle, value and every gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.test_util import check_grads

from ffn_oracle import soft_threshold
from sparsejax.ops.ffn_spec import DENSE, FFNSparsity
from sparsejax.ops.ffn_weights import pack_ffn
from sparsejax.ops.gated_ffn import GatedFFNSpec, gated_ffn
from sparsejax.patterns import TWO_FOUR, VNM

TOKENS, D_MODEL, D_HIDDEN = 13, 8, 20
SCALES = (1.5, 1.25, 0.75)
SPARSE = FFNSparsity(weights=TWO_FOUR)
BOTH = pytest.mark.parametrize("sparsity", [DENSE, SPARSE], ids=["dense", "2:4"])

# float64 sums of at most 20 products of numbers near 1
TOLERANCE = 1e-12


def make_inputs(seed=0):
    rng = np.random.default_rng(seed)
    shapes = [(TOKENS, D_MODEL), (D_MODEL, D_HIDDEN), (D_MODEL, D_HIDDEN)]
    shapes += [(D_HIDDEN, D_MODEL), (TOKENS, D_MODEL)]
    return tuple(rng.normal(size=shape) / shape[0] ** 0.5 for shape in shapes)


def gated_oracle(sparsity, x, w_gate, w_up, w_down, dy):
    """GEMMs 1 and 3 read S(W), the others the dense weights."""
    s_gate, s_up, s_down = w_gate, w_up, w_down
    if sparsity.weights:
        s_gate = SCALES[0] * soft_threshold(w_gate, axis=0)
        s_up = SCALES[1] * soft_threshold(w_up, axis=0)
        s_down = SCALES[2] * soft_threshold(w_down, axis=1)
    gate, up = x @ s_gate, x @ s_up
    sigmoid = 1 / (1 + np.exp(-gate))
    silu, slope = gate * sigmoid, sigmoid * (1 + gate * (1 - sigmoid))
    a, da = silu * up, dy @ s_down.T
    dgate, dup = da * up * slope, da * silu
    dx = dgate @ w_gate.T + dup @ w_up.T
    return a @ w_down, dx, x.T @ dgate, x.T @ dup, a.T @ dy


def value_and_gradients(
    sparsity, x, w_gate, w_up, w_down, dy, *, packed=None, backend=None
):
    def run(x, w_gate, w_up, w_down):
        return gated_ffn(
            x,
            w_gate,
            w_up,
            w_down,
            sparsity=sparsity,
            packed=packed,
            scales=jnp.array(SCALES, w_up.dtype),
            backend=backend,
        )

    y, pull_back = jax.vjp(run, *(jnp.asarray(a) for a in (x, w_gate, w_up, w_down)))
    return y, *pull_back(jnp.asarray(dy, y.dtype))


jitted = jax.jit(value_and_gradients, static_argnums=0, static_argnames="backend")


def assert_close(got, expected, tolerance=TOLERANCE):
    for ours, theirs in zip(got, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=tolerance, atol=tolerance)


@BOTH
@pytest.mark.parametrize("backend", [None, "xla", "reference"])
def test_matches_oracle(sparsity, backend):
    inputs = make_inputs()
    with jax.enable_x64(True):
        got = jitted(sparsity, *inputs, backend=backend)
    assert_close(got, gated_oracle(sparsity, *inputs))


@BOTH
@pytest.mark.parametrize("transformation", ["vmap", "remat", "scan"])
def test_transformations(sparsity, transformation):
    batch = [make_inputs(seed) for seed in (0, 1)]
    stacked = [np.stack(arrays) for arrays in zip(*batch, strict=True)]

    def one(x, w_gate, w_up, w_down, dy):
        def run(*arguments):
            scales = jnp.array(SCALES)
            return gated_ffn(*arguments, sparsity=sparsity, scales=scales)

        y, pull_back = jax.vjp(jax.checkpoint(run), x, w_gate, w_up, w_down)
        return y, *pull_back(dy)

    def transformed(*stacked):
        if transformation == "vmap":
            return jax.vmap(lambda *a: value_and_gradients(sparsity, *a))(*stacked)
        if transformation == "scan":
            body = lambda _, a: (None, value_and_gradients(sparsity, *a))
            return lax.scan(body, None, stacked)[1]
        each = [one(*(a[i] for a in stacked)) for i in range(2)]
        return tuple(jnp.stack(arrays) for arrays in zip(*each, strict=True))

    with jax.enable_x64(True):
        got = jax.jit(transformed)(*stacked)
    for i, inputs in enumerate(batch):
        assert_close([array[i] for array in got], gated_oracle(sparsity, *inputs))


def test_dense_gradient_is_the_derivative():
    with jax.enable_x64(True):
        check_grads(gated_ffn, make_inputs()[:4], order=1, modes=["rev"], rtol=1e-6)


@BOTH
def test_float32(sparsity):
    inputs = tuple(a.astype(np.float32) for a in make_inputs())
    got = jitted(sparsity, *inputs)
    assert all(array.dtype == np.float32 for array in got)
    expected = gated_oracle(sparsity, *(a.astype(np.float64) for a in inputs))
    # 6e-8 per operation, sums of 20
    assert_close(got, expected, 1e-5)


@BOTH
def test_bfloat16_keeps_float32_masters(sparsity):
    """No selection depends on bfloat16: S(W) is taken of the float32 masters."""
    inputs = make_inputs()
    x, dy = (jnp.asarray(inputs[i], jnp.bfloat16) for i in (0, 4))
    masters = [a.astype(np.float32) for a in inputs[1:4]]
    got = jitted(sparsity, x, *masters, dy)
    assert [a.dtype for a in got] == [jnp.bfloat16] * 2 + [jnp.float32] * 3
    exact = [np.asarray(a, np.float64) for a in (x, *masters, dy)]
    for ours, theirs in zip(got, gated_oracle(sparsity, *exact), strict=True):
        # about four roundings of 2^-9 on the way, relative to the whole output
        error = np.linalg.norm(np.asarray(ours, np.float64) - theirs)
        assert error < 4 * 2**-9 * np.linalg.norm(theirs)


def test_packed_beforehand_gives_the_same_bits():
    x, w_gate, w_up, w_down, dy = (a.astype(np.float32) for a in make_inputs())
    pack = jax.jit(pack_ffn, static_argnames=("sparsity", "dtype"))
    packed = pack(
        w_up,
        w_down,
        w_gate=w_gate,
        sparsity=SPARSE,
        scales=jnp.array(SCALES),
        dtype=jnp.float32,
    )
    here = jitted(SPARSE, x, w_gate, w_up, w_down, dy)
    before = jitted(SPARSE, x, w_gate, w_up, w_down, dy, packed=packed)
    for ours, theirs in zip(here, before, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_nan_stays_in_its_token():
    inputs = [a.astype(np.float32) for a in make_inputs()]
    inputs[0][3, 1] = np.nan
    y, dx, *_ = jitted(SPARSE, *inputs)
    for array in (y, dx):
        finite = np.all(np.isfinite(array), axis=1)
        np.testing.assert_array_equal(finite, np.arange(TOKENS) != 3)


def test_explain_names_nine_gemms():
    spec = GatedFFNSpec.of(*make_inputs()[:4], SPARSE)
    decisions = spec.explain()
    sparse = [d.spec.name[:2].strip() for d in decisions if d.spec.pattern]
    assert (len(decisions), sparse) == (9, ["1a", "1b", "3"])
    flops = 2 * TOKENS * D_MODEL * D_HIDDEN
    assert all(decision.spec.dense_flops == flops for decision in decisions)
    assert all(decision.executed_share == 1 for decision in decisions)


@pytest.mark.parametrize(
    "sparsity",
    [
        FFNSparsity(activations=TWO_FOUR),
        FFNSparsity(activations=VNM(8, 2, 16)),
        FFNSparsity(weights=TWO_FOUR, token_sparsity="magnitude"),
    ],
)
def test_no_sparse_activations(sparsity):
    with pytest.raises(ValueError, match="silu is nowhere zero.*or the squared-ReLU"):
        gated_ffn(*make_inputs()[:4], sparsity=sparsity)


def test_errors():
    x, w_gate, w_up, w_down, _ = make_inputs()
    with pytest.raises(ValueError, match="needs scales.*three weights"):
        gated_ffn(x, w_gate, w_up, w_down, sparsity=SPARSE)
    with pytest.raises(ValueError, match="shapes do not chain"):
        gated_ffn(x, w_gate[:, :4], w_up, w_down)
    with pytest.raises(ValueError, match="shapes do not chain"):
        gated_ffn(x, w_gate, w_up, w_down.T)
    with pytest.raises(ValueError, match="must be matrices; flatten"):
        gated_ffn(x[None], w_gate, w_up, w_down)
    with pytest.raises(ValueError, match="d_model=6 is not a multiple of 4.*pad to 8"):
        gated_ffn(x[:, :6], w_gate[:6], w_up[:6], w_down[:, :6], sparsity=SPARSE)
    options = {"sparsity": SPARSE, "scales": jnp.ones(3), "backend": "mosaic_sm90"}
    with pytest.raises(NotImplementedError, match="needs a Hopper GPU, not cpu"):
        gated_ffn(x, w_gate, w_up, w_down, **options)
