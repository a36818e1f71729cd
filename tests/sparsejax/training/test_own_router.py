"""A run with a router that the library does not have, registered and nothing else."""

import io
from dataclasses import dataclass, replace

import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from sparsejax.checkpoints.checkpoint import Checkpoints
from sparsejax.command.train import read_options
from sparsejax.config.config_file import from_json, to_json
from sparsejax.models.ffn_state import arrays_of
from sparsejax.reports.metrics import ffn_decisions, router_seconds
from sparsejax.routing import named_routers
from sparsejax.routing.routers import Router, State
from sparsejax.sparsity.patterns import VNM
from sparsejax.terminal import console, printed_plan
from sparsejax.training.run import Run
from sparsejax.training.train import train
from tests.support.micro_run import (
    arguments_of,
    micro_config,
    read_records,
    with_phases,
    write_text,
)


@dataclass(frozen=True)
class LinearLogMass(Router):
    """The log of an expert's mass, as a line in the token: log mass_e = <x, w_e> + b_e,
    with the mean column of the expert and the log of the columns' mean length."""

    name = "linear_log_mass"
    reads = "x"
    slope: float = 2.0

    def initial_state(self, w_up, experts: int) -> State:
        columns = w_up.reshape(w_up.shape[0], experts, -1)
        lengths = jnp.linalg.norm(columns, axis=0)
        return {
            "weights": self.slope * columns.mean(axis=2).T,
            "bias": jnp.log(lengths.mean(axis=1)),
        }

    def scores(self, read, experts: int, state: State):
        assert state["weights"].shape[0] == experts
        return read.astype(jnp.float32) @ state["weights"].T + state["bias"][None]


OWN = LinearLogMass()


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.setattr(named_routers, "ROUTERS", (*named_routers.ROUTERS, OWN))
    folder = tmp_path / "text"
    folder.mkdir()
    config = micro_config(write_text(folder), recipe="paper", eval_every=3)
    return with_phases(config, router="linear_log_mass", recluster_every=2)


def test_settings_name_it_in_files_flags_and_the_plan(config, monkeypatch):
    assert config.sparsity.router is OWN
    assert to_json(config)["phases"]["sparsity"]["router"] == "linear_log_mass"
    assert from_json(to_json(config)) == config
    assert read_options(arguments_of(config)).config == config
    printed = io.StringIO()
    monkeypatch.setattr(console, "STDOUT", Console(file=printed, width=200))
    printed_plan.announce(config, predicted=True)
    assert "8:2:16: 1 of 4 experts by linear_log_mass" in printed.getvalue()
    other = replace(OWN, slope=1.0)
    with pytest.raises(
        ValueError, match=r"slope=1.0\) cannot be written into settings"
    ):
        to_json(with_phases(config, router=other))


def test_a_run_with_it_trains_clusters_and_saves_what_it_keeps(config, tmp_path):
    folder = tmp_path / "run"
    config = with_phases(config, sparse_share=0.75)
    outcome = train(config, folder)
    assert outcome.completed
    records = read_records(folder)
    losses = [r["loss"] for r in records if r["event"] == "step"]
    assert len(losses) == 12 and losses[-1] < losses[0]
    assert [r["step"] for r in records if r["event"] == "recluster"] == [5, 7, 9, 11]
    health = [r for r in records if r["event"] == "ffn" and "router_mass" in r]
    assert health
    for record in health:
        chosen, best = np.array(record["router_mass"]), np.array(record["oracle_mass"])
        assert (0 < chosen).all() and (chosen <= best + 1e-6).all()
    # What it keeps is that of the weights as they are since the last clustering.
    run = Run(config)
    sparse = run.phases[1].sparsity
    with Checkpoints(folder / "checkpoints") as kept:
        restored = kept.restore(12, template=run.template(sparse))
    ffn = run.model(restored.state, sparse).blocks.ffn
    state = arrays_of(ffn.router_state)
    assert {name: array.shape for name, array in state.items()} == {
        "weights": (2, 4, 16),
        "bias": (2, 4),
    }
    trained = arrays_of(outcome.model.blocks.ffn.router_state)
    for name, array in state.items():
        assert np.isfinite(array).all()
        np.testing.assert_array_equal(array, trained[name])
    first = OWN.initial_state(run.initial_state().params.blocks.ffn.w_up[...][0], 4)
    assert not np.array_equal(state["weights"][0], first["weights"])


def test_skipping_blocks_by_it_and_its_time(config):
    config = with_phases(config, skip_blocks=True, activations=VNM(4, 2, 16))
    decisions = ffn_decisions(config.model, config.sparsity, 64)
    assert router_seconds(config.model, config.sparsity, 64, decisions) > 0
