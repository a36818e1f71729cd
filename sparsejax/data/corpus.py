"""The tokens of a run: from text or from shards, split, checked, and fingerprinted."""

import hashlib
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple, NoReturn

import numpy as np
from jaxtyping import Int64

from sparsejax.config import DataConfig
from sparsejax.data.files import (
    hold_out,
    hold_out_packages,
    named_side,
    shard_files,
    text_files,
)
from sparsejax.data.shards import open_shard
from sparsejax.data.tokenizers import (
    Tokenizer,
    Tokens,
    most_rows,
    tokenizer_within,
)

_TEXTS_IN_MEMORY = 256
# In tokens. What one thread hashes at a time; a fingerprint depends on it.
_BLOCK = 2**24
# In tokens. Stays in a core's cache between the two times that it is read.
_CHUNK = 2**18
_MOST_THREADS = 16
_UNIGRAM_TRAINING = 2**26
_UNIGRAM_HELD_OUT = 2**24


@dataclass(frozen=True, kw_only=True, eq=False)
class Corpus:
    """The tokens of a run, of the training side and of the held-out side.

    Each side is one array or more, uint16 or uint32 (tokens,), and no sequence runs
    from one into the next. All text of a side is one array in memory; each shard is a
    memory map of its own.
    """

    train: tuple[Tokens, ...]
    validation: tuple[Tokens, ...]
    vocab_size: int
    """The number of ids of the tokenizer; for shards without a tokenizer, 1 + the
    largest id."""
    tokenizer: Tokenizer | None
    """The tokenizer of the text; None for shards without a tokenizer.json."""
    description: str
    """One line that says how many files and tokens there are, and where they come
    from."""
    fingerprint: str
    """A SHA-256 over the tokens of each file, their width, and how many of them are
    held out, but over no path; a resume on other data is refused."""

    def head(self, tokens: int) -> "Corpus":
        """Returns a piece of the corpus: `tokens` tokens of each side, or all where
        there are fewer, taken from its longest arrays and copied into memory."""
        sides = (self.train, self.validation)
        train, validation = (_longest(side, tokens) for side in sides)
        return replace(self, train=train, validation=validation)

    def check_is_that_of(self, model: str, fingerprint: str) -> None:
        """Raises ValueError where a model was trained on other tokens."""
        if fingerprint != self.fingerprint:
            raise ValueError(
                f"{model} was trained on other tokens than {self.description}, and may "
                f"have read what is held out of these; bring its text back, or give "
                f"--text GLOB of text that it was not trained on"
            )


def _longest(parts: Sequence[Tokens], tokens: int) -> tuple[Tokens, ...]:
    taken = []
    for part in sorted(parts, key=len, reverse=True):
        if tokens > 0:
            taken.append(np.array(part[:tokens]))
            tokens -= len(taken[-1])
    return tuple(taken)


def load_corpus(config: DataConfig, *, vocab_size: int) -> Corpus:
    """Returns the tokens of `config.text` or `config.shards`, training and held-out.

    A file is held out when the hash of its path (relative to the folder, or to the
    fixed part of the glob) falls into the lowest `validation_share` of all hashes: the
    side of a file depends neither on the machine nor on the other files, except that
    each side gets at least one. A single file is cut instead: its last
    `validation_share` is held out. Empty text files are left out. With `split_by`
    "package" it is the name of a file's first folder that is hashed, so that the files
    below it are on one side. With `drop_duplicates` a file is left out where one before
    it, by name, has the same tokens.

    Shards with the word "test" in their path are left out. Where others have "val",
    "valid" or "validation", these are held out, and no hash is asked. Every shard is
    read once, in bounded memory and by several threads: 1.6 GB/s on two shared cores of
    an x86 server, the file in memory; nearly all of it is SHA-256.

    Args:
      config: which files, tokenizer, share and sequence length. Neither text nor shards
        is the source of the Python standard library that runs this.
      vocab_size: the number of ids that the model knows, those below it. A tokenizer
        may have fewer tokens, but neither less than half as many nor 1024 fewer,
        whichever is less: so much is padding, and more is another tokenizer's
        vocabulary. Of shards without a tokenizer only the largest id is known, and
        small data need not hold the largest; there the description says how far apart
        they are.
    Returns:
      the corpus; each side has an array of at least `sequence_length + 1` tokens.
    Raises:
      ValueError: no file matches, a file cannot be read or decoded or is damaged, all
        are empty, an id or the tokenizer exceeds the vocabulary or is far below it, or
        a side is shorter than one sequence.
      ImportError: a tokenizer.json without the `tokenizers` package.
    """
    if config.shards is not None:
        return _from_shards(config, config.shards, vocab_size)
    return _from_text(config, vocab_size)


