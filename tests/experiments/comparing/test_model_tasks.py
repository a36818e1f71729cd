"""Tasks on held-out files, against loops that read one window at a time."""

import re
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import nn

from experiments.comparing.model_tasks import (
    Measured,
    Scored,
    losses,
    next_line_choices,
    next_lines,
    repeated_identifiers,
    repetitions,
    score_file,
)
from sparsejax.config import ModelConfig
from sparsejax.data.corpus import File
from sparsejax.data.tokenizers import ByteTokenizer
from sparsejax.models.transformer import Transformer

BYTES = ByteTokenizer()
LENGTH = 12
TEXT = "def alpha(one):\n    return alpha + one\n\nalpha(12)  # alphabet, alpha\n"


def file(text: str, name: str = "a/b.py") -> File:
    return File(name, Path(name), BYTES.encode(text.encode()))


@pytest.fixture(scope="module")
def model() -> Transformer:
    config = ModelConfig(d_model=16, layers=1, heads=2, kv_heads=2, d_hidden=32)
    return Transformer(config, rngs=nnx.Rngs(0))


def directly(model: Transformer, window: np.ndarray) -> tuple[list[float], list[bool]]:
    """The log-probability and the rank of each token from the second on."""
    logits = model(jnp.asarray(window[None, :-1], jnp.int32))[0]
    log_probabilities = np.asarray(nn.log_softmax(logits))
    rows = zip(log_probabilities, window[1:], strict=True)
    return (
        [float(row[token]) for row, token in rows],
        (log_probabilities.argmax(1) == window[1:]).tolist(),
    )


def test_every_token_but_the_first_is_predicted_once_from_its_window(model):
    tokens = file(TEXT).tokens
    scored = score_file(model, tokens, LENGTH)
    expected, right = [], []
    for first in range(0, len(tokens) - 1, LENGTH):
        of_window = directly(model, tokens[first : first + LENGTH + 1])
        expected += of_window[0]
        right += of_window[1]
    assert len(expected) == len(tokens) - 1
    # float32 sums of 16 products in another order.
    np.testing.assert_allclose(scored.log_probability, expected, atol=1e-5)
    assert scored.is_right.tolist() == right


def test_a_domain_is_an_ending_or_a_first_folder():
    files = [file("12345", name) for name in ("x/a.py", "x/b.c", "y/c.py", "Makefile")]
    scored = [
        Scored(np.full(4, -nats, np.float32), np.zeros(4, bool))
        for nats in (1, 2, 4, 5)
    ]
    by_ending = losses(files, scored, "ending")
    assert {name: of.value for name, of in by_ending.items()} == {
        "all": 3.0,
        ".py": 2.5,
        ".c": 2.0,
        "no ending": 5.0,
    }
    by_folder = losses(files, scored, "folder")
    assert {name: of.value for name, of in by_folder.items()} == {
        "all": 3.0,
        "x": 1.5,
        "y": 4.0,
        "Makefile": 5.0,
    }


@pytest.mark.parametrize("length", [12, 30, 1000])
def test_repetitions_are_what_a_loop_over_characters_finds(length):
    tokens = file(TEXT).tokens
    expected = np.zeros(len(tokens), bool)
    for first in range(0, len(tokens) - 1, length):
        window = TEXT[first : first + length + 1]
        words: list[str] = []
        for found in re.finditer(r"[A-Za-z_]\w{3,}", window):
            if found.group() in words:
                for place in range(found.start() + 1, found.end()):
                    expected[first + place] = True
            words.append(found.group())
    found = repetitions(tokens, length, BYTES.decode)
    assert found.tolist() == expected[1:].tolist()
    if length == 1000:  # three more alphas, and no alphabet
        assert found.sum() == 3 * 4


def test_tokens_of_several_characters_are_marked_whole():
    pieces = ["al", "pha", " = ", "al", "pha", "()"]
    found = repetitions(np.arange(6, dtype=np.uint16), 100, lambda ids: pieces[ids[0]])
    assert found.tolist() == [False, False, False, True, False]
    tokens = file(TEXT).tokens
    right = np.arange(len(tokens) - 1) % 2 == 0
    scored = Scored(np.zeros(len(right), np.float32), right)
    of = repeated_identifiers([file(TEXT)], [scored], 1000, BYTES.decode)
    marked = repetitions(tokens, 1000, BYTES.decode)
    assert of.value == right[marked].mean()


def lines_of(count: int) -> str:
    return "".join(f"line number {i} of it\n" for i in range(count))


def test_the_next_line_is_chosen_among_other_lines_of_its_file():
    files = [file("short\n" * 9), file(lines_of(9)), file(lines_of(7))]
    choices = next_line_choices(files, BYTES.decode, 100, np.random.default_rng(0))
    # Places 4 to 8 of one file and 4 to 6 of the other.
    assert [of.file for of in choices] == [1] * 5 + [2] * 3
    for of in choices:
        text = BYTES.decode(files[of.file].tokens)
        assert text.startswith(of.before + of.lines[0])
        assert len({line.strip() for line in of.lines}) == len(of.lines) == 4
        assert all(line in text for line in of.lines)
    few = next_line_choices(files, BYTES.decode, 3, np.random.default_rng(0))
    assert len(few) == 3 and set(few) <= {*choices, *few}
    with pytest.raises(ValueError, match="none of 1 held-out files has 4 different"):
        next_line_choices(files[:1], BYTES.decode, 3, np.random.default_rng(0))


def test_the_most_probable_line_per_byte_is_chosen(model):
    files = [file(lines_of(9)), file(lines_of(8))]
    choices = next_line_choices(files, BYTES.decode, 6, np.random.default_rng(1))
    length = 50
    right = np.zeros(2)
    for of in choices:
        scores = []
        for line in of.lines:
            own = BYTES.encode(line.encode())
            before = BYTES.encode(of.before.encode())[-(length + 1 - len(own)) :]
            given, _ = directly(model, np.concatenate([before, own]))
            scores.append(sum(given[-len(own) :]) / len(own))
        right[of.file] += scores[0] == max(scores)
    of = next_lines(model, choices, 2, length, BYTES)
    assert of.sums.tolist() == right.tolist()
    assert of.counts.sum() == 6


def test_a_difference_has_the_interval_of_its_spread_over_files():
    generator = np.random.default_rng(0)
    files = 400
    counts = np.full(files, 10.0)
    first = Measured(generator.normal(20, 5, files), counts)
    second = Measured(first.sums + generator.normal(1, 2, files), counts)
    difference, low, high = second.to(first, generator)
    assert difference == pytest.approx((second.sums - first.sums).sum() / counts.sum())
    assert low < difference < high
    # The files are the same for both: their own spread of 5 is no part of it. 2,000
    # draws know the width to some per cent.
    deviation = np.std(second.sums - first.sums) / 10 / np.sqrt(files)
    assert high - low == pytest.approx(2 * 1.645 * deviation, rel=0.1)
    assert first.to(first, generator) == (0.0, 0.0, 0.0)
