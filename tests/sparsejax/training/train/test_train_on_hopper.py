"""Whole training steps whose 2:4 weights go through the (emulated) Hopper kernels."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from pallas_kernels import tuning
from sparsejax.config import RECIPES, ModelConfig
from sparsejax.reports import metrics
from sparsejax.reports.metrics import ffn_decisions
from sparsejax.routing.dispatch import dispatch
from sparsejax.routing.expert_sets import rows_of_sets
from sparsejax.routing.routers import ActivationEnergy
from sparsejax.sparsity.patterns import VNM
from sparsejax.training.run import Run
from tests.support.devices import hopper
from tests.support.micro_run import arrays_of, micro_config, with_phases, write_text


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


@pytest.mark.parametrize(
    ("recipe", "phases"),
    [
        ("weights", {}),
        ("two-four", {"token_sparsity": "magnitude"}),
        ("paper", {"router": ActivationEnergy(), "experts_per_token": 2}),
        ("paper", {"router": ActivationEnergy(), "token_sparsity": "magnitude"}),
        ("paper", {"token_sparsity": "mvue"}),
        ("paper", {"skip_blocks": True, "token_sparsity": "magnitude"}),
    ],
)
def test_a_step_lowers_with_the_kernels_themselves(config, recipe, phases, monkeypatch):
    """Lowers them as a run traces them: in a scan over layers, in one over
    micro-batches, on a mesh."""
    jax.clear_caches()  # of traces made with the emulated ones
    hopper.see_device(monkeypatch)
    model = replace(config.model, d_hidden=512)
    config = replace(config, recipe=recipe, model=model, backend="mosaic_sm90")
    config = with_phases(config, **phases)
    run = Run(config)
    sparsity = run.phases[1].sparsity
    tokens = jax.ShapeDtypeStruct((2, 2, 17), "int32")
    traced = run.step(sparsity).trace(run.template(sparsity), tokens)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    decisions = ffn_decisions(config.model, sparsity, 32, "mosaic_sm90")
    sparse = sum(decision.backend == "mosaic_sm90" for decision in decisions)
    # Each GEMM's, and packing.
    assert text.count("custom_call @mosaic_gpu") > sparse >= 2


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


def test_the_router_is_timed_with_the_kernel_that_an_ffn_moves_rows_with(
    config, monkeypatch
):
    calls = hopper.pretend(monkeypatch)
    model = replace(config.model, d_hidden=512)
    sparsity = replace(RECIPES["paper"], activations=VNM(64, 2, 16))
    tiles = []
    monkeypatch.setattr(
        metrics, "dispatch", lambda *a: tiles.append(a[2]) or dispatch(*a)
    )
    # To the experts and back, in forward and backward.
    for backend, moved, tile in (("mosaic_sm90", 4, 128), ("xla", 0, 64)):
        calls.clear()
        decisions = ffn_decisions(model, sparsity, 32, backend)
        assert metrics.router_seconds(model, sparsity, 32, decisions) > 0
        assert calls == ["sum_rows"] * moved
        assert tiles.pop() == tile


def test_where_a_token_has_one_row_the_router_is_timed_with_it(config, monkeypatch):
    """X and dY are moved by the kernel, Y and dX by XLA."""
    calls, seen = hopper.pretend(monkeypatch), []
    model = replace(config.model, d_model=128, d_hidden=512, dtype="bfloat16")
    sparsity = replace(RECIPES["experts"], activations=VNM(128, 4, 16))
    monkeypatch.setattr(
        metrics, "rows_of_sets", lambda *a: seen.append(a[1:]) or rows_of_sets(*a)
    )
    decisions = ffn_decisions(model, sparsity, 3072)
    assert decisions[1].path.endswith("a row for all experts of a token")
    assert metrics.router_seconds(model, sparsity, 3072, decisions) > 0
    assert calls == ["sum_rows"] * 2
    assert seen == [(4, 128)]
