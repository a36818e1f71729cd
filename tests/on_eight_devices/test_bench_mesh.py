"""The benchmark of meshes times what it has checked."""

import json
from dataclasses import replace

import pytest

from experiments import predict_step
from experiments.bench import mesh
from sparsejax.config import RECIPES, MeshConfig, RecipeConfig
from sparsejax.sparsity.patterns import VNM
from tests.support.micro_run import write_text


@pytest.fixture
def config(tmp_path):
    return mesh.Config(
        preset="tiny",
        layers=1,
        meshes=((2, 2, 2),),
        batch_size=8,
        text=write_text(tmp_path),
        rounds=2,
        steps=1,
        results=tmp_path / "rows.jsonl",
    )


def test_rows(config):
    rows = mesh.main(config)
    assert [json.loads(line) for line in config.results.open()] == rows
    one, sharded = rows
    assert (one["speedup"], one["collectives"]) == (1.0, {})
    assert sharded["collectives"]["all-gather"] > 0
    assert sharded["arguments_gib"] < one["arguments_gib"]
    assert all(row["save_held_ms"] > 0 for row in rows)


@pytest.mark.parametrize(
    ("recipe", "meshes"),
    [("dense", ((2, 1, 1),)), ("two-four", ((2, 1, 1), (2, 2, 1)))],
)
def test_a_batch_for_every_device_is_checked_against_one_device(config, recipe, meshes):
    trace = config.results.parent / "trace"
    config = replace(
        config, recipe=recipe, meshes=meshes, batch_size=4, per_device=True
    )
    config = replace(config, saves=0, trace=trace)
    one, *others = rows = mesh.main(config)
    assert [row["batch_size"] for row in rows] == [4, 8, 16][: len(rows)]
    assert len(rows) == 1 + len(meshes)
    assert all(row["layers"] == 1 and row["per_device"] for row in rows)
    assert not any("save_held_ms" in row for row in rows)
    traced = {path.name for path in trace.iterdir()}
    assert traced == {row["name"].replace(" ", "-") for row in rows}
    assert len(list(trace.rglob("*.trace.json.gz"))) == len(rows)
    for row in others:
        tokens = row["tokens_per_second"] / one["tokens_per_second"]
        assert row["speedup"] == pytest.approx(tokens, rel=0.4)
    # What is written is read again, as a step to predict.
    config = predict_step.Config(since="2026-01-01", meshes=config.results)
    measured = list(predict_step.measured_meshes(config))
    assert [of.tokens_per_device for of in measured] == [2 * 128] * len(rows)
    assert [of.model.layers for of in measured] == [1] * len(rows)
    assert all(of.sparsity.is_dense == (recipe == "dense") for of in measured)


def test_a_wrong_gradient_stops_the_benchmark(config, monkeypatch):
    right = mesh.Stepper.steps

    def wrong(self, count):
        reports = right(self, count)
        factor = 1.1 if self.run.mesh.size > 1 else 1.0
        return [r | {"gradient_norm": factor * r["gradient_norm"]} for r in reports]

    monkeypatch.setattr(mesh.Stepper, "steps", wrong)
    with pytest.raises(AssertionError, match=r"data 2 .*: gradient_norm"):
        mesh.main(config)


def test_steps_are_of_the_phases_and_the_backend_asked_for(config):
    paper = RECIPES["paper"]
    sparsity = replace(paper, skip_blocks=True, activations=VNM(128, 2, 8))
    phases = RecipeConfig(sparsity=sparsity)
    config = replace(config, recipe="paper", phases=phases, backend="reference")
    train = mesh._train_config(config, MeshConfig(data=1))
    assert (train.recipe, train.phases, train.backend) == ("paper", phases, "reference")


def test_more_devices_than_there_are_is_said(config):
    config = mesh.Config(meshes=((16, 1, 1),), results=None)
    with pytest.raises(ValueError, match="need 16 devices, and there are 8"):
        mesh.main(config)
