"""What a step of each arm costs: by its FLOPs, and at the widths of a preset, against
the steps that are predicted for models written out here."""

from dataclasses import replace

import pytest

from experiments.worth.equal_loss_rows import parameters
from experiments.worth.step_costs import AtWidths
from pallas_kernels.device import Device
from sparsejax.config import MeshConfig, PhaseConfig
from sparsejax.config.presets import PRESETS
from sparsejax.cost_model import Links, Speeds, flops_per_token, predicted_step
from sparsejax.feed_forward.sparsity import DENSE as NO_SPARSITY
from sparsejax.reports.metrics import ffn_decisions
from tests.support.files.equal_loss_runs import (
    dense_runs,
    loss,
    rows_of,
    sparse_config,
    tokens_of,
)
from tests.support.files.synthetic_runs import DENSE, Synthetic

H200 = "NVIDIA H200"
WIDTHS = {"widths_of": "llama-1b", "device": H200}


def seconds(**sizes) -> float:
    """The predicted seconds of a dense step of `llama-1b` with other sizes, in 64
    micro-batches of 16,384 tokens."""
    model = replace(PRESETS["llama-1b"]().model, **sizes)
    device, mesh = Device.named(H200), MeshConfig(data=1)
    return predicted_step(
        model,
        sequence_length=4096,
        tokens_per_device=16_384,
        micro_batches=64,
        sparsity=NO_SPARSITY,
        decisions=ffn_decisions(model, NO_SPARSITY, 16_384, None, device=device),
        speeds=Speeds.of(device, "bfloat16"),
        mesh=mesh,
        links=Links(),
    ).total


def of_arm(name: str, steps: int, side_by_side: int = 1, **sizes) -> Synthetic:
    """A run of another shape that has the loss of dense after 300 steps."""
    return Synthetic(
        name=name,
        config=replace(DENSE, model=replace(DENSE.model, **sizes), steps=steps),
        loss=loss(tokens_of(300)),
        side_by_side=side_by_side,
    )


def test_an_arm_costs_what_its_shape_is_predicted_to_cost_at_the_widths(tmp_path):
    """Dense has two layers and F = 4 d, the deepest arm five: llama-1b's 25 layers are
    five for one."""
    deep, narrow = of_arm("deep", 240, layers=5), of_arm("narrow", 400, d_hidden=64)
    rows = rows_of(tmp_path, [*dense_runs(), deep, narrow], **WIDTHS)
    dense = seconds(layers=10)
    row = rows["deep", 240]
    assert row["R"] == pytest.approx(seconds() / dense * 240 / 300, rel=1e-4)
    assert not row["measured"] and row["R_wall"] is None
    assert row["at_widths"] == "llama-1b, NVIDIA H200"
    assert row["speed_from"] == "predicted for llama-1b, NVIDIA H200"
    narrow_seconds = seconds(layers=10, d_hidden=2048)
    assert narrow_seconds < 0.8 * dense
    row = rows["narrow", 400]
    assert row["R"] == pytest.approx(narrow_seconds / dense * 400 / 300, rel=1e-4)
    assert rows["dense", 300]["R"] == pytest.approx(1, rel=1e-4)
    assert rows["dense", 300]["dense_cost"] == pytest.approx(1)


def test_an_arm_in_8_bit_floats_costs_its_own_steps(tmp_path):
    fp8 = of_arm("fp8", 300, precision="fp8")
    row = rows_of(tmp_path, [*dense_runs(), fp8], **WIDTHS)["fp8", 300]
    ratio = seconds(precision="fp8") / seconds()
    assert ratio < 0.95 and row["R"] == pytest.approx(ratio, rel=1e-4)


def test_sparse_steps_cost_the_dense_ones_of_their_shape_over_their_speed(tmp_path):
    config = sparse_config(300, 0.8)
    wide = replace(config, model=replace(config.model, d_hidden=512))
    sparse = Synthetic(name="sparse", config=wide, loss=loss(tokens_of(300)))
    given = WIDTHS | {"speed": ("sparse=1.5",), "speed_from": "a test"}
    row = rows_of(tmp_path, [*dense_runs(), sparse], **given)["sparse", 300]
    relative = seconds(d_hidden=16_384) / seconds()
    assert 1.2 < relative < 1.6
    assert row["dense_cost"] == pytest.approx(0.2 * relative)
    assert row["sparse_cost"] == pytest.approx(0.8 * relative)
    assert row["R"] == pytest.approx((0.2 + 0.8 / 1.5) * relative, rel=1e-4)
    assert row["speed_from"] == "a test" and row["at_widths"]
    needed = (0.2 + 0.8 / row["break_even_speed"]) * relative
    assert needed == pytest.approx(1, rel=1e-4)


