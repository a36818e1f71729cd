"""The predicted bytes of each mesh axis against the collectives of compiled steps.

A step of one layer, d_model 32, 8 heads, 128 neurons, 256 tokens of vocabulary, sixteen
sequences of sixteen, float32, one micro-batch, remat "full"; dense where nothing else
is said.
"""

import math
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from sparsejax.config import MeshConfig
from sparsejax.cost_model import exchanges
from sparsejax.feed_forward.experts.penalty import GROUPS, SIGNS, Penalty, penalised
from sparsejax.feed_forward.layout import FFNLayout
from sparsejax.feed_forward.sparsity import DENSE, FFNSparsity
from sparsejax.sparsity.patterns import VNM
from sparsejax.training.run import Run
from tests.support.micro_run import micro_config

ATTENTION, MATRIX, VOCABULARY = 32 * 32, 32 * 128, 32 * 256
VECTORS = 3 * 32
ALL = "all-reduce"


def lowered(text, mesh, sparsity=DENSE, **changes):
    """The step before XLA compiles it, and its model's settings."""
    config = replace(micro_config(text, recipe="dense"), batch_size=16)
    model = replace(
        config.model,
        d_model=32,
        layers=1,
        heads=8,
        kv_heads=8,
        d_hidden=128,
        remat="full",
        scan_layers=False,
    )
    model = replace(model, **changes)
    config = replace(config, model=model, micro_batches=1, mesh=mesh)
    run = Run(config, devices=jax.devices())
    tokens = run.place(next(run.batches())["tokens"])
    return run.step(sparsity).lower(run.template(sparsity), tokens), model


def compiled(text, mesh, sparsity=DENSE, **changes):
    """Which arrays each collective of the step gives, (kind, devices of a group,
    numbers), without scalars, and what is predicted of it, (purpose, axis): bytes."""
    step, model = lowered(text, mesh, sparsity, **changes)
    program = step.compile().as_text()
    arrays = []
    for line in program.splitlines():
        kinds = "all-gather|reduce-scatter|all-reduce|all-to-all"
        found = re.search(rf"= (.*?) ({kinds})\(.*replica_groups=(\S+ ?\S*)", line)
        if found is None:
            continue
        results, kind, groups = found.groups()
        devices = group_size(groups)
        for name, shape in re.findall(r"([fus]32)\[([\d,]+)\]", results):
            size = math.prod(map(int, shape.split(",")))
            arrays.append((kind, devices, name, size))
    tokens_per_device = 16 * 16 // mesh.token_shards
    sent = exchanges(model, mesh, sparsity, 1, tokens_per_device)
    return arrays, {(of.purpose, of.axis): of.received for of in sent}


def group_size(groups: str) -> int:
    """The devices of each group that exchange, in both ways in which XLA writes it."""
    if of_list := re.match(r"\[\d+,(\d+)\]", groups):
        return int(of_list[1])
    axes, named = groups.split("]")
    sizes = dict(re.findall(r"'(\w+)'=(\d+)", axes))
    return math.prod(int(sizes[name]) for name in re.findall(r"'(\w+)'", named))


def test_replicas_and_tensor_receive_what_is_predicted(text):
    arrays, predicted = compiled(text, MeshConfig(data=4, tensor=2))
    assert {kind for kind, *_ in arrays} == {"all-reduce"}
    # Each of four replicas has half of every matrix, and all vectors. A ring's sum of
    # n devices is received twice, but for the share 1 / n.
    numbers = sum(size for _, devices, _, size in arrays if devices == 4)
    assert numbers == (4 * ATTENTION + 2 * MATRIX + 2 * VOCABULARY) // 2 + VECTORS
    replicas = predicted.pop(("reduced_gradients", "data"))
    assert replicas == 2 * 3 * 4 * numbers // 4
    # Sums of activations of 64 tokens x 32: embedding, attention, FFN, attention again,
    # their two gradients, the head's. XLA on CPUs sums query's, key's and value's
    # gradients one by one, two more. A number per token is the softmax's.
    over_tensor = [size for _, devices, _, size in arrays if devices == 2]
    assert set(over_tensor) == {64 * 32, 64}
    assert over_tensor.count(64 * 32) - 2 == 7
    tensor = predicted.pop(("reduced_activations", "tensor"))
    assert tensor == 2 * 7 * 4 * 64 * 32 // 2
    assert predicted == {}


def test_whole_weights_are_gathered_once_as_predicted(text):
    for stage in (1, 2):
        mesh = MeshConfig(data=1, fsdp=8, zero_stage=stage)
        arrays, predicted = compiled(text, mesh)
        gathered = [
            size
            for kind, _, name, size in arrays
            if kind == "all-gather" and name != "s32"
        ]
        assert sum(gathered) == 4 * ATTENTION + 2 * MATRIX + VOCABULARY
        weights = predicted["gathered_weights", "fsdp"]
        assert weights == 7 * 4 * sum(gathered) // 8
        # XLA on CPUs sums whole what each device needs an eighth of.
        summed = [size for kind, _, _, size in arrays if kind == "all-reduce"]
        assert sum(summed) == 4 * ATTENTION + 2 * MATRIX + VOCABULARY + VECTORS
        gradients = predicted["reduced_gradients", "fsdp"]
        assert gradients == 7 * 4 * (sum(summed) + VECTORS) // 8


