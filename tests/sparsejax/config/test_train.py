"""Settings that contradict each other, and the micro-batches of a run."""

import re
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sparsejax.config import (
    RECIPES,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    RecipeConfig,
    TrainConfig,
)
from sparsejax.config.schedule import phases
from sparsejax.sparsity.patterns import NM, VNM


def changed(recipe, **changes):
    """A run whose recipe has other settings of its sparsity."""
    sparsity = replace(RECIPES[recipe], **changes)
    return TrainConfig(recipe=recipe, phases=RecipeConfig(sparsity=sparsity))


def paper(**changes):
    return replace(RECIPES["paper"], **changes)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: ModelConfig(d_model=100, heads=3, kv_heads=3),
            "d_model=100 is not a multiple of heads=3; change one of them, or",
        ),
        (
            lambda: ModelConfig(heads=4, kv_heads=3),
            "heads=4 is not a multiple of kv_heads=3; grouped-query",
        ),
        (
            lambda: ModelConfig(d_model=12, heads=4, kv_heads=4),
            r"head_dim=3 \(d_model / heads\) is odd; rotary",
        ),
        (lambda: ModelConfig(head_dim=5), "head_dim=5 is odd; rotary"),
        (lambda: ModelConfig(head_dim=0), "model.head_dim=0 must be at least 1"),
        (
            lambda: RecipeConfig(warmup_share=0.6, sparse_share=0.5),
            r"phases.warmup_share=0.6 \+ sparse_share=0.5 exceed 1; .* give "
            "--phases.sparse-share 0.4 or less",
        ),
        (
            lambda: TrainConfig(mesh=MeshConfig(fsdp=2, zero_stage=1)),
            "mesh.zero_stage=1 .* model.scan_layers .* or --mesh.zero-stage 2",
        ),
        (
            lambda: OptimizerConfig(schedule="cosine", decay_share=0.5),
            "optimizer.decay_share=0.5 has no meaning in schedule 'cosine', .* use "
            "--optimizer.schedule wsd",
        ),
        (
            lambda: OptimizerConfig(schedule="wsd", warmup_share=0.5, decay_share=0.6),
            r"optimizer.warmup_share=0.5 \+ decay_share=0.6 exceed 1; .* give "
            "--optimizer.decay-share 0.5 or less",
        ),
        (
            lambda: RecipeConfig(sparsity=paper(router="truemass")),
            "router='truemass' must be one of 'nearest_centre', 'token_hash', 'activ",
        ),
        (
            lambda: RecipeConfig(
                sparsity=paper(activations=VNM(128, 2, 8), experts_per_token=3)
            ),
            r"experts_per_token=3 is not in \[1, 2\], the experts of VNM",
        ),
        (
            lambda: RecipeConfig(sparsity="paper"),
            "phases.sparsity='paper' must be of type FFNSparsity or None",
        ),
        (
            lambda: TrainConfig(
                recipe="two-four", model=ModelConfig(activation="swiglu")
            ),
            "recipe='two-four' makes activations 2:4, .* use --recipe weights or",
        ),
        *(
            (
                lambda gate=gate: TrainConfig(model=ModelConfig(activation=gate)),
                f"recipe='experts' has a penalty .* model.activation='{gate}' cannot "
                f"have; leave it out with --phases.skipped-energy None, or",
            )
            for gate in ("swiglu", "reglu2")
        ),
        (
            lambda: TrainConfig(recipe="paper", model=ModelConfig(activation="swiglu")),
            "recipe='paper' makes activations 2:4, .* --phases.activations 128:4:16",
        ),
        (
            lambda: TrainConfig(
                recipe="activations", model=ModelConfig(activation="swiglu")
            ),
            "recipe='activations' makes activations 2:4",
        ),
        *(
            (
                lambda name=name, value=value: changed("two-four", **{name: value}),
                f"phases.sparsity.{name}={value!r} has no meaning in recipe "
                f"'two-four'; leave it out or use --recipe experts or paper$",
            )
            for name, value in {
                "experts_per_token": 2,
                "router": "activation_energy",
            }.items()
        ),
        (
            lambda: TrainConfig(
                recipe="two-four", phases=RecipeConfig(recluster_every=5)
            ),
            "phases.recluster_every=5 has no meaning in recipe 'two-four'; .* paper$",
        ),
        (
            lambda: changed("two-four", skip_blocks=True),
            "skip_blocks=True needs a V:N:M activation pattern",
        ),
        *(
            (
                lambda recipe=recipe, value=value: changed(recipe, activations=value),
                f"phases.sparsity.activations={said} makes another recipe of {recipe!r}"
                f", which has {own}; leave it out, use another --recipe, or write",
            )
            for recipe, value, said, own in (
                ("two-four", VNM(64, 2, 32), "'64:2:32'", "'2:4'"),
                ("activations", None, "None", "'2:4'"),
                ("dense", NM(2, 4), "'2:4'", "None"),
            )
        ),
        (
            lambda: changed("activations", weights=NM(2, 4)),
            "phases.sparsity.weights='2:4' makes another recipe of 'activations'",
        ),
        (
            lambda: changed("dense", token_sparsity="mvue"),
            "token_sparsity='mvue' makes another recipe of 'dense', whose GEMMs are",
        ),
        (
            lambda: changed("dense", mask_reuse=False),
            "mask_reuse=False has no meaning in recipe 'dense'; leave it out or use",
        ),
        *(
            (
                lambda name=name, value=value: changed("two-four", **{name: value}),
                f"phases.sparsity.{name}={value!r} has no meaning without token_"
                "sparsity; leave it out or set that to one of 'magnitude', 'mvue', ",
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


@pytest.mark.parametrize(
    ("recipe", "model", "changes", "message"),
    [
        ("weights", {"d_model": 6, "heads": 1, "kv_heads": 1}, {}, "d_model=6 is not"),
        ("two-four", {"d_hidden": 6}, {}, "d_hidden=6 is not a multiple of m=4"),
        ("activations", {"d_hidden": 6}, {}, "d_hidden=6 is not a multiple of m=4"),
        ("paper", {"d_hidden": 8}, {}, "d_hidden=8 is not a multiple of m=16"),
        (
            "paper",
            {},
            {"activations": VNM(6, 2, 16), "token_sparsity": "mvue"},
            "needs groups of four; use a v that is a multiple of 4",
        ),
        (
            "paper",
            {},
            {"activations": VNM(128, 2, 1024)},
            "d_hidden=512 is not a multiple of m=1024",
        ),
    ],
)
def test_what_the_ffns_would_refuse_later_the_phases_refuse(
    recipe, model, changes, message
):
    config = replace(changed(recipe, **changes), model=ModelConfig(**model))
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


@given(warmup=st.floats(0.16, 1.0))
@example(0.3333333)
@example(1 / 3)
def test_the_share_that_the_error_names_fits(warmup):
    with pytest.raises(ValueError, match="exceed 1") as refused:
        RecipeConfig(warmup_share=warmup)
    named = re.search(r"--phases.sparse-share (\S+) or less", str(refused.value))
    assert named is not None
    fits = RecipeConfig(warmup_share=warmup, sparse_share=float(named[1]))
    assert fits.warmup_share + fits.sparse_share == 1


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
