"""The planned memory against the arrays of the real model."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from sparsejax.config import MeshConfig
from sparsejax.cost_model import (
    memory_bytes,
    parameter_count,
)
from sparsejax.feed_forward.ffn import ffn
from sparsejax.feed_forward.operands.weights import pack_ffn
from sparsejax.feed_forward.sparsity import DENSE, FFNSparsity
from sparsejax.models.transformer import Transformer, rematerialise
from sparsejax.routing.routers import ActivationEnergyFP8
from sparsejax.sparsity.patterns import VNM
from tests.support.oracles.cost_cases import CUBE, LLAMA_1B, MASKS, SPLIT, TINY, WEIGHTS


@pytest.mark.parametrize(
    "kind",
    [
        *({"activation": activation} for activation in ("relu2", "swiglu", "reglu2")),
        {"activation": "swiglu", "qk_norm": True, "head_dim": 6},
        {"activation": "relu2", "qkv_bias": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("remat", ["none", "full", "dots"])
def test_activation_memory_is_what_the_backward_keeps(kind, remat):
    # sizes that no axis of a weight has, to tell activations from weights
    batch, sequence = 3, 7

    def config_of(layers):
        return dataclasses.replace(
            TINY, **kind, remat=remat, layers=layers, dtype="bfloat16"
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


@pytest.mark.parametrize("remat", ["none", "dots"])
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
    options, mask_reuse, experts_per_token, remat
):
    """With V = 1 there is no row but those of tokens."""
    sparsity = FFNSparsity(
        activations=VNM(1, 2, 16),
        mask_reuse=mask_reuse,
        experts_per_token=experts_per_token,
        **options,
    )
    # a width that no number of neurons is
    config = dataclasses.replace(TINY, d_model=24, remat=remat)
    tokens, d, f = 96, config.d_model, config.d_hidden
    experts = jnp.zeros((tokens, experts_per_token), jnp.int32)
    run = functools.partial(ffn, sparsity=sparsity, expert_index=experts)
    run = rematerialise(run, remat, in_loop=False)
    operands = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((tokens, d), (d, f))]
    operands.append(jax.ShapeDtypeStruct((f, d), jnp.float32))
    _, residuals = jax.eval_shape(functools.partial(jax.vjp, run), *operands)
    sizes = [a.shape for a in jax.tree.leaves(residuals) if a.ndim == 2]
    hidden = [rows * size for rows, size in sizes if size in (f, f // 4) and rows != d]

    def planned(sparsity):
        memory = memory_bytes(config, tokens_per_device=tokens, sparsity=sparsity)
        return memory.activations

    more = sum(hidden) - tokens * f
    # And what is recomputed of one layer.
    layers = config.layers + (remat == "dots")
    assert planned(sparsity) - planned(DENSE) == 4 * layers * more


@pytest.mark.parametrize("activation", ["relu2", "swiglu"])
@pytest.mark.parametrize("precision", ["dtype", "fp8"])
def test_memory_of_weights_in_8_bit_floats_is_that_of_the_packed_ones(
    activation, precision
):
    config = dataclasses.replace(
        TINY, activation=activation, precision=precision, dtype="bfloat16"
    )
    experts = FFNSparsity(activations=VNM(4, 4, 16))
    by_router = FFNSparsity(
        activations=VNM(4, 4, 16),
        router=ActivationEnergyFP8(),
        skip_blocks=True,
        weight_gradients="expert_columns",
    )

    def made(sparsity):
        """The bytes that `pack_ffn` makes of one layer, without scales."""
        up = jax.ShapeDtypeStruct((config.d_model, config.d_hidden), jnp.float32)
        down = jax.ShapeDtypeStruct(up.shape[::-1], jnp.float32)
        gate = up if config.gated else None
        pack = functools.partial(
            pack_ffn,
            sparsity=sparsity,
            precision=precision,
            dtype=jnp.dtype("bfloat16"),
        )
        packed = jax.eval_shape(lambda u, d, g: pack(u, d, w_gate=g), up, down, gate)
        return sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(packed) if a.ndim)

    def planned(sparsity):
        return memory_bytes(config, tokens_per_device=1, sparsity=sparsity).packed

    count = parameter_count(config)
    others = 2 * (count.attention + count.head)
    assert planned(DENSE) == config.layers * made(DENSE) + others
    assert planned(experts) == config.layers * made(experts) + others
    assert planned(by_router) == config.layers * made(by_router) + others


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
    # two bytes of every weight that a GEMM reads
    read = 2 * (parameters.attention + parameters.ffn + parameters.head)
    assert (one.packed, one.gathered) == (read, 0)
    # and half of the values, two bytes and one byte of position each
    assert eight.packed == (read + parameters.ffn * 3 // 2) // 8
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
        "packed": (3 * 1024 * 3 + 2 * (3 * (768 + 2048) + 1024)) // 4,
        # attention's of all layers; S(W1) compressed and W2
        "gathered": (3 * 2 * 768 + 512 * 9 // 4 + 2 * 1024) // 2,
        "activations": 32 * per_token,
        "logits": 32 * 64 // 2 * (4 + 2),
    }


def test_logits_in_the_compute_dtype_take_half():
    narrow = dataclasses.replace(SPLIT, logits_of_loss="dtype")
    memory = memory_bytes(narrow, tokens_per_device=32, mesh=CUBE, sparsity=WEIGHTS)
    assert memory.logits == 32 * 64 // 2 * (2 + 2)


def test_projections_kept_by_the_plain_gemms_are_split_but_not_their_sums():
    dots = dataclasses.replace(SPLIT, remat="dots")
    memory = memory_bytes(dots, tokens_per_device=1, mesh=CUBE)
    none = memory_bytes(SPLIT, tokens_per_device=1, mesh=CUBE)
    per_layer = 2 * (2 * 16 + (16 + 2 * 8) // 2 + 16 // 2) + 2 * 64 // 2
    one_layer = (none.activations - 2 * 2 * 16) // 3
    assert memory.activations == 3 * per_layer + one_layer + 2 * 2 * 16


def test_stages_of_zero_hold_weights_and_sums_whole():
    of = {"tokens_per_device": 32, "sparsity": WEIGHTS}
    three, two, one = (
        memory_bytes(SPLIT, mesh=dataclasses.replace(CUBE, zero_stage=stage), **of)
        for stage in (3, 2, 1)
    )
    # fsdp is 2.
    assert two.packed == one.packed == 2 * three.packed
    assert two.gathered == one.gathered == 0
    assert two.gradients == three.gradients
    # Of all layers and the head, halved by tensor, beside what each device keeps.
    whole = 4 * (3 * (768 + 2048) + 1024) // 2
    assert one.gradients == three.gradients + whole
    assert (one.parameters, one.moments) == (three.parameters, three.moments)
    # In float32 the weights that are gathered are copies of the parameters.
    single = dataclasses.replace(SPLIT, dtype="float32")
    of = {"tokens_per_device": 32, "mesh": dataclasses.replace(CUBE, zero_stage=2)}
    assert memory_bytes(single, **of).packed == whole
    alone = MeshConfig(data=1, zero_stage=1)
    assert memory_bytes(SPLIT, tokens_per_device=32, mesh=alone) == memory_bytes(
        SPLIT, tokens_per_device=32
    )


def test_replicas_hold_the_same():
    of = {"tokens_per_device": 32, "sparsity": WEIGHTS}
    four = memory_bytes(SPLIT, mesh=MeshConfig(data=4, fsdp=2, tensor=2), **of)
    assert four == memory_bytes(SPLIT, mesh=CUBE, **of)


def test_recomputation_saves_nothing_where_gradients_are_put_off():
    full = dataclasses.replace(SPLIT, remat="full", scan_layers=False)
    kept = lambda config, mesh: (
        memory_bytes(config, tokens_per_device=32, mesh=mesh).activations
    )
    for mesh in MeshConfig(data=1, fsdp=2, zero_stage=2), MeshConfig(data=2):
        none = kept(dataclasses.replace(full, remat="none"), mesh)
        assert kept(full, mesh) == none
        assert kept(dataclasses.replace(full, scan_layers=True), mesh) < none
    for mesh in MeshConfig(data=1, fsdp=2), MeshConfig(data=1):
        assert kept(full, mesh) == kept(
            dataclasses.replace(full, scan_layers=True), mesh
        )


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
