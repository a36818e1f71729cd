"""The evaluation of a model, against a loop over its windows."""

import math

import numpy as np
import pytest

from sparsejax.data.held_out import every_window
from sparsejax.data.tokenizers import ByteTokenizer
from sparsejax.reports.evaluation import evaluate
from tests.support.files.exported_models import MODELS, some_model

LENGTH = 7


def oracle(model, windows):
    """Losses token by token, each window alone, in float64; and the hits."""
    losses, hits = [], []
    for window in windows:
        logits = np.asarray(model(window[None, :-1].astype(np.int32))[0], np.float64)
        log_sum = np.log(np.exp(logits).sum(axis=1))
        own = logits[np.arange(len(logits)), window[1:]]
        losses.append(log_sum - own)
        hits.append(logits.argmax(axis=1) == window[1:])
    return losses, hits


def test_every_token_counts_once_also_of_short_windows():
    model = some_model(MODELS["reglu2"])
    generator = np.random.default_rng(0)
    vocab = model.config.vocab_size
    parts = [generator.integers(vocab, size=n, dtype=np.uint16) for n in (30, 1, 9)]
    windows = list(every_window(parts, LENGTH))
    assert [len(of) for of in windows] == [8, 8, 8, 8, 2, 8, 2]
    found = evaluate(
        model, windows, length=LENGTH, batch_size=3, tokenizer=ByteTokenizer()
    )
    losses, hits = oracle(model, windows)
    every = np.concatenate(losses)
    assert found.tokens == len(every) == 29 + 8 == found.bytes
    # Float32 logits: sums of 37 losses agree to their last bits.
    assert found.loss == pytest.approx(every.mean(), rel=1e-5)
    assert found.right == np.concatenate(hits).mean()
    assert found.perplexity == pytest.approx(math.exp(every.mean()), rel=1e-5)
    assert found.bits_per_byte == pytest.approx(every.mean() / math.log(2), rel=1e-5)
    sums, counts = np.array([of.sum() for of in losses]), np.array([*map(len, losses)])
    residuals = (sums - every.mean() * counts) / counts.mean()
    error = residuals.std(ddof=1) / math.sqrt(len(sums))
    assert found.loss_error == pytest.approx(error, rel=1e-4)


def test_tokens_of_another_vocabulary_and_none_at_all_are_refused():
    model = some_model(MODELS["reglu2"])
    beyond = [np.full(4, model.config.vocab_size, np.uint32)]
    with pytest.raises(ValueError, match="take the tokenizer that the model was"):
        evaluate(model, beyond, length=LENGTH, batch_size=1)
    with pytest.raises(ValueError, match="no held-out tokens"):
        evaluate(model, [], length=LENGTH, batch_size=1)


def test_without_a_tokenizer_there_are_no_bits_per_byte():
    model = some_model(MODELS["reglu2"])
    window = np.arange(5, dtype=np.uint16)
    found = evaluate(model, [window], length=LENGTH, batch_size=2)
    assert found.bits_per_byte is None and math.isnan(found.loss_error)
