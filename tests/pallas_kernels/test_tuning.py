"""Times of a GEMM from its own entry and from those of others; the search."""

from dataclasses import replace

import pytest

from pallas_kernels import tuning
from pallas_kernels.device import CPU, Device
from pallas_kernels.sm90.sparse_matmul_configs import (
    Config,
    default_config,
    why_invalid,
)
from pallas_kernels.tuned_gemm import TunedGemm
from tests.support.devices import hopper
from tests.support.devices.hopper import timed

pytestmark = pytest.mark.usefixtures("no_tables")
GPU = hopper.H200
GEMM = TunedGemm(tokens=1000, d_in=128, d_out=256)
SHAPE = GEMM.shape()
ACTIVATION = TunedGemm(sparse_operand="input", tokens=1024, d_in=256, d_out=128)
GRADIENT = replace(ACTIVATION, is_weight_gradient=True)
OF_OUTPUT = replace(GRADIENT, sparse_operand="gradient")


def config_of(gemm: TunedGemm, device: Device = GPU) -> Config:
    return tuning.config_for(device, gemm.shape())


def test_an_entry_speaks_for_its_neighbours_alone():
    tuning.save(
        GPU.kind,
        [timed(GEMM, grid_tile_width=3), timed(replace(GEMM, tokens=8000), 3.0)],
    )
    for n in (500, 1000, 2000):
        assert tuning.nearest(GPU, replace(GEMM, tokens=n)).config.grid_tile_width == 3
    assert tuning.nearest(GPU, replace(GEMM, tokens=5000)).sparse_us == 3.0
    assert tuning.nearest(GPU, replace(GEMM, tokens=499)) is None
    assert tuning.nearest(GPU, replace(GEMM, d_in=192)) is None
    assert config_of(replace(GEMM, tokens=501)).grid_tile_width == 3
    narrow = replace(GEMM, d_in=64)
    assert config_of(narrow) == default_config(narrow.shape(), GPU.multiprocessors)


@pytest.mark.parametrize("gemm", [GEMM, ACTIVATION, GRADIENT, OF_OUTPUT])
def test_neighbours_differ_in_their_tokens_alone(gemm):
    tuning.save(GPU.kind, [timed(gemm)])
    for size in ("tokens", "d_in", "d_out"):
        doubled = replace(gemm, **{size: 2 * getattr(gemm, size)})
        found = tuning.nearest(GPU, doubled)
        assert found == (timed(gemm) if size == "tokens" else None)


def test_a_config_that_does_not_fit_a_neighbour_is_not_taken_there():
    found = replace(timed(ACTIVATION), config=Config(out_columns=32))
    tuning.save(GPU.kind, [found])
    default = default_config(ACTIVATION.shape(), GPU.multiprocessors)
    assert config_of(ACTIVATION) == default != found.config


def test_a_gemm_with_a_packed_result_takes_the_config_of_the_one_without():
    gemm = replace(GEMM, tokens=1024)
    tuning.save(GPU.kind, [timed(gemm, tile_n=128, out_columns=64, grid_tile_width=3)])
    packed = gemm.shape(packed_out=True)
    assert tuning.config_for(GPU, packed) == config_of(gemm)
    assert config_of(gemm).grid_tile_width == 3
    tuning.save(GPU.kind, [timed(gemm, tile_n=176, out_columns=88)])
    assert tuning.config_for(GPU, packed) == default_config(packed, GPU.multiprocessors)


def test_what_lost_or_was_never_measured_and_is_small_is_told():
    tuning.save(GPU.kind, [timed(GEMM, 3.0), timed(replace(GEMM, d_in=64), 1.0)])
    assert "measured slower: 3.0 us, dense 2.0 us, at 1000" in tuning.why_slower(
        GPU, replace(GEMM, tokens=900)
    )
    assert tuning.why_slower(GPU, replace(GEMM, d_in=64)) is None
    assert "too small" in tuning.why_slower(GPU, replace(GEMM, d_out=192))
    assert tuning.why_slower(GPU, replace(GEMM, d_out=192, tokens=2**20)) is None


ROWS = replace(ACTIVATION, tokens=256 + 3 * 128, d_in=64, experts=4, group_tile=128)
"""GEMM 2 of four experts, 256 tokens."""


def test_a_larger_gemm_is_estimated_from_the_largest_that_is_nowhere_larger():
    small = replace(GEMM, tokens=500)
    tuning.save(
        GPU.kind, [timed(small, grid_tile_width=3), timed(GEMM, grid_tile_width=4)]
    )
    wide = replace(GEMM, d_out=512, tokens=8000, d_in=192)
    assert tuning.nearest(GPU, wide) is None
    times = tuning.times(GPU, wide)
    assert times.entry.gemm == GEMM and times.estimated
    # 2 x 8 x 1.5 times the work; a weight is packed once, whatever the tokens.
    assert (times.sparse_us, times.dense_us, times.pack_us) == (24.0, 48.0, 30.0)
    assert config_of(wide).grid_tile_width == 4
    for smaller in ({"d_out": 192}, {"d_in": 64}, {"tokens": 249}):
        assert tuning.times(GPU, replace(wide, **smaller)) is None
    assert tuning.times(GPU, replace(wide, tokens=250)).entry.gemm == small
    assert tuning.times(GPU, replace(wide, dtype="float16")) is None
    measured = tuning.times(GPU, replace(GEMM, tokens=1500))
    assert (measured.sparse_us, measured.estimated) == (1.5, False)


