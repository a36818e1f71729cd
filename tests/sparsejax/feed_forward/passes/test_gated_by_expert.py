"""Gated FFNs whose tokens use the neurons of their experts only, against the masked
oracle of the nine GEMMs."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparsejax.feed_forward.gated_ffn import GatedFFNSpec, gated_ffn
from sparsejax.feed_forward.sparsity import DENSE, FFNSparsity
from sparsejax.routing.routers import ActivationEnergy
from sparsejax.sparsity.patterns import TWO_FOUR, VNM
from tests.sparsejax.feed_forward.passes.test_by_expert import sizes_in
from tests.sparsejax.feed_forward.test_gated_ffn import (
    TOKENS,
    TOLERANCE,
    Case,
    assert_close,
    gated_oracle,
    jitted,
    make_inputs,
    value_and_gradients,
)
from tests.support.devices import hopper

EXPERTS, D_HIDDEN = 4, 64
INSIDE = FFNSparsity(activations=VNM(4, 4, 16))
BY_ROWS = replace(INSIDE, weight_gradients="expert_columns")
SKIPPED = replace(BY_ROWS, skip_blocks=True)
BY_ENERGY = replace(BY_ROWS, router=ActivationEnergy())
TWO_FOUR_INSIDE = replace(BY_ROWS, activations=VNM(4, 2, 16), weights=TWO_FOUR)

CASES = {
    "swiglu": Case("swiglu", INSIDE),
    "swiglu, 2:4 weights": Case("swiglu", replace(INSIDE, weights=TWO_FOUR)),
    "swiglu, all neurons seen": Case("swiglu", replace(INSIDE, mask_reuse=False)),
    "swiglu by rows": Case("swiglu", BY_ROWS),
    "swiglu, skipped": Case("swiglu", SKIPPED),
    "swiglu, skipped, 2:4": Case("swiglu", replace(SKIPPED, weights=TWO_FOUR)),
    "swiglu, two experts": Case("swiglu", replace(SKIPPED, experts_per_token=2)),
    "swiglu by energy": Case("swiglu", BY_ENERGY),
    "swiglu, two by energy": Case("swiglu", replace(BY_ENERGY, experts_per_token=2)),
    "reglu2": Case("reglu2", SKIPPED),
    "reglu2 along tokens": Case("reglu2", replace(SKIPPED, token_sparsity="magnitude")),
    "reglu2, 2:4 inside": Case("reglu2", TWO_FOUR_INSIDE),
    "reglu2, 2:4 inside, skipped": Case(
        "reglu2", replace(TWO_FOUR_INSIDE, skip_blocks=True)
    ),
    "reglu2, 2:4 inside, by energy": Case(
        "reglu2",
        replace(TWO_FOUR_INSIDE, router=ActivationEnergy(), token_sparsity="magnitude"),
    ),
    "reglu2, 2:4 inside, selected anew": Case(
        "reglu2", replace(TWO_FOUR_INSIDE, mask_reuse=False)
    ),
    "reglu2, 2:4 inside, all neurons seen": Case(
        "reglu2",
        replace(TWO_FOUR_INSIDE, mask_reuse=False, weight_gradients="dense"),
    ),
}
EACH = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def make_experts(case, tokens=TOKENS):
    """Distinct experts of each token, the third one left without any."""
    if case.sparsity.router.inside:
        return None
    rng = np.random.default_rng(1)
    count = case.sparsity.experts_per_token
    return np.stack([rng.permutation([0, 1, 3])[:count] for _ in range(tokens)])


@EACH
@pytest.mark.parametrize("backend", [None, "reference"])
def test_matches_oracle(case, backend):
    inputs, experts = make_inputs(d_hidden=D_HIDDEN), make_experts(case)
    with jax.enable_x64(True):
        got = jitted(case, *inputs, experts, backend=backend)
    assert_close(got, gated_oracle(case, *inputs, experts))


@EACH
def test_float32(case):
    inputs = [a.astype(np.float32) for a in make_inputs(d_hidden=D_HIDDEN)]
    experts = make_experts(case)
    got = jitted(case, *inputs, experts)
    assert all(array.dtype == np.float32 for array in got)
    exact = [a.astype(np.float64) for a in inputs]
    # 6e-8 per operation, sums of 64
    assert_close(got, gated_oracle(case, *exact, experts), 1e-5)


@pytest.mark.parametrize("activation", ["swiglu", "reglu2"])
def test_all_experts_of_a_token_are_a_dense_ffn(activation):
    every = np.stack([np.random.default_rng(t).permutation(4) for t in range(TOKENS)])
    inputs = make_inputs(d_hidden=D_HIDDEN)
    routed = Case(activation, replace(SKIPPED, experts_per_token=EXPERTS))
    with jax.enable_x64(True):
        got = jitted(routed, *inputs, every)
        expected = jitted(Case(activation, DENSE), *inputs)
    assert_close(got, expected, TOLERANCE)


@pytest.mark.parametrize("name", ["swiglu, skipped", "reglu2, 2:4 inside, skipped"])
def test_skipped_blocks_are_never_computed(name):
    tokens, d_hidden = 512, 128
    rng = np.random.default_rng(0)
    shapes = [(tokens, 8), (8, d_hidden), (8, d_hidden), (d_hidden, 8), (tokens, 8)]
    inputs = [rng.normal(size=shape) for shape in shapes]

    def largest(case):
        experts = make_experts(case, tokens)
        run = lambda *inputs: value_and_gradients(case, *inputs, experts)
        return max(sizes_in(jax.make_jaxpr(run)(*inputs).jaxpr))

    case = CASES[name]
    assert largest(case) < tokens * d_hidden
    masked = replace(case.sparsity, skip_blocks=False)
    assert largest(case._replace(sparsity=masked)) >= tokens * d_hidden


def test_a_token_s_experts_are_needed_and_checked():
    inputs = make_inputs(d_hidden=D_HIDDEN)[:4]
    with pytest.raises(ValueError, match=r"needs expert_index of shape \(13, 1\), got"):
        gated_ffn(*inputs, sparsity=SKIPPED)
    floats = jnp.zeros((TOKENS, 1))
    with pytest.raises(ValueError, match="expert_index has dtype float32 and must"):
        gated_ffn(*inputs, sparsity=SKIPPED, expert_index=floats)


def test_explain_says_what_is_by_expert():
    spec = GatedFFNSpec.of(*make_inputs(d_hidden=D_HIDDEN)[:4], BY_ENERGY)
    decisions = spec.explain()
    by_expert = [d.spec.name.split()[0] for d in decisions if d.spec.experts]
    assert by_expert == ["2", "3", "4a", "4b", "5a", "5b", "6"]
    assert [d.executed_share for d in decisions] == [1, 1, *[1 / EXPERTS] * 7]
    assert all(d.spec.pattern is None for d in decisions)


def test_on_hopper_what_nothing_packs_is_told(untuned):
    sizes = {"tokens": 4096, "d_model": 2048, "d_hidden": 8192, "dtype": "bfloat16"}
    sparsity = replace(
        TWO_FOUR_INSIDE, activations=VNM(128, 2, 16), router=ActivationEnergy()
    )
    decisions = GatedFFNSpec(
        **sizes, activation="reglu2", sparsity=sparsity, device=hopper.H200
    ).explain()
    on_kernels = {d.spec.name.split()[0] for d in decisions if d.on_kernels}
    # 2:4 weights, and dense weight gradients of experts
    assert on_kernels == {"1a", "1b", "3", "5a", "5b", "6"}
    down = next(d for d in decisions if d.spec.role == "down")
    assert "no kernel packs rows of experts of a gated FFN" in down.reason


@pytest.mark.parametrize("name", ["swiglu, skipped, 2:4", "reglu2, 2:4 inside"])
def test_on_hopper_the_values_are_those_of_the_reference(calls, name):
    """What the kernels leave beyond the used tiles, NaN here, reaches no result."""
    case, keys = CASES[name], jax.random.split(jax.random.key(0), 5)
    two_experts = replace(case.sparsity.activations, m=8)
    case = case._replace(sparsity=replace(case.sparsity, activations=two_experts))
    shapes = [(40, 64), (64, 128), (64, 128), (128, 64), (40, 64)]
    inputs = [jax.random.normal(k, s) / 8 for k, s in zip(keys, shapes, strict=True)]
    inputs[0], inputs[4] = (8 * inputs[i].astype(jnp.bfloat16) for i in (0, 4))
    experts = jnp.arange(40, dtype=jnp.int32)[:, None] % 2
    got = jitted(case, *inputs, experts)
    assert {"sparse_weights", "dense_over_rows", "sum_rows"} <= set(calls)
    expected = jitted(case, *inputs, experts, backend="reference")
    for ours, theirs in zip(got, expected, strict=True):
        ours, theirs = (np.asarray(a, np.float64) for a in (ours, theirs))
        # bfloat16's roundings in a row; a mask may choose another of two near values
        assert np.linalg.norm(ours - theirs) <= 2**-6 * np.linalg.norm(theirs)
