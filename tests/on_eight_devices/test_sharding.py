"""Whole runs on meshes of eight devices against the run of one device."""

import re
from collections import Counter
from dataclasses import replace
from functools import lru_cache

import jax
import numpy as np
import pytest

from sparsejax.config import MeshConfig, TrainConfig
from sparsejax.distributed.mesh import make_mesh, place_rows
from sparsejax.models.sparse_ffn import sparse_ffns
from sparsejax.routing.learned_energy import LearnedEnergy
from sparsejax.routing.routers import ActivationEnergy
from sparsejax.sparsity.patterns import VNM, BlockDiagonal
from sparsejax.training.run import Run
from tests.support.devices.eight_devices import MESHES
from tests.support.micro_run import micro_config, with_phases


def config_for(text: str, variant: str) -> TrainConfig:
    """A micro run that every one of the meshes can split; 2 steps of each phase."""
    config = replace(micro_config(text), steps=6, batch_size=16)
    config = with_phases(config, warmup_share=0.34, sparse_share=0.34)
    model = replace(config.model, d_model=32, heads=8, kv_heads=8, d_hidden=128)
    if variant == "two-four":
        model = replace(model, remat="dots")
    if variant == "paper":
        model = replace(model, remat="full")
        config = replace(config, recipe="paper")
        config = with_phases(config, activations=VNM(4, 2, 32))
    if variant in ("experts", "exact", "experts_fp8"):
        config = replace(config, recipe="experts")
        config = with_phases(config, activations=VNM(4, 4, 32))
    if variant == "exact":
        config = with_phases(config, router=ActivationEnergy(), skip_blocks=False)
    if variant == "observed":
        config = replace(config, recipe="paper")
        config = with_phases(
            config,
            activations=VNM(4, 2, 32),
            experts_per_token=2,
            router=ActivationEnergy(),
            most_experts_per_token=4,
            skipped_energy=0.05,
        )
    if variant == "swiglu":
        model = replace(model, activation="swiglu", tie_embeddings=True)
        model = replace(model, qk_norm=True, head_dim=8)
        config = replace(config, recipe="weights")
    if variant in ("fp8", "experts_fp8"):
        model = replace(model, precision="fp8")
    if variant == "reglu2":
        model = replace(model, activation="reglu2", qkv_bias=True)
    if variant == "skip_blocks":
        config = replace(config, recipe="paper")
        config = with_phases(config, activations=VNM(4, 2, 32), skip_blocks=True)
    if variant == "learned":
        config = replace(config, recipe="paper")
        config = with_phases(
            config,
            activations=VNM(4, 2, 32),
            skip_blocks=True,
            router=LearnedEnergy(),
        )
    mesh = MeshConfig(data=1)
    return replace(config, model=model, micro_batches=2, mesh=mesh)


@lru_cache
def built(config: TrainConfig) -> Run:
    """The run on the first of the devices, as many as its mesh has."""
    return Run(config, devices=jax.devices()[: config.mesh.devices])


@lru_cache
def curve(config: TrainConfig) -> tuple[list[float], list[float]]:
    """Losses and gradient norms, the validation losses of the switches and the end."""
    run = built(config)
    state, batches, ends = run.initial_state(), run.batches(), run.phase_ends()
    steps, validations = [], []
    for step in range(config.steps):
        index = next(i for i, end in enumerate(ends) if step < end)
        phase = run.phases[index]
        tokens = run.place(next(batches)["tokens"])
        state, report = run.step(phase.sparsity)(state, tokens)
        steps += [float(report["loss"]), float(report["gradient_norm"])]
        if step + 1 == ends[index]:
            validations.append(run.validate(state, phase.sparsity))
            if index + 1 < len(ends):
                after = run.phases[index + 1].sparsity
                state = run.switch(state, phase.sparsity, after)
                validations.append(run.validate(state, after))
    return steps, validations


def on(config: TrainConfig, mesh: str) -> TrainConfig:
    data, fsdp, tensor = MESHES[mesh]
    return replace(config, mesh=MeshConfig(data=data, fsdp=fsdp, tensor=tensor))


GATES_AND_ROUTERS = (
    "exact",
    "paper",
    "observed",
    "learned",
    "swiglu",
    "reglu2",
    "skip_blocks",
)


