"""Text to tokens to batches: exact tokens, a sound split, a resumable order."""

import json
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsejax import data
from sparsejax.config import DataConfig


def write_files(folder: Path, texts: dict[str, bytes]) -> None:
    for name, text in texts.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Forty files; every byte of file i, in no other file, is i."""
    texts = {f"part{i % 3}/{i:02d}.txt": bytes([i]) * (30 + i) for i in range(40)}
    write_files(tmp_path, texts)
    return tmp_path


def config_of(folder: Path, **settings) -> DataConfig:
    defaults = {"sequence_length": 8, "validation_share": 0.2}
    return DataConfig(text=f"{folder}/**/*.txt", **{**defaults, **settings})


def corpus_of(train, validation=(0,)) -> data.Corpus:
    return data.Corpus(
        train=np.array(train, np.uint16),
        validation=np.array(validation, np.uint16),
        tokenizer=data.ByteTokenizer(),
        description="",
        fingerprint="",
    )


@pytest.fixture
def tokenizer_path(tmp_path: Path) -> Path:
    """A tiny BPE that adds special tokens and truncates, if it is let."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from tokenizers.trainers import BpeTrainer

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the sparse tensor core, the sparse"] * 5, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    return path


@settings(deadline=None, max_examples=50)
@given(st.binary(max_size=50))
def test_bytes_are_their_own_tokens(text):
    ids = data.ByteTokenizer().encode(text)
    assert ids.tolist() == list(text)
    assert data.ByteTokenizer().decode(ids) == text.decode("utf-8", errors="replace")


def test_hugging_face_tokens_have_no_additions_and_no_cuts(tokenizer_path):
    tokenizer = data.load_tokenizer(str(tokenizer_path))
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


