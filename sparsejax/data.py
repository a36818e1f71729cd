"""Text to tokens to batches: tokenizers, the held-out split, resumable iterators."""

import glob
import hashlib
import os
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, SupportsIndex

import grain
import numpy as np
from jaxtyping import Int32, UInt

from sparsejax.config import DataConfig

Tokens = UInt[np.ndarray, " tokens"]

# Installed packages differ from machine to machine; the test suite is long tables of
# literals; pydoc_data is generated prose in one file, which the hash holds out, where
# it would be more than half of the held-out tokens and unlike anything trained on.
_NOT_SOURCE = frozenset(
    {
        "site-packages",
        "dist-packages",
        "__pycache__",
        "test",
        "tests",
        "idle_test",
        "pydoc_data",
    }
)
_FILES_PER_BATCH = 256


class Tokenizer(Protocol):
    """Text to token ids and back."""

    @property
    def name(self) -> str: ...

    @property
    def vocab_size(self) -> int: ...

    def encode(self, text: bytes) -> Tokens: ...

    def encode_batch(self, texts: Sequence[bytes]) -> list[Tokens]: ...

    def decode(self, ids: Sequence[int] | np.ndarray) -> str: ...


class ByteTokenizer:
    """Every byte is a token; nothing to train, nothing to download."""

    name = "bytes"
    vocab_size = 256

    def encode(self, text: bytes) -> Tokens:
        return np.frombuffer(text, np.uint8).astype(np.uint16)

    def encode_batch(self, texts: Sequence[bytes]) -> list[Tokens]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Text of the ids; bytes that are not UTF-8 become the replacement mark."""
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
        return [np.array(e.ids, _token_dtype(self.vocab_size)) for e in encodings]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Text of the ids, special tokens included."""
        return self._tokenizer.decode(
            np.asarray(ids).tolist(), skip_special_tokens=False
        )


def load_tokenizer(path: str | None) -> Tokenizer:
    """The tokenizer of a tokenizer.json, or of bytes for None."""
    return ByteTokenizer() if path is None else HuggingFaceTokenizer(path)


@dataclass(frozen=True, kw_only=True, eq=False)
class Corpus:
    """Tokens of the training and of the held-out files, each side concatenated."""

    train: Tokens
    """uint16, or uint32 where the vocabulary is larger than 65536."""
    validation: Tokens
    tokenizer: Tokenizer
    description: str
    """One line: how many files and tokens, from where."""
    fingerprint: str
    """SHA-256 over the tokens of both sides; a resume on other data is refused."""


def load_corpus(config: DataConfig) -> Corpus:
    """The tokens of `config.text`, split by file into training and held-out.

    A file is held out when the hash of its path (relative to the fixed part of the
    glob) falls into the lowest `validation_share` of all hashes: the side of a file
    depends neither on the machine nor on the other files, except that each side gets
    at least one. A single file is cut instead: its last `validation_share` is held out.
    Empty files are left out.

    Args:
      config: which text, tokenizer, share and sequence length. Text None is the source
        of the Python standard library that runs this.
    Returns:
      The corpus, each side at least `sequence_length + 1` tokens long.
    Raises:
      ValueError: no file matches, a file cannot be read or decoded, all are empty, a
        setting is out of range, or a side is shorter than one sequence.
      ImportError: a tokenizer.json without the `tokenizers` package.
    """
    if not 0.0 < config.validation_share < 1.0:
        raise ValueError(
            f"validation_share={config.validation_share} is not in (0, 1): both sides "
            f"need tokens; the default is {DataConfig().validation_share}"
        )
    if config.sequence_length < 1:
        raise ValueError(
            f"sequence_length={config.sequence_length} is not positive; the default "
            f"is {DataConfig().sequence_length}"
        )
    tokenizer = load_tokenizer(config.tokenizer)
    root, paths, origin = _find_files(config.text)
    tokens = _tokenise(paths, tokenizer)
    names = [path.relative_to(root).as_posix() for path in paths]
    names = [name for name, ids in zip(names, tokens, strict=True) if ids.size]
    tokens = [ids for ids in tokens if ids.size]
    if not tokens:
        raise ValueError(f"text={config.text!r}: all {len(paths)} files are empty")

    if len(tokens) == 1:
        held_out = max(1, round(tokens[0].size * config.validation_share))
        train, validation = tokens[0][:-held_out], tokens[0][-held_out:]
        split = f"the last {config.validation_share:.2%} of the only file"
    else:
        is_held_out = _hold_out(names, config.validation_share)
        train, validation = (
            np.concatenate(
                [ids for ids, out in zip(tokens, is_held_out, strict=True) if out is s]
            )
            for s in (False, True)
        )
        split = f"{sum(is_held_out)} of the files"
    for side, ids in (("training", train), ("held-out", validation)):
        if ids.size < config.sequence_length + 1:
            raise ValueError(
                f"sequence_length={config.sequence_length} needs at least "
                f"{config.sequence_length + 1} {side} tokens, and there are {ids.size} "
                f"({len(tokens)} non-empty files, {train.size + validation.size} "
                f"tokens in all, validation_share={config.validation_share}); shorten "
                f"the sequence, add text or change validation_share"
            )
    return Corpus(
        train=train,
        validation=validation,
        tokenizer=tokenizer,
        description=(
            f"{len(tokens)} files, {train.size + validation.size} tokens "
            f"({tokenizer.name}) from {origin}; held out: {validation.size} tokens, "
            f"{split}"
        ),
        fingerprint=_fingerprint(train, validation),
    )


