"""The FFN in 8-bit floats on a mesh of eight devices against that of one device."""

import re
from functools import lru_cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from sparsejax.feed_forward.ffn import ffn
from sparsejax.feed_forward.gated_ffn import gated_ffn
from sparsejax.feed_forward.layout import FFNLayout, on_mesh
from sparsejax.feed_forward.sparsity import DENSE, FFNSparsity
from sparsejax.ops.fp8_matmul import FORWARD, quantise
from sparsejax.sparsity.patterns import NM
from tests.support.devices.eight_devices import MESHES, layout_of
from tests.support.oracles.ffn_cases import (
    D_HIDDEN,
    D_MODEL,
    make_inputs,
)

TWO_FOUR = NM(2, 4)
TOKENS = 48


@pytest.mark.parametrize("mesh", MESHES)
def test_the_step_of_a_matrix_is_that_of_all_devices(mesh):
    layout = layout_of(MESHES[mesh])
    numbers = np.random.default_rng(0).standard_normal((64, 12)).astype(np.float32)
    # Those of most devices are so small that they lose bits beside the others'.
    x = numbers * np.where(np.arange(64) % 48 == 7, 1, 2.0**-16)[:, None]
    parts = PartitionSpec(("data", "fsdp", "tensor"))
    local = lambda x: jax.tree.map(lambda a: a.reshape(-1), quantise(x, FORWARD))
    shared = jax.jit(on_mesh(layout, local, (parts,), parts))(x)
    alone = quantise(jnp.asarray(x), FORWARD)
    np.testing.assert_array_equal(shared.values.reshape(64, 12), alone.values)
    np.testing.assert_array_equal(shared.step, np.full(8, alone.step))


def in_8_bit_floats(
    precision: str, gated: bool, sparsity: FFNSparsity, layout: FFNLayout | None
) -> list[np.ndarray]:
    """Y and the gradients of a step on whole numbers."""
    generator = np.random.default_rng(0)
    whole = lambda *shape: generator.integers(-3, 4, shape).astype(np.float32)
    x, dy = whole(TOKENS, D_MODEL), whole(TOKENS, D_MODEL)
    weights = [whole(D_HIDDEN, D_MODEL).T for _ in range(1 + gated)]
    weights.append(whole(D_HIDDEN, D_MODEL))
    how = {"precision": precision, "layout": layout, "sparsity": sparsity}
    if gated:
        how["activation"] = "reglu2"

    @jax.jit
    def of(x, weights, dy):
        call = lambda x, w: (gated_ffn if gated else ffn)(x, *w, **how)
        y, pull_back = jax.vjp(call, x, weights)
        return y, *pull_back(dy)

    return jax.device_get(jax.tree.leaves(of(x, weights, dy)))


in_8_bit_floats_on_one_device = lru_cache(partial(in_8_bit_floats, layout=None))


@pytest.mark.parametrize("precision", ["fp8", "fp8_all"])
@pytest.mark.parametrize("gated", [False, True], ids=["relu2", "reglu2"])
@pytest.mark.parametrize(
    "sparsity", [DENSE, FFNSparsity(activations=TWO_FOUR)], ids=["", "a24"]
)
@pytest.mark.parametrize("mesh", MESHES)
def test_a_mesh_rounds_to_8_bit_floats_as_one_device_does(
    precision, gated, sparsity, mesh
):
    ours = in_8_bit_floats(precision, gated, sparsity, layout_of(MESHES[mesh]))
    theirs = in_8_bit_floats_on_one_device(precision, gated, sparsity)
    # Sums of whole numbers, in another order where they are beyond 2^24.
    for got, wanted in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(
            got, wanted, rtol=0, atol=1e-6 * np.abs(wanted).max()
        )


def test_weights_in_8_bit_floats_are_gathered_as_bytes():
    layout = layout_of(MESHES["fsdp"])
    arrays = [jnp.asarray(a, jnp.float32) for a in make_inputs(0, TOKENS)]
    x, w_up, w_down, dy = arrays

    def of(x, w_up, w_down, dy):
        call = partial(ffn, precision="fp8", layout=layout)
        return jax.vjp(call, x, w_up, w_down)[1](dy)

    text = jax.jit(of).lower(x, w_up, w_down, dy).compile().as_text()
    gathers = re.findall(r"= (\w+)\[[\d,]*\]\S* all-gather\(", text)
    assert gathers and set(gathers) == {"u8"}
