"""Trains a byte-pair tokenizer on text, and writes the text as shards of its tokens.

    uv run experiments/tokenize_text.py --text 'corpus/**/*.txt' --folder tokens
    uv run --extra cuda experiments/pretrain.py --data.shards tokens \\
        --data.tokenizer tokens/tokenizer.json --model.vocab-size 16384

For several runs on one text: each of them then begins at once. In the folder:
tokenizer.json (Hugging Face, extra "hf"), train.npy and val.npy, one array of tokens
each. Files are held out by the hash of their path, as `pretrain.py` does with text;
those that are not UTF-8, or not a character long, are left out and counted.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro

from sparsejax.data.files import hold_out, text_files
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
    """Share of the files that is held out."""


def main(config: Config) -> dict[str, int]:
    """Writes the folder; returns the number of tokens of each side.

    Raises:
      ValueError: before anything is written, where no file matches, a side is empty, a
        size or the share is out of range, or the folder exists.
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
    found = text_files(config.text)
    texts, left_out = [], 0
    sides: list[bool] = []
    held_out = hold_out(found.names, config.validation_share)
    for path, out in zip(found.paths, held_out, strict=True):
        content = path.read_bytes()
        if not content or not _is_utf8(content):
            left_out += 1
            continue
        texts.append(content)
        sides.append(out)
    by_side = {
        side: [text for text, out in zip(texts, sides, strict=True) if out == held]
        for side, held in (("train", False), ("val", True))
    }
    for side, of_side in by_side.items():
        if not of_side:
            raise ValueError(
                f"no text for {side} in {found.origin}, of {len(texts)} files; match "
                f"more of them, or change validation_share={config.validation_share}"
            )
    trained = _train(by_side["train"], config)
    config.folder.mkdir(parents=True)
    path = config.folder / "tokenizer.json"
    path.write_text(trained, encoding="utf-8")
    tokenizer = load_tokenizer(str(path))
    sizes = {}
    for side, of_side in by_side.items():
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
    console.say(
        f"{tokenizer.vocab_size:,} tokens in {path}; left out: {left_out} files"
    )
    return sizes


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
