"""Text from a model: sampled continuations of a batch of prompts, with a KV cache.

The prompts are run once; then every step computes one token of each sequence, and reads
the keys and values of those before from a cache. `greedy_sample`, which runs a model on
a mesh and lets a long text slide through a window, has none.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from sparsejax.distributed.mesh import batch_parts
from sparsejax.models.attention import KVCache
from sparsejax.models.transformer import Transformer

NOT_DRAWN = -1
"""The id that stands for a token which could not be drawn."""


def generate(
    model: Transformer,
    prompts: Sequence[Sequence[int] | np.ndarray],
    length: int,
    *,
    temperature: float = 0.0,
    top_p: float = 1.0,
    vocab_size: int | None = None,
    seed: int = 0,
    end_tokens: Sequence[int] = (),
) -> Int[np.ndarray, "batch length"]:
    """Returns `length` tokens after each prompt, int32. A sequence that has drawn one
    of `end_tokens` is filled up with it, and once all have, nothing more is computed.

    A token is drawn from softmax(logits / temperature), restricted to the fewest most
    likely tokens whose probabilities together are `top_p` or more (nucleus sampling,
    arXiv 1904.09751); with temperature 0 it is the most likely one, ties to the lower
    id. What a prompt gets depends on its place in the batch and on the seed, and not on
    the other prompts, up to rounding. Compiled once per number of prompts, longest
    prompt and `length`.

    Args:
      model: on one device, dense or sparse.
      prompts: token ids of each, at least one, of any lengths.
      length: tokens to add.
      temperature: 0 or more.
      top_p: above 0, at most 1.
      vocab_size: only ids below it are drawn, as a tokenizer with fewer tokens than the
        model's table needs; None: all.
      seed: of the draws.
      end_tokens: ids that end a text.
    Raises:
      ValueError: an argument is out of its range, the model lies on several devices, or
        its logits are not finite.
    """
    return next(
        generate_in_parts(
            model,
            prompts,
            length,
            every=length,
            temperature=temperature,
            top_p=top_p,
            vocab_size=vocab_size,
            seed=seed,
            end_tokens=end_tokens,
        )
    )


def generate_in_parts(
    model: Transformer,
    prompts: Sequence[Sequence[int] | np.ndarray],
    length: int,
    *,
    every: int,
    longest: int | None = None,
    temperature: float = 0.0,
    top_p: float = 1.0,
    vocab_size: int | None = None,
    seed: int = 0,
    end_tokens: Sequence[int] = (),
) -> Iterator[Int[np.ndarray, "batch drawn"]]:
    """Yields all that has been drawn after each prompt, int32, whenever that is `every`
    tokens more, and when it is `length`. Who stops taking, because of the text that the
    tokens make, computes no more; and nothing more comes once all have ended.

    Args:
      model, prompts, length, temperature, top_p, vocab_size, seed, end_tokens: as in
        `generate`, whose tokens these are.
      every: tokens between two results, 1 or more.
      longest: tokens that prompts are padded to, so that those of other lengths need
        no other program; None: those of the longest.
    Raises:
      ValueError: as `generate`.
    """
    whole = model.config.vocab_size
    vocab_size = whole if vocab_size is None else vocab_size
    _check(model, prompts, length, temperature, top_p, vocab_size)
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    if every < 1 or (longest is not None and longest < lengths.max()):
        raise ValueError(
            f"every={every} must be 1 or more, and longest={longest} None or at least "
            f"{lengths.max()}, the tokens of the longest prompt"
        )
    longest = int(lengths.max()) if longest is None else longest
    tokens = np.zeros((len(prompts), longest), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    how = _How(
        temperature=jnp.float32(temperature),
        top_p=jnp.float32(top_p),
        key=jax.random.key(seed),
        end_tokens=jnp.array(end_tokens, jnp.int32),
    )
    # What float32 takes for zero is zero.
    greedy = temperature < np.finfo(np.float32).tiny
    fixed = {"vocab_size": vocab_size, "greedy": greedy}
    texts = _begin(model, tokens, lengths, how, length=length, **fixed)
    upto = 0
    ended = False
    while upto < length and not ended:
        upto = min(upto + every, length)
        texts, drawn = _go_on(model, texts, np.int32(upto), how, **fixed)
        tokens = np.asarray(drawn)[:, :upto]
        _check_drawn(tokens)
        ended = bool(np.isin(tokens[:, -1], end_tokens).all())
        yield tokens


def greedy_sample(
    model: Transformer,
    prompt: Int[Array, " prompt"] | Int[np.ndarray, " prompt"],
    length: int,
    *,
    window: int = 256,
) -> Int[Array, " length"]:
    """Returns the `length` most likely next tokens after the prompt, taken one after
    the other.

    The model sees the last `window` tokens (give it the sequence length of training),
    and is run anew on all of them for every token. Ties go to the lower id. It is
    compiled once per `length` and `window`, for prompts of any length.

    Raises:
      ValueError: an argument is out of its range.
    """
    _check_prompts(model, [prompt])
    if window < 1 or length < 1:
        raise ValueError(
            f"window={window} and length={length} must be 1 or more tokens"
        )
    seen = np.asarray(prompt, np.int32)[-window:]
    buffer = np.zeros(window, np.int32)
    buffer[: seen.size] = seen
    return _continue(model, buffer, np.int32(seen.size), length)


@partial(nnx.jit, static_argnums=3)
def _continue(
    model: Transformer, buffer: jax.Array, filled: jax.Array, length: int
) -> jax.Array:
    window = buffer.size
    # A mesh splits the batch: the same sequence for each of its parts.
    rows = batch_parts(model.mesh)

    def step(carry, _):
        buffer, filled = carry
        # Causality makes whatever stands behind the `filled` tokens irrelevant. Only a
        # backward draws from the key.
        tokens = jnp.broadcast_to(buffer, (rows, window))
        features, _ = model.features(tokens, key=jax.random.key(0))
        token = jnp.argmax(model.logits(features[0, filled - 1])).astype(jnp.int32)
        full = filled == window
        buffer = jnp.where(full, jnp.roll(buffer, -1), buffer)
        filled = jnp.where(full, filled - 1, filled)
        return (buffer.at[filled].set(token), filled + 1), token

    return jax.lax.scan(step, (buffer, filled), length=length)[1]


def _check(
    model: Transformer,
    prompts: Sequence[Sequence[int] | np.ndarray],
    length: int,
    temperature: float,
    top_p: float,
    vocab_size: int,
) -> None:
    _check_prompts(model, prompts)
    whole = model.config.vocab_size
    if length < 1:
        raise ValueError(f"length={length} must be 1 or more tokens")
    if not (0 <= temperature < np.inf and 0 < top_p <= 1):
        raise ValueError(
            f"temperature={temperature} must be 0 or more, and top_p={top_p} above 0 "
            f"and at most 1"
        )
    if not 0 < vocab_size <= whole:
        raise ValueError(
            f"vocab_size={vocab_size} must be from 1 to the model's {whole}; give the "
            f"tokenizer that the model was trained with"
        )
    if model.mesh is not None and model.mesh.size > 1:
        raise ValueError(
            f"the model lies on a mesh of {model.mesh.size} devices, and a cache is on "
            f"one; load it with load_trained_model, or use greedy_sample"
        )


def _check_prompts(
    model: Transformer, prompts: Sequence[Sequence[int] | np.ndarray | jax.Array]
) -> None:
    """Raises ValueError for a prompt without tokens, or with ids that are no integers
    from 0 to the model's vocab_size - 1."""
    if not prompts or not all(len(prompt) for prompt in prompts):
        raise ValueError(
            f"{len(prompts)} prompts, of {[len(prompt) for prompt in prompts]} tokens: "
            f"the model predicts from at least one; pass e.g. the id of a separator"
        )
    for prompt in map(np.asarray, prompts):
        if not np.issubdtype(prompt.dtype, np.integer):
            raise ValueError(
                f"a prompt has ids of dtype {prompt.dtype}; give integers, as a "
                f"tokenizer's encode returns them"
            )
    whole = model.config.vocab_size
    largest = max(int(np.max(prompt)) for prompt in prompts)
    if largest >= whole or min(int(np.min(prompt)) for prompt in prompts) < 0:
        raise ValueError(
            f"a prompt has ids outside of the model's vocab_size={whole}; encode it "
            f"with the tokenizer that the model was trained with"
        )


