"""The loss of a finished model on held-out tokens."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import batched

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from sparsejax.data.held_out import bytes_of
from sparsejax.data.tokenizers import Tokenizer, Tokens
from sparsejax.models.loss import token_losses
from sparsejax.models.transformer import Transformer


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """How well a model predicts held-out tokens."""

    tokens: int
    """Tokens predicted."""
    loss: float
    """Mean -log p(token | the tokens before it in its window), nats per token."""
    loss_error: float
    """Standard error of the loss, by its spread over windows; NaN of a single one."""
    right: float
    """The share of the tokens that the model gave the largest probability."""
    bytes: int | None
    """UTF-8 bytes of the predicted text; None where no tokenizer is known."""

    @property
    def perplexity(self) -> float:
        """exp(loss), infinite where that is beyond a float."""
        return math.exp(self.loss) if self.loss < 700 else math.inf

    @property
    def bits_per_byte(self) -> float | None:
        """loss x tokens / (ln 2 x bytes), which does not depend on the tokenizer; None
        where the bytes are not known."""
        if not self.bytes:
            return None
        return self.loss * self.tokens / (math.log(2) * self.bytes)


def evaluate(
    model: Transformer,
    windows: Iterable[Tokens],
    *,
    length: int,
    batch_size: int,
    tokenizer: Tokenizer | None = None,
) -> Evaluation:
    """Returns how well a model predicts each window's tokens after the first.

    Args:
      model: on one device; it computes as it is, sparse or dense.
      windows: arrays of 2 to `length` + 1 token ids.
      length: the most tokens that the model reads at once.
      batch_size: windows per call of the model; it is compiled once.
      tokenizer: counts the bytes of the text; None: they are not counted.
    Raises:
      ValueError: there is no window, or an id is outside of the model's vocabulary.
    """
    losses, counts, right, size = [], [], 0, 0
    for rows in batched(windows, batch_size):
        tokens = np.zeros((batch_size, length + 1), np.int32)
        known = np.zeros((batch_size, length), bool)
        for row, window in enumerate(rows):
            tokens[row, : len(window)] = window
            known[row, : len(window) - 1] = True
            if tokenizer is not None:
                size += bytes_of(window[1:], tokenizer)
        if tokens.max() >= model.config.vocab_size:
            raise ValueError(
                f"the held-out text has token {tokens.max()}, and the model's "
                f"vocab_size={model.config.vocab_size} has ids below that; take the "
                f"tokenizer that the model was trained with"
            )
        loss, hits = _of_batch(model, jnp.asarray(tokens), jnp.asarray(known))
        losses.append(np.asarray(loss, np.float64)[: len(rows)])
        counts.append(known.sum(axis=1)[: len(rows)])
        right += int(hits)
    if not losses:
        raise ValueError("there are no held-out tokens to predict; hold out more")
    sums, count = np.concatenate(losses), np.concatenate(counts)
    mean = sums.sum() / count.sum()
    # Of a ratio of sums over windows, by the spread of their residuals.
    spread = math.nan
    if len(sums) > 1:
        residuals = (sums - mean * count) / count.mean()
        spread = float(residuals.std(ddof=1) / math.sqrt(len(sums)))
    return Evaluation(
        tokens=int(count.sum()),
        loss=float(mean),
        loss_error=spread,
        right=right / int(count.sum()),
        bytes=size or None,
    )


@nnx.jit
def _of_batch(
    model: Transformer,
    tokens: Int[Array, "batch sequence_plus_one"],
    known: Bool[Array, "batch sequence"],
) -> tuple[Float[Array, " batch"], Int[Array, ""]]:
    """Returns the sum of each window's losses over its `known` tokens, and how many of
    all of them were the most likely."""
    logits = model(tokens[:, :-1], key=jax.random.key(0))
    targets = tokens[:, 1:]
    losses = token_losses(logits, targets)
    hits = known & (jnp.argmax(logits, axis=-1) == targets)
    return jnp.sum(losses * known, axis=1), jnp.sum(hits)
