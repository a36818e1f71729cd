"""Settings as JSON and back, and what a resume may change."""

import json
from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsejax.config import (
    RECIPES,
    DataConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    PhaseConfig,
    RecipeConfig,
    TrainConfig,
)
from sparsejax.config.config_file import (
    MAY_CHANGE,
    MAY_DIFFER_IN_BRANCH,
    changed_settings,
    check_branchable,
    check_resumable,
    from_json,
    read_config,
    to_json,
)
from sparsejax.config.presets import PRESETS
from sparsejax.feed_forward.sparsity import FFNSparsity
from sparsejax.routing.routers import ActivationEnergy, TokenHash
from sparsejax.sparsity.patterns import VNM

NAN, INFINITY = float("nan"), float("inf")


@pytest.mark.parametrize("name", PRESETS)
def test_json_brings_every_setting_back(name):
    config = PRESETS[name]()
    config = replace(
        config,
        recipe="paper",
        phases=RecipeConfig(
            sparsity=replace(
                RECIPES["paper"],
                activations=VNM(128, 2, 32),
                router=TokenHash(),
                token_sparsity="mvue",
                dense_features=0.25,
                permute_tokens=False,
                mask_reuse=False,
            )
        ),
        data=replace(config.data, text="a/**/*.txt", seed=3),
        backend="reference",
    )
    assert from_json(json.loads(json.dumps(to_json(config)))) == config


def test_what_a_recipe_leaves_as_it_is_is_written_and_read_as_the_recipes_own():
    config = TrainConfig(recipe="paper")
    settings = to_json(config)
    sparsity = settings["phases"]["sparsity"]
    assert (sparsity["activations"], sparsity["router"]) == (
        "128:2:16",
        "nearest_centre",
    )
    assert from_json(settings) == config and from_json(settings).sparsity
    chosen = {"router": "token_hash"}
    read = from_json({"recipe": "paper", "phases": {"sparsity": chosen}})
    assert read.sparsity == replace(RECIPES["paper"], router=TokenHash())
    assert from_json({"recipe": "paper", "phases": {"sparsity": None}}) == config


def test_a_recipe_is_read_by_its_former_name():
    config = TrainConfig(recipe="two-four", phases=RecipeConfig(sparse_share=0.25))
    assert from_json(to_json(config) | {"recipe": "default"}) == config
    scheduled = TrainConfig(phases=RecipeConfig(schedule=(PhaseConfig(name="all"),)))
    former = to_json(scheduled) | {"recipe": "default"}
    for share in (0.5, 0.75):
        former["phases"]["sparse_share"] = share
        assert from_json(former) == scheduled


FORMER = {
    "warmup_share": 0.25,
    "sparse_share": 0.5,
    "experts": 4,
    "block_rows": 128,
    "experts_per_token": 1,
    "router": "nearest_centre",
    "skip_blocks": False,
    "token_sparsity": None,
    "dense_features": 0.05,
    "permute_tokens": True,
    "mask_reuse": True,
    "recluster_every": 0,
    "fold": True,
    "schedule": [],
}
"""The phases in a config.json of an earlier version."""


def test_the_phases_of_an_earlier_version_are_read():
    lengths = RecipeConfig(warmup_share=0.25, sparse_share=0.5)
    for recipe in RECIPES:
        read = from_json({"recipe": recipe, "phases": FORMER})
        assert read == TrainConfig(recipe=recipe, phases=lengths)
    chosen = {
        "experts": 8,
        "block_rows": 64,
        "experts_per_token": 2,
        "router": "true_mass",
        "mask_reuse": False,
    }
    read = from_json({"recipe": "paper", "phases": FORMER | chosen})
    sparsity = replace(
        RECIPES["paper"],
        activations=VNM(64, 2, 32),
        experts_per_token=2,
        router=ActivationEnergy(),
        mask_reuse=False,
    )
    assert read == TrainConfig(
        recipe="paper", phases=replace(lengths, sparsity=sparsity)
    )
    schedule = [{"name": "a", "sparsity": {"activations": "8:2:16"}}]
    shares = {"warmup_share": 0.05, "schedule": schedule}
    read = from_json({"phases": FORMER | shares})
    assert read.phases.sparsity is None and len(read.phases.schedule) == 1


@pytest.mark.parametrize(
    ("recipe", "changes", "message"),
    [
        (
            "two-four",
            {"experts": 8},
            r"phases\.experts=8 has no meaning in recipe 'two",
        ),
        (
            "paper",
            {"block_rows": "8"},
            r"setting phases\.block_rows='8' must be an in",
        ),
        ("paper", {"experts": 0}, r"phases\.sparsity\.activations='128:2:0'"),
        (
            "weights",
            {"router": "token_hash"},
            r"phases\.sparsity\.router='token_hash' has no meaning in recipe 'weights'",
        ),
        (
            "paper",
            {"sparsity": {}, "router": "token_hash"},
            r"phases\.experts has its place in phases\.sparsity, and both are given; ",
        ),
    ],
)
def test_phases_of_an_earlier_version_that_cannot_be_are_refused(
    recipe, changes, message
):
    with pytest.raises(ValueError, match=message):
        from_json({"recipe": recipe, "phases": FORMER | changes})


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
        ([], r"settings \[\] must be an object"),
        (None, "settings None must be an object"),
        ({"model": 3}, "setting model=3 must be an object"),
        ({"mesh": None}, "setting mesh=None must be an object"),
        ({"steps": "9"}, "setting steps='9' must be an integer$"),
        ({"steps": 9.0}, r"setting steps=9\.0 must be an integer$"),
        ({"steps": True}, "setting steps=True must be an integer$"),
        ({"steps": None}, "setting steps=None must be an integer$"),
        ({"plot": 1}, "setting plot=1 must be true or false$"),
        (
            {"recipe": "blue"},
            "setting recipe='blue' must be one of 'experts', 'two-four',",
        ),
        ({"recipe": ["paper"]}, r"setting recipe=\['paper'\] must be one of 'experts'"),
        ({"backend": 1}, "backend=1 must be one of 'reference', .* or null$"),
        ({"data": {"text": 1}}, r"setting data\.text=1 must be a string or null$"),
        ({"model": {"dtype": None}}, r"model\.dtype=None must be one of 'float32', "),
        ({"mesh": {"data": "2"}}, r"setting mesh\.data='2' must be an integer$"),
        (
            {"phases": {"sparsity": {"token_sparsity": "best"}}},
            r"sparsity\.token_sparsity='best' must be one of 'magnitude', .* or null$",
        ),
        (
            {"phases": {"sparsity": {"router": 3}}},
            r"setting phases\.sparsity\.router: router=3 must be one of 'nearest_c",
        ),
        (
            {"phases": {"sparsity": {"activations": [2, 4]}}},
            r"phases\.sparsity\.activations=\[2, 4\] must be a pattern, such as '2:4'",
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
        new_process_minutes=3,
        sample_length=3,
        plot=False,
        steps=2600,
        mesh=MeshConfig(data=2, fsdp=4, tensor=8, zero_stage=2),
        data=DataConfig(shards="b", tokenizer="tokenizer.json"),
    )
    assert set(changed_settings(before, after)) == MAY_CHANGE
    check_resumable(before, after, Path("runs/a"))


