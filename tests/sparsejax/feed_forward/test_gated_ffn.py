"""The gated FFN: nine GEMMs against a NumPy oracle, value and every gradient."""

from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.test_util import check_grads

from sparsejax.feed_forward.activation import GatedActivation
from sparsejax.feed_forward.gated_ffn import GatedFFNSpec, check_gated, gated_ffn
from sparsejax.feed_forward.operands.token_sparsity import fixed_token_order
from sparsejax.feed_forward.operands.weights import pack_ffn
from sparsejax.feed_forward.sparsity import DENSE, FFNSparsity
from sparsejax.sparsity.patterns import TWO_FOUR, VNM
from tests.support.oracles.ffn_oracle import (
    along_tokens,
    cluster_mask,
    soft_threshold,
    two_of_four,
)

TOKENS, D_MODEL, D_HIDDEN = 13, 8, 20
SCALES = (1.5, 1.25, 0.75)
SPARSE = FFNSparsity(weights=TWO_FOUR)
ACTIVATIONS = FFNSparsity(activations=TWO_FOUR)
ALL_NINE = FFNSparsity(
    weights=TWO_FOUR, activations=TWO_FOUR, token_sparsity="magnitude"
)


class Case(NamedTuple):
    """The static part of a call."""

    activation: GatedActivation
    sparsity: FFNSparsity


CASES = {
    "dense": Case("swiglu", DENSE),
    "2:4": Case("swiglu", SPARSE),
    "reglu2, dense": Case("reglu2", DENSE),
    "reglu2, 2:4 weights": Case("reglu2", SPARSE),
    "activations": Case("reglu2", ACTIVATIONS),
    "all nine": Case("reglu2", ALL_NINE),
    "tokens in order": Case("reglu2", replace(ALL_NINE, permute_tokens=False)),
    "no whole features": Case("reglu2", replace(ALL_NINE, dense_features=0.0)),
    "selected anew": Case("reglu2", replace(ALL_NINE, mask_reuse=False)),
    "exact": Case("swiglu", replace(SPARSE, exact_gradients=True)),
    "exact, 2:4 activations": Case(
        "reglu2", replace(ALL_NINE, token_sparsity=None, exact_gradients=True)
    ),
}


def some(*names: str):
    return pytest.mark.parametrize("case", [CASES[n] for n in names], ids=names)


EACH = some(*CASES)
SELECTS_NO_ACTIVATION = [n for n, c in CASES.items() if not c.sparsity.activations]

# float64 sums of at most 20 products of numbers near 1
TOLERANCE = 1e-12


def make_inputs(seed=0, d_hidden=D_HIDDEN):
    rng = np.random.default_rng(seed)
    shapes = [(TOKENS, D_MODEL), (D_MODEL, d_hidden), (D_MODEL, d_hidden)]
    shapes += [(d_hidden, D_MODEL), (TOKENS, D_MODEL)]
    return tuple(rng.normal(size=shape) / shape[0] ** 0.5 for shape in shapes)


