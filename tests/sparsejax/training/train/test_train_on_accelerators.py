"""Whole training steps on accelerators without kernels of ours: they lower."""

from dataclasses import replace

import jax
import pytest

from sparsejax.config import ModelConfig
from sparsejax.routing.routers import ActivationEnergy
from sparsejax.sparsity.patterns import VNM
from sparsejax.training.run import Run
from tests.support.devices import accelerators
from tests.support.micro_run import micro_config, with_phases, write_text


@pytest.mark.parametrize(
    ("device", "platform", "call"),
    [
        (accelerators.B200, "cuda", "custom_call @mosaic_gpu"),
        (accelerators.TPU, "tpu", "custom_call @tpu_custom_call"),
    ],
    ids=["B200", "TPU"],
)
def test_a_routed_step_lowers_with_tokamax(device, platform, call, tmp_path):
    """In a scan over layers, in one over micro-batches, on a mesh, recomputed."""
    model = ModelConfig(
        vocab_size=256,
        d_model=128,
        layers=2,
        heads=2,
        kv_heads=1,
        d_hidden=512,
        dtype="bfloat16",
        remat="dots",
    )
    config = micro_config(write_text(tmp_path), recipe="paper", micro_batches=2)
    config = with_phases(
        replace(config, model=model),
        activations=VNM(8, 4, 16),
        router=ActivationEnergy(),
    )
    with accelerators.traced_for(device):
        run = Run(config)
        sparsity = run.phases[1].sparsity
        tokens = jax.ShapeDtypeStruct((2, 2, 17), "int32")
        traced = run.step(sparsity).trace(run.template(sparsity), tokens)
        text = traced.lower(lowering_platforms=(platform,)).as_text()
    assert call in text
