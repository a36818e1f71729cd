"""What an FFN packs and sorts for Hopper's kernels, on a mesh of eight devices against
one."""

from dataclasses import replace
from functools import lru_cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import tuning
from sparsejax.feed_forward.ffn import ffn
from sparsejax.feed_forward.gated_ffn import gated_ffn
from sparsejax.feed_forward.operands.weights import pack_ffn
from sparsejax.feed_forward.sparsity import FFNSparsity
from sparsejax.routing.routers import (
    ActivationEnergy,
    ActivationEnergyFP8,
    TokenHash,
)
from sparsejax.sparsity.packed import Packed
from sparsejax.sparsity.patterns import NM, VNM
from tests.support.devices import hopper
from tests.support.devices.eight_devices import MESHES, layout_of

TOKENS, D_MODEL, D_HIDDEN = 32, 64, 1024
WEIGHTS = FFNSparsity(weights=NM(2, 4))


@pytest.fixture(autouse=True)
def calls(monkeypatch):
    monkeypatch.setattr(tuning, "LEAST_FLOPS", 0)
    monkeypatch.setattr(tuning, "entries", lambda kind: {})
    return hopper.pretend(monkeypatch)


def operands(gated: bool):
    keys = jax.random.split(jax.random.key(0), 5)
    x, dy = (
        jax.random.normal(key, (TOKENS, D_MODEL), jnp.bfloat16) for key in keys[:2]
    )
    weights = [
        jax.random.normal(key, (D_MODEL, D_HIDDEN)) / 8 for key in keys[2 : 3 + gated]
    ]
    weights.append(jax.random.normal(keys[4], (D_HIDDEN, D_MODEL)) / 32)
    return x, weights, jnp.linspace(1.2, 1.6, len(weights)), dy


def value_and_gradients(layout, gated: bool, x, weights, scales, dy):
    packed = pack_ffn(
        *weights[-2:],
        w_gate=weights[0] if gated else None,
        sparsity=WEIGHTS,
        scales=scales,
        dtype=x.dtype,
        layout=layout,
    )
    op = gated_ffn if gated else ffn
    run = partial(op, sparsity=WEIGHTS, packed=packed, layout=layout)
    y, pull_back = jax.vjp(run, x, *weights)
    return packed, y, pull_back(dy)


packed_step = jax.jit(value_and_gradients, static_argnums=(0, 1))


@lru_cache
def packed_step_of_one_device(gated: bool):
    return packed_step(None, gated, *operands(gated))


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("gated", [False, True])
def test_packs_and_multiplies_as_one_device_does(calls, mesh, gated):
    got = packed_step(layout_of(MESHES[mesh]), gated, *operands(gated))
    assert set(calls) == {"compress", "sparse_matmul"}
    packed, *results = got
    expected_packed, *expected = packed_step_of_one_device(gated)
    assert isinstance(packed.up, Packed)
    for ours, theirs in zip(
        jax.tree.leaves(packed), jax.tree.leaves(expected_packed), strict=True
    ):
        np.testing.assert_array_equal(ours, theirs)
    for ours, theirs in zip(
        jax.tree.leaves(results), jax.tree.leaves(expected), strict=True
    ):
        ours, theirs = (np.asarray(a, np.float64) for a in (ours, theirs))
        # Partial sums over the neurons are rounded to bfloat16 on each device.
        assert np.linalg.norm(ours - theirs) <= 2**-8 * np.linalg.norm(theirs)


EXPERTS = FFNSparsity(
    weights=NM(2, 4),
    activations=VNM(8, 2, 32),
    router=ActivationEnergy(),
    experts_per_token=2,
    weight_gradients="expert_columns",
)