def train_batches(
    corpus: Corpus, config: DataConfig, *, batch_size: int, micro_batches: int = 1
) -> grain.DatasetIterator[dict[str, Int32[np.ndarray, "micro batch length"]]]:
    """Endless shuffled batches of training windows, with a state to save.

    Window i is tokens [i L, (i + 1) L], L = `sequence_length`: inputs do not overlap,
    and the last token, only ever a target, is the first of the next window. Every epoch
    has its own order, given by `config.seed`; a batch may span two epochs, so that no
    window is left out.

    Args:
      corpus: where the windows come from.
      config: sequence length and seed.
      batch_size: sequences per optimiser step.
      micro_batches: how many equal parts a step is cut into.
    Returns:
      An iterator over {"tokens": int32 (micro_batches, batch_size / micro_batches,
      sequence_length + 1)}. `get_state()` is a JSON object that counts the batches
      taken; `set_state()` continues exactly there, with the same `batch_size`.
    Raises:
      ValueError: batch_size does not divide, exceeds the windows there are, or the
        seed is out of range.
    """
    if micro_batches < 1 or batch_size < 1 or batch_size % micro_batches:
        raise ValueError(
            f"batch_size={batch_size} is not a positive multiple of "
            f"micro_batches={micro_batches}; change one of them"
        )
    if not 0 <= config.seed < 2**32:
        raise ValueError(
            f"seed={config.seed} is not in [0, 2**32), the seeds of the shuffle"
        )
    windows = _Windows(corpus.train, config.sequence_length)
    if len(windows) < batch_size:
        raise ValueError(
            f"batch_size={batch_size} exceeds the {len(windows)} training windows of "
            f"sequence_length={config.sequence_length} in {corpus.train.size} tokens; "
            f"make one of them smaller or add text"
        )

    def stack(rows: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
        return {"tokens": np.stack(rows).reshape(micro_batches, -1, rows[0].size)}

    batches = (
        grain.MapDataset.source(windows)
        .shuffle(seed=config.seed)
        .repeat()
        .batch(batch_size, drop_remainder=True, batch_fn=stack)
    )
    # The tokens are in memory: one thread, a few batches ahead, hides the copying.
    return iter(
        batches.to_iter_dataset(
            grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)
        )
    )