def test_groups_are_estimated_from_fewer_and_smaller_ones():
    tuning.save(GPU.kind, [timed(ROWS)])
    # Twice the experts, eight times the tokens, each with two rows.
    more = replace(ROWS, tokens=2 * 2048 + 7 * 128, experts=8)
    times = tuning.times(GPU, more, rows_of_token=2)
    assert times.sparse_us == times.pack_us / 10.0 == more.tokens / ROWS.tokens
    assert times.dense_us == 2.0 * 8 * 2
    assert tuning.times(GPU, replace(more, experts=2)) is None
    # An eighth of the tokens for each expert.
    assert tuning.times(GPU, replace(more, tokens=ROWS.tokens, experts=32)) is None
    assert tuning.times(GPU, replace(more, experts=1, group_tile=0)) is None


def test_a_hopper_without_an_entry_takes_those_of_another_as_estimates():
    tuning.save_shipped(GPU.kind, [timed(GEMM, grid_tile_width=3)])
    near, wide = replace(GEMM, tokens=1500), replace(GEMM, d_out=512, tokens=8000)
    for gemm in (GEMM, near, wide):
        known = tuning.times(GPU, gemm)
        guess = tuning.times(hopper.H100, gemm)
        assert guess == replace(known, measured_on=GPU.kind)
        assert guess.estimated and guess.least_gain == tuning.GAIN_ELSEWHERE
        assert config_of(gemm, hopper.H100).grid_tile_width == 3
    assert not tuning.times(GPU, near).estimated
    # Fewer multiprocessors take longer for everything.
    slower = tuning.times(Device.named("NVIDIA H20"), GEMM)
    scale = 132 / 78
    assert (slower.sparse_us, slower.dense_us, slower.pack_us) == pytest.approx(
        (1.0 * scale, 2.0 * scale, 10.0 * scale)
    )
    # Their own speak first, even of a smaller GEMM.
    tuning.save(hopper.H100.kind, [timed(GEMM, 5.0)])
    assert tuning.times(hopper.H100, GEMM).measured_on is None
    assert tuning.times(hopper.H100, wide).measured_on is None
    assert tuning.times(GPU, GEMM).sparse_us == 1.0
    assert tuning.times(hopper.A100, GEMM) is None
    assert tuning.times(CPU, GEMM) is None


def test_of_several_tuned_gpus_the_one_of_most_alike_size_is_taken():
    small, large = Device.named("NVIDIA H20"), Device.named("NVIDIA H100 PCIe")
    for device, sparse_us in ((small, 3.0), (GPU, 4.0)):
        tuning.save_shipped(device.kind, [timed(GEMM, sparse_us)])
    assert tuning.nearest_tuned(large) == GPU
    assert tuning.nearest_tuned(GPU) == small
    assert tuning.nearest_tuned(replace(GPU, multiprocessors=None)) is None


def test_what_another_gpu_gained_must_be_more_than_an_estimates_error():
    tuning.save_shipped(GPU.kind, [timed(GEMM, 1.55)])
    assert tuning.why_slower(hopper.H100, GEMM) is None
    tuning.save_shipped(GPU.kind, [timed(GEMM, 1.65)])
    assert tuning.why_slower(GPU, GEMM) is None
    why = tuning.why_slower(hopper.H100, GEMM)
    assert why.startswith("estimated slower, or faster by less than the estimate's")
    assert why.endswith("dense 2.0 us, measured on NVIDIA H200")


def test_an_estimate_must_gain_more_than_its_error():
    wide = replace(GEMM, d_out=512, tokens=8000)
    tuning.save(GPU.kind, [timed(GEMM, 1.7)])
    assert tuning.why_slower(GPU, wide) is None
    tuning.save(GPU.kind, [timed(GEMM, 1.75)])
    assert tuning.why_slower(GPU, GEMM) is None
    assert tuning.why_slower(GPU, wide).startswith("estimated slower, or faster by les")


def test_the_search_takes_the_fastest_of_the_correct_ones():
    configs = tuning.candidates(SHAPE, GPU.multiprocessors)
    assert all(why_invalid(config, SHAPE) is None for config in configs)
    assert len(set(configs)) == len(configs) > 2
    times = {config: float(i) for i, config in enumerate(configs)}
    asked = []

    def time_us(correct):
        asked.extend(correct)
        return times

    best = tuning.search(SHAPE, configs, lambda config: config != configs[0], time_us)
    assert best == (configs[1], 1.0)
    assert asked == configs[1:]
    with pytest.raises(ValueError, match="no config computes Shape.m=256, n=1000"):
        tuning.search(SHAPE, configs, lambda config: False, time_us)
