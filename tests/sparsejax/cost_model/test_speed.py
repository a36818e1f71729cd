"""Parameters, FLOPs and speed-ups against the real model and the literature."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from sparsejax.cost_model import (
    KernelFactors,
    flops_per_token,
    gemm_speedups,
    parameter_count,
    predicted_speedup,
    whole_run_speedup,
)
from sparsejax.cost_model.hardware import FP8_GAIN
from sparsejax.feed_forward.sparsity import DENSE, FFNSparsity
from sparsejax.models.transformer import Transformer
from sparsejax.routing.routers import ActivationEnergyFP8
from sparsejax.sparsity.patterns import NM, VNM
from tests.support.oracles.cost_cases import BLOCKS, LLAMA_1B, MASKS, TINY


@pytest.mark.parametrize(
    "config",
    [
        TINY,
        dataclasses.replace(TINY, tie_embeddings=True, kv_heads=4),
        dataclasses.replace(TINY, activation="swiglu", d_hidden=48),
        dataclasses.replace(LLAMA_1B, layers=2),
        dataclasses.replace(TINY, qk_norm=True, qkv_bias=True, head_dim=6),
    ],
)
def test_parameter_count_is_that_of_the_model(config):
    model = nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))
    count = parameter_count(config)

    def size(*path):
        state = nnx.state(model, nnx.Param)
        for name in path:
            state = state[name]
        return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(state))

    assert count.total == size()
    of_blocks = 2 * config.layers * config.d_model
    assert size("blocks", "attention") == (
        count.attention + count.vectors - of_blocks - config.d_model
    )
    assert count.ffn == size("blocks", "ffn")
    assert count.embedding == size("embedding")


def test_forward_flops_are_those_of_the_traced_gemms():
    config = dataclasses.replace(TINY, kv_heads=4)
    model = nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))
    graph, state = nnx.split(model)
    sequence = 8

    def flops_of(jaxpr, times=1):
        total = 0
        for eqn in jaxpr.eqns:
            inner = times * eqn.params.get("length", 1)
            for sub in jax.tree.leaves(
                list(eqn.params.values()), is_leaf=lambda p: hasattr(p, "eqns")
            ):
                if hasattr(sub, "eqns"):
                    total += flops_of(getattr(sub, "jaxpr", sub), inner)
            if eqn.primitive.name == "dot_general":
                (contracted, _), _ = eqn.params["dimension_numbers"]
                depth = math.prod(eqn.invars[0].aval.shape[a] for a in contracted)
                total += times * 2 * eqn.outvars[0].aval.size * depth
        return total

    tokens = jnp.zeros((2, sequence), jnp.int32)
    forward = jax.make_jaxpr(lambda state: nnx.merge(graph, state)(tokens))(state)
    traced = flops_of(forward.jaxpr)
    planned = flops_per_token(config, sequence).total(causal=False)
    assert 3 * traced == 2 * sequence * planned


def test_share_of_the_ffn_at_one_billion_parameters():
    # arXiv 2602.06183's sizes as reconstructed: 0.43 without causal saving, 0.49 with
    flops = flops_per_token(LLAMA_1B, 4096)
    assert round(flops.ffn_share(causal=True), 2) == 0.49
    assert 0.43 <= flops.ffn_share(causal=False) < flops.ffn_share(causal=True)
    assert flops.sdpa_full == 2 * flops.sdpa_causal
    # gated: 9 GEMMs for 6
    gated = dataclasses.replace(LLAMA_1B, activation="swiglu")
    assert flops_per_token(gated, 4096).ffn * 6 == flops.ffn * 9


IDEAL = KernelFactors(two_four=2.0)


@pytest.mark.parametrize(
    ("sparsity", "shares"),
    [
        (DENSE, (1, 1, 1, 1, 1, 1)),
        (MASKS, (1 / 2, 1 / 8, 1 / 8, 1 / 8, 1, 1)),
        (BLOCKS, (1 / 8, 1 / 8, 1 / 8, 1 / 8, 1 / 4, 1 / 4)),
        (
            dataclasses.replace(BLOCKS, experts_per_token=2),
            (1 / 4, 1 / 4, 1 / 4, 1 / 4, 1 / 2, 1 / 2),
        ),
        (
            FFNSparsity(
                activations=VNM(16, 4, 16),
                router=ActivationEnergyFP8(),
                skip_blocks=True,
                weight_gradients="expert_columns",
            ),
            (1 / 4 + 1 / FP8_GAIN, *[1 / 4] * 5),
        ),
        (
            FFNSparsity(activations=NM(2, 4), token_sparsity="magnitude"),
            (1, 1 / 2, 1, 1 / 2, 0.05 + 0.95 / 2, 0.05 + 0.95 / 2),
        ),
    ],
)
def test_ideal_kernels_take_the_share_that_is_left(sparsity, shares):
    times = 1 / np.array(gemm_speedups(TINY, sparsity, IDEAL))
    np.testing.assert_allclose(times, shares, rtol=1e-12)


def test_ideal_kernels_of_a_gated_ffn():
    config = dataclasses.replace(TINY, activation="swiglu")
    times = 1 / np.array(gemm_speedups(config, FFNSparsity(weights=NM(2, 4)), IDEAL))
    # X Wg, X Wu and dY Wd^T of nine
    np.testing.assert_array_equal(times, [0.5, 0.5, 1, 0.5, 1, 1, 1, 1, 1])


def test_predicted_speedups_reproduce_the_published_arithmetic():
    # two GEMMs 1.5x and four 7x, or all six 7x; F = 4 d, with SDPA counted full (the
    # smaller share) and causal
    masks, blocks = (1.5, 7, 1.5, 7, 7, 7), (7,) * 6
    flops = flops_per_token(dataclasses.replace(LLAMA_1B, d_hidden=8192), 4096)
    for causal, by_masks, by_blocks in ((False, 1.42, 1.59), (True, 1.49, 1.71)):
        share = flops.ffn_share(causal=causal)
        assert round(predicted_speedup(share, masks), 2) == by_masks
        assert round(predicted_speedup(share, blocks), 2) == by_blocks
    assert whole_run_speedup(1.42, 0.5) == pytest.approx(1.17, abs=0.006)
    assert whole_run_speedup(1.42, 0) == 1
    assert whole_run_speedup(1.42, 1) == pytest.approx(1.42)
    assert predicted_speedup(0.5, (1,) * 6, overhead=0.25) == pytest.approx(0.8)


def test_assumed_factors():
    assert gemm_speedups(TINY, DENSE) == (1,) * 6
    assert gemm_speedups(TINY, MASKS) == (1.5, 6, 6, 6, 1, 1)
    inside = dataclasses.replace(BLOCKS, weights=None, activations=VNM(64, 4, 16))
    assert gemm_speedups(TINY, inside) == (4,) * 6
    assert gemm_speedups(TINY, BLOCKS) == (6, 6, 6, 6, 4, 4)
    slow = KernelFactors(two_four=1.0, grouped_efficiency=0.5)
    assert gemm_speedups(TINY, BLOCKS, slow) == (2,) * 6


def test_shares_and_factors_out_of_range_are_refused():
    with pytest.raises(ValueError, match=r"ffn_share=1.5"):
        predicted_speedup(1.5, (1,) * 6)
    with pytest.raises(ValueError, match="gemm_speedups"):
        predicted_speedup(0.5, (1, 1, 0))
    with pytest.raises(ValueError, match="sparse_share=-1"):
        whole_run_speedup(1.4, -1)