def validation_batches(
    corpus: Corpus, config: DataConfig, *, batch_size: int, batches: int
) -> list[Int32[np.ndarray, "batch length"]]:
    """The same held-out windows every time, spread evenly over the held-out tokens.

    Args:
      corpus: where the windows come from.
      config: sequence length.
      batch_size: sequences per batch.
      batches: how many batches; fewer come back where the held-out tokens do not fill
        them, for no window is used twice and all batches have one shape.
    Returns:
      At least one int32 array (batch_size, sequence_length + 1).
    Raises:
      ValueError: the held-out tokens do not fill a single batch.
    """
    if batch_size < 1 or batches < 1:
        raise ValueError(
            f"batch_size={batch_size} and batches={batches} must be positive"
        )
    windows = _Windows(corpus.validation, config.sequence_length)
    if len(windows) < batch_size:
        raise ValueError(
            f"batch_size={batch_size} exceeds the {len(windows)} held-out windows of "
            f"sequence_length={config.sequence_length} in {corpus.validation.size} "
            f"tokens; make one of them smaller or raise validation_share"
        )
    batches = min(batches, len(windows) // batch_size)
    chosen = np.arange(batches * batch_size) * len(windows) // (batches * batch_size)
    rows = np.stack([windows[i] for i in chosen])
    return list(rows.reshape(batches, batch_size, -1))


def unigram_loss(corpus: Corpus) -> float:
    """Cross-entropy of the held-out tokens under training frequencies, nats per token.

        -mean_v log((count(v) + 1) / (n + V)),  v over the held-out tokens,

    counts over the n training tokens, add-one smoothing over the vocabulary V. A model
    that does not get below this has learnt nothing but how often each token occurs.
    """
    vocab_size = corpus.tokenizer.vocab_size
    counts = np.bincount(corpus.train, minlength=vocab_size)
    log_share = np.log(counts + 1.0) - np.log(corpus.train.size + vocab_size)
    return float(-log_share[corpus.validation].mean())


class _Windows:
    """Random access to the windows of a token sequence, as grain's sources have it."""

    def __init__(self, tokens: Tokens, length: int) -> None:
        self._tokens = tokens
        self._length = length

    def __len__(self) -> int:
        return (self._tokens.size - 1) // self._length

    def __getitem__(self, index: SupportsIndex) -> Int32[np.ndarray, " length"]:
        start = int(index) * self._length
        return self._tokens[start : start + self._length + 1].astype(np.int32)

    def __repr__(self) -> str:
        # grain prints sources in its messages; the tokens themselves help nobody.
        return f"_Windows({len(self)} of {self._length})"


def _find_files(text: str | None) -> tuple[Path, list[Path], str]:
    """Root, sorted files and a short name of where they are."""
    if text is None:
        root = Path(sysconfig.get_path("stdlib"))
        paths = list(_standard_library_files(root))
        version = ".".join(map(str, sys.version_info[:3]))
        origin = f"the standard library of Python {version}"
    else:
        pattern = os.path.expanduser(text)
        root = _fixed_part(pattern)
        matches = glob.glob(pattern, recursive=True)
        paths = [path for path in map(Path, matches) if path.is_file()]
        origin = text
    if not paths:
        raise ValueError(
            f"text={text!r}: no file matches in {root}; give a glob of text files "
            f"('**' for any depth), or None for the standard library"
        )
    # By the relative path, as strings: the order must not depend on the machine.
    paths = sorted(set(paths), key=lambda path: path.relative_to(root).as_posix())
    return root, paths, origin


def _standard_library_files(root: Path) -> Iterator[Path]:
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [s for s in subfolders if s not in _NOT_SOURCE]
        yield from (Path(folder, file) for file in files if file.endswith(".py"))


def _fixed_part(pattern: str) -> Path:
    """The folders of a glob before its first wildcard."""
    fixed: list[str] = []
    for part in Path(pattern).parts[:-1]:
        if glob.has_magic(part):
            break
        fixed.append(part)
    return Path(*fixed)


def _tokenise(paths: Sequence[Path], tokenizer: Tokenizer) -> list[Tokens]:
    """The tokens of each file; a bounded number of texts is in memory at a time."""
    tokens: list[Tokens] = []
    for start in range(0, len(paths), _FILES_PER_BATCH):
        batch = paths[start : start + _FILES_PER_BATCH]
        texts = [_read(path) for path in batch]
        try:
            tokens += tokenizer.encode_batch(texts)
        except UnicodeDecodeError as error:
            offender = batch[texts.index(error.object)]
            raise ValueError(
                f"{offender} is not UTF-8 (byte {error.start}), which "
                f"tokenizer={tokenizer.name!r} needs; convert it, leave it out of "
                f"`text`, or use bytes (tokenizer=None)"
            ) from error
    return tokens


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(
            f"{path} cannot be read ({error.strerror}); leave it out of `text` or "
            f"change its permissions"
        ) from error


def _hold_out(names: Sequence[str], share: float) -> list[bool]:
    """For each name whether it is held out; both answers occur."""
    digests = [hashlib.sha256(name.encode()).digest() for name in names]
    scores = [int.from_bytes(digest[:8]) / 2**64 for digest in digests]
    held_out = [score < share for score in scores]
    if not any(held_out):
        held_out[int(np.argmin(scores))] = True
    if all(held_out):
        held_out[int(np.argmax(scores))] = False
    return held_out


def _token_dtype(vocab_size: int) -> type[np.uint16] | type[np.uint32]:
    return np.uint16 if vocab_size <= 2**16 else np.uint32


def _fingerprint(*sides: Tokens) -> str:
    digest = hashlib.sha256()
    for ids in sides:
        digest.update(f"{ids.dtype} {ids.size};".encode())
        digest.update(np.ascontiguousarray(ids, ids.dtype.newbyteorder("<")).data)
    return digest.hexdigest()
