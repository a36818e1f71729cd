"""Trains a byte-pair tokenizer on text, and writes the text as shards of its tokens.

    uv run experiments/tokenize_text.py --text 'corpus/**/*.txt' --folder tokens
    uv run --extra cuda experiments/pretrain.py --data.shards tokens \\
        --data.tokenizer tokens/tokenizer.json --model.vocab-size 16384

For several runs on one text: each of them then begins at once. In the folder:
tokenizer.json (Hugging Face, extra "hf"), train.npy and val.npy, one array of tokens
each. Files are held out by the hash of their path, as `pretrain.py` does with text, by
whole packages and without copies where it is asked to; those that are not UTF-8, or not
a character long, are left out and counted.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import tyro

from sparsejax.data.files import hold_out, hold_out_packages, text_files
from sparsejax.data.tokenizers import Tokens, load_tokenizer
from sparsejax.terminal import console

TEXTS_AT_A_TIME = 256
BYTES = 256
"""The number of tokens that every byte-level vocabulary has."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of the tokenizer and its shards: which text, and where they are
    written."""

    folder: Path
    """Folder that is written; it must not exist yet."""
    text: str | None = None
    """Glob of text files; None: the Python standard library's source."""
    vocab_size: int = 16_384
    """Most classes of the tokenizer: a short text yields fewer."""
    trained_on: int = 2**26
    """Bytes of text, of files that are not held out, in which merges are counted."""
    validation_share: float = 0.01
    """Share of the files, or of the packages, that is held out."""
    split_by: Literal["file", "package"] = "file"
    """The unit that lies on one side as a whole: each file, or each package, all files
    in the same folder at the top of the glob."""
    drop_duplicates: bool = False
    """Whether, of files with the same content, only the first by name is written."""


def main(config: Config) -> dict[str, int]:
    """Writes the folder; returns the number of tokens of each side.

    Raises:
      ValueError: before anything is written, where no file matches, a side is empty, a
        size or the share is out of range, all files are of one package that is to be
        on one side, or the folder exists.
      ImportError: before anything is written, where `tokenizers` is not installed.
    """
    if config.vocab_size <= BYTES or config.trained_on < 1:
        raise ValueError(
            f"vocab_size={config.vocab_size} and trained_on={config.trained_on} must "
            f"be more than {BYTES}, the bytes themselves, and 1 or more"
        )
    if not 0 < config.validation_share < 1:
        raise ValueError(
            f"validation_share={config.validation_share} must be above 0 and below 1, "
            f"for both sides need text; give a share such as 0.01"
        )
    if config.folder.exists():
        raise ValueError(f"folder={config.folder} exists; choose another, or delete it")
    text = _read(config)
    trained = _train(text.by_side["train"], config)
    config.folder.mkdir(parents=True)
    path = config.folder / "tokenizer.json"
    path.write_text(trained, encoding="utf-8")
    tokenizer = load_tokenizer(str(path))
    sizes = {}
    for side, of_side in text.by_side.items():
        parts: list[Tokens] = []
        for start in range(0, len(of_side), TEXTS_AT_A_TIME):
            parts += tokenizer.encode_batch(of_side[start : start + TEXTS_AT_A_TIME])
        tokens = np.concatenate(parts)
        np.save(config.folder / f"{side}.npy", tokens)
        sizes[side] = tokens.size
        console.say(
            f"{side}: {len(of_side):,} files, {tokens.size:,} tokens, "
            f"{sum(map(len, of_side)) / tokens.size:.2f} bytes each"
        )
    left_out = f"left out: {text.left_out} files"
    left_out += f" and {text.copies} copies" if config.drop_duplicates else ""
    console.say(f"{tokenizer.vocab_size:,} tokens in {path}; {left_out}")
    return sizes


class _Text(NamedTuple):
    by_side: dict[str, list[bytes]]
    """The contents of the files for "train" and for "val"."""
    left_out: int
    """The number of files that are empty or not UTF-8."""
    copies: int
    """The number of copies that were dropped."""


def _read(config: Config) -> _Text:
    """Returns the text on its two sides. Raises the ValueErrors of `main` that are
    about files."""
    found = text_files(config.text)
    contents = [path.read_bytes() for path in found.paths]
    named = zip(found.names, contents, strict=True)
    texts = {name: text for name, text in named if text and _is_utf8(text)}
    if not texts:
        raise ValueError(
            f"all {len(contents)} files of {found.origin} are empty or not UTF-8; "
            f"match other files, or convert them"
        )
    left_out, copies = len(contents) - len(texts), 0
    if config.drop_duplicates:
        first: dict[bytes, str] = {}
        for name, text in texts.items():
            first.setdefault(text, name)
        copies = len(texts) - len(first)
        texts = {name: text for text, name in first.items()}
    split = hold_out_packages if config.split_by == "package" else hold_out
    held_out = split(list(texts), config.validation_share)
    by_side: dict[str, list[bytes]] = {"train": [], "val": []}
    for text, out in zip(texts.values(), held_out, strict=True):
        by_side["val" if out else "train"].append(text)
    for side, of_side in by_side.items():
        if not of_side:
            raise ValueError(
                f"no text for {side} in {found.origin}, of {len(texts)} files; match "
                f"more of them, or change validation_share={config.validation_share}"
            )
    return _Text(by_side, left_out, copies)


def _is_utf8(content: bytes) -> bool:
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return True


def _train(texts: Sequence[bytes], config: Config) -> str:
    """Returns the content of tokenizer.json."""
    try:
        import tokenizers
        from tokenizers import decoders, models, pre_tokenizers, trainers
    except ImportError as error:
        raise ImportError(
            "a tokenizer is trained by the `tokenizers` package; run "
            "`uv sync --extra hf` or `pip install 'sparsejax[hf]'`"
        ) from error
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=config.vocab_size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_some(texts, config.trained_on), trainer)
    return tokenizer.to_str(pretty=True)


def _some(texts: Sequence[bytes], most: int) -> Iterator[str]:
    """Returns texts taken at equal distances, about `most` bytes together."""
    step = max(1, -(-sum(map(len, texts)) // most))
    return (text.decode() for text in texts[::step])


def run(arguments: list[str]) -> int:
    """Runs the command and returns its exit status."""
    config = tyro.cli(
        Config,
        args=arguments,
        description=__doc__,
        prog="experiments/tokenize_text.py",
    )
    try:
        main(config)
    except (ValueError, ImportError, OSError) as error:
        return console.fail(error)
    return 0


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
