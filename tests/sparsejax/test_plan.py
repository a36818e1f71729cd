"""The plan against the real model's arrays and the literature's arithmetic."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from sparsejax.config import ModelConfig
from sparsejax.model import Transformer
from sparsejax.ops.ffn_spec import DENSE, FFNSparsity
from sparsejax.patterns import NM, VNM
from sparsejax.plan import (
    KernelFactors,
    flops_per_token,
    gemm_speedups,
    memory_bytes,
    parameter_count,
    predicted_speedup,
    whole_run_speedup,
)

TINY = ModelConfig(
    vocab_size=61, d_model=16, layers=3, heads=4, kv_heads=2, d_hidden=64
)
LLAMA_1B = ModelConfig(
    vocab_size=128_256,
    d_model=2048,
    layers=25,
    heads=16,
    kv_heads=16,
    d_hidden=8448,
    dtype="bfloat16",
)
MASKS = FFNSparsity(weights=NM(2, 4), activations=VNM(64, 2, 16))
BLOCKS = FFNSparsity(
    weights=NM(2, 4),
    activations=VNM(64, 2, 16),
    skip_blocks=True,
    weight_gradients="expert_columns",
)


@pytest.mark.parametrize(
    "config",
    [
        TINY,
        dataclasses.replace(TINY, tie_embeddings=True, kv_heads=4),
        dataclasses.replace(TINY, activation="swiglu", d_hidden=48),
        dataclasses.replace(LLAMA_1B, layers=2),
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
    assert count.attention == size("blocks", "attention")
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
        (MASKS, (1 / 2, 1 / 8, 1 / 2, 1 / 8, 1, 1)),
        (BLOCKS, (1 / 8, 1 / 8, 1 / 8, 1 / 8, 1 / 4, 1 / 4)),
        (
            dataclasses.replace(BLOCKS, experts_per_token=2),
            (1 / 4, 1 / 4, 1 / 4, 1 / 4, 1 / 2, 1 / 2),
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
    assert gemm_speedups(TINY, MASKS) == (1.5, 6, 1.5, 6, 1, 1)
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


@pytest.mark.parametrize("activation", ["relu2", "swiglu"])
@pytest.mark.parametrize("remat", ["none", "full", "dots"])
def test_activation_memory_is_what_the_backward_keeps(activation, remat):
    # sizes that no axis of a weight has, to tell activations from weights
    batch, sequence = 3, 7

    def config_of(layers):
        return dataclasses.replace(
            TINY, activation=activation, remat=remat, layers=layers, dtype="bfloat16"
        )

    def kept(layers):
        model = nnx.eval_shape(lambda: Transformer(config_of(layers), rngs=nnx.Rngs(0)))
        tokens = jnp.zeros((batch, sequence), jnp.int32)
        graph, params, rest = nnx.split(model, nnx.Param, ...)

        def residuals(params, rest):
            def features(params):
                return nnx.merge(graph, params, rest).features(tokens)[0]

            return jax.vjp(features, params)[1]

        # per-token arrays stacked over the layers; XLA's attention scores, which flash
        # attention would not keep, have a second axis of the sequence
        per_token = [
            leaf
            for leaf in jax.tree.leaves(jax.eval_shape(residuals, params, rest))
            if leaf.shape[:3] == (layers, batch, sequence)
            or leaf.shape[:2] == (layers, batch * sequence)
        ]
        return sum(leaf.size * leaf.dtype.itemsize for leaf in per_token)

    def planned(layers):
        plan = memory_bytes(config_of(layers), tokens_per_device=batch * sequence)
        return plan.activations

    assert planned(5) - planned(3) == kept(5) - kept(3)


def test_memory_of_the_states():
    tokens = {"tokens_per_device": 8192}
    one = memory_bytes(LLAMA_1B, **tokens)
    eight = memory_bytes(LLAMA_1B, devices=8, sparsity=MASKS, **tokens)
    parameters = parameter_count(LLAMA_1B)
    assert one.parameters + one.moments + one.gradients == 16 * parameters.total
    assert eight.moments == one.moments // 8
    assert one.packed == 0
    # half of the values, two bytes and one byte of position each
    assert eight.packed == parameters.ffn * 3 // 2 // 8
    # a token keeps the hidden values of one of four experts
    saved = one.activations - eight.activations
    assert saved == 8192 * 25 * 8448 * 3 // 4 * 2
    assert one.total == sum(dataclasses.asdict(one).values())
    assert memory_bytes(
        dataclasses.replace(LLAMA_1B, remat="full"), **tokens
    ).activations < (one.activations // 5)
