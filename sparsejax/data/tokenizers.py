"""Tokenizers from text to token ids and back: bytes, or a Hugging Face
tokenizer.json."""

import itertools
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from jaxtyping import UInt

Tokens = UInt[np.ndarray, " tokens"]
"""An array of token ids (tokens,): uint16, or uint32 where the vocabulary is larger
than 65536."""


# A vocabulary is padded to a multiple of up to 1024, or to the next power of two.
_MOST_PADDING = 1024


class Tokenizer(Protocol):
    """A mapping from text to token ids and back."""

    @property
    def name(self) -> str: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def end_of_text(self) -> int | None:
        """The id of the token that ends a text; None where there is none."""
        ...

    def encode(self, text: bytes) -> Tokens: ...

    def encode_batch(self, texts: Sequence[bytes]) -> list[Tokens]: ...

    def decode(self, ids: Sequence[int] | np.ndarray) -> str: ...

    def to_json(self) -> str:
        """Returns the tokenizer.json of what it does."""
        ...


class ByteTokenizer:
    """The tokenizer whose tokens are the bytes; there is nothing to train or to
    download."""

    name = "bytes"
    vocab_size = 256
    end_of_text = None

    def encode(self, text: bytes) -> Tokens:
        return np.frombuffer(text, np.uint8).astype(np.uint16)

    def encode_batch(self, texts: Sequence[bytes]) -> list[Tokens]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Returns the text of the ids; bytes that are not UTF-8 become the replacement
        mark."""
        return bytes(np.asarray(ids, np.uint8)).decode("utf-8", errors="replace")

    def to_json(self) -> str:
        """Returns a tokenizer.json with the same ids: byte-level pairs without a single
        merge, so that no two bytes are ever one token."""
        at_bytes = {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": False,
            "use_regex": False,
        }
        content = {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [],
            "normalizer": None,
            "pre_tokenizer": at_bytes,
            "post_processor": None,
            "decoder": at_bytes,
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                "ignore_merges": False,
                "vocab": {sign: byte for byte, sign in enumerate(_signs_of_bytes())},
                "merges": [],
            },
        }
        return json.dumps(content, ensure_ascii=False, indent=2)


def _signs_of_bytes() -> list[str]:
    """Returns the character that stands for each byte in byte-level vocabularies: its
    own in Latin-1 where that prints, else the next one from U+0100 on.

    Source: Radford et al. 2019, `bytes_to_unicode` in the code of GPT-2.
    """
    prints = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = itertools.count(0x100)
    return [chr(byte if byte in prints else next(others)) for byte in range(256)]


ENDS_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")
"""The tokens that end a text: of GPT-2 and NeoX, Llama 3, Llama 2 and Mistral, Gemma. A
tokenizer.json does not say which of its tokens does."""


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
                f"tokenizer.json: {error}; save one with the package `tokenizers`, or "
                f"leave it out for bytes"
            ) from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.name = os.fspath(path)
        # Ids may have gaps, so the count of entries can be too small for a table.
        self.vocab_size = 1 + max(
            self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1
        )

    @property
    def end_of_text(self) -> int | None:
        """The id of the first of `ENDS_OF_TEXT` that the tokenizer has; None where it
        has none of them."""
        ids = map(self._tokenizer.token_to_id, ENDS_OF_TEXT)
        return next((id for id in ids if id is not None), None)

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

    def to_json(self) -> str:
        """Returns a tokenizer.json that encodes as this does: the file that was read,
        without truncation, padding, and special tokens that encoding would add."""
        content = json.loads(self._tokenizer.to_str())
        if self._tokenizer.num_special_tokens_to_add(is_pair=False):
            content["post_processor"] = None
        return json.dumps(content, ensure_ascii=False, indent=2)


def load_tokenizer(path: str | None) -> Tokenizer:
    """Returns the tokenizer of the tokenizer.json at `path`, or of bytes where that is
    None."""
    return ByteTokenizer() if path is None else HuggingFaceTokenizer(path)


def tokenizer_within(path: str | None, vocab_size: int) -> Tokenizer:
    """Returns the tokenizer of `load_tokenizer` for a model of this vocabulary. Raises
    ValueError where it has more tokens than that, or far fewer."""
    tokenizer = load_tokenizer(path)
    has = tokenizer.vocab_size
    fits = f"--model.vocab-size {max(1, -(-has // 64)) * 64}"
    if has > vocab_size:
        raise ValueError(
            f"the tokenizer {tokenizer.name} has {has} tokens, more than "
            f"model.vocab_size={vocab_size}; set {fits}"
        )
    if vocab_size > most_rows(has):
        raise ValueError(
            f"the tokenizer {tokenizer.name} has {has} tokens, far fewer than "
            f"model.vocab_size={vocab_size}, most of whose rows would never be "
            f"trained; set {fits}, or give the data and the --data.tokenizer that the "
            f"vocabulary is for"
        )
    return tokenizer


def most_rows(tokens: int) -> int:
    """Returns the largest vocabulary, padding included, that a model for so many tokens
    may have."""
    return max(2 * tokens, tokens + _MOST_PADDING)


def _dtype(vocab_size: int) -> type[np.uint16] | type[np.uint32]:
    return np.uint16 if vocab_size <= 2**16 else np.uint32