def gated_oracle(case, x, w_gate, w_up, w_down, dy, experts=None):
    """GEMMs 1 and 3 read S(W), the others the dense weights; with exact gradients GEMMs
    1 and 4 do. Every matrix is full size and masked, also where tokens have
    `experts`."""
    sparsity = case.sparsity
    s_gate, s_up, s_down = w_gate, w_up, w_down
    if sparsity.weights:
        s_gate = SCALES[0] * soft_threshold(w_gate, axis=0)
        s_up = SCALES[1] * soft_threshold(w_up, axis=0)
        s_down = SCALES[2] * soft_threshold(w_down, axis=1)
    back_gate, back_up = w_gate, w_up
    if sparsity.exact_gradients:
        s_down, back_gate, back_up = w_down, s_gate, s_up
    gate, up, da = x @ s_gate, x @ s_up, dy @ s_down.T
    if case.activation == "swiglu":
        sigmoid = 1 / (1 + np.exp(-gate))
        s, slope = gate * sigmoid, sigmoid * (1 + gate * (1 - sigmoid))
    else:
        s, slope = np.maximum(gate, 0) ** 2, 2 * np.maximum(gate, 0)
    tokens, features = gate.shape
    columns = np.ones_like(gate)
    if sparsity.experts:
        if sparsity.router.inside:
            mass = (s * up) ** 2
            mass = mass.reshape(tokens, sparsity.experts, -1).sum(-1)
            best = np.argsort(-mass, axis=1, kind="stable")
            experts = best[:, : sparsity.experts_per_token]
        columns = cluster_mask(experts, features, sparsity.experts)
    two_four = sparsity.activations is not None and sparsity.activations.n == 2
    kept = columns
    if two_four:
        kept = columns * two_of_four(abs(s * up), axis=1)
    y = (kept * s * up) @ w_down
    if sparsity.mask_reuse:
        s, slope = kept * s, kept * slope
    a, dgate, dup = s * up, da * up * slope, da * s
    selected = dgate * columns, dup * columns
    if two_four and not sparsity.mask_reuse:
        selected = [g * two_of_four(abs(g), axis=1) for g in selected]
    by_expert = sparsity.weight_gradients == "expert_columns"
    if by_expert:
        a, dgate, dup = a * columns, dgate * columns, dup * columns
    dx = selected[0] @ back_gate.T + selected[1] @ back_up.T
    if sparsity.token_sparsity:
        order = np.arange(tokens)
        if sparsity.permute_tokens:
            order = fixed_token_order(tokens)
        lists = [(range(features), list(order))]
        if by_expert:
            size = features // sparsity.experts
            lists = [
                (
                    range(e * size, (e + 1) * size),
                    [t for t in order if t >= 0 and e in experts[t]],
                )
                for e in range(sparsity.experts)
            ]
        nonzeros = (a != 0).sum(axis=0)
        a, dgate, dup = (
            along_tokens(matrix, nonzeros, sparsity.dense_features, lists)
            for matrix in (a, dgate, dup)
        )
    return y, dx, x.T @ dgate, x.T @ dup, a.T @ dy


def value_and_gradients(
    case, x, w_gate, w_up, w_down, dy, experts=None, *, packed=None, backend=None
):
    def run(x, w_gate, w_up, w_down):
        return gated_ffn(
            x,
            w_gate,
            w_up,
            w_down,
            activation=case.activation,
            sparsity=case.sparsity,
            packed=packed,
            scales=jnp.array(SCALES, w_up.dtype),
            expert_index=experts,
            backend=backend,
        )

    y, pull_back = jax.vjp(run, *(jnp.asarray(a) for a in (x, w_gate, w_up, w_down)))
    return y, *pull_back(jnp.asarray(dy, y.dtype))


jitted = jax.jit(value_and_gradients, static_argnums=0, static_argnames="backend")


def assert_close(got, expected, tolerance=TOLERANCE):
    for ours, theirs in zip(got, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=tolerance, atol=tolerance)


@EACH
@pytest.mark.parametrize("backend", [None, "xla", "reference"])
def test_matches_oracle(case, backend):
    inputs = make_inputs()
    with jax.enable_x64(True):
        got = jitted(case, *inputs, backend=backend)
    assert_close(got, gated_oracle(case, *inputs))


@some("dense", "2:4", "all nine")
@pytest.mark.parametrize("transformation", ["vmap", "remat", "scan"])
def test_transformations(case, transformation):
    batch = [make_inputs(seed) for seed in (0, 1)]
    stacked = [np.stack(arrays) for arrays in zip(*batch, strict=True)]

    def one(x, w_gate, w_up, w_down, dy):
        def run(*arguments):
            options = case._asdict() | {"scales": jnp.array(SCALES)}
            return gated_ffn(*arguments, **options)

        y, pull_back = jax.vjp(jax.checkpoint(run), x, w_gate, w_up, w_down)
        return y, *pull_back(dy)

    def transformed(*stacked):
        if transformation == "vmap":
            return jax.vmap(lambda *a: value_and_gradients(case, *a))(*stacked)
        if transformation == "scan":
            body = lambda _, a: (None, value_and_gradients(case, *a))
            return lax.scan(body, None, stacked)[1]
        each = [one(*(a[i] for a in stacked)) for i in range(2)]
        return tuple(jnp.stack(arrays) for arrays in zip(*each, strict=True))

    with jax.enable_x64(True):
        got = jax.jit(transformed)(*stacked)
    for i, inputs in enumerate(batch):
        assert_close([array[i] for array in got], gated_oracle(case, *inputs))


@pytest.mark.parametrize("activation", ["swiglu", "reglu2"])
def test_dense_gradient_is_the_derivative(activation):
    run = partial(gated_ffn, activation=activation)
    with jax.enable_x64(True):
        check_grads(run, make_inputs()[:4], order=1, modes=["rev"], rtol=1e-6)