def unigram_loss(corpus: Corpus) -> float:
    """Returns the cross-entropy of the held-out tokens under training frequencies, in
    nats per token.

        -mean_v log((count(v) + 1) / (n + V)),  v over the held-out tokens,

    counts over the n training tokens, add-one smoothing over the vocabulary V. A model
    that does not get below this has learnt nothing but how often each token occurs.
    Of a large corpus, the first 2^26 training and 2^24 held-out tokens are counted.
    """
    train = _count(corpus.train, _UNIGRAM_TRAINING, corpus.vocab_size)
    held_out = _count(corpus.validation, _UNIGRAM_HELD_OUT, corpus.vocab_size)
    log_share = np.log(train + 1.0) - np.log(train.sum() + corpus.vocab_size)
    return float(-(held_out @ log_share) / held_out.sum())


class File(NamedTuple):
    """A file of a corpus."""

    name: str
    """The path relative to the folder or the glob, which decides the side of the
    file."""
    path: Path
    tokens: Tokens


def held_out_files(config: DataConfig, *, vocab_size: int) -> list[File]:
    """Returns the files of a text that `load_corpus` holds out, in their order; of a
    single file its held-out end.

    Raises:
      ValueError: those of `load_corpus`; or the data are shards, which are no text.
    """
    if config.shards is not None:
        raise ValueError(
            f"data.shards={config.shards!r} are tokens, and their files are no texts; "
            f"give the text that they were made of"
        )
    tokenizer = tokenizer_within(config.tokenizer, vocab_size)
    read = _read_text(config, tokenizer)
    held_out, _ = _hold_out_by_hash(
        read.files, config.validation_share, config.split_by
    )
    pairs = zip(read.files, held_out, strict=True)
    return [
        file._replace(tokens=file.tokens[-count:]) for file, count in pairs if count
    ]


def _from_text(config: DataConfig, vocab_size: int) -> Corpus:
    tokenizer = tokenizer_within(config.tokenizer, vocab_size)
    files, origin, copies = _read_text(config, tokenizer)
    held_out, rule = _hold_out_by_hash(files, config.validation_share, config.split_by)
    train, validation = (
        (np.concatenate(side),) if side else () for side in _split(files, held_out)
    )
    _refuse_short_sides(train, validation, config)
    survey = _survey(files, tokenizer.vocab_size, tokenizer.name)
    return Corpus(
        train=train,
        validation=validation,
        vocab_size=tokenizer.vocab_size,
        tokenizer=tokenizer,
        description=(
            f"{len(files)} files, {sum(file.tokens.size for file in files)} tokens "
            f"({tokenizer.name}) from {origin}; held out: {sum(held_out)} "
            f"tokens, {rule}" + (f"; left out: {copies} copies" if copies else "")
        ),
        fingerprint=_fingerprint(files, held_out, survey.digests),
    )


class _Text(NamedTuple):
    files: list[File]
    """The files that hold any text, without copies where these are dropped."""
    origin: str
    copies: int
    """The number of copies that were dropped."""


