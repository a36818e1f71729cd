"""Hugging Face folders that come in: the same model, or refused with the reason."""

import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from sparsejax.config import TrainConfig
from sparsejax.data.tokenizers import ByteTokenizer, HuggingFaceTokenizer
from sparsejax.interchange import tensors
from sparsejax.interchange.export import export_huggingface
from sparsejax.interchange.pretrained import Pretrained
from sparsejax.interchange.trained_model import load_trained_model
from tests.support.files.exported_models import MODELS, SMALL, some_model
from tests.support.files.tokenizer_file import write_tokenizer


def exported(folder: Path, config=SMALL, **changes) -> Path:
    """A folder whose config.json is changed; None takes a setting away."""
    export_huggingface(
        some_model(config), folder, sequence_length=16, tokenizer=ByteTokenizer()
    )
    path = folder / "config.json"
    settings = json.loads(path.read_text()) | changes
    kept = {name: value for name, value in settings.items() if value is not None}
    path.write_text(json.dumps(kept))
    return folder


STORED_WHOLE = [name for name in MODELS if MODELS[name].static_weights is None]


@pytest.mark.parametrize("name", STORED_WHOLE)
def test_a_model_comes_back_bit_for_bit(name, tmp_path):
    model = some_model(MODELS[name])
    folder = exported(tmp_path, MODELS[name])
    found = Pretrained.read(folder)
    assert found.model == MODELS[name]
    parameters = found.parameters()
    assert ("head",) not in parameters or not MODELS[name].tie_embeddings
    stored = dict(tensors.huggingface_tensors(model))
    up = parameters["blocks", "ffn", "w_up"]
    for layer in range(2):
        theirs = stored[f"model.layers.{layer}.mlp.up_proj.weight"]
        assert up[layer].T.tobytes() == theirs.tobytes() and up.dtype == np.float32
    for names in parameters:
        part = model
        for one in names:
            part = getattr(part, one)
        assert np.asarray(part[...]).tobytes() == parameters[names].tobytes(), names


def test_blocks_on_a_diagonal_come_back_as_whole_weights(tmp_path):
    config = MODELS["blocks on a diagonal"]
    found = Pretrained.read(exported(tmp_path, config))
    assert found.model == replace(config, static_weights=None)
    w_up = found.parameters()["blocks", "ffn", "w_up"]
    assert w_up.shape == (2, 16, 32)
    # Each neuron reads one half of the residual stream's features.
    assert (np.count_nonzero(w_up, axis=1) == 8).all()


def test_several_files_of_bfloat16_are_read(tmp_path):
    folder = exported(tmp_path)
    expected = Pretrained.read(folder).parameters()
    stored = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    import ml_dtypes

    rounded = {name: w.astype(ml_dtypes.bfloat16) for name, w in stored.items()}
    tensors.write_tensors(rounded, folder, shard_bytes=8000)
    found = Pretrained.read(folder).parameters()
    for names, array in expected.items():
        np.testing.assert_array_equal(
            found[names], array.astype(ml_dtypes.bfloat16).astype(np.float32)
        )


def test_what_version_4_of_transformers_writes_is_read(tmp_path):
    folder = exported(tmp_path, rope_parameters=None, rope_theta=500.0, rope_scaling={})
    assert Pretrained.read(folder).model.rope_base == 500.0


