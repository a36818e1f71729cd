"""FFNs where a token has one row for all of its experts: choice and values."""

from collections import Counter
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from sparsejax.feed_forward.ffn import ffn, observed_ffn
from sparsejax.feed_forward.gated_ffn import GatedFFNSpec, gated_ffn
from sparsejax.feed_forward.plan import FFNPlan
from sparsejax.feed_forward.sparsity import FFNSparsity
from sparsejax.models.sparse_ffn import SparseFFN
from sparsejax.models.transformer import rematerialise
from sparsejax.ops.backend import current_device
from sparsejax.routing.expert_sets import rows_of_sets
from sparsejax.routing.routers import (
    ActivationEnergy,
    ActivationEnergyFP8,
    NearestCentre,
    TokenHash,
)
from sparsejax.sparsity.patterns import TWO_FOUR, VNM
from tests.sparsejax.feed_forward.operands.test_packed_activations import (
    operands,
    whole_numbers,
)
from tests.sparsejax.feed_forward.operands.test_packed_rows import (
    assert_close,
    spec,
    step,
)
from tests.support.devices import hopper

D, F, TOKENS = 128, 512, 3072
TOLD = ", a row for all experts of a token"
TWO_OF_FOUR = FFNSparsity(
    activations=VNM(128, 4, 16),
    router=ActivationEnergy(),
    experts_per_token=2,
    weight_gradients="expert_columns",
)
THREE_OF_FOUR = replace(TWO_OF_FOUR, experts_per_token=3)
PENALTY = replace(TWO_OF_FOUR, skipped_energy=0.05)
SKIPPED = replace(TWO_OF_FOUR, router=ActivationEnergyFP8(), skip_blocks=True)
GIVEN = replace(TWO_OF_FOUR, router=TokenHash(), skip_blocks=True)


def joins(sparsity, **changes) -> bool:
    facts = {"d_model": D, "d_hidden": F, "tokens": TOKENS} | changes
    return FFNPlan.of(spec(sparsity, **facts), None).joins_experts


@pytest.mark.parametrize(
    "sparsity", [TWO_OF_FOUR, THREE_OF_FOUR, PENALTY, SKIPPED, GIVEN]
)
def test_experts_are_joined(untuned, sparsity):
    assert joins(sparsity)


@pytest.mark.parametrize(
    ("changes", "facts"),
    [
        ({"experts_per_token": 1}, {}),
        # Six sets of 128 rows are more than a quarter of the tokens.
        ({}, {"tokens": 3071}),
        ({}, {"tokens": 2 * 3071, "token_shards": 2}),
        # A device has two of the four experts.
        ({}, {"hidden_shards": 2}),
        ({}, {"device": hopper.A100}),
        ({"most_experts_per_token": 3}, {}),
        ({"weight_gradients": "dense"}, {}),
        ({"activations": VNM(128, 2, 16)}, {}),
        # Experts of 192 neurons.
        ({}, {"d_hidden": 768}),
        ({"weights": TWO_FOUR}, {}),
        ({"token_sparsity": "magnitude"}, {}),
        # A caller's choices may name an expert twice.
        (
            {"router": TokenHash(), "skip_blocks": True},
            {"distinct_experts": False},
        ),
        # Where GEMM 1 reads 2:4 weights it has a row for each expert.
        (
            {
                "router": ActivationEnergyFP8(),
                "skip_blocks": True,
                "weights": TWO_FOUR,
                "exact_gradients": True,
            },
            {},
        ),
    ],
)
def test_otherwise_a_token_has_a_row_for_each_expert(untuned, changes, facts):
    assert not joins(replace(TWO_OF_FOUR, **changes), **facts)


EITHER = pytest.mark.parametrize("sparsity", [TWO_OF_FOUR, SKIPPED])


@EITHER
def test_those_of_gated_ffns_are_joined_too(untuned, sparsity):
    sizes = {"tokens": TOKENS, "d_model": D, "d_hidden": F, "dtype": "bfloat16"}
    of = GatedFFNSpec(**sizes, sparsity=sparsity, device=hopper.H200)
    assert FFNPlan.of(of, None).joins_experts
    assert_told(of, into_hidden=2)


