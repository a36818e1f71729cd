"""FFNs whose tokens use some experts, on accelerators without kernels of ours: what
runs their GEMMs, and that it computes what masks would."""

from dataclasses import replace
from functools import partial
from importlib.util import find_spec

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparsejax.feed_forward import choice
from sparsejax.feed_forward.choice import why_slower_than_dense
from sparsejax.feed_forward.ffn import ffn
from sparsejax.feed_forward.gated_ffn import GatedFFNSpec, gated_ffn
from sparsejax.feed_forward.plan import FFNPlan
from sparsejax.feed_forward.sparsity import FFNSparsity
from sparsejax.feed_forward.spec import FFNSpec
from sparsejax.routing.routers import ActivationEnergy, TokenHash
from sparsejax.sparsity.patterns import NM, VNM
from tests.support.devices import accelerators, hopper
from tests.support.devices.accelerators import A100, B200, TPU, TRITON
from tests.support.oracles.ffn_cases import (
    all_sparsities,
    make_experts,
    make_inputs,
    name_of,
    oracle,
    value_and_gradients,
)

pytestmark = pytest.mark.filterwarnings("ignore::sparsejax.SlowerThanDense")

SKIPPED = FFNSparsity(
    activations=VNM(128, 4, 32),
    router=TokenHash(),
    skip_blocks=True,
    weight_gradients="expert_columns",
)
BY_ENERGY = replace(SKIPPED, router=ActivationEnergy(), skip_blocks=False)
TOKAMAX, LOOPS, ALL = "tokamax", "loop over chunks", "dense GEMM by cuBLAS"
RAGGED, XLA = "XLA's ragged dot", "dense GEMM by XLA"


def spec(sparsity=SKIPPED, *, device, tokens=16384, kind=FFNSpec) -> FFNSpec:
    sizes = {"tokens": tokens, "d_model": 2048, "d_hidden": 8192, "dtype": "bfloat16"}
    return kind(**sizes, sparsity=sparsity, device=device)


@pytest.mark.parametrize(
    ("device", "packages", "tokens", "paths"),
    [
        (A100, (TOKAMAX, *TRITON), 4096, [TOKAMAX] * 6),
        (A100, (TOKAMAX,), 16384, [LOOPS] * 6),
        (A100, (), 4096, [ALL] * 6),
        (B200, (TOKAMAX, *TRITON), 4096, [TOKAMAX] * 6),
        (B200, (TOKAMAX,), 16384, [TOKAMAX] * 4 + [LOOPS] * 2),
        (B200, (TOKAMAX,), 4096, [TOKAMAX] * 4 + [ALL] * 2),
        (TPU, (TOKAMAX,), 4096, [TOKAMAX] * 6),
        (TPU, (), 4096, [RAGGED] * 6),
    ],
)
def test_each_gemm_takes_what_is_there_and_says_why(
    device, packages, tokens, paths, monkeypatch
):
    accelerators.installed(monkeypatch, *packages)
    decisions = spec(device=device, tokens=tokens).explain()
    for decision, path in zip(decisions, paths, strict=True):
        assert path in decision.path
        assert "needs a Hopper GPU, not " in decision.reason
        assert (decision.executed_share < 1) == (path != ALL)
        assert ("2.3 times as long for each" in decision.reason) == (path == ALL)
    slower = why_slower_than_dense(decisions)
    assert (slower is None) == (paths != [ALL] * 6)
    # The same GEMMs, but for the first, which all neurons are needed for.
    by_energy = spec(BY_ENERGY, device=device, tokens=tokens).explain()
    first = XLA if device == TPU else ALL
    assert by_energy[0].path == first and by_energy[0].spec.why_not_by_expert is None
    assert [of.path for of in by_energy[1:]] == [of.path for of in decisions[1:]]


def test_a_name_is_taken_and_leaves_the_other_gemms_to_the_library(monkeypatch):
    accelerators.installed(monkeypatch, TOKAMAX, *TRITON)
    named = spec(BY_ENERGY, device=hopper.H200).explain("tokamax")
    assert [of.backend for of in named] == ["xla"] + ["tokamax"] * 5
    two_four = replace(BY_ENERGY, weights=NM(2, 4))
    assert FFNPlan.of(spec(two_four, device=hopper.H200), "tokamax").kernels is None
    loops = spec(device=A100, tokens=4096).explain("xla")
    assert all(LOOPS in of.path for of in loops)
    accelerators.installed(monkeypatch)
    with pytest.raises(NotImplementedError, match=r"install sparsejax\[tokamax\]"):
        spec(device=A100).explain("tokamax")


def test_gated_ffns_and_masks_inside_an_expert_alike(monkeypatch):
    accelerators.installed(monkeypatch, TOKAMAX)
    gated = spec(device=B200, kind=GatedFFNSpec, tokens=4096).explain()
    # dX is the sum of two products in float32, which its kernel does not write.
    on_tokamax = [True, True, True, True, False, False, False, False, False]
    assert [of.backend == "tokamax" for of in gated] == on_tokamax
    two_four = replace(SKIPPED, weights=NM(2, 4), activations=VNM(128, 2, 32))
    inside = spec(two_four, device=TPU).explain()
    assert [of.backend for of in inside] == ["tokamax"] * 6
    of_all = spec(two_four, device=A100, tokens=4096).explain()
    assert [of.executed_share for of in of_all] == [1.0] * 6
    along_rows = replace(SKIPPED, token_sparsity="magnitude")
    rows = spec(along_rows, device=A100, tokens=4096).explain()
    # Its groups of four are those of an expert's rows.
    assert [ALL in of.path for of in rows] == [True] * 4 + [False] * 2


