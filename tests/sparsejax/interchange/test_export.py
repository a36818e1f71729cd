"""Exported folders: they are the model, whole or not there, and say what they are."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from sparsejax.checkpoints import manifest
from sparsejax.checkpoints.checkpoint_record import FORMAT_VERSION
from sparsejax.config import PhaseConfig
from sparsejax.config.schedule import phases
from sparsejax.data.tokenizers import ByteTokenizer, HuggingFaceTokenizer
from sparsejax.feed_forward.sparsity import FFNSparsity
from sparsejax.interchange import tensors
from sparsejax.interchange.export import export_huggingface, export_run
from sparsejax.interchange.model_card import model_card
from sparsejax.interchange.trained_model import TrainedModel, load_trained_model
from sparsejax.sparsity.patterns import NM
from tests.support.files.exported_models import (
    MODELS,
    SMALL,
    TOKENS,
    logits_of,
    some_model,
)
from tests.support.files.tokenizer_file import write_tokenizer
from tests.support.micro_run import micro_config, read_records
from tests.support.oracles import llama_oracle

LENGTH = 16
# float32 against float64: logits of order one, a few roundings of 6e-8 a layer
ROUNDING = 1e-5


@pytest.mark.parametrize("name", MODELS)
def test_the_published_equations_give_the_model_s_logits(name, tmp_path):
    model = some_model(MODELS[name])
    export_huggingface(model, tmp_path / "out", sequence_length=LENGTH)
    found = llama_oracle.logits(tmp_path / "out", TOKENS)
    np.testing.assert_allclose(found, logits_of(model), atol=ROUNDING)


def test_2to4_weights_are_folded(tmp_path):
    sparse = some_model(MODELS["swiglu"], FFNSparsity(weights=NM(2, 4)))
    expected = logits_of(sparse)
    export_huggingface(sparse, tmp_path / "out", sequence_length=LENGTH)
    found = llama_oracle.logits(tmp_path / "out", TOKENS)
    np.testing.assert_allclose(found, expected, atol=ROUNDING)
    gate = llama_oracle.read_folder(tmp_path / "out")[1][
        "model.layers.0.mlp.gate_proj.weight"
    ]
    assert (gate == 0).reshape(32, 4, 4).sum(2).min() >= 2
    assert sparse.sparsity.weights  # the model that was given is as it was


def test_sparse_activations_are_refused_with_the_ways_out(tmp_path):
    model = some_model(SMALL, FFNSparsity(activations=NM(2, 4)))
    with pytest.raises(ValueError, match=r"2:4.*dense phase.*--drop-activation-masks"):
        export_huggingface(model, tmp_path / "out", sequence_length=LENGTH)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"qk_norm": True}, "qk_norm with activation='relu2'.*take swiglu or reglu2"),
        ({"qkv_bias": True}, "qkv_bias with activation='relu2'.*take swiglu"),
        (
            {"activation": "swiglu", "qk_norm": True, "qkv_bias": True},
            "qk_norm and qkv_bias together.*leave one",
        ),
        ({"heads": 6, "head_dim": 4}, "d_model=16 that is no multiple of heads=6"),
    ],
)
def test_what_no_architecture_computes_is_refused_and_not_lost(
    changes, reason, tmp_path
):
    model = some_model(replace(SMALL, **changes))
    lost = "not lost: its checkpoints.*model.safetensors"
    with pytest.raises(ValueError, match=f"{reason}.*{lost}"):
        export_huggingface(model, tmp_path / "out", sequence_length=LENGTH)
    assert not list(tmp_path.iterdir())


def test_large_models_are_several_files_and_an_index(tmp_path):
    model = some_model(SMALL)
    stored = dict(tensors.huggingface_tensors(model))
    names = tensors.write_tensors(stored, tmp_path, shard_bytes=8000)
    *files, index = names
    lies_in = json.loads((tmp_path / index).read_text())["weight_map"]
    assert len(files) > 2 and set(lies_in.values()) == set(files)
    assert files[0] == f"model-00001-of-{len(files):05}.safetensors"
    for name, array in stored.items():
        np.testing.assert_array_equal(load_file(tmp_path / lies_in[name])[name], array)
    for file in files:
        held = load_file(tmp_path / file)
        assert len(held) == 1 or sum(w.nbytes for w in held.values()) <= 8000


def test_bfloat16_weights_are_the_rounded_ones(tmp_path):
    model = some_model(SMALL)
    export_huggingface(model, tmp_path, sequence_length=LENGTH, dtype="bfloat16")
    config, weights = llama_oracle.read_folder(tmp_path)
    assert config["torch_dtype"] == "bfloat16"
    exact = dict(tensors.huggingface_tensors(model))
    for name, array in weights.items():
        np.testing.assert_allclose(array, exact[name], rtol=2**-8)


def test_everybody_may_read_and_nothing_is_overwritten(tmp_path):
    model, out = some_model(SMALL), tmp_path / "out"
    export_huggingface(
        model, out, sequence_length=LENGTH, tokenizer=ByteTokenizer(), card="# A card"
    )
    modes = {path.name: oct(path.stat().st_mode & 0o777) for path in out.iterdir()}
    assert modes == dict.fromkeys(
        [
            "README.md",
            "config.json",
            "generation_config.json",
            "model.safetensors",
            "tokenizer.json",
            "tokenizer_config.json",
        ],
        "0o644",
    )
    with pytest.raises(ValueError, match="there already; choose another"):
        export_huggingface(model, out, sequence_length=LENGTH)


def test_an_export_that_fails_leaves_nothing(tmp_path, monkeypatch):
    def full(*_):
        raise OSError("No space left on device")

    monkeypatch.setattr(Path, "chmod", full)
    with pytest.raises(OSError, match="No space"):
        export_huggingface(some_model(SMALL), tmp_path / "out", sequence_length=LENGTH)
    assert not list(tmp_path.iterdir())


def test_a_tokenizer_of_another_vocabulary_is_refused(tmp_path):
    tokenizer = HuggingFaceTokenizer(write_tokenizer(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match=r"more than the model's vocab_size=256"):
        export_huggingface(
            some_model(SMALL), tmp_path / "out", sequence_length=16, tokenizer=tokenizer
        )


# Runs.


def test_the_card_says_recipe_loss_tokens_and_commit(uninterrupted, tmp_path):
    config, folder, outcome = uninterrupted("two-four")
    export_run(load_trained_model(folder), tmp_path / "my-model")
    card = (tmp_path / "my-model" / "README.md").read_text()
    records = read_records(folder)
    validation = [of for of in records if of["event"] == "validation"][-1]
    assert "# my-model\n" in card and "recipe `two-four`, 12 of 12 steps" in card
    assert "* sparse: 6 steps, weights 2:4, activations 2:4\n" in card
    assert f"| validation loss | {validation['loss']:.4f} nats per token" in card
    assert f"| tokens seen | {12 * 4 * 16} |" in card
    assert f"| commit of sparsejax | {records[0]['commit'] or 'not recorded'} |" in card
    assert str(config.data.text) not in card and "## Weights" not in card
    found = llama_oracle.logits(tmp_path / "my-model", TOKENS)
    np.testing.assert_allclose(found, logits_of(outcome.model), atol=ROUNDING)


def test_the_card_of_a_static_phase_says_which_entries_there_are(text, tmp_path):
    small = PhaseConfig(name="small", share=0.5, d_hidden=32, layers=1)
    config = micro_config(text, recipe="s2d")
    grown = micro_config(text).with_schedule((small, PhaseConfig(name="whole")))
    run = TrainedModel(
        model=some_model(MODELS["blocks on a diagonal"]),
        config=config,
        folder=tmp_path,
        step=3,
        phases=phases(config),
        phase=phases(config)[0],
        corpus="0" * 64,
    )
    card = model_card(run, name="static", tokenizer=None)
    first, last = (of for of in card.splitlines() if of.startswith("* "))
    assert first.endswith(" steps, dense on static weights diagonal:4")
    assert last.endswith(" steps, dense")
    assert "static weights diagonal:2 in all linear layers" in card
    card = model_card(replace(run, phases=phases(grown)), name="g", tokenizer=None)
    assert "* small: 6 steps, dense, FFN width 32, 1 layers\n" in card


def test_a_run_with_sparse_activations_is_exported_only_on_demand(
    uninterrupted, tmp_path
):
    _, folder, _ = uninterrupted("two-four")
    run = load_trained_model(folder, 3)  # saved after the switch
    assert run.phase.kind == "sparse"
    # Every checkpoint that can be exported is named, and no other.
    named = f"without: {folder}@9, {folder}@10, {folder}@12$"
    with pytest.raises(ValueError, match=named):
        export_run(run, tmp_path / "out")
    export_run(run, tmp_path / "out", drop_activation_masks=True)
    card = (tmp_path / "out" / "README.md").read_text()
    assert "leaves no activation out" in card and "is not its own" in card


def test_a_tokenizer_that_has_moved_is_named(uninterrupted, tmp_path):
    _, folder, _ = uninterrupted("two-four")
    copy = tmp_path / "run"
    shutil.copytree(folder, copy)
    (record,) = (copy / "checkpoints").glob("step_00000012*/record.json")
    values = json.loads(record.read_text())
    values["metadata"]["config"]["data"]["tokenizer"] = "gone/tokenizer.json"
    record.write_text(json.dumps(values))
    (record.parent / manifest.NAME).unlink()
    manifest.write(record.parent, FORMAT_VERSION)
    with pytest.raises(ValueError, match=r"gone/tokenizer.json.*--tokenizer"):
        export_run(load_trained_model(copy), tmp_path / "out")