@EACH
def test_float32(case):
    inputs = tuple(a.astype(np.float32) for a in make_inputs())
    got = jitted(case, *inputs)
    assert all(array.dtype == np.float32 for array in got)
    expected = gated_oracle(case, *(a.astype(np.float64) for a in inputs))
    # 6e-8 per operation, sums of 20
    assert_close(got, expected, 1e-5)


@some(*SELECTS_NO_ACTIVATION)
def test_bfloat16_keeps_float32_masters(case):
    """No selection depends on bfloat16: S(W) is taken of the float32 masters."""
    inputs = make_inputs()
    x, dy = (jnp.asarray(inputs[i], jnp.bfloat16) for i in (0, 4))
    masters = [a.astype(np.float32) for a in inputs[1:4]]
    got = jitted(case, x, *masters, dy)
    assert [a.dtype for a in got] == [jnp.bfloat16] * 2 + [jnp.float32] * 3
    exact = [np.asarray(a, np.float64) for a in (x, *masters, dy)]
    for ours, theirs in zip(got, gated_oracle(case, *exact), strict=True):
        # about four roundings of 2^-9 on the way, relative to the whole output; with
        # the square of G two more
        roundings = 4 if case.activation == "swiglu" else 6
        error = np.linalg.norm(np.asarray(ours, np.float64) - theirs)
        assert error < roundings * 2**-9 * np.linalg.norm(theirs)


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
    here = jitted(CASES["2:4"], x, w_gate, w_up, w_down, dy)
    before = jitted(CASES["2:4"], x, w_gate, w_up, w_down, dy, packed=packed)
    for ours, theirs in zip(here, before, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@some("2:4", "activations")
def test_nan_stays_in_its_token(case):
    inputs = [a.astype(np.float32) for a in make_inputs()]
    inputs[0][3, 1] = np.nan
    y, dx, *_ = jitted(case, *inputs)
    for array in (y, dx):
        finite = np.all(np.isfinite(array), axis=1)
        np.testing.assert_array_equal(finite, np.arange(TOKENS) != 3)


@EACH
def test_no_tokens_give_nothing(case):
    x, *weights, dy = make_inputs()
    options = case._asdict() | {"scales": jnp.array(SCALES), "key": jax.random.key(0)}
    y, pull_back = jax.vjp(partial(gated_ffn, **options), x[:0], *weights)
    dx, *gradients = pull_back(jnp.asarray(dy[:0], y.dtype))
    assert y.shape == dx.shape == (0, D_MODEL)
    for gradient, weight in zip(gradients, weights, strict=True):
        np.testing.assert_array_equal(gradient, np.zeros_like(weight))


def test_explain_names_nine_gemms():
    spec = GatedFFNSpec.of(*make_inputs()[:4], SPARSE)
    decisions = spec.explain()
    sparse = [d.spec.name[:2].strip() for d in decisions if d.spec.pattern]
    assert (len(decisions), sparse) == (9, ["1a", "1b", "3"])
    flops = 2 * TOKENS * D_MODEL * D_HIDDEN
    assert all(decision.spec.dense_flops == flops for decision in decisions)
    assert all(decision.executed_share == 1 for decision in decisions)


def test_explain_names_what_is_sparse_in_reglu2():
    spec = GatedFFNSpec.of(*make_inputs()[:4], ALL_NINE, activation="reglu2")
    operands = {d.spec.name[:2].strip(): d.spec.sparse_operand for d in spec.explain()}
    assert operands == (
        dict.fromkeys(("1a", "1b", "3"), "weight")
        | dict.fromkeys(("2", "4a", "4b", "6"), "input")
        | dict.fromkeys(("5a", "5b"), "gradient")
    )
    # 5 % of 20 features are one, rounded up to a tile of 16.
    assert spec.gemms()[-1].dense_features == 16


def test_the_random_estimator_is_right_on_average():
    case = Case("reglu2", replace(ALL_NINE, token_sparsity="mvue", dense_features=0.0))
    x, w_gate, w_up, w_down, dy = make_inputs()

    def gradients(key):
        options = case._asdict() | {"scales": jnp.array(SCALES), "key": key}
        _, pull_back = jax.vjp(partial(gated_ffn, x, **options), w_gate, w_up, w_down)
        return pull_back(dy)

    with jax.enable_x64(True):
        draws = 4000
        keys = jax.random.split(jax.random.key(0), draws)
        drawn = [np.asarray(dw) for dw in jax.jit(jax.vmap(gradients))(keys)]
    dense = Case("reglu2", replace(ALL_NINE, token_sparsity=None))
    expected = gated_oracle(dense, x, w_gate, w_up, w_down, dy)[2:]
    for ours, theirs in zip(drawn, expected, strict=True):
        deviation = np.std(ours, axis=0) / draws**0.5
        error = np.abs(np.mean(ours, axis=0) - theirs)
        # Of 160 numbers one is five deviations off in 10,000 runs; the scales that are
        # drawn are float32.
        assert np.all(error <= 5 * deviation + 1e-6 * np.abs(theirs))


def test_the_random_estimator_draws_anew_for_each_matrix():
    """X and dY are the identity, so that the gradients of the weights are what is left
    of dG, dU and A^T; with G = 2 U and dA = U the three are the same numbers."""
    x = dy = jnp.eye(8)
    u = np.random.default_rng(0).uniform(1, 2, (8, D_HIDDEN)).astype(np.float32)
    weights = 2 * u, u, u.T

    def kept(method):
        sparsity = FFNSparsity(token_sparsity=method, dense_features=0.0)
        options = {"activation": "reglu2", "sparsity": sparsity}
        run = partial(gated_ffn, x, key=jax.random.key(0), **options)
        dw_gate, dw_up, dw_down = jax.vjp(run, *weights)[1](dy)
        return dw_gate != 0, dw_up != 0, dw_down.T != 0

    of_gate, of_up, of_a = kept("magnitude")
    np.testing.assert_array_equal(of_gate, of_up)
    np.testing.assert_array_equal(of_up, of_a)
    of_gate, of_up, of_a = kept("mvue")
    assert np.any(of_gate != of_up) and np.any(of_up != of_a)
    assert np.any(of_a != of_gate)


@pytest.mark.parametrize(
    ("sparsity", "name"),
    [
        (ACTIVATIONS, "activations"),
        (FFNSparsity(weights=TWO_FOUR, token_sparsity="magnitude"), "token_sparsity"),
        (FFNSparsity(activations=VNM(4, 2, 8)), "activations"),
    ],
)
def test_swiglu_has_no_two_four_activations(sparsity, name):
    with pytest.raises(ValueError, match=f"{name}=.* in a SwiGLU FFN: silu leaves no"):
        gated_ffn(*make_inputs()[:4], sparsity=sparsity)


def test_errors():
    x, w_gate, w_up, w_down, _ = make_inputs()
    with pytest.raises(ValueError, match="needs scales.*three weights"):
        gated_ffn(x, w_gate, w_up, w_down, sparsity=SPARSE)
    with pytest.raises(ValueError, match="shapes do not chain"):
        gated_ffn(x, w_gate[:, :4], w_up, w_down)
    with pytest.raises(ValueError, match="shapes do not chain"):
        gated_ffn(x, w_gate, w_up, w_down.T)
    with pytest.raises(ValueError, match="activation='gelu' must be one of 'swiglu', "):
        gated_ffn(x, w_gate, w_up, w_down, activation="gelu")
    with pytest.raises(ValueError, match="must be matrices; flatten"):
        gated_ffn(x[None], w_gate, w_up, w_down)
    with pytest.raises(ValueError, match="d_model=6 is not a multiple of 4.*pad to 8"):
        gated_ffn(x[:, :6], w_gate[:6], w_up[:6], w_down[:, :6], sparsity=SPARSE)
    mvue = replace(ALL_NINE, weights=None, token_sparsity="mvue")
    with pytest.raises(ValueError, match="token_sparsity='mvue' draws random numbers"):
        gated_ffn(x, w_gate, w_up, w_down, activation="reglu2", sparsity=mvue)
    options = {"sparsity": SPARSE, "scales": jnp.ones(3), "backend": "mosaic_sm90"}
    with pytest.raises(NotImplementedError, match="needs a Hopper GPU, not cpu"):
        gated_ffn(x, w_gate, w_up, w_down, **options)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"skipped_energy": 0.05}, "observe penalty_strength in squared-ReLU FFNs"),
        ({"router": "learned"}, "observe what router='learned' learns"),
        (
            {"router": "activation_energy", "most_experts_per_token": 2},
            "observe energy_threshold in squared-ReLU FFNs",
        ),
    ],
)
def test_what_training_steps_observe_is_refused(setting, message):
    sparsity = FFNSparsity(activations=VNM(128, 4, 16), **setting)
    with pytest.raises(ValueError, match=f"{message}.*use activation='relu2'"):
        check_gated("swiglu", sparsity)
