"""Weights of a folder on a mesh of eight devices, against one device."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from sparsejax.config import MeshConfig
from sparsejax.data.tokenizers import ByteTokenizer
from sparsejax.interchange.export import export_huggingface
from sparsejax.interchange.pretrained import Pretrained
from sparsejax.models.transformer import Transformer
from sparsejax.training.resume import state_with
from sparsejax.training.run import Run
from tests.support.files.exported_models import some_model
from tests.support.micro_run import arrays_of, micro_config, with_phases


@pytest.mark.parametrize("recipe", ["two-four", "paper"])
def test_the_state_is_that_of_one_device_and_split(recipe, text, tmp_path):
    config = replace(micro_config(text), batch_size=16, micro_batches=1)
    model = replace(config.model, d_model=32, heads=8, kv_heads=8, d_hidden=128)
    config = with_phases(replace(config, model=model, recipe=recipe), warmup_share=0.0)
    given: Transformer = some_model(model)
    folder = tmp_path / "model"
    export_huggingface(given, folder, sequence_length=16, tokenizer=ByteTokenizer())
    parameters = Pretrained.read(folder).parameters()
    states = []
    for sizes in ((1, 1, 1), (2, 2, 2)):
        data, fsdp, tensor = sizes
        mesh = MeshConfig(data=data, fsdp=fsdp, tensor=tensor)
        devices = jax.devices()[: mesh.devices]
        run = Run(replace(config, mesh=mesh), devices=devices)
        sparsity = run.phases[0].held
        state = state_with(run, parameters, sparsity)
        states.append((arrays_of(state), run.validate(state, sparsity)))
        up = state.params["blocks"]["ffn"]["w_up"].get_value()
        assert up.addressable_shards[0].data.size * fsdp * tensor == up.size
    (one, loss), (eight, mesh_loss) = states
    # Float32 sums of other orders: scales and centres alone are summed.
    assert mesh_loss == pytest.approx(loss, rel=1e-5)
    for name, array in one.items():
        np.testing.assert_allclose(eight[name], array, rtol=1e-5, atol=1e-6)
