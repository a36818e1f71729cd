"""From files to the two sides of a corpus: exact tokens, a sound split."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from sparsejax.config import DataConfig
from sparsejax.data import corpus as corpus_module
from sparsejax.data import tokenizers
from sparsejax.data.corpus import Corpus, load_corpus, unigram_loss
from sparsejax.data.tokenizers import ByteTokenizer, load_tokenizer
from tests.support.files.corpus_sides import only, side, write_files
from tests.support.files.shard_files import write_shard
from tests.support.files.tokenizer_file import write_tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Forty files; every byte of file i, in no other file, is i."""
    texts = {f"part{i % 3}/{i:02d}.txt": bytes([i]) * (30 + i) for i in range(40)}
    write_files(tmp_path, texts)
    return tmp_path


def load_text(folder: Path, **settings) -> Corpus:
    defaults = {"sequence_length": 8, "validation_share": 0.2}
    config = DataConfig(text=f"{folder}/**/*.txt", **{**defaults, **settings})
    return load_corpus(config, vocab_size=512)


def test_the_split_goes_by_file_and_loses_nothing(folder):
    corpus = load_text(folder)
    counts = {i: 30 + i for i in range(40)}
    train = Counter(only(corpus.train).tolist())
    validation = Counter(only(corpus.validation).tolist())
    assert train.keys() | validation.keys() == counts.keys()
    assert not train.keys() & validation.keys()
    assert train + validation == Counter(counts)
    assert 2 <= len(validation) <= 16  # 8 expected of 40
    assert f"40 files, {sum(counts.values())} tokens (bytes)" in corpus.description
    assert f"held out: {validation.total()} tokens" in corpus.description
    assert f"{len(validation)} of the files" in corpus.description
    assert corpus.vocab_size == 256


def test_the_side_of_a_file_depends_on_its_relative_path_only(folder, tmp_path):
    held_out = set(only(load_text(folder).validation).tolist())
    elsewhere = tmp_path / "elsewhere" / "deeper"
    for path in folder.glob("part*/*.txt"):
        if int(path.stem) % 4:  # a subset, under another root
            write_files(elsewhere, {str(path.relative_to(folder)): path.read_bytes()})
    moved = set(only(load_text(elsewhere).validation).tolist())
    assert moved == {i for i in held_out if i % 4}


@pytest.mark.parametrize("share", [1e-9, 1 - 1e-9])
def test_each_side_gets_a_file_whatever_the_share(folder, share):
    corpus = load_text(folder, validation_share=share)
    files = len(set(only(corpus.validation).tolist()))
    assert files == (1 if share < 0.5 else 39)


def test_a_text_is_split_by_package(tmp_path):
    texts = {f"{i % 8}/{i}.txt": bytes([i]) * 30 for i in range(40)}
    write_files(tmp_path, texts)
    corpus = load_text(tmp_path, split_by="package")
    train, held_out = (
        {byte % 8 for byte in only(side).tolist()}
        for side in (corpus.train, corpus.validation)
    )
    assert train | held_out == set(range(8)) and not train & held_out
    assert "of the files, whole packages" in corpus.description
    by_file = load_text(tmp_path)
    assert corpus.fingerprint != by_file.fingerprint


def test_a_copy_of_a_file_is_read_once_and_where_the_first_one_is(tmp_path):
    texts = {f"a/{i:02d}.txt": bytes([i]) * 30 for i in range(20)}
    write_files(tmp_path, texts)
    without = load_text(tmp_path)
    write_files(tmp_path, {f"b{name}": text for name, text in texts.items()})
    corpus = load_text(tmp_path, drop_duplicates=True)
    assert corpus.fingerprint == without.fingerprint
    assert corpus.description.startswith("20 files, 600 tokens (bytes)")
    assert corpus.description.endswith("; left out: 20 copies")
    with_copies = load_text(tmp_path)
    assert with_copies.description.startswith("40 files, 1200 tokens")
    # A byte more is no copy.
    write_files(tmp_path, {"c.txt": bytes([0]) * 31})
    assert "21 files" in load_text(tmp_path, drop_duplicates=True).description


def test_a_single_text_is_cut_at_its_end(tmp_path):
    # Empty files hold no text, so this is still a single one.
    write_files(tmp_path, {"one.txt": bytes(range(100)), "empty.txt": b""})
    corpus = load_text(tmp_path)
    assert side(corpus.train) == [list(range(80))]
    assert side(corpus.validation) == [list(range(80, 100))]
    assert "the last 20.00% of the only file" in corpus.description
    # The same tokens in the same order, cut elsewhere, are other data.
    moved = load_text(tmp_path, validation_share=0.3)
    assert moved.fingerprint != corpus.fingerprint