@pytest.mark.parametrize("tied", [False, True])
def test_the_head_is_rounded_before_it_is_gathered(text, tied):
    """As it is lowered: XLA on CPUs gathers bfloat16 in float32."""
    mesh = MeshConfig(data=1, fsdp=8)
    step, _ = lowered(text, mesh, dtype="bfloat16", tie_embeddings=tied)
    shape, split = ("256x32", '{}, {"fsdp"}') if tied else ("32x256", '{"fsdp"}, {}')
    rounded = re.findall(
        rf"(%\d+) = stablehlo.convert .*tensor<{shape}xbf16>", step.as_text()
    )
    placed = f"<@mesh, [{split}]> : tensor<{shape}xbf16>"
    assert any(
        f"sdy.sharding_constraint {of} {placed}" in step.as_text() for of in rounded
    )


def test_whole_gradients_are_summed_over_replicas_and_shards_at_once(text):
    mesh = MeshConfig(data=2, fsdp=4, zero_stage=1)
    arrays, predicted = compiled(text, mesh)
    summed = {
        devices: sum(
            size for kind, of, _, size in arrays if (kind, of) == (ALL, devices)
        )
        for devices in (2, 8)
    }
    assert summed[8] == 4 * ATTENTION + 2 * MATRIX + VOCABULARY + VECTORS
    assert predicted["reduced_gradients", "batch"] == 2 * 7 * 4 * summed[8] // 8
    # The embedding's, of which each device of fsdp has its columns.
    assert summed[2] == VOCABULARY // 4
    assert predicted["reduced_gradients", "data"] == 2 * 4 * summed[2] // 2
    assert ("reduced_gradients", "fsdp") not in predicted


def test_fsdp_receives_what_is_predicted(text):
    arrays, predicted = compiled(text, MeshConfig(data=1, fsdp=8))
    assert {devices for _, devices, _, _ in arrays} == {8}
    # A layer is gathered for the forward and for the backward, the head once. What is
    # s32 are tokens.
    gathered = [
        size for kind, _, name, size in arrays if kind == "all-gather" and name != "s32"
    ]
    assert sum(gathered) == 2 * (4 * ATTENTION + 2 * MATRIX) + VOCABULARY
    weights = predicted.pop(("gathered_weights", "fsdp"))
    assert weights == 7 * 4 * sum(gathered) // 8
    # A scatter gives the eighth of what it sums. XLA on CPUs sums attention's and the
    # head's gradients whole, of which each device needs an eighth. Vectors are summed.
    of_scatters = [size for kind, _, _, size in arrays if kind == "reduce-scatter"]
    assert 8 * sum(of_scatters) == 2 * MATRIX
    summed = [size for kind, _, _, size in arrays if kind == "all-reduce"]
    assert sum(summed) == 4 * ATTENTION + VOCABULARY + VECTORS
    gradients = predicted.pop(("reduced_gradients", "fsdp"))
    scattered = 2 * MATRIX + 4 * ATTENTION + VOCABULARY
    assert gradients == 7 * 4 * (scattered + 2 * VECTORS) // 8
    # A device has the columns of the embedding, of all tokens: their rows come, and
    # their gradients go back.
    exchanged = [size for kind, _, _, size in arrays if kind == "all-to-all"]
    assert sum(exchanged) == 2 * (2 * 16) * 32
    tokens = predicted.pop(("exchanged_tokens", "fsdp"))
    assert tokens == 7 * 4 * sum(exchanged) // 8
    assert predicted == {}


@pytest.mark.parametrize("d_model", [32, 4 * SIGNS])
def test_the_penalty_sums_projected_columns_and_no_gradient_anew(text, d_model):
    model = {"d_model": d_model, "d_hidden": 4 * GROUPS}
    experts = FFNSparsity(
        activations=VNM(4, 4, 16),
        router="activation_energy",
        weight_gradients="expert_columns",
    )
    mesh = MeshConfig(data=8)
    without, predicted = compiled(text, mesh, experts, **model)
    penalised = replace(experts, skipped_energy=0.05)
    with_penalty, as_predicted = compiled(text, mesh, penalised, **model)
    assert predicted == as_predicted
    of_both = [
        sum(size for kind, _, _, size in arrays if kind == ALL and size > 1)
        for arrays in (without, with_penalty)
    ]
    # The columns of both gradients, and the loads of the experts.
    columns = 2 * min(d_model, SIGNS) * GROUPS
    assert columns <= of_both[1] - of_both[0] <= columns + 2 * 4


def test_the_penaltys_projection_of_split_neurons_is_that_of_one_device():
    auto = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=auto)
    layout = FFNLayout(mesh=mesh)
    normal = lambda of, *shape: jax.random.normal(jax.random.key(of), shape)
    # Two shares of the tokens; equal columns have the norm that their signs make.
    x, dy, dw = normal(0, 2, 8, 96), normal(1, 2, 8, 4 * GROUPS), normal(2, 2, 96, 1)
    dw = jnp.tile(dw, 4 * GROUPS)
    strength = jnp.array([0.25])
    whole = Penalty(x.reshape(16, 96), dy.reshape(16, -1), strength)
    expected = penalised(dw.sum(axis=0), whole)

    def on_device(x, dy, dw):
        own = Penalty(x[0], dy[0], strength)
        return jax.lax.psum(penalised(dw[0], own, layout), "data")

    split = jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=(P("data"), P("data", None, "tensor"), P("data", None, "tensor")),
        out_specs=P(None, "tensor"),
        check_vma=False,
    )
    got = jax.jit(split)(x, dy, dw)
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)
