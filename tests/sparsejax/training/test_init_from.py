"""Runs that begin with the weights of a folder: the same loss, then without it."""

import os
import shutil
from dataclasses import replace

import numpy as np
import pytest

from sparsejax.config import PhaseConfig
from sparsejax.interchange.export import export_run
from sparsejax.interchange.model_card import model_card
from sparsejax.interchange.pretrained import Pretrained
from sparsejax.interchange.trained_model import load_trained_model
from sparsejax.sparsity.masks import soft_threshold_scale
from sparsejax.training.branch import Branch
from sparsejax.training.resume import state_with
from sparsejax.training.train import train
from tests.support.micro_run import assert_same_bits, micro_config, read_records
from tests.support.whole_runs import Killed, kill_at, shared_run


@pytest.fixture(scope="module")
def exported(uninterrupted, tmp_path_factory):
    """A run's settings, its last validation loss, and its folder for transformers."""
    config, folder, _ = uninterrupted("two-four")
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
    with pytest.raises(Killed):  # before its first checkpoint
        begun = tmp_path / "begun"
        train(config, begun, init_from=pretrained, observe=kill_at("checkpoint", 0))
    with pytest.raises(ValueError, match="no checkpoint, .* began with --init-from; "):
        train(config, begun)
    other = replace(pretrained, folder=tmp_path / "other")
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


def test_a_gate_of_squared_relu_is_trained_back_from_weights_of_silu(
    quick_loop, text, tmp_path
):
    silu = replace(micro_config(text).model, activation="swiglu")
    config = replace(micro_config(text, recipe="dense"), model=silu)
    train(config, tmp_path / "silu")
    source = Pretrained.read(tmp_path / "silu")
    relufied = source.with_relu()
    # The same weights, to the bit.
    theirs, ours = source.parameters(), relufied.parameters()
    assert theirs.keys() == ours.keys()
    assert all(theirs[name].tobytes() == ours[name].tobytes() for name in theirs)
    config = relufied.settings(micro_config(text))
    assert config.model.activation == "reglu2" and config.sparsity.activations
    with pytest.raises(ValueError, match="'sparse' is sparse from the first step"):
        no_warmup = replace(config.phases, warmup_share=0.0)
        train(replace(config, phases=no_warmup), tmp_path / "a", init_from=relufied)
    with pytest.raises(Killed):
        train(
            config,
            tmp_path / "run",
            init_from=relufied,
            observe=kill_at("checkpoint", 3),
        )
    start, *others = read_records(tmp_path / "run")
    assert start["init_from"]["relufied"] and start["kind"] == "warm-up"
    last = [of["loss"] for of in read_records(tmp_path / "silu") if "loss" in of][-1]
    # Another function: the loss jumps, and comes down before the sparse phase.
    assert start["validation_loss"] > last + 0.01
    (switched,) = [of for of in others if of["event"] == "switch"]
    assert switched["before"] < start["validation_loss"]
    trained = load_trained_model(tmp_path / "run")
    card = model_card(trained, name="it", tokenizer=None)
    assert f"trained back from a loss of {start['validation_loss']:.4f}" in card
    with pytest.raises(ValueError, match="and --relufy, not with"):
        train(config, tmp_path / "run", init_from=source)


def test_two_beginnings_are_refused(exported, tmp_path):
    config, _, folder = exported
    with pytest.raises(ValueError, match="leave one of them out"):
        train(
            config,
            tmp_path,
            init_from=Pretrained.read(folder),
            branch=Branch(tmp_path / "trunk"),
        )


def test_a_run_begins_with_another_one_as_with_its_export(
    exported, uninterrupted, tmp_path
):
    config, loss, folder = exported
    _, source, _ = uninterrupted("two-four")
    of_run = Pretrained.read(source)
    assert (of_run.model, of_run.tokenizer) == (config.model, None)
    begun = train(config, tmp_path / "run", init_from=of_run)
    start = read_records(tmp_path / "run")[0]
    assert start["validation_loss"] == loss  # to the bit
    assert start["init_from"]["folder"].endswith("@12")
    other = train(config, tmp_path / "other", init_from=Pretrained.read(folder))
    assert_same_bits(begun.state, other.state)
    with pytest.raises(ValueError, match=r"@12, not with .*; go on"):
        train(config, tmp_path / "run", init_from=Pretrained.read(folder))


def test_a_run_that_is_sparse_begins_another_dense_and_folded(
    uninterrupted, quick_loop
):
    _, source, _ = uninterrupted("paper")
    found = Pretrained.read(source.with_name(f"{source.name}@3")).parameters()
    trained = load_trained_model(source, 3).model
    assert trained.sparsity.weights is not None
    folded = found["blocks", "ffn", "w_up"]
    masters = np.asarray(trained.blocks.ffn.w_up[...])
    # Two of four along d_model, and none of the masters as it was.
    kept = (folded != 0).reshape(2, 4, 4, -1).sum(axis=2)
    assert (kept <= 2).all() and folded.any()
    assert not np.array_equal(folded, masters)
    down = found["blocks", "ffn", "w_down"]
    np.testing.assert_array_equal(down, np.asarray(trained.blocks.ffn.w_down[...]))


def test_a_run_with_a_smaller_model_is_refused(text, tmp_path):
    small = PhaseConfig(name="small", share=0.5, d_hidden=32)
    schedule = (small, PhaseConfig(name="whole"))
    config = micro_config(text, eval_every=0, keep_checkpoints=9)
    config = config.with_schedule(schedule)
    train(config, tmp_path)
    with pytest.raises(ValueError, match="step 2 in phase 'small'.*take a later"):
        Pretrained.read(tmp_path.with_name(f"{tmp_path.name}@2"))
    assert Pretrained.read(tmp_path).model == config.model
