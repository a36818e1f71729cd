"""A whole run of gated FFNs whose tokens use the neurons of their experts only."""

from dataclasses import replace

import numpy as np

from sparsejax.config.config_file import from_json, to_json
from sparsejax.sparsity.patterns import VNM
from sparsejax.training.train import train
from tests.support.micro_run import micro_config, read_records, with_phases, write_text


def test_a_swiglu_run_trains_clusters_and_ends_dense(tmp_path):
    folder = tmp_path / "text"
    folder.mkdir()
    config = micro_config(write_text(folder), recipe="paper", eval_every=3)
    config = with_phases(
        config,
        activations=VNM(8, 4, 16),
        router="activation_energy",
        recluster_every=2,
        sparse_share=0.75,
    )
    config = replace(config, model=replace(config.model, activation="swiglu"))
    assert from_json(to_json(config)) == config
    outcome = train(config, tmp_path / "run")
    assert outcome.completed
    records = read_records(tmp_path / "run")
    losses = [r["loss"] for r in records if r["event"] == "step"]
    assert len(losses) == 12 and losses[-1] < losses[0]
    assert [r["step"] for r in records if r["event"] == "recluster"] == [5, 7, 9, 11]
    health = [r for r in records if r["event"] == "ffn" and "router_mass" in r]
    assert health
    for record in health:
        chosen, best = np.array(record["router_mass"]), np.array(record["oracle_mass"])
        # This router is the best one; SwiGLU has no density to report.
        assert (chosen > 0).all() and "density" not in record
        np.testing.assert_allclose(chosen, best, rtol=1e-6)
