"""The predicted time of a step, by hand for a model of one layer."""

import dataclasses

import pytest

from pallas_kernels.device import Device
from sparsejax.config import MeshConfig, ModelConfig
from sparsejax.cost_model import Links, Speeds, predicted_step
from sparsejax.cost_model.gathered import element_bytes
from sparsejax.cost_model.hardware import FP8_GAIN, SLOWED_BESIDE, SQUARES_SLOWER
from sparsejax.cost_model.step_time import (
    elementwise_bytes,
    observed_flops,
    regression_flops,
    router_flops,
)
from sparsejax.feed_forward.sparsity import DENSE, FFNSparsity
from sparsejax.reports.metrics import ffn_decisions
from sparsejax.routing.routers import (
    ActivationEnergy,
    ActivationEnergyFP8,
    NearestCentre,
)
from sparsejax.sparsity.patterns import VNM

# d_model 8, 16 neurons, one head of 8, ids of 0 to 31, 32 tokens in sequences of 4.
MODEL = ModelConfig(
    vocab_size=32,
    d_model=8,
    layers=1,
    heads=1,
    kv_heads=1,
    d_hidden=16,
    scan_layers=False,
)
SPEEDS = Speeds(gemm_flops_per_s=1e6, attention_flops_per_s=1e5, memory_bytes_per_s=1e6)
# Of models and heads so narrow: 1 + 256 / 8 over 1 + 256 / 2048, 1 + 128 / 8 over two.
SLOW_GEMMS, SLOW_ATTENTION = 33 / 1.125, 17 / 2
ONE = MeshConfig(data=1)
PER_TOKEN = {"attention": 4 * 8 * 8, "ffn": 2 * 8 * 16, "head": 8 * 32}


def step(model=MODEL, mesh=ONE, micro_batches=1, links=None, sparsity=DENSE):
    tokens = 32 // micro_batches
    return predicted_step(
        model,
        sequence_length=4,
        tokens_per_device=tokens,
        micro_batches=micro_batches,
        sparsity=sparsity,
        decisions=ffn_decisions(model, sparsity, tokens),
        speeds=SPEEDS,
        mesh=mesh,
        links=links or Links(),
    )


def test_computation_by_hand():
    one = step()
    # Two FLOPs for a weight in the forward, and twice that in the backward.
    flops = 32 * 6 * sum(PER_TOKEN.values())
    assert one.gemms == pytest.approx(SLOW_GEMMS * flops / 1e6)
    # Q K^T and P V of half of four keys, three times.
    flops = 32 * 3 * 2 * 2 * 2 * 8
    assert one.attention == pytest.approx(SLOW_ATTENTION * flops / 1e5)
    # float32: 22 d_model of sums and norms, 4 of the rotations of 16, 7 of 16 neurons;
    # logits written, read twice, and their gradient.
    activations = 32 * (4 * (22 * 8 + 4 * 16 + 7 * 16) + 32 * (12 + 4))
    # AdamW: gradient twice, parameter and two moments read and written; 6 for a copy.
    parameters = sum(PER_TOKEN.values()) + 32 * 8 + 3 * 8
    moved = activations + parameters * (6 + 8 + 8 + 16)
    assert one.elementwise == pytest.approx(moved / 1e6)
    assert one.exposed == 0 and one.communication == {}
    assert one.total == one.gemms + one.attention + one.elementwise


