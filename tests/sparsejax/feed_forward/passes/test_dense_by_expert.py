"""FFNs that are dense inside their experts on a set of kernels: choice, fusion and
values."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from sparsejax.feed_forward.ffn import ffn
from sparsejax.feed_forward.gated_ffn import GatedFFNSpec, gated_ffn
from sparsejax.feed_forward.plan import FFNPlan
from sparsejax.feed_forward.sparsity import FFNSparsity
from sparsejax.routing.routers import ActivationEnergy, TokenHash
from sparsejax.sparsity.patterns import TWO_FOUR, VNM
from tests.sparsejax.feed_forward.operands.test_packed_activations import (
    operands,
    whole_numbers,
)
from tests.sparsejax.feed_forward.operands.test_packed_rows import (
    assert_close,
    assert_exact,
    chosen,
    on_sm90,
    spec,
    step,
)
from tests.support.devices import hopper

D, F = 128, 512
SKIPPED = FFNSparsity(
    activations=VNM(128, 4, 16),
    router=TokenHash(),
    skip_blocks=True,
    weight_gradients="expert_columns",
)
BY_ENERGY = replace(SKIPPED, router=ActivationEnergy(), skip_blocks=False)
SPARSITIES = {
    "skipped": SKIPPED,
    "skipped, 2:4 weights": replace(SKIPPED, weights=TWO_FOUR),
    "skipped, along the rows": replace(SKIPPED, token_sparsity="magnitude"),
    "skipped, 2:4 weights, along the rows": replace(
        SKIPPED, weights=TWO_FOUR, token_sparsity="magnitude"
    ),
    "skipped, two experts": replace(SKIPPED, experts_per_token=2),
    "small blocks": replace(SKIPPED, activations=VNM(24, 4, 16)),
    "by energy": BY_ENERGY,
    "by energy, 2:4 weights": replace(BY_ENERGY, weights=TWO_FOUR),
    "by energy, two experts": replace(BY_ENERGY, experts_per_token=2),
    "gradients over all neurons": replace(BY_ENERGY, weight_gradients="dense"),
    "all neurons seen": replace(BY_ENERGY, weight_gradients="dense", mask_reuse=False),
}


def plan(sparsity, **changes) -> FFNPlan:
    return FFNPlan.of(spec(sparsity, **changes), None)


def test_no_sparse_instruction_runs_where_nothing_is_two_four(untuned):
    decisions = spec(SKIPPED).explain()
    assert on_sm90(decisions) == [True] * 6
    assert not any(decision.on_sparse_cores for decision in decisions)
    assert [decision.executed_share for decision in decisions] == [0.25] * 6
    rows = "dense rows by the weights of 4 experts on the tensor cores"
    assert [decision.path for decision in decisions[:4]] == [
        f"{rows}, writes A",
        rows,
        f"{rows}, writes dY1",
        rows,
    ]


@pytest.mark.parametrize(
    ("name", "writes", "keeps"),
    [
        ("skipped", (True, True), True),
        ("skipped, 2:4 weights", (False, False), True),
        ("by energy", (False, True), True),
        ("by energy, 2:4 weights", (False, False), True),
        ("gradients over all neurons", (False, True), True),
        ("all neurons seen", (False, False), False),
    ],
)
def test_the_plan_says_which_epilogues_run(untuned, name, writes, keeps):
    of = plan(SPARSITIES[name])
    assert (of.up_writes_rows_of_a, of.d_hidden_writes_rows_of_dy_up) == writes
    assert of.keeps_dense_rows == keeps
    assert not of.packs_activations and not of.up_writes_a


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"d_hidden": 256}, "a size of 64 is not a multiple of 64 from 128 on"),
        ({"d_model": 2080}, "a size of 2080 is not a multiple of 64"),
        ({"dtype": "float32"}, "multiplies bfloat16 and float16, not float32"),
        ({"device": hopper.A100}, "needs a Hopper GPU, not NVIDIA A100"),
    ],
)
def test_what_the_kernel_leaves_to_xla_is_told(untuned, changes, reason):
    decisions = spec(SKIPPED, **changes).explain()[:4]
    assert on_sm90(decisions) == [False] * 4
    assert all(reason in decision.reason for decision in decisions)
    assert not plan(SKIPPED, **changes).keeps_dense_rows


def test_gated_ffns_multiply_dense_rows_too(untuned):
    sizes = {"tokens": 4096, "d_model": 2048, "d_hidden": 8192, "dtype": "bfloat16"}
    of = GatedFFNSpec(**sizes, sparsity=SKIPPED, device=hopper.H200)
    assert on_sm90(of.explain()) == [True] * 9
    # silu(G) * U is no function of one product: no epilogue makes it.
    assert not FFNPlan.of(of, None).keeps_dense_rows


@pytest.mark.parametrize("name", SPARSITIES)
def test_an_ffn_of_whole_numbers_is_exactly_the_reference(calls, name):
    """What the kernels leave beyond the used tiles, NaN here, reaches no result."""
    sparsity = SPARSITIES[name]
    arguments, dy = whole_numbers(300, D, F, seed=0)
    assert_exact(sparsity, arguments, dy, chosen(sparsity, 300))
    assert {"dense_rows", "sum_rows"} <= set(calls)
    of = plan(sparsity)
    assert ("squared relu of dense_rows" in calls) == of.up_writes_rows_of_a
    fused = "gradient of dense_rows" in calls
    assert fused == of.d_hidden_writes_rows_of_dy_up
    packed = sparsity.weights is not None
    assert ("sparse_weights" in calls) == packed


@pytest.mark.parametrize("name", ["skipped", "by energy"])
@pytest.mark.parametrize("tokens", [1, 300])
def test_random_numbers_are_near_the_reference(calls, name, tokens):
    sparsity = SPARSITIES[name]
    arguments, dy = operands(tokens, d=D, f=F)
    experts = chosen(sparsity, tokens)
    got = step(sparsity, None, arguments, dy, experts=experts)
    expected = step(sparsity, "reference", arguments, dy, experts=experts)
    assert_close(got, expected)


def test_an_expert_without_tokens_is_left_out(calls):
    arguments, dy = whole_numbers(100, D, F, seed=0)
    experts = chosen(SKIPPED, 100, "all to one")
    assert_exact(SKIPPED, arguments, dy, experts)
    assert jnp.unique(experts).size == 1


@pytest.mark.parametrize(
    ("sparsity", "gated", "kernels"),
    [
        # X to rows, GEMMs 1 and 2, Y to tokens; dY to rows, 3 to 6, dX to tokens
        (SKIPPED, False, 4 + 6),
        # Nine GEMMs, and the same four
        (SKIPPED, True, 9 + 4),
        # GEMM 1 is over all neurons, and X is taken to rows in the backward.
        (BY_ENERGY, False, 2 + 7),
    ],
)
def test_a_step_lowers_for_hopper(monkeypatch, untuned, sparsity, gated, kernels):
    """With the kernels themselves, which only a GPU can run."""
    jax.clear_caches()  # of traces made with the emulated ones
    hopper.see_device(monkeypatch)
    (x, w_up, w_down), dy = operands(300, d=D, f=F)
    experts = chosen(sparsity, 300)
    weights = [w_up, w_up, w_down] if gated else [w_up, w_down]

    def run(x, *weights):
        op = gated_ffn if gated else ffn
        return op(x, *weights, sparsity=sparsity, expert_index=experts)

    def both(x, weights, dy):
        y, pull_back = jax.vjp(run, x, *weights)
        return y, pull_back(dy)

    traced = jax.jit(both).trace(x, weights, dy)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == kernels


@pytest.mark.gpu
@pytest.mark.parametrize("name", SPARSITIES)
@pytest.mark.parametrize("tokens", [1, 300, 1024])
def test_an_ffn_of_whole_numbers_is_exactly_the_reference_on_a_gpu(name, tokens):
    sparsity = SPARSITIES[name]
    arguments, dy = whole_numbers(tokens, D, F, seed=tokens)
    assert_exact(sparsity, arguments, dy, chosen(sparsity, tokens))