def _read_text(config: DataConfig, tokenizer: Tokenizer) -> _Text:
    """Returns the files of `config.text`. Raises ValueError where all are empty."""
    found = text_files(config.text)
    tokens = tokenise(found.paths, tokenizer)
    named = zip(found.names, found.paths, tokens, strict=True)
    files = [File(*entry) for entry in named if entry[2].size]
    if not files:
        raise ValueError(f"text={config.text!r}: all {len(tokens)} files are empty")
    kept = _without_copies(files) if config.drop_duplicates else files
    return _Text(kept, found.origin, len(files) - len(kept))


def _from_shards(config: DataConfig, shards: str, vocab_size: int) -> Corpus:
    tokenizer, limit, whose = None, vocab_size, f"model.vocab_size={vocab_size}"
    if config.tokenizer is not None:
        tokenizer = tokenizer_within(config.tokenizer, vocab_size)
        limit, whose = tokenizer.vocab_size, f"the tokenizer {tokenizer.name}"
    found = shard_files(shards)
    sides = [named_side(name) for name in found.names]
    if None not in sides:
        raise ValueError(
            f"shards={shards!r}: all {len(sides)} files are named val or test, which "
            f"leaves none to train on; rename one or match more"
        )
    files = [
        File(name, path, open_shard(path, config.shard_dtype))
        for name, path, side in zip(found.names, found.paths, sides, strict=True)
        if side != "left out"
    ]
    if "held out" in sides:
        is_named = [named_side(file.name) == "held out" for file in files]
        held_out = _whole(files, is_named)
        rule = f"{sum(is_named)} of the files, named val"
    else:
        held_out, rule = _hold_out_by_hash(files, config.validation_share)
    train, validation = map(tuple, _split(files, held_out))
    _refuse_short_sides(train, validation, config)
    survey = _survey(files, limit, whose)
    ids = f"ids to {survey.largest}" if tokenizer is None else tokenizer.name
    if tokenizer is None and vocab_size > most_rows(survey.largest + 1):
        ids += f", far below the {vocab_size} of the model's vocabulary"
    left_out = sides.count("left out")
    unread = sum(part.size <= config.sequence_length for part in train + validation)
    return Corpus(
        train=train,
        validation=validation,
        vocab_size=survey.largest + 1 if tokenizer is None else tokenizer.vocab_size,
        tokenizer=tokenizer,
        description=(
            f"{len(files)} files, {sum(file.tokens.size for file in files)} tokens "
            f"({ids}) from {found.origin}; held out: {sum(held_out)} tokens, {rule}"
            + (f"; left out: {left_out} files named test" if left_out else "")
            + (f"; {unread} shorter than a sequence, never read" if unread else "")
        ),
        fingerprint=_fingerprint(files, held_out, survey.digests),
    )


def tokenise(paths: Sequence[Path], tokenizer: Tokenizer) -> list[Tokens]:
    """Returns the tokens of each file; a bounded number of texts is in memory at a
    time."""
    tokens: list[Tokens] = []
    for start in range(0, len(paths), _TEXTS_IN_MEMORY):
        batch = paths[start : start + _TEXTS_IN_MEMORY]
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


def _without_copies(files: Sequence[File]) -> list[File]:
    """Returns the files without those that have the same tokens as an earlier one."""
    once: dict[bytes, File] = {}
    for file in files:
        digest = hashlib.sha256(np.ascontiguousarray(file.tokens)).digest()
        once.setdefault(digest, file)
    return list(once.values())


def _hold_out_by_hash(
    files: Sequence[File],
    share: float,
    split_by: Literal["file", "package"] = "file",
) -> tuple[list[int], str]:
    """Returns how many of the last tokens of each file are held out, and the rule in
    words."""
    names = [file.name for file in files]
    if split_by == "package":
        chosen = hold_out_packages(names, share)
        return _whole(files, chosen), f"{sum(chosen)} of the files, whole packages"
    if len(files) == 1:
        held_out = max(1, round(files[0].tokens.size * share))
        return [held_out], f"the last {share:.2%} of the only file"
    chosen = hold_out(names, share)
    return _whole(files, chosen), f"{sum(chosen)} of the files"