def _check_drawn(tokens: Int[np.ndarray, "batch drawn"]) -> None:
    """Raises ValueError where a token was drawn from logits that are not finite."""
    texts, places = np.nonzero(tokens == NOT_DRAWN)
    if len(texts):
        raise ValueError(
            f"the logits for token {places[0]} after prompt {texts[0]} are not finite, "
            f"and no token can be drawn from them; the model's weights are damaged, or "
            f"overflow in its compute dtype: load another checkpoint, "
            f"or compute in float32"
        )


def empty_cache(model: Transformer, batch: int, capacity: int) -> KVCache:
    """Returns the cache of all layers for `capacity` tokens, (layers, batch, capacity,
    kv_heads, head_dim) in the compute dtype, with nothing in it."""
    config = model.config
    shape = (config.layers, batch, capacity, config.kv_heads, config.head_width)
    zeros = partial(jnp.zeros, shape, jnp.dtype(config.dtype))
    return KVCache(keys=zeros(), values=zeros())


class _How(NamedTuple):
    """How tokens are drawn, and which ones end a text."""

    temperature: Float[Array, ""]
    top_p: Float[Array, ""]
    key: Key[Array, ""]
    end_tokens: Int[Array, " ends"]


class _Texts(NamedTuple):
    """Texts that are being drawn."""

    number: Int[Array, ""]
    """Tokens drawn of each."""
    token: Int[Array, " batch"]
    """The last token of each sequence."""
    positions: Int[Array, " batch"]
    """The position of the last token in its sequence."""
    cache: KVCache
    """The keys and values of all tokens before the last one."""
    drawn: Int[Array, "batch length"]
    """The tokens by number; what stands behind the first `number` is not drawn yet."""


