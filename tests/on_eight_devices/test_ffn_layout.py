"""The FFN split over a mesh of eight devices against the FFN of one device."""

import re
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from sparsejax import cost_model
from sparsejax.config import ModelConfig
from sparsejax.feed_forward.ffn import ffn
from sparsejax.feed_forward.gated_ffn import gated_ffn
from sparsejax.feed_forward.layout import FFNLayout, own_key
from sparsejax.feed_forward.operands.weights import pack_ffn
from sparsejax.feed_forward.sparsity import DENSE, FFNSparsity
from sparsejax.routing.routers import ActivationEnergy, NearestCentre
from sparsejax.sparsity.patterns import NM, VNM
from tests.support.devices import hopper
from tests.support.devices.eight_devices import MESHES, layout_of
from tests.support.oracles.ffn_cases import (
    D_HIDDEN,
    D_MODEL,
    all_sparsities,
    make_experts,
    make_inputs,
    name_of,
)

TOKENS = 48
TWO_FOUR = NM(2, 4)

TWO_EXPERTS_OF_EIGHT = FFNSparsity(
    weights=TWO_FOUR,
    activations=VNM(4, 2, 32),
    router=ActivationEnergy(),
    experts_per_token=2,
)
SPARSITIES = [
    s
    for s in all_sparsities()
    if s.token_sparsity is None
    and not s.exact_gradients
    and (s.weights is None or s.mask_reuse)
]
"""Every way to route and to mask; a few of them also with 2:4 weights."""
ON_EVERY_MESH = [
    DENSE,
    FFNSparsity(weights=TWO_FOUR, activations=TWO_FOUR),
    FFNSparsity(
        weights=TWO_FOUR,
        activations=VNM(4, 2, 32),
        skip_blocks=True,
        weight_gradients="expert_columns",
    ),
    TWO_EXPERTS_OF_EIGHT,
    replace(TWO_EXPERTS_OF_EIGHT, exact_gradients=True),
]


BY_ENERGY = FFNSparsity(
    activations=VNM(4, 4, 32),
    router=ActivationEnergy(),
    weight_gradients="expert_columns",
)
"""Dense inside the experts, as SwiGLU can be."""


@pytest.fixture
def double():
    with jax.enable_x64(True):
        yield


def value_and_gradients(
    sparsity, layout, x, w_up, w_down, dy, experts, key=None, backend=None
):
    def run(x, w_up, w_down):
        scales = jnp.array([1.5, 1.25], x.dtype) if sparsity.weights else None
        options = {"sparsity": sparsity, "scales": scales, "layout": layout}
        options["backend"] = backend
        return ffn(x, w_up, w_down, expert_index=experts, key=key, **options)

    y, pull_back = jax.vjp(run, x, w_up, w_down)
    return y, *pull_back(dy)


jitted = jax.jit(value_and_gradients, static_argnums=(0, 1))


def inputs_for(sparsity: FFNSparsity, seed: int = 0) -> tuple:
    arrays = [jnp.asarray(a) for a in make_inputs(seed, TOKENS)]
    experts = make_experts(sparsity, tokens=TOKENS)
    return *arrays, None if experts is None else jnp.asarray(experts, jnp.int32)


@lru_cache
def on_one_device(sparsity: FFNSparsity) -> tuple:
    """By the operation, whose programs the cases have in common; in float64."""
    return value_and_gradients(sparsity, None, *inputs_for(sparsity))


