"""Held-out tokens for the evaluation of a finished model, and the bytes they stand
for."""

from collections.abc import Iterator, Sequence

import numpy as np

from sparsejax.data.corpus import tokenise
from sparsejax.data.files import text_files
from sparsejax.data.tokenizers import Tokenizer, Tokens


def tokens_of_text(text: str, tokenizer: Tokenizer) -> list[Tokens]:
    """Returns the tokens of every file of a glob, none of which is left out.

    Raises:
      ValueError: no file matches, or one cannot be read or decoded.
    """
    return tokenise(text_files(text).paths, tokenizer)


def every_window(parts: Sequence[Tokens], length: int) -> Iterator[Tokens]:
    """Yields arrays of tokens in windows of at most `length` + 1, each of which
    begins with the last token of the one before it: every token but the first of each
    array is predicted once, those of the rest that fills no whole window included."""
    for part in parts:
        for start in range(0, len(part) - 1, length):
            yield part[start : start + length + 1]


def bytes_of(tokens: Tokens, tokenizer: Tokenizer) -> int:
    """Returns the number of UTF-8 bytes of the text that the tokens stand for."""
    if tokenizer.name == "bytes":
        return int(np.size(tokens))
    return len(tokenizer.decode(tokens).encode())
