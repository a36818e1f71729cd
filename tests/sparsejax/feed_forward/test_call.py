"""The operands that a call of an FFN needs, and what is said where one is missing."""

from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest

from sparsejax.feed_forward.ffn import ffn
from sparsejax.feed_forward.gated_ffn import gated_ffn
from sparsejax.feed_forward.operands.weights import pack_ffn
from sparsejax.feed_forward.sparsity import DENSE, FFNSparsity
from sparsejax.sparsity.patterns import VNM
from tests.support.oracles.ffn_cases import (
    TOKENS,
    TWO_FOUR,
    make_inputs,
)


def test_missing_arguments_are_named():
    x, w_up, w_down, _ = make_inputs()
    with pytest.raises(ValueError, match="needs scales.*soft_threshold_scale"):
        ffn(x, w_up, w_down, sparsity=FFNSparsity(weights=TWO_FOUR))
    with pytest.raises(ValueError, match="draws random numbers; pass key"):
        ffn(x, w_up, w_down, sparsity=FFNSparsity(token_sparsity="mvue"))
    venom = FFNSparsity(activations=VNM(8, 2, 16))
    with pytest.raises(ValueError, match=r"shape \(37, 1\), got None; make it with"):
        ffn(x, w_up, w_down, sparsity=venom)
    with pytest.raises(ValueError, match=r"shape \(37, 1\), got \(37, 2\)"):
        experts = jnp.zeros((TOKENS, 2), jnp.int32)
        ffn(x, w_up, w_down, sparsity=venom, expert_index=experts)


def test_named_backend_runs_or_raises():
    x, w_up, w_down, _ = make_inputs()
    with pytest.raises(ValueError, match="backend='cuda' must be one of 'reference',"):
        ffn(x, w_up, w_down, backend="cuda")
    options = {"sparsity": FFNSparsity(weights=TWO_FOUR), "scales": jnp.ones(2)}
    with pytest.raises(NotImplementedError, match="mosaic_sm90: .*leave backend=None"):
        ffn(x, w_up, w_down, backend="mosaic_sm90", **options)


def test_a_named_backend_that_runs_none_of_the_gemms_by_expert_is_refused():
    """GEMMs by expert that are dense inside have no pattern, and would fall back."""
    x, w_up, w_down, _ = make_inputs()
    inside = VNM(128, 4, 8)
    options = {
        "sparsity": FFNSparsity(activations=inside, weight_gradients="expert_columns"),
        "expert_index": jnp.zeros((TOKENS, 1), jnp.int32),
    }
    ffn(x, w_up, w_down, backend="xla", **options)
    with pytest.raises(NotImplementedError, match="GEMM 2 .* needs a Hopper GPU"):
        ffn(x, w_up, w_down, backend="mosaic_sm90", **options)


def test_packed_weights_of_another_call_are_refused():
    x, w_up, w_down, _ = (jnp.asarray(a, jnp.float32) for a in make_inputs())
    weights = FFNSparsity(weights=TWO_FOUR)
    exact = FFNSparsity(weights=TWO_FOUR, exact_gradients=True)
    scales = jnp.array([1.5, 1.25])
    made = partial(pack_ffn, scales=scales, dtype=x.dtype)
    own = made(w_up, w_down, sparsity=weights)
    call = partial(ffn, x, w_up, w_down)
    np.testing.assert_array_equal(
        call(sparsity=weights, packed=own), call(sparsity=weights, scales=scales)
    )
    half = made(w_up[:, :16], w_down[:16], sparsity=weights)
    rounded = pack_ffn(
        w_up, w_down, sparsity=weights, scales=scales, dtype=jnp.dtype("bfloat16")
    )
    copies = pack_ffn(w_up, w_down, sparsity=DENSE, dtype=jnp.dtype("bfloat16"))
    quantised = made(w_up, w_down, sparsity=DENSE, precision="fp8")
    for sparsity, packed, message in (
        (weights, made(w_up, w_down, sparsity=exact), r"packed\.down is None"),
        (exact, own, r"packed\.down is 2:4 weights, .* reads None"),
        (weights, half, r"packed\.up is 2:4 weights, \(\d+, 16\), and this call"),
        (weights, rounded, r"packed\.up is rounded to bfloat16, and .* in float32"),
        (weights, quantised, r"packed\.up is weights in 8-bit floats"),
        (weights, copies, r"packed\.up is None"),
        (DENSE, copies, r"packed\.dense\.up is rounded to bfloat16"),
    ):
        with pytest.raises(ValueError, match=message):
            call(sparsity=sparsity, packed=packed)
    gated = partial(gated_ffn, x, w_up, w_up, w_down, activation="swiglu")
    with pytest.raises(ValueError, match=r"packed\.gate is None, and this call reads"):
        gated(sparsity=weights, packed=own)
    with pytest.raises(ValueError, match=r"packed\.up is None.* reads weights in 8"):
        call(packed=own._replace(up=None), precision="fp8")
