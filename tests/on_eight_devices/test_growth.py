"""A model that grows on a mesh is the one that grows on one device."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from sparsejax.config import MeshConfig, PhaseConfig, TrainConfig
from sparsejax.training.step import Run
from tests.support.micro_run import arrays_of, micro_config

SCHEDULE = (
    PhaseConfig(name="small", share=0.5, d_hidden=64, layers=1),
    PhaseConfig(name="whole"),
)


def grown(config: TrainConfig) -> tuple[dict[str, np.ndarray], list[float]]:
    """The state after the growth, and the losses of a step and a validation on both of
    its sides."""
    run = Run(config, devices=jax.devices()[: config.mesh.devices])
    small, whole = run.phases
    before = run.of_phase(small)
    tokens = run.place(next(run.batches())["tokens"])
    state, first = before.step(small.sparsity)(before.initial_state(), tokens)
    losses = [float(first["loss"]), before.validate(state, small.sparsity)]
    state = run.switch_phase(state, small, whole)
    arrays = arrays_of(state)
    losses.append(run.validate(state, whole.sparsity))
    state, second = run.step(whole.sparsity)(state, tokens)
    return arrays, [*losses, float(second["loss"])]


@pytest.mark.parametrize("sizes", [(1, 8, 1), (1, 1, 8), (2, 2, 2)])
def test_the_state_and_its_losses_are_those_of_one_device(sizes, text):
    config = replace(micro_config(text), batch_size=16, micro_batches=1)
    model = replace(config.model, d_model=32, heads=8, kv_heads=8, d_hidden=128)
    config = replace(config, model=model).with_schedule(SCHEDULE)
    data, fsdp, tensor = sizes
    mesh = MeshConfig(data=data, fsdp=fsdp, tensor=tensor)
    arrays, losses = grown(replace(config, mesh=mesh))
    expected, wanted = grown(replace(config, mesh=MeshConfig(data=1)))
    # float32 sums in another order, before an Adam step that divides by small ones.
    np.testing.assert_allclose(losses, wanted, rtol=1e-5)
    assert arrays.keys() == expected.keys()
    for name, array in arrays.items():
        np.testing.assert_allclose(array, expected[name], rtol=1e-3, atol=2e-5)
        assert array.shape == expected[name].shape, name
