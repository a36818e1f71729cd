"""A corpus of token files: any cut, held-out names, fingerprints, damaged files."""

import os
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsejax.config import DataConfig
from sparsejax.data import corpus as corpus_module
from sparsejax.data.corpus import Corpus, load_corpus
from sparsejax.data.tokenizers import load_tokenizer
from tests.support.files.corpus_sides import only, side, write_files
from tests.support.files.shard_files import CONVENTIONS, write_shard
from tests.support.files.tokenizer_file import write_tokenizer


def load_shards(folder: Path, *, vocab_size: int = 50_304, **settings) -> Corpus:
    defaults = {"sequence_length": 2, "validation_share": 0.2, "shards": str(folder)}
    return load_corpus(DataConfig(**{**defaults, **settings}), vocab_size=vocab_size)


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
