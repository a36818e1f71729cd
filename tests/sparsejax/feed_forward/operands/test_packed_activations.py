"""FFNs whose 2:4 activations are packed for the Hopper kernels: choice and values."""

import shutil
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import tuning
from pallas_kernels.tuned_gemm import TunedGemm
from sparsejax.feed_forward.ffn import ffn
from sparsejax.feed_forward.frame import Static
from sparsejax.feed_forward.gated_ffn import GatedFFNSpec, gated_ffn
from sparsejax.feed_forward.operands.packed_activations import GatedActivations
from sparsejax.feed_forward.operands.weights import ReadWeights, pack_ffn
from sparsejax.feed_forward.passes.packed import PACKED
from sparsejax.feed_forward.plan import FFNPlan
from sparsejax.feed_forward.sparsity import FFNSparsity
from sparsejax.feed_forward.spec import FFNSpec
from sparsejax.ops.sparse_matmul import sparse_matmul
from sparsejax.sparsity.packed import Packed, pack
from sparsejax.sparsity.patterns import NM
from tests.support.devices import hopper

TWO_FOUR = NM(2, 4)
ACTIVATIONS = FFNSparsity(activations=TWO_FOUR)
ALL_SIX = FFNSparsity(
    weights=TWO_FOUR, activations=TWO_FOUR, token_sparsity="magnitude"
)
D, F = 64, 192


# The choice.


def spec(sparsity: FFNSparsity, **changes) -> FFNSpec:
    facts = {
        "tokens": 4096,
        "d_model": 2048,
        "d_hidden": 8192,
        "dtype": "bfloat16",
        "device": hopper.H200,
    }
    return FFNSpec(sparsity=sparsity, **facts | changes)


@pytest.fixture
def only_the_h200_is_tuned(tmp_path, monkeypatch):
    shutil.copy(tuning.file_of(hopper.H200.kind), tmp_path)
    monkeypatch.setattr(tuning, "FOLDER", tmp_path)
    tuning.forget()
    yield
    tuning.forget()


def test_a_hopper_that_nobody_tuned_chooses_as_the_h200_where_that_gains_much(
    only_the_h200_is_tuned,
):
    sizes = {"tokens": 16384, "d_model": 4096, "d_hidden": 16384}
    measured = spec(ALL_SIX, **sizes).explain()
    guessed = spec(ALL_SIX, device=hopper.H100, **sizes).explain()
    assert backends(measured) == backends(guessed) == [True] * 6
    for own, decision in zip(measured, guessed, strict=True):
        assert own.times.measured_on is None and "NVIDIA" not in own.path + own.reason
        assert decision.times.kernel_us == own.times.kernel_us
        assert decision.times.dense_us == own.times.dense_us
        assert decision.times.packing_us == own.times.packing_us
        assert decision.times.measured_on == "NVIDIA H200"
        assert decision.times.estimated_from.endswith(" on NVIDIA H200")
        assert ", cut up as on NVIDIA H200" in decision.path
        where = "estimates, from NVIDIA H200: nobody measured it on NVIDIA H100 80GB"
        assert where in decision.reason
    # GEMMs 5 and 6 together gain less than an estimate is asked for.
    sizes = {"tokens": 8192, "d_model": 2048, "d_hidden": 8192}
    assert backends(spec(ALL_SIX, **sizes).explain()) == [True] * 6
    guessed = spec(ALL_SIX, device=hopper.H100, **sizes).explain()
    assert backends(guessed) == [True] * 4 + [False] * 2
    assert "together estimated slower" in guessed[4].reason
    assert ", measured on NVIDIA H200" in guessed[4].reason


def backends(decisions) -> list[bool]:
    """Returns for each GEMM whether it runs on the kernel."""
    return [decision.backend == "mosaic_sm90" for decision in decisions]