@EITHER
def test_it_is_told(untuned, sparsity):
    assert_told(spec(sparsity, d_model=D, d_hidden=F, tokens=TOKENS), into_hidden=1)


@dataclass(frozen=True)
class SquaredMass(ActivationEnergyFP8):
    """A router with scores of its own, which no kernel knows."""

    name = "squared_mass"

    def scores(self, read, experts, state):
        return jnp.square(super().scores(read, experts, state))


def test_a_kernel_sums_the_energies_that_it_knows(untuned, calls):
    sizes = {"d_model": D, "d_hidden": F, "tokens": TOKENS}

    def sums(sparsity, **changes) -> bool:
        return FFNPlan.of(spec(sparsity, **sizes | changes), None).sums_energies

    assert sums(SKIPPED) and sums(replace(SKIPPED, skip_blocks=False))
    assert sums(SKIPPED, hidden_shards=2)
    assert not sums(TWO_OF_FOUR)
    assert not sums(replace(SKIPPED, router=SquaredMass()))
    # Sums of 192 numbers, and a GPU without the kernel.
    assert not sums(SKIPPED, d_model=192)
    assert not sums(SKIPPED, device=hopper.A100)
    gated = GatedFFNSpec(
        **sizes, dtype="bfloat16", sparsity=SKIPPED, device=hopper.H200
    )
    assert not FFNPlan.of(gated, None).sums_energies
    arguments, dy = operands(TOKENS, d=D, f=F)
    for router, count in ((SKIPPED.router, 1), (SquaredMass(), 0)):
        calls.clear()
        step(replace(SKIPPED, router=router), None, arguments, dy)
        assert calls.count("expert_energies") == count


def test_it_is_told_where_8_bit_floats_save_nothing(untuned):
    of = spec(SKIPPED, d_model=D, d_hidden=F, tokens=TOKENS, device=hopper.A100)
    up, *others = (decision.path for decision in of.explain())
    why = "A100-SXM4-80GB has no tensor cores for 8-bit floats"
    assert up.endswith(f"which takes as long as GEMM 1 of them: NVIDIA {why}")
    assert not any("for the router" in path for path in others)


def assert_told(of, *, into_hidden: int) -> None:
    """All GEMMs but those into the hidden layer say that a token has one row; with
    `skip_blocks` these do, too, and that the router has a GEMM of its own."""
    paths = [decision.path for decision in of.explain()]
    skips = of.sparsity.skip_blocks
    assert [TOLD in path for path in paths[:into_hidden]] == [skips] * into_hidden
    assert all(path.endswith(TOLD) for path in paths[into_hidden:])
    of_router = ["8-bit floats with all neurons" in path for path in paths]
    assert of_router[:into_hidden] == [skips] * into_hidden
    assert not any(of_router[into_hidden:])


def assert_rounded_once(sparsity, arguments, dy) -> None:
    """Y and dX are the sums over all of a token's experts, rounded once: those of the
    reference in float32. Its own in bfloat16 are rounded for each expert, too."""
    x, *weights = arguments
    in_float32 = [x.astype(jnp.float32), *weights], dy.astype(jnp.float32)
    expected = step(sparsity, "reference", *in_float32)
    got, again = (step(sparsity, "mosaic_sm90", arguments, dy) for _ in "12")
    for ours, repeated, right in zip(got, again, expected, strict=True):
        np.testing.assert_array_equal(ours, repeated)
        np.testing.assert_array_equal(ours, right.astype(ours.dtype))


@pytest.mark.parametrize("sparsity", [TWO_OF_FOUR, THREE_OF_FOUR, SKIPPED])
def test_an_ffn_of_whole_numbers_is_exactly_the_reference(calls, sparsity):
    """What the kernels leave beyond the used tiles, NaN here, reaches no result."""
    arguments, dy = whole_numbers(TOKENS, D, F, seed=0)
    assert_rounded_once(sparsity, arguments, dy)
    assert {"of several experts", "gradient of dense_rows"} <= set(calls)
    assert calls.count("dense_over_rows") == 2 * calls.count("gradient of dense_rows")


