"""A model that grows on a mesh is the one that grows on one device."""

from dataclasses import replace
from functools import lru_cache

import jax
import numpy as np
import pytest

from sparsejax.config import MeshConfig, PhaseConfig, TrainConfig
from sparsejax.sparsity.patterns import NM, BlockDiagonal
from sparsejax.training.run import Run
from tests.support.micro_run import arrays_of, micro_config

WHOLE = PhaseConfig(name="whole")
SCHEDULES = {
    "small": (PhaseConfig(name="small", share=0.5, d_hidden=64, layers=1), WHOLE),
    "blocks": (
        PhaseConfig(name="small", share=0.5, static_weights=BlockDiagonal(4)),
        WHOLE,
    ),
    "masks": (PhaseConfig(name="small", share=0.5, static_weights=NM(2, 4)), WHOLE),
}


@lru_cache
def grown(config: TrainConfig) -> tuple[dict[str, np.ndarray], list[float]]:
    """The state after the growth, and the losses of a step and a validation on both of
    its sides."""
    run = Run(config, devices=jax.devices()[: config.mesh.devices])
    small, whole = run.phases
    before = run.of_phase(small)
    tokens = run.place(next(run.batches())["tokens"])
    state = before.initial_state(small.held)
    state, first = before.step(small.sparsity)(state, tokens)
    losses = [float(first["loss"]), before.validate(state, small.sparsity)]
    state = run.switch_phase(state, small, whole)
    arrays = arrays_of(state)
    losses.append(run.validate(state, whole.sparsity))
    state, second = run.step(whole.sparsity)(state, tokens)
    return arrays, [*losses, float(second["loss"])]


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("small", (1, 8, 1)),
        ("small", (1, 1, 8)),
        ("small", (2, 2, 2)),
        ("blocks", (1, 8, 1)),
        ("blocks", (1, 2, 4)),
        ("masks", (2, 2, 2)),
    ],
)
def test_the_state_and_its_losses_are_those_of_one_device(name, sizes, text):
    config = replace(micro_config(text), batch_size=16, micro_batches=1)
    model = replace(config.model, d_model=32, heads=8, kv_heads=8, d_hidden=128)
    config = replace(config, model=model).with_schedule(SCHEDULES[name])
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


def test_groups_that_a_mesh_would_cut_are_refused(text):
    config = replace(micro_config(text), batch_size=16, micro_batches=1)
    model = replace(config.model, d_model=32, heads=8, kv_heads=8, d_hidden=128)
    config = replace(config, model=model).with_schedule(SCHEDULES["blocks"])
    with pytest.raises(ValueError, match=r"are 4 groups, not a multiple of mesh.tens"):
        Run(replace(config, mesh=MeshConfig(tensor=8)))
    narrow = replace(model, d_model=16, heads=8)
    with pytest.raises(ValueError, match=r"d_model=16 in 4 groups is not a multiple"):
        Run(replace(config, model=narrow, mesh=MeshConfig(fsdp=8)))