def test_rows_of_experts_are_moved_for_each_expert_of_a_token():
    model, tokens = dataclasses.replace(MODEL, d_hidden=64), 32
    one = FFNSparsity(activations=VNM(16, 2, 16), weight_gradients="expert_columns")
    two = dataclasses.replace(one, experts_per_token=2)
    by_energy = dataclasses.replace(two, router=ActivationEnergy())
    penalised = dataclasses.replace(by_energy, skipped_energy=0.05)
    rounded = dataclasses.replace(two, router=ActivationEnergyFP8(), skip_blocks=True)

    def bytes_of(sparsity, rows=None, **more):
        rows = sparsity.expert_choices if rows is None else rows
        sizes = {"tokens_per_device": tokens, "micro_batches": 1, "mesh": ONE}
        sizes |= {"rows_of_token": rows, **more}
        return elementwise_bytes(model, sparsity=sparsity, **sizes) / tokens

    # 8 d_model with one, in float32, and 7 for each neuron that is computed.
    dense = bytes_of(DENSE)
    assert bytes_of(one) - dense == 4 * (8 * 8 - 7 * (64 - 16))
    assert bytes_of(two) - bytes_of(one) == 4 * (6 * 8 + 7 * 16)
    assert bytes_of(two, rows=1) - bytes_of(one) == 4 * 7 * 16
    assert bytes_of(by_energy) - bytes_of(two) == 4 * 64
    assert bytes_of(penalised) - bytes_of(by_energy) == 24 * 64 / 16
    # X is rounded to 8-bit floats besides, and multiplied once more.
    assert bytes_of(rounded) - bytes_of(by_energy) == 5 * 8
    summed = bytes_of(rounded, sums_energies=True)
    assert bytes_of(rounded) - summed == 4 * 64
    assert router_flops(model, by_energy) == 0
    assert router_flops(model, rounded) == 2 * 8 * 64
    given = dataclasses.replace(rounded, router=NearestCentre())
    gemms = [step(model, sparsity=of).gemms for of in (given, rounded)]
    added = SLOW_GEMMS * tokens * 2 * 8 * 64 / FP8_GAIN / 1e6
    assert gemms[1] - gemms[0] == pytest.approx(added)
    # GEMM 1 of what is looked at, and for the penalty GEMM 5.
    assert observed_flops(model, by_energy) == 0
    assert observed_flops(model, penalised) == 2 * 2 * 8 * 64
    learned = dataclasses.replace(one, router="learned", skip_blocks=True)
    assert observed_flops(model, learned) == 2 * 8 * 64
    assert regression_flops(model, learned) == 2 * 8 * 2
    assert regression_flops(model, by_energy) == 0
    # They are those of a sixteenth of the tokens, and in the time of the GEMMs.
    gemms = [step(model, sparsity=of).gemms for of in (by_energy, penalised)]
    added = SLOW_GEMMS * tokens / 16 * 2 * 2 * 8 * 64 / 1e6
    assert gemms[1] - gemms[0] == pytest.approx(added)


def test_gemms_of_narrow_experts_take_longer_per_flop():
    """They take the time per FLOP of a model that is as narrow."""
    sizes = {"d_model": 1024, "heads": 8, "kv_heads": 8, "d_hidden": 4096}
    wide = dataclasses.replace(MODEL, dtype="bfloat16", **sizes)
    sparsity = FFNSparsity(
        activations=VNM(128, 4, 32), skip_blocks=True, weight_gradients="expert_columns"
    )
    gemms = [
        predicted_step(
            wide,
            sequence_length=4,
            tokens_per_device=4096,
            micro_batches=1,
            sparsity=of,
            decisions=ffn_decisions(
                wide, of, 4096, device=Device.named("NVIDIA H100 80GB HBM3")
            ),
            speeds=SPEEDS,
            mesh=ONE,
            links=Links(),
        ).gemms
        for of in (DENSE, sparsity)
    ]
    ffn = 4096 * 12 * 1024 * 4096 / 1e6
    dense, narrow = ((1 + 256 / width) / (1 + 256 / 2048) for width in (1024, 512))
    assert gemms[0] - gemms[1] == pytest.approx(ffn * (dense - narrow / 8))


def test_a_dense_ffn_on_kernels_moves_no_hidden_values_but_its_gemms_take_longer():
    sizes = {"d_model": 1024, "heads": 8, "kv_heads": 8, "d_hidden": 4096}
    wide = dataclasses.replace(MODEL, dtype="bfloat16", **sizes)
    device, tokens = Device.named("NVIDIA H100 80GB HBM3"), 32768
    on_kernels, by_xla = (
        predicted_step(
            wide,
            sequence_length=4,
            tokens_per_device=tokens,
            micro_batches=1,
            sparsity=DENSE,
            decisions=ffn_decisions(wide, DENSE, tokens, backend, device=device),
            speeds=SPEEDS,
            mesh=ONE,
            links=Links(),
        )
        for backend in (None, "xla")
    )
    moved = tokens * 2 * 7 * 4096 / 1e6
    assert by_xla.elementwise - on_kernels.elementwise == pytest.approx(moved)
    two_gemms = 2 * tokens * 2 * 1024 * 4096 / 1e6 * (1 + 256 / 1024) / 1.125
    longer = on_kernels.gemms - by_xla.gemms
    assert longer == pytest.approx((SQUARES_SLOWER - 1) * two_gemms)


