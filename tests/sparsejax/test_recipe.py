"""Phases of a run, and the sparsity of each recipe."""

from dataclasses import replace

import pytest

from sparsejax.config import RecipeConfig, TrainConfig
from sparsejax.ops.ffn_spec import FFNSparsity
from sparsejax.patterns import NM, VNM
from sparsejax.presets import tiny
from sparsejax.recipe import phases, sparsity_of

TWO_FOUR = FFNSparsity(weights=NM(2, 4))


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


def test_an_unknown_recipe_is_refused():
    with pytest.raises(ValueError, match="recipe='papr' must be one of 'default', 'pa"):
        sparsity_of("papr", RecipeConfig())
