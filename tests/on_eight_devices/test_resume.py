"""A run that was stopped on one mesh goes on upon another one."""

import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest

from sparsejax.config import MeshConfig, TrainConfig
from sparsejax.training import train as loop
from sparsejax.training.run import Run
from sparsejax.training.train import Outcome, train
from tests.support.micro_run import (
    assert_same_bits,
    micro_config,
    read_records,
    with_phases,
    without_speed,
    write_text,
)
from tests.support.whole_runs import Killed, kill_at, quick_runs

BEFORE = MeshConfig(data=8)


@pytest.fixture(scope="module", autouse=True)
def quick():
    with quick_runs():
        yield


@pytest.fixture(scope="module")
def stopped(tmp_path_factory) -> tuple[TrainConfig, Path, Path, Outcome]:
    """Settings; the folder of a run stopped in the middle of its sparse phase; folder
    and outcome of one that was not."""
    text = write_text(tmp_path_factory.mktemp("text"))
    config = micro_config(
        text, steps=6, batch_size=16, eval_every=0, checkpoint_every=1, mesh=BEFORE
    )
    # One micro-batch where the tokens are split into eight or four, else four; and four
    # held-out sequences, which eight devices cannot share.
    config = replace(config, sequences_per_device=4)
    config = with_phases(config, warmup_share=0.34, sparse_share=0.34)
    model = replace(config.model, d_model=32, heads=8, kv_heads=8, d_hidden=128)
    config = replace(config, model=model, eval_batches=1)
    stopped, whole = tmp_path_factory.mktemp("stopped"), tmp_path_factory.mktemp("run")
    with pytest.raises(Killed):
        train(config, stopped, observe=kill_at("step", 4))
    return config, stopped, whole, train(config, whole)


def resume(stopped, folder: Path, mesh: MeshConfig) -> Outcome:
    """The rest of the run: a sparse step, the switch, two dense ones."""
    config, before, *_ = stopped
    shutil.copytree(before, folder, dirs_exist_ok=True)
    seen = []
    outcome = train(replace(config, mesh=mesh), folder, observe=seen.append)
    assert (seen[0]["event"], seen[0]["step"]) == ("resume", 3)
    assert outcome.completed
    return outcome


def test_on_the_same_mesh_it_repeats_the_bits(stopped, tmp_path):
    _, _, whole, expected = stopped
    outcome = resume(stopped, tmp_path, BEFORE)
    assert_same_bits(outcome.state, expected.state)
    ours, theirs = read_records(tmp_path), read_records(whole)
    assert without_speed(ours) == without_speed(theirs)


@pytest.mark.parametrize(
    "sizes",
    [(1, 8, 1), (1, 1, 8), (2, 2, 2), (1, 1, 1)],
    ids=["fsdp", "tensor", "all", "one device"],
)
def test_on_another_mesh_the_losses_are_the_same_within_rounding(
    sizes, stopped, tmp_path, monkeypatch
):
    data, fsdp, tensor = sizes
    mesh = MeshConfig(data=data, fsdp=fsdp, tensor=tensor)
    on_these = partial(Run, devices=jax.devices()[: mesh.devices])
    monkeypatch.setattr(loop, "Run", on_these)
    resume(stopped, tmp_path, mesh)
    assert read_records(stopped[2])[0]["micro_batches"] == 1

    def losses(folder: Path) -> dict[tuple, float]:
        return {
            (record["event"], record["step"], name): value
            for record in read_records(folder)
            for name, value in record.items()
            if name in ("loss", "before", "after", "gradient_norm")
        }

    ours, expected = losses(tmp_path), losses(stopped[2])
    assert ours.keys() == expected.keys()
    assert {step for _, step, _ in ours} == {1, 2, 3, 4, 5, 6}
    # float32 sums in another order, carried through at most four steps.
    np.testing.assert_allclose(
        list(ours.values()), [expected[key] for key in ours], rtol=1e-5
    )
