"""The loss of a token and its gradient, against sums in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparsejax.models.loss import (
    in_one_reduction,
    in_three_reductions,
    token_losses,
)

REDUCTIONS = pytest.mark.parametrize("reduce", [in_one_reduction, in_three_reductions])


def logits_and_targets(*batch: int, vocab: int, scale: float = 3.0):
    random = np.random.default_rng(vocab)
    logits = (random.standard_normal((*batch, vocab)) * scale).astype(np.float32)
    return logits, random.integers(0, vocab, batch).astype(np.int32)


def normaliser(logits: np.ndarray) -> np.ndarray:
    logits = logits.astype(np.float64)
    largest = logits.max(-1)
    return largest + np.log(np.exp(logits - largest[..., None]).sum(-1))


@REDUCTIONS
@pytest.mark.parametrize("vocab", [1, 2, 64, 255, 1000, 1024])
def test_reductions_give_the_normaliser_and_the_targets_logit(reduce, vocab):
    logits, targets = logits_and_targets(2, 5, vocab=vocab)
    total, of_target = jax.jit(reduce)(logits, targets)
    # Sums of 1000 float32 numbers, one after the other.
    np.testing.assert_allclose(total, normaliser(logits), rtol=2e-6, atol=2e-6)
    picked = np.take_along_axis(logits, targets[..., None], -1)[..., 0]
    np.testing.assert_array_equal(of_target, picked)


@REDUCTIONS
def test_logits_may_be_far_apart_and_minus_infinity(reduce):
    logits = np.array(
        [[3e38, -3e38, 0], [-np.inf, 5, -np.inf], [-3e38, -3e38, -np.inf]], np.float32
    )
    total, of_target = jax.jit(reduce)(logits, np.array([0, 1, 1], np.int32))
    np.testing.assert_allclose(total, [3e38, 5, -3e38])
    np.testing.assert_array_equal(of_target, np.float32([3e38, 5, -3e38]))


@REDUCTIONS
@pytest.mark.parametrize("at", [0, 1, 9, 63])
def test_one_finite_logit_among_neighbours_is_the_normaliser(reduce, at):
    logits = np.full((3, 64), -np.inf, np.float32)
    logits[:, at] = [5, -3e38, 3e38]
    logits[1, 63 - at] = -3e38
    total, of_target = jax.jit(reduce)(logits, np.full(3, at, np.int32))
    np.testing.assert_allclose(total, logits[:, at])
    np.testing.assert_array_equal(of_target, logits[:, at])


@REDUCTIONS
@pytest.mark.parametrize(("vocab", "at"), [(3, 1), (64, 0), (64, 13)])
def test_a_nan_stays_one(reduce, vocab, at):
    logits = np.ones((1, vocab), np.float32)
    logits[0, at] = np.nan
    total, _ = reduce(logits, np.zeros(1, np.int32))
    assert np.isnan(total).all()


def test_the_gradient_is_what_softmax_gives_beyond_the_target():
    logits, targets = logits_and_targets(3, 4, vocab=50)
    weights = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)
    losses, pull = jax.vjp(lambda x: token_losses(x, targets), jnp.asarray(logits))
    (gradient,) = pull(jnp.asarray(weights))
    share = np.exp(logits.astype(np.float64) - normaliser(logits)[..., None])
    picked = np.take_along_axis(logits, targets[..., None], -1)[..., 0]
    np.testing.assert_allclose(losses, normaliser(logits) - picked, rtol=1e-5)
    share[np.arange(50) == targets[..., None]] -= 1
    expected = share * weights[..., None]
    np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-6)


@REDUCTIONS
def test_logits_in_bfloat16_are_summed_in_float32(reduce):
    logits, targets = logits_and_targets(2, 5, vocab=1000)
    rounded = jnp.asarray(logits, jnp.bfloat16)
    total, of_target = jax.jit(reduce)(rounded, targets)
    assert (total.dtype, of_target.dtype) == (jnp.float32, jnp.float32)
    np.testing.assert_allclose(total, normaliser(np.asarray(rounded)), rtol=2e-6)
    losses, pull = jax.vjp(lambda x: token_losses(x, targets), rounded)
    (gradient,) = pull(jnp.ones_like(losses))
    assert (losses.dtype, gradient.dtype) == (jnp.float32, jnp.bfloat16)
    whole = lambda x: token_losses(x, targets).sum()
    expected = jax.grad(whole)(rounded.astype(jnp.float32))
    np.testing.assert_array_equal(gradient, expected.astype(jnp.bfloat16))


def test_a_gpu_reads_the_logits_once_before_the_gradient():
    logits, targets = logits_and_targets(2, vocab=8)
    lowered = jax.jit(token_losses).trace(logits, targets)
    on_gpu = lowered.lower(lowering_platforms=("cuda",)).as_text()
    assert on_gpu.count("stablehlo.reduce") == 1
