"""Text to ids and back, without additions, cuts or loss."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsejax.data.tokenizers import ByteTokenizer, load_tokenizer
from tests.support.files.tokenizer_file import write_tokenizer


@pytest.fixture
def tokenizer_path(tmp_path: Path) -> Path:
    return write_tokenizer(tmp_path / "tokenizer.json")


@settings(deadline=None, max_examples=50)
@given(st.binary(max_size=50))
def test_bytes_are_their_own_tokens(text):
    ids = ByteTokenizer().encode(text)
    assert ids.tolist() == list(text)
    assert ByteTokenizer().decode(ids) == text.decode("utf-8", errors="replace")


def test_hugging_face_tokens_have_no_additions_and_no_cuts(tokenizer_path):
    tokenizer = load_tokenizer(str(tokenizer_path))
    text = "the sparse tensor core, grün und the sparse ✓" * 3
    ids = tokenizer.encode(text.encode())
    assert tokenizer.decode(ids) == text
    assert ids.dtype == np.uint16
    assert 10 < ids.size < len(text.encode())  # longer than the cut, merges happen
    assert (
        ids.max()
        < tokenizer.vocab_size
        == 1 + max(json.loads(tokenizer_path.read_text())["model"]["vocab"].values())
    )


def test_the_token_that_ends_a_text_is_known_by_its_name(tokenizer_path):
    assert ByteTokenizer().end_of_text is None
    assert load_tokenizer(str(tokenizer_path)).end_of_text is None
    content = json.loads(tokenizer_path.read_text())
    (begin,) = content["added_tokens"]
    ends = [begin | {"id": 290, "content": "</s>"}]
    content["added_tokens"] += ends
    tokenizer_path.write_text(json.dumps(content))
    tokenizer = load_tokenizer(str(tokenizer_path))
    end = tokenizer.end_of_text
    assert end is not None and tokenizer.decode([end]) == "</s>"


def test_large_vocabularies_take_wide_tokens(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    # Ids have gaps: the table needs 70001 rows for three entries.
    vocab = {"a": 0, "b": 70_000, "[UNK]": 1}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(str(tmp_path / "tokenizer.json"))
    assert tokenizer.vocab_size == 70_001
    ids = tokenizer.encode(b"a b c")
    assert ids.tolist() == [0, 70_000, 1]
    assert ids.dtype == np.uint32


def test_a_missing_file_is_named():
    with pytest.raises(ValueError, match=r"'/no/such.json' is not a file; give the"):
        load_tokenizer("/no/such.json")


def test_a_file_that_is_no_tokenizer_is_named(tmp_path):
    (tmp_path / "broken.json").write_text("{}")
    with pytest.raises(ValueError, match=r"broken\.json' is not a Hugging Face"):
        load_tokenizer(str(tmp_path / "broken.json"))


def test_a_missing_package_names_the_extra(monkeypatch, tokenizer_path):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ImportError, match=r"uv sync --extra hf.*sparsejax\[hf\]"):
        load_tokenizer(str(tokenizer_path))
