"""Exported folders as `transformers` itself loads them.

The tokenizers are loaded in every run of the tests. The models need PyTorch, 2.6 GB to
download with CUDA (2.15.0 for Linux on x86), and so a group of its own:

    uv run --group torch pytest -n 0 tests/sparsejax/interchange/test_transformers.py

Last result: 2026-11-28, transformers 5.23.0 and torch 2.15.0 on a CPU: 16 passed.
"""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsejax.data.tokenizers import ByteTokenizer, HuggingFaceTokenizer
from sparsejax.interchange.export import export_huggingface
from sparsejax.interchange.pretrained import Pretrained
from tests.support.files.exported_models import (
    CLASSES,
    MODELS,
    SMALL,
    TOKENS,
    logits_of,
    some_model,
)
from tests.support.files.tokenizer_file import write_tokenizer

TEXTS = ["", "the sparse tensor core", " é\n\t 🙂 <s> the\r\n", "don't  stop\x00"]


def load_tokenizer_of(folder):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def bytes_there(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bytes")
    export_huggingface(
        some_model(SMALL), folder, sequence_length=16, tokenizer=ByteTokenizer()
    )
    return load_tokenizer_of(folder)


@settings(max_examples=50, deadline=None)
@given(text=st.text())
def test_bytes_are_the_same_tokens_there(bytes_there, text):
    ours = ByteTokenizer()
    expected = ours.encode(text.encode()).tolist()
    assert bytes_there(text)["input_ids"] == expected
    assert bytes_there.decode(expected) == text


@settings(max_examples=50, deadline=None)
@given(ids=st.lists(st.integers(0, 255), max_size=12))
def test_bytes_that_are_no_text_are_decoded_alike(bytes_there, ids):
    assert bytes_there.decode(ids) == ByteTokenizer().decode(ids)


def test_a_tokenizer_does_there_what_the_run_did(tmp_path):
    ours = HuggingFaceTokenizer(write_tokenizer(tmp_path / "tokenizer.json"))
    model = some_model(SMALL.__class__(vocab_size=320, d_model=16, d_hidden=16))
    out = tmp_path / "out"
    export_huggingface(model, out, sequence_length=16, tokenizer=ours)
    theirs = load_tokenizer_of(out)
    for text in TEXTS:
        expected = ours.encode(text.encode()).tolist()
        # The file itself truncates, pads, and begins with <s>: none of it here.
        assert theirs(text)["input_ids"] == expected
        assert theirs(text).keys() == {"input_ids", "attention_mask"}
        assert theirs.decode(expected) == ours.decode(expected) == text


@pytest.mark.parametrize("name", MODELS)
def test_the_model_computes_the_same_there(name, tmp_path):
    torch = pytest.importorskip("torch", reason="uv run --group torch pytest")
    from transformers import AutoModelForCausalLM

    model = some_model(MODELS[name])
    export_huggingface(model, tmp_path, sequence_length=16, tokenizer=ByteTokenizer())
    loaded, told = AutoModelForCausalLM.from_pretrained(
        tmp_path, output_loading_info=True
    )
    assert not any(told[kind] for kind in ("missing_keys", "unexpected_keys"))
    assert type(loaded).__name__ == f"{CLASSES[name]}ForCausalLM"
    assert loaded.dtype == torch.float32
    # They compute in float64: two float32 results may err to opposite sides.
    with torch.no_grad():
        exact = loaded.double()(torch.from_numpy(TOKENS)[None]).logits[0].numpy()
    np.testing.assert_allclose(logits_of(model), exact, atol=1e-5)


SIZES = {
    "vocab_size": 96,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
THEIRS = {
    "Llama": {"tie_word_embeddings": True, "rms_norm_eps": 1e-4},
    "Mistral": {"sliding_window": None},
    "Qwen2": {"tie_word_embeddings": True, "max_window_layers": 1},
    "Qwen3": {"head_dim": 6, "hidden_act": "relu2"},
    "Arcee": {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
}


@pytest.mark.parametrize("name", THEIRS)
def test_a_model_made_there_computes_the_same_here(name, tmp_path):
    torch = pytest.importorskip("torch", reason="uv run --group torch pytest")
    import transformers

    config = getattr(transformers, f"{name}Config")(**SIZES, **THEIRS[name])
    torch.manual_seed(0)
    theirs = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for weight in theirs.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    theirs.save_pretrained(tmp_path)
    tokens = TOKENS % 96
    with torch.no_grad():
        exact = theirs.double()(torch.from_numpy(tokens)[None]).logits[0].numpy()
    found = Pretrained.read(tmp_path).load()(jnp.asarray(tokens)[None])[0]
    np.testing.assert_allclose(found, exact, atol=1e-5)


def test_a_qwen_with_a_window_made_there_is_refused(tmp_path):
    pytest.importorskip("torch", reason="uv run --group torch pytest")
    import transformers

    window = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
    config = transformers.Qwen2Config(**SIZES, **window)
    transformers.Qwen2ForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="limits attention to a sliding_window"):
        Pretrained.read(tmp_path)
