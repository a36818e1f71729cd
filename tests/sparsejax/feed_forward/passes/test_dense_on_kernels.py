"""Dense squared-ReLU FFNs whose activation is in the epilogues of GEMMs 1 and 3."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparsejax.feed_forward.ffn import ffn
from sparsejax.feed_forward.gated_ffn import GatedFFNSpec
from sparsejax.feed_forward.plan import FFNPlan
from sparsejax.feed_forward.sparsity import DENSE, FFNSparsity
from sparsejax.models.transformer import rematerialise
from sparsejax.sparsity.patterns import TWO_FOUR
from tests.sparsejax.feed_forward.operands.test_packed_activations import (
    operands,
    whole_numbers,
)
from tests.sparsejax.feed_forward.operands.test_packed_rows import spec, step
from tests.support.devices import hopper

D, F, TOKENS = 128, 256, 384
NAMED = "mosaic_sm90"


def fuses(backend=NAMED, sparsity=DENSE, **changes) -> bool:
    sizes = {"d_model": D, "d_hidden": F, "tokens": TOKENS}
    return FFNPlan.of(spec(sparsity, **sizes | changes), backend).fuses_activation


TIMED = {"device": hopper.H100, "tokens": 65536, "d_model": 768, "d_hidden": 3072}
"""A dense FFN whose steps were timed with and without kernels."""


def test_kernels_run_unasked_where_whole_steps_were_faster(untuned):
    assert fuses(None, **TIMED) and not fuses("xla", **TIMED)
    assert fuses(None, **TIMED | {"tokens": 16384, "d_model": 2048, "d_hidden": 8192})
    # What counts is what one device has.
    assert fuses(None, **TIMED | {"tokens": 2**18, "token_shards": 4})
    assert not fuses(None, **TIMED, token_shards=2)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"device": hopper.H200}, "were timed on NVIDIA H100 80GB HBM3 alone"),
        ({"d_model": 512}, "were timed with d_model 768 to 2048, not 512"),
        ({"d_model": 4096}, "were timed with d_model 768 to 2048, not 4096"),
        (
            {"tokens": 32768},
            "were timed with 134217728 activations and more, not 100663296",
        ),
    ],
)
def test_kernels_have_to_be_named_where_nothing_was_timed(untuned, changes, reason):
    sizes = TIMED | changes
    assert fuses(**sizes) and not fuses(None, **sizes)
    up, *_ = spec(DENSE, **sizes).explain()
    assert f"mosaic_sm90: its dense steps {reason}" in up.reason


def test_named_kernels_run_a_dense_ffn(untuned):
    assert fuses() and not fuses(None) and not fuses("xla")
    assert fuses(tokens=2 * TOKENS, token_shards=2) and fuses(hidden_shards=2)
    of = spec(DENSE, d_model=D, d_hidden=F, tokens=TOKENS)
    first, _, third, *others = (of.path for of in of.explain(NAMED))
    assert first == "dense GEMM on the tensor cores, writes A"
    assert third == "dense GEMM on the tensor cores, writes dY1"
    assert set(others) == {"dense GEMM by cuBLAS"}


@pytest.mark.parametrize(
    "changes",
    [
        {"tokens": 200},
        {"d_model": 96},
        {"d_hidden": 2 * F, "hidden_shards": 8},
        {"dtype": "float32"},
        {"device": hopper.A100},
        {"sparsity": FFNSparsity(weights=TWO_FOUR)},
        {"precision": "fp8"},
    ],
)
def test_otherwise_xla_runs_its_gemms(untuned, changes):
    assert not fuses(**changes)


def test_a_gated_ffn_is_left_to_xla(untuned):
    sizes = {"tokens": TOKENS, "d_model": D, "d_hidden": F, "dtype": "bfloat16"}
    of = GatedFFNSpec(**sizes, sparsity=DENSE, device=hopper.H200)
    assert not FFNPlan.of(of, NAMED).fuses_activation


def test_an_ffn_of_whole_numbers_is_exactly_the_reference(calls):
    arguments, dy = whole_numbers(TOKENS, D, F, seed=0)
    got, expected = (step(DENSE, backend, arguments, dy) for backend in (NAMED, None))
    names = ("squared relu of dense_rows", "gradient of dense_rows")
    assert [calls.count(name) for name in names] == [1, 1]
    for ours, right in zip(got, expected, strict=True):
        np.testing.assert_array_equal(ours, right)


def test_random_numbers_are_near_the_reference(calls):
    assert_near_the_reference()
    assert "gradient of dense_rows" in calls


def assert_near_the_reference() -> None:
    (x, *weights), dy = operands(TOKENS, d=D, f=F)
    got = step(DENSE, NAMED, (x, *weights), dy)
    in_float32 = (x.astype(jnp.float32), *weights), dy.astype(jnp.float32)
    for ours, right in zip(got, step(DENSE, None, *in_float32), strict=True):
        ours, right = (np.asarray(of, np.float64) for of in (ours, right))
        # bfloat16's roundings in a row
        assert np.linalg.norm(ours - right) <= 2**-6 * np.linalg.norm(right)


@pytest.mark.parametrize(("remat", "kernels"), [("none", 2), ("dots", 2), ("full", 3)])
def test_gemm_1_runs_again_where_everything_is_recomputed(
    remat, kernels, monkeypatch, untuned
):
    jax.clear_caches()  # of traces made with the emulated kernels
    hopper.see_device(monkeypatch)
    (x, w_up, w_down), dy = operands(TOKENS, d=D, f=F)
    block = rematerialise(partial(ffn, backend=NAMED), remat, in_loop=False)

    def both(x, w_up, w_down, dy):
        y, pull_back = jax.vjp(block, x, w_up, w_down)
        return y, pull_back(dy)

    traced = jax.jit(both).trace(x, w_up, w_down, dy)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == kernels


@pytest.mark.gpu
def test_a_dense_ffn_on_a_gpu():
    assert_near_the_reference()
    arguments, dy = whole_numbers(TOKENS, D, F, seed=1)
    got, again, expected = (
        step(DENSE, backend, arguments, dy) for backend in (NAMED, NAMED, None)
    )
    for ours, repeated, right in zip(got, again, expected, strict=True):
        np.testing.assert_array_equal(ours, repeated)
        np.testing.assert_array_equal(ours, right)