def step_with_experts(layout, skip_blocks: bool):
    x, weights, scales, dy = operands(gated=False)
    sparsity, expert_index = EXPERTS, None
    if skip_blocks:
        sparsity = replace(sparsity, skip_blocks=True, router=TokenHash())
        expert_index = TokenHash().choose(
            jnp.arange(TOKENS), experts=8, experts_per_token=2
        )
    run = partial(
        ffn,
        sparsity=sparsity,
        scales=scales,
        expert_index=expert_index,
        layout=layout,
        backend="mosaic_sm90",
    )
    y, pull_back = jax.vjp(run, x, *weights)
    return y, *pull_back(dy)


@lru_cache
def step_with_experts_of_one_device(skip_blocks: bool):
    return jax.jit(partial(step_with_experts, None, skip_blocks))()


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("skip_blocks", [False, True])
def test_experts_packed_on_every_device_compute_what_one_device_does(
    calls, mesh, skip_blocks
):
    """Rows packed for the kernels on each device: its tokens, for its experts."""
    got = jax.jit(partial(step_with_experts, layout_of(MESHES[mesh]), skip_blocks))()
    assert {"compress", "keep_features", "backward", "sparse_rows"} <= set(calls)
    assert ("sparse_weights" if skip_blocks else "sparse_matmul") in calls
    expected = step_with_experts_of_one_device(skip_blocks)
    for ours, theirs in zip(got, expected, strict=True):
        ours, theirs = (np.asarray(a, np.float64) for a in (ours, theirs))
        # Partial sums over the experts are rounded to bfloat16 on each device.
        assert np.linalg.norm(ours - theirs) <= 2**-8 * np.linalg.norm(theirs)


JOINED = FFNSparsity(
    activations=VNM(128, 4, 16),
    router=ActivationEnergy(),
    experts_per_token=3,
    weight_gradients="expert_columns",
)


SKIPPED = replace(JOINED, router=ActivationEnergyFP8(), skip_blocks=True)
GIVEN = replace(JOINED, router=TokenHash(), skip_blocks=True)


def step_with_joined_experts(layout, sparsity):
    """A step of 2,048 tokens for each of eight devices, as many as four sets of three
    experts need."""
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = (8 * 2048, 128), (8 * 2048, 128), (128, 512), (512, 128)
    x, dy, up, down = (
        jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True)
    )
    up, down = up / 128**0.5, down / 512**0.5
    x, dy = (of.astype(jnp.bfloat16) for of in (x, dy))
    given = {}
    if sparsity == GIVEN:
        ids = jnp.arange(8 * 2048)
        index = TokenHash().choose(ids, experts=4, experts_per_token=3)
        given = {"expert_index": index, "distinct_experts": True}
    run = partial(ffn, sparsity=sparsity, layout=layout, **given)
    y, pull_back = jax.vjp(run, x, up, down)
    return y, *pull_back(dy)


@lru_cache
def step_with_joined_experts_of_one_device(sparsity):
    return jax.jit(partial(step_with_joined_experts, None, sparsity))()


@pytest.mark.parametrize("mesh", ["data", "fsdp", "all"])
@pytest.mark.parametrize("sparsity", [JOINED, SKIPPED, GIVEN])
def test_rows_of_all_experts_of_a_token_are_those_of_one_device(calls, mesh, sparsity):
    """On the mesh "all" a device has the neurons of two experts: there a token keeps a
    row for each."""
    layout = layout_of(MESHES[mesh])
    got = jax.jit(partial(step_with_joined_experts, layout, sparsity))()
    assert ("of several experts" in calls) == (mesh != "all")
    expected = step_with_joined_experts_of_one_device(sparsity)
    for ours, theirs in zip(got, expected, strict=True):
        ours, theirs = (np.asarray(a, np.float64) for a in (ours, theirs))
        # A row for each expert is rounded to bfloat16 by itself.
        assert np.linalg.norm(ours - theirs) <= 2**-8 * np.linalg.norm(theirs)


