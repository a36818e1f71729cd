"""Phases, and what a switch does to weights, scales, clusters and moments."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from sparsejax.config import ModelConfig, RecipeConfig, TrainConfig
from sparsejax.layers import SparseFFN
from sparsejax.model import Transformer
from sparsejax.ops.ffn_spec import DENSE, FFNSparsity
from sparsejax.patterns import NM, VNM
from sparsejax.presets import tiny
from sparsejax.recipe import permute_neurons, phases, sparsity_of, switch

TWO_FOUR = FFNSparsity(weights=NM(2, 4))
VENOM = FFNSparsity(
    weights=NM(2, 4), activations=VNM(8, 2, 16), weight_gradients="expert_columns"
)
CONFIG = ModelConfig(
    vocab_size=32, d_model=16, layers=2, heads=2, kv_heads=2, d_hidden=64
)


def make_model(sparsity=DENSE, config=CONFIG):
    return Transformer(config, sparsity=sparsity, rngs=nnx.Rngs(0))


def make_tokens(seed=0):
    return jax.random.randint(jax.random.key(seed), (3, 11), 0, CONFIG.vocab_size)


def test_phases_are_warm_up_sparse_dense_and_add_up():
    config = replace(tiny(), steps=1001)
    kinds = [phase.kind for phase in phases(config)]
    assert kinds == ["warm-up", "sparse", "dense"]
    assert [phase.steps for phase in phases(config)] == [50, 500, 451]
    dense = phases(replace(config, recipe="dense"))
    assert [(p.kind, p.steps) for p in dense] == [("dense", 1001)]


def test_empty_phases_are_left_out():
    settings = RecipeConfig(warmup_share=0.0, sparse_share=1.0)
    (only,) = phases(TrainConfig(steps=7, phases=settings))
    assert (only.kind, only.steps) == ("sparse", 7)


def test_recipes_are_the_documented_sparsities():
    settings = RecipeConfig(experts=8, experts_per_token=2, router="true_mass")
    default = sparsity_of("default", settings)
    assert (default.weights, default.activations) == (NM(2, 4), NM(2, 4))
    paper = sparsity_of("paper", settings)
    assert paper.activations == VNM(128, 2, 32)
    assert (paper.router, paper.experts_per_token) == ("true_mass", 2)
    assert paper.weight_gradients == "expert_columns"
    assert sparsity_of("weights", settings) == TWO_FOUR
    activations = sparsity_of("activations", settings)
    assert activations == FFNSparsity(activations=NM(2, 4))


@pytest.mark.parametrize("recipe", ["default", "paper", "activations"])
def test_recipes_with_sparse_activations_take_the_settings_of_the_backward(recipe):
    chosen = {
        "token_sparsity": "mvue",
        "dense_features": 0.25,
        "permute_tokens": False,
        "mask_reuse": False,
    }
    plain = sparsity_of(recipe, RecipeConfig())
    assert sparsity_of(recipe, RecipeConfig(**chosen)) == replace(plain, **chosen)
    assert all(getattr(plain, name) != value for name, value in chosen.items())


def test_fold_makes_leaving_two_four_weights_lossless():
    model, tokens = make_model(TWO_FOUR), make_tokens()
    before = model(tokens)
    switch(model, (), DENSE, fold=True)
    np.testing.assert_allclose(model(tokens), before, rtol=1e-4, atol=1e-5)
    unfolded = make_model(TWO_FOUR)
    switch(unfolded, (), DENSE, fold=False)
    assert np.abs(unfolded(tokens) - before).max() > 0.05


def test_fold_of_a_gated_ffn_is_lossless():
    config = replace(CONFIG, activation="swiglu")
    model, tokens = make_model(TWO_FOUR, config), make_tokens()
    before = model(tokens)
    switch(model, (), DENSE)
    np.testing.assert_allclose(model(tokens), before, rtol=1e-4, atol=1e-5)


def test_fold_leaves_w_down_alone():
    ffn = SparseFFN(16, 32, sparsity=TWO_FOUR, rngs=nnx.Rngs(1))
    w_up, w_down = np.asarray(ffn.w_up[...]), np.asarray(ffn.w_down[...])
    switch(ffn, (), DENSE)
    np.testing.assert_array_equal(ffn.w_down[...], w_down)
    assert (np.asarray(ffn.w_up[...]) == 0).mean() == pytest.approx(0.5)
    assert not np.array_equal(ffn.w_up[...], w_up)


def test_entering_two_four_weights_computes_beta_of_the_present_weights():
    ffn = SparseFFN(16, 32, rngs=nnx.Rngs(1))
    ffn.w_up[...] = jnp.abs(ffn.w_up[...]) + 1
    stale = np.asarray(ffn.scales[...])
    switch(ffn, (), TWO_FOUR)
    fresh = SparseFFN(16, 32, rngs=nnx.Rngs(1))
    fresh.w_up[...] = ffn.w_up[...]
    fresh.refresh_scales()
    np.testing.assert_array_equal(ffn.scales[...], fresh.scales[...])
    assert not np.allclose(stale, ffn.scales[...])


def test_beta_stays_frozen_while_weights_stay_sparse():
    ffn = SparseFFN(16, 32, sparsity=TWO_FOUR, rngs=nnx.Rngs(1))
    frozen = np.asarray(ffn.scales[...])
    ffn.w_up[...] = 2 + jnp.abs(ffn.w_up[...])
    switch(ffn, (), replace(TWO_FOUR, activations=NM(2, 4)))
    np.testing.assert_array_equal(ffn.scales[...], frozen)


def test_clustering_relabels_weights_and_moments_alike():
    model, tokens = make_model(), make_tokens()
    params = jax.tree.map(jnp.copy, nnx.state(model, nnx.Param))
    optimizer = optax.adam(1e-3)
    moments = optimizer.init(params)
    # moments that name their own neuron: a copy of the weights
    moments = (moments[0]._replace(mu=params, nu=params), *moments[1:])
    dense_before = model(tokens)
    moments = switch(model, moments, VENOM)
    relabelled = nnx.state(model, nnx.Param)
    for moment in (moments[0].mu, moments[0].nu):
        jax.tree.map(np.testing.assert_array_equal, moment, relabelled)
    ours, theirs = params["blocks"]["ffn"]["w_up"], relabelled["blocks"]["ffn"]["w_up"]
    assert not np.array_equal(ours[...], theirs[...])
    switch(model, (), DENSE, fold=False)
    np.testing.assert_allclose(model(tokens), dense_before, rtol=1e-4, atol=1e-5)


def test_each_layer_gets_its_own_order():
    order = jnp.array([[1, 0, 2, 3], [3, 2, 1, 0]])
    w_up = jnp.arange(2 * 3 * 4.0).reshape(2, 3, 4)
    w_down = w_up.swapaxes(1, 2)
    tree = {"ffn": {"w_up": w_up, "w_down": w_down, "scales": w_up}, "w_up": w_up}
    permuted = permute_neurons(tree, order, prefix=("ffn",))
    for layer in range(2):
        for new, old in enumerate(order[layer].tolist()):
            np.testing.assert_array_equal(
                permuted["ffn"]["w_up"][layer, :, new], w_up[layer, :, old]
            )
            np.testing.assert_array_equal(
                permuted["ffn"]["w_down"][layer, new], w_down[layer, old]
            )
    np.testing.assert_array_equal(permuted["ffn"]["scales"], w_up)
    np.testing.assert_array_equal(permuted["w_up"], w_up)


def test_switch_between_expert_counts_clusters_anew():
    ffn = SparseFFN(16, 64, sparsity=VENOM, rngs=nnx.Rngs(1))
    switch(ffn, (), replace(VENOM, activations=VNM(8, 2, 32)))
    assert ffn.centres is not None
    assert ffn.centres[...].shape == (8, 16)
    w_up = np.asarray(ffn.w_up[...])
    unit = w_up / np.linalg.norm(w_up, axis=0)
    centre = unit[:, :8].mean(axis=1)
    centre /= np.linalg.norm(centre)
    np.testing.assert_allclose(ffn.centres[...][0], centre, rtol=1e-5, atol=1e-6)
