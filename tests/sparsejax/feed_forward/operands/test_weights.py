"""Packed weights: the same bits as packing in place, and who owns the gradient."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparsejax.feed_forward.ffn import ffn
from sparsejax.feed_forward.operands.weights import pack_ffn
from sparsejax.feed_forward.sparsity import DENSE, FFNSparsity
from sparsejax.sparsity.compressed import decompress
from sparsejax.sparsity.patterns import NM
from tests.support.oracles.ffn_cases import (
    SCALES,
    TWO_FOUR,
    jitted,
    make_experts,
    make_inputs,
    name_of,
    oracle,
    representative_sparsities,
)
from tests.support.oracles.ffn_oracle import soft_threshold

# one compilation instead of one for each of its operations
jitted_pack = jax.jit(pack_ffn, static_argnames=("sparsity", "dtype"))
SPARSE = FFNSparsity(weights=TWO_FOUR)
WITH_WEIGHTS = [s for s in representative_sparsities() if s.weights]


def pack(w_up, w_down, *, scales=SCALES, dtype=jnp.float32, w_gate=None):
    return jitted_pack(
        w_up,
        w_down,
        w_gate=w_gate,
        sparsity=SPARSE,
        scales=jnp.asarray(scales, jnp.float32),
        dtype=dtype,
    )


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_packed_values_are_the_scaled_soft_threshold(dtype):
    _, w_up, w_down, _ = (a.astype(np.float32) for a in make_inputs())
    packed = pack(w_up, w_down, dtype=dtype)
    # float32 subtraction and product; then one rounding to 8 bits
    tolerance = 1e-6 if dtype == jnp.float32 else 2**-8
    for got, scale, w, axis in (
        (packed.up, SCALES[0], w_up, 0),
        (packed.down, SCALES[1], w_down, 1),
    ):
        assert got.dtype == dtype and got.shape == w.shape
        np.testing.assert_allclose(
            np.asarray(decompress(got), np.float32),
            scale * soft_threshold(w, axis),
            rtol=tolerance,
            atol=1e-6,
        )


def test_packed_keeps_two_of_four_even_where_all_are_equal():
    packed = pack(jnp.ones((8, 4)), jnp.ones((4, 8)))
    np.testing.assert_array_equal(packed.up.values, np.zeros((4, 4)))
    np.testing.assert_array_equal(packed.up.metadata[:2, 0], [0, 1])
    np.testing.assert_array_equal(packed.down.metadata[0, :2], [0, 1])


@pytest.mark.parametrize("sparsity", WITH_WEIGHTS, ids=name_of)
def test_packed_beforehand_gives_the_same_bits(sparsity):
    inputs = tuple(a.astype(np.float32) for a in make_inputs())
    experts = make_experts(sparsity)
    here = jitted(sparsity, *inputs, experts)
    packed = jitted_pack(
        inputs[1],
        inputs[2],
        sparsity=sparsity,
        scales=jnp.asarray(SCALES, jnp.float32),
        dtype=jnp.float32,
    )
    before = jitted(sparsity, *inputs, experts, packed=packed)
    for ours, theirs in zip(here, before, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_stale_packed_weights_are_what_is_read():
    """GEMMs 1 and 3 read `packed`, GEMMs 2 and 4 the masters, whoever changed them."""
    x, w_up, w_down, dy = make_inputs()
    with jax.enable_x64(True):
        stale = pack(w_up, w_down, dtype=jnp.float64)
        got = jitted(SPARSE, x, 2 * w_up, 3 * w_down, dy, None, packed=stale)
    y, dx, dw_up, dw_down = oracle(SPARSE, x, w_up, w_down, dy, None)
    for ours, theirs in zip(got, (3 * y, 2 * dx, dw_up, dw_down), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-11, atol=1e-11)


def test_only_the_masters_get_a_gradient():
    x, w_up, w_down, dy = (jnp.asarray(a, jnp.float32) for a in make_inputs())
    packed = pack(w_up, w_down)

    def loss(scales, values):
        given = packed._replace(up=dataclasses.replace(packed.up, values=values))
        y = ffn(x, w_up, w_down, sparsity=SPARSE, packed=given)
        y += ffn(x, w_up, w_down, sparsity=SPARSE, scales=scales)
        return jnp.sum(y * dy)

    of_scales, of_values = jax.grad(loss, argnums=(0, 1))(
        jnp.asarray(SCALES), packed.up.values
    )
    np.testing.assert_array_equal(of_scales, np.zeros(2))
    np.testing.assert_array_equal(of_values, np.zeros(packed.up.values.shape))


def test_stacked_layers_are_packed_one_by_one():
    layers = [make_inputs(seed) for seed in range(3)]
    w_up, w_down = (
        np.stack([layer[i] for layer in layers]).astype(np.float32) for i in (1, 2)
    )
    scales = np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], np.float32)
    together = pack(w_up, w_down, scales=scales, w_gate=None)
    for i in range(3):
        one = pack(w_up[i], w_down[i], scales=scales[i])
        for ours, theirs in zip(
            jax.tree.leaves(together), jax.tree.leaves(one), strict=True
        ):
            np.testing.assert_array_equal(ours[i], theirs)


def test_gate_has_its_own_scale():
    _, w_up, w_down, _ = (a.astype(np.float32) for a in make_inputs())
    packed = pack(w_up, w_down, w_gate=w_up, scales=(2.0, 1.0, 1.0))
    np.testing.assert_array_equal(packed.gate.values, 2 * packed.up.values)


def test_dense_weights_are_not_packed():
    _, w_up, w_down, _ = (a.astype(np.float32) for a in make_inputs())
    for sparsity in (DENSE, FFNSparsity(activations=NM(2, 4))):
        scales = jnp.asarray(SCALES)
        packed = pack_ffn(
            w_up, w_down, sparsity=sparsity, scales=scales, dtype=jnp.float32
        )
        assert packed is None


def test_one_scale_for_each_weight():
    _, w_up, w_down, _ = make_inputs()
    with pytest.raises(ValueError, match="3 scales for 2 weight matrices"):
        pack(w_up, w_down, scales=(1.0, 1.0, 1.0))
    with pytest.raises(ValueError, match="2 scales for 3 weight matrices"):
        pack(w_up, w_down, w_gate=w_up)


def test_what_is_read_dense_is_rounded_once():
    _, w_up, w_down, _ = (a.astype(np.float32) for a in make_inputs())
    for gate, sparsity in ((None, DENSE), (w_up, FFNSparsity(weights=NM(2, 4)))):
        scales = jnp.ones(2 if gate is None else 3)
        packed = pack_ffn(
            w_up,
            w_down,
            w_gate=gate,
            sparsity=sparsity,
            scales=scales,
            dtype=jnp.bfloat16,
        )
        assert (packed.up is None) == sparsity.is_dense
        copies = zip((w_up, w_down, gate), packed.dense, strict=True)
        for weight, copy in copies:
            if weight is not None:
                expected = weight.astype(jnp.bfloat16)
                np.testing.assert_array_equal(copy, expected)
                assert copy.dtype == jnp.bfloat16


@pytest.mark.parametrize("given", ["dense", "fp8"])
def test_weights_packed_for_another_call_are_refused(given):
    x, w_up, w_down, _ = (a.astype(np.float32) for a in make_inputs())
    x = x.astype(jnp.bfloat16)
    precision = "fp8" if given == "fp8" else "dtype"
    packed = pack_ffn(
        w_up, w_down, sparsity=DENSE, precision=precision, dtype=jnp.bfloat16
    )
    with pytest.raises(ValueError, match=r"packed.up is .* by pack_ffn"):
        ffn(x, w_up, w_down, sparsity=FFNSparsity(weights=NM(2, 4)), packed=packed)
    other = "dtype" if given == "fp8" else "fp8"
    if other == "fp8":
        with pytest.raises(ValueError, match="reads weights in 8-bit floats"):
            ffn(x, w_up, w_down, precision=other, packed=packed)