def _whole(files: Sequence[File], held_out: Sequence[bool]) -> list[int]:
    pairs = zip(files, held_out, strict=True)
    return [file.tokens.size if out else 0 for file, out in pairs]


def _split(
    files: Sequence[File], held_out: Sequence[int]
) -> tuple[list[Tokens], list[Tokens]]:
    train, validation = [], []
    for file, count in zip(files, held_out, strict=True):
        cut = file.tokens.size - count
        train += [file.tokens[:cut]] if cut else []
        validation += [file.tokens[cut:]] if count else []
    return train, validation


def _refuse_short_sides(
    train: Sequence[Tokens], validation: Sequence[Tokens], config: DataConfig
) -> None:
    needed = config.sequence_length + 1
    for side, parts in (("training", train), ("held-out", validation)):
        longest = max((part.size for part in parts), default=0)
        if longest < needed:
            raise ValueError(
                f"sequence_length={config.sequence_length} needs at least {needed} "
                f"{side} tokens in a row, and there are {longest} "
                f"(validation_share={config.validation_share}); shorten the sequence, "
                f"add data or change validation_share"
            )


class _Survey(NamedTuple):
    largest: int
    """The largest of all ids."""
    digests: list[str]
    """The SHA-256 of each file's tokens, taken by blocks."""


def _survey(files: Sequence[File], limit: int, whose: str) -> _Survey:
    """Returns the largest id and the digest of each file, reading every token once, in
    threads and in bounded memory.

    Raises:
      ValueError: an id is not below `limit`, the vocabulary of `whose`.
    """
    blocks = [
        (index, start)
        for index, file in enumerate(files)
        for start in range(0, file.tokens.size, _BLOCK)
    ]

    def scan(block: tuple[int, int]) -> tuple[int, bytes]:
        index, start = block
        largest, digest = 0, hashlib.sha256()
        for chunk in _chunks(files[index].tokens[start : start + _BLOCK]):
            largest = max(largest, int(chunk.max()))
            digest.update(chunk)
        return largest, digest.digest()

    largest, digests = 0, [hashlib.sha256() for _ in files]
    threads = min(_MOST_THREADS, os.cpu_count() or 1)
    with ThreadPoolExecutor(threads) as pool:
        for (index, start), scanned in zip(blocks, pool.map(scan, blocks), strict=True):
            if scanned[0] >= limit:
                _refuse_id(files[index], start, limit, whose)
            largest = max(largest, scanned[0])
            digests[index].update(scanned[1])
    return _Survey(largest, [digest.hexdigest() for digest in digests])


def _refuse_id(file: File, start: int, limit: int, whose: str) -> NoReturn:
    block = file.tokens[start : start + _BLOCK]
    position = start + int(np.argmax(block >= limit))
    raise ValueError(
        f"{file.path}: token {position} is {file.tokens[position]}, and {whose} has "
        f"ids below {limit}; the shards, the tokenizer and --model.vocab-size must "
        f"belong together (a .bin without a header is read as --data.shard-dtype says)"
    )


def _fingerprint(
    files: Sequence[File], held_out: Sequence[int], digests: Sequence[str]
) -> str:
    fingerprint = hashlib.sha256()
    for file, count, digest in zip(files, held_out, digests, strict=True):
        line = f"{file.tokens.dtype.itemsize} {count} {digest}\n"
        fingerprint.update(line.encode())
    return fingerprint.hexdigest()


def _count(
    parts: Sequence[Tokens], most: int, vocab_size: int
) -> Int64[np.ndarray, " vocabulary"]:
    """Returns how often each id occurs among the first `most` tokens."""
    counts = np.zeros(vocab_size, np.int64)
    for part in parts:
        for chunk in _chunks(part[:most]):
            counts += np.bincount(chunk, minlength=vocab_size)
        most -= min(most, part.size)
    return counts


def _chunks(tokens: Tokens) -> Iterator[Tokens]:
    for start in range(0, tokens.size, _CHUNK):
        yield tokens[start : start + _CHUNK]
