"""The penalty's gradient by JAX, its size, and where it is added."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from sparsejax.feed_forward.experts.observed import initial, moved
from sparsejax.feed_forward.experts.penalty import (
    GROUPS,
    Penalty,
    gradient_of_products,
    penalised,
    penalty,
)
from sparsejax.feed_forward.experts.sample import Sample, all_products
from sparsejax.feed_forward.sparsity import FFNSparsity
from sparsejax.models.sparse_ffn import SparseFFN
from sparsejax.routing.routers import ActivationEnergy
from sparsejax.sparsity.patterns import VNM
from sparsejax.training.micro_batches import loss_and_gradient

TOKENS, D, E, NEURONS = 6, 8, 4, 5
PENALISED = FFNSparsity(
    activations=VNM(8, 2, 16),
    router=ActivationEnergy(),
    weight_gradients="expert_columns",
    skipped_energy=0.05,
)


def operands():
    rng = np.random.default_rng(0)
    x, w_up = rng.normal(size=(TOKENS, D)), rng.normal(size=(D, E * NEURONS))
    used = np.zeros((TOKENS, E), bool)
    # The first expert is used by most.
    used[np.arange(TOKENS), [0, 0, 0, 0, 2, 1]] = True
    return jnp.asarray(x), jnp.asarray(w_up), jnp.asarray(used)


def sample_of(y_up, used, x=None):
    """A sample, and its Y1."""
    a = jnp.square(jax.nn.relu(y_up)).reshape(*used.shape, -1)
    x = jnp.ones((len(y_up), D)) if x is None else x
    return Sample(x, jnp.sum(a**2, axis=2), used), y_up


def penalty_of(w_up, x, used):
    """R, written from its equation."""
    a = jnp.square(jax.nn.relu(x @ w_up)).reshape(TOKENS, E, NEURONS)
    load = used.sum(axis=0)
    weight = jnp.maximum(1.0, load * E / load.sum())
    norms = jnp.sqrt(jnp.sum(a**2, axis=2))
    whole = jax.lax.stop_gradient(jnp.sqrt(jnp.sum(a**2, axis=(1, 2))))
    return jnp.mean(jnp.sum(~used * weight[None] * norms / whole[:, None], axis=1))


def test_its_gradient_is_the_derivative_of_the_penalty():
    with jax.enable_x64(True):
        x, w_up, used = operands()
        expected = jax.grad(penalty_of)(w_up, x, used)
        got = x.T @ gradient_of_products(*sample_of(x @ w_up, used))
    # float64, but for the loads
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-9)


def test_tokens_without_activation_get_zeros():
    x, w_up, used = operands()
    got = gradient_of_products(*sample_of(-jnp.abs(x @ w_up), used))
    np.testing.assert_array_equal(got, 0)


def test_it_is_added_in_proportion_to_the_gradient():
    x, w_up, used = operands()
    dw = jax.random.normal(jax.random.key(0), w_up.shape)
    of_sample = penalty(*sample_of(x @ w_up, used, x), jnp.float32(0.25))
    added = penalised(dw, of_sample) - dw
    own = jax.grad(penalty_of)(w_up, x, used)
    expected = 0.25 * jnp.linalg.norm(dw) / jnp.linalg.norm(own) * own
    # differences of float32
    np.testing.assert_allclose(added, expected, rtol=1e-3, atol=1e-5)


def test_in_bfloat16_its_product_is_rounded_and_the_sum_is_not():
    x, w_up, used = operands()
    dw = jax.random.normal(jax.random.key(0), w_up.shape)
    x = x.astype(jnp.bfloat16)
    y_up = all_products(x, w_up.astype(jnp.bfloat16))
    assert y_up.dtype == jnp.bfloat16
    own = penalty(*sample_of(y_up, used, x), jnp.float32(0.25))
    added = penalised(dw, own) - dw
    exact = Penalty(*(of.astype(jnp.float32) for of in own))
    expected = penalised(dw, exact) - dw
    assert added.dtype == jnp.float32 and jnp.linalg.norm(expected) > 1
    np.testing.assert_allclose(added, expected, rtol=2**-8, atol=1e-5)
    # Half as many bytes as float32 would be.
    products = f"bf16[{D},{E * NEURONS}] = dot_general"
    assert products in str(jax.make_jaxpr(penalised)(dw, own))


@pytest.mark.parametrize("neurons", [GROUPS, 2 * GROUPS, 2 * GROUPS + 6])
@pytest.mark.parametrize("tokens", [1, 64])
def test_norms_of_wide_gradients_are_estimated(neurons, tokens):
    """The columns that one token gives are parallel, which is the worst case."""
    normal = lambda of, *shape: jax.random.normal(jax.random.key(of), shape)
    x, dy = normal(0, tokens, 256), normal(1, tokens, neurons)
    dw = normal(2, 256, neurons)
    added = penalised(dw, Penalty(x, dy, jnp.array([0.25]))) - dw
    size = jnp.linalg.norm(added) / jnp.linalg.norm(dw)
    np.testing.assert_allclose(size, 0.25, rtol=0.03 if tokens > 1 else 0.3)


def test_a_norm_that_lies_in_few_columns_is_found():
    """A token that hardly activates anything has a gradient as large as it is silent,
    in the few neurons that it skips."""
    normal = lambda of, *shape: jax.random.normal(jax.random.key(of), shape)
    x, y_up, dw = (
        normal(0, 64, 256),
        normal(1, 64, 4 * GROUPS),
        normal(2, 256, 4 * GROUPS),
    )
    y_up = y_up.at[0].set(-1).at[0, jnp.array([5, 71, GROUPS])].set(1e-4)
    used = jnp.zeros((64, 4), bool).at[:, 1].set(True)
    own = penalty(*sample_of(y_up, used, x), jnp.float32(0.25))
    norms = jnp.linalg.norm(x.T @ own.dy_up, axis=0)
    assert norms[jnp.array([5, 71])].min() > 1e4 * jnp.median(norms)
    added = penalised(dw, own) - dw
    size = jnp.linalg.norm(added) / jnp.linalg.norm(dw)
    np.testing.assert_allclose(size, 0.25, rtol=0.3)


@pytest.mark.parametrize("columns", ["one", "all of them, equal"])
def test_a_gradient_whose_columns_are_alike_has_its_norm(columns):
    normal = lambda of, *shape: jax.random.normal(jax.random.key(of), shape)
    x, dy, column = normal(0, 64, 256), normal(1, 64, 4 * GROUPS), normal(2, 256, 1)
    has = jnp.arange(4 * GROUPS) == 17 if columns == "one" else jnp.ones(4 * GROUPS)
    dw = column * has[None]
    added = penalised(dw, Penalty(x, dy, jnp.array([0.25]))) - dw
    size = jnp.linalg.norm(added) / jnp.linalg.norm(dw)
    np.testing.assert_allclose(size, 0.25, rtol=0.3)


@pytest.mark.parametrize(("skipped", "sign"), [(0.2, 1), (0.01, -1)])
def test_it_grows_until_the_skipped_energy_is_what_was_asked_for(skipped, sign):
    used = jnp.array([[True, False, False, False]])
    mass = jnp.array([1 - skipped, skipped, 0, 0]) ** 0.25
    sample, _ = sample_of(mass[None], used)
    kept = initial(PENALISED)
    first = kept["penalty_strength"]
    step = jax.jit(lambda kept: moved(PENALISED, kept, sample, 0.5))
    for _ in range(100):
        kept = step(kept)
    # 100 half steps
    np.testing.assert_allclose(kept["penalty_strength"], first * 1.2**sign, rtol=1e-4)


def test_training_on_it_silences_what_tokens_skip_and_adds_to_w1_alone():
    def gradients(sparsity):
        ffn = SparseFFN(D, 64, sparsity=sparsity, rngs=nnx.Rngs(0))
        x = jax.random.normal(jax.random.key(1), (1, 256, D))
        loss = lambda ffn, x: jnp.mean((ffn(x) - x) ** 2)
        return ffn, loss_and_gradient(loss, ffn, x)[1]

    ffn, with_penalty = gradients(PENALISED)
    _, without = gradients(replace(PENALISED, skipped_energy=None))
    added = with_penalty["w_up"][...] - without["w_up"][...]
    size = jnp.linalg.norm(without["w_up"][...])
    np.testing.assert_allclose(jnp.linalg.norm(added), 0.05 * size, rtol=1e-3)
    np.testing.assert_array_equal(with_penalty["w_down"][...], without["w_down"][...])

    def skipped_share(w_up):
        x = jax.random.normal(jax.random.key(1), (256, D))
        energies = jnp.maximum(x @ w_up, 0).reshape(256, 4, -1) ** 4
        energies = energies.sum(axis=2)
        return jnp.mean(1 - energies.max(axis=1) / energies.sum(axis=1))

    w_up = ffn.w_up[...]
    step = 0.05 * jnp.linalg.norm(w_up) / jnp.linalg.norm(added)
    assert skipped_share(w_up - step * added) < skipped_share(w_up) - 0.005


@pytest.mark.parametrize("target", [0.0, 1.0])
def test_what_is_no_share_is_refused(target):
    with pytest.raises(ValueError, match=f"skipped_energy={target} with activations="):
        replace(PENALISED, skipped_energy=target)
