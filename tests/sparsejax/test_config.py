"""Settings: what is refused, presets, to JSON and back, what a resume may change."""

import json
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsejax.config import (
    DataConfig,
    Interval,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    RecipeConfig,
    TrainConfig,
)
from sparsejax.config_file import (
    MAY_CHANGE,
    changed_settings,
    check_resumable,
    from_json,
    read_config,
    to_json,
)
from sparsejax.ops.ffn_spec import check_divisible
from sparsejax.plan import parameter_count
from sparsejax.presets import PRESETS
from sparsejax.recipe import phases, sparsity_of


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: ModelConfig(d_model=100, heads=3, kv_heads=3),
            "d_model=100 is not a multiple of heads=3; change one of them",
        ),
        (
            lambda: ModelConfig(heads=4, kv_heads=3),
            "heads=4 is not a multiple of kv_heads=3; grouped-query",
        ),
        (
            lambda: ModelConfig(d_model=12, heads=4, kv_heads=4),
            r"head_dim=3 \(d_model / heads\) is odd; rotary",
        ),
        (
            lambda: RecipeConfig(warmup_share=0.6, sparse_share=0.5),
            r"phases.warmup_share=0.6 \+ sparse_share=0.5 exceed 1; they are shares",
        ),
        (
            lambda: RecipeConfig(experts=2, experts_per_token=3),
            "phases.experts_per_token=3 exceeds experts=2; a token has at most all",
        ),
        (
            lambda: TrainConfig(model=ModelConfig(activation="swiglu")),
            "recipe='default' makes activations sparse, .* use --recipe weights or",
        ),
        (
            lambda: TrainConfig(recipe="paper", model=ModelConfig(activation="swiglu")),
            "recipe='paper' makes activations sparse",
        ),
        *(
            (
                lambda name=name, value=value: TrainConfig(
                    phases=RecipeConfig(**{name: value})
                ),
                f"phases.{name}={value!r} has no meaning in recipe 'default'",
            )
            for name, value in {
                "experts": 8,
                "block_rows": 64,
                "experts_per_token": 2,
                "router": "true_mass",
                "skip_blocks": True,
                "recluster_every": 5,
            }.items()
        ),
        (
            lambda: TrainConfig(
                recipe="weights", phases=RecipeConfig(token_sparsity="mvue")
            ),
            "token_sparsity='mvue' has no meaning .* use --recipe default or paper",
        ),
        (
            lambda: TrainConfig(batch_size=10, micro_batches=4),
            "batch_size=10 is not a multiple of micro_batches=4; change one of them",
        ),
        (
            lambda: TrainConfig(checkpoint_every=4, keep_every=6),
            "keep_every=6 is not a multiple of checkpoint_every=4: only what is",
        ),
        (
            lambda: TrainConfig(checkpoint_every=0, keep_every=6),
            "keep_every=6 is not a multiple of checkpoint_every=0",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_its_name_and_the_way_out(build, message):
    with pytest.raises(ValueError, match=message):
        build()


NAN, INFINITY = float("nan"), float("inf")
COUNT = (0, -1, 2**31, 10**30)
NATURAL = (-1, 2**31)
SHARE = (-0.1, 1.5, NAN, INFINITY)
POSITIVE = (0.0, -1.0, NAN, INFINITY, 1e39)
OUT_OF_RANGE = {
    ModelConfig: {
        "vocab_size": COUNT,
        "d_model": COUNT,
        "layers": COUNT,
        "heads": COUNT,
        "kv_heads": COUNT,
        "d_hidden": COUNT,
        "rope_base": POSITIVE,
        "norm_epsilon": POSITIVE,
    },
    OptimizerConfig: {
        "peak_learning_rate": POSITIVE,
        "warmup_share": SHARE,
        "final_ratio": SHARE,
        "beta1": (-0.1, 1.0, NAN, INFINITY),
        "beta2": (-0.1, 1.0, NAN, INFINITY),
        "epsilon": POSITIVE,
        "weight_decay": (-0.1, NAN, INFINITY, 1e39),
        "clip_norm": POSITIVE,
    },
    RecipeConfig: {
        "warmup_share": SHARE,
        "sparse_share": SHARE,
        "experts": (0, -1, 16_385),
        "block_rows": COUNT,
        "experts_per_token": COUNT,
        "recluster_every": NATURAL,
    },
    MeshConfig: {"data": NATURAL, "fsdp": COUNT, "tensor": COUNT},
    TrainConfig: {
        "steps": COUNT,
        "batch_size": COUNT,
        "micro_batches": COUNT,
        "seed": (-1, 2**32),
        "log_every": COUNT,
        "eval_every": NATURAL,
        "eval_batches": COUNT,
        "checkpoint_every": NATURAL,
        "keep_checkpoints": COUNT,
        "keep_every": NATURAL,
        "sample_length": NATURAL,
    },
}
SECTION = {
    ModelConfig: "model.",
    OptimizerConfig: "optimizer.",
    RecipeConfig: "phases.",
    MeshConfig: "mesh.",
    TrainConfig: "",
}


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        (kind, name, value)
        for kind, ranges in OUT_OF_RANGE.items()
        for name, values in ranges.items()
        for value in values
    ],
)
def test_a_number_out_of_range_is_refused_by_its_dotted_name(kind, name, value):
    message = re.escape(f"{SECTION[kind]}{name}={value} must be ")
    with pytest.raises(ValueError, match=rf"^{message}(at least|above) \d"):
        kind(**{name: value})