def test_all_six_gemms_run_on_it_where_it_is_named(untuned):
    decisions = spec(ALL_SIX).explain("mosaic_sm90")
    assert backends(decisions) == [True] * 6
    # 5 % of 8192 features, in blocks of 64, are multiplied twice.
    twice = 0.5 * (1 + 448 / 8192)
    shares = [d.executed_share for d in decisions]
    assert shares == [0.5, 0.5, 0.5, 0.5, twice, twice]
    kernel = "2:4 weight on the sparse tensor cores, writes "
    paths = [f"{kernel}A 2:4", f"{kernel}dY1 where A is kept"]
    assert [decisions[i].path for i in (0, 2)] == paths
    assert not any("writes" in decisions[i].path for i in (1, 3, 4, 5))


def test_what_was_not_measured_is_not_chosen_unasked(untuned):
    decisions = spec(ALL_SIX).explain()
    assert backends(decisions) == [True, False, True, False, False, False]
    assert "have not been measured on this GPU" in decisions[1].reason


def entry(gemm: TunedGemm, *, faster: bool) -> tuning.Entry:
    return hopper.timed(gemm, 100.0, 150.0 if faster else 90.0)


DOWN = TunedGemm(sparse_operand="input", tokens=4096, d_in=8192, d_out=2048)
D_INPUT = replace(DOWN, weight_transposed=True)
"""GEMMs 2 and 4."""
D_DOWN = replace(DOWN, is_weight_gradient=True, d_in=8192 + 448)
D_UP = replace(D_DOWN, sparse_operand="gradient", d_in=2048, d_out=8192 + 448)
"""GEMMs 6 and 5, with residual rows for the features that stay dense."""


@pytest.mark.parametrize(
    ("slower", "chosen"),
    [
        ((), [True] * 6),
        ((D_INPUT,), [True, False, True, False, False, False]),
        ((D_DOWN,), [True, True, True, True, False, False]),
    ],
)
def test_what_was_measured_is_chosen_in_pairs(monkeypatch, slower, chosen):
    gemms = [D_INPUT, DOWN, D_DOWN, D_UP]
    known = {gemm: entry(gemm, faster=gemm not in slower) for gemm in gemms}
    monkeypatch.setattr(tuning, "entries", lambda kind: known)
    assert backends(spec(ALL_SIX).explain()) == chosen


def test_packing_counts_where_gemms_share_it(monkeypatch):
    """Each kernel alone is faster than dense; with their packing they are not."""
    gemms = [D_INPUT, DOWN, D_DOWN, D_UP]
    known = {gemm: entry(gemm, faster=True) for gemm in gemms}
    for gemm in gemms[2:]:
        known[gemm] = replace(known[gemm], pack_us=50.0)
    monkeypatch.setattr(tuning, "entries", lambda kind: known)
    decisions = spec(ALL_SIX).explain()
    assert backends(decisions) == [True, True, True, True, False, False]
    reason = "measured slower together: 200 us and 100 of packing, dense 300"
    assert reason in decisions[4].reason and reason in decisions[5].reason
    # Where it is named, it runs.
    assert backends(spec(ALL_SIX).explain("mosaic_sm90")) == [True] * 6


@pytest.mark.parametrize(("pack_us", "chosen"), [(55.0, True), (80.0, False)])
def test_gemms_that_share_it_gain_more_than_an_estimates_error(
    monkeypatch, pack_us, chosen
):
    """Both are a little faster than dense; from a GEMM of half the width."""
    known = {
        gemm: replace(entry(gemm, faster=True), pack_us=pack_us)
        for gemm in (replace(D_INPUT, d_out=1024), replace(DOWN, d_out=1024))
    }
    monkeypatch.setattr(tuning, "entries", lambda kind: known)
    decisions = spec(ALL_SIX).explain()
    assert backends(decisions)[1:4:2] == [chosen] * 2
    # A row of A is packed once, however many columns it is multiplied by.
    told = (
        "together estimated slower, or faster by less than the estimate's error: "
        "400 us and 160 of packing, dense 600"
    )
    assert (told in decisions[1].reason) != chosen


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_sparsity": "mvue"}, "token_sparsity='mvue' draws random numbers"),
        ({"mask_reuse": False}, "mask_reuse=False selects anew in dY1"),
        ({"activations": None}, "not 2:4 along the features"),
    ],
)
def test_what_nothing_packs_is_refused_by_name(untuned, changes, message):
    with pytest.raises(NotImplementedError, match=message):
        spec(replace(ALL_SIX, **changes)).explain("mosaic_sm90")