def _draw(
    model: Transformer,
    features: Float[Array, "batch d_model"],
    number: Int[Array, ""] | int,
    how: _How,
    *,
    vocab_size: int,
    greedy: bool,
) -> Int[Array, " batch"]:
    """Returns the token of this number of each text, `NOT_DRAWN` where the logits are
    not finite."""
    logits = model.logits(features)[:, :vocab_size]
    largest = jnp.max(logits, axis=-1)
    if greedy:
        tokens = jnp.argmax(logits, axis=-1)
    else:
        of_row = partial(jax.random.fold_in, jax.random.fold_in(how.key, number))
        keys = jax.vmap(of_row)(jnp.arange(len(logits)))
        # None is above zero: divided by a low temperature they would overflow.
        below = logits - largest[:, None]
        inside = nucleus(below / how.temperature, how.top_p)
        tokens = jax.vmap(jax.random.categorical)(keys, inside)
    # The largest is NaN where any is.
    return jnp.where(jnp.isfinite(largest), tokens, NOT_DRAWN).astype(jnp.int32)


@partial(nnx.jit, static_argnames=("length", "vocab_size", "greedy"))
def _begin(
    model: Transformer,
    tokens: Int[Array, "batch longest"],
    lengths: Int[Array, " batch"],
    how: _How,
    *,
    length: int,
    vocab_size: int,
    greedy: bool,
) -> _Texts:
    """Returns the texts with the first token after each prompt."""
    batch, longest = tokens.shape
    # Shorter prompts are filled up at the end: no token sees what lies behind it, and
    # the places in the cache are taken by what is drawn before anything reads them.
    positions = jnp.broadcast_to(jnp.arange(longest), tokens.shape)
    cache = empty_cache(model, batch, longest + length)
    features, cache = model.features_with_cache(tokens, cache, positions)
    last = features[jnp.arange(batch), lengths - 1]
    first = _draw(model, last, 0, how, vocab_size=vocab_size, greedy=greedy)
    drawn = jnp.broadcast_to(first[:, None], (batch, length))
    return _Texts(jnp.int32(1), first, lengths, cache, drawn)


@partial(nnx.jit, static_argnames=("vocab_size", "greedy"))
def _go_on(
    model: Transformer,
    texts: _Texts,
    upto: Int[Array, ""],
    how: _How,
    *,
    vocab_size: int,
    greedy: bool,
) -> tuple[_Texts, Int[Array, "batch length"]]:
    """Returns the texts with `upto` tokens, or fewer where all have ended; and their
    tokens, what is not drawn any more filled up with the token that ended the text."""

    def is_end(token: jax.Array) -> jax.Array:
        return jnp.any(token[:, None] == how.end_tokens[None, :], axis=1)

    def step(texts: _Texts) -> _Texts:
        number, token, positions, cache, drawn = texts
        features, cache = model.features_with_cache(
            token[:, None], cache, positions[:, None]
        )
        after = _draw(
            model, features[:, 0], number, how, vocab_size=vocab_size, greedy=greedy
        )
        after = jnp.where(is_end(token), token, after)
        drawn = jax.lax.dynamic_update_index_in_dim(drawn, after, number, axis=1)
        return _Texts(number + 1, after, positions + 1, cache, drawn)

    def goes_on(texts: _Texts) -> jax.Array:
        return (texts.number < upto) & ~jnp.all(is_end(texts.token))

    texts = jax.lax.while_loop(goes_on, step, texts)
    there = jnp.arange(texts.drawn.shape[1]) < texts.number
    return texts, jnp.where(there, texts.drawn, texts.token[:, None])


def nucleus(
    logits: Float[Array, "batch vocab"], top_p: Float[Array, ""] | float
) -> Float[Array, "batch vocab"]:
    """Returns the logits, those outside of the nucleus -inf: the fewest most likely
    tokens whose probabilities sum to `top_p` or more; ties go to the lower id."""
    order = jnp.argsort(-logits, axis=-1, stable=True)
    probabilities = jax.nn.softmax(logits, axis=-1)
    ranked = jnp.take_along_axis(probabilities, order, axis=-1)
    before = jnp.cumsum(ranked, axis=-1) - ranked
    # The first is always in, whatever rounding makes of the sum before it.
    inside = (before < top_p).at[:, 0].set(True)
    back = jnp.argsort(order, axis=-1)
    return jnp.where(jnp.take_along_axis(inside, back, axis=-1), logits, -jnp.inf)
