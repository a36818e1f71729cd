"""Settings: what is refused, and how a mesh takes its devices."""

import re
from dataclasses import replace
from pathlib import Path
from typing import get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsejax.config import (
    DataConfig,
    Interval,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    RecipeConfig,
    TrainConfig,
    largest_divisor,
)
from sparsejax.recipe import phases


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
            lambda: OptimizerConfig(decay_share=0.5),
            "optimizer.decay_share=0.5 has no meaning in schedule 'cosine', .* use "
            "--optimizer.schedule wsd",
        ),
        (
            lambda: OptimizerConfig(schedule="wsd", warmup_share=0.5, decay_share=0.6),
            r"optimizer.warmup_share=0.5 \+ decay_share=0.6 exceed 1; they are shares",
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
        (
            lambda: TrainConfig(
                recipe="activations", model=ModelConfig(activation="swiglu")
            ),
            "recipe='activations' makes activations sparse",
        ),
        (
            lambda: TrainConfig(recipe="paper", model=ModelConfig(activation="reglu2")),
            "recipe='paper' routes tokens .* use --recipe default or",
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
            "token_sparsity='mvue' has no meaning .* --recipe default or paper or act",
        ),
        (
            lambda: TrainConfig(recipe="dense", phases=RecipeConfig(mask_reuse=False)),
            "mask_reuse=False has no meaning in recipe 'dense'; leave it out or use",
        ),
        *(
            (
                lambda name=name, value=value: RecipeConfig(**{name: value}),
                f"phases.{name}={value!r} has no meaning without phases.token_sparsity"
                "; leave it out or set that to one of 'magnitude', 'mvue', ",
            )
            for name, value in {"dense_features": 0.0, "permute_tokens": False}.items()
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
        "decay_share": SHARE,
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
        "dense_features": (-0.1, 1.0, NAN, INFINITY),
        "recluster_every": NATURAL,
    },
    MeshConfig: {"data": NATURAL, "fsdp": COUNT, "tensor": COUNT},
    TrainConfig: {
        "steps": COUNT,
        "batch_size": COUNT,
        "micro_batches": COUNT,
        "sequences_per_device": COUNT,
        "seed": (-1, 2**32),
        "log_every": COUNT,
        "eval_every": NATURAL,
        "eval_batches": COUNT,
        "checkpoint_every": NATURAL,
        "keep_checkpoints": COUNT,
        "keep_every": NATURAL,
        "new_process_minutes": (-0.1, NAN, INFINITY, 1e39),
        "sample_length": NATURAL,
    },
}
SECTION = {
    DataConfig: "data.",
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


CHOICES = {
    ModelConfig: {"activation": "gelu", "dtype": "float16", "remat": "all"},
    DataConfig: {"shard_dtype": "int32"},
    OptimizerConfig: {"schedule": "linear"},
    RecipeConfig: {"router": "truemass", "token_sparsity": "mag"},
    TrainConfig: {"preset": "small", "recipe": "papr", "backend": "cuda"},
}
WRONG_TYPES = {
    ModelConfig: {"layers": 2.0, "heads": True, "tie_embeddings": "no"},
    DataConfig: {"text": Path("corpus"), "seed": "0"},
    OptimizerConfig: {"beta1": "0.9", "clip_norm": None},
    RecipeConfig: {"skip_blocks": "yes", "experts_per_token": 1.0, "fold": 1},
    MeshConfig: {"fsdp": None},
    TrainConfig: {"model": {"layers": 2}, "steps": "9", "plot": 0, "phases": None},
}


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        (kind, name, value)
        for wrong in (CHOICES, WRONG_TYPES)
        for kind, fields in wrong.items()
        for name, value in fields.items()
    ],
)
def test_a_choice_or_a_type_that_is_none_is_refused_by_its_dotted_name(
    kind, name, value
):
    allowed = "one of '" if name in CHOICES.get(kind, ()) else "(an? |of type |True )"
    message = re.escape(f"{SECTION[kind]}{name}={value!r} must be ")
    with pytest.raises(ValueError, match=f"^{message}{allowed}"):
        kind(**{name: value})