@pytest.mark.parametrize(
    ("variant", "mesh"),
    [
        *(("two-four", mesh) for mesh in MESHES),
        *(("experts", mesh) for mesh in MESHES),
        *((variant, "all") for variant in GATES_AND_ROUTERS),
    ],
)
def test_losses_and_gradients_are_those_of_one_device(variant, mesh, text):
    config = config_for(text, variant)
    expected, got = curve(config), curve(on(config, mesh))
    # float32 sums in another order; six steps let the difference grow a few times.
    # Measured: at most 5e-7.
    np.testing.assert_allclose(got[0], expected[0], rtol=5e-6)
    np.testing.assert_allclose(got[1], expected[1], rtol=5e-6)


@pytest.mark.parametrize("variant", ["fp8", "experts_fp8"])
def test_steps_of_8_bit_floats_are_those_of_one_device(variant, text):
    config = config_for(text, variant)
    if variant == "fp8":
        config = replace(config, recipe="dense", steps=2)
    expected, got = curve(config), curve(on(config, "all"))
    # Sums in another order round across boundaries of 8 bits here and there.
    np.testing.assert_allclose(got[0], expected[0], rtol=3e-3)


def at_stage(config: TrainConfig, stage: int) -> TrainConfig:
    return replace(config, mesh=replace(config.mesh, zero_stage=stage))


@pytest.mark.parametrize(
    ("variant", "mesh", "stage"),
    [
        ("two-four", "all", 1),
        ("two-four", "fsdp", 2),
        ("paper", "all", 2),
        ("experts", "fsdp", 1),
        # Gated, with an embedding that is the head, and norms of queries and keys.
        ("swiglu", "all", 1),
    ],
)
def test_whole_weights_and_gradients_train_as_those_of_one_device(
    variant, mesh, stage, text
):
    config = config_for(text, variant)
    whole = on(config, mesh)
    model = replace(whole.model, scan_layers=whole.model.scan_layers and stage > 1)
    expected, got = curve(config), curve(at_stage(replace(whole, model=model), stage))
    np.testing.assert_allclose(got[0], expected[0], rtol=5e-6)
    np.testing.assert_allclose(got[1], expected[1], rtol=5e-6)


@pytest.mark.parametrize(("dtype", "groups"), [("float32", 1), ("bfloat16", 2)])
def test_whole_weights_are_gathered_before_the_micro_batches(dtype, groups, text):
    """At stage 3 in each of them, by the loop over layers."""
    config = replace(config_for(text, "dense"), recipe="dense")
    static = BlockDiagonal(groups) if groups > 1 else None
    model = replace(config.model, dtype=dtype, static_weights=static)
    # One of two groups has 16 features, which fsdp splits in two.
    mesh = MeshConfig(data=4, fsdp=2)
    config = replace(config, model=replace(model, scan_layers=True), mesh=mesh)
    found = {
        stage: collectives_in_loops(compiled_step(at_stage(config, stage)))
        for stage in (2, 3)
    }
    assert found[2]["all-gather"] == 0
    # The FFN's two weights, and four of attention.
    assert found[3]["all-gather"] >= 6


def test_gradients_are_added_up_whole_at_stage_1_alone(text):
    config = replace(config_for(text, "dense"), recipe="dense", batch_size=32)
    model = replace(config.model, scan_layers=False, dtype="bfloat16")
    mesh = MeshConfig(data=4, fsdp=2)
    config = replace(config, model=model, micro_batches=4, mesh=mesh)
    d, f = model.d_model, model.d_hidden
    carried = {}
    for stage in (1, 2):
        program = compiled_step(at_stage(config, stage))
        (of_loop,) = re.findall(r"= \((.*?)\) while\(", program)
        carried[stage] = Counter(re.findall(r"f32\[([\d,]+)\]", of_loop))
    # The sums of W1 and W2 of both layers. XLA on CPUs carries float32 weights, too.
    for whole, split in ((f"{d},{f}", f"{d},{f // 2}"), (f"{f},{d}", f"{f // 2},{d}")):
        assert carried[1][whole] == carried[2][whole] + 2
        assert carried[1][split] == carried[2][split] - 2
    # What is looked up stays split.
    looked_up = f"{model.vocab_size},{d // 2}"
    assert carried[1][looked_up] == carried[2][looked_up] >= 1


def collectives_in_loops(program: str) -> Counter:
    """How many arrays, but for whole numbers, the gathers and scatters of a compiled
    program give in the computations that are not its entry."""
    found: Counter = Counter()
    in_entry = False
    for line in program.splitlines():
        if line and not line.startswith(" "):
            in_entry = line.startswith("ENTRY")
        given = re.search(r"= (.*?) (all-gather|reduce-scatter)\(", line)
        if given and not in_entry:
            found[given[2]] += len(re.findall(r"(?:bf16|u16|f32|u32)\[", given[1]))
    return found


