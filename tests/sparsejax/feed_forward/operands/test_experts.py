"""Mean compensation: what skipped neurons give on average is added."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparsejax.feed_forward.ffn import ffn
from sparsejax.feed_forward.sparsity import FFNSparsity
from sparsejax.routing.routers import ActivationEnergy
from sparsejax.sparsity.patterns import VNM
from tests.support import hopper
from tests.support.ffn_cases import (
    D_HIDDEN,
    SCALES,
    TOKENS,
    TWO_FOUR,
    make_experts,
    make_inputs,
    oracle,
)
from tests.support.ffn_oracle import cluster_mask, heaviest_experts, soft_threshold

COMPENSATED = FFNSparsity(
    weights=TWO_FOUR,
    activations=VNM(8, 2, 16),
    weight_gradients="expert_columns",
    mean_compensation=True,
)
FORMS = {
    "two by energy": {"router": ActivationEnergy(), "experts_per_token": 2},
    "skipped": {"skip_blocks": True},
    "along tokens": {"token_sparsity": "magnitude"},
    "exact": {"exact_gradients": True},
}
MEANS = np.random.default_rng(7).uniform(size=D_HIDDEN)


def run(sparsity, x, w_up, w_down, dy, experts, means, backend=None):
    def forward(x, w_up, w_down):
        return ffn(
            x,
            w_up,
            w_down,
            sparsity=sparsity,
            scales=jnp.array(SCALES, w_up.dtype) if sparsity.weights else None,
            expert_index=None if experts is None else jnp.asarray(experts, jnp.int32),
            skipped_means=jnp.asarray(means),
            backend=backend,
        )

    y, pull_back = jax.vjp(forward, *map(jnp.asarray, (x, w_up, w_down)))
    return y, *pull_back(jnp.asarray(dy, y.dtype))


@pytest.mark.parametrize("form", FORMS)
def test_it_adds_the_means_of_the_skipped_neurons_to_the_oracle(form):
    sparsity = replace(COMPENSATED, **FORMS[form])
    inputs, experts = make_inputs(), make_experts(sparsity)
    x, w_up, w_down, dy = inputs
    used = experts
    if experts is None:
        used = heaviest_experts(x @ (SCALES[0] * soft_threshold(w_up, 0)), 4, 2)
    added = MEANS * ~cluster_mask(used, D_HIDDEN, 4)
    y, dx, dw_up, dw_down = oracle(sparsity, *inputs, experts)
    with jax.enable_x64(True):
        got = run(sparsity, *inputs, experts, MEANS)
    expected = y + added @ w_down, dx, dw_up, dw_down + added.T @ dy
    for ours, theirs in zip(got, expected, strict=True):
        # rounding of float64, as in test_ffn
        np.testing.assert_allclose(ours, theirs, rtol=1e-11, atol=1e-11)


def test_with_the_true_means_the_error_is_zero_on_average():
    """Two of four neurons are never active, so that 2:4 loses nothing, and W1 is
    dense: what is lost is what skipped neurons give."""
    sparsity = FFNSparsity(activations=VNM(8, 2, 16), router=ActivationEnergy())
    x, w_up, w_down, dy = make_inputs(tokens=500)
    x = abs(x)
    w_up[:, np.arange(D_HIDDEN) % 4 > 1] = -1.0
    a = np.maximum(x @ w_up, 0) ** 2
    skipped = ~cluster_mask(heaviest_experts(x @ w_up, 4, 1), D_HIDDEN, 4)
    means = (a * skipped).sum(axis=0) / skipped.sum(axis=0)
    compensated = replace(sparsity, mean_compensation=True)
    with jax.enable_x64(True):
        with_means = np.asarray(run(compensated, x, w_up, w_down, dy, None, means)[0])
        without = np.asarray(run(sparsity, x, w_up, w_down, dy, None, means)[0])
    dense = a @ w_down
    size = np.linalg.norm(dense.mean(axis=0))
    assert np.linalg.norm((dense - without).mean(axis=0)) > 0.3 * size
    assert np.linalg.norm((dense - with_means).mean(axis=0)) < 1e-12 * size
    assert np.linalg.norm(dense - with_means) < np.linalg.norm(dense - without)


def test_on_kernels_it_is_that_of_the_reference(monkeypatch):
    hopper.pretend(monkeypatch)
    sparsity = replace(
        COMPENSATED,
        activations=VNM(128, 2, 8),
        router=ActivationEnergy(),
        mean_compensation=True,
    )
    keys = jax.random.split(jax.random.key(0), 4)
    # Small whole numbers, which bfloat16 and float32 sums hold exactly.
    shapes = ((300, 64), (64, 256), (256, 64), (300, 64))
    whole = [
        jax.random.randint(key, shape, -1, 2).astype(jnp.bfloat16)
        for key, shape in zip(keys, shapes, strict=True)
    ]
    x, w_up, w_down, dy = whole
    means = jnp.arange(256) % 3
    dense = replace(sparsity, weights=None)
    got, expected = (
        run(dense, x, w_up, w_down, dy, None, means.astype(jnp.float32), backend)
        for backend in ("mosaic_sm90", "reference")
    )
    for ours, theirs in zip(got, expected, strict=True):
        np.testing.assert_allclose(
            ours.astype(jnp.float32),
            theirs.astype(jnp.float32),
            rtol=2**-7,  # Y is rounded twice, before and after the means
            atol=2**-7 * float(jnp.abs(theirs).max()),
        )


def test_means_are_asked_for():
    x, w_up, w_down, _ = make_inputs()
    experts = jnp.zeros((TOKENS, 1), jnp.int32)
    options = {"sparsity": COMPENSATED, "scales": jnp.ones(2), "expert_index": experts}
    for means, got in ((None, "None"), (jnp.zeros(4), r"\(4,\)")):
        message = rf"needs skipped_means of shape \(128,\), got {got}; a SparseFFN"
        with pytest.raises(ValueError, match=message):
            ffn(x, w_up, w_down, skipped_means=means, **options)