@pytest.mark.parametrize(
    ("sparsity", "mesh"),
    [
        *((s, mesh) for s in ON_EVERY_MESH for mesh in MESHES),
        *((s, "all") for s in SPARSITIES),
    ],
    ids=lambda value: value if isinstance(value, str) else name_of(value),
)
def test_a_mesh_computes_what_one_device_does(sparsity, mesh, double):
    layout = layout_of(MESHES[mesh])
    got = jitted(sparsity, layout, *inputs_for(sparsity))
    # float64 sums in another order
    chex.assert_trees_all_close(got, on_one_device(sparsity), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("mesh", ["data", "all"])
@pytest.mark.parametrize("skip_blocks", [False, True])
@pytest.mark.parametrize("backend", ["tokamax", None])
@pytest.mark.filterwarnings("ignore::sparsejax.SlowerThanDense")
def test_devices_without_kernels_compute_the_same_there(
    backend, skip_blocks, mesh, double, monkeypatch
):
    """Each device multiplies the rows of its own experts and tokens, by tokamax, or all
    neurons of its experts, by the dense GEMMs of a GPU with so few tokens."""
    sparsity = BY_ENERGY
    if skip_blocks:
        sparsity = replace(BY_ENERGY, router=NearestCentre(), skip_blocks=True)
    expected = on_one_device(sparsity)
    layout = layout_of(MESHES[mesh])
    if backend is None:
        hopper.see_device(monkeypatch, hopper.A100)
    run = jax.jit(partial(value_and_gradients, sparsity, layout, backend=backend))
    got = run(*inputs_for(sparsity))
    # float64 sums in another order
    chex.assert_trees_all_close(got, expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("mesh", ["tensor", "all"])
def test_repeated_choices_and_choices_of_no_expert_mean_the_same_there(mesh, double):
    """A device's own experts begin anywhere: what is none there must be none here."""
    sparsity = FFNSparsity(activations=VNM(4, 2, 32), experts_per_token=3)
    *arrays, _ = inputs_for(sparsity)
    choices = np.random.default_rng(0).integers(-3, 12, size=(TOKENS, 3))
    choices[:3] = [[5, 5, 0], [8, 8, -1], [7, -8, 7]]
    inputs = *arrays, jnp.asarray(choices, jnp.int32)
    expected = value_and_gradients(sparsity, None, *inputs)
    got = jitted(sparsity, layout_of(MESHES[mesh]), *inputs)
    chex.assert_trees_all_close(got, expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(
    ("sparsity", "mesh"),
    [
        (DENSE, "all"),
        *((FFNSparsity(weights=TWO_FOUR), mesh) for mesh in MESHES),
        (BY_ENERGY, "tensor"),
        (BY_ENERGY, "all"),
        (replace(BY_ENERGY, weights=TWO_FOUR, router=NearestCentre()), "all"),
    ],
)
def test_a_gated_ffn_on_a_mesh_too(sparsity, mesh, double):
    x, w_up, w_down, dy = (jnp.asarray(a) for a in make_inputs(3, TOKENS))
    w_gate = jnp.flip(w_up, axis=1) * 1.5
    experts = make_experts(sparsity, tokens=TOKENS)
    experts = None if experts is None else jnp.asarray(experts, jnp.int32)

    @partial(jax.jit, static_argnums=0)
    def run(layout, *arrays):
        scales = jnp.array([1.1, 1.2, 1.3]) if sparsity.weights else None
        options = {"scales": scales, "expert_index": experts, "layout": layout}
        f = partial(gated_ffn, sparsity=sparsity, **options)
        y, pull_back = jax.vjp(f, *arrays)
        return y, *pull_back(dy)

    arrays = (x, w_gate, w_up, w_down)
    got, expected = run(layout_of(MESHES[mesh]), *arrays), run(None, *arrays)
    chex.assert_trees_all_close(got, expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("activations", [TWO_FOUR, VNM(4, 2, 16)], ids=["a24", "venom"])
def test_groups_along_tokens_are_those_of_each_devices_tokens(activations, double):
    # As with micro-batches: the groups of a run over n parts are those of n calls.
    columns = "expert_columns" if isinstance(activations, VNM) else "dense"
    sparsity = FFNSparsity(
        activations=activations, token_sparsity="magnitude", weight_gradients=columns
    )
    x, w_up, w_down, dy, experts = inputs_for(sparsity)
    parts = [
        jitted(
            sparsity,
            None,
            x[i : i + TOKENS // 8],
            w_up,
            w_down,
            dy[i : i + TOKENS // 8],
            None if experts is None else experts[i : i + TOKENS // 8],
        )
        for i in range(0, TOKENS, TOKENS // 8)
    ]
    y, dx, dw_up, dw_down = zip(*parts, strict=True)
    expected = jnp.concatenate(y), jnp.concatenate(dx), sum(dw_up), sum(dw_down)
    layout = layout_of((4, 2, 1))
    got = jitted(sparsity, layout, x, w_up, w_down, dy, experts)
    chex.assert_trees_all_close(got, expected, rtol=1e-11, atol=1e-12)


def test_every_device_draws_for_itself():
    layout = layout_of((2, 2, 2))

    def draw(key):
        return jax.random.bits(own_key(layout, key), (1,))

    drawn = jax.shard_map(
        draw,
        mesh=layout.mesh,
        in_specs=PartitionSpec(),
        out_specs=PartitionSpec(("data", "fsdp", "tensor")),
        check_vma=False,
    )(jax.random.key(0))
    assert len(set(np.asarray(drawn).tolist())) == 8


@pytest.mark.parametrize("gated", [False, True])
def test_each_device_estimates_its_gradients_with_its_own_key(gated, double):
    """The gradients of a mesh are the sum of those of its devices' tokens, each drawn
    with the device's key. All have the same tokens, and so would draw the same."""
    sparsity = FFNSparsity(activations=TWO_FOUR, token_sparsity="mvue")
    x, w_up, w_down, dy = (jnp.asarray(a) for a in make_inputs(5, TOKENS))
    x, dy = (jnp.tile(a[: TOKENS // 8], (8, 1)) for a in (x, dy))
    weights, run = (w_up, w_down), ffn
    if gated:
        weights = (jnp.flip(w_up, axis=1), w_up, w_down)
        run = partial(gated_ffn, activation="reglu2")

    @partial(jax.jit, static_argnums=0)
    def gradients(layout, x, dy, key):
        options = {"sparsity": sparsity, "key": key, "layout": layout}
        return jax.vjp(partial(run, x, **options), *weights)[1](dy)

    key = jax.random.key(3)
    got = gradients(layout_of((4, 2, 1)), x, dy, key)
    size = TOKENS // 8
    parts = [
        gradients(None, x[:size], dy[:size], jax.random.fold_in(key, device))
        for device in range(8)
    ]
    assert not np.array_equal(parts[0][0], parts[1][0])
    expected = jax.tree.map(lambda *of_devices: sum(of_devices), *parts)
    # what is drawn is float32, sums are float64
    chex.assert_trees_all_close(got, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("method", ["mvue", "mvue_approximate"])
def test_random_estimators_run_on_a_mesh_and_repeat(method, double):
    sparsity = FFNSparsity(activations=TWO_FOUR, token_sparsity=method)
    inputs = inputs_for(sparsity)
    layout = layout_of((2, 2, 2))
    runs = [
        jitted(sparsity, layout, *inputs, jax.random.key(seed)) for seed in (1, 1, 2)
    ]
    chex.assert_trees_all_equal(runs[0], runs[1])
    assert not np.array_equal(runs[0][2], runs[2][2])
    # Only weight gradients are estimated.
    chex.assert_trees_all_equal(runs[0][:2], runs[2][:2])


@pytest.mark.parametrize("policy", ["nothing_saveable", "dots_saveable"])
def test_it_composes_with_scan_and_remat(policy, double):
    sparsity = FFNSparsity(weights=TWO_FOUR, activations=VNM(4, 2, 16))
    x, w_up, w_down, dy, experts = inputs_for(sparsity)
    layers = jnp.stack([w_up, w_up * 0.9]), jnp.stack([w_down, w_down * 1.1])

    @partial(jax.jit, static_argnums=0)
    def run(layout, x, layers):
        def layer(x, weights):
            options = {"sparsity": sparsity, "scales": jnp.array([1.5, 1.25])}
            f = partial(ffn, expert_index=experts, layout=layout, **options)
            return x + f(x, *weights), None

        layer = jax.checkpoint(
            layer, policy=getattr(jax.checkpoint_policies, policy), prevent_cse=False
        )
        f = lambda x, layers: jnp.sum(jax.lax.scan(layer, x, layers)[0] * dy)
        return jax.value_and_grad(f, argnums=(0, 1))(x, layers)

    got, expected = run(layout_of((2, 2, 2)), x, layers), run(None, x, layers)
    chex.assert_trees_all_close(got, expected, rtol=1e-11, atol=1e-12)


def gathered_bytes(
    sparsity: FFNSparsity,
    layout: FFNLayout,
    *,
    backward: bool,
    remat: bool = False,
    **how: Any,
) -> int:
    """Bytes that all-gathers of the compiled program put together, in bfloat16: of the
    forward, of the gradients alone, or with `remat` of both, the forward repeated."""
    x, w_up, w_down, dy, _ = (a for a in inputs_for(DENSE))
    x, dy = x.astype(jnp.bfloat16), dy.astype(jnp.bfloat16)
    w_up, w_down = w_up.astype(jnp.float32), w_down.astype(jnp.float32)
    scales = jnp.array([1.5, 1.25])
    how["sparsity"] = sparsity
    pack = partial(pack_ffn, scales=scales, dtype=x.dtype, **how)
    weight = NamedShardings(layout.mesh)

    def forward(x, w_up, w_down):
        packed = pack(w_up, w_down)
        return ffn(x, w_up, w_down, packed=packed, layout=layout, **how)

    def gradients(x, w_up, w_down, dy):
        run = jax.checkpoint(forward) if remat else forward
        y, pull_back = jax.vjp(run, x, w_up, w_down)
        return pull_back(dy), y if remat else None

    f, arguments = (gradients, (x, w_up, w_down, dy))
    if not backward:
        f, arguments = forward, (x, w_up, w_down)
    shardings = (weight.tokens, weight.up, weight.down, weight.tokens)
    compiled = jax.jit(f, in_shardings=shardings[: len(arguments)])
    text = compiled.lower(*arguments).compile().as_text()
    pattern = r"= (u8|u16|u32|f32|bf16)\[([\d,]+)\]\S* all-gather\("
    size = {"u8": 1, "u16": 2, "u32": 4, "f32": 4, "bf16": 2}
    gathers = re.findall(pattern, text)
    # Nothing in the program gathers in a form that the pattern does not see.
    assert len(gathers) == len(re.findall(r" all-gather(?:-start)?\(", text)) > 0
    return sum(
        size[kind] * int(np.prod([int(n) for n in shape.split(",")]))
        for kind, shape in gathers
    )


class NamedShardings:
    def __init__(self, mesh: Mesh) -> None:
        of = partial(jax.sharding.NamedSharding, mesh)
        neurons = ("tensor", "fsdp")
        self.tokens = of(PartitionSpec(("data", "fsdp")))
        self.up = of(PartitionSpec(None, neurons))
        self.down = of(PartitionSpec(neurons, None))


def test_fsdp_gathers_nine_sixteenths_of_a_two_four_weight():
    layout = layout_of((1, 8, 1))
    weight = 2 * D_MODEL * D_HIDDEN
    sparse = FFNSparsity(weights=TWO_FOUR)
    assert gathered_bytes(DENSE, layout, backward=False) == 2 * weight
    # GEMM 1 reads S(W1); GEMM 2 reads W2 itself.
    forward = gathered_bytes(sparse, layout, backward=False)
    assert forward == weight * 9 // 16 + weight
    # The backward alone: GEMM 3 reads S(W2^T), GEMM 4 reads W1; and in this program
    # the forward's Y, which nobody reads, is not computed, nor W2 gathered for it.
    both = gathered_bytes(sparse, layout, backward=True)
    assert both == (weight * 9 // 16) + (weight * 9 // 16 + weight)


def test_experts_gather_w1_as_bytes_for_gemm_1_and_whole_for_gemm_4():
    weight, layout = 2 * D_MODEL * D_HIDDEN, layout_of((1, 8, 1))
    forward, both = (
        gathered_bytes(BY_ENERGY, layout, precision="fp8", backward=backward)
        for backward in (False, True)
    )
    assert forward == weight // 2 + weight
    # W2 is read by the backward alone, in this program.
    assert both == weight // 2 + 2 * weight
    sizes = {"d_model": D_MODEL, "d_hidden": D_HIDDEN, "heads": 1, "kv_heads": 1}
    sizes |= {"precision": "fp8", "dtype": "bfloat16", "remat": "full"}
    planned = cost_model.gathered_bytes(ModelConfig(**sizes), BY_ENERGY)
    assert (planned.ffn_forward, planned.ffn_backward) == (forward, 2 * weight)
    repeated = gathered_bytes(
        BY_ENERGY, layout, precision="fp8", backward=True, remat=True
    )
    assert repeated == forward + planned.ffn_recomputed + planned.ffn_backward
    assert planned.ffn_recomputed == weight // 2


def test_no_residual_holds_a_gathered_weight():
    layout = layout_of((1, 8, 1))
    sparsity = FFNSparsity(weights=TWO_FOUR, activations=TWO_FOUR)
    x, w_up, w_down, *_ = inputs_for(sparsity)
    scales = jnp.array([1.5, 1.25])
    packed = pack_ffn(w_up, w_down, sparsity=sparsity, scales=scales, dtype=x.dtype)

    def residuals(x, w_up, w_down, packed):
        f = partial(ffn, sparsity=sparsity, packed=packed, layout=layout)
        return jax.vjp(f, x, w_up, w_down)[1]

    saved = jax.tree.leaves(jax.eval_shape(residuals, x, w_up, w_down, packed))
    given = jax.tree.leaves((x, w_up, w_down, packed))
    hidden = TOKENS * D_HIDDEN
    elements = sum(a.size for a in saved)
    assert elements == sum(a.size for a in given) + hidden
