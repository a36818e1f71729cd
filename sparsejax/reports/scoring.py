"""The log-probability that a model gives a continuation of a context, for many pairs
at once and with few programs: lengths are rounded up to powers of two."""

from collections.abc import Sequence
from itertools import batched
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from sparsejax.models.loss import token_losses
from sparsejax.models.transformer import Transformer

SHORTEST = 32
"""Tokens that are computed at least; shorter inputs are padded."""


class Scored(NamedTuple):
    """What a model gives one continuation."""

    log_probability: float
    """The log-probability of all of its tokens together, in nats."""
    is_greedy: bool
    """Whether each of them was the most likely one."""


def padded_length(tokens: int, most: int) -> int:
    """Returns the power of two that is `tokens` or more, from `SHORTEST` on, and `most`
    where that is less."""
    return min(max(SHORTEST, 1 << (tokens - 1).bit_length()), most)


def score_continuations(
    model: Transformer,
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
    *,
    length: int,
    batch_size: int,
) -> list[Scored]:
    """Returns what a model gives each continuation of its context:
    sum_i log p(c_i | context, c_1 .. c_(i-1)).

    Of what is longer than the model reads at once, the first tokens of the context are
    left out. One program per power of two up to `length` computes all pairs, sorted by
    length.

    Args:
      model: on one device; it computes as it is, sparse or dense.
      pairs: token ids of each context, at least one, and of its continuation.
      length: the most tokens that the model reads at once.
      batch_size: pairs per call of the model.
    Raises:
      ValueError: a context or a continuation is empty, a continuation is longer than
        `length`, or an id is outside of the model's vocabulary.
    """
    for context, continuation in pairs:
        if not context or not 0 < len(continuation) <= length:
            raise ValueError(
                f"a context of {len(context)} tokens and its continuation of "
                f"{len(continuation)}: the first needs one at least, and the second "
                f"one to {length}; give a larger --sequence-length, or other texts"
            )
    sizes = [min(len(a) + len(b) - 1, length) for a, b in pairs]
    order = sorted(range(len(pairs)), key=lambda i: -sizes[i])
    found: dict[int, Scored] = {}
    for batch in batched(order, batch_size):
        width = padded_length(sizes[batch[0]], length)
        tokens = np.zeros((batch_size, width + 1), np.int32)
        asked = np.zeros((batch_size, width), bool)
        for row, index in enumerate(batch):
            context, continuation = pairs[index]
            # The last token is predicted, and not read.
            whole = [*context, *continuation][-(length + 1) :]
            tokens[row, : len(whole)] = whole
            asked[row, len(whole) - 1 - len(continuation) : len(whole) - 1] = True
        if not 0 <= tokens.min() <= tokens.max() < model.config.vocab_size:
            raise ValueError(
                f"a text has the token {tokens.max()}, and the model's vocab_size="
                f"{model.config.vocab_size} has ids below that; take the tokenizer "
                f"that the model was trained with"
            )
        scored = _score(model, jnp.asarray(tokens), jnp.asarray(asked))
        sums, greedy = map(np.asarray, scored)
        for row, index in enumerate(batch):
            found[index] = Scored(float(sums[row]), bool(greedy[row]))
    return [found[index] for index in range(len(pairs))]


@nnx.jit
def _score(
    model: Transformer,
    tokens: Int[Array, "batch sequence_plus_one"],
    asked: Bool[Array, "batch sequence"],
) -> tuple[Float[Array, " batch"], Bool[Array, " batch"]]:
    """Returns the sum of the log-probabilities of each row's `asked` tokens, and
    whether each was the most likely one."""
    logits = model(tokens[:, :-1], key=jax.random.key(0))
    targets = tokens[:, 1:]
    losses = token_losses(logits, targets)
    right = jnp.argmax(logits, axis=-1) == targets
    return -jnp.sum(losses * asked, axis=1), jnp.all(right | ~asked, axis=1)
