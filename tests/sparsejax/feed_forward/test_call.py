"""The operands that a call of an FFN needs, and what is said where one is missing."""

import jax.numpy as jnp
import pytest

from sparsejax.feed_forward.ffn import ffn
from sparsejax.feed_forward.sparsity import FFNSparsity
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