def test_large_vocabularies_take_wide_tokens(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    # Ids have gaps: the table needs 70001 rows for three entries.
    vocab = {"a": 0, "b": 70_000, "[UNK]": 1}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    tokenizer = data.load_tokenizer(str(tmp_path / "tokenizer.json"))
    assert tokenizer.vocab_size == 70_001
    ids = tokenizer.encode(b"a b c")
    assert ids.tolist() == [0, 70_000, 1]
    assert ids.dtype == np.uint32


def test_the_split_goes_by_file_and_loses_nothing(folder):
    corpus = data.load_corpus(config_of(folder))
    counts = {i: 30 + i for i in range(40)}
    train, validation = (
        Counter(corpus.train.tolist()),
        Counter(corpus.validation.tolist()),
    )
    assert train.keys() | validation.keys() == counts.keys()
    assert not train.keys() & validation.keys()
    assert train + validation == Counter(counts)
    assert 2 <= len(validation) <= 16  # 8 expected of 40
    assert f"40 files, {sum(counts.values())} tokens" in corpus.description
    assert f"held out: {corpus.validation.size} tokens" in corpus.description


def test_the_side_of_a_file_depends_on_its_relative_path_only(folder, tmp_path):
    held_out = set(data.load_corpus(config_of(folder)).validation.tolist())
    elsewhere = tmp_path / "elsewhere" / "deeper"
    for path in folder.glob("part*/*.txt"):
        if int(path.stem) % 4:  # a subset, under another root
            write_files(elsewhere, {str(path.relative_to(folder)): path.read_bytes()})
    moved = data.load_corpus(config_of(elsewhere))
    assert set(moved.validation.tolist()) == {i for i in held_out if i % 4}


@pytest.mark.parametrize("share", [1e-9, 1 - 1e-9])
def test_each_side_gets_a_file_whatever_the_share(folder, share):
    corpus = data.load_corpus(config_of(folder, validation_share=share))
    files = len(set(corpus.validation.tolist()))
    assert files == (1 if share < 0.5 else 39)


def test_a_single_file_is_cut_at_its_end(tmp_path):
    # Empty files hold no text, so this is still a single one.
    write_files(tmp_path, {"one.txt": bytes(range(100)), "empty.txt": b""})
    corpus = data.load_corpus(config_of(tmp_path))
    assert corpus.train.tolist() == list(range(80))
    assert corpus.validation.tolist() == list(range(80, 100))
    assert "the only file" in corpus.description
    # The same tokens in the same order, cut elsewhere, are other data.
    moved = data.load_corpus(config_of(tmp_path, validation_share=0.3))
    assert moved.fingerprint != corpus.fingerprint


def test_the_default_text_is_the_standard_library():
    corpus = data.load_corpus(DataConfig())
    again = data.load_corpus(DataConfig())
    assert corpus.fingerprint == again.fingerprint
    assert "standard library of Python 3." in corpus.description
    assert corpus.train.size > 5_000_000
    assert 0.01 < corpus.validation.size / corpus.train.size < 0.2
    both = np.concatenate([corpus.train, corpus.validation]).astype(np.uint8).tobytes()
    assert Path(json.__file__).read_bytes() in both
    assert Path(pytest.__file__).read_bytes() not in both


def test_the_fingerprint_sees_one_token_and_the_split(folder):
    first = data.load_corpus(config_of(folder)).fingerprint
    assert data.load_corpus(config_of(folder, seed=7)).fingerprint == first
    split = data.load_corpus(config_of(folder, validation_share=0.5)).fingerprint
    path = folder / "part0" / "03.txt"
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    assert len({first, split, data.load_corpus(config_of(folder)).fingerprint}) == 3


def test_a_tokenizer_file_gives_the_same_text_back(tmp_path, tokenizer_path):
    texts = {f"{i}.txt": f"the sparse core {i} ✓\n".encode() * 3 for i in range(20)}
    write_files(tmp_path, texts)
    config = config_of(tmp_path, tokenizer=str(tokenizer_path), sequence_length=2)
    corpus = data.load_corpus(config)
    decoded = corpus.tokenizer.decode(corpus.train) + corpus.tokenizer.decode(
        corpus.validation
    )
    assert Counter(decoded.encode().splitlines()) == Counter(
        line for text in texts.values() for line in text.splitlines()
    )


@pytest.mark.parametrize(
    ("texts", "settings", "message"),
    [
        ({}, {}, r"text='.*': no file matches in .*; give a glob"),
        ({"a.txt": b"", "b.txt": b""}, {}, r"all 2 files are empty"),
        (
            {"a.txt": b"x" * 20, "b.txt": b"y" * 20},
            {"sequence_length": 20},
            r"sequence_length=20 needs at least 21 training tokens, and there are 20",
        ),
        (
            {"a.txt": b"x" * 100},
            {"sequence_length": 20},
            r"needs at least 21 held-out tokens, and there are 20 .*; shorten",
        ),
        ({"a.txt": b"x"}, {"validation_share": 0.0}, r"validation_share=0.0 is not in"),
        ({"a.txt": b"x"}, {"validation_share": 1.0}, r"validation_share=1.0 is not in"),
        ({"a.txt": b"x"}, {"sequence_length": 0}, r"sequence_length=0 is not positive"),
        ({"a.txt": b"x"}, {"tokenizer": "/no/such.json"}, r"'/no/such.json' is not a"),
    ],
)
def test_unusable_text_is_refused(tmp_path, texts, settings, message):
    write_files(tmp_path, texts)
    with pytest.raises(ValueError, match=message):
        data.load_corpus(config_of(tmp_path, **settings))


def test_an_unreadable_file_is_named(folder, monkeypatch):
    # A permission would not stop the superuser that test machines run as.
    def refuse(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(ValueError, match=r"00\.txt cannot be read \(Permission denied"):
        data.load_corpus(config_of(folder))


def test_text_that_is_not_utf8_is_named_with_a_tokenizer_only(tmp_path, tokenizer_path):
    texts = {"a.txt": b"the sparse", "b.txt": b"caf\xe9 sparse", "c.txt": b"tensor"}
    write_files(tmp_path, texts)
    config = config_of(tmp_path, sequence_length=1)
    assert 0xE9 in np.concatenate(
        [data.load_corpus(config).train, data.load_corpus(config).validation]
    )
    config = config_of(tmp_path, sequence_length=1, tokenizer=str(tokenizer_path))
    with pytest.raises(ValueError, match=r"b\.txt is not UTF-8 \(byte 3\)"):
        data.load_corpus(config)


def test_a_file_that_is_no_tokenizer_is_named(tmp_path):
    (tmp_path / "broken.json").write_text("{}")
    with pytest.raises(ValueError, match=r"broken\.json' is not a Hugging Face"):
        data.load_tokenizer(str(tmp_path / "broken.json"))


def test_a_missing_package_names_the_extra(monkeypatch, tokenizer_path):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ImportError, match=r"uv sync --extra hf.*sparsejax\[hf\]"):
        data.load_tokenizer(str(tokenizer_path))


def test_an_epoch_is_every_window_once_and_the_next_is_in_another_order():
    corpus = corpus_of(np.arange(8 * 12 + 5))  # 12 windows, and a rest too short
    batches = data.train_batches(corpus, DataConfig(sequence_length=8), batch_size=4)
    epochs = [
        np.concatenate([next(batches)["tokens"].reshape(4, 9) for _ in range(3)])
        for _ in range(4)
    ]
    for rows in epochs:
        order = np.argsort(rows[:, 0])
        expected = [np.arange(8 * i, 8 * i + 9) for i in range(12)]
        np.testing.assert_array_equal(rows[order], expected)
    orders = {tuple(rows[:, 0].tolist()) for rows in epochs}
    assert len(orders) == 4
    assert tuple(range(0, 96, 8)) not in orders


def test_batches_span_epochs_so_that_no_window_is_left_out():
    corpus = corpus_of(np.arange(5 * 2 + 1))  # 5 windows in batches of 3
    batches = data.train_batches(corpus, DataConfig(sequence_length=2), batch_size=3)
    starts = [next(batches)["tokens"][0, :, 0] for _ in range(10)]
    assert set(Counter(np.concatenate(starts).tolist()).values()) == {6}


@pytest.mark.parametrize("micro_batches", [1, 2, 6])
def test_micro_batches_cut_the_same_batch(micro_batches):
    corpus = corpus_of(np.arange(200))
    config = DataConfig(sequence_length=5, seed=3)
    whole = next(data.train_batches(corpus, config, batch_size=6))["tokens"]
    parts = next(
        data.train_batches(corpus, config, batch_size=6, micro_batches=micro_batches)
    )["tokens"]
    assert parts.shape == (micro_batches, 6 // micro_batches, 6)
    assert parts.dtype == np.int32
    np.testing.assert_array_equal(parts.reshape(1, 6, 6), whole)


def test_the_seed_gives_the_order():
    corpus = corpus_of(np.arange(1000))

    def first(seed):
        config = DataConfig(sequence_length=4, seed=seed)
        batches = data.train_batches(corpus, config, batch_size=8)
        return np.stack([next(batches)["tokens"] for _ in range(3)])

    np.testing.assert_array_equal(first(5), first(5))
    assert not np.array_equal(first(5), first(6))


@settings(deadline=None, max_examples=15)
@given(taken=st.integers(0, 40), more=st.integers(1, 20), past=st.integers(0, 12))
def test_a_saved_state_continues_bit_for_bit(taken, more, past):
    corpus = corpus_of(np.arange(20 * 3 + 1))  # 20 windows: several epochs are seen
    config = DataConfig(sequence_length=3, seed=11)

    def fresh():
        return data.train_batches(corpus, config, batch_size=6, micro_batches=2)

    batches = fresh()
    for _ in range(taken):
        next(batches)
    state = json.loads(json.dumps(batches.get_state()))  # as a checkpoint holds it
    expected = [next(batches)["tokens"] for _ in range(more)]
    resumed = fresh()
    for _ in range(past):  # the thread that reads ahead has already started
        next(resumed)
    resumed.set_state(state)
    for tokens in expected:
        np.testing.assert_array_equal(next(resumed)["tokens"], tokens)


def test_training_never_sees_held_out_tokens(folder):
    config = config_of(folder)
    corpus = data.load_corpus(config)
    held_out = set(corpus.validation.tolist())
    batches = data.train_batches(corpus, config, batch_size=10)
    epochs = 2 * (corpus.train.size // 8) // 10 + 1
    seen = {t for _ in range(epochs) for t in next(batches)["tokens"].ravel().tolist()}
    assert seen == set(corpus.train.tolist())
    assert not seen & held_out
    for tokens in data.validation_batches(corpus, config, batch_size=2, batches=3):
        assert set(tokens.ravel().tolist()) <= held_out


@pytest.mark.parametrize(
    ("settings", "options", "message"),
    [
        ({}, {"batch_size": 6, "micro_batches": 4}, r"batch_size=6 is not a positive"),
        ({}, {"batch_size": 0}, r"batch_size=0 is not a positive multiple"),
        ({}, {"batch_size": 6, "micro_batches": 0}, r"micro_batches=0; change one"),
        ({}, {"batch_size": 13}, r"batch_size=13 exceeds the 12 training windows"),
        ({"seed": -1}, {"batch_size": 4}, r"seed=-1 is not in \[0, 2\*\*32\)"),
    ],
)
def test_unusable_batches_are_refused(settings, options, message):
    corpus = corpus_of(np.arange(100))
    with pytest.raises(ValueError, match=message):
        data.train_batches(corpus, DataConfig(sequence_length=8, **settings), **options)


@settings(deadline=None, max_examples=60)
@given(
    windows=st.integers(1, 40),
    length=st.integers(1, 7),
    batch_size=st.integers(1, 8),
    batches=st.integers(1, 8),
)
def test_validation_windows_are_distinct_whole_and_even(
    windows, length, batch_size, batches
):
    tokens = np.arange(windows * length + 1)
    corpus = corpus_of([0], tokens)
    config = DataConfig(sequence_length=length)
    if batch_size > windows:
        with pytest.raises(ValueError, match=r"exceeds the \d+ held-out windows"):
            data.validation_batches(
                corpus, config, batch_size=batch_size, batches=batches
            )
        return
    found = data.validation_batches(
        corpus, config, batch_size=batch_size, batches=batches
    )
    assert len(found) == min(batches, windows // batch_size) >= 1
    rows = np.concatenate(found)
    assert rows.dtype == np.int32
    indices = rows[:, 0] // length
    np.testing.assert_array_equal(
        rows, [np.arange(i * length, (i + 1) * length + 1) for i in indices]
    )
    gaps = np.diff([*indices, windows])
    assert indices[0] == 0
    assert gaps.min() >= 1  # distinct
    assert gaps.max() - gaps.min() <= 1  # even


def test_unigram_loss_is_the_smoothed_cross_entropy():
    train, validation = [1, 1, 1, 2, 7], [1, 2, 2, 9]
    expected = 0.0
    for token in validation:
        expected -= np.log((train.count(token) + 1) / (len(train) + 256)) / 4
    assert data.unigram_loss(corpus_of(train, validation)) == pytest.approx(
        expected, rel=1e-12
    )