def grown(**changes) -> Synthetic:
    """A run whose FFNs grow from 64 neurons to 256 after three quarters of its 400
    steps, and that ends where dense is after 380."""
    schedule = (
        PhaseConfig(name="narrow", share=0.75, d_hidden=64),
        PhaseConfig(name="whole"),
    )
    config = replace(DENSE, steps=400).with_schedule(schedule)
    return Synthetic(name="grown", config=config, loss=loss(tokens_of(380)), **changes)


def test_a_phase_with_a_smaller_model_costs_its_own_steps(tmp_path):
    row = rows_of(tmp_path, [*dense_runs(), grown()], **WIDTHS)["grown", 400]
    share = seconds(d_hidden=2048) / seconds()
    assert row["R"] == pytest.approx((0.75 * share + 0.25) * 400 / 380, rel=1e-4)


def test_a_phase_with_a_smaller_model_costs_its_own_FLOPs(tmp_path):
    row = rows_of(tmp_path, [*dense_runs(), grown(side_by_side=2)])["grown", 400]
    small = flops_per_token(replace(DENSE.model, d_hidden=64), 64).total()
    share = small / flops_per_token(DENSE.model, 64).total()
    assert row["R"] == pytest.approx((0.75 * share + 0.25) * 400 / 380, rel=1e-4)
    assert row["parameters"] == parameters(DENSE.model)


def test_another_model_costs_its_share_of_the_FLOPs(tmp_path):
    narrow = of_arm("narrow", 400, d_hidden=64, side_by_side=2)
    row = rows_of(tmp_path, [*dense_runs(), narrow])["narrow", 400]
    models = (narrow.config.model, DENSE.model)
    small, whole = (flops_per_token(of, 64).total() for of in models)
    assert row["R"] == pytest.approx(small / whole * 400 / 300, rel=1e-4)
    assert (row["measured"], row["speed_from"]) == (False, "FLOPs")
    assert row["at_widths"] is None and row["break_even_speed"] is None
    assert row["parameters"] < parameters(DENSE.model)


def test_between_whole_numbers_of_layers_a_step_lies_on_a_line():
    widths = AtWidths(
        preset="llama-1b",
        device=Device.named(H200),
        reference=DENSE.model,
        most_layers=10,
    )
    tokens = 64 * 16_384
    found = widths.seconds_per_token(replace(DENSE.model, layers=7))
    between = (seconds(layers=17) + seconds(layers=18)) / 2
    assert found * tokens == pytest.approx(between)
    whole = widths.seconds_per_token(replace(DENSE.model, layers=10))
    assert whole * tokens == pytest.approx(seconds())


def test_a_narrower_arm_has_fewer_heads(tmp_path):
    half = of_arm("half", 400, d_model=32, heads=1, kv_heads=1, d_hidden=128)
    row = rows_of(tmp_path, [*dense_runs(), half], **WIDTHS)["half", 400]
    sizes = {"d_model": 1024, "heads": 8, "kv_heads": 8, "d_hidden": 4096}
    assert row["R"] == pytest.approx(seconds(**sizes) / seconds() * 4 / 3, rel=1e-4)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"widths_of": "llama-1b"}, "--widths-of and --device belong together"),
        ({"device": H200}, "give both or none"),
        (WIDTHS | {"device": "slide rule"}, "nothing is known of a device named"),
        (WIDTHS | {"device": "TPU v5 lite"}, "no speeds are known of 'TPU v5 lite'"),
    ],
)
def test_widths_that_say_nothing_are_refused(tmp_path, given, said):
    with pytest.raises(ValueError, match=said):
        rows_of(tmp_path, dense_runs(), **given)


def test_a_width_of_no_whole_heads_is_refused(tmp_path):
    odd = of_arm("odd", 400, d_model=34, heads=1, kv_heads=1, d_hidden=128)
    said = "d_model 34 has d_model 1088 at the widths of llama-1b.*head_dim 128"
    with pytest.raises(ValueError, match=said):
        rows_of(tmp_path, [*dense_runs(), odd], **WIDTHS)
