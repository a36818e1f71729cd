"""The arrays that a mesh splits and the sizes that it refuses; meshes of devices are in
on_eight_devices."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from sparsejax.config import MeshConfig, ModelConfig
from sparsejax.distributed.mesh import (
    AXES,
    BATCH,
    batch_parts,
    check_shardable,
    constrain,
    ffn_layout,
    local_rows,
    make_mesh,
    place_rows,
    sharding_of,
    state_shardings,
)
from sparsejax.feed_forward.sparsity import DENSE, FFNSparsity
from sparsejax.models.transformer import Transformer
from sparsejax.sparsity.patterns import NM, VNM
from sparsejax.training.run import Run
from tests.support.micro_run import micro_config, write_text

MODEL = ModelConfig(
    vocab_size=64, d_model=32, layers=2, heads=8, kv_heads=4, d_hidden=96
)


@pytest.mark.parametrize(
    ("change", "mesh", "micro_batch", "message"),
    [
        ({}, (4, 2, 1), 12, r"12 sequences .* mesh.data x mesh.fsdp = 4 x 2"),
        ({"heads": 6, "d_model": 24, "kv_heads": 6}, (1, 1, 4), 8, "model.heads=6 .*"),
        ({}, (1, 1, 8), 8, r"model.kv_heads=4 .* mesh.tensor=8"),
        ({"vocab_size": 65}, (1, 1, 2), 8, r"model.vocab_size=65 .* mesh.tensor=2"),
        ({"d_model": 48}, (1, 32, 1), 32, r"model.d_model=48 .* mesh.fsdp=32"),
        ({"d_hidden": 90}, (1, 4, 1), 8, r"d_hidden=90 .* tensor x fsdp"),
    ],
)
def test_what_cannot_be_split_is_refused_with_axis_and_size(
    change, mesh, micro_batch, message
):
    model = replace(MODEL, **change)
    data, fsdp, tensor = mesh
    config = MeshConfig(data=data, fsdp=fsdp, tensor=tensor)
    with pytest.raises(ValueError, match=message):
        check_shardable(model, [DENSE], config, micro_batch=micro_batch)


@pytest.mark.parametrize(
    ("sparsity", "message"),
    [
        (FFNSparsity(activations=NM(2, 4)), "groups of 4 .* must not straddle"),
        (FFNSparsity(activations=VNM(8, 2, 24)), "6 experts .* must not straddle"),
    ],
)
def test_groups_and_experts_of_any_phase_count(sparsity, message):
    model = replace(MODEL, heads=16, kv_heads=16, d_hidden=48 * 2)
    mesh = MeshConfig(data=1, tensor=16)
    with pytest.raises(ValueError, match=message):
        check_shardable(model, [DENSE, sparsity], mesh, micro_batch=8)


def test_what_fits_is_accepted_for_devices_that_are_not_here():
    model = ModelConfig(heads=16, kv_heads=16, d_model=512, d_hidden=8192)
    mesh = MeshConfig(data=32, fsdp=8, tensor=16)
    sparsity = FFNSparsity(weights=NM(2, 4), activations=VNM(64, 2, 64))
    check_shardable(model, [DENSE, sparsity], mesh, micro_batch=256)


def test_one_device_has_a_mesh_and_nothing_is_split_on_it():
    mesh = make_mesh(MeshConfig())
    assert dict(mesh.shape) == dict.fromkeys(AXES, 1)
    assert ffn_layout(mesh) is None and ffn_layout(None) is None
    x = jnp.ones((2, 2))
    assert constrain(x, mesh, "data", "tensor") is x
    assert sharding_of(mesh, ("data", "fsdp"), "tensor").spec == PartitionSpec()


def test_a_sharding_has_one_spelling():
    mesh = AbstractMesh((2, 1, 4), AXES)
    spec_of = lambda *axes: sharding_of(mesh, *axes).spec
    assert spec_of(("data", "fsdp"), None, None) == PartitionSpec("data")
    assert spec_of(None, ("tensor", "fsdp")) == PartitionSpec(None, "tensor")
    assert spec_of(None, "fsdp") == PartitionSpec()
    both = AbstractMesh((2, 2, 4), AXES)
    split = sharding_of(both, None, ("tensor", "fsdp")).spec
    assert split == PartitionSpec(None, ("tensor", "fsdp"))


def test_one_process_reads_and_places_all_rows():
    mesh = make_mesh(MeshConfig())
    assert local_rows(mesh, 6) == list(range(6))
    rows = np.arange(24, dtype=np.int32).reshape(2, 6, 2)
    placed = place_rows(rows, mesh, axis=1, size=6)
    assert isinstance(placed, jax.Array) and np.array_equal(placed, rows)


def test_every_matrix_of_the_state_is_split_and_nothing_else(tmp_path):
    # All names of parameters and of moments, on a mesh that is not here.
    run = Run(micro_config(write_text(tmp_path)))
    mesh = AbstractMesh((1, 2, 2), AXES)
    state = run.template(run.phases[0].sparsity)
    shardings = jax.tree.leaves_with_path(state_shardings(state, mesh))
    specs = {jax.tree_util.keystr(path): s.spec for path, s in shardings}
    for path, leaf in jax.tree.leaves_with_path(state):
        name = jax.tree_util.keystr(path)
        is_matrix = leaf.ndim >= 2 and "scale" not in name
        assert (specs[name] != PartitionSpec()) == is_matrix, name
    neurons = ("tensor", "fsdp")
    by_end = {
        "['ffn']['w_up'].value": PartitionSpec(None, None, neurons),
        "['ffn']['w_down'].value": PartitionSpec(None, neurons),
        "['attention']['w_out'].value": PartitionSpec(None, "tensor", "fsdp"),
        "['embedding'].value": PartitionSpec("tensor", "fsdp"),
    }
    for end, spec in by_end.items():
        found = [s for name, s in specs.items() if name.endswith(end)]
        assert found == [spec] * 3, end


def test_a_model_without_a_mesh_is_one_for_one_device():
    model = Transformer(MODEL, rngs=nnx.Rngs(0))
    assert model.mesh is None and model.blocks.ffn.layout is None


def test_explicit_axes_become_automatic_where_the_mesh_is_given():
    explicit = (AxisType.Explicit,) * 3
    mesh = AbstractMesh((2, 2, 2), AXES, axis_types=explicit)
    model = Transformer(MODEL, mesh=mesh, rngs=nnx.Rngs(0))
    automatic = (AxisType.Auto,) * 3
    assert model.mesh.axis_types == automatic
    assert model.blocks.ffn.layout.mesh.axis_types == automatic


def test_a_mesh_may_lack_axes_but_not_all_of_them():
    two = AbstractMesh((2, 4), ("data", "tensor"))
    assert batch_parts(two) == 2 and batch_parts(AbstractMesh((4,), ("tensor",))) == 1
    spec = sharding_of(two, BATCH, ("tensor", "fsdp"), "fsdp").spec
    assert spec == PartitionSpec("data", "tensor")
    with pytest.raises(ValueError, match=r"the axes \('x',\) and none of .*tokens=\("):
        ffn_layout(AbstractMesh((8,), ("x",)))