def test_what_is_recomputed_is_paid_again():
    none, full, dots = (
        step(dataclasses.replace(MODEL, remat=remat))
        for remat in ("none", "full", "dots")
    )
    again = SLOW_GEMMS * 32 * 2 * (PER_TOKEN["attention"] + 8 * 16) / 1e6
    assert full.gemms - none.gemms == pytest.approx(again)
    assert dots.gemms == none.gemms
    assert full.attention == pytest.approx(none.attention * 4 / 3)
    assert dots.attention == none.attention


@pytest.mark.parametrize("qk_norm", [True, False])
def test_dots_count_activations_once_and_rotations_without_a_norm(qk_norm):
    model = dataclasses.replace(MODEL, qk_norm=qk_norm, scan_layers=False)
    full, dots = (
        step(dataclasses.replace(model, remat=remat)) for remat in ("full", "dots")
    )
    heads = 0 if qk_norm else MODEL.query_width + MODEL.kv_width
    # The backward's own bytes have the activation, too.
    kept = 2 * heads + 2 * MODEL.d_hidden
    kept *= 32 * MODEL.layers * element_bytes(MODEL) / 1e6
    assert full.elementwise - dots.elementwise == pytest.approx(kept)


def test_micro_batches_cost_sums_of_gradients_only():
    one, two = step(), step(micro_batches=2)
    assert two.gemms == pytest.approx(one.gemms)
    parameters = sum(PER_TOKEN.values()) + 32 * 8 + 3 * 8
    more = two.elementwise - one.elementwise
    assert more == pytest.approx(2 * 12 * parameters / 1e6)


@pytest.mark.parametrize(("gigabytes", "hidden"), [(1.0, True), (1e-8, False)])
def test_gradients_hide_behind_the_backward_while_it_lasts(gigabytes, hidden):
    model = dataclasses.replace(MODEL, layers=4)
    links = Links(nvlink_gb_per_s=gigabytes, nvlink_latency_us=0.0)
    mesh = MeshConfig(data=2)
    one = step(model, mesh, links=links)
    received = 4 * (4 * 512 + 2 * 256 + 9 * 8)
    assert one.communication == {"data": pytest.approx(received / gigabytes / 1e9)}
    taken = one.communication["data"]
    # That of one of four layers comes when nothing is left to compute.
    exposed = taken / 4
    if not hidden:
        alone = one.computation - one.slowed
        exposed += taken * 3 / 4 - alone * 2 / 3
        assert exposed > taken / 4
    assert one.exposed == pytest.approx(exposed)
    # What hides slows what it hides behind.
    assert one.slowed == pytest.approx(SLOWED_BESIDE * (taken - exposed))
    alone = one.gemms + one.attention + one.elementwise
    assert one.total == alone + one.slowed + one.exposed
    looped = step(dataclasses.replace(model, scan_layers=True), mesh, links=links)
    assert looped.exposed == pytest.approx(taken)
    assert looped.exposed_share == looped.exposed / looped.total


def test_sums_over_data_after_several_micro_batches_are_waited_for():
    links = Links(nvlink_gb_per_s=1.0, nvlink_latency_us=0.0)
    model = dataclasses.replace(MODEL, layers=4)
    two = step(model, MeshConfig(data=2), micro_batches=2, links=links)
    once = step(model, MeshConfig(data=2), links=links)
    assert two.communication == once.communication
    assert two.exposed == two.communication["data"]
    # Of one micro-batch only the sum of one of the four layers is.
    assert once.exposed == pytest.approx(once.communication["data"] / 4)
    # Over fsdp they are scattered in every micro-batch, and hide.
    mesh = MeshConfig(data=1, fsdp=2)
    scattered = step(model, mesh, micro_batches=2, links=links)
    assert scattered.exposed < scattered.communication["fsdp"] / 2


def test_sums_over_tensor_are_waited_for():
    mesh = MeshConfig(data=1, tensor=2)
    links = Links(nvlink_gb_per_s=1.0, nvlink_latency_us=0.0)
    model = dataclasses.replace(MODEL, heads=2, kv_heads=2)
    # four of a layer, the head's and the embedding's, each of 32 x 8 float32, of which
    # a ring of two brings each device once the whole
    assert step(model, mesh, links=links).exposed == pytest.approx(6 * 1024 / 1e9)