def test_the_default_text_is_the_standard_library():
    corpus = load_corpus(DataConfig(), vocab_size=256)
    again = load_corpus(DataConfig(), vocab_size=256)
    assert corpus.fingerprint == again.fingerprint
    assert "standard library of Python 3." in corpus.description
    train, validation = only(corpus.train), only(corpus.validation)
    assert train.size > 5_000_000
    assert 0.01 < validation.size / train.size < 0.2
    both = np.concatenate([train, validation]).astype(np.uint8).tobytes()
    assert Path(json.__file__).read_bytes() in both
    assert Path(pytest.__file__).read_bytes() not in both


def test_the_fingerprint_of_text_sees_one_token_and_the_split(folder):
    first = load_text(folder).fingerprint
    assert load_text(folder, seed=7).fingerprint == first
    split = load_text(folder, validation_share=0.5).fingerprint
    path = folder / "part0" / "03.txt"
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    assert len({first, split, load_text(folder).fingerprint}) == 3


def test_a_tokenizer_file_gives_the_same_text_back(tmp_path):
    texts = {f"{i}.txt": f"the sparse core {i} ✓\n".encode() * 3 for i in range(20)}
    write_files(tmp_path, texts)
    path = write_tokenizer(tmp_path / "tokenizer.json")
    corpus = load_text(tmp_path, tokenizer=str(path), sequence_length=2)
    sides = corpus.train + corpus.validation
    decoded = "".join(corpus.tokenizer.decode(part) for part in sides)
    assert Counter(decoded.encode().splitlines()) == Counter(
        line for text in texts.values() for line in text.splitlines()
    )
    assert corpus.vocab_size == load_tokenizer(str(path)).vocab_size


@pytest.mark.parametrize(
    ("texts", "settings", "message"),
    [
        ({}, {}, r"text='.*': no file matches in .*; give a glob"),
        ({"a.txt": b"", "b.txt": b""}, {}, r"all 2 files are empty"),
        (
            {"a.txt": b"x" * 20, "b.txt": b"y" * 20},
            {"sequence_length": 20},
            r"sequence_length=20 needs at least 21 training tokens in a row, and there "
            r"are 20",
        ),
        (
            {"a.txt": b"x" * 100},
            {"sequence_length": 20},
            r"at least 21 held-out tokens in a row, and there are 20 .*; shorten",
        ),
        ({"a.txt": b"x"}, {}, r"at least 9 training tokens in a row, and there are 0"),
        ({"a.txt": b"x"}, {"tokenizer": "/no/such.json"}, r"'/no/such.json' is not a"),
    ],
)
def test_unusable_text_is_refused(tmp_path, texts, settings, message):
    write_files(tmp_path, texts)
    with pytest.raises(ValueError, match=message):
        load_text(tmp_path, **settings)


