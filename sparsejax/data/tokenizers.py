"""Tokenizers from text to token ids and back: bytes, or a Hugging Face
tokenizer.json."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from jaxtyping import UInt

Tokens = UInt[np.ndarray, " tokens"]
"""An array of token ids (tokens,): uint16, or uint32 where the vocabulary is larger
than 65536."""


class Tokenizer(Protocol):
    """A mapping from text to token ids and back."""

    @property
    def name(self) -> str: ...

    @property
    def vocab_size(self) -> int: ...

    def encode(self, text: bytes) -> Tokens: ...

    def encode_batch(self, texts: Sequence[bytes]) -> list[Tokens]: ...

    def decode(self, ids: Sequence[int] | np.ndarray) -> str: ...


class ByteTokenizer:
    """The tokenizer whose tokens are the bytes; there is nothing to train or to
    download."""

    name = "bytes"
    vocab_size = 256

    def encode(self, text: bytes) -> Tokens:
        return np.frombuffer(text, np.uint8).astype(np.uint16)

    def encode_batch(self, texts: Sequence[bytes]) -> list[Tokens]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Returns the text of the ids; bytes that are not UTF-8 become the replacement
        mark."""
        return bytes(np.asarray(ids, np.uint8)).decode("utf-8", errors="replace")


class HuggingFaceTokenizer:
    """A tokenizer.json, read by the `tokenizers` package (extra `hf`).

    Encoding adds no special tokens, and ignores the truncation and padding that the
    file may ask for: both would silently change a corpus.

    Raises:
      ImportError: `tokenizers` is not installed.
      ValueError: the file is missing or is not a tokenizer.json.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        try:
            import tokenizers
        except ImportError as error:
            raise ImportError(
                f"tokenizer={os.fspath(path)!r} needs the `tokenizers` package; run "
                f"`uv sync --extra hf` or `pip install 'sparsejax[hf]'`, or leave "
                f"tokenizer=None for bytes"
            ) from error
        if not Path(path).is_file():
            raise ValueError(
                f"tokenizer={os.fspath(path)!r} is not a file; give the path of a "
                f"Hugging Face tokenizer.json, or None for bytes"
            )
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(os.fspath(path))
        except Exception as error:  # `tokenizers` raises nothing narrower.
            raise ValueError(
                f"tokenizer={os.fspath(path)!r} is not a Hugging Face "
                f"tokenizer.json: {error}"
            ) from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.name = os.fspath(path)
        # Ids may have gaps, so the count of entries can be too small for a table.
        self.vocab_size = 1 + max(
            self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1
        )

    def encode(self, text: bytes) -> Tokens:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[bytes]) -> list[Tokens]:
        encodings = self._tokenizer.encode_batch_fast(
            [text.decode("utf-8") for text in texts], add_special_tokens=False
        )
        return [np.array(e.ids, _dtype(self.vocab_size)) for e in encodings]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Returns the text of the ids, special tokens included."""
        return self._tokenizer.decode(
            np.asarray(ids).tolist(), skip_special_tokens=False
        )


def load_tokenizer(path: str | None) -> Tokenizer:
    """Returns the tokenizer of the tokenizer.json at `path`, or of bytes where that is
    None."""
    return ByteTokenizer() if path is None else HuggingFaceTokenizer(path)


def _dtype(vocab_size: int) -> type[np.uint16] | type[np.uint32]:
    return np.uint16 if vocab_size <= 2**16 else np.uint32
