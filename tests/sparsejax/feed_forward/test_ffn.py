"""The six GEMMs: every combination against the masked dense oracle."""

from dataclasses import replace
from functools import partial
from itertools import combinations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.test_util import check_grads

from sparsejax.feed_forward.ffn import ffn
from sparsejax.feed_forward.sparsity import FFNSparsity
from sparsejax.routing.dispatch import row_count
from sparsejax.routing.learned_energy import LearnedEnergy
from sparsejax.routing.named_routers import ROUTERS
from sparsejax.routing.routers import (
    ActivationEnergy,
    NearestCentre,
    SameExperts,
    TokenHash,
)
from sparsejax.sparsity.patterns import VNM
from tests.support.oracles.ffn_cases import (
    D_HIDDEN,
    D_MODEL,
    SCALES,
    TOKENS,
    TWO_FOUR,
    all_sparsities,
    jitted,
    make_experts,
    make_inputs,
    name_of,
    oracle,
    representative_sparsities,
    value_and_gradients,
)
from tests.support.oracles.ffn_oracle import (
    cluster_mask,
    heaviest_experts,
    soft_threshold,
    two_of_four,
)

# In float64 library and oracle take the same decisions, and differ by rounding only:
# sums of at most 128 products of numbers near 1, each rounded at 1e-16.
TOLERANCE = 1e-11


def any_three_options() -> list[FFNSparsity]:
    """Some of all sparsities, with every combination of three options' values that is
    in any of them."""
    threes = {
        sparsity: set(combinations(vars(sparsity).items(), 3))
        for sparsity in all_sparsities()
    }
    chosen, left = [], set().union(*threes.values())
    while left:
        chosen.append(max(threes, key=lambda sparsity: len(threes[sparsity] & left)))
        left -= threes[chosen[-1]]
    return chosen


EVERY = pytest.mark.parametrize("sparsity", list(all_sparsities()), ids=name_of)
ANY_THREE_OPTIONS = pytest.mark.parametrize(
    "sparsity", any_three_options(), ids=name_of
)
REPRESENTATIVE = pytest.mark.parametrize(
    "sparsity", list(representative_sparsities()), ids=name_of
)


def assert_close(got, expected, tolerance=TOLERANCE):
    for ours, theirs in zip(got, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=tolerance, atol=tolerance)


@EVERY
def test_matches_oracle(sparsity):
    """Operation by operation, whose programs combinations have in common. The next test
    compiles as a whole."""
    inputs, experts = make_inputs(), make_experts(sparsity)
    with jax.enable_x64(True):
        got = value_and_gradients(sparsity, *inputs, experts)
    assert all(array.dtype == np.float64 for array in got)
    assert_close(got, oracle(sparsity, *inputs, experts))


# --- vmap, remat and scan


def apply(sparsity, x, w_up, w_down, experts):
    return ffn(
        x,
        w_up,
        w_down,
        sparsity=sparsity,
        scales=jnp.array(SCALES, w_up.dtype) if sparsity.weights else None,
        expert_index=None if experts is None else jnp.asarray(experts, jnp.int32),
    )


def residual_layers(sparsity, x, w_up, w_down, experts):
    """x + ffn(x), twice: a scan over stacked weights, each layer rematerialised."""

    @jax.checkpoint
    def layer(x, weights):
        return x + apply(sparsity, x, *weights, experts), None

    return lax.scan(layer, x, (w_up, w_down))[0]


def residual_layers_oracle(sparsity, x, w_up, w_down, dy, experts):
    after = [x]
    for up, down in zip(w_up, w_down, strict=True):
        y, *_ = oracle(sparsity, after[-1], up, down, dy, experts)
        after.append(after[-1] + y)
    dw_up, dw_down = np.zeros_like(w_up), np.zeros_like(w_down)
    for i in reversed(range(len(w_up))):
        _, dx, dw_up[i], dw_down[i] = oracle(
            sparsity, after[i], w_up[i], w_down[i], dy, experts
        )
        dy = dy + dx
    return after[-1], dy, dw_up, dw_down