# Values.


def operands(tokens: int, dtype=jnp.bfloat16, d: int = D, f: int = F, seed: int = 0):
    keys = jax.random.split(jax.random.key(seed), 4)
    x = jax.random.normal(keys[0], (tokens, d), dtype)
    w_up = jax.random.normal(keys[1], (d, f)) / d**0.5
    w_down = jax.random.normal(keys[2], (f, d)) / f**0.5
    return (x, w_up, w_down), jax.random.normal(keys[3], (tokens, d), dtype)


def whole_numbers(tokens: int, d: int, f: int, seed: int, *, gated: bool = False):
    """Operands of whole numbers so small that everything before the results is exact in
    bfloat16, and every sum in any order: |Y1| and |dA| <= 15; gated |G|, |U|, |dA| <= 4
    and |A| <= 64."""
    generator = np.random.default_rng(seed)
    count, largest = (2, 2) if gated else (5, 3)

    def of_ones() -> jax.Array:
        """A few in each row."""
        x = np.zeros((tokens, d))
        columns = generator.integers(0, d, (tokens, count))
        ones = generator.choice([-1.0, 1.0], (tokens, count))
        np.put_along_axis(x, columns, ones, axis=1)
        return jnp.asarray(x, jnp.bfloat16)

    shapes = [(d, f)] * (1 + gated) + [(f, d)]
    weights = (generator.integers(-largest, largest + 1, s) for s in shapes)
    return (of_ones(), *(jnp.asarray(w, jnp.float32) for w in weights)), of_ones()


@partial(jax.jit, static_argnums=(0, 1))
def step(sparsity: FFNSparsity, backend, arguments, dy, scales=(1.3, 1.5, 1.4)):
    """Y and the gradients; gated with three weights."""
    options = {"sparsity": sparsity, "backend": backend}
    if sparsity.weights:
        options["scales"] = jnp.asarray(scales[: len(arguments) - 1])
    run = partial(ffn, **options)
    if len(arguments) == 4:
        run = partial(gated_ffn, activation="reglu2", **options)

    @jax.jit
    def both(arguments, dy):
        y, pull_back = jax.vjp(run, *arguments)
        return y, *pull_back(dy)

    return both(arguments, dy)


def assert_exact(sparsity: FFNSparsity, operands) -> None:
    """Twice the same bits, and the reference's, of operands of whole numbers."""
    got, again, expected = (
        step(sparsity, backend, *operands, scales=(1.0, 1.0, 1.0))
        for backend in ("mosaic_sm90", "mosaic_sm90", "reference")
    )
    for ours, repeated, right in zip(got, again, expected, strict=True):
        np.testing.assert_array_equal(ours, repeated)
        np.testing.assert_array_equal(ours, right)


def distance(a, b) -> float:
    """Returns the distance of two arrays, in float64."""
    return float(np.linalg.norm(np.asarray(a, np.float64) - np.asarray(b, np.float64)))


def assert_close(got, expected) -> None:
    """bfloat16's roundings in a row, as in test_ffn_on_hopper."""
    for ours, theirs in zip(got, expected, strict=True):
        assert distance(ours, theirs) <= 2**-7 * distance(theirs, 0 * theirs)