def dense_step(layout):
    """A step of 128 tokens for each of eight devices, on kernels that are named."""
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = (8 * 128, 128), (8 * 128, 128), (128, 1024), (1024, 128)
    x, dy, up, down = (
        jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True)
    )
    x, dy = (of.astype(jnp.bfloat16) for of in (x, dy))
    run = partial(ffn, layout=layout, backend="mosaic_sm90")
    y, pull_back = jax.vjp(run, x, up / 128**0.5, down / 32)
    return y, *pull_back(dy)


@pytest.mark.parametrize("mesh", MESHES)
def test_a_dense_ffn_on_kernels_is_that_of_one_device(calls, mesh):
    got = jax.jit(partial(dense_step, layout_of(MESHES[mesh])))()
    used = {"squared relu of dense_rows", "gradient of dense_rows"}
    assert used <= set(calls)
    expected = jax.jit(partial(dense_step, None))()
    for ours, theirs in zip(got, expected, strict=True):
        ours, theirs = (np.asarray(a, np.float64) for a in (ours, theirs))
        # Parts of a sum are rounded to bfloat16 by themselves.
        assert np.linalg.norm(ours - theirs) <= 2**-7 * np.linalg.norm(theirs)


def test_each_device_estimates_from_packed_activations_with_its_own_key(
    calls, monkeypatch
):
    """The case is that of test_ffn_layout: all devices have the same tokens, and their
    own draws."""
    # Kernels for GEMMs 2 to 4 as where they were measured faster; a named backend
    # would have to run GEMMs 5 and 6 too, which draw.
    monkeypatch.setattr(hopper.PlainKernels, "why_slower", lambda self, gemm: None)
    x, weights, _, dy = operands(gated=True)
    sparsity = FFNSparsity(activations=NM(2, 4), token_sparsity="mvue")

    @partial(jax.jit, static_argnums=0)
    def gradients(layout, x, dy, key):
        options = {"sparsity": sparsity, "key": key, "layout": layout}
        run = partial(gated_ffn, x, activation="reglu2", **options)
        return jax.vjp(run, *weights)[1](dy)

    key = jax.random.key(3)
    together = (jnp.tile(a, (8, 1)) for a in (x, dy))
    got = gradients(layout_of((4, 2, 1)), *together, key)
    assert {"keep_gated_features", "gated_backward"} <= set(calls)
    parts = [
        gradients(None, x, dy, jax.random.fold_in(key, device)) for device in range(8)
    ]
    assert not np.array_equal(parts[0][0], parts[1][0])
    for ours, *theirs in zip(got, *parts, strict=True):
        expected = sum(np.asarray(part, np.float64) for part in theirs)
        # What is drawn from is rounded to bfloat16 where a fusion ends, and the two
        # programs have other fusions. Other draws are a tenth of the norm away.
        error = np.linalg.norm(np.asarray(ours, np.float64) - expected)
        assert error <= 2**-7 * np.linalg.norm(expected)
        other = np.linalg.norm(8 * np.asarray(theirs[0], np.float64) - expected)
        assert other >= 0.1 * np.linalg.norm(expected)


def test_what_is_gathered_is_what_was_packed():
    layout = layout_of((1, 8, 1))
    x, weights, scales, _ = operands(gated=False)

    def forward(x, weights, scales):
        packed = pack_ffn(
            *weights, sparsity=WEIGHTS, scales=scales, dtype=x.dtype, layout=layout
        )
        return ffn(x, *weights, sparsity=WEIGHTS, packed=packed, layout=layout)

    text = jax.jit(forward).lower(x, weights, scales).as_text()
    gathers = [line for line in text.splitlines() if "stablehlo.all_gather" in line]
    results = [line.rsplit("->", 1)[1] for line in gathers]
    # S(W1): its values and its words; W2 dense, for GEMM 2. The rest nobody reads.
    assert sum("1024x32xui16" in result for result in results) >= 1
    assert sum("16x1x128xui32" in result for result in results) >= 1
    assert not any("1024x32xui8" in result for result in results)
