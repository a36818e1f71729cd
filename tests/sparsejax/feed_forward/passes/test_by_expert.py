"""The V:N:M FFN: uneven routing, skipped blocks, one compilation."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparsejax.feed_forward.ffn import ffn
from sparsejax.feed_forward.sparsity import DENSE, FFNSparsity
from sparsejax.routing.routers import ActivationEnergy
from sparsejax.sparsity.patterns import VNM
from tests.support.oracles.ffn_cases import (
    D_HIDDEN,
    SCALES,
    TOKENS,
    TWO_FOUR,
    jitted,
    make_experts,
    make_inputs,
    oracle,
    value_and_gradients,
)
from tests.support.oracles.ffn_oracle import soft_threshold

# rounding of float64, as in test_ffn
TOLERANCE = 1e-11


def venom(v=8, *, n=2, skip_blocks=True, experts_per_token=1, token_sparsity=None):
    return FFNSparsity(
        weights=TWO_FOUR,
        activations=VNM(v, n, 16),
        experts_per_token=experts_per_token,
        skip_blocks=skip_blocks,
        weight_gradients="expert_columns",
        token_sparsity=token_sparsity,
    )


def assert_matches_oracle(sparsity, experts, tokens=TOKENS, backend=None):
    inputs = make_inputs(tokens=tokens)
    with jax.enable_x64(True):
        got = jitted(sparsity, *inputs, experts, backend=backend)
    for ours, theirs in zip(got, oracle(sparsity, *inputs, experts), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=TOLERANCE, atol=TOLERANCE)


ROUTINGS = {
    "all tokens to the first expert": np.zeros(TOKENS, int),
    "all tokens to the last expert": np.full(TOKENS, 3),
    "one token alone": np.where(np.arange(TOKENS) == 20, 2, 1),
    "two empty experts": np.where(np.arange(TOKENS) % 3, 3, 0),
    "whole tiles": np.where(np.arange(TOKENS) < 16, 1, 2),
}


@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize(("n", "skip_blocks"), [(2, True), (2, False), (4, True)])
def test_uneven_routing(name, n, skip_blocks):
    sparsity = venom(n=n, skip_blocks=skip_blocks, token_sparsity="magnitude")
    assert_matches_oracle(sparsity, ROUTINGS[name][:, None])


@pytest.mark.parametrize("tokens", [1, 2, 8, 9])
@pytest.mark.parametrize("v", [4, 64])
def test_few_tokens(tokens, v):
    sparsity = venom(v, token_sparsity="magnitude")
    assert_matches_oracle(sparsity, make_experts(sparsity, tokens=tokens), tokens)


@pytest.mark.parametrize("v", [1, 3, 37, 128])
def test_every_v(v):
    sparsity = venom(v)
    assert_matches_oracle(sparsity, make_experts(sparsity))


def test_all_experts_of_a_token_are_plain_two_four():
    every = np.stack([np.random.default_rng(t).permutation(4) for t in range(TOKENS)])
    assert_matches_oracle(venom(experts_per_token=4), every)


def test_all_experts_of_a_token_dense_inside_are_a_dense_ffn():
    """Also its gradients, those of dense sums over all tokens."""
    every = np.stack([np.random.default_rng(t).permutation(4) for t in range(TOKENS)])
    sparsity = replace(venom(n=4, experts_per_token=4), weights=None)
    inputs = make_inputs()
    with jax.enable_x64(True):
        got = jitted(sparsity, *inputs, every)
        expected = jitted(DENSE, *inputs, None)
    for ours, theirs in zip(got, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("token_sparsity", [None, "magnitude"])
@pytest.mark.parametrize("backend", ["xla", "reference"])
@pytest.mark.parametrize(
    ("skip_blocks", "weight_gradients"),
    [(False, "dense"), (False, "expert_columns"), (True, "expert_columns")],
)
def test_an_expert_counts_once_and_what_is_none_does_not(
    skip_blocks, weight_gradients, backend, token_sparsity
):
    """The oracle's masks know experts, not how often one was named."""
    sparsity = replace(
        venom(experts_per_token=3, token_sparsity=token_sparsity),
        skip_blocks=skip_blocks,
        weight_gradients=weight_gradients,
    )
    rng = np.random.default_rng(0)
    chosen = rng.integers(0, 4, size=(TOKENS, 3))
    chosen[:5] = [[2, 2, 2], [0, 1, 0], [3, 0, 0], [1, 1, 3], [0, 1, 2]]
    assert_matches_oracle(sparsity, chosen, backend=backend)
    # The same experts of these tokens, other choices being none.
    none = np.array([[2, -1, 4], [0, 1, 9], [3, 0, -5], [1, 7, 3], [0, 1, 2]])
    with jax.enable_x64(True):
        twice = jitted(sparsity, *make_inputs(), chosen, backend=backend)
        chosen[:5] = none
        once = jitted(sparsity, *make_inputs(), chosen, backend=backend)
    for got, expected in zip(once, twice, strict=True):
        np.testing.assert_array_equal(got, expected)