def close(got, expected) -> None:
    for ours, theirs in zip(got, expected, strict=True):
        # rounding of float64, as in test_ffn
        np.testing.assert_allclose(ours, theirs, rtol=1e-11, atol=1e-11)


def agrees(sparsity: FFNSparsity, backend=None) -> None:
    """With the masked oracle; one expert has no token."""
    inputs, experts = make_inputs(), make_experts(sparsity)
    run = jax.jit(partial(value_and_gradients, sparsity, backend=backend))
    with jax.enable_x64(True):
        got = run(*inputs, experts)
    close(got, oracle(sparsity, *inputs, experts))


DENSE_INSIDE = [
    s
    for s in all_sparsities()
    if s.activations == VNM(8, 4, 16) and not s.token_sparsity
]


@pytest.mark.parametrize("sparsity", DENSE_INSIDE, ids=name_of)
def test_tokamax_computes_what_masks_would(sparsity):
    """One and two experts per token, skipped and by energy, forward and backward, by
    its implementation for CPUs."""
    assert FFNPlan.of(spec(sparsity, device=A100), "xla").down.spec.experts
    agrees(sparsity, "tokamax")


SOME = [
    replace(SKIPPED, activations=VNM(8, 4, 16)),
    replace(BY_ENERGY, activations=VNM(8, 4, 16), experts_per_token=2),
    replace(BY_ENERGY, activations=VNM(8, 4, 16), mask_reuse=False),
    replace(SKIPPED, activations=VNM(8, 2, 16), weights=NM(2, 4)),
]


@pytest.mark.parametrize("sparsity", SOME, ids=name_of)
@pytest.mark.parametrize("device", [A100, TPU], ids=lambda of: of.kind)
def test_dense_gemms_and_ragged_dots_do_too(sparsity, device, monkeypatch):
    hopper.see_device(monkeypatch, device)
    agrees(sparsity)


@pytest.mark.parametrize(
    "of_all", [("up",), ("down",), ("d_hidden",), ("d_input",), ("d_up", "d_down")]
)
@pytest.mark.parametrize("sparsity", SOME[:2], ids=name_of)
def test_any_of_the_gemms_may_be_dense(sparsity, of_all, monkeypatch):
    hopper.see_device(monkeypatch, A100)
    slower = lambda spec: "slower" if spec.role in of_all else None
    monkeypatch.setattr(choice.grouped_matmul, "why_slower_than_dense", slower)
    agrees(sparsity)


@pytest.mark.parametrize("activation", ["swiglu", "reglu2"])
def test_gated_ffns_agree_with_themselves_on_a_cpu(activation, monkeypatch):
    x, w_up, w_down, dy = make_inputs()
    weights = w_up[:, ::-1], w_up, w_down
    experts = make_experts(SOME[0])

    def run(x, *weights):
        return gated_ffn(
            x, *weights, activation=activation, sparsity=SOME[0], expert_index=experts
        )

    def both(x, weights, dy):
        y, pull_back = jax.vjp(run, x, *weights)
        return y, *pull_back(dy)

    with jax.enable_x64(True):
        expected = both(x, weights, dy)
        hopper.see_device(monkeypatch, A100)
        got = jax.jit(lambda *of: both(*of))(x, weights, dy)
    close(got, expected)


@pytest.mark.parametrize("sparsity", [SKIPPED, BY_ENERGY], ids=["skipped", "by energy"])
@pytest.mark.parametrize(
    ("device", "platform", "call"),
    [
        (A100, "cuda", "custom_call @triton_kernel_call"),
        (B200, "cuda", "custom_call @mosaic_gpu"),
        (TPU, "tpu", "custom_call @tpu_custom_call"),
    ],
    ids=["A100", "B200", "TPU"],
)
def test_a_step_lowers(device, platform, call, sparsity, monkeypatch):
    """On the A100 by Triton where that is installed, else by XLA alone. Two GEMMs of
    the same shapes are one function of the program, so that calls are counted where
    they are traced."""
    import tokamax  # here: its import takes seconds

    traced_calls = []
    run = tokamax.ragged_dot_general
    counted = lambda *of, **named: traced_calls.append(1) or run(*of, **named)
    monkeypatch.setattr(tokamax, "ragged_dot_general", counted)
    shapes = [(4096, 256), (256, 1024), (1024, 256)]
    operands = [jax.ShapeDtypeStruct(shape, "bfloat16") for shape in shapes]
    experts = jnp.arange(4096)[:, None] % 8

    def both(x, w_up, w_down):
        index = experts if sparsity.skip_blocks else None
        of_ffn = partial(ffn, sparsity=sparsity, expert_index=index)
        y, pull_back = jax.vjp(of_ffn, x, w_up, w_down)
        return y, pull_back(y)

    with accelerators.traced_for(device):
        traced = jax.jit(both).trace(*operands)
        text = traced.lower(lowering_platforms=(platform,)).as_text()
    by_triton = all(map(find_spec, TRITON))
    gemms = {A100: 6 * by_triton, B200: 4 + 2 * by_triton, TPU: 6}[device]
    if gemms and not sparsity.skip_blocks:
        gemms -= 1  # GEMM 1, of all neurons
    assert len(traced_calls) == gemms
    assert (call in text) == bool(gemms)