def test_parameters_and_moments_lie_as_ever_where_weights_are_whole(text):
    config = on(config_for(text, "two-four"), "fsdp")
    config = replace(config, model=replace(config.model, scan_layers=False))
    states = []
    for stage in (1, 2, 3):
        run = built(at_stage(config, stage))
        state, sparsity = run.initial_state(), run.phases[0].sparsity
        state, _ = run.step(sparsity)(state, run.place(next(run.batches())["tokens"]))
        states.append(jax.tree.map(lambda leaf: leaf.sharding, state))
    assert states[0] == states[1] == states[2]


@pytest.mark.parametrize("mesh", ["fsdp", "tensor", "all"])
def test_parameters_and_moments_are_split_and_stay_split(mesh, text):
    config = on(config_for(text, "two-four"), mesh)
    run = built(config)
    state, parts = run.initial_state(), config.mesh.fsdp * config.mesh.tensor
    sparsity = run.phases[0].sparsity
    for _ in range(2):
        matrices = [
            leaf
            for tree in (state.params, state.moments)
            for path, leaf in jax.tree.leaves_with_path(tree)
            if leaf.ndim >= 2 and "scale" not in jax.tree_util.keystr(path)
        ]
        # embedding, head, four of attention, two of the FFN; and two moments of each
        assert len(matrices) == 24
        for leaf in matrices:
            assert leaf.addressable_shards[0].data.size * parts == leaf.size
        tokens = run.place(next(run.batches())["tokens"])
        state, _ = run.step(sparsity)(state, tokens)


def compiled_step(config: TrainConfig) -> str:
    run = built(config)
    sparsity = run.phases[-2 if len(run.phases) > 1 else 0].sparsity
    tokens = run.place(next(run.batches())["tokens"])
    return run.step(sparsity).lower(run.template(sparsity), tokens).compile().as_text()


def test_the_compiled_step_gathers_nine_sixteenths_of_a_two_four_weight(text):
    config = on(config_for(text, "two-four"), "fsdp")
    model = replace(config.model, dtype="bfloat16", remat="none")
    config = replace(config, model=model)
    d, f = config.model.d_model, config.model.d_hidden
    gathers = re.findall(
        r"= (u8|u16)\[([\d,]+)\]\S* all-gather\(", compiled_step(config)
    )
    # W1 and W2 dense, for GEMMs 4 and 2; S(W1) and S(W2^T), for GEMMs 1 and 3.
    expected = {
        ("u16", f"{d},{f}"),
        ("u16", f"{f},{d}"),
        ("u16", f"{d // 2},{f}"),
        ("u8", f"{d // 8},{f}"),
        ("u16", f"{f},{d // 2}"),
        ("u8", f"{f},{d // 8}"),
    }
    assert sorted(gathers) == sorted(expected)
    assert 2 * (d // 2 * f) + d // 8 * f == 2 * d * f * 9 // 16


def test_logits_stay_split_over_the_vocabulary(text):
    config = on(config_for(text, "two-four"), "tensor")
    # A size that nothing else has.
    config = replace(config, model=replace(config.model, vocab_size=1048))
    program = compiled_step(config)
    assert "131]" in program and "1048]" not in program


def test_packing_needs_no_communication(text):
    config = on(config_for(text, "two-four"), "all")
    run = built(config)
    sparsity = run.phases[1].sparsity

    @jax.jit
    def pack(state):
        ffns = sparse_ffns(run.model(state, sparsity))
        return [ffn.weights_as_read() for ffn in ffns]

    program = pack.lower(run.template(sparsity)).compile().as_text()
    assert not re.search(
        r"all-gather|all-reduce|all-to-all|collective-permute", program
    )


def test_rows_are_placed_where_the_mesh_wants_them():
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    rows = np.arange(3 * 8 * 5).reshape(3, 8, 5)
    placed = place_rows(rows, mesh, axis=1, size=8)
    assert np.array_equal(placed, rows)
    sizes = {shard.data.shape for shard in placed.addressable_shards}
    assert sizes == {(3, 2, 5)}


def test_a_mesh_that_does_not_fill_the_devices_is_refused():
    with pytest.raises(ValueError, match=r"mesh.fsdp=3 .* the number of devices, 8"):
        make_mesh(MeshConfig(fsdp=3))
    assert dict(make_mesh(MeshConfig(tensor=2)).shape) == {
        "data": 4,
        "fsdp": 1,
        "tensor": 2,
    }
