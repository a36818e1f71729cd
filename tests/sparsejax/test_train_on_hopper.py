"""Whole training steps whose 2:4 weights go through the (emulated) Hopper kernels."""

from dataclasses import replace

import numpy as np
import pytest

import hopper
from pallas_kernels import tuning
from sparsejax.config import ModelConfig
from sparsejax.train import Run
from tests.micro_run import arrays_of, micro_config, with_phases, write_text


@pytest.fixture
def config(tmp_path):
    config = micro_config(write_text(tmp_path), recipe="weights", micro_batches=2)
    model = ModelConfig(
        vocab_size=256,
        d_model=64,
        layers=2,
        heads=2,
        kv_heads=1,
        d_hidden=128,
        dtype="bfloat16",
        remat="dots",
    )
    return with_phases(replace(config, model=model), warmup_share=0.25)


def one_sparse_step(config):
    """The report of a step of the sparse phase, and the state after it."""
    run = Run(config)
    dense, sparse = (phase.sparsity for phase in run.phases[:2])
    state = run.switch(run.initial_state(), dense, sparse)
    tokens = next(run.batches())["tokens"]
    state, report = run.step(sparse)(state, tokens)
    return {name: float(value) for name, value in report.items()}, arrays_of(state)


@pytest.mark.parametrize("activation", ["relu2", "swiglu"])
def test_a_step_is_that_of_the_reference_and_packs_once(
    config, activation, monkeypatch
):
    monkeypatch.setattr(tuning, "LEAST_FLOPS", 0)
    monkeypatch.setattr(tuning, "entries", lambda kind: {})
    config = replace(config, model=replace(config.model, activation=activation))
    calls = hopper.pretend(monkeypatch)
    report, state = one_sparse_step(config)
    # All layers and both micro-batches share one packing of each weight.
    assert calls.count("compress") == (3 if activation == "swiglu" else 2)
    assert "sparse_matmul" in calls
    calls.clear()
    expected, reference = one_sparse_step(replace(config, backend="reference"))
    assert calls == []
    # bfloat16 activations, rounded in two orders.
    for name in ("loss", "gradient_norm"):
        assert report[name] == pytest.approx(expected[name], rel=2**-7)
    for name, array in state.items():
        if "params" in name:
            assert np.all(np.isfinite(array)), name
    assert set(state) == set(reference)
