"""Generation: what a cache leaves out is what full recomputation computes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsejax.feed_forward.sparsity import DENSE, FFNSparsity
from sparsejax.models.generation import (
    empty_cache,
    generate,
    generate_in_parts,
    greedy_sample,
    nucleus,
)
from sparsejax.models.transformer import Transformer
from sparsejax.sparsity.patterns import NM, VNM
from tests.support.files.exported_models import MODELS, SMALL, some_model

PROMPTS = [[3, 1, 4, 1, 5], [9, 2], [6]]
LENGTH = 6
APPLY = nnx.jit(Transformer.__call__)


def recomputed(model, prompt):
    """The most likely tokens, the whole sequence computed anew for each."""
    end = len(prompt) + LENGTH
    whole = np.zeros((1, max(map(len, PROMPTS)) + LENGTH), np.int32)
    whole[0, : len(prompt)] = prompt
    for place in range(len(prompt), end):
        # Causality makes the zeros behind irrelevant, and the program one.
        logits = APPLY(model, jnp.asarray(whole), key=jax.random.key(0))
        whole[0, place] = np.argmax(logits[0, place - 1])
    return whole[0, len(prompt) : end]


CASES = {name: (config, DENSE) for name, config in MODELS.items()} | {
    "2:4": (SMALL, FFNSparsity(weights=NM(2, 4), activations=NM(2, 4))),
    "experts": (SMALL, FFNSparsity(activations=VNM(4, 2, 8))),
    "drawn in the backward": (SMALL, FFNSparsity(token_sparsity="mvue")),
}


@pytest.mark.parametrize("name", CASES)
def test_greedy_tokens_of_a_batch_are_those_of_full_recomputation(name):
    config, sparsity = CASES[name]
    model = some_model(config, sparsity)
    found = generate(model, PROMPTS, LENGTH)
    assert found.shape == (3, LENGTH)
    for row, prompt in zip(found, PROMPTS, strict=True):
        assert row.tolist() == recomputed(model, prompt).tolist()


@pytest.mark.parametrize("prompt_length", [3, 12])
def test_greedy_sample_repeats_the_most_likely_token(prompt_length):
    window = 6
    model = some_model(SMALL, FFNSparsity(token_sparsity="mvue"))
    seen = [place * 7 % 256 for place in range(prompt_length)]
    sampled = greedy_sample(model, np.array(seen), 8, window=window)
    for token in sampled.tolist():
        logits = APPLY(model, jnp.asarray([seen[-window:]]), key=jax.random.key(0))
        assert token == int(logits[0, -1].argmax())
        seen.append(token)


def test_greedy_sample_refuses_what_it_cannot_continue():
    model = some_model(SMALL)
    for prompt, match in (([], "of \\[0\\] tokens"), ([300], "vocab_size=256")):
        with pytest.raises(ValueError, match=match):
            greedy_sample(model, np.array(prompt, np.int32), 3)
    for wrong in ({"window": 0, "length": 3}, {"length": 0}):
        with pytest.raises(ValueError, match="must be 1 or more tokens"):
            greedy_sample(model, np.array([1]), **wrong)


@pytest.mark.parametrize("name", MODELS)
def test_logits_with_a_cache_are_close_to_those_without(name):
    model = some_model(MODELS[name])
    tokens = jnp.arange(10)[None] * 7 % 256
    cache = empty_cache(model, 1, 12)
    features = []
    # three pieces: a prompt, a token, several
    for piece in (slice(0, 4), slice(4, 5), slice(5, 10)):
        positions = jnp.arange(10)[None, piece]
        new, cache = model.features_with_cache(tokens[:, piece], cache, positions)
        features.append(new)
    found = model.logits(jnp.concatenate(features, axis=1))
    # float32, sums in another order; logits of order one
    np.testing.assert_allclose(found, model(tokens), atol=1e-5)


def test_draws_follow_the_softmax_within_the_nucleus():
    model = some_model(SMALL)
    prompts = [[1, 2, 3]] * 4000
    drawn = generate(model, prompts, 1, temperature=0.7, top_p=0.5, vocab_size=40)
    logits = np.asarray(model(jnp.array([[1, 2, 3]]))[0, -1, :40], np.float64) / 0.7
    share = np.exp(logits - logits.max())
    share /= share.sum()
    ranked = np.argsort(-share)
    inside = ranked[: 1 + np.searchsorted(np.cumsum(share[ranked]), 0.5)]
    expected = np.zeros(40)
    expected[inside] = share[inside] / share[inside].sum()
    found = np.bincount(drawn[:, 0], minlength=40) / 4000
    assert set(np.flatnonzero(found)) <= set(inside)
    # five standard deviations of a share of 4000 draws
    np.testing.assert_allclose(found, expected, atol=5 * np.sqrt(0.25 / 4000))


def test_a_seed_repeats_and_another_does_not():
    model = some_model(SMALL)
    draw = lambda seed: generate(model, PROMPTS, LENGTH, temperature=1.0, seed=seed)
    assert (draw(1) == draw(1)).all() and (draw(1) != draw(2)).any()


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.integers(-8, 8), min_size=6, max_size=6), st.floats(0.0625, 1, width=32)
)
def test_the_nucleus_is_the_fewest_most_likely(values, top_p):
    logits = jnp.array([values], jnp.float32)
    kept = np.isfinite(np.asarray(nucleus(logits, top_p))[0])
    share = np.asarray(jax.nn.softmax(logits[0]), np.float64)
    order = sorted(range(6), key=lambda i: (-values[i], i))
    assert [i for i in order if kept[i]] == order[: kept.sum()]  # the most likely
    inside = share[order[: kept.sum()]]
    assert inside.sum() >= top_p - 1e-6  # enough
    assert kept.sum() == 1 or inside[:-1].sum() <= top_p + 1e-6  # and no more


def test_what_cannot_be_generated_is_refused():
    model = some_model(SMALL)
    for prompts, options, reason in [
        ([], {}, "0 prompts"),
        ([[1], []], {}, "at least one"),
        ([[256]], {}, "outside of the model's vocab_size=256"),
        ([[1]], {"length": 0}, "length=0"),
        ([[1]], {"temperature": -1.0}, "temperature=-1.0"),
        ([[1]], {"top_p": 0.0}, "top_p=0.0"),
        ([[1]], {"vocab_size": 300}, "vocab_size=300"),
        ([[1.5, 2.0]], {}, "ids of dtype float64"),
    ]:
        with pytest.raises(ValueError, match=reason):
            generate(model, prompts, **({"length": 1} | options))
    for options in ({"every": 0}, {"every": 1, "longest": 2}):
        with pytest.raises(ValueError, match="every=. must be 1 .* or at least 3"):
            next(generate_in_parts(model, [[1, 2, 3]], 4, **options))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_text_ends_at_an_end_token_and_the_others_go_on(temperature):
    model = some_model(MODELS["reglu2"])
    how = {"temperature": temperature, "seed": 3}
    free = generate(model, PROMPTS, LENGTH, **how)
    # The first row ends at its third token; the other rows wherever they have it.
    end = int(free[0, 2])
    ended = generate(model, PROMPTS, LENGTH, end_tokens=[end, 255], **how)
    for row, whole in zip(ended, free, strict=True):
        at = np.flatnonzero(np.isin(whole, [end, 255]))
        upto = at[0] + 1 if at.size else LENGTH
        assert row[:upto].tolist() == whole[:upto].tolist()
        assert set(row[upto:].tolist()) <= {int(whole[upto - 1])}


def test_where_all_have_ended_nothing_more_is_computed():
    model = some_model(MODELS["reglu2"])
    first = generate(model, PROMPTS[:1], 1)[0, 0]
    ended = generate(model, PROMPTS[:1], LENGTH, end_tokens=[int(first)])
    assert ended.tolist() == [[int(first)] * LENGTH]


@pytest.mark.parametrize("temperature", [1e-36, 1e-38, 1e-300])
def test_the_lowest_temperatures_draw_the_most_likely_tokens(temperature):
    model = some_model(SMALL)
    # Its logits are thousands, which overflow when divided by the first of these.
    norm = model.final_norm.scale
    norm[...] = norm[...] * 1000
    found = generate(model, PROMPTS, LENGTH, temperature=temperature)
    np.testing.assert_array_equal(found, generate(model, PROMPTS, LENGTH))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [jnp.nan, jnp.inf])
def test_logits_that_are_not_finite_are_no_text(temperature, value):
    model = some_model(SMALL)
    norm = model.final_norm.scale
    norm[...] = norm[...] * value
    with pytest.raises(ValueError, match="token 0 after prompt 0 are not finite"):
        generate(model, PROMPTS, LENGTH, temperature=temperature)


def test_nothing_comes_after_the_part_in_which_all_have_ended():
    model = some_model(MODELS["reglu2"])
    free = generate(model, PROMPTS[:1], LENGTH)[0].tolist()
    end = next(place for place in range(1, LENGTH) if free[place] not in free[:place])
    how = {"every": end + 1, "end_tokens": [free[end]]}
    parts = list(generate_in_parts(model, PROMPTS[:1], LENGTH, **how))
    assert [part.tolist() for part in parts] == [[free[: end + 1]]]