MISTRAL = {"model_type": "mistral", "hidden_act": "silu", "sliding_window": 8}
QWEN = {"model_type": "qwen2", "hidden_act": "silu", "sliding_window": 8}
REFUSED = {
    "gemma": ({"model_type": "gemma"}, r"scale by 1 \+ w"),
    "biases of all": (
        {"model_type": "qwen3", "hidden_act": "silu", "attention_bias": True},
        "biases of queries, keys and values alone",
    ),
    "qwen window": (
        QWEN | {"use_sliding_window": True, "max_window_layers": 1},
        "sliding_window",
    ),
    "qwen layer types": (
        QWEN
        | {
            "use_sliding_window": True,
            "layer_types": ["full_attention", "sliding_attention"],
        },
        "sliding_window",
    ),
    "qwen heads": (QWEN | {"num_key_value_heads": None}, "lacks num_key_value_heads"),
    "other": ({"model_type": "gpt2"}, "none of llama, arcee, mistral, qwen2, qwen3"),
    "bias": ({"attention_bias": True}, "attention_bias=true, and our transformer"),
    "act": ({"hidden_act": "gelu"}, "hidden_act='gelu', and ours have relu2"),
    "rope": (
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}},
        "rope_type='llama3', and ours are not rescaled",
    ),
    "old rope": (
        {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2}},
        "rope_type='linear'",
    ),
    "window": (MISTRAL, "sliding_window"),
    "no size": ({"vocab_size": None}, "lacks vocab_size"),
}


def test_a_window_from_a_layer_that_is_null_is_refused(tmp_path):
    path = exported(tmp_path, **QWEN) / "config.json"
    null = {"use_sliding_window": True, "max_window_layers": None}
    path.write_text(json.dumps(json.loads(path.read_text()) | null))
    with pytest.raises(ValueError, match="limits attention to a sliding_window"):
        Pretrained.read(tmp_path)


@pytest.mark.parametrize("what", REFUSED)
def test_what_the_transformer_cannot_hold_is_refused(what, tmp_path):
    changes, reason = REFUSED[what]
    with pytest.raises(ValueError, match=reason):
        Pretrained.read(exported(tmp_path, **changes))


@pytest.mark.parametrize(
    "changes",
    [
        # A window that no layer has.
        {"use_sliding_window": False, "sliding_window": 8},
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
        {"use_sliding_window": True, "sliding_window": 8, "layer_types": ["full"] * 2},
        # What `transformers` writes that has never heard of windows.
        {"use_sliding_window": None},
    ],
)
def test_a_qwen_whose_attention_sees_all_is_read(changes, tmp_path):
    folder = exported(tmp_path, MODELS["qwen2"], **changes)
    assert Pretrained.read(folder).model == MODELS["qwen2"]


def test_what_a_qwen3_leaves_out_is_a_head_of_128(tmp_path):
    folder = exported(tmp_path, MODELS["qwen3"], head_dim=None)
    assert Pretrained.read(folder).model == replace(MODELS["qwen3"], head_dim=128)


def test_weights_that_do_not_belong_are_named(tmp_path):
    folder = exported(tmp_path)
    pretrained, path = Pretrained.read(folder), folder / "model.safetensors"
    stored = load_file(path)
    key = "model.layers.1.self_attn.k_proj.weight"

    def refused(weights: dict, reason: str) -> None:
        save_file(weights, path)
        with pytest.raises(ValueError, match=reason):
            pretrained.parameters()

    refused({n: w for n, w in stored.items() if n != key}, f"no weight {key}")
    bias = {"model.layers.0.self_attn.q_proj.bias": np.ones(16, np.float32)}
    refused(stored | bias, r"q_proj.bias, for which.*no place")
    norm = {"model.layers.0.self_attn.q_norm.weight": np.ones(4, np.float32)}
    refused(stored | norm, r"q_norm.weight, for which.*no place")
    refused(stored | {key: stored[key][:4]}, r"has the shape \(16, 4\)")
    path.write_bytes(b"damaged")
    with pytest.raises(ValueError, match="cannot be read"):
        pretrained.parameters()
    path.unlink()
    with pytest.raises(ValueError, match=r"no model.safetensors; save the model"):
        pretrained.parameters()


def test_what_is_no_such_folder_is_refused(tmp_path):
    with pytest.raises(ValueError, match="is neither a run folder, which"):
        Pretrained.read(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="has no checkpoints; give a Hugging Face fol"):
        Pretrained.read(tmp_path)
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(ValueError, match="there is no complete checkpoint in "):
        Pretrained.read(str(tmp_path))
    for name in ("a", "b"):
        (tmp_path / name / "checkpoints").mkdir(parents=True)
        os.utime(tmp_path / name, (0, "ba".index(name)))
    beside = f"there is no folder {tmp_path}/c; .*there are {tmp_path}/a, {tmp_path}/b$"
    with pytest.raises(ValueError, match=beside):
        Pretrained.read(tmp_path / "c")
    with pytest.raises(ValueError, match=beside):
        load_trained_model(tmp_path / "c")