@pytest.mark.parametrize("kind", OUT_OF_RANGE)
def test_every_number_has_a_range(kind):
    hints = get_type_hints(kind).items()
    numbers = {name for name, hint in hints if hint in (int, float)}
    assert numbers == OUT_OF_RANGE[kind].keys()


def test_the_ends_of_a_range_belong_to_it_or_not_as_it_says():
    closed, half_open = Interval(least=0, most=1), Interval(above=0, below=1)
    assert [x in closed for x in (-1, 0, 0.5, 1, 2)] == [0, 1, 1, 1, 0]
    assert [x in half_open for x in (-1, 0, 0.5, 1, 2)] == [0, 0, 1, 0, 0]
    assert str(closed) == "at least 0 and at most 1"
    assert str(half_open) == "above 0 and below 1"


@pytest.mark.parametrize(
    ("mesh", "devices", "data"),
    [
        (MeshConfig(), 1, 1),
        (MeshConfig(), 8, 8),
        (MeshConfig(fsdp=2, tensor=2), 8, 2),
        (MeshConfig(data=2, fsdp=2, tensor=2), 8, 2),
    ],
)
def test_a_mesh_takes_the_devices_that_are_there(mesh, devices, data):
    resolved = mesh.resolve(devices)
    assert resolved == replace(mesh, data=data)
    assert resolved.devices == devices


@pytest.mark.parametrize(
    ("mesh", "devices"),
    [
        (MeshConfig(data=2), 1),
        (MeshConfig(data=2), 4),
        (MeshConfig(fsdp=3), 8),
        (MeshConfig(fsdp=2, tensor=2), 1),
    ],
)
def test_a_mesh_of_other_devices_is_refused(mesh, devices):
    message = rf"mesh\.data={mesh.data} x .* is not the number of devices, {devices};"
    with pytest.raises(ValueError, match=message):
        mesh.resolve(devices)


@pytest.mark.parametrize(
    ("recipe", "model", "phases_changes", "message"),
    [
        ("weights", {"d_model": 6, "heads": 1, "kv_heads": 1}, {}, "d_model=6 is not"),
        ("default", {"d_hidden": 6}, {}, "d_hidden=6 is not a multiple of m=4"),
        ("paper", {"d_hidden": 8}, {}, "d_hidden=8 is not a multiple of m=16"),
        (
            "paper",
            {},
            {"block_rows": 6, "token_sparsity": "mvue"},
            "needs groups of four; use a v that is a multiple of 4",
        ),
        (
            "paper",
            {},
            {"skip_blocks": True, "router": "true_mass"},
            "skip_blocks=True with router='true_mass'",
        ),
    ],
)
def test_what_the_ffns_would_refuse_later_the_phases_refuse(
    recipe, model, phases_changes, message
):
    config = TrainConfig(
        recipe=recipe, model=ModelConfig(**model), phases=RecipeConfig(**phases_changes)
    )
    with pytest.raises(ValueError, match=message):
        phases(config)


def test_without_a_sparse_phase_nothing_has_to_divide():
    model = ModelConfig(d_model=6, heads=1, kv_heads=1, d_hidden=5)
    never = RecipeConfig(sparse_share=0.0)
    assert len(phases(TrainConfig(model=model, phases=never))) == 2
    assert len(phases(TrainConfig(model=model, recipe="dense"))) == 1


