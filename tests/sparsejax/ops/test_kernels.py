"""Sets of kernels: another one is a line in the registry; foreign packs are refused."""

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.device import CPU, Device
from sparsejax.feed_forward.ffn import ffn
from sparsejax.feed_forward.gated_ffn import GatedFFNSpec, gated_ffn
from sparsejax.feed_forward.operands.weights import pack_ffn
from sparsejax.feed_forward.plan import FFNPlan, _kernels_of
from sparsejax.feed_forward.sparsity import FFNSparsity
from sparsejax.feed_forward.spec import FFNSpec
from sparsejax.ops.kernels import registry
from sparsejax.ops.kernels.hopper import HopperKernels
from sparsejax.ops.kernels.hopper_lookups import one_by_one, rows_in_one_call
from sparsejax.routing.routers import ActivationEnergy
from sparsejax.sparsity.compressed import compress
from sparsejax.sparsity.packed import WGMMA_ORDER, Layout, pack
from sparsejax.sparsity.patterns import NM, VNM
from tests.support.devices import hopper

KERNEL_CALL, LOOP = "custom_call @mosaic_gpu", "stablehlo.while"
TWO_FOUR = NM(2, 4)
ALL_SIX = FFNSparsity(
    weights=TWO_FOUR, activations=TWO_FOUR, token_sparsity="magnitude"
)
SKIPPED = FFNSparsity(
    weights=TWO_FOUR,
    activations=VNM(64, 2, 8),
    skip_blocks=True,
    weight_gradients="expert_columns",
)
BY_ENERGY = replace(SKIPPED, skip_blocks=False, router=ActivationEnergy())


def _inverted(c):
    packed = WGMMA_ORDER.pack(c)
    return replace(packed, metadata=~packed.metadata, layout=INVERTED)


def _from_inverted(p):
    ours = replace(p, metadata=~p.metadata, layout=WGMMA_ORDER)
    return WGMMA_ORDER.unpack(ours)


INVERTED = Layout("inverted words", _inverted, _from_inverted)
"""An order that is read as other positions where it is taken for Hopper's."""


@dataclass(frozen=True)
class OfAnotherDevice(hopper.PlainKernels):
    """A second set: plain JAX for a CPU, faster than dense by its own account, with an
    order of its own."""

    name = "of_another_device"
    layout = INVERTED

    def why_slower(self, gemm):
        return None

    def times(self, gemm):
        return None


@pytest.fixture
def second(monkeypatch) -> list[str]:
    """The kernels that the second set was asked for."""
    calls: list[str] = []
    jax.clear_caches()
    registered = registry.Registered(
        name="of_another_device",
        why_unavailable=lambda device: None if device.platform == "cpu" else "no CPU",
        load=lambda device: OfAnotherDevice(hopper.H200, calls=calls),
    )
    monkeypatch.setattr(registry, "REGISTERED", (*registry.REGISTERED, registered))
    return calls


def test_a_second_set_is_a_line_in_the_registry(second):
    assert registry.names()[-1] == "of_another_device"
    assert isinstance(registry.kernels_of(CPU, "of_another_device"), OfAnotherDevice)
    assert registry.name_for(hopper.H200) == "mosaic_sm90"
    assert registry.kernels_of(hopper.A100) is None
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (256, 128), jnp.bfloat16)
    w_up = jax.random.normal(keys[1], (128, 512)) / 11
    w_down = jax.random.normal(keys[2], (512, 128)) / 22
    run = partial(ffn, sparsity=ALL_SIX, scales=jnp.asarray([1.3, 1.5]))
    got, pull_back = jax.vjp(run, x, w_up, w_down)
    expected, expected_back = jax.vjp(
        partial(run, backend="reference"), x, w_up, w_down
    )
    pairs = zip((got, *pull_back(x)), (expected, *expected_back(x)), strict=True)
    for ours, theirs in pairs:
        ours, theirs = (np.asarray(a, np.float64) for a in (ours, theirs))
        assert np.linalg.norm(ours - theirs) <= 2**-7 * np.linalg.norm(theirs)
    assert {"compress", "keep_features of a product", "keep_tokens"} <= set(second)


