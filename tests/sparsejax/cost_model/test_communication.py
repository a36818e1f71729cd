"""The planned bytes between devices against those of traced steps."""

import dataclasses
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Literal
from jax.sharding import AbstractMesh, AxisType

from sparsejax.config import MeshConfig
from sparsejax.cost_model import (
    communication_bytes,
    exchanges,
    gathered_bytes,
    parameter_count,
)
from sparsejax.feed_forward.ffn import ffn
from sparsejax.feed_forward.gated_ffn import gated_ffn
from sparsejax.feed_forward.layout import FFNLayout
from sparsejax.feed_forward.operands.weights import pack_ffn
from sparsejax.feed_forward.sparsity import DENSE, FFNSparsity
from sparsejax.models.transformer import rematerialise
from sparsejax.routing.routers import ActivationEnergyFP8, NearestCentre
from sparsejax.sparsity.patterns import VNM
from tests.support.oracles.cost_cases import CUBE, LLAMA_1B, SPLIT, WEIGHTS

ROUTED = dataclasses.replace(WEIGHTS, activations=VNM(8, 4, 8))


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


GATED = dataclasses.replace(LLAMA_1B, activation="swiglu")


def test_a_gated_ffn_gathers_gate_and_up_alike():
    gated = dataclasses.replace(GATED, remat="full")
    matrix = 2048 * 8448 * 2
    sparse = gathered_bytes(gated, WEIGHTS)
    assert sparse.ffn_forward == matrix * (2 * 9 + 16) // 16
    assert sparse.ffn_backward == matrix * (9 + 2 * 16) // 16
    assert sparse.ffn_recomputed == matrix * 2 * 9 // 16


def test_a_router_of_8_bit_floats_gathers_a_byte_for_each_number_besides():
    rounded = FFNSparsity(
        activations=VNM(128, 4, 32),
        router=ActivationEnergyFP8(),
        skip_blocks=True,
        weight_gradients="expert_columns",
    )
    given = dataclasses.replace(rounded, router=NearestCentre())
    for model, into_hidden in ((LLAMA_1B, 1), (GATED, 2)):
        got, without = (gathered_bytes(model, of) for of in (rounded, given))
        assert got.ffn_forward - without.ffn_forward == into_hidden * 2048 * 8448
        assert got.ffn_backward == without.ffn_backward


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


def test_gradients_over_data_are_summed_once_without_a_loop_over_layers():
    def over_data(micro_batches, **changes):
        config = dataclasses.replace(SPLIT, **changes)
        sent = exchanges(config, CUBE, DENSE, micro_batches, 32)
        (of,) = [of for of in sent if of.axis == "data"]
        return np.array([of.received, of.collectives])

    one, three = over_data(1, scan_layers=False), over_data(3, scan_layers=False)
    assert (three == one).all()
    assert (over_data(1, scan_layers=True) == one).all()
    assert (over_data(3, scan_layers=True) == 3 * one).all()
    # What an embedding's two uses give is summed by itself, as those of two weights.
    assert (over_data(3, scan_layers=False, tie_embeddings=True) == one).all()


def test_stages_of_zero_move_weights_and_gradients_once():
    def moved(stage, micro_batches):
        # With replicas XLA sums over both axes at once: tests/on_eight_devices.
        mesh = dataclasses.replace(CUBE, data=1, zero_stage=stage)
        sent = exchanges(SPLIT, mesh, DENSE, micro_batches, 32)
        return {(of.purpose, of.axis): of for of in sent}

    weights, sums = ("gathered_weights", "fsdp"), ("reduced_gradients", "fsdp")
    tokens = ("exchanged_tokens", "fsdp")
    for stage in (1, 2):
        three = moved(stage, 3)
        # bfloat16, of all layers and the head, each half of which comes.
        read = 2 * (3 * (768 + 2048) + 1024) // 2
        assert three[weights].received == read // 2 and three[weights].once
        assert three[tokens].received == 3 * moved(stage, 1)[tokens].received
    each = moved(3, 1)[sums]
    assert moved(2, 3)[sums].received == moved(3, 3)[sums].received == 3 * each.received
    assert moved(1, 3)[sums] == dataclasses.replace(each, once=True)


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


@pytest.mark.parametrize(
    "sparsity", [DENSE, WEIGHTS, ROUTED], ids=["dense", "2:4", "V:N:M"]
)
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
            if sparsity.experts:
                facts["expert_index"] = jnp.zeros((tokens, 1), jnp.int32)
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