def test_a_token_without_an_expert_gives_and_gets_nothing():
    experts = np.where(np.arange(TOKENS) % 3, 1, 4)[:, None]
    y, dx, dw_up, dw_down = jitted(venom(), *make_inputs(), experts)
    assert np.all(np.asarray(y)[::3] == 0) and np.all(np.asarray(dx)[::3] == 0)
    routed = np.flatnonzero(experts[:, 0] == 1)
    inputs = [a if a.shape[0] != TOKENS else a[routed] for a in make_inputs()]
    expected = jitted(venom(), *inputs, experts[routed])
    ours = y[routed], dx[routed], dw_up, dw_down
    for got, theirs in zip(ours, expected, strict=True):
        # float32: sums of other lengths
        np.testing.assert_allclose(got, theirs, rtol=1e-5, atol=1e-5)


def test_experts_are_named_by_integers():
    sparsity, inputs = venom(), make_inputs()
    experts = jnp.zeros((TOKENS, 1))
    with pytest.raises(ValueError, match="expert_index has dtype float32 and must"):
        ffn(*inputs[:3], sparsity=sparsity, scales=jnp.ones(2), expert_index=experts)


def test_routing_is_data():
    """One compilation for any group sizes, empty experts included."""
    sparsity, inputs = venom(), make_inputs()

    @jax.jit
    def run(inputs, experts):
        return value_and_gradients(sparsity, *inputs, experts)

    for routing in ROUTINGS.values():
        run(inputs, jnp.asarray(routing)[:, None])
    assert run._cache_size() == 1


@pytest.mark.parametrize("token_sparsity", [None, "magnitude", "mvue"])
def test_skipped_blocks_are_never_computed(token_sparsity):
    tokens = 512  # more than the 256 numbers a selection of features compares with
    inputs = make_inputs(tokens=tokens)

    def largest(skip_blocks):
        sparsity = venom(skip_blocks=skip_blocks, token_sparsity=token_sparsity)
        experts = make_experts(sparsity, tokens=tokens)

        def run(*inputs):
            key = jax.random.key(0)
            return value_and_gradients(sparsity, *inputs, experts, key=key)

        return max(sizes_in(jax.make_jaxpr(run)(*inputs).jaxpr))

    assert largest(skip_blocks=True) < tokens * D_HIDDEN
    # masks compute every neuron of every token: the measure can tell
    assert largest(skip_blocks=False) >= tokens * D_HIDDEN


@pytest.mark.parametrize("weight_gradients", ["dense", "expert_columns"])
@pytest.mark.parametrize("mask_reuse", [True, False])
def test_masks_leave_the_backward_to_a_tokens_experts(mask_reuse, weight_gradients):
    """Only dense gradients of unmasked neurons read dA of the others."""
    tokens = 512
    x, w_up, w_down, dy = (a.astype("float32") for a in make_inputs(tokens=tokens))
    sparsity = replace(
        venom(skip_blocks=False),
        mask_reuse=mask_reuse,
        weight_gradients=weight_gradients,
    )
    experts = make_experts(sparsity, tokens=tokens)

    def run(x):
        options = {"scales": jnp.ones(2), "expert_index": jnp.asarray(experts)}
        return ffn(x, w_up, w_down, sparsity=sparsity, **options)

    backward = jax.make_jaxpr(jax.vjp(run, x)[1])(dy)
    dense = weight_gradients == "dense"
    assert sparsity.da_by_expert == (mask_reuse or not dense)
    # Dense gradients have all of A and dY1.
    assert (max(sizes_in(backward.jaxpr)) >= tokens * D_HIDDEN) == dense


@pytest.mark.parametrize("backend", ["xla", "reference"])
def test_the_energy_of_a_token_says_how_many_experts_it_uses(backend):
    """As where the experts above the threshold had been named, others being none."""
    energy = replace(
        venom(experts_per_token=2, skip_blocks=False),
        router=ActivationEnergy(),
        most_experts_per_token=3,
    )
    x, w_up, w_down, dy = make_inputs()
    y_up = x @ (SCALES[0] * soft_threshold(w_up, axis=0))
    energies = (np.maximum(y_up, 0) ** 4).reshape(TOKENS, 4, -1).sum(axis=-1)
    shares = energies / energies.sum(axis=1, keepdims=True)
    best = np.argsort(-energies, axis=1, kind="stable")[:, :3]
    above = np.take_along_axis(shares, best, axis=1) > 0.25
    chosen = np.where(above | (np.arange(3) == 0), best, -1)
    counts = (chosen >= 0).sum(axis=1)
    assert set(counts) == {1, 2, 3}
    named = venom(experts_per_token=3, skip_blocks=False)

    def run(sparsity, *inputs, **options):
        scales = jnp.array(SCALES)
        f = partial(ffn, sparsity=sparsity, scales=scales, **options)
        y, pull_back = jax.vjp(f, *inputs)
        return y, *pull_back(jnp.asarray(dy))

    with jax.enable_x64(True):
        inputs = [jnp.asarray(a) for a in (x, w_up, w_down)]
        got = run(energy, *inputs, energy_threshold=0.25, backend=backend)
        index = jnp.asarray(chosen, jnp.int32)
        expected = run(named, *inputs, expert_index=index, backend=backend)
    for ours, theirs in zip(got, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    with pytest.raises(ValueError, match="most_experts_per_token=3 needs energy_thr"):
        run(energy, *inputs)


def sizes_in(jaxpr):
    """Elements of every intermediate array, those in loops and calls included."""
    for equation in jaxpr.eqns:
        for variable in equation.outvars:
            yield getattr(variable.aval, "size", 0)
        for inner in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda p: hasattr(p, "eqns")
        ):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from sizes_in(inner)