def test_model_and_tokenizer_come_from_the_folder_and_the_rest_does_not(tmp_path):
    pretrained = Pretrained.read(exported(tmp_path / "out", MODELS["reglu2"]))
    start = TrainConfig()
    start = replace(start, model=replace(start.model, remat="full"))
    settings = pretrained.settings(start)
    assert settings.model == replace(MODELS["reglu2"], remat="full")
    assert settings.data.tokenizer is None  # bytes are built in
    assert settings.optimizer == start.optimizer
    pretrained.check_fits(replace(settings.model, dtype="bfloat16"))
    whole = settings.model.head_width
    pretrained.check_fits(replace(settings.model, head_dim=whole))
    with pytest.raises(ValueError, match=f"model.head_dim={2 * whole} is not that of"):
        pretrained.check_fits(replace(settings.model, head_dim=2 * whole))
    with pytest.raises(ValueError, match=r"model.d_hidden=64 is not that of .* 32"):
        pretrained.check_fits(replace(settings.model, d_hidden=64))
    path = write_tokenizer(tmp_path / "out" / "tokenizer.json")
    assert pretrained.settings(start).data.tokenizer == str(path)
    assert HuggingFaceTokenizer(path).vocab_size > 256


ODD = [
    ("max_position_embeddings", [], "an int of 1 or more"),
    ("max_position_embeddings", 0, "an int of 1 or more"),
    ("max_position_embeddings", True, "an int of 1 or more"),
    ("num_attention_heads", {}, "an int of 1 or more"),
    ("hidden_size", 1.5, "an int of 1 or more"),
    ("rope_parameters", "x", "of type dict or None"),
    ("rope_scaling", [2], "of type dict or None"),
    ("model_type", [], "a str"),
    ("hidden_act", [], "a str"),
    ("rms_norm_eps", "1e-5", "a float"),
    ("tie_word_embeddings", "no", "True or False"),
]


@pytest.mark.parametrize(("name", "value", "wanted"), ODD)
def test_a_setting_of_another_type_is_named(name, value, wanted, tmp_path):
    folder = exported(tmp_path, **{name: value})
    with pytest.raises(ValueError) as caught:
        Pretrained.read(folder)
    message = f"{folder}/config.json has {name}={value!r}, and it must be {wanted}"
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("text", ["{", "[]", "\xff"])
@pytest.mark.parametrize("file", ["generation_config.json", "tokenizer.json"])
def test_a_damaged_file_beside_the_weights_is_named(file, text, tmp_path):
    folder = exported(tmp_path)
    (folder / file).write_bytes(text.encode("latin-1"))
    found = Pretrained.read(folder)
    with pytest.raises(ValueError, match=f"{folder / file} (cannot be read|holds)"):
        (found.end_tokens(), found.tokenizer)


@pytest.mark.parametrize("ids", ["x", -5, 9999, [1, -1], 1.0])
def test_an_end_of_text_that_is_no_token_is_refused(ids, tmp_path):
    folder = exported(tmp_path)
    path = folder / "generation_config.json"
    path.write_text(json.dumps({"eos_token_id": ids}))
    with pytest.raises(ValueError, match="eos_token_id=.*integers from 0 to 255"):
        Pretrained.read(folder).end_tokens()


def test_an_index_that_names_no_files_is_refused(tmp_path):
    folder = exported(tmp_path)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": 3}}))
    with pytest.raises(ValueError, match="index.json has weight_map={'a': 3}"):
        Pretrained.read(folder).parameters()


def test_a_folder_of_another_program_has_no_steps(tmp_path):
    folder = exported(tmp_path / "model")
    with pytest.raises(ValueError, match="no checkpoint of step 5; leave @5 out"):
        Pretrained.read(Path(f"{folder}@5"))