def test_a_gated_network_may_have_sparse_weights():
    swiglu = ModelConfig(activation="swiglu")
    for recipe in ("weights", "dense"):
        assert TrainConfig(recipe=recipe, model=swiglu).model is swiglu


def test_shares_may_fill_the_run_exactly():
    assert RecipeConfig(warmup_share=0.25, sparse_share=0.75).sparse_share == 0.75


@pytest.mark.parametrize("name", PRESETS)
def test_presets_name_themselves_and_fit_every_recipe(name):
    config = PRESETS[name]()
    assert config.preset == name
    assert config.tokens_per_step == config.batch_size * config.data.sequence_length
    for recipe in ("default", "paper", "weights", "dense"):
        sparsity = sparsity_of(recipe, config.phases)
        check_divisible(config.model.d_model, config.model.d_hidden, sparsity)


def test_the_presets_of_the_paper_have_its_probable_sizes():
    # arXiv 2602.06183 does not give them; these are the settings of Meta Lingua with
    # the same steps, FFNs widened by 1.5 for squared ReLU.
    one, seven = PRESETS["llama-1b"](), PRESETS["llama-7b"]()
    sizes = [
        (c.model.d_model, c.model.layers, c.model.heads, c.model.d_hidden, c.steps)
        for c in (one, seven)
    ]
    assert sizes == [(2048, 25, 16, 8448, 60_000), (4096, 32, 32, 16_512, 100_000)]
    for config, swiglu_hidden in ((one, 5632), (seven, 11_008)):
        assert config.model.d_hidden * 2 == swiglu_hidden * 3
        assert config.data.sequence_length == 4096
        assert config.optimizer.final_ratio == 1e-6
        assert config.optimizer.clip_norm == 1.0
        assert config.model.vocab_size == 128_256
    assert one.optimizer.peak_learning_rate == 3e-3
    assert seven.optimizer.peak_learning_rate == 1e-3
    assert round(one.optimizer.warmup_share * one.steps) == 5000
    assert round(seven.optimizer.warmup_share * seven.steps) == 2000
    assert (one.optimizer.weight_decay, seven.optimizer.weight_decay) == (0.033, 0.1)
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


@pytest.mark.parametrize("name", PRESETS)
def test_json_brings_every_setting_back(name):
    config = PRESETS[name]()
    config = replace(
        config,
        recipe="paper",
        phases=RecipeConfig(experts=8, router="token_hash", token_sparsity="mvue"),
        data=replace(config.data, text="a/**/*.txt", seed=3),
        backend="reference",
    )
    assert from_json(json.loads(json.dumps(to_json(config)))) == config


def test_an_unknown_setting_is_refused_by_its_dotted_name():
    settings = to_json(TrainConfig())
    with pytest.raises(ValueError, match="setting colour is unknown to this version"):
        from_json(settings | {"colour": "red"})
    settings["model"]["depth"] = 3
    with pytest.raises(ValueError, match=r"setting model\.depth is unknown"):
        from_json(settings)


def test_settings_from_json_are_checked_like_any_other():
    settings = to_json(TrainConfig())
    settings["steps"] = 0
    with pytest.raises(ValueError, match="steps=0 must be at least 1"):
        from_json(settings)


def test_settings_that_are_not_there_have_their_defaults():
    assert from_json({}) == TrainConfig()
    older = to_json(TrainConfig(seed=3))
    del older["mesh"], older["keep_every"], older["data"]["shards"]
    assert from_json(older) == TrainConfig(seed=3)


