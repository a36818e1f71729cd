"""Text becomes a tokenizer and shards that a run reads as it would the text."""

import math
import sys

import numpy as np
import pytest

from experiments import tokenize_text
from experiments.tokenize_text import Config
from sparsejax.config import DataConfig
from sparsejax.data.corpus import load_corpus
from tests.support.micro_run import write_text


@pytest.fixture
def config(tmp_path):
    (tmp_path / "text").mkdir()
    text = write_text(tmp_path / "text")
    (tmp_path / "text" / "latin.txt").write_bytes(b"caf\xe9 " * 9)
    (tmp_path / "text" / "empty.txt").touch()
    return Config(
        folder=tmp_path / "new" / "tokens",
        text=text,
        vocab_size=300,
        validation_share=0.3,
    )


def test_the_shards_hold_the_text(config, capsys):
    sizes = tokenize_text.main(config)
    assert "left out: 2 files" in capsys.readouterr().out
    data = DataConfig(
        shards=str(config.folder), tokenizer=f"{config.folder}/tokenizer.json"
    )
    corpus = load_corpus(data, vocab_size=300)
    sides = corpus.train, corpus.validation
    assert [sum(map(len, side)) for side in sides] == list(sizes.values())
    texts = {path.read_bytes() for path in config.folder.parents[1].glob("text/?.txt")}
    got = "".join(corpus.tokenizer.decode(np.concatenate(side)) for side in sides)
    assert sorted(got) == sorted(b"".join(texts).decode())
    # Fewer tokens than bytes, and the side of a file is that of the text itself.
    assert sum(sizes.values()) < 0.5 * sum(map(len, texts))
    (config.folder.parents[1] / "text" / "latin.txt").unlink()
    whole = load_corpus(
        DataConfig(text=config.text, validation_share=0.3), vocab_size=256
    )
    held_out = corpus.tokenizer.decode(np.concatenate(corpus.validation))
    assert held_out.encode() == bytes(np.concatenate(whole.validation).astype(np.uint8))


def test_packages_and_copies_lie_on_the_sides_that_they_have_as_text(config, capsys):
    root = config.folder.parents[1] / "packages"
    lines = "copies of one file, lines of another: " * 40
    for package in range(12):
        (root / f"p{package}").mkdir(parents=True)
        (root / f"p{package}" / "own.txt").write_text(f"{package} {lines}")
        (root / f"p{package}" / "same.txt").write_text(lines)
    split = {"validation_share": 0.3, "split_by": "package", "drop_duplicates": True}
    chosen = Config(
        folder=config.folder, text=f"{root}/**/*.txt", vocab_size=300, **split
    )
    tokenize_text.main(chosen)
    assert "left out: 0 files and 11 copies" in capsys.readouterr().out
    tokenizer = f"{config.folder}/tokenizer.json"
    tokens = DataConfig(
        shards=str(config.folder), tokenizer=tokenizer, sequence_length=64
    )
    written = load_corpus(tokens, vocab_size=300)
    text = DataConfig(
        text=chosen.text, tokenizer=tokenizer, sequence_length=64, **split
    )
    read = load_corpus(text, vocab_size=300)
    for side in ("train", "validation"):
        of_shards, of_text = getattr(written, side), getattr(read, side)
        np.testing.assert_array_equal(*map(np.concatenate, (of_shards, of_text)))
    assert sum(map(len, read.validation)) > 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 256}, "vocab_size=256 and .* more than 256"),
        ({"trained_on": 0}, "trained_on=0 must be"),
        ({"text": "/nowhere/*.txt"}, "no file matches"),
        ({"validation_share": 0.0}, "share=0.0 must be above 0 and below 1.* as 0.01"),
        ({"validation_share": 1.0}, "validation_share=1.0 must be above 0 and below"),
        ({"validation_share": -0.1}, "validation_share=-0.1 must be above 0"),
        ({"validation_share": math.nan}, "validation_share=nan must be above 0"),
    ],
)
def test_what_makes_no_shards_is_refused(config, changes, message, capsys):
    arguments = {"folder": config.folder, "text": config.text, **changes}
    flags = [f"--{key.replace('_', '-')}={value}" for key, value in arguments.items()]
    assert tokenize_text.run(flags) == 1
    words = " ".join(capsys.readouterr().err.split())
    assert words.startswith("ValueError")
    with pytest.raises(ValueError, match=message):
        tokenize_text.main(Config(**arguments))
    assert not config.folder.exists()


def test_a_text_of_one_package_or_of_no_readable_file_is_refused(config):
    root = config.folder.parents[1]
    one = Config(folder=config.folder, text=f"{root}/*/?.txt", split_by="package")
    with pytest.raises(ValueError, match="and all 8 files lie in 'text'"):
        tokenize_text.main(one)
    unreadable = Config(folder=config.folder, text=f"{root}/*/[el]*.txt")
    with pytest.raises(ValueError, match="all 2 files .* are empty or not UTF-8"):
        tokenize_text.main(unreadable)
    assert not config.folder.exists()


def test_what_is_there_is_not_overwritten(config):
    config.folder.mkdir(parents=True)
    with pytest.raises(ValueError, match="exists; choose another"):
        tokenize_text.main(config)
    assert list(config.folder.iterdir()) == []


def test_without_the_package_no_folder_is_left_behind(config, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ImportError, match=r"uv sync --extra hf.*sparsejax\[hf\]"):
        tokenize_text.main(config)
    assert not config.folder.parent.exists()
    flags = [f"--folder={config.folder}", f"--text={config.text}"]
    assert tokenize_text.run(flags) == 1
    assert capsys.readouterr().err.startswith("ImportError: a tokenizer is trained by")
