"""Sums of chosen rows on Hopper: lowered everywhere, run where there is one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.sm90 import gather_sum
from tests.support.devices.lanes import Memory, emulated, lanes

SHAPES = [  # rows, d, rows of the result, choices
    (40, 64, 70, 1),
    (9, 2560, 5, 2),
    (17, 72, 130, 3),
    (5, 9216, 3, 1),
]


@pytest.mark.newest_jax
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("rows", "d", "out_rows", "choices"), SHAPES)
def test_lowers_for_hopper(rows, d, out_rows, choices, dtype):
    x = jax.ShapeDtypeStruct((rows, d), dtype)
    index = jax.ShapeDtypeStruct((out_rows, choices), jnp.int32)
    lowered = (
        jax.jit(gather_sum.gather_sum)
        .trace(x, index)
        .lower(lowering_platforms=("cuda",))
    )
    assert "mosaic_gpu" in lowered.as_text()


@pytest.mark.parametrize(
    ("d", "dtype", "message"),
    [
        (36, "bfloat16", "d=36 is not a multiple of 8"),
        (64, "float32", "sums bfloat16 and float16, not float32"),
    ],
)
def test_what_cannot_be_summed_is_refused(d, dtype, message):
    with pytest.raises(ValueError, match=message):
        gather_sum.gather_sum(jnp.zeros((4, d), dtype), jnp.zeros((4, 1), jnp.int32))


# Computed: by the kernel's body on CPU, and on a GPU.


def gather_sum_on_cpu(x, index):
    """`gather_sum`, its body run here, block after block."""
    x, index = np.ascontiguousarray(x), np.ascontiguousarray(index)
    together = gather_sum._rows_together(x.shape[1])
    out = np.full((index.shape[0], x.shape[1]), np.nan, x.dtype)
    with emulated():
        for first in range(0, len(out), together):
            gather_sum._sum(
                lanes(np.uint32(first)), together, *map(Memory, (x, index, out))
            )
    return out


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("shape", SHAPES)
def test_sums_the_chosen_rows(shape, dtype):
    check(gather_sum_on_cpu, shape, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("shape", [*SHAPES, (3000, 2048, 4100, 2)])
def test_sums_the_chosen_rows_on_a_gpu(shape, dtype):
    check(gather_sum.gather_sum, shape, dtype)


def check(run, shape, dtype) -> None:
    rows, d, out_rows, choices = shape
    rng = np.random.default_rng(0)
    x = np.array(jnp.asarray(rng.normal(size=(rows, d)), dtype))
    x[0, :3] = np.inf, -0.0, np.nan
    # A fourth of the indices, or so, name no row, on either side.
    index = rng.integers(-rows // 8, rows + rows // 8 + 1, (out_rows, choices))
    index[0], index[1] = -1, 0
    got = np.asarray(run(jnp.asarray(x), jnp.asarray(index, jnp.int32)))
    chosen = (index >= 0) & (index < rows)
    assert not chosen.all() and chosen.any()
    expected = np.zeros((out_rows, d), np.float32)
    for choice in range(choices):
        own = x[np.where(chosen, index, 0)[:, choice]].astype(np.float32)
        expected += np.where(chosen[:, choice, None], own, 0)
    np.testing.assert_array_equal(
        got.astype(np.float32), expected.astype(x.dtype).astype(np.float32)
    )
