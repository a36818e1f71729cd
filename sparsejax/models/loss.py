"""The loss of a token, from few passes over its logits."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from sparsejax.dtypes import accumulation_dtype


@jax.custom_vjp
def token_losses(
    logits: Float[Array, "*batch vocab"], targets: Int[Array, "*batch"]
) -> Float[Array, "*batch"]:
    """Returns how surprising each target is, in nats: log sum_v exp(logits_v) minus the
    target's logit. It is computed in float32, or in float64 for float64.

    Logits of a large vocabulary are the largest array of a step. On an NVIDIA GPU they
    are read twice: once for their largest, the sum of their exponentials and the
    target's logit, and once for the gradient, softmax(logits) - onehot(target).
    Where they are split over the vocabulary, the devices exchange what they have
    reduced.

    Args:
      logits: floats, finite or -inf; at least one of each token is finite.
      targets: ids in [0, vocab), int32.
    """
    return _forward(logits, targets)[0]


def _forward(
    logits: jax.Array, targets: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array]]:
    # A reduction of three values at once is slow where it is no vector instruction: on
    # a CPU four times as slow as three reductions, for a vocabulary of bytes.
    normaliser, of_target = lax.platform_dependent(
        logits, targets, cuda=in_one_reduction, default=in_three_reductions
    )
    return normaliser - of_target, (logits, targets, normaliser)


def in_three_reductions(
    logits: jax.Array, targets: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns log sum_v exp(logits_v) of each token, and the target's logit, both in
    the dtype that `logits` are accumulated in."""
    logits = logits.astype(accumulation_dtype(logits.dtype))
    at_target = jnp.where(_is_target(logits, targets), logits, 0)
    return jax.nn.logsumexp(logits, axis=-1), jnp.sum(at_target, axis=-1)


def in_one_reduction(
    logits: jax.Array, targets: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns what `in_three_reductions` does from a single pass over the logits, which
    is faster on a GPU."""
    logits = logits.astype(accumulation_dtype(logits.dtype))
    nowhere = jnp.array(-jnp.inf, logits.dtype)
    at_target = jnp.where(_is_target(logits, targets), logits, nowhere)
    largest, total, of_target = lax.reduce(
        (logits, jnp.ones_like(logits), at_target),
        (nowhere, jnp.zeros((), logits.dtype), nowhere),
        _of_both,
        (logits.ndim - 1,),
    )
    return largest + jnp.log(total), of_target


def _of_both(left, right):
    """Returns max, sum of exp(x - max) and the target's logit of two sets of logits
    together from those of each. A set without logits has the maximum -inf."""
    largest, smallest = jnp.maximum(left[0], right[0]), jnp.minimum(left[0], right[0])
    # The sum that belongs to the largest stays. One exponential for each logit, for two
    # take an NVIDIA GPU longer than reading a large vocabulary does.
    reference = jnp.maximum(largest, jnp.finfo(largest.dtype).min)
    is_left = left[0] >= right[0]
    stays = jnp.where(is_left, left[1], right[1])
    shrinks = jnp.where(is_left, right[1], left[1])
    total = stays + shrinks * jnp.exp(smallest - reference)
    return largest, total, jnp.maximum(left[2], right[2])


def _backward(saved, gradient):
    logits, targets, normaliser = saved
    share = jnp.exp(logits.astype(normaliser.dtype) - normaliser[..., None])
    of_logits = (share - _is_target(logits, targets)) * gradient[..., None]
    return of_logits.astype(logits.dtype), None


def _is_target(logits: jax.Array, targets: jax.Array) -> jax.Array:
    # Compared on the fly: by index, the gradient of the logits would be scattered into
    # a second array of their size.
    ids = lax.broadcasted_iota(targets.dtype, logits.shape, logits.ndim - 1)
    return ids == targets[..., None]


token_losses.defvjp(_forward, _backward)
