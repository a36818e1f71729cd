"""Presets: what they are called, that they fit every recipe, their sizes."""

from typing import get_args

import pytest

from sparsejax.config import MeshConfig, RecipeName
from sparsejax.config.presets import PRESETS
from sparsejax.cost_model import parameter_count
from sparsejax.feed_forward.sparsity import check_divisible


@pytest.mark.parametrize("name", PRESETS)
def test_presets_name_themselves_and_fit_every_recipe(name):
    config = PRESETS[name]()
    assert config.preset == name
    assert config.tokens_per_step == config.batch_size * config.data.sequence_length
    for recipe in get_args(RecipeName):
        sparsity = config.with_recipe(recipe).sparsity
        check_divisible(config.model.d_model, config.model.d_hidden, sparsity)


def test_the_presets_of_the_paper_have_its_probable_sizes():
    # arXiv 2602.06183 does not give them; these are the settings of Meta Lingua with
    # the same steps, FFNs widened for squared ReLU: about by 1.5, to whole experts.
    one, seven = PRESETS["llama-1b"](), PRESETS["llama-7b"]()
    sizes = [
        (c.model.d_model, c.model.layers, c.model.heads, c.model.d_hidden, c.steps)
        for c in (one, seven)
    ]
    assert sizes == [(2048, 25, 16, 8192, 60_000), (4096, 32, 32, 16_384, 100_000)]
    for config, swiglu_hidden in ((one, 5632), (seven, 11_008)):
        assert 0.96 < config.model.d_hidden / (1.5 * swiglu_hidden) <= 1
        assert config.model.d_hidden % (16 * 64) == 0
        assert config.data.sequence_length == 4096
        assert config.optimizer.final_ratio == 1e-6
        assert config.optimizer.clip_norm == 1.0
        assert config.model.vocab_size == 128_256
    assert one.optimizer.peak_learning_rate == 3e-3
    assert seven.optimizer.peak_learning_rate == 1e-3
    assert round(one.optimizer.warmup_share * one.steps) == 5000
    assert round(seven.optimizer.warmup_share * seven.steps) == 2000
    assert (one.optimizer.weight_decay, seven.optimizer.weight_decay) == (0.033, 0.1)
    assert [c.micro_batches for c in (one, seven)] == [None, None]
    on_one = [c.micro_batches_on(MeshConfig(data=1)) for c in (one, seven)]
    assert on_one == [64, 256]
    # The meshes of the README, and one GPU of each as many sequences as alone.
    assert one.micro_batches_on(MeshConfig(data=1, fsdp=8)) == 8
    assert one.micro_batches_on(MeshConfig(data=4, fsdp=8)) == 2
    assert seven.micro_batches_on(MeshConfig(data=4, fsdp=8, tensor=2)) == 8
    assert one.tokens_per_step == 2**20
    assert seven.tokens_per_step == 2**21
    assert round(one.phases.warmup_share * one.steps) == 1000
    assert parameter_count(one.model).total == pytest.approx(1.8e9, rel=0.05)
    assert parameter_count(seven.model).total == pytest.approx(7.5e9, rel=0.05)


def test_the_gpt_preset_is_gpt_two():
    model = PRESETS["gpt-124m"]().model
    assert (model.d_model, model.layers, model.heads) == (768, 12, 12)
    # 124.4 M less the learnt positions and biases that rotary embedding replaces.
    assert parameter_count(model).total == pytest.approx(123.6e6, rel=0.01)
