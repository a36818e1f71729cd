"""From files to the two sides of a corpus: exact tokens, a sound split."""

import json
import os
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsejax.config import DataConfig
from sparsejax.data import corpus as corpus_module
from sparsejax.data.corpus import Corpus, load_corpus, unigram_loss
from sparsejax.data.tokenizers import ByteTokenizer, load_tokenizer
from tests.support.shard_files import CONVENTIONS, write_shard
from tests.support.tokenizer_file import write_tokenizer


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


def load_text(folder: Path, **settings) -> Corpus:
    defaults = {"sequence_length": 8, "validation_share": 0.2}
    config = DataConfig(text=f"{folder}/**/*.txt", **{**defaults, **settings})
    return load_corpus(config, vocab_size=512)


def load_shards(folder: Path, *, vocab_size: int = 50_304, **settings) -> Corpus:
    defaults = {"sequence_length": 2, "validation_share": 0.2, "shards": str(folder)}
    return load_corpus(DataConfig(**{**defaults, **settings}), vocab_size=vocab_size)


def side(parts: tuple[np.ndarray, ...]) -> list[list[int]]:
    return [part.tolist() for part in parts]


def only(parts: tuple[np.ndarray, ...]) -> np.ndarray:
    (part,) = parts
    return part


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
    monkeypatch.setattr(corpus_module, "load_tokenizer", lambda path: tokenizer)
    if fits:
        assert load_corpus(config, vocab_size=vocab_size).vocab_size == tokens
        return
    with pytest.raises(ValueError, match=f"tokens, far fewer than .*={vocab_size}, "):
        load_corpus(config, vocab_size=vocab_size)


@settings(deadline=None, max_examples=60)
@given(
    shards=st.lists(
        st.tuples(
            st.lists(st.integers(0, 50_256), min_size=3, max_size=20),
            st.sampled_from(CONVENTIONS),
            st.booleans(),
        ),
        min_size=2,
        max_size=6,
    ).filter(lambda shards: len({held_out for *_, held_out in shards}) == 2),
    block=st.integers(1, 25),
    chunk=st.integers(1, 25),
)
def test_any_cut_into_shards_of_any_convention_gives_the_same_tokens(
    tmp_path_factory, shards, block, chunk
):
    folder = tmp_path_factory.mktemp("shards")
    expected: dict[bool, list[list[int]]] = {False: [], True: []}
    for index, (tokens, convention, is_held_out) in enumerate(shards):
        word = "val" if is_held_out else "train"
        write_shard(folder / f"{index}_{word}", tokens, convention)
        expected[is_held_out].append(tokens)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus_module, "_BLOCK", block)
        patch.setattr(corpus_module, "_CHUNK", chunk)
        corpus = load_shards(folder)
    assert side(corpus.train) == expected[False]
    assert side(corpus.validation) == expected[True]
    assert corpus.vocab_size == 1 + max(max(tokens) for tokens, *_ in shards)


@pytest.mark.parametrize("convention", CONVENTIONS)
def test_shards_stay_on_the_disk(tmp_path, convention):
    write_shard(tmp_path / "only", range(100), convention)
    corpus = load_shards(tmp_path)
    for part in corpus.train + corpus.validation:
        assert isinstance(part, np.memmap)
    # A single shard is cut as a single text is.
    assert side(corpus.train) == [list(range(80))]
    assert side(corpus.validation) == [list(range(80, 100))]
    assert corpus.description == (
        f"1 files, 100 tokens (ids to 99, far below the 50304 of the model's "
        f"vocabulary) from {tmp_path}; held out: 20 tokens, the last 20.00% of the "
        f"only file"
    )
    assert corpus.tokenizer is None


def test_named_shards_are_held_out_and_left_out(tmp_path):
    for index, name in enumerate(["a_train", "b_val", "c_test", "d"]):
        write_shard(tmp_path / name, [index] * 5, "nanogpt")
    (tmp_path / "e_test.npy").write_bytes(b"never opened")
    corpus = load_shards(tmp_path, vocab_size=64)
    assert side(corpus.train) == [[0] * 5, [3] * 5]
    assert side(corpus.validation) == [[1] * 5]
    assert corpus.description == (
        f"3 files, 15 tokens (ids to 3) from {tmp_path}; held out: 5 tokens, 1 of the "
        f"files, named val; left out: 2 files named test"
    )


def test_a_folder_named_val_holds_out_its_shards(tmp_path):
    write_shard(tmp_path / "train" / "0", [1] * 5, "nanogpt")
    write_shard(tmp_path / "val" / "0", [2] * 5, "nanogpt")
    corpus = load_shards(tmp_path, shards=f"{tmp_path}/*/*.bin")
    assert (side(corpus.train), side(corpus.validation)) == ([[1] * 5], [[2] * 5])


