"""FFNs whose rows of experts are packed for the Hopper kernels: choice and values."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import tuning
from sparsejax.feed_forward.ffn import ffn
from sparsejax.feed_forward.operands.weights import pack_ffn
from sparsejax.feed_forward.sparsity import FFNSparsity
from sparsejax.feed_forward.spec import FFNSpec
from sparsejax.ops.kernels.hopper import HopperKernels
from sparsejax.ops.kernels.hopper_shapes import tuned_gemm
from sparsejax.routing.routers import ActivationEnergy, TokenHash
from sparsejax.sparsity.patterns import NM, VNM
from tests.sparsejax.feed_forward.operands.test_packed_activations import (
    assert_close,
    distance,
    operands,
    whole_numbers,
)
from tests.support.devices import hopper

TWO_FOUR = NM(2, 4)
VENOM = FFNSparsity(
    activations=VNM(64, 2, 8),
    router=ActivationEnergy(),
    weight_gradients="expert_columns",
)
ALONG_ROWS = replace(
    VENOM, activations=VNM(128, 2, 8), token_sparsity="magnitude", weights=TWO_FOUR
)
SPARSITIES = {
    "activations": VENOM,
    "with weights": replace(VENOM, weights=TWO_FOUR),
    "all six": ALONG_ROWS,
    "small blocks": replace(ALONG_ROWS, activations=VNM(24, 2, 8)),
    "in order": replace(ALONG_ROWS, permute_tokens=False),
    "no whole features": replace(ALONG_ROWS, dense_features=0.0),
    "many whole features": replace(ALONG_ROWS, dense_features=0.5),
    "two of four experts": replace(
        ALONG_ROWS, activations=VNM(128, 2, 16), experts_per_token=2
    ),
    "gradients over all neurons": replace(VENOM, weight_gradients="dense"),
    "skipped": replace(VENOM, router=TokenHash(), skip_blocks=True),
    "skipped with weights": replace(
        VENOM, router=TokenHash(), skip_blocks=True, weights=TWO_FOUR
    ),
    "all six, skipped": replace(ALONG_ROWS, router=TokenHash(), skip_blocks=True),
}
D, F = 64, 256


def chosen(sparsity: FFNSparsity, tokens: int, routing: str = "any"):
    """Experts of each token, where it is not the mass that decides."""
    if sparsity.router.inside:
        return None
    experts, count = sparsity.experts, sparsity.experts_per_token
    if routing == "all to one":
        return jnp.full((tokens, count), experts - 1, jnp.int32)
    return jax.random.randint(jax.random.key(5), (tokens, count), 0, experts)


@partial(jax.jit, static_argnums=(0, 1))
def step(sparsity, backend, arguments, dy, experts=None, scales=(1.3, 1.5)):
    """Y and the gradients."""

    def run(*arguments):
        return ffn(
            *arguments,
            sparsity=sparsity,
            backend=backend,
            expert_index=experts,
            scales=jnp.asarray(scales) if sparsity.weights else None,
        )

    @jax.jit
    def both(arguments, dy):
        y, pull_back = jax.vjp(run, *arguments)
        return y, *pull_back(dy)

    return both(arguments, dy)


def assert_exact(sparsity, arguments, dy, experts) -> None:
    got, again, expected = (
        step(sparsity, backend, arguments, dy, experts=experts, scales=(1.0, 1.0))
        for backend in ("mosaic_sm90", "mosaic_sm90", "reference")
    )
    for ours, repeated, right in zip(got, again, expected, strict=True):
        np.testing.assert_array_equal(ours, repeated)
        np.testing.assert_array_equal(ours, right)


# The choice.


def spec(sparsity: FFNSparsity, **changes) -> FFNSpec:
    facts = {"tokens": 4096, "d_model": 2048, "d_hidden": 8192, "dtype": "bfloat16"}
    return FFNSpec(sparsity=sparsity, **facts | {"device": hopper.H200} | changes)


def on_sm90(decisions) -> list[bool]:
    return [decision.backend == "mosaic_sm90" for decision in decisions]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("activations", [False, True, False, True, True, True]),
        ("with weights", [True] * 6),
        ("all six", [True] * 6),
        ("skipped", [True] * 6),
        ("all six, skipped", [True] * 6),
        ("gradients over all neurons", [False, True, False, True, False, False]),
    ],
)
def test_what_is_by_expert_or_sparse_runs_on_it_where_it_is_named(
    untuned, name, expected
):
    decisions = spec(SPARSITIES[name]).explain("mosaic_sm90")
    assert on_sm90(decisions) == expected


def test_dense_weight_gradients_of_experts_have_a_kernel(untuned):
    """Unasked, whether the activations are packed or not."""
    for changes in ({}, {"weights": TWO_FOUR}, {"mask_reuse": False}):
        gradients = spec(replace(VENOM, **changes)).explain()[4:]
        assert on_sm90(gradients) == [True, True]
        for decision in gradients:
            assert (
                decision.path == "dense GEMM of each of 2 experts on the tensor cores"
            )
            assert decision.executed_share == 0.5
    # 32 neurons of an expert are half of the least tile.
    narrow = spec(replace(VENOM, activations=VNM(64, 2, 4 * 256))).explain()[4:]
    assert on_sm90(narrow) == [False, False]
    assert "a weight's size of 32 is not a multiple of 64" in narrow[0].reason
    assert "needs a Hopper GPU" in spec(VENOM, device=hopper.A100).explain()[4].reason


@pytest.mark.parametrize("measured", [None, 99.0, 101.0])
def test_experts_take_the_kernel_unasked_whatever_a_dense_gemm_takes(
    monkeypatch, measured
):
    """For without it no dense GEMM runs, but a loop over several. GEMM 1 of all neurons
    is one GEMM, and left to dense where that is faster."""
    sparsities = SPARSITIES["all six"], SPARSITIES["all six, skipped"]
    asked = {
        tuned_gemm(gemm) for sparsity in sparsities for gemm in spec(sparsity).gemms()
    }
    known = {
        gemm: hopper.timed(gemm, measured, 100.0, pack_us=50.0)
        for gemm in asked
        if measured is not None
    }
    monkeypatch.setattr(tuning, "entries", lambda kind: known)
    masked, skipped = (spec(sparsity).explain() for sparsity in sparsities)
    assert on_sm90(skipped) == [True] * 6
    assert on_sm90(masked) == [measured != 101.0] + [True] * 5
    packing = [[d.times and d.times.packing_us for d in of] for of in (masked, skipped)]
    if measured is None:
        assert packing == [[None] * 6] * 2
    else:
        # What another GEMM writes packed is not packed again.
        assert packing[0] == [50.0, 50.0, 50.0, 0.0, 50.0, 50.0]
        assert packing[1] == [50.0, 0.0, 50.0, 0.0, 50.0, 50.0]


def test_a_dense_gemm_has_a_token_once_whatever_its_experts(monkeypatch):
    """Timed with one expert for a token, and as many rows."""
    sparsity = SPARSITIES["two of four experts"]
    (gemm,) = (g for g in spec(sparsity).gemms() if g.name.startswith("2"))
    tuned = tuned_gemm(gemm)
    known = {tuned: hopper.timed(tuned, 49.0, 100.0, pack_us=1.0)}
    monkeypatch.setattr(tuning, "entries", lambda kind: known)
    times = HopperKernels(gemm.device).times(gemm)
    assert (times.kernel_us, times.dense_us, times.packing_us) == (49.0, 50.0, 1.0)


def test_the_share_is_that_of_an_experts_half(untuned):
    decisions = spec(SPARSITIES["all six, skipped"]).explain("mosaic_sm90")
    shares = [decision.executed_share for decision in decisions]
    assert shares[:4] == [0.25] * 4
    written = ["writes" in decision.path for decision in decisions]
    assert written == [True, False, True, False, False, False]
    # Masks need all of Y1, but dA only where A is kept.
    masked = spec(SPARSITIES["all six"]).explain("mosaic_sm90")
    assert [d.executed_share for d in masked][:4] == [0.5, 0.25, 0.25, 0.25]
    written = ["writes" in decision.path for decision in masked]
    assert written == [False, False, True, False, False, False]
    # 5 % of 4096 neurons of an expert, in blocks of 64, are multiplied twice.
    assert shares[4:] == [0.25 * (1 + 256 / 4096)] * 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"activations": VNM(64, 2, 4 * 256)}, "32 features are not a multiple of 64"),
        ({"mask_reuse": False}, "selects anew"),
        ({"weight_gradients": "dense"}, "sums over the tokens of all experts"),
        (
            {"weight_gradients": "dense", "token_sparsity": "mvue"},
            "sums over the tokens of all experts",
        ),
    ],
)
def test_what_nothing_packs_is_refused_by_name(untuned, changes, message):
    with pytest.raises(NotImplementedError, match=message):
        spec(replace(ALONG_ROWS, **changes)).explain("mosaic_sm90")


DRAWN = replace(ALONG_ROWS, token_sparsity="mvue")


@pytest.mark.parametrize("backend", [None, "mosaic_sm90"])
def test_what_is_drawn_along_the_tokens_is_multiplied_dense_by_expert(untuned, backend):
    decisions = spec(DRAWN).explain(backend)
    assert on_sm90(decisions)[1:] == [True] * 5
    path = "dense GEMM over the masked activation of each of 2 experts on the tensor"
    for decision in decisions[4:]:
        assert decision.path.startswith(path) and decision.executed_share == 0.5


# Values.


def drawn_gradients(backend, tokens, d, f) -> tuple[jax.Array, ...]:
    """Returns gradients of whole numbers, so that every backend draws from the same
    ones."""
    arguments, dy = whole_numbers(tokens, d, f, seed=0)
    of = partial(
        ffn,
        sparsity=DRAWN,
        backend=backend,
        scales=jnp.ones(2),
        key=jax.random.key(0),
    )
    return jax.jit(lambda *a: jax.vjp(of, *a)[1](dy))(*arguments)


def test_drawn_rows_are_those_of_the_library(calls):
    got = drawn_gradients("mosaic_sm90", 300, D, F)
    assert {"sparse_rows", "dense_over_rows"} <= set(calls)
    assert "sparse_over_rows" not in calls
    for ours, theirs in zip(got, drawn_gradients("xla", 300, D, F), strict=True):
        # The same draws; float32 sums in another order.
        np.testing.assert_allclose(
            ours.astype(jnp.float32), theirs.astype(jnp.float32), rtol=1e-5, atol=1e-3
        )


@pytest.mark.parametrize("weights", [None, TWO_FOUR])
def test_rows_that_nothing_packs_reach_the_dense_kernel(calls, weights):
    sparsity = replace(VENOM, weights=weights, mask_reuse=False)
    arguments, dy = whole_numbers(300, D, F, seed=0)
    got, expected = (
        step(sparsity, backend, arguments, dy, scales=(1.0, 1.0))
        for backend in (None, "reference")
    )
    assert "dense_over_rows" in calls and "sparse_rows" not in calls
    for ours, theirs in zip(got, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize(
    ("name", "tokens"), [*((name, 300) for name in SPARSITIES), ("all six", 100)]
)
def test_an_ffn_of_whole_numbers_is_exactly_the_reference(calls, name, tokens):
    sparsity = SPARSITIES[name]
    arguments, dy = whole_numbers(tokens, D, F, seed=0)
    assert_exact(sparsity, arguments, dy, chosen(sparsity, tokens))
    assert {"sparse_rows", "sum_rows"} <= set(calls)
    along_rows = sparsity.token_sparsity is not None
    assert ("sparse_over_rows" in calls) == along_rows
    by_expert = sparsity.weight_gradients == "expert_columns"
    assert ("dense_over_rows" in calls) == (by_expert and not along_rows)
    skipped = sparsity.skip_blocks and sparsity.weights is not None
    assert ("keep_features of a product" in calls) == skipped
    # dA is of a token's experts alone, also where Y1 was of all neurons.
    by_expert = sparsity.weights is not None
    assert ("sparse_weights" in calls) == by_expert
    assert ("backward of a product" in calls) == by_expert


@pytest.mark.parametrize("name", ["with weights", "skipped", "two of four experts"])
def test_exact_gradients_are_those_of_the_reference(calls, name):
    """GEMM 4 reads W1 as the packed weight holds it, and GEMM 3 no packed weight."""
    sparsity = replace(
        SPARSITIES[name],
        weights=TWO_FOUR,
        token_sparsity=None,
        exact_gradients=True,
    )
    arguments, dy = whole_numbers(300, D, F, seed=0)
    assert_exact(sparsity, arguments, dy, chosen(sparsity, 300))
    assert {"compress", "sparse_rows"} <= set(calls)
    assert "backward of a product" not in calls


@pytest.mark.parametrize("name", ["all six", "all six, skipped"])
def test_blocks_of_64_and_128_rows_are_one_program(calls, name):
    """Both are filled up to the kernel's tiles, so that one speed is the other's."""
    arguments, dy = whole_numbers(300, D, F, seed=0)
    large = SPARSITIES[name]
    small = replace(large, activations=replace(large.activations, v=64))
    experts = chosen(large, 300)
    trace = jax.make_jaxpr(step.__wrapped__, static_argnums=(0, 1))
    one, other = (
        str(trace(sparsity, "mosaic_sm90", arguments, dy, experts))
        for sparsity in (large, small)
    )
    assert one == other


@pytest.mark.parametrize("name", ["all six, skipped", "skipped"])
def test_all_tokens_may_go_to_one_expert(calls, name):
    sparsity = SPARSITIES[name]
    arguments, dy = whole_numbers(200, D, F, seed=0)
    assert_exact(sparsity, arguments, dy, chosen(sparsity, 200, "all to one"))


@pytest.mark.parametrize("name", ["all six", "all six, skipped"])
@pytest.mark.parametrize("d", [D, F])
def test_unasked_the_library_multiplies_all_neurons_where_they_are_few(calls, name, d):
    """And the kernels the experts', by weights that were packed for them."""
    sparsity = SPARSITIES[name]
    arguments, dy = whole_numbers(100, d, F, seed=0)
    experts = chosen(sparsity, 100)
    got, expected = (
        step(sparsity, backend, arguments, dy, experts=experts, scales=(1.0, 1.0))
        for backend in (None, "reference")
    )
    assert {"compress", "sparse_rows", "sparse_weights", "sparse_over_rows"} <= set(
        calls
    )
    assert "sparse_matmul" not in calls
    for ours, theirs in zip(got, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("name", ["all six", "all six, skipped"])
def test_an_ffn_is_that_of_the_reference(calls, name):
    sparsity = SPARSITIES[name]
    arguments, dy = operands(200, d=D, f=F)
    experts = chosen(sparsity, 200)
    got, expected = (
        step(sparsity, backend, arguments, dy, experts=experts)
        for backend in ("mosaic_sm90", "reference")
    )
    assert_close(got, expected)


def test_under_vmap_every_ffn_is_its_own(calls):
    (x, w_up, w_down), dy = whole_numbers(150, D, F, seed=0)

    def run(x, dy):
        return step(ALONG_ROWS, "mosaic_sm90", (x, w_up, w_down), dy)

    got = jax.vmap(run)(jnp.stack([x, -x]), jnp.stack([dy, dy]))
    for ours, theirs in zip(got, run(-x, dy), strict=True):
        np.testing.assert_array_equal(ours[1], theirs)


def test_the_kernels_take_weights_that_were_packed_for_the_library(calls):
    sparsity = SPARSITIES["all six, skipped"]
    arguments, dy = whole_numbers(100, D, F, seed=0)
    scales = jnp.ones(2)
    pack = partial(pack_ffn, sparsity=sparsity, dtype=dy.dtype, backend="xla")
    packed = jax.jit(pack)(*arguments[1:], scales=scales)
    options = {"sparsity": sparsity, "expert_index": chosen(sparsity, 100)}
    run = jax.jit(partial(ffn, backend="mosaic_sm90", **options))
    given, own = run(*arguments, packed=packed), run(*arguments, scales=scales)
    assert "sparse_weights" in calls
    np.testing.assert_array_equal(given, own)


# On a GPU, with the kernels themselves.


@pytest.mark.gpu
@pytest.mark.parametrize("name", SPARSITIES)
@pytest.mark.parametrize("seed", range(2))
def test_random_ffns_on_a_gpu_are_those_of_the_reference(name, seed):
    sparsity = SPARSITIES[name]
    generator = np.random.default_rng(seed)
    for _ in range(5):
        d = 64 * int(generator.integers(1, 16))
        f = 64 * sparsity.experts * int(generator.integers(1, 8))
        tokens = int(generator.integers(1, 3000))
        arguments, dy = whole_numbers(tokens, d, f, seed)
        routing = "all to one" if generator.integers(3) == 0 else "any"
        experts = chosen(sparsity, tokens, routing)
        assert_exact(sparsity, arguments, dy, experts)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [300, 2500])
def test_drawn_rows_on_a_gpu_are_those_of_the_library(tokens):
    got, expected = (
        drawn_gradients(backend, tokens, 640, 1280)
        for backend in ("mosaic_sm90", "xla")
    )
    assert_close(got, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["all six", "all six, skipped"])
def test_an_ffn_on_a_gpu_rounds_as_the_masked_one_does(name):
    sparsity = SPARSITIES[name]
    arguments, dy = operands(2500, d=640, f=1280)
    experts = chosen(sparsity, 2500)
    got, masked, exact = (
        step(sparsity, backend, arguments, dy, experts=experts)
        for backend in ("mosaic_sm90", "xla", "reference")
    )
    for ours, theirs, right in zip(got, masked, exact, strict=True):
        bound = distance(theirs, right) + 2**-7 * distance(right, 0 * right)
        assert distance(ours, right) <= bound