@pytest.mark.parametrize("kind", CHOICES)
def test_every_choice_is_tried(kind):
    hints = get_type_hints(kind).items()
    chosen = {name for name, hint in hints if "Literal" in str(hint)}
    assert chosen == CHOICES[kind].keys()


@pytest.mark.parametrize("kind", OUT_OF_RANGE)
def test_every_number_has_a_range(kind):
    hints = get_type_hints(kind).items()
    kinds = (int, float, int | None)
    numbers = {name for name, hint in hints if hint in kinds}
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
    ("mesh", "token_shards"),
    [
        (MeshConfig(data=3), 3),
        (MeshConfig(data=1, fsdp=5), 5),
        (MeshConfig(data=1, tensor=7), 1),
        (MeshConfig(data=3, fsdp=5, tensor=7), 15),
        (MeshConfig(fsdp=5, tensor=7), 0),
    ],
)
def test_tokens_are_split_over_data_and_fsdp_alone(mesh, token_shards):
    assert mesh.token_shards == token_shards


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
        ("activations", {"d_hidden": 6}, {}, "d_hidden=6 is not a multiple of m=4"),
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
    wsd = OptimizerConfig(schedule="wsd", warmup_share=0.25, decay_share=0.75)
    assert wsd.warmup_share + wsd.decay_share == 1
    assert RecipeConfig(warmup_share=0.25, sparse_share=0.75).sparse_share == 0.75


# Micro-batches.


@given(number=st.integers(1, 2000), most=st.integers(1, 3000))
def test_the_largest_divisor_is_the_first_that_divides_from_above(number, most):
    expected = next(d for d in range(most, 0, -1) if number % d == 0)
    assert largest_divisor(number, most=most) == expected


@given(
    on_each=st.integers(1, 500),
    most=st.integers(1, 600),
    data=st.integers(1, 9),
    fsdp=st.integers(1, 9),
    tensor=st.integers(1, 4),
)
def test_micro_batches_are_the_fewest_that_a_device_has_room_for(
    on_each, most, data, fsdp, tensor
):
    batch_size = on_each * data * fsdp
    config = TrainConfig(batch_size=batch_size, sequences_per_device=most)
    mesh = MeshConfig(data=data, fsdp=fsdp, tensor=tensor)
    count = config.micro_batches_on(mesh)
    assert on_each % count == 0 and on_each // count <= most
    fewer = [n for n in range(1, count) if on_each % n == 0]
    assert all(on_each // n > most for n in fewer)
    # Named, that number or one that divides it fits as well.
    assert replace(config, micro_batches=count).micro_batches_on(mesh) == count


@pytest.mark.parametrize(
    ("settings", "data", "fsdp", "message"),
    [
        (
            {"batch_size": 256, "micro_batches": 64, "sequences_per_device": 4},
            1,
            8,
            "micro_batches=64 of batch_size=256 are of 4 sequences, not a multiple of "
            "mesh.data x mesh.fsdp = 1 x 8; set --micro-batches 32, leave it out (then "
            "it is 8), or change the mesh",
        ),
        (
            {"batch_size": 30},
            4,
            2,
            "batch_size=30 is not a multiple of mesh.data x mesh.fsdp = 4 x 2, whose "
            "devices share the sequences of a step equally; set --batch-size 32, or "
            "change the mesh",
        ),
    ],
    ids=["micro-batches", "batch"],
)
def test_what_a_mesh_cannot_share_is_refused_with_a_number_that_fits(
    settings, data, fsdp, message
):
    mesh = MeshConfig(data=data, fsdp=fsdp)
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        TrainConfig(**settings).micro_batches_on(mesh)
    suggested = re.search(r"set --(\S+) (\d+)", message)
    assert suggested is not None
    name = suggested[1].replace("-", "_")
    fitting = TrainConfig(**(settings | {name: int(suggested[2])}))
    assert fitting.micro_batches_on(mesh) >= 1