SPARSITIES = {
    "activations": ACTIVATIONS,
    "with weights": replace(ACTIVATIONS, weights=TWO_FOUR),
    "all six": ALL_SIX,
    "in order": replace(ALL_SIX, permute_tokens=False),
    "no whole features": replace(ALL_SIX, dense_features=0.0),
    "many whole features": replace(ALL_SIX, dense_features=0.5),
}


@pytest.mark.parametrize("name", SPARSITIES)
@pytest.mark.parametrize("tokens", [64, 100])
def test_an_ffn_is_that_of_the_reference(calls, name, tokens):
    arguments, dy = operands(tokens)
    got = step(SPARSITIES[name], "mosaic_sm90", arguments, dy)
    assert {"keep_features", "backward"} <= set(calls)
    assert ("keep_tokens" in calls) == (SPARSITIES[name].token_sparsity is not None)
    assert_close(got, step(SPARSITIES[name], "reference", arguments, dy))


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("name", SPARSITIES)
def test_an_ffn_of_whole_numbers_is_exactly_the_reference(calls, name, gated):
    assert_exact(SPARSITIES[name], whole_numbers(100, D, F, seed=0, gated=gated))
    assert ("keep_gated_features" in calls) == gated
    assert ("gated_backward" in calls) == gated
    assert ("keep_tokens" in calls) == (SPARSITIES[name].token_sparsity is not None)
    in_epilogues = SPARSITIES[name].weights is not None and not gated
    for kernel in ("keep_features", "backward"):
        assert (f"{kernel} of a product" in calls) == in_epilogues


def test_all_nine_gemms_of_a_gated_ffn_run_on_it_where_it_is_named(untuned):
    facts = {"tokens": 4096, "d_model": 2048, "d_hidden": 8192, "dtype": "bfloat16"}
    facts |= {"device": hopper.H200, "activation": "reglu2"}
    gated = partial(GatedFFNSpec, **facts)
    assert backends(gated(sparsity=ALL_SIX).explain("mosaic_sm90")) == [True] * 9
    alone = [gemm in (0, 1, 3) for gemm in range(9)]
    assert backends(gated(sparsity=ALL_SIX).explain()) == alone
    anew = gated(sparsity=replace(ALL_SIX, mask_reuse=False))
    with pytest.raises(NotImplementedError, match="selects anew"):
        anew.explain("mosaic_sm90")


def test_gemm_2_of_a_gated_ffn_reads_what_the_kernel_has_written(calls, monkeypatch):
    """Where A is packed along the tokens as well, nothing makes it anew."""

    def anew(_):
        raise AssertionError("A = relu(G)^2 * U is computed a second time")

    monkeypatch.setattr(GatedActivations, "a", property(anew))
    assert_exact(ALL_SIX, whole_numbers(100, D, F, seed=0, gated=True))
    assert "keep_gated_features" in calls


def test_what_a_gated_ffn_keeps_gives_a_with_its_roundings():
    keys = jax.random.split(jax.random.key(0))
    hidden, up = (jax.random.normal(key, (8, 32), jnp.bfloat16) for key in keys)
    words = jnp.zeros((1, 1, 128), jnp.uint32)
    kept = GatedActivations(Packed(hidden, words), Packed(up, words), jnp.zeros(64))
    exact = np.asarray(hidden, np.float32)
    square = np.asarray(jnp.asarray(exact * exact).astype(jnp.bfloat16), np.float32)
    expected = jnp.asarray(square * np.asarray(up, np.float32)).astype(jnp.bfloat16)
    np.testing.assert_array_equal(jax.jit(lambda k: k.a.values)(kept), expected)


def test_under_vmap_every_ffn_is_its_own(calls):
    (x, w_up, w_down), dy = operands(64)
    run = partial(step, ALL_SIX, "mosaic_sm90")
    batched = jax.vmap(lambda x, dy: run((x, w_up, w_down), dy))
    got = batched(jnp.stack([x, -x]), jnp.stack([dy, dy]))
    alone = run((-x, w_up, w_down), dy)
    for ours, theirs in zip(got, alone, strict=True):
        np.testing.assert_array_equal(ours[1], theirs)


