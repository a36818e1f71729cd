"""Tasks on held-out files that say more of a model than its mean loss.

A task gives each file a sum and a count, and is worth the ratio of the two over all
files; models are compared on the same files, which a bootstrap draws anew.

    loss                  nats per token, by domain: the ending or first folder of files
    next line             share of places where the true next line is more probable per
                          byte than each of three other lines of the file
    repeated identifier   share of tokens predicted right inside identifiers that were
                          seen before in the same window, after their first token
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import batched
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Bool, Float, Float32, Int32

from experiments.worth.bootstrap import INTERVAL, REPLICATES
from sparsejax.data.corpus import File
from sparsejax.data.tokenizers import Tokenizer, Tokens
from sparsejax.models.transformer import Transformer

Domain = Literal["ending", "folder"]
"""The part that files of one domain have in common: the ending of their names, or their
first folder."""

CHOICES = 4
"""Lines among which the next one is chosen, itself included."""
SHORTEST_LINE = 8
"""Characters of the shortest line that is asked for, spaces around it aside."""
LINES_BEFORE = 4
"""Lines of context that each choice has at least."""
BATCH = 16

_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]{3,}")


@dataclass(frozen=True)
class Measured:
    """The result of one task, or of one domain of it, for one model."""

    sums: Float[np.ndarray, " files"]
    counts: Float[np.ndarray, " files"]

    @property
    def value(self) -> float:
        """The sum over all files divided by the count over all files."""
        return float(self.sums.sum() / self.counts.sum())

    def to(
        self, other: "Measured", generator: np.random.Generator
    ) -> tuple[float, float, float]:
        """Returns the difference of the values, this one less the other, and the ends
        of its 90 % interval, from a bootstrap over the files, the same ones for both.

        Args:
          other: the result of another model for the same files.
          generator: what draws the files.
        """
        files = len(self.counts)
        drawn = generator.multinomial(files, np.full(files, 1 / files), REPLICATES)
        own, others = (drawn @ of.sums / (drawn @ of.counts) for of in (self, other))
        low, high = np.percentile(own - others, INTERVAL)
        return self.value - other.value, float(low), float(high)


class Scored(NamedTuple):
    """The predictions of a model for the tokens of a file from the second on."""

    log_probability: Float32[np.ndarray, " tokens"]
    """The log-probability of the true token, in nats."""
    is_right: Bool[np.ndarray, " tokens"]
    """Whether the true token was the most likely one."""


def score_file(model: Transformer, tokens: Tokens, length: int) -> Scored:
    """Returns the predictions for a file. It is cut into windows of `length` tokens
    that a model reads from their beginning, so that every token from the second on is
    predicted once, from up to `length` before it."""
    windows = [tokens[i : i + length + 1] for i in range(0, len(tokens) - 1, length)]
    scored = list(_score(model, windows, length))
    return Scored(*(np.concatenate(parts) for parts in zip(*scored, strict=True)))


def _score(
    model: Transformer, windows: Iterable[Tokens], length: int
) -> Iterator[Scored]:
    """Yields the predictions for each window of two to `length` + 1 tokens, those of
    its tokens from the second on."""
    for batch in batched(windows, BATCH):
        padded = np.zeros((BATCH, length + 1), np.int32)
        for row, window in zip(padded, batch, strict=False):
            row[: len(window)] = window
        log_probability, is_right = map(
            np.asarray, _predictions(model, jnp.asarray(padded))
        )
        for index, window in enumerate(batch):
            predicted = len(window) - 1
            yield Scored(
                log_probability[index, :predicted], is_right[index, :predicted]
            )


@nnx.jit
def _predictions(
    model: Transformer, tokens: Int32[jax.Array, "batch length_plus_one"]
) -> tuple[jax.Array, jax.Array]:
    # Only a backward draws from the key.
    logits = model(tokens[:, :-1], key=jax.random.key(0))
    targets = tokens[:, 1:]
    of_targets = jnp.take_along_axis(
        jax.nn.log_softmax(logits), targets[..., None], axis=-1
    )
    return of_targets[..., 0], jnp.argmax(logits, axis=-1) == targets


def losses(
    files: Sequence[File], scored: Sequence[Scored], domain: Domain
) -> dict[str, Measured]:
    """Returns the loss in nats per token of all files, as "all", and of each domain."""
    domains = [_domain(file.name, domain) for file in files]
    sums = np.array([-of.log_probability.sum(dtype=np.float64) for of in scored])
    counts = np.array([len(of.is_right) for of in scored], np.float64)
    measured = {"all": Measured(sums, counts)}
    for name in sorted(set(domains)):
        own = np.array([of == name for of in domains])
        measured[name] = Measured(sums[own], counts[own])
    return measured


def _domain(name: str, domain: Domain) -> str:
    if domain == "folder":
        return name.partition("/")[0]
    _, dot, ending = name.rpartition("/")[2].rpartition(".")
    return f"{dot}{ending}" if dot else "no ending"


def repeated_identifiers(
    files: Sequence[File],
    scored: Sequence[Scored],
    length: int,
    decode: Callable[[Sequence[int]], str],
) -> Measured:
    """Returns the share of tokens predicted right inside repeated identifiers."""
    marks = [repetitions(file.tokens, length, decode) for file in files]
    right = [
        of.is_right[mark].sum(dtype=np.float64)
        for of, mark in zip(scored, marks, strict=True)
    ]
    counts = [mark.sum(dtype=np.float64) for mark in marks]
    return Measured(np.array(right), np.array(counts))


def repetitions(
    tokens: Tokens, length: int, decode: Callable[[Sequence[int]], str]
) -> Bool[np.ndarray, " tokens"]:
    """Returns for each token of a file from the second on whether it lies in an
    identifier of four characters or more that stood before in its window, as
    `score_file` cuts them, and is not the identifier's first token."""
    piece = cache(lambda token: decode([token]))
    marked = np.zeros(len(tokens), bool)
    for first in range(0, len(tokens) - 1, length):
        window = tokens[first : first + length + 1].tolist()
        pieces = [piece(token) for token in window]
        begins = np.cumsum([0, *map(len, pieces)])
        seen: set[str] = set()
        for found in _IDENTIFIER.finditer("".join(pieces)):
            if found.group() in seen:
                inner = (found.start() < begins[:-1]) & (begins[:-1] < found.end())
                marked[first : first + len(window)] |= inner
            seen.add(found.group())
    return marked[1:]


