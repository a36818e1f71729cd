"""Dense squared-ReLU FFNs whose activation is in the epilogues of GEMMs 1 and 3."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparsejax.feed_forward.ffn import ffn
from sparsejax.feed_forward.gated_ffn import GatedFFNSpec
from sparsejax.feed_forward.plan import FFNPlan
from sparsejax.feed_forward.sparsity import DENSE, FFNSparsity
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


def test_kernels_have_to_be_named_for_a_dense_ffn(untuned):
    assert fuses()
    assert fuses(tokens=2 * TOKENS, token_shards=2) and fuses(hidden_shards=2)
    assert not fuses(None) and not fuses("xla")
    of = spec(DENSE, d_model=D, d_hidden=F, tokens=TOKENS)
    up, *_ = of.explain()
    assert "mosaic_sm90: no GPU has compared its dense steps with XLA's" in up.reason
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


def test_a_step_lowers_for_hopper(monkeypatch, untuned):
    jax.clear_caches()  # of traces made with the emulated kernels
    hopper.see_device(monkeypatch)
    (x, w_up, w_down), dy = operands(TOKENS, d=D, f=F)

    def both(x, w_up, w_down, dy):
        run = lambda *operands: ffn(*operands, backend=NAMED)
        y, pull_back = jax.vjp(run, x, w_up, w_down)
        return y, pull_back(dy)

    traced = jax.jit(both).trace(x, w_up, w_down, dy)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 2


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