def test_a_branch_may_have_other_steps_optimizer_recipe_and_phases():
    trunk = TrainConfig(checkpoint_every=200)
    branch = replace(
        trunk,
        steps=2600,
        recipe="paper",
        phases=RecipeConfig(
            sparsity=replace(RECIPES["paper"], activations=VNM(128, 2, 32)),
            warmup_share=0.5,
            sparse_share=0.25,
        ),
        optimizer=OptimizerConfig(schedule="wsd", decay_share=0.5, beta1=0.5),
        model=replace(trunk.model, dtype="bfloat16", remat="full"),
        micro_batches=4,
        eval_batches=3,
        keep_slower=True,
    )
    check_branchable(trunk, branch, Path("runs/a"))
    settings = {
        (prefix + field.name)
        for prefix, kind in (
            ("optimizer.", OptimizerConfig),
            ("phases.", RecipeConfig),
            ("phases.sparsity.", FFNSparsity),
        )
        for field in fields(kind)
        if prefix + field.name not in ("phases.sparsity", "optimizer.name")
    }
    assert MAY_DIFFER_IN_BRANCH >= MAY_CHANGE | settings
    of_schedule = {"phases.sparsity"}  # is null there
    assert _dotted(to_json(trunk)) >= MAY_DIFFER_IN_BRANCH - of_schedule


def _dotted(settings: dict, prefix: str = "") -> set[str]:
    names = set()
    for name, value in settings.items():
        nested = isinstance(value, dict)
        names |= _dotted(value, f"{prefix}{name}.") if nested else {prefix + name}
    return names


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 1}, "runs/a holds a run whose seed is 0, .* cannot have 1; leave it"),
        ({"batch_size": 8}, "batch_size is 32, and a branch of it cannot have 8"),
        ({"data": DataConfig(seed=1)}, r"data\.seed is 0, and"),
        ({"data": DataConfig(sequence_length=8)}, r"data\.sequence_length is 128, and"),
        ({"model": ModelConfig(layers=3)}, r"model\.layers is 4, and"),
        ({"model": ModelConfig(scan_layers=False)}, r"model\.scan_layers is True, and"),
        ({"preset": "gpt-124m"}, "preset is 'tiny', and"),
    ],
)
def test_a_branch_has_its_trunks_model_tokens_order_and_seed(change, message):
    trunk = TrainConfig()
    with pytest.raises(ValueError, match=message):
        check_branchable(trunk, replace(trunk, **change), Path("runs/a"))


def test_a_chosen_number_of_micro_batches_follows_the_mesh_and_a_named_one_stays():
    chosen = TrainConfig(batch_size=64, sequences_per_device=8)
    named = replace(chosen, micro_batches=8)
    mesh = MeshConfig(data=4, fsdp=2)
    for before, count in ((chosen, 1), (named, 8)):
        before = from_json(json.loads(json.dumps(to_json(before))))
        after = replace(before, mesh=mesh)
        check_resumable(before, after, Path("runs/a"))
        assert after.micro_batches_on(mesh) == count
    with pytest.raises(ValueError, match="micro_batches is None and cannot become 8"):
        check_resumable(chosen, named, Path("runs/a"))
    with pytest.raises(ValueError, match="micro_batches is 8 and cannot become 4"):
        check_resumable(named, replace(named, micro_batches=4), Path("runs/a"))


def test_the_number_of_micro_batches_of_an_older_run_is_one_that_was_named():
    older = to_json(PRESETS["gpt-124m"]()) | {"micro_batches": 16}
    del older["sequences_per_device"]
    assert from_json(older).micro_batches == 16


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_size": 64}, "runs/a holds a run whose batch_size is 32 and cannot"),
        ({"data": DataConfig(seed=1)}, r"whose data\.seed is 0 and cannot become 1;"),
        ({"recipe": "dense"}, "whose recipe is 'experts' and cannot become 'dense'"),
        ({"optimizer": OptimizerConfig(beta1=0.5)}, r"optimizer\.beta1 is 0\.9"),
    ],
)
def test_a_resume_may_change_nothing_else(change, message):
    before = TrainConfig()
    after = replace(before, log_every=3, steps=9, **change)
    with pytest.raises(ValueError, match=message):
        check_resumable(before, after, Path("runs/a"))
