"""Log-probabilities of continuations, against Llama's equations in float64."""

import numpy as np
import pytest

from sparsejax.interchange.export import export_huggingface
from sparsejax.reports.scoring import padded_length, score_continuations
from tests.support.files.exported_models import MODELS, some_model
from tests.support.oracles import llama_oracle

LENGTH = 40


def expected(folder, context, continuation):
    """The log-probability, and whether it is greedy, each token after a full
    computation of the last LENGTH tokens that precede the last one."""
    whole = [*context, *continuation][-(LENGTH + 1) :]
    logits = llama_oracle.logits(folder, np.array(whole[:-1]))[-len(continuation) :]
    shifted = logits - logits.max(1, keepdims=True)
    log_share = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
    places = range(len(continuation))
    total = log_share[places, continuation].sum()
    return total, bool((logits.argmax(1) == continuation).all())


def test_pairs_of_all_lengths_are_scored_as_one_by_one(tmp_path):
    model = some_model(MODELS["swiglu"])
    export_huggingface(model, tmp_path / "out", sequence_length=LENGTH)
    generator = np.random.default_rng(0)
    draw = lambda count: generator.integers(0, 256, count).tolist()
    # one token; within a bucket; two of them; more than the model reads; all of it
    sizes = [(1, 1), (3, 2), (30, 5), (60, 3), (5, LENGTH)]
    pairs = [(draw(a), draw(b)) for a, b in sizes]
    context = pairs[1][0]
    greedy = llama_oracle.logits(tmp_path / "out", np.array(context))[-1].argmax()
    pairs.append((context, [int(greedy)]))
    found = score_continuations(model, pairs, length=LENGTH, batch_size=4)
    for pair, scored in zip(pairs, found, strict=True):
        total, is_greedy = expected(tmp_path / "out", *pair)
        # float32 against float64: roundings of 6e-8 in each of up to 40 terms
        assert scored.log_probability == pytest.approx(total, abs=1e-4)
        assert scored.is_greedy == is_greedy
    assert found[-1].is_greedy and not found[2].is_greedy


def test_lengths_are_few():
    lengths = {padded_length(tokens, 1000) for tokens in range(1, 1001)}
    assert lengths == {32, 64, 128, 256, 512, 1000}
    assert all(padded_length(tokens, 20) == 20 for tokens in (1, 20))


@pytest.mark.parametrize(
    ("context", "continuation", "reason"),
    [
        ([], [1], "a context of 0 tokens"),
        ([1], [], "its continuation of 0"),
        ([1], [1] * 41, "continuation of 41.*one to 40.*--sequence-length"),
        ([256], [1], "token 256.*vocab_size=256"),
    ],
)
def test_what_has_no_score_is_refused(context, continuation, reason):
    model = some_model(MODELS["swiglu"])
    pairs = [(context, continuation)]
    with pytest.raises(ValueError, match=reason):
        score_continuations(model, pairs, length=LENGTH, batch_size=1)