def test_weights_packed_in_another_dtype_are_taken_in_that_of_x(calls):
    (x, *weights), dy = whole_numbers(64, D, F, seed=0)
    options = {"sparsity": ALL_SIX, "backend": "mosaic_sm90"}

    @jax.jit
    def run(x, packed):
        call = partial(ffn, packed=packed, **options)
        y, pull_back = jax.vjp(lambda x: call(x, *weights), x)
        return y, *pull_back(dy)

    def pack_as(dtype):
        pack = partial(pack_ffn, dtype=dtype, **options)
        return jax.jit(pack)(*weights, scales=jnp.ones(2))

    got, expected = (run(x, pack_as(dtype)) for dtype in (jnp.float16, x.dtype))
    for ours, theirs in zip(got, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert "keep_features of a product" in calls


def test_nine_sixteenths_of_the_activations_are_kept_for_the_backward(calls):
    tokens = 128
    (x, *weights), _ = operands(tokens)
    w = ReadWeights(*(weight.astype(x.dtype) for weight in weights))
    plan = FFNPlan.of(FFNSpec.of(x, *weights, ACTIVATIONS), "mosaic_sm90")
    static = Static(plan, None, PACKED)
    forward = partial(PACKED.forward, static, experts=None)
    _, kept, _ = jax.eval_shape(forward, x, w)
    sizes = [leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(kept)]
    # And one count per feature.
    assert sum(sizes) == tokens * F * 2 * 9 // 16 + 4 * F


def test_a_packed_lhs_is_multiplied_and_differentiated(calls):
    (x, w_up, _), dy = operands(100, f=64)
    packed = pack(hopper.compress(x))

    def product(lhs, rhs, backend):
        return sparse_matmul(lhs, rhs, backend=backend)

    w = w_up.astype(x.dtype)
    results = [
        jax.vjp(partial(product, backend=backend), packed, w)
        for backend in ("mosaic_sm90", "reference")
    ]
    assert calls == ["sparse_matmul"]
    (got, pull_back), (expected, reference) = results
    np.testing.assert_array_equal(got, expected)
    for ours, theirs in zip(pull_back(dy), reference(dy), strict=True):
        for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
            np.testing.assert_array_equal(a, b)


# On a GPU, with the kernels themselves.


@pytest.mark.gpu
@pytest.mark.parametrize("name", SPARSITIES)
@pytest.mark.parametrize("seed", range(4))
def test_random_ffns_on_a_gpu_are_those_of_the_reference(name, seed):
    generator = np.random.default_rng(seed)
    for _ in range(5):
        d, f = (64 * int(i) for i in generator.integers(1, 20, 2))
        tokens = int(generator.integers(1, 3000))
        gated = bool(generator.integers(2))
        operands = whole_numbers(tokens, d, f, seed, gated=gated)
        assert_exact(SPARSITIES[name], operands)


@pytest.mark.gpu
@pytest.mark.parametrize("name", SPARSITIES)
def test_an_ffn_on_a_gpu_rounds_as_the_masked_one_does(name):
    """Allows for choices: where Y1 is rounded another way, another of four may be kept:
    by as much as that changes the masked dense computation, it may change this one."""
    arguments, dy = operands(2500, d=640, f=1280)
    sparsity = SPARSITIES[name]
    got, again, masked, exact = (
        step(sparsity, backend, arguments, dy)
        for backend in ("mosaic_sm90", "mosaic_sm90", "xla", "reference")
    )
    for ours, repeated, theirs, right in zip(got, again, masked, exact, strict=True):
        np.testing.assert_array_equal(ours, repeated)
        bound = distance(theirs, right) + 2**-7 * distance(right, 0 * right)
        assert distance(ours, right) <= bound
