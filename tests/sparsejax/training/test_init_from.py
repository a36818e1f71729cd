"""Runs that begin with the weights of a folder: the same loss, then without it."""

import os
import shutil

import numpy as np
import pytest

from sparsejax.interchange.export import export_run
from sparsejax.interchange.pretrained import Pretrained
from sparsejax.sparsity.masks import soft_threshold_scale
from sparsejax.training.branch import Branch
from sparsejax.training.resume import state_with
from sparsejax.training.train import train
from sparsejax.training.trained_model import load_trained_model
from tests.support.micro_run import assert_same_bits, read_records
from tests.support.whole_runs import Killed, kill_at, shared_run


@pytest.fixture(scope="module")
def exported(uninterrupted, tmp_path_factory):
    """A run's settings, its last validation loss, and its folder for transformers."""
    config, folder, _ = uninterrupted("default")
    out = tmp_path_factory.mktemp("exported") / "model"
    export_run(load_trained_model(folder), out)
    losses = [of["loss"] for of in read_records(folder) if of["event"] == "validation"]
    return config, losses[-1], out


def test_a_run_goes_on_from_the_exported_loss_and_needs_the_folder_no_more(
    exported, tmp_path
):
    config, loss, source = exported
    folder, run = tmp_path / "model", tmp_path / "run"
    shutil.copytree(source, folder)
    pretrained = Pretrained.read(folder)
    with pytest.raises(Killed):
        train(config, run, init_from=pretrained, observe=kill_at("step", 2))
    start = read_records(run)[0]
    assert start["validation_loss"] == loss  # to the bit
    assert start["init_from"]["folder"] == os.path.join("..", "model")
    other = Pretrained(tmp_path / "other", pretrained.model)
    with pytest.raises(ValueError, match=r"began with \.\./model, not with"):
        train(config, run, init_from=other)
    (folder / "model.safetensors").unlink()
    # The command that began it may be given again, and the folder is not read.
    resumed = train(config, run, init_from=pretrained)
    assert resumed.completed
    undisturbed = train(config, tmp_path / "again", init_from=Pretrained.read(source))
    assert_same_bits(resumed.state, undisturbed.state)


def test_weights_that_begin_sparse_have_scales_of_their_own(exported, quick_loop):
    config, _, folder = exported
    parameters = Pretrained.read(folder).parameters()
    state = state_with(shared_run(config), parameters, config.sparsity)
    scales = np.asarray(state.buffers["blocks"]["ffn"]["scales"].get_value())
    up = parameters["blocks", "ffn", "w_up"]
    down = parameters["blocks", "ffn", "w_down"]
    expected = [soft_threshold_scale(up, axis=-2), soft_threshold_scale(down, axis=-1)]
    np.testing.assert_allclose(scales, np.stack(expected, -1), rtol=1e-6)
    assert int(state.step) == 0


def test_two_beginnings_are_refused(exported, tmp_path):
    config, _, folder = exported
    with pytest.raises(ValueError, match="leave one of them out"):
        train(
            config,
            tmp_path,
            init_from=Pretrained.read(folder),
            branch=Branch(tmp_path / "trunk"),
        )