def test_an_unreadable_text_is_named(folder, monkeypatch):
    # A permission would not stop the superuser that test machines run as.
    def refuse(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(ValueError, match=r"00\.txt cannot be read \(Permission denied"):
        load_text(folder)


def test_text_that_is_not_utf8_is_named_with_a_tokenizer_only(tmp_path):
    texts = {"a.txt": b"the sparse", "b.txt": b"caf\xe9 sparse", "c.txt": b"tensor"}
    write_files(tmp_path, texts)
    corpus = load_text(tmp_path, sequence_length=1)
    assert 0xE9 in np.concatenate(corpus.train + corpus.validation)
    path = write_tokenizer(tmp_path / "tokenizer.json")
    with pytest.raises(ValueError, match=r"b\.txt is not UTF-8 \(byte 3\)"):
        load_text(tmp_path, sequence_length=1, tokenizer=str(path))


@pytest.mark.parametrize("kind", ["text", "shards"])
def test_a_tokenizer_larger_than_the_model_is_refused(tmp_path, kind):
    path = write_tokenizer(tmp_path / "tokenizer.json")
    has = load_tokenizer(str(path)).vocab_size
    needed = 64 * -(-has // 64)
    config = DataConfig(**{kind: str(tmp_path)}, tokenizer=str(path))
    message = (
        rf"the tokenizer .*tokenizer\.json has {has} tokens, more than "
        rf"model\.vocab_size={has - 1}; set --model\.vocab-size {needed}$"
    )
    with pytest.raises(ValueError, match=message):
        load_corpus(config, vocab_size=has - 1)


@pytest.mark.parametrize("kind", ["text", "shards"])
def test_a_vocabulary_far_larger_than_the_tokenizer_is_refused(tmp_path, kind):
    path = write_tokenizer(tmp_path / "tokenizer.json")
    has = load_tokenizer(str(path)).vocab_size
    write_shard(tmp_path / "train", range(100), "npy uint16")
    files = f"{tmp_path}/*.npy"
    config = DataConfig(**{kind: files}, tokenizer=str(path), sequence_length=1)
    message = (
        rf"the tokenizer .*tokenizer\.json has {has} tokens, far fewer than "
        rf"model\.vocab_size={has + 1025}, .*; set --model\.vocab-size "
        rf"{64 * -(-has // 64)}, or give"
    )
    with pytest.raises(ValueError, match=message):
        load_corpus(config, vocab_size=has + 1025)
    if kind == "shards":
        assert load_corpus(config, vocab_size=has + 1024).vocab_size == has


@pytest.mark.parametrize(
    ("tokens", "vocab_size", "fits"),
    [
        (256, 256, True),
        (256, 1024, True),
        (256, 1280, True),
        (256, 1281, False),
        (256, 128_256, False),
        (16_384, 32_768, True),
        (16_384, 50_304, False),
        (32_000, 32_768, True),
        (50_257, 50_304, True),
        (50_257, 65_536, True),
        (50_257, 128_256, False),
        (100_277, 131_072, True),
        (128_256, 129_024, True),
    ],
)
def test_padding_of_a_vocabulary_passes(tokens, vocab_size, fits, folder, monkeypatch):
    config = DataConfig(text=f"{folder}/**/*.txt", sequence_length=8)
    # Bytes, but for the number of them.
    tokenizer = ByteTokenizer()
    tokenizer.vocab_size = tokens
    monkeypatch.setattr(tokenizers, "load_tokenizer", lambda path: tokenizer)
    if fits:
        assert load_corpus(config, vocab_size=vocab_size).vocab_size == tokens
        return
    with pytest.raises(ValueError, match=f"tokens, far fewer than .*={vocab_size}, "):
        load_corpus(config, vocab_size=vocab_size)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"text": "a", "shards": "b"}, r"data\.text='a' and data\.shards='b' are both"),
        (
            {"shard_dtype": "int32"},
            r"data\.shard_dtype='int32' must be one of 'uint",
        ),
        ({"validation_share": 0.0}, r"data\.validation_share=0\.0 must be above 0"),
        ({"validation_share": 1.0}, r"data\.validation_share=1\.0 must .* below 1"),
        (
            {"shards": "b", "split_by": "package"},
            r"data\.split_by='package' is about the files of a text",
        ),
        (
            {"shards": "b", "drop_duplicates": True},
            r"data\.drop_duplicates=True is about the files of a text",
        ),
        ({"sequence_length": 0}, r"data\.sequence_length=0 must be at least 1"),
        ({"seed": -1}, r"data\.seed=-1 must be at least 0"),
        ({"seed": 2**32}, r"data\.seed=4294967296 must .* at most 4294967295"),
    ],
)
def test_settings_that_no_corpus_has_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        DataConfig(**settings)


def corpus_of(train, validation) -> Corpus:
    return Corpus(
        train=tuple(np.array(part, np.uint16) for part in train),
        validation=tuple(np.array(part, np.uint16) for part in validation),
        vocab_size=256,
        tokenizer=ByteTokenizer(),
        description="",
        fingerprint="",
    )


def smoothed_cross_entropy(train: list[int], validation: list[int]) -> float:
    shares = [(train.count(token) + 1) / (len(train) + 256) for token in validation]
    return float(-np.mean(np.log(shares)))


@pytest.mark.parametrize("chunk", [2, 1000])
def test_unigram_loss_is_the_smoothed_cross_entropy(monkeypatch, chunk):
    monkeypatch.setattr(corpus_module, "_CHUNK", chunk)
    train, validation = [1, 1, 1, 2, 7], [1, 2, 2, 9]
    expected = smoothed_cross_entropy(train, validation)
    whole = unigram_loss(corpus_of([train], [validation]))
    parts = unigram_loss(corpus_of([train[:2], train[2:]], [[1], validation[1:]]))
    # Sums of a few float64 in another order.
    assert whole == pytest.approx(expected, rel=1e-12)
    assert parts == pytest.approx(expected, rel=1e-12)


def test_unigram_loss_counts_the_first_tokens_of_a_large_corpus(monkeypatch):
    monkeypatch.setattr(corpus_module, "_UNIGRAM_TRAINING", 5)
    monkeypatch.setattr(corpus_module, "_UNIGRAM_HELD_OUT", 4)
    corpus = corpus_of([[1, 1, 1], [2, 7, 9, 9], [9]], [[1], [2, 2, 9, 200], [200]])
    expected = smoothed_cross_entropy([1, 1, 1, 2, 7], [1, 2, 2, 9])
    # Sums of a few float64 in another order.
    assert unigram_loss(corpus) == pytest.approx(expected, rel=1e-12)