OWN_ORDER = {
    "weights": FFNSparsity(weights=TWO_FOUR),
    "activations": FFNSparsity(activations=TWO_FOUR),
    "two_four": FFNSparsity(weights=TWO_FOUR, activations=TWO_FOUR),
    "all_six": ALL_SIX,
    "skipped": SKIPPED,
    "by_energy": BY_ENERGY,
}


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("name", OWN_ORDER)
def test_what_a_set_packs_is_read_in_its_order_alone(name, gated, second):
    """Forward and backward are those of XLA but for rounding, with weights that the
    call packs, with those that `pack_ffn` has packed, and with those that it has only
    compressed."""
    sparsity = OWN_ORDER[name]
    keys = jax.random.split(jax.random.key(0), 4)
    x = jax.random.normal(keys[0], (128, 128), jnp.bfloat16)
    w_up, w_gate = (jax.random.normal(key, (128, 256)) / 11 for key in keys[1:3])
    w_down = jax.random.normal(keys[3], (256, 128)) / 16
    weights = (w_up, w_down)
    scales = jnp.asarray([1.3, 1.2, 1.1] if gated else [1.3, 1.1])
    run, how = ffn, {"sparsity": sparsity, "scales": scales}
    if gated:
        run, weights = gated_ffn, (w_gate, w_up, w_down)
        how["activation"] = "reglu2"
    if sparsity.skip_blocks:
        how["expert_index"] = jnp.arange(128)[:, None] % sparsity.experts

    def results(backend, packed=None):
        call = partial(run, backend=backend, packed=packed, **how)
        y, pull_back = jax.vjp(call, x, *weights)
        return (y, *pull_back(x))

    expected = results("xla")
    made = dict(scales=scales, sparsity=sparsity, dtype=jnp.bfloat16)
    made["w_gate"] = w_gate if gated else None
    for packed in (
        None,
        *(pack_ffn(w_up, w_down, backend=b, **made) for b in (None, "xla")),
    ):
        for ours, theirs in zip(results(None, packed), expected, strict=True):
            ours, theirs = (np.asarray(a, np.float64) for a in (ours, theirs))
            error = np.linalg.norm(ours - theirs) / np.linalg.norm(theirs)
            assert error <= 2**-7, (name, error)
    assert second


FIRST = OfAnotherDevice(hopper.H200)


def test_gemms_of_one_ffn_run_on_one_set(monkeypatch, second):
    """A plan holds the set that was decided for, and GEMMs on two sets are refused."""
    (other,) = (of for of in registry.REGISTERED if of.name == "of_another_device")
    first = replace(other, name="first", load=lambda device: FIRST)
    monkeypatch.setattr(registry, "REGISTERED", (first, other))
    shapes = (128, 128), (128, 256), (256, 128)
    x, *weights = map(jnp.ones, shapes)
    spec = FFNSpec.of(x.astype(jnp.bfloat16), *weights, SKIPPED)
    for name in ("first", "of_another_device"):
        plan = FFNPlan.of(spec, name)
        assert {of.backend for of in plan.gemms if of.on_kernels} == {name}
        assert (plan.kernels is FIRST) == (name == "first")
    first_of_all = replace(plan.up, backend="first")
    mixed = [first_of_all, *plan.gemms[1:]]
    with pytest.raises(NotImplementedError, match="'first' and 'of_another_device'"):
        _kernels_of(mixed)


def test_what_was_packed_in_another_order_is_refused():
    x = jax.random.normal(jax.random.key(0), (64, 64), jnp.bfloat16)
    ours = pack(compress(x, TWO_FOUR))
    assert ours.layout == WGMMA_ORDER
    tcgen05 = Layout("tcgen05", WGMMA_ORDER.pack, WGMMA_ORDER.unpack)
    foreign = replace(ours, layout=tcgen05)
    assert jax.tree.structure(ours) != jax.tree.structure(foreign)
    on_hopper = HopperKernels(hopper.H200)
    for call in (
        lambda: on_hopper.matmul(foreign, x, b_k_major=False, transpose_out=False),
        lambda: on_hopper.weight_gradient(
            foreign, x, transpose_out=True, residual_rows=0
        ),
        lambda: on_hopper.matmul_keep_features(x, foreign, None),
        lambda: on_hopper.matmul_activation_gradient(x, ours, foreign, None),
        lambda: on_hopper.activation_gradient(x, foreign, None, by_token=False),
        lambda: on_hopper.gated_gradients(x, ours, foreign),
        lambda: on_hopper.keep_tokens(foreign, None, by_segments=True),
        lambda: on_hopper.over_tokens(ours, foreign, None, None, by_segments=True),
    ):
        with pytest.raises(ValueError, match="packed in the order 'tcgen05' cannot"):
            call()


@pytest.mark.newest_jax
def test_under_vmap_one_kernel_follows_the_other():
    on_hopper = HopperKernels(hopper.H200)
    shapes = [(3, 128, 256), (3, 256, 128), (3, 1, 4, 128)]
    y_up, b = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes[:2])

    @jax.vmap
    def run(y_up, b):
        kept = on_hopper.keep_features(y_up, None, by_token=False)
        return on_hopper.matmul(kept.a, b, b_k_major=False, transpose_out=False)

    text = jax.jit(run).trace(y_up, b).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count(KERNEL_CALL) == text.count(LOOP) == 2