class Choice(NamedTuple):
    """A place in a file, and the lines among which the next one is chosen."""

    file: int
    before: str
    lines: tuple[str, ...]
    """The true next line first."""


def next_line_choices(
    files: Sequence[File],
    decode: Callable[[Tokens], str],
    count: int,
    generator: np.random.Generator,
) -> list[Choice]:
    """Returns up to `count` places at random, drawn from all that the files have.

    Raises:
      ValueError: no file has a place that can be asked for.
    """
    lines_of, places = [], []
    for index, file in enumerate(files):
        lines = decode(file.tokens).splitlines(keepends=True)
        lines_of.append(lines)
        long = [i for i, line in enumerate(lines) if _is_long(line)]
        if len({lines[i].strip() for i in long}) >= CHOICES:
            places += [(index, i) for i in long if i >= LINES_BEFORE]
    if not places:
        raise ValueError(
            f"none of {len(files)} held-out files has {CHOICES} different lines of "
            f"{SHORTEST_LINE} characters and {LINES_BEFORE} lines before one of them; "
            f"give --text of longer files"
        )
    drawn = generator.permutation(len(places))[:count]
    choices = []
    for index, line in (places[at] for at in sorted(drawn)):
        lines = lines_of[index]
        true = lines[line]
        others = {each.strip(): each for each in lines if _is_long(each)}
        del others[true.strip()]
        wrong = generator.permutation(list(others))[: CHOICES - 1]
        among = (true, *(others[each] for each in wrong))
        choices.append(Choice(index, "".join(lines[:line]), among))
    return choices


def _is_long(line: str) -> bool:
    return len(line.strip()) >= SHORTEST_LINE


def next_lines(
    model: Transformer,
    choices: Sequence[Choice],
    files: int,
    length: int,
    tokenizer: Tokenizer,
) -> Measured:
    """Returns the share of choices in which the true line has the largest
    log-probability per byte, among `files` files. A line is read up to half of a window
    of `length` tokens, and the text before it fills what is left of the window."""
    most = length // 2
    before = tokenizer.encode_batch([of.before.encode() for of in choices])
    windows, spans = [], []
    for context, choice in zip(before, choices, strict=True):
        lines = tokenizer.encode_batch([line.encode() for line in choice.lines])
        for line in (line[:most] for line in lines):
            kept = context[-(length + 1 - len(line)) :]
            windows.append(np.concatenate([kept, line]))
            # In bytes, which tokens of any length have in common.
            spans.append((len(line), len(tokenizer.decode(line).encode())))
    scored = _score(model, windows, length)
    per_byte = [
        of.log_probability[-tokens:].sum() / size
        for of, (tokens, size) in zip(scored, spans, strict=True)
    ]
    sums, counts = np.zeros(files), np.zeros(files)
    for choice, of in zip(choices, batched(per_byte, CHOICES), strict=True):
        sums[choice.file] += of[0] > max(of[1:])
        counts[choice.file] += 1
    return Measured(sums, counts)
