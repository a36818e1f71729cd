"""The optimisers by name on a mesh of eight devices, against one device."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from sparsejax.config import MeshConfig, OptimizerConfig, TrainConfig
from sparsejax.training.run import Run
from tests.support.micro_run import arrays_of, micro_config


def after_two_steps(config: TrainConfig) -> tuple[Run, list[float], dict]:
    run = Run(config, devices=jax.devices()[: config.mesh.devices])
    sparsity = run.phases[0].held
    state, batches, losses = run.initial_state(sparsity), run.batches(), []
    for _ in range(2):
        tokens = run.place(next(batches)["tokens"])
        state, report = run.step(sparsity)(state, tokens)
        losses.append(float(report["loss"]))
    return run, losses, arrays_of(state)


@pytest.mark.parametrize("name", ["lion", "muon"])
def test_steps_are_those_of_one_device(name, text):
    config = replace(micro_config(text), batch_size=16, micro_batches=1)
    model = replace(config.model, d_model=32, heads=8, kv_heads=8, d_hidden=128)
    rule = OptimizerConfig(name=name, peak_learning_rate=1e-3, warmup_share=0.0)
    config = replace(config, model=model, optimizer=rule, mesh=MeshConfig(data=1))
    _, losses, arrays = after_two_steps(config)
    on_mesh = replace(config, mesh=MeshConfig(data=2, fsdp=2, tensor=2))
    run, mesh_losses, mesh_arrays = after_two_steps(on_mesh)
    # Float32 sums of other orders.
    np.testing.assert_allclose(mesh_losses, losses, rtol=1e-5)
    split = [path for path in arrays if "mu" in path and "w_up" in path]
    template = dict(
        (jax.tree_util.keystr(path), leaf)
        for path, leaf in jax.tree.leaves_with_path(run.template(run.phases[0].held))
    )
    for path in split:
        np.testing.assert_allclose(mesh_arrays[path], arrays[path], atol=1e-6)
        shard = template[path].sharding.shard_shape(template[path].shape)
        assert np.prod(shard) * 4 == template[path].size  # over fsdp x tensor
    assert split