@pytest.mark.newest_jax
def test_under_vmap_over_tokens_alone_one_kernel_takes_all_rows():
    """So it is with two vmaps. With a weight for each, one kernel follows the other."""
    on_hopper = HopperKernels(hopper.H200)

    def run(w, x):
        packed = pack(compress(w, TWO_FOUR))
        return on_hopper.matmul(packed, x, b_k_major=True, transpose_out=True)

    def lowered(run, *shapes):
        operands = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
        traced = jax.jit(run).trace(*operands)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
        return traced.out_info.shape, text.count(KERNEL_CALL), text.count(LOOP)

    shared = partial(jax.vmap, in_axes=(None, 0))
    of_all = lowered(shared(shared(run)), (512, 256), (2, 3, 96, 256))
    assert of_all == ((2, 3, 96, 512), 1, 0)
    of_each = lowered(jax.vmap(run), (3, 512, 256), (3, 96, 256))
    assert of_each == ((3, 96, 512), 1, 1)


def test_rows_of_one_call_are_those_of_each():
    """They come in the order of the batch, also where another operand is mapped."""
    rng = np.random.default_rng(0)
    w, x = rng.integers(-8, 9, (2, 4, 5)), rng.integers(-8, 9, (2, 3, 7, 5))

    def kernel(w, x, *, scale):
        assert (w.ndim, x.ndim) == (2, 2)
        return scale * (x @ w.T)

    run = rows_in_one_call(kernel, scale=2)
    expected = [[2 * x[i, j] @ w[i].T for j in range(3)] for i in range(2)]
    of_one = jax.vmap(run, (None, 0))(w[0], x[0])
    np.testing.assert_array_equal(of_one, expected[0])
    of_both = jax.vmap(jax.vmap(run, (None, 0)))(w, x)
    np.testing.assert_array_equal(of_both, expected)


def test_a_kernel_is_traced_once_for_all_calls_alike():
    """By sets that are loaded anew for every call, too."""
    traced = []

    def kernel(x, *, kernels, scale):
        traced.append(kernels)
        return scale * x

    def run(x):
        for scale in (2, 2, 3, 2):
            kernels = HopperKernels(hopper.H200)
            x = one_by_one(kernel, kernels=kernels, scale=scale)(x)
        return x

    jax.jit(run).lower(jnp.ones(4))
    assert len(traced) == 2


# The plan.


def spec(sparsity: FFNSparsity, device: Device = hopper.H200) -> FFNSpec:
    return FFNSpec(
        tokens=256,
        d_model=128,
        d_hidden=512,
        dtype="bfloat16",
        sparsity=sparsity,
        device=device,
    )


@pytest.mark.parametrize(
    ("sparsity", "up_writes_a", "d_hidden_writes_dy_up", "over_tokens", "row_tile"),
    [
        (ALL_SIX, True, True, True, None),
        (replace(ALL_SIX, weights=None), False, False, True, None),
        (replace(ALL_SIX, token_sparsity=None), True, True, False, None),
        (SKIPPED, True, True, False, 128),
        (BY_ENERGY, False, True, False, 128),
    ],
)
def test_a_plan_says_what_is_packed_and_fused(
    sparsity, up_writes_a, d_hidden_writes_dy_up, over_tokens, row_tile
):
    plan = FFNPlan.of(spec(sparsity), "mosaic_sm90")
    assert plan.packs_activations and plan.kernels == HopperKernels(hopper.H200)
    assert plan.up_writes_a == up_writes_a
    assert plan.d_hidden_writes_dy_up == d_hidden_writes_dy_up
    assert plan.over_tokens == over_tokens and plan.row_tile == row_tile
    assert plan.gemms == spec(sparsity).explain("mosaic_sm90")
    again = FFNPlan.of(spec(sparsity), "mosaic_sm90")
    assert plan == again and hash(plan) == hash(again)
    on_xla = FFNPlan.of(spec(sparsity), "xla")
    assert on_xla.kernels is None and on_xla != plan
    assert not (on_xla.up_writes_a or on_xla.d_hidden_writes_dy_up)
    assert not on_xla.over_tokens
    assert on_xla.row_tile == (None if row_tile is None else 64)


def test_a_gated_plan_has_all_nine_gemms():
    call = GatedFFNSpec(
        tokens=256,
        d_model=128,
        d_hidden=512,
        dtype="bfloat16",
        sparsity=ALL_SIX,
        device=hopper.H200,
        activation="reglu2",
    )
    plan = FFNPlan.of(call, "mosaic_sm90")
    assert [of.spec.name[:2] for of in plan.gemms] == [
        "1a", "1b", "2 ", "3 ", "4a", "4b", "5a", "5b", "6 "
    ]  # fmt: skip
    assert all(getattr(plan, str(of.spec.role)) is of for of in plan.gemms)
    assert plan.activation.name == "reglu2" and plan.over_tokens
    assert not (plan.up_writes_a or plan.d_hidden_writes_dy_up)