@ANY_THREE_OPTIONS
def test_vmap_of_scan_of_remat_matches_oracle(sparsity):
    """One program with all three, because compiling is what this test costs. The values
    of every combination are those of the test before."""
    batch = [make_inputs(seed) for seed in (0, 1)]
    x, dy = (np.stack([inputs[i] for inputs in batch]) for i in (0, 3))
    # layers, not batch elements: the second pair of weights belongs to layer two
    w_up, w_down = (np.stack([inputs[i] for inputs in batch]) for i in (1, 2))
    experts = None
    if make_experts(sparsity) is not None:
        experts = np.stack([make_experts(sparsity, seed) for seed in (1, 2)])

    def run(x, w_up, w_down, experts, dy):
        def batched(x, w_up, w_down):
            one = jax.vmap(residual_layers, in_axes=(None, 0, None, None, 0))
            return one(sparsity, x, w_up, w_down, experts)

        y, pull_back = jax.vjp(batched, x, w_up, w_down)
        return y, *pull_back(dy)

    # the transformations, not the code XLA makes of them: half the compilation
    options = {"xla_backend_optimization_level": 0}
    with jax.enable_x64(True):
        got = jax.jit(run, compiler_options=options)(x, w_up, w_down, experts, dy)
    each = [
        residual_layers_oracle(
            sparsity, x[i], w_up, w_down, dy[i], None if experts is None else experts[i]
        )
        for i in range(2)
    ]
    y, dx, dw_up, dw_down = zip(*each, strict=True)
    # gradients reach 1e2 after two layers, so the rounding is ten times larger
    expected = (np.stack(y), np.stack(dx), sum(dw_up), sum(dw_down))
    assert_close(got, expected, 10 * TOLERANCE)


@pytest.mark.parametrize("choices", [1, 2])
def test_x_is_kept_once_for_the_backward(choices):
    """Sorted by expert, unless a token has several."""
    tokens, d_model, d_hidden = 20, 8, 64
    sparsity = FFNSparsity(
        activations=VNM(4, 2, 16),
        router=TokenHash(),
        experts_per_token=choices,
        skip_blocks=True,
        weight_gradients="expert_columns",
    )
    expert_index = TokenHash().choose(
        jnp.arange(tokens), experts=4, experts_per_token=choices
    )
    run = partial(ffn, sparsity=sparsity, expert_index=expert_index)
    shapes = (tokens, d_model), (d_model, d_hidden), (d_hidden, d_model)
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    _, pull_back = jax.eval_shape(partial(jax.vjp, run), *arguments)
    saved = [leaf.shape for leaf in jax.tree.leaves(pull_back)]
    rows = row_count(tokens, choices, 4, 4)
    assert saved.count((tokens, d_model)) == (choices == 2)
    assert saved.count((rows, d_model)) == (choices == 1)


@pytest.mark.parametrize("transformation", ["vmap", "remat", "scan"])
@pytest.mark.parametrize("skip_blocks", [False, True])
def test_each_transformation_alone_changes_no_value(transformation, skip_blocks):
    """Says which of the three transformations it is where the combined test fails."""
    sparsity = FFNSparsity(
        weights=TWO_FOUR,
        activations=VNM(8, 2, 16),
        skip_blocks=skip_blocks,
        weight_gradients="expert_columns",
        token_sparsity="magnitude",
    )
    x, w_up, w_down, dy = make_inputs()
    experts = make_experts(sparsity)

    def plain(x, w_up, w_down, dy, experts):
        return value_and_gradients(sparsity, x, w_up, w_down, dy, experts)

    def remat(x, w_up, w_down, dy, experts):
        one = jax.checkpoint(lambda *a: apply(sparsity, *a, experts))
        y, pull_back = jax.vjp(one, x, w_up, w_down)
        return y, *pull_back(dy)

    def scan(*inputs):
        return lax.scan(lambda _, one: (None, plain(*one)), None, inputs)[1]

    stacked = tuple(a[None] for a in (x, w_up, w_down, dy, experts))
    with jax.enable_x64(True):
        if transformation == "remat":
            got = jax.jit(remat)(x, w_up, w_down, dy, experts)
        else:
            run = jax.vmap(plain) if transformation == "vmap" else scan
            got = tuple(a[0] for a in jax.jit(run)(*stacked))
    assert_close(got, oracle(sparsity, x, w_up, w_down, dy, experts))


# --- backends and dtypes


@REPRESENTATIVE
def test_reference_backend_matches_oracle(sparsity):
    inputs, experts = make_inputs(), make_experts(sparsity)
    with jax.enable_x64(True):
        got = jitted(sparsity, *inputs, experts, backend="reference")
    assert_close(got, oracle(sparsity, *inputs, experts))


@REPRESENTATIVE
def test_float32_matches_oracle(sparsity):
    """Inputs are float32 numbers; products are summed at 6e-8 relative, at most 128 of
    them. No selection of this seed is closer than that."""
    inputs = tuple(a.astype(np.float32) for a in make_inputs())
    experts = make_experts(sparsity)
    got = jitted(sparsity, *inputs, experts)
    assert all(array.dtype == np.float32 for array in got)
    expected = oracle(sparsity, *(a.astype(np.float64) for a in inputs), experts)
    assert_close(got, expected, 1e-5)


