"""The choice of a backend: order, requests, reasons."""

from dataclasses import replace

import jax
import pytest

from pallas_kernels.device import CPU, Device
from sparsejax.ops.backend import Implementation, choose_backend, current_device
from sparsejax.ops.gemm_spec import GemmSpec
from sparsejax.sparsity.patterns import NM, VNM

SPEC = GemmSpec(name="Y = X W", tokens=3, d_in=4, d_out=5, dtype="float32")


def implementation(*, why=None, path="", share=1.0):
    return Implementation(
        run=lambda *operands: operands,
        why_unsupported=lambda spec: why,
        describe=lambda spec: (path, share),
    )


def test_first_supported_is_taken_and_refusals_are_told():
    table = {
        "reference": implementation(path="slow"),
        "xla": implementation(path="masked", share=0.5),
        "mosaic_sm90": implementation(why="cpu is no sm_90"),
    }
    decision = choose_backend(SPEC, None, table)
    assert (decision.backend, decision.path) == ("xla", "masked")
    assert decision.executed_share == 0.5
    assert decision.spec is SPEC
    assert decision.times is None
    assert decision.reason == "the first that can run it; mosaic_sm90: cpu is no sm_90"


def test_kernel_comes_before_xla():
    table = {"xla": implementation(), "mosaic_sm90": implementation(path="wgmma.sp")}
    assert choose_backend(SPEC, None, table).path == "wgmma.sp"


def test_named_backend_is_taken_even_if_slower():
    table = {"reference": implementation(path="slow"), "xla": implementation()}
    decision = choose_backend(SPEC, "reference", table)
    assert (decision.backend, decision.reason) == ("reference", "as requested")


def test_named_backend_never_falls_back():
    table = {"xla": implementation(), "mosaic_sm90": implementation(why="k=4 < 64")}
    with pytest.raises(NotImplementedError, match="mosaic_sm90: k=4 < 64; leave back"):
        choose_backend(SPEC, "mosaic_sm90", table)


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({}, "Y = X W (tokens 3, d_in 4, d_out 5, float32)"),
        (
            {"name": "1  Y1 = X W1", "sparse_operand": "weight", "pattern": NM(2, 4)},
            "1 Y1 = X W1 (tokens 3, d_in 4, d_out 5, float32, 2:4 weight)",
        ),
        (
            {"sparse_operand": "input", "pattern": VNM(8, 2, 16), "experts": 4},
            "Y = X W (tokens 3, d_in 4, d_out 5, float32, 8:2:16 activation, "
            "4 experts)",
        ),
        (
            {
                "sparse_operand": "input",
                "pattern": NM(2, 4),
                "is_weight_gradient": True,
            },
            "Y = X W (tokens 3, d_in 4, d_out 5, float32, 2:4 operand over tokens)",
        ),
    ],
)
def test_a_refusal_names_the_gemm_and_not_its_whole_spec(facts, words):
    spec = replace(SPEC, **facts)
    assert spec.in_words == words
    with pytest.raises(NotImplementedError) as caught:
        choose_backend(spec, "xla", {"xla": implementation(why="no")})
    assert str(caught.value) == (
        f"the backend that is named cannot run GEMM {words}: xla: no; leave "
        f"backend=None to take one that can"
    )


def test_missing_kernel_says_for_which_gemm():
    with pytest.raises(NotImplementedError, match="no kernel for a dense GEMM"):
        choose_backend(SPEC, "mosaic_sm90", {"xla": implementation()})


def test_all_refusals_are_told_where_nothing_runs():
    table = {"reference": implementation(why="a"), "xla": implementation(why="b")}
    with pytest.raises(NotImplementedError, match="xla: b; reference: a$"):
        choose_backend(SPEC, None, table)


def test_unknown_backend_lists_the_known():
    with pytest.raises(ValueError, match="'triton' must be one of 'reference', 'xl"):
        choose_backend(SPEC, "triton", {})


def test_dense_flops():
    assert SPEC.dense_flops == 2 * 3 * 4 * 5


def test_the_device_follows_the_default_device():
    assert current_device() == Device.of(jax.local_devices()[0])
    with jax.default_device(jax.devices("cpu")[0]):
        assert current_device() == CPU
    with jax.default_device("cpu"):
        assert current_device() == CPU
