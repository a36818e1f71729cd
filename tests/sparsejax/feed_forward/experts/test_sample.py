"""Some tokens of a call with all of their neurons, against what the call computes."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from sparsejax.feed_forward.experts.sample import stride_on_device
from sparsejax.feed_forward.ffn import ffn, observed_ffn
from sparsejax.feed_forward.layout import FFNLayout
from sparsejax.feed_forward.sparsity import DENSE, FFNSparsity
from sparsejax.models import sparse_ffn
from sparsejax.models.sparse_ffn import SparseFFN
from sparsejax.routing.routers import ActivationEnergy
from sparsejax.sparsity.patterns import NM, VNM
from tests.support.oracles.ffn_cases import make_inputs
from tests.support.oracles.ffn_oracle import soft_threshold

SAMPLED = FFNSparsity(
    activations=VNM(8, 4, 16),
    router=ActivationEnergy(),
    experts_per_token=2,
    weight_gradients="expert_columns",
    skipped_energy=0.05,
)
BETAS = jnp.array([1.5, 0.5])
EXPERTS = 4


@pytest.mark.parametrize("weights", [None, NM(2, 4)])
@pytest.mark.parametrize(
    "router",
    [
        {"router": "activation_energy"},
        {"router": "activation_energy_fp8"},
        {"router": "activation_energy_fp8", "skip_blocks": True},
        {"router": "token_hash"},
    ],
    ids=lambda of: "-".join(map(str, of.values())),
)
def test_a_sample_has_the_energies_and_the_experts_of_the_call(weights, router):
    """The experts that the call has chosen are those in which Y reads any neuron."""
    sparsity = replace(SAMPLED, weights=weights, **router)
    x, w_up, w_down, _ = (a.astype(np.float32) for a in make_inputs(tokens=64))
    index = None
    if router["router"] == "token_hash":
        index = jnp.asarray(np.random.default_rng(0).integers(EXPERTS, size=(64, 2)))
    how = {"sparsity": sparsity, "scales": BETAS, "expert_index": index}
    y, sample = observed_ffn(x, w_up, w_down, **how)
    np.testing.assert_array_equal(y, ffn(x, w_up, w_down, **how))
    np.testing.assert_array_equal(sample.x, x[::16])

    read = w_up if weights is None else BETAS[0] * soft_threshold(w_up, axis=0)
    a = np.maximum(x[::16] @ read, 0) ** 2
    by_expert = a.reshape(len(a), EXPERTS, -1)
    # Fourth powers of float32 sums of 8 products of numbers near 1.
    energies = np.sum(by_expert**2, axis=2)
    np.testing.assert_allclose(sample.energies, energies, rtol=1e-4, atol=1e-5)

    chosen = (by_expert * sample.used[..., None]).reshape(a.shape)
    np.testing.assert_allclose(y[::16], chosen @ w_down, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("tokens", "stride"), [(1, 16), (3200, 16), (32768, 16), (32769, 17), (65536, 32)]
)
def test_a_sample_has_every_sixteenth_token_and_2048_at_most(tokens, stride):
    assert stride_on_device(tokens, None, 1.0) == stride
    assert -(-tokens // stride) <= 2048


@pytest.mark.parametrize(
    ("micro_batches", "sampled"),
    [(1, 1024), (2, 1024), (3, 683), (4, 512), (8, 256), (64, 256)],
)
def test_the_samples_of_a_step_have_2048_tokens_or_256_of_each_call(
    micro_batches, sampled
):
    share = 1 / micro_batches
    assert -(-16384 // stride_on_device(16384, None, share)) == sampled
    ones = jnp.ones((16384, 8)), jnp.ones((8, 64)), jnp.ones((64, 8))
    run = partial(observed_ffn, sparsity=SAMPLED, scales=BETAS, share_of_step=share)
    assert len(jax.eval_shape(run, *ones)[1].x) == sampled


def test_a_layer_says_what_share_of_a_step_its_call_is(monkeypatch):
    layer = SparseFFN(8, 64, sparsity=SAMPLED, rngs=nnx.Rngs(0))
    layer.share_of_step = 1 / 8
    shares = []

    def observed(*operands, share_of_step, **others):
        shares.append(share_of_step)
        return observed_ffn(*operands, share_of_step=share_of_step, **others)

    monkeypatch.setattr(sparse_ffn, "observed_ffn", observed)
    layer(jnp.ones((64, 8)))
    assert shares == [1 / 8]


def test_a_device_of_a_mesh_has_its_share_of_the_sample():
    layout = FFNLayout(mesh=jax.sharding.AbstractMesh((4,), ("data",)))
    assert stride_on_device(16384, layout, 1.0) == 32


@pytest.mark.parametrize(
    ("tokens", "sparsity", "message"),
    [
        (0, SAMPLED, "0 tokens of an FFN with 4 experts give nothing to observe"),
        (8, DENSE, "8 tokens of an FFN with no experts give nothing to observe"),
    ],
)
def test_where_nothing_can_be_observed_it_is_refused(tokens, sparsity, message):
    x, w_up, w_down = jnp.ones((tokens, 8)), jnp.ones((8, 64)), jnp.ones((64, 8))
    with pytest.raises(ValueError, match=message):
        observed_ffn(x, w_up, w_down, sparsity=sparsity)
