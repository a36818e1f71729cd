"""The model of a run folder: its last one bit for bit, those of its switches."""

import shutil

import jax
import numpy as np
import pytest
from flax import nnx

from sparsejax.interchange.trained_model import as_dense, load_trained_model
from sparsejax.models.transformer import cross_entropy
from tests.support.files.exported_models import TOKENS, logits_of
from tests.support.micro_run import micro_config, read_records
from tests.support.whole_runs import shared_run


def assert_same_parameters(model, expected):
    for found, wanted in zip(
        jax.tree.leaves(nnx.state(model, nnx.Param)),
        jax.tree.leaves(nnx.state(expected, nnx.Param)),
        strict=True,
    ):
        assert np.asarray(found).tobytes() == np.asarray(wanted).tobytes()


def test_the_last_model_is_the_run_s(uninterrupted):
    config, folder, outcome = uninterrupted("two-four")
    run = load_trained_model(folder)
    assert (run.step, run.phase.kind, run.tokens) == (12, "dense", 12 * 4 * 16)
    assert run.config == config and run.model.sparsity.is_dense
    assert_same_parameters(run.model, outcome.model)
    assert run.records() == read_records(folder)


def test_a_model_computes_as_its_phase(uninterrupted):
    """The model that is read has the loss on held-out tokens that the run recorded."""
    config, folder, _ = uninterrupted("paper")
    run = load_trained_model(folder, 3)
    assert run.model.sparsity == config.sparsity
    held_out = shared_run(config).validation
    found = np.mean([cross_entropy(run.model, tokens) for tokens in held_out])
    (switch,) = (
        of for of in read_records(folder) if of["event"] == "switch" and of["step"] == 3
    )
    np.testing.assert_allclose(found, switch["after"], rtol=1e-5)
    assert all(record["step"] <= 3 for record in run.records())


def test_dense_weights_of_2to4_ones_compute_the_same(quick_loop, text, tmp_path):
    from sparsejax.training.train import train

    config = micro_config(text, recipe="weights", steps=4, eval_every=0)
    train(config, tmp_path)
    run = load_trained_model(tmp_path, 1)  # after the switch to the sparse phase
    assert run.model.sparsity.weights
    dense = as_dense(run.model)
    assert dense.sparsity.is_dense and run.model.sparsity.weights
    # the same products, summed alike
    np.testing.assert_allclose(logits_of(dense), logits_of(run.model), atol=1e-6)
    assert TOKENS.max() < config.model.vocab_size


def test_a_folder_without_a_checkpoint_is_refused(tmp_path, uninterrupted):
    with pytest.raises(ValueError, match="run folder of a run that has saved one"):
        load_trained_model(tmp_path)
    _, folder, _ = uninterrupted("two-four")
    with pytest.raises(ValueError, match="no checkpoint of step=5"):
        load_trained_model(folder, 5)


def test_a_checkpoint_of_which_a_bit_has_changed_is_refused(uninterrupted, tmp_path):
    _, folder, _ = uninterrupted("two-four")
    copy = shutil.copytree(folder, tmp_path / "copy")
    step = copy / "checkpoints" / "step_00000012"
    stored = (file for file in (step / "state").rglob("*") if file.is_file())
    largest = max(stored, key=lambda file: file.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 0x40
    largest.write_bytes(content)
    with pytest.raises(ValueError, match="does not fit its checksum.*another step"):
        load_trained_model(copy)
    assert load_trained_model(copy, 3).step == 3