@REPRESENTATIVE
def test_bfloat16_rounds_only_results(sparsity):
    """Small integers, chosen so that Y1, A, dA and dY1 are exact in bfloat16: ties
    abound, no selection depends on rounding, and what is left is one rounding of Y
    and dX to bfloat16 and none of the float32 weight gradients."""
    rng = np.random.default_rng(3)
    x, dy = rng.integers(-1, 2, size=(2, TOKENS, D_MODEL)).astype(np.float64)
    w_up = rng.integers(-2, 3, size=(D_MODEL, D_HIDDEN)).astype(np.float64)
    w_down = rng.integers(-2, 3, size=(D_HIDDEN, D_MODEL)).astype(np.float64)
    experts, scales = make_experts(sparsity), (2.0, 1.0)
    got = jitted(
        sparsity,
        jnp.asarray(x, jnp.bfloat16),
        w_up.astype(np.float32),
        w_down.astype(np.float32),
        dy,
        experts,
        scales=scales,
    )
    expected = oracle(sparsity, x, w_up, w_down, dy, experts, scales=scales)
    dtypes = (jnp.bfloat16, jnp.bfloat16, jnp.float32, jnp.float32)
    for ours, theirs, dtype in zip(got, expected, dtypes, strict=True):
        assert ours.dtype == dtype
        rounded = theirs.astype(np.float32).astype(dtype)
        np.testing.assert_array_equal(np.asarray(ours), rounded)


def test_several_experts_in_bfloat16():
    """Y and dX are sums of two rows, each rounded: error at most 2^-8 of the larger."""
    sparsity = FFNSparsity(
        activations=VNM(8, 2, 16),
        experts_per_token=2,
        skip_blocks=True,
        weight_gradients="expert_columns",
    )
    x, w_up, w_down, dy = make_inputs()
    x, dy = (np.asarray(jnp.asarray(a, jnp.bfloat16), np.float64) for a in (x, dy))
    experts = make_experts(sparsity)
    # W1 and W2 of one power of two per column: every product with them is exact
    w_up = np.sign(w_up) * (np.arange(D_MODEL) == np.arange(D_HIDDEN)[:, None] % 8).T
    w_down = np.sign(w_down)
    y, *_ = jitted(
        sparsity,
        jnp.asarray(x, jnp.bfloat16),
        w_up.astype(np.float32),
        w_down.astype(np.float32),
        dy,
        experts,
    )
    expected, *_ = oracle(sparsity, x, w_up, w_down, dy, experts)
    # A, each row of Y and their sum are rounded at 2^-9; terms are at most max(x)^2
    terms = 32 * np.max(x**2, axis=1, keepdims=True)
    assert np.all(abs(np.asarray(y, np.float64) - expected) <= 3 * 2**-9 * terms)


def test_dense_gradient_is_the_derivative():
    x, w_up, w_down, _ = make_inputs(tokens=5)
    with jax.enable_x64(True):
        # order 1, reverse: a custom_vjp has neither forward mode nor second order
        check_grads(ffn, (x, w_up, w_down), order=1, modes=["rev"], rtol=1e-6)


EXACT = [
    FFNSparsity(weights=TWO_FOUR, exact_gradients=True, activations=activations, **more)
    for activations, more in (
        (None, {}),
        (TWO_FOUR, {}),
        (VNM(8, 2, 16), {"router": ActivationEnergy(), "experts_per_token": 2}),
        (VNM(8, 2, 16), {"weight_gradients": "expert_columns", "skip_blocks": True}),
    )
]


@pytest.mark.parametrize("sparsity", EXACT, ids=name_of)
def test_exact_gradients_are_the_derivative_of_the_masked_forward(sparsity):
    """By JAX, through a forward in plain operations with constant masks, by beta S(W1)
    in the place of W1. Without the setting dX is another one."""
    x, w_up, w_down, dy = make_inputs()
    experts = make_experts(sparsity)
    s_up = SCALES[0] * soft_threshold(w_up, axis=0)
    y_up = x @ s_up
    kept = np.ones_like(y_up, bool)
    if sparsity.activations is not None:
        kept = two_of_four(y_up, axis=1)
    if sparsity.experts:
        if experts is None:
            experts = heaviest_experts(y_up, 4, 2)
        kept &= cluster_mask(experts, D_HIDDEN, 4)

    def masked(x, s_up, w_down):
        return jnp.where(kept, jax.nn.relu(x @ s_up), 0) ** 2 @ w_down

    with jax.enable_x64(True):
        y, pull_back = jax.vjp(masked, *map(jnp.asarray, (x, s_up, w_down)))
        expected = y, *pull_back(jnp.asarray(dy))
        given = None if sparsity.router.inside else experts
        got = jitted(sparsity, x, w_up, w_down, dy, given)
        estimate = replace(sparsity, exact_gradients=False)
        other = jitted(estimate, x, w_up, w_down, dy, given)
    assert_close(got, expected)
    difference = np.linalg.norm(other[1] - expected[1])
    assert difference > 0.1 * np.linalg.norm(expected[1])


