"""The plan against the real model's arrays and the literature's arithmetic."""

import dataclasses
import functools
import math
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.extend.core import Literal
from jax.sharding import AbstractMesh, AxisType

from sparsejax.config import MeshConfig, ModelConfig
from sparsejax.cost_model import (
    KernelFactors,
    communication_bytes,
    flops_per_token,
    gathered_bytes,
    gemm_speedups,
    memory_bytes,
    parameter_count,
    predicted_speedup,
    whole_run_speedup,
)
from sparsejax.feed_forward.ffn import ffn
from sparsejax.feed_forward.gated_ffn import gated_ffn
from sparsejax.feed_forward.layout import FFNLayout
from sparsejax.feed_forward.operands.weights import pack_ffn
from sparsejax.feed_forward.spec import DENSE, FFNSparsity
from sparsejax.models.transformer import Transformer, rematerialise
from sparsejax.sparsity.patterns import NM, VNM

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
        (MASKS, (1 / 2, 1 / 8, 1 / 8, 1 / 8, 1, 1)),
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
    assert gemm_speedups(TINY, MASKS) == (1.5, 6, 6, 6, 1, 1)
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


@pytest.mark.parametrize("activation", ["relu2", "swiglu", "reglu2"])
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


@pytest.mark.parametrize("experts_per_token", [1, 2])
@pytest.mark.parametrize("mask_reuse", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"weight_gradients": "expert_columns"},
        {"weight_gradients": "expert_columns", "skip_blocks": True},
    ],
)
def test_activation_memory_of_a_routed_ffn_is_what_its_backward_keeps(
    options, mask_reuse, experts_per_token
):
    """With V = 1 there is no row but those of tokens."""
    sparsity = FFNSparsity(
        activations=VNM(1, 2, 16),
        mask_reuse=mask_reuse,
        experts_per_token=experts_per_token,
        **options,
    )
    # a width that no number of neurons is
    config = dataclasses.replace(TINY, d_model=24)
    tokens, d, f = 96, config.d_model, config.d_hidden
    experts = jnp.zeros((tokens, experts_per_token), jnp.int32)
    run = functools.partial(ffn, sparsity=sparsity, expert_index=experts)
    operands = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((tokens, d), (d, f))]
    operands.append(jax.ShapeDtypeStruct((f, d), jnp.float32))
    _, residuals = jax.eval_shape(functools.partial(jax.vjp, run), *operands)
    sizes = [a.shape for a in jax.tree.leaves(residuals) if a.ndim == 2]
    hidden = [rows * size for rows, size in sizes if size in (f, f // 4) and rows != d]

    def planned(sparsity):
        memory = memory_bytes(config, tokens_per_device=tokens, sparsity=sparsity)
        return memory.activations

    more = sum(hidden) - tokens * f
    assert planned(sparsity) - planned(DENSE) == 4 * config.layers * more


def test_memory_of_the_states():
    tokens = {"tokens_per_device": 8192}
    one = memory_bytes(LLAMA_1B, **tokens)
    eight = memory_bytes(
        LLAMA_1B, mesh=MeshConfig(data=1, fsdp=8), sparsity=MASKS, **tokens
    )
    parameters = parameter_count(LLAMA_1B)
    assert one.parameters + one.moments + one.gradients == 16 * parameters.total
    split = parameters.total - parameters.norms
    assert eight.moments == 8 * (split // 8 + parameters.norms)
    assert (one.packed, one.gathered) == (0, 0)
    # half of the values, two bytes and one byte of position each
    assert eight.packed == parameters.ffn * 3 // 2 // 8
    # a token keeps the hidden values of one of four experts
    saved = one.activations - eight.activations
    assert saved == 8192 * 25 * 8448 * 3 // 4 * 2
    assert one.total == sum(dataclasses.asdict(one).values())
    assert eight.total == sum(dataclasses.asdict(eight).values())
    assert memory_bytes(
        dataclasses.replace(LLAMA_1B, remat="full"), **tokens
    ).activations < (one.activations // 5)


# Of a layer: attention 2 x 16 x 16 + 2 x 16 x 8 = 768 weights, W1 and W2 1024 each.
# Embedding and head 1024 each, 7 norm scales of 16. Two bytes each in the GEMMs, and
# S(W) of 1024 is 512 values of two bytes and a quarter.
SPLIT = dataclasses.replace(TINY, vocab_size=64, dtype="bfloat16")
CUBE = MeshConfig(data=2, fsdp=2, tensor=2)
WEIGHTS = FFNSparsity(weights=NM(2, 4))


def test_memory_of_one_of_eight_devices_by_hand():
    memory = memory_bytes(SPLIT, tokens_per_device=32, mesh=CUBE, sparsity=WEIGHTS)
    held = (2 * 1024 + 3 * (768 + 2048)) // 4 + 7 * 16
    assert held == 2736
    # x, two normed inputs and the residual whole; query, key, value, attention's result
    # and hidden values halved; embedding's rows and what the head reads whole
    per_token = 3 * 2 * (4 * 16 + (16 + 2 * 8 + 16 + 64) // 2) + 2 * 2 * 16
    assert dataclasses.asdict(memory) == {
        "parameters": 4 * held,
        "moments": 8 * held,
        "gradients": 4 * held,
        "packed": 3 * 1024 * 3 // 4,
        # attention's of all layers; S(W1) compressed and W2
        "gathered": (3 * 2 * 768 + 512 * 9 // 4 + 2 * 1024) // 2,
        "activations": 32 * per_token,
        "logits": 32 * 64 // 2 * (4 + 2),
    }


def test_projections_kept_by_the_plain_gemms_are_split_but_not_their_sums():
    dots = dataclasses.replace(SPLIT, remat="dots")
    memory = memory_bytes(dots, tokens_per_device=1, mesh=CUBE)
    none = memory_bytes(SPLIT, tokens_per_device=1, mesh=CUBE)
    per_layer = 2 * (2 * 16 + (16 + 2 * 8) // 2) + 2 * 64 // 2
    one_layer = (none.activations - 2 * 2 * 16) // 3
    assert memory.activations == 3 * per_layer + one_layer + 2 * 2 * 16


def test_replicas_hold_the_same():
    of = {"tokens_per_device": 32, "sparsity": WEIGHTS}
    four = memory_bytes(SPLIT, mesh=MeshConfig(data=4, fsdp=2, tensor=2), **of)
    assert four == memory_bytes(SPLIT, mesh=CUBE, **of)


def test_the_largest_gathered_is_a_layer_or_the_head():
    layer = dataclasses.replace(SPLIT, remat="full")
    memory = memory_bytes(layer, tokens_per_device=1, mesh=CUBE, sparsity=WEIGHTS)
    assert memory.gathered == (2 * 768 + 512 * 9 // 4 + 2 * 1024) // 2
    head = dataclasses.replace(layer, vocab_size=4096)
    memory = memory_bytes(head, tokens_per_device=1, mesh=CUBE)
    assert memory.gathered == 2 * 4096 * 16 // 2
    head = dataclasses.replace(head, remat="none")
    memory = memory_bytes(head, tokens_per_device=1, mesh=CUBE)
    assert memory.gathered == (3 * 2 * 768 + 2 * 4096 * 16) // 2


@pytest.mark.parametrize(
    ("dtype", "compressed", "of_dense"), [("bfloat16", 9, 16), ("float32", 17, 32)]
)
def test_a_sparse_weight_is_gathered_compressed(dtype, compressed, of_dense):
    config = dataclasses.replace(LLAMA_1B, dtype=dtype)
    dense, sparse = gathered_bytes(config), gathered_bytes(config, WEIGHTS)
    matrix = dense.ffn_forward // 2
    assert matrix == 2048 * 8448 * {"bfloat16": 2, "float32": 4}[dtype]
    assert sparse.ffn_forward == matrix + matrix * compressed // of_dense
    assert sparse.ffn_backward == sparse.ffn_forward
    assert (
        sparse.attention == dense.attention == 4 * 2048 * 2048 * matrix // (2048 * 8448)
    )


def test_a_gated_ffn_gathers_gate_and_up_alike():
    gated = dataclasses.replace(LLAMA_1B, activation="swiglu", remat="full")
    matrix = 2048 * 8448 * 2
    sparse = gathered_bytes(gated, WEIGHTS)
    assert sparse.ffn_forward == matrix * (2 * 9 + 16) // 16
    assert sparse.ffn_backward == matrix * (9 + 2 * 16) // 16
    assert sparse.ffn_recomputed == matrix * 2 * 9 // 16


@pytest.mark.parametrize("remat", ["full", "dots"])
def test_what_is_recomputed_is_gathered_again_where_nothing_else_reads_it(remat):
    config = dataclasses.replace(SPLIT, remat=remat)
    assert gathered_bytes(config).ffn_recomputed == 0
    assert gathered_bytes(config, WEIGHTS).ffn_recomputed == 512 * 9 // 4
    assert gathered_bytes(SPLIT, WEIGHTS).ffn_recomputed == 0


def test_communication_of_one_of_eight_devices_by_hand():
    def received(sparsity, **changes):
        config = dataclasses.replace(SPLIT, remat="dots", **changes)
        return communication_bytes(config, CUBE, sparsity, 3, 32)

    # attention twice, W1 and W2 (or one compressed) twice, head once; of the half that
    # tensor leaves the device has half already; three micro-batches
    sparse, dense = received(WEIGHTS), received(DENSE)
    layer = 2 * (2 * 768 + 512 * 9 // 4 + 2 * 1024) + 512 * 9 // 4
    assert sparse.gathered_weights == 3 * (3 * layer + 2 * 1024) // 4
    layer = 2 * (2 * 768 + 2 * 2048)
    assert dense.gathered_weights == 3 * (3 * layer + 2 * 1024) // 4
    # float32: half of all gradients but the embedding's reduce-scattered, the quarter
    # that is left all-reduced over two replicas with the embedding's; 112 norm scales
    # all-reduced over four devices
    half, embedding = 4 * (1024 + 3 * (768 + 2048)) // 2, 4 * 1024 // 2
    gradients = half // 2 + 2 * (half + embedding) // 2 // 2 + 2 * 4 * 112 * 3 // 4
    assert sparse.reduced_gradients == dense.reduced_gradients == 3 * gradients
    # four sums per layer and that of the head, of 32 x 16 values of two bytes; the
    # embedding's rows of four
    assert sparse.reduced_activations == 3 * 2 * ((4 * 3 + 1) * 2 + 4) * 32 * 16 // 2
    assert sparse.exchanged_tokens == 3 * 2 * 32 * 16 * 2 // 2
    assert sparse.total == sum(dataclasses.asdict(sparse).values())


def test_communication_of_the_other_ways_to_recompute():
    def received(remat):
        config = dataclasses.replace(SPLIT, remat=remat)
        return communication_bytes(config, CUBE, WEIGHTS, 1, 32)

    none, full, dots = received("none"), received("full"), received("dots")
    # attention's output is computed again
    more = full.reduced_activations - dots.reduced_activations
    assert more == 2 * 3 * 32 * 16 * 2 // 2
    assert full.gathered_weights == dots.gathered_weights
    # kept: attention's weights, and what GEMM 1 gave
    fewer = dots.gathered_weights - none.gathered_weights
    assert fewer == 3 * (2 * 768 + 512 * 9 // 4) // 4


def test_each_axis_costs_its_own_communication():
    def received(**axes):
        mesh = MeshConfig(**({"data": 1} | axes))
        return dataclasses.asdict(communication_bytes(SPLIT, mesh, DENSE, 1, 32))

    nothing = dict.fromkeys(received(), 0)
    assert received() == nothing
    data, fsdp, tensor = received(data=4), received(fsdp=4), received(tensor=4)
    count = parameter_count(SPLIT)
    assert data == nothing | {"reduced_gradients": 2 * 4 * count.total * 3 // 4}
    assert fsdp["reduced_activations"] == 0
    once = count.total - count.embedding + count.norms
    assert fsdp["reduced_gradients"] == 4 * once * 3 // 4
    assert fsdp["exchanged_tokens"] == 2 * 32 * 16 * 2 * 3 // 4
    sums = 32 * 16 * (13 * 2 + 4)
    assert tensor == nothing | {"reduced_activations": 2 * sums * 3 // 4}


def test_tied_weights_are_two_gradients():
    # of the rows that are looked up, and of the head
    tied = dataclasses.replace(SPLIT, tie_embeddings=True)
    sent = [communication_bytes(c, CUBE, DENSE, 1, 32) for c in (SPLIT, tied)]
    assert sent[0] == sent[1]


def collectives(jaxpr, sizes):
    """Bytes that a device receives, by collective and axis, in what is computed for the
    results of `jaxpr`."""
    received, needed = Counter(), set(jaxpr.outvars)
    for eqn in reversed(jaxpr.eqns):
        if needed.isdisjoint(eqn.outvars):
            continue
        needed |= {v for v in eqn.invars if not isinstance(v, Literal)}
        parts = jax.tree.leaves(
            list(eqn.params.values()), is_leaf=lambda p: hasattr(p, "eqns")
        )
        for part in parts:
            if hasattr(part, "eqns"):
                received += collectives(getattr(part, "jaxpr", part), sizes)
        kind = eqn.primitive.name
        if kind in ("all_gather", "reduce_scatter", "psum"):
            axis = eqn.params["axes" if kind == "psum" else "axis_name"]
            (axis,) = axis if isinstance(axis, tuple) else (axis,)
            whole = (eqn.outvars if kind == "all_gather" else eqn.invars)[0].aval
            times = 2 if kind == "psum" else 1
            share = times * (sizes[axis] - 1) / sizes[axis]
            received[kind, axis] += share * whole.size * whole.dtype.itemsize
    return received


@pytest.mark.parametrize("sparsity", [DENSE, WEIGHTS], ids=["dense", "2:4"])
@pytest.mark.parametrize("remat", ["none", "full", "dots"])
@pytest.mark.parametrize("activation", ["relu2", "swiglu", "reglu2"])
def test_an_ffn_on_a_mesh_sends_what_is_planned(activation, remat, sparsity):
    config = dataclasses.replace(SPLIT, activation=activation, remat=remat)
    d, hidden, tokens, sizes = 16, 64, 128, {"data": 2, "fsdp": 4, "tensor": 2}
    mesh = AbstractMesh(
        tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * 3
    )
    gates = 0 if activation == "relu2" else 1
    shapes = [(d, hidden)] * (1 + gates) + [(hidden, d)]
    weights = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    x = jax.ShapeDtypeStruct((tokens, d), jnp.bfloat16)

    def loss(weights, x):
        *gate, up, down = weights
        packed = pack_ffn(
            up,
            down,
            w_gate=gate[0] if gate else None,
            sparsity=sparsity,
            scales=jnp.ones(2 + gates),
            dtype=x.dtype,
        )

        def layer(x, _):
            run = gated_ffn if gate else ffn
            facts = {"sparsity": sparsity, "layout": FFNLayout(mesh=mesh)}
            return x + run(x, *weights, packed=packed, **facts), None

        x, _ = jax.lax.scan(rematerialise(layer, remat), x, length=1)
        return x.astype(jnp.float32).sum()

    traced = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(weights, x)
    whole = gathered_bytes(config, sparsity)
    gathered = whole.ffn_forward + whole.ffn_backward + whole.ffn_recomputed
    if remat == "full" and sparsity is DENSE:
        # GEMM 1's weights are traced once more, and XLA sees that GEMM 4's are the same
        gathered += (1 + gates) * 2 * d * hidden
    gradients = 4 * (2 + gates) * d * hidden // 2
    assert collectives(traced.jaxpr, sizes) == {
        ("all_gather", "fsdp"): gathered // 2 * 3 // 4,
        ("reduce_scatter", "fsdp"): gradients * 3 // 4,
        ("psum", "data"): 2 * gradients // 4 // 2,
        # of Y and of dX
        ("psum", "tensor"): 2 * 2 * tokens // 8 * d * 2 // 2,
    }