@pytest.mark.parametrize("distinct", [True, False])
def test_choices_that_are_given_are_joined_where_they_are_said_to_differ(
    calls, distinct
):
    (x, *weights), dy = whole_numbers(TOKENS, D, F, seed=1)
    index = TokenHash().choose(jnp.arange(TOKENS), experts=4, experts_per_token=2)

    def given(backend, x, weights, dy):
        run = lambda *of: ffn(
            *of,
            sparsity=GIVEN,
            expert_index=index,
            distinct_experts=distinct,
            backend=backend,
        )
        y, pull_back = jax.vjp(run, x, *weights)
        return y, *pull_back(dy)

    got = given(None, x, weights, dy)
    in_float32 = x.astype(jnp.float32), weights, dy.astype(jnp.float32)
    expected = given("reference", *in_float32)
    assert_close(got, expected)
    if distinct:  # Else the sum over a token's experts is one of rounded numbers.
        for ours, right in zip(got, expected, strict=True):
            np.testing.assert_array_equal(ours, right.astype(ours.dtype))
    assert ("of several experts" in calls) == distinct


@pytest.mark.parametrize("wrong", [[2, 2], [1, 4], [-1, 0]])
def test_choices_that_do_not_differ_are_refused_outside_of_jit(wrong):
    (x, *weights), _ = operands(8, d=D, f=F)
    index = jnp.asarray([[0, 1]] * 5 + [wrong] + [[3, 2]] * 2)
    how = {"sparsity": GIVEN, "expert_index": index}
    with pytest.raises(ValueError, match=r"expert_index\[5\] is \[.*make expert_index"):
        ffn(x, *weights, **how, distinct_experts=True)
    ffn(x, *weights, **how)
    how["expert_index"] = np.asarray([[0, 1]] * 8)
    ffn(x, *weights, **how, distinct_experts=True)
    jax.jit(partial(ffn, sparsity=GIVEN, distinct_experts=True))(
        x, *weights, expert_index=index
    )


@dataclass(frozen=True)
class SameTwice(NearestCentre):
    """A router that names one expert twice."""

    name = "same_twice"

    def choose(self, read, **how):
        return jnp.repeat(super().choose(read, **how)[:, :1], 2, axis=1)


def test_a_router_with_choices_of_its_own_has_a_row_for_each(untuned):
    assert joins(replace(GIVEN, router=NearestCentre()))
    assert not joins(replace(GIVEN, router=SameTwice()))


@pytest.mark.parametrize("activation", ["relu2", "swiglu"])
def test_a_layer_says_that_the_choices_of_its_router_differ(calls, activation):
    how = {"sparsity": GIVEN, "dtype": jnp.bfloat16, "activation": activation}
    layer = SparseFFN(D, F, **how, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(0), (TOKENS, D), jnp.bfloat16)
    layer(x, token_ids=jnp.arange(TOKENS))
    assert "of several experts" in calls


@EITHER
def test_random_numbers_are_near_the_reference(calls, sparsity):
    arguments, dy = operands(TOKENS, d=D, f=F)
    got, expected = (
        step(sparsity, backend, arguments, dy) for backend in (None, "reference")
    )
    assert_close(got, expected)
    assert "of several experts" in calls


@EITHER
@pytest.mark.parametrize("remat", ["full", "dots"])
def test_a_backward_keeps_the_rows_of_tokens_whatever_it_recomputes(
    calls, remat, sparsity
):
    arguments, _ = operands(TOKENS, d=D, f=F)
    run = rematerialise(partial(ffn, sparsity=sparsity), remat, in_loop=False)
    _, residuals = jax.eval_shape(partial(jax.vjp, run), *arguments)
    kept = Counter((of.shape, of.dtype) for of in jax.tree.leaves(residuals))
    index = jax.ShapeDtypeStruct((TOKENS, 2), jnp.int32)
    rows = jax.eval_shape(partial(rows_of_sets, experts=4, v=128), index)
    assert Counter((of.shape, of.dtype) for of in jax.tree.leaves(rows)) <= kept