# --- what a token may depend on


@pytest.mark.parametrize("router", [*ROUTERS, None])
def test_no_token_depends_on_another(router):
    tokens = 6
    sparsity = FFNSparsity(weights=TWO_FOUR, activations=TWO_FOUR)
    if router is not None:
        sparsity = FFNSparsity(
            weights=TWO_FOUR,
            activations=VNM(4, 2, 16),
            router=router,
            skip_blocks=router.before_up,
            weight_gradients="expert_columns",
        )
    x, w_up, w_down, _ = make_inputs(tokens=tokens)
    centres = np.random.default_rng(0).normal(size=(4, D_MODEL))

    def run(x):
        experts = None
        if router in (NearestCentre(), LearnedEnergy()):
            state = router.clustered_state(w_up, jnp.asarray(centres))
            experts = router.choose(x, experts=4, state=state)
        if router == TokenHash():
            experts = router.choose(jnp.arange(tokens), experts=4)
        if router == SameExperts():
            experts = router.choose(x, experts=4)
        return apply(sparsity, x, w_up, w_down, experts)

    with jax.enable_x64(True):
        jacobian = np.asarray(jax.jit(jax.jacrev(run))(x))
        y = np.asarray(jax.jit(run)(x))
        for changed in range(tokens):
            other = x.copy()
            other[changed] += 1.0
            moved = np.any(abs(jax.jit(run)(other) - y) > TOLERANCE, axis=1)
            np.testing.assert_array_equal(moved, np.arange(tokens) == changed)
    # jacobian[i, :, j, :] is d y_i / d x_j: zero exactly, not just to rounding
    touched = np.any(jacobian != 0, axis=(1, 3))
    np.testing.assert_array_equal(touched, np.eye(tokens, dtype=bool))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@REPRESENTATIVE
def test_non_finite_activation_stays_visible(sparsity, bad):
    x, w_up, w_down, dy = (a.astype(np.float32) for a in make_inputs())
    x[7, 3] = bad
    y, *_ = jitted(sparsity, x, w_up, w_down, dy, make_experts(sparsity))
    finite = np.all(np.isfinite(y), axis=1)
    np.testing.assert_array_equal(finite, np.arange(TOKENS) != 7)


@EVERY
def test_no_tokens_give_nothing(sparsity):
    """Under jit as well: XLA must not be given rows to gather from none."""
    x, w_up, w_down, dy = make_inputs(tokens=0)
    experts = None
    if make_experts(sparsity) is not None:
        experts = np.zeros((0, sparsity.experts_per_token), int)
    for run in (value_and_gradients, jitted):
        y, dx, dw_up, dw_down = run(sparsity, x, w_up, w_down, dy, experts)
        assert y.shape == dx.shape == (0, D_MODEL)
        np.testing.assert_array_equal(dw_up, np.zeros_like(w_up))
        np.testing.assert_array_equal(dw_down, np.zeros_like(w_down))


def test_no_tokens_need_the_same_arguments():
    x, w_up, w_down, _ = make_inputs(tokens=0)
    with pytest.raises(ValueError, match="needs scales"):
        ffn(x, w_up, w_down, sparsity=FFNSparsity(weights=TWO_FOUR))
    with pytest.raises(ValueError, match="draws random numbers; pass key"):
        ffn(x, w_up, w_down, sparsity=FFNSparsity(token_sparsity="mvue"))
    with pytest.raises(ValueError, match=r"shape \(0, 1\), got None"):
        ffn(x, w_up, w_down, sparsity=FFNSparsity(activations=VNM(8, 2, 16)))


@REPRESENTATIVE
def test_zero_input_gives_zero(sparsity):
    x, w_up, w_down, dy = (a.astype(np.float32) for a in make_inputs())
    got = jitted(sparsity, 0 * x, w_up, w_down, dy, make_experts(sparsity))
    for array in got:
        np.testing.assert_array_equal(array, np.zeros_like(array))
