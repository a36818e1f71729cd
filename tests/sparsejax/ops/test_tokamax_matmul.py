"""tokamax's ragged dot: where it is taken, by which implementation, and that it is
asked for by name."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.device import CPU, Device
from sparsejax.ops.backend import choose_backend
from sparsejax.ops.gemm_spec import GemmSpec
from sparsejax.ops.grouped_matmul import (
    grouped_matmul,
    grouped_outer,
    implementations,
    outer_implementations,
)
from tests.support.devices import accelerators, hopper
from tests.support.devices.accelerators import A100, B200, TPU, TRITON

ROWS = GemmSpec(
    name="rows @ weights[expert]",
    tokens=4096,
    d_in=256,
    d_out=128,
    dtype="bfloat16",
    experts=4,
)
OVER_ROWS = replace(ROWS, name="lhs^T @ rhs", is_weight_gradient=True)


def decision(spec: GemmSpec, device: Device, backend=None):
    known = outer_implementations() if spec.is_weight_gradient else implementations()
    return choose_backend(replace(spec, device=device), backend, known)


@pytest.mark.parametrize(
    ("spec", "device", "packages", "chosen"),
    [
        (ROWS, A100, TRITON, "triton"),
        (OVER_ROWS, A100, TRITON, "triton"),
        (ROWS, A100, (), None),
        (ROWS, B200, (), "mosaic"),
        (OVER_ROWS, B200, (), None),
        (OVER_ROWS, B200, TRITON, "triton"),
        (replace(ROWS, float32_out=True), B200, (), None),
        (replace(ROWS, float32_out=True), B200, TRITON, "triton"),
        (ROWS, TPU, (), "mosaic"),
        (OVER_ROWS, TPU, (), "mosaic"),
        (ROWS, CPU, TRITON, None),
        # Without a backend of ours, since the rows of a tile are not stated.
        (ROWS, hopper.H200, TRITON, None),
    ],
)
def test_the_choice_unasked(spec, device, packages, chosen, monkeypatch):
    accelerators.installed(monkeypatch, "tokamax", *packages)
    of = decision(spec, device)
    assert of.backend == ("xla" if chosen is None else "tokamax")
    assert ("tokamax: " in of.reason) == (chosen is None)
    if chosen is not None:
        assert of.path == f"tokamax's ragged dot ({chosen}) over 4 experts"
        assert of.executed_share == 1 / 4


@pytest.mark.parametrize(
    ("changes", "device", "reason"),
    [
        ({}, A100, r"by Triton alone.*install sparsejax\[tokamax-gpu\]"),
        ({"dtype": "float32"}, B200, "bfloat16 on accelerators, not for float32"),
        ({"d_in": 96}, B200, "a size of 96 is not a multiple of 64"),
        ({"d_out": 64}, TPU, "a size of 64 is below the 128"),
        ({}, replace(TPU, kind="TPU v4"), "needs a TPU v5 or newer, not TPU v4"),
        ({}, Device(platform="gpu", kind="AMD MI300X"), "from the A100 on, or a TPU"),
        ({}, replace(A100, compute_capability="7.5"), "from the A100 on, or a TPU"),
    ],
)
def test_what_it_does_not_run_is_told(changes, device, reason, monkeypatch):
    accelerators.installed(monkeypatch, "tokamax")
    spec = replace(ROWS, **changes)
    with pytest.raises(NotImplementedError, match=reason):
        decision(spec, device, "tokamax")
    assert decision(spec, device).backend == "xla"


def test_the_extra_is_named_where_the_package_is_missing(monkeypatch):
    accelerators.installed(monkeypatch)
    rows, weights = jnp.ones((8, 4)), jnp.ones((2, 4, 4))
    with pytest.raises(NotImplementedError, match=r"install sparsejax\[tokamax\]"):
        grouped_matmul(rows, weights, jnp.zeros(2, int), 2, backend="tokamax")
    assert decision(ROWS, B200).backend == "xla"


SIZES = [11, 0, 30]
TILE = 5


@pytest.mark.parametrize("device", [A100, B200, TPU], ids=lambda of: of.kind)
def test_its_implementation_is_named_and_gets_whole_tiles(device, monkeypatch):
    """With XLA's in the place of the one that is named, against loops over the rows."""
    import tokamax  # here: its import takes seconds

    calls = []

    def by_xla(lhs, rhs, sizes, *arguments, implementation, **named):
        calls.append((implementation, lhs.shape[0]))
        return run(lhs, rhs, sizes, *arguments, implementation="xla", **named)

    run = tokamax.ragged_dot_general
    monkeypatch.setattr(tokamax, "ragged_dot_general", by_xla)
    accelerators.installed(monkeypatch, "tokamax", *TRITON)
    hopper.see_device(monkeypatch, device)
    tiles = [-(-size // TILE) for size in SIZES]
    tile_expert = np.repeat(np.arange(3, dtype=np.int32), tiles)
    expert = np.repeat(tile_expert, TILE)
    whole = np.random.default_rng(0).integers(-3, 4, (len(expert), 128))
    lhs = jnp.asarray(whole, jnp.bfloat16)
    weights = jnp.asarray(np.random.default_rng(1).integers(-3, 4, (3, 128, 128)))
    used = np.int32(len(tile_expert))
    got = grouped_matmul(lhs, weights, tile_expert, used, out_dtype=jnp.float32)
    rows = [whole[r] @ np.asarray(weights)[e] for r, e in enumerate(expert)]
    # Whole numbers below 2^24: exact in float32, in any order.
    np.testing.assert_array_equal(got, rows)
    outer = grouped_outer(lhs, lhs, tile_expert, used, 3)
    for e in range(3):
        of_expert = whole[expert == e]
        np.testing.assert_array_equal(outer[e], of_expert.T @ of_expert)
    # 45 rows, filled up to what the kernels' tiles divide.
    expected = ("mosaic", 128) if device == TPU else ("triton", 48)
    assert calls == [expected] * 2


@pytest.mark.parametrize(
    ("device", "platform", "call", "count"),
    [
        (B200, "cuda", "custom_call @mosaic_gpu", 2),
        (TPU, "tpu", "custom_call @tpu_custom_call", 3),
    ],
    ids=["B200", "TPU"],
)
def test_a_product_and_its_gradient_lower(device, platform, call, count, monkeypatch):
    """By Mosaic: all three GEMMs on a TPU, and on a B200 those of rows, beside a loop
    of XLA. The number of rows is none that tokamax's tiles divide."""
    accelerators.installed(monkeypatch, "tokamax")
    tile_expert = jnp.asarray([0, 0, 1, 3, 3], jnp.int32)
    rows = jax.ShapeDtypeStruct((5 * 4100, 256), jnp.bfloat16)
    weights = jax.ShapeDtypeStruct((4, 256, 128), jnp.bfloat16)

    def both(rows, weights):
        product = lambda *of: grouped_matmul(*of, tile_expert, jnp.int32(5))
        out, pull_back = jax.vjp(product, rows, weights)
        return out, pull_back(out)

    with accelerators.traced_for(device):
        traced = jax.jit(both).trace(rows, weights)
        text = traced.lower(lowering_platforms=(platform,)).as_text()
    assert text.count(call) == count
