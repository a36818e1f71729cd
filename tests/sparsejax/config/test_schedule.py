"""Phases of a run, and the sparsity of each recipe."""

from dataclasses import replace

import pytest

from sparsejax.config import RECIPES, RecipeConfig, TrainConfig
from sparsejax.config.presets import tiny
from sparsejax.config.schedule import phases
from sparsejax.feed_forward.sparsity import DENSE, FFNSparsity
from sparsejax.routing.routers import (
    ActivationEnergy,
    ActivationEnergyFP8,
    NearestCentre,
)
from sparsejax.sparsity.patterns import NM, VNM

TWO_FOUR = FFNSparsity(weights=NM(2, 4))


def test_phases_are_warm_up_sparse_dense_and_add_up():
    config = replace(tiny(), steps=1001)
    kinds = [phase.kind for phase in phases(config)]
    assert kinds == ["warm-up", "sparse", "dense"]
    assert [phase.steps for phase in phases(config)] == [50, 851, 100]
    dense = phases(replace(config, recipe="dense"))
    assert [(p.kind, p.steps) for p in dense] == [("dense", 1001)]


def test_empty_phases_are_left_out():
    settings = RecipeConfig(warmup_share=0.0, sparse_share=1.0)
    (only,) = phases(TrainConfig(steps=7, phases=settings))
    assert (only.kind, only.steps) == ("sparse", 7)


def test_recipes_are_the_documented_sparsities():
    experts = RECIPES["experts"]
    assert experts.activations == VNM(128, 4, 32) and experts.weights is None
    assert (experts.router, experts.experts_per_token) == (ActivationEnergyFP8(), 2)
    assert experts.skip_blocks
    assert experts.weight_gradients == "expert_columns"
    assert experts.skipped_energy == 0.05 and TrainConfig.recipe == "experts"
    two_four = RECIPES["two-four"]
    assert (two_four.weights, two_four.activations) == (NM(2, 4), NM(2, 4))
    paper = RECIPES["paper"]
    assert paper.activations == VNM(128, 2, 16)
    assert (paper.router, paper.experts_per_token) == (NearestCentre(), 1)
    assert paper.weight_gradients == "expert_columns"
    assert RECIPES["weights"] == TWO_FOUR
    assert RECIPES["activations"] == FFNSparsity(activations=NM(2, 4))
    assert RECIPES["dense"] == DENSE


def test_a_sparsity_takes_the_place_of_the_recipes_own():
    chosen = replace(
        RECIPES["paper"],
        activations=VNM(128, 2, 32),
        experts_per_token=2,
        router=ActivationEnergy(),
    )
    config = TrainConfig(recipe="paper", phases=RecipeConfig(sparsity=chosen))
    assert config.sparsity == chosen
    assert [phase.sparsity for phase in phases(config)] == [DENSE, chosen, DENSE]
    assert TrainConfig(recipe="paper").sparsity == RECIPES["paper"]
    own = RecipeConfig(sparsity=RECIPES["paper"])
    assert own.relative_to("paper") == RecipeConfig()
    assert own.relative_to("two-four") == own


@pytest.mark.parametrize("recipe", ["two-four", "paper", "activations"])
def test_recipes_with_sparse_activations_take_the_settings_of_the_backward(recipe):
    chosen = {
        "token_sparsity": "mvue",
        "dense_features": 0.25,
        "permute_tokens": False,
        "mask_reuse": False,
    }
    plain = RECIPES[recipe]
    settings = RecipeConfig(sparsity=replace(plain, **chosen))
    sparsity = TrainConfig(recipe=recipe, phases=settings).sparsity
    assert {name: getattr(sparsity, name) for name in chosen} == chosen
    assert all(getattr(plain, name) != value for name, value in chosen.items())


def test_an_unknown_recipe_is_refused():
    with pytest.raises(ValueError, match="recipe='papr' must be one of 'experts', 't"):
        RecipeConfig().sparsity_of("papr")