def test_shards_without_such_names_are_split_as_text_is(tmp_path):
    for index in range(40):
        name = f"{index:02d}.bin"
        write_shard(tmp_path / "shards" / name[:-4], [index] * 9, "nanogpt")
        write_files(tmp_path / "texts", {name: bytes([index] * 9)})
    shards = load_shards(tmp_path / "shards")
    text = load_corpus(
        DataConfig(text=f"{tmp_path}/texts/*", sequence_length=2, validation_share=0.2),
        vocab_size=256,
    )
    for found, expected in [
        (shards.train, text.train),
        (shards.validation, text.validation),
    ]:
        assert np.concatenate(found).tolist() == only(expected).tolist()
    assert len(shards.train) + len(shards.validation) == 40


@pytest.mark.parametrize(
    "names", [["val_0", "val_1"], ["val"], ["test"], ["val", "test"]]
)
def test_a_corpus_with_nothing_to_train_on_is_refused(tmp_path, names):
    for name in names:
        write_shard(tmp_path / name, range(9), "nanogpt")
    message = rf"all {len(names)} files are named val or test, which leaves none"
    with pytest.raises(ValueError, match=message):
        load_shards(tmp_path)


def test_a_test_file_does_not_keep_the_only_other_from_being_cut(tmp_path):
    write_shard(tmp_path / "train", range(100), "nanogpt")
    write_shard(tmp_path / "test", range(9), "nanogpt")
    corpus = load_shards(tmp_path)
    assert side(corpus.validation) == [list(range(80, 100))]


def test_the_fingerprint_is_of_tokens_and_sides_and_not_of_places(tmp_path):
    def of(place: str, convention: str = "nanogpt", **shards) -> str:
        for name, tokens in shards.items():
            write_shard(tmp_path / place / name, tokens, convention)
        return load_shards(tmp_path / place).fingerprint

    first = of("a", train=[1, 2, 3, 4, 5, 6], val=[7, 8, 9])
    for place, convention in [("b", "npy uint16"), ("c", "llm.c gpt-2")]:
        same = of(place, convention, train=[1, 2, 3, 4, 5, 6], val=[7, 8, 9])
        assert same == first
    others = [
        of("d", train=[1, 2, 3, 4, 5, 7], val=[7, 8, 9]),  # a training token
        of("e", train=[1, 2, 3, 4, 5, 6], val=[7, 8, 8]),  # a held-out token
        of("f", a=[1, 2, 3], b=[4, 5, 6], val=[7, 8, 9]),  # where a shard ends
        of("g", train=[1, 2, 3, 4, 5], val=[6, 7, 8, 9]),
        of("h", a_val=[1, 2, 3, 4, 5, 6], train=[7, 8, 9]),  # the sides
    ]
    assert len({first, *others}) == 6


def test_the_fingerprint_sees_where_a_single_shard_is_cut(tmp_path):
    write_shard(tmp_path / "a", range(100), "nanogpt")
    cuts = {load_shards(tmp_path, validation_share=s).fingerprint for s in (0.2, 0.3)}
    assert len(cuts) == 2


def test_the_fingerprint_sees_the_width_of_tokens(tmp_path):
    """Two tokens of uint16 and one of uint32 can be the same bytes."""
    write_shard(tmp_path / "b_val", [7, 8, 9], "nanogpt")
    write_shard(tmp_path / "a", [1, 0, 2, 0, 3, 0], "npy uint16")
    narrow = load_shards(tmp_path)
    write_shard(tmp_path / "a", [1, 2, 3], "npy uint32")
    wide = load_shards(tmp_path)
    assert [part.tobytes() for part in narrow.train] == [
        part.tobytes() for part in wide.train
    ]
    assert narrow.fingerprint != wide.fingerprint


@pytest.mark.parametrize("changed", range(9))
def test_the_fingerprint_sees_every_block_of_a_shard(tmp_path, monkeypatch, changed):
    monkeypatch.setattr(corpus_module, "_BLOCK", 4)
    tokens = list(range(9))
    write_shard(tmp_path / "a", tokens, "nanogpt")
    before = load_shards(tmp_path, validation_share=0.4).fingerprint
    tokens[changed] = 99
    write_shard(tmp_path / "a", tokens, "nanogpt")
    assert load_shards(tmp_path, validation_share=0.4).fingerprint != before