def test_an_integer_may_stand_for_a_float_and_becomes_one():
    clip_norm = from_json({"optimizer": {"clip_norm": 2}}).optimizer.clip_norm
    assert (clip_norm, type(clip_norm)) == (2.0, float)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ([], r"settings \[\] must be a JSON object"),
        (None, "settings None must be a JSON object"),
        ({"model": 3}, "setting model=3 must be a JSON object"),
        ({"mesh": None}, "setting mesh=None must be a JSON object"),
        ({"steps": "9"}, "setting steps='9' must be an integer$"),
        ({"steps": 9.0}, r"setting steps=9\.0 must be an integer$"),
        ({"steps": True}, "setting steps=True must be an integer$"),
        ({"steps": None}, "setting steps=None must be an integer$"),
        ({"plot": 1}, "setting plot=1 must be true or false$"),
        (
            {"recipe": "blue"},
            "setting recipe='blue' must be one of 'default', 'paper',",
        ),
        ({"recipe": ["paper"]}, r"setting recipe=\['paper'\] must be one of 'default'"),
        ({"backend": 1}, "backend=1 must be one of 'reference', .* or null$"),
        ({"data": {"text": 1}}, r"setting data\.text=1 must be a string or null$"),
        ({"model": {"dtype": None}}, r"model\.dtype=None must be one of 'float32', "),
        ({"mesh": {"data": "2"}}, r"setting mesh\.data='2' must be an integer$"),
        (
            {"phases": {"token_sparsity": "best"}},
            r"phases\.token_sparsity='best' must be one of 'magnitude', .* or null$",
        ),
        *(
            (
                {"optimizer": {"beta1": value}},
                rf"setting optimizer\.beta1={value!r} must be a finite number$",
            )
            for value in (NAN, INFINITY, -INFINITY, 10**400, True, "1", None)
        ),
    ],
)
def test_a_setting_of_another_type_is_refused_by_its_dotted_name(wrong, message):
    with pytest.raises(ValueError, match=message):
        from_json(wrong)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda parts: st.lists(parts) | st.dictionaries(st.text(), parts),
)


@given(name=st.sampled_from([f.name for f in fields(TrainConfig)]), value=JSON)
@settings(deadline=None)
def test_no_json_value_gives_another_error_than_a_named_setting(name, value):
    try:
        config = from_json({name: value})
    except ValueError as error:
        assert name in str(error)
    else:
        assert from_json(to_json(config)) == config


def test_a_file_of_settings_is_read_whatever_the_locale(tmp_path):
    path = tmp_path / "config.json"
    config = TrainConfig(data=DataConfig(text="größe/*.txt"))
    path.write_bytes(json.dumps(to_json(config), ensure_ascii=False).encode("utf-8"))
    assert read_config(path) == config


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "Expecting value"),
        (b'{"steps": 3', "Expecting ',' delimiter"),
        (b'{"steps": NaN}', "setting steps=nan must be an integer"),
        (b'{"optimizer": {"beta1": 1e999}}', r"optimizer\.beta1=inf must be a finite"),
        (b'{"data": {"text": "\xff"}}', "'utf-8' codec"),
        (b"[" * 100_000, "recursion"),
        (b'{"steps": %s}' % (b"9" * 5000), "digits"),
        (b'{"seed": -1}', "seed=-1 must be at least 0"),
    ],
)
def test_a_file_that_holds_no_settings_is_named_with_the_reason(
    content, message, tmp_path
):
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"config.json does not hold .*{message}"):
        read_config(path)


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(ValueError, match="does not hold the settings of a run: .*dir"):
        read_config(tmp_path)
    with pytest.raises(
        ValueError, match="config.json does not hold .*: .*No such file"
    ):
        read_config(tmp_path / "config.json")


def test_changed_settings_are_the_differences_and_no_others():
    before = TrainConfig()
    after = replace(
        before, steps=7, model=replace(before.model, d_hidden=256), data=DataConfig()
    )
    assert changed_settings(before, before) == {}
    assert changed_settings(before, after) == {
        "steps": (before.steps, 7),
        "model.d_hidden": (512, 256),
    }


def test_a_resume_may_change_what_touches_no_training_its_mesh_length_and_paths():
    before = TrainConfig(checkpoint_every=200, data=DataConfig(text="a/*.txt"))
    after = replace(
        before,
        log_every=3,
        eval_every=3,
        checkpoint_every=3,
        keep_checkpoints=3,
        keep_every=6,
        sample_length=3,
        plot=False,
        steps=2600,
        mesh=MeshConfig(data=2, fsdp=4, tensor=8),
        data=DataConfig(shards="b", tokenizer="tokenizer.json"),
    )
    assert set(changed_settings(before, after)) == MAY_CHANGE
    check_resumable(before, after, Path("runs/a"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_size": 64}, "runs/a holds a run whose batch_size is 32 and cannot"),
        ({"data": DataConfig(seed=1)}, r"whose data\.seed is 0 and cannot become 1;"),
        ({"recipe": "dense"}, "whose recipe is 'default' and cannot become 'dense'"),
        ({"optimizer": OptimizerConfig(beta1=0.5)}, r"optimizer\.beta1 is 0\.9"),
    ],
)
def test_a_resume_may_change_nothing_else(change, message):
    before = TrainConfig()
    after = replace(before, log_every=3, steps=9, **change)
    with pytest.raises(ValueError, match=message):
        check_resumable(before, after, Path("runs/a"))
