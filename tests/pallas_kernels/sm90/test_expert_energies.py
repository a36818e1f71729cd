"""Energies of experts from 8-bit floats: lowered and interpreted here, run where a GPU
is."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.sm90.expert_energies import (
    FACTOR,
    default_config,
    expert_energies,
    why_unsupported,
)
from pallas_kernels.sm90.gemm.dense_kernel import Config

MULTIPROCESSORS = 132
CONFIGS = [
    Config(tile_n=128, cluster=1, stages=3),
    Config(tile_n=128, cluster=2, cluster_axis="n"),
    Config(row_blocks=2, tile_n=128, cluster=2),
    Config(cluster=1, grid_tile_width=1),
]


def case(tokens: int, k: int, n: int, experts: int, seed: int = 0):
    """Returns whole numbers, whose products are exact, in 8-bit floats, and the
    energies in float64."""
    generator = np.random.default_rng(seed)
    a, b = (generator.integers(-4, 5, (size, k)) for size in (tokens, n))
    y = np.maximum((a @ b.T) * FACTOR, 0)
    expected = (y**4).reshape(tokens, experts, -1).sum(axis=2)
    return [jnp.asarray(of, jnp.float8_e4m3fn) for of in (a, b)], expected


def assert_energies(got, expected) -> None:
    """Sums of float32, of numbers that are not negative."""
    assert (got.shape, got.dtype) == (expected.shape, jnp.float32)
    np.testing.assert_allclose(got, expected, rtol=1e-5)


@pytest.mark.newest_jax
@pytest.mark.parametrize("config", [None, *CONFIGS])
@pytest.mark.parametrize("tokens", [512, 1003])
def test_lowers_for_hopper(config, tokens):
    """What the kernel writes has room for every block of every cluster, also for those
    beyond the tokens and the neurons."""
    config = config or default_config(768)
    # An odd number of tiles along both axes.
    n = 9 * config.tile_n
    operands, _ = case(tokens, 256, n, 3)
    run = partial(
        expert_energies, experts=3, config=config, multiprocessors=MULTIPROCESSORS
    )
    traced = jax.jit(run).trace(*operands)
    assert traced.out_info.shape == (tokens, 3)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    (call,) = (line for line in text.splitlines() if "@mosaic_gpu" in line)
    found = re.search(r"-> tensor<(\d+)x(\d+)xf32>", call)
    assert found is not None
    columns, rows = map(int, found.groups())
    blocks = {"m": (config.cluster, 1), "n": (1, config.cluster)}[config.cluster_axis]
    assert rows % (blocks[0] * config.tile_m) == 0 and rows >= tokens
    assert columns % blocks[1] == 0 and columns * config.tile_n >= n


def test_the_widest_tile_that_lies_in_an_expert_is_taken():
    assert default_config(768).tile_n == default_config(256).tile_n == 256
    assert default_config(384).tile_n == 128


@pytest.mark.parametrize(("tokens", "experts"), [(300, 2), (128, 1), (3, 4)])
def test_interpreted_energies_are_those_of_the_product(tokens, experts):
    """Without clusters, which the interpreter does not know. Tokens that do not fill a
    tile are among them, and two blocks with several tiles each."""
    operands, expected = case(tokens, 256, 128 * experts, experts)
    config = Config(tile_n=128, cluster=1, stages=3)
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        got = expert_energies(
            *operands, experts=experts, config=config, multiprocessors=2
        )
    assert_energies(got, expected)


def test_the_largest_numbers_give_finite_energies():
    a = jnp.full((128, 128), 448, jnp.float8_e4m3fn)
    config = Config(tile_n=128, cluster=1, stages=3)
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
        got = expert_energies(a, a, experts=1, config=config, multiprocessors=2)
    assert_energies(got, np.full((128, 1), 128 * (448.0**2 * 128 * FACTOR) ** 4))
    # Sums of 2^16 products are as large at most, and experts of 2^13 neurons.
    assert 2.0**13 * (448.0**2 * 2**16 * FACTOR) ** 4 < np.finfo(np.float32).max


@pytest.mark.parametrize(
    ("k", "features", "message"),
    [
        (192, 128, "sums of 192 numbers are no whole lines of 128 bytes"),
        (256, 192, "192 neurons of an expert are no multiple of 128"),
        (0, 128, "sums of 0 numbers"),
    ],
)
def test_what_the_kernel_cannot_run_is_refused_with_the_reason(k, features, message):
    assert message in (why_unsupported(k, features) or "")
    a = jnp.zeros((8, k), jnp.float8_e4m3fn)
    b = jnp.zeros((features, k), jnp.float8_e4m3fn)
    with pytest.raises(ValueError, match=message):
        expert_energies(a, b, experts=1, multiprocessors=MULTIPROCESSORS)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"experts": 3}, "do not fit 3 experts"),
        ({"config": Config()}, "a tile of 256 columns does not divide the 128"),
        ({"config": Config(tile_n=128, stages=9)}, "bytes of shared memory"),
    ],
)
def test_operands_that_do_not_fit_are_refused(changes, message):
    (a, b), _ = case(8, 256, 256, 2)
    with pytest.raises(ValueError, match=message):
        expert_energies(
            a, b, **{"experts": 2, "multiprocessors": MULTIPROCESSORS} | changes
        )
    with pytest.raises(ValueError, match="both are float8_e4m3fn"):
        expert_energies(
            a.astype(jnp.bfloat16), b, experts=2, multiprocessors=MULTIPROCESSORS
        )


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(200))
def test_random_shapes_on_a_gpu(seed):
    generator = np.random.default_rng(seed)
    tokens = int(generator.integers(1, 5000))
    k, features = (128 * int(generator.integers(1, most)) for most in (9, 7))
    experts = int(generator.integers(1, 9))
    fits = [of for of in CONFIGS if features % of.tile_n == 0]
    config = [None, *fits][generator.integers(len(fits) + 1)]
    operands, expected = case(tokens, k, experts * features, experts, seed)
    run = partial(
        expert_energies,
        experts=experts,
        config=config,
        multiprocessors=jax.devices()[0].core_count,
    )
    got, again = (jax.jit(run)(*operands) for _ in "12")
    np.testing.assert_array_equal(got, again)
    assert_energies(got, expected)