def test_a_sample_has_no_products_of_all_tokens_kept(calls):
    arguments, _ = operands(TOKENS, d=D, f=F)
    how = {"sparsity": PENALTY, "penalty_strength": jnp.float32(0.05)}
    observed = lambda *of: observed_ffn(*of, **how)[0]
    run = rematerialise(observed, "dots", in_loop=False)
    _, residuals = jax.eval_shape(partial(jax.vjp, run), *arguments)
    shapes = [of.shape for of in jax.tree.leaves(residuals)]
    assert (TOKENS // 16, F) in shapes and (TOKENS, F) not in shapes


def assert_gated_near_the_reference(activation, sparsity) -> None:
    keys = jax.random.split(jax.random.key(0), 5)
    shapes = [(TOKENS, D), (D, F), (D, F), (F, D), (TOKENS, D)]
    scales = [1, D**-0.5, D**-0.5, F**-0.5, 1]
    x, *weights, dy = (
        scale * jax.random.normal(key, shape)
        for key, shape, scale in zip(keys, shapes, scales, strict=True)
    )
    x, dy = (of.astype(jnp.bfloat16) for of in (x, dy))

    def gated_step(backend):
        options = {"activation": activation, "backend": backend}
        run = lambda *of: gated_ffn(*of, sparsity=sparsity, **options)
        y, pull_back = jax.vjp(run, x, *weights)
        return y, *pull_back(dy)

    got, expected = gated_step(None), gated_step("reference")
    for ours, theirs in zip(got, expected, strict=True):
        ours, theirs = (np.asarray(of, np.float64) for of in (ours, theirs))
        assert ours.shape == theirs.shape
        # bfloat16's roundings in a row
        assert np.linalg.norm(ours - theirs) <= 2**-6 * np.linalg.norm(theirs)


GATED = pytest.mark.parametrize("activation", ["swiglu", "reglu2"])


@GATED
@EITHER
def test_a_gated_ffn_is_near_the_reference(calls, activation, sparsity):
    assert_gated_near_the_reference(activation, sparsity)
    assert "of several experts" in calls
    assert calls.count("dense_over_rows") == 3


@EITHER
def test_a_step_lowers_for_hopper(monkeypatch, untuned, sparsity):
    """With the kernels themselves, which only a GPU can run: X and dY are taken to
    rows, and five GEMMs; with `skip_blocks` X is before GEMM 1, too, and before them is
    the choice."""
    jax.clear_caches()  # of traces made with the emulated ones
    hopper.see_device(monkeypatch)
    (x, w_up, w_down), dy = operands(TOKENS, d=D, f=F)

    def both(x, w_up, w_down, dy):
        run = lambda *operands: ffn(*operands, sparsity=sparsity)
        y, pull_back = jax.vjp(run, x, w_up, w_down)
        return y, pull_back(dy)

    traced = jax.jit(both).trace(x, w_up, w_down, dy)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    more = 3 if sparsity.skip_blocks else 0
    assert text.count("custom_call @mosaic_gpu") == 2 + 5 + more


@pytest.mark.gpu
@pytest.mark.parametrize("sparsity", [TWO_OF_FOUR, THREE_OF_FOUR, SKIPPED])
@pytest.mark.parametrize("tokens", [TOKENS, 5000])
def test_an_ffn_of_whole_numbers_is_exactly_the_reference_on_a_gpu(sparsity, tokens):
    arguments, dy = whole_numbers(tokens, D, F, seed=tokens)
    assert joins(sparsity, tokens=tokens, device=current_device())
    assert_rounded_once(sparsity, arguments, dy)


@pytest.mark.gpu
@GATED
@EITHER
def test_a_gated_ffn_is_near_the_reference_on_a_gpu(activation, sparsity):
    assert_gated_near_the_reference(activation, sparsity)


@pytest.mark.gpu
@EITHER
def test_repeated_steps_give_the_same_bits_on_a_gpu(sparsity):
    arguments, dy = operands(16384, d=512, f=2048)
    sparsity = replace(sparsity, activations=VNM(128, 4, 32))
    got, again = (step(sparsity, None, arguments, dy) for _ in "12")
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(again), strict=True):
        assert (one == other).all()