@pytest.mark.parametrize("block", [3, 1000])
def test_an_id_beyond_the_model_is_named_with_its_place(tmp_path, monkeypatch, block):
    monkeypatch.setattr(corpus_module, "_BLOCK", block)
    write_shard(tmp_path / "a_train", [99] * 10, "nanogpt")
    write_shard(tmp_path / "b_train", [5] * 7 + [100, 300], "npy uint16")
    write_shard(tmp_path / "c_val", [200] * 5, "nanogpt")
    message = (
        r"b_train\.npy: token 7 is 100, and model\.vocab_size=100 has ids below 100; "
        r"the shards, the tokenizer and --model\.vocab-size must belong together"
    )
    with pytest.raises(ValueError, match=message):
        load_shards(tmp_path, vocab_size=100)
    assert load_shards(tmp_path, vocab_size=301).vocab_size == 301


def test_a_held_out_id_beyond_the_tokenizer_is_named(tmp_path):
    tokenizer = load_tokenizer(str(write_tokenizer(tmp_path / "tokenizer.json")))
    last = tokenizer.vocab_size - 1
    write_shard(tmp_path / "train", [last] * 5, "nanogpt")
    write_shard(tmp_path / "val", [0, 1, last], "nanogpt")
    model = {"tokenizer": tokenizer.name, "vocab_size": last + 1}
    corpus = load_shards(tmp_path, **model)
    assert corpus.vocab_size == tokenizer.vocab_size
    assert corpus.tokenizer.name == tokenizer.name
    assert f"8 tokens ({tokenizer.name}) from" in corpus.description
    write_shard(tmp_path / "val", [0, 1, last + 1], "nanogpt")
    message = rf"val\.bin: token 2 is {last + 1}, and the tokenizer .* ids below"
    with pytest.raises(ValueError, match=message):
        load_shards(tmp_path, **model)


def test_narrow_tokens_read_as_wide_ones_are_beyond_any_vocabulary(tmp_path):
    write_shard(tmp_path / "a", range(2, 42), "nanogpt")
    message = r"token 0 is 196610, .* is read as --data\.shard-dtype says\)"
    with pytest.raises(ValueError, match=message):
        load_shards(tmp_path, shard_dtype="uint32")


def test_a_fault_is_told_without_reading_all_the_rest(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    monkeypatch.setattr(corpus_module, "_BLOCK", 10)
    chunks = corpus_module._chunks
    read = []

    def count(tokens):
        read.append(tokens.size)
        time.sleep(0.001)  # all of them would take two seconds
        return chunks(tokens)

    monkeypatch.setattr(corpus_module, "_chunks", count)
    write_shard(tmp_path / "a", [500] + [1] * 20_000, "nanogpt")
    with pytest.raises(ValueError, match="token 0 is 500"):
        load_shards(tmp_path, vocab_size=256)
    assert len(read) < 2001


@pytest.mark.parametrize(
    ("shards", "message"),
    [
        ({"a_train": 8, "b_train": 8, "val": 9}, r"9 training .* in a row, .* are 8 "),
        ({"train": 9, "a_val": 8, "b_val": 8}, r"9 held-out .* in a row, .* are 8 "),
    ],
)
def test_a_sequence_longer_than_every_shard_is_refused(tmp_path, shards, message):
    for name, size in shards.items():
        write_shard(tmp_path / name, range(size), "nanogpt")
    with pytest.raises(ValueError, match=f"sequence_length=8 .*{message}"):
        load_shards(tmp_path, sequence_length=8)


def test_shards_shorter_than_a_sequence_are_counted(tmp_path):
    for name, size in {"a": 8, "b": 9, "c_val": 9, "d_val": 3}.items():
        write_shard(tmp_path / name, range(size), "nanogpt")
    corpus = load_shards(tmp_path, sequence_length=8)
    assert corpus.description.endswith("; 2 shorter than a sequence, never read")


@pytest.mark.parametrize("content", [b"", b"\1\2\3"])
def test_a_damaged_shard_is_refused_among_whole_ones(tmp_path, content):
    write_shard(tmp_path / "a", range(9), "nanogpt")
    (tmp_path / "b.bin").write_bytes(content)
    with pytest.raises(ValueError, match=r"b\.bin (is empty|has 3 bytes)"):
        load_shards(tmp_path)


def test_a_folder_named_as_a_shard_is_refused(tmp_path):
    write_shard(tmp_path / "a", range(9), "nanogpt")
    (tmp_path / "x.bin").mkdir()
    for shards in (str(tmp_path), f"{tmp_path}/*"):
        with pytest.raises(ValueError, match=r"x\.bin is not a file"):
            load_shards(tmp_path, shards=shards)


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
