"""FFNs whose 2:4 weights are read by the Hopper kernels: choice, packing, values."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from pallas_kernels import tuning
from pallas_kernels.device import CPU
from pallas_kernels.tuned_gemm import TunedGemm
from sparsejax.feed_forward.ffn import ffn
from sparsejax.feed_forward.gated_ffn import gated_ffn
from sparsejax.feed_forward.operands.weights import pack_ffn
from sparsejax.feed_forward.sparsity import FFNSparsity
from sparsejax.feed_forward.spec import FFNSpec
from sparsejax.models.sparse_ffn import SparseFFN
from sparsejax.ops.sparse_matmul import explain_sparse_matmul, sparse_matmul
from sparsejax.sparsity.compressed import Compressed
from sparsejax.sparsity.packed import Packed
from sparsejax.sparsity.patterns import NM, VNM
from tests.support.devices import hopper

D, F, T = 64, 128, 24
WEIGHTS = FFNSparsity(weights=NM(2, 4))


@pytest.fixture
def calls(monkeypatch):
    # Tiny GEMMs are not chosen unasked, and no test GPU was tuned.
    monkeypatch.setattr(tuning, "LEAST_FLOPS", 0)
    monkeypatch.setattr(tuning, "entries", lambda kind: {})
    return hopper.pretend(monkeypatch)


def operands(gated: bool = False):
    keys = jax.random.split(jax.random.key(0), 4)
    x = jax.random.normal(keys[0], (T, D), jnp.bfloat16)
    into = [jax.random.normal(key, (D, F)) / 8 for key in keys[1:3]]
    weights = [*into[: 1 + gated], jax.random.normal(keys[3], (F, D)) / 8]
    return x, weights, jnp.linspace(1.2, 1.6, len(weights))


def spec(**changes) -> FFNSpec:
    facts = {
        "tokens": 4096,
        "d_model": 2048,
        "d_hidden": 8192,
        "dtype": "bfloat16",
        "sparsity": WEIGHTS,
        "device": hopper.H200,
    }
    return FFNSpec(**facts | changes)


# The choice.


def test_gemms_one_and_three_take_the_kernel(untuned):
    decisions = spec().explain()
    assert [d.backend for d in decisions] == [
        "mosaic_sm90",
        "xla",
        "mosaic_sm90",
        "xla",
        "xla",
        "xla",
    ]
    assert [d.executed_share for d in decisions] == [0.5, 1.0, 0.5, 1.0, 1.0, 1.0]
    assert decisions[0].reason == "the first that can run it"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"device": hopper.A100}, "needs a Hopper GPU, not NVIDIA A100"),
        ({"device": CPU}, "needs a Hopper GPU, not cpu"),
        ({"d_model": 2080}, "k=2080 is not a multiple of 64"),
        ({"d_hidden": 8200}, "m=8200, .* is not a multiple of 64"),
        ({"dtype": "float32"}, "multiplies bfloat16 and float16, not float32"),
        ({"tokens": 4}, r"too small to gain .* 4 tokens x 2048 x 8192"),
    ],
)
def test_what_the_kernel_leaves_to_xla_is_told(untuned, changes, reason):
    decision = spec(**changes).explain()[0]
    assert decision.backend == "xla"
    assert decision.path == "dense GEMM over the masked weight; skips nothing"
    assert re.search(f"mosaic_sm90: {reason}", decision.reason)


def test_a_named_kernel_runs_the_sparse_gemms_alone(untuned):
    decisions = spec(tokens=4).explain("mosaic_sm90")
    assert [d.backend for d in decisions][:2] == ["mosaic_sm90", "xla"]


@pytest.mark.parametrize("faster", [True, False])
def test_it_is_never_chosen_where_it_lost(monkeypatch, faster):
    gemm = TunedGemm(tokens=2048, d_in=2048, d_out=8192)
    known = (
        hopper.timed(gemm, 80.0, 100.0) if faster else hopper.timed(gemm, 120.0, 100.0)
    )
    monkeypatch.setattr(tuning, "entries", lambda kind: {gemm: known})
    decision = spec().explain()[0]
    assert decision.backend == ("mosaic_sm90" if faster else "xla")
    # Both times are shown whatever was chosen, for the 4096 tokens asked about.
    assert decision.times.estimated_from is None
    assert decision.times.kernel_us == 2 * known.sparse_us
    assert decision.times.dense_us == 2 * known.dense_us
    assert decision.times.packing_us == known.pack_us
    if not faster:
        assert "measured slower: 120.0 us, dense 100.0 us" in decision.reason
    assert spec().explain("mosaic_sm90")[0].backend == "mosaic_sm90"
    # Four times the tokens are too far from what was measured, and then an estimate;
    # nothing is estimated from a larger one.
    decision = spec(tokens=4 * 2048 + 1).explain()[0]
    assert decision.times.estimated_from == "2048 tokens x 2048 x 8192"
    assert (decision.backend == "mosaic_sm90") == faster
    if not faster:
        assert "estimated slower, or faster by less than" in decision.reason
    assert spec(tokens=512).explain()[0].times is None


# Values.


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("packed_before", [False, True])
def test_values_and_gradients_are_those_of_the_reference(calls, gated, packed_before):
    x, weights, scales = operands(gated)
    op = gated_ffn if gated else ffn
    w_gate = weights[0] if gated else None
    target = jax.random.normal(jax.random.key(9), (T, D), jnp.bfloat16)

    def run(x, weights, backend):
        packed = None
        if packed_before:
            packed = pack_ffn(
                *weights[-2:],
                w_gate=w_gate,
                sparsity=WEIGHTS,
                scales=scales,
                dtype=x.dtype,
                backend=backend,
            )
            kind = Packed if backend is None else Compressed
            sparse = [packed.up, packed.down] + [packed.gate] * gated
            assert all(isinstance(c, kind) for c in sparse)
        options = {"packed": packed, "scales": scales, "backend": backend}
        y = op(x, *weights, sparsity=WEIGHTS, **options)
        return jnp.sum((y * target).astype(jnp.float32)), y

    step = jax.jit(
        jax.value_and_grad(run, argnums=(0, 1), has_aux=True), static_argnums=2
    )
    (_, y), (dx, dw) = step(x, weights, None)
    # Equal products are traced once.
    assert calls.count("compress") == (3 if gated else 2)
    assert "sparse_matmul" in calls
    calls.clear()
    (_, want), (want_dx, want_dw) = step(x, weights, "reference")
    assert calls == []
    # bfloat16 rounds the hidden layer: 2**-8, times the few roundings in a row.
    for got, expected in zip(
        jax.tree.leaves((y, dx, dw)),
        jax.tree.leaves((want, want_dx, want_dw)),
        strict=True,
    ):
        got, expected = (np.asarray(a, np.float64) for a in (got, expected))
        assert np.linalg.norm(got - expected) <= 2**-7 * np.linalg.norm(expected)


def test_composes_with_vmap_scan_and_remat(calls):
    x, weights, scales = operands()
    run = partial(ffn, sparsity=WEIGHTS, scales=scales)
    alone = run(x, *weights)
    stacked = [jnp.stack([w, w]) for w in weights]
    mapped = jax.vmap(run)(jnp.stack([x, x]), *stacked)
    np.testing.assert_array_equal(mapped[1], alone)

    def layer(x, weights):
        return jax.checkpoint(run)(x, *weights), None

    scanned, _ = jax.lax.scan(layer, x, stacked)
    np.testing.assert_array_equal(scanned, run(alone, *weights))
    gradient = jax.grad(lambda x: jnp.sum(jax.lax.scan(layer, x, stacked)[0] ** 2))(x)
    assert bool(jnp.all(jnp.isfinite(gradient.astype(jnp.float32))))


def test_the_layer_packs_for_the_kernel_without_a_dense_copy(calls):
    layer = SparseFFN(D, F, dtype=jnp.bfloat16, sparsity=WEIGHTS, rngs=nnx.Rngs(0))
    packed = layer.weights_as_read()
    assert isinstance(packed.up, Packed) and packed.up.shape == (F, D)
    assert isinstance(packed.down, Packed) and packed.down.shape == (F, D)
    held = sum(leaf.nbytes for leaf in jax.tree.leaves((packed.up, packed.down)))
    assert held * 16 == 9 * 2 * D * F * 2
    assert calls.count("compress") == 2
    # Beside it the two weights that GEMMs 2 and 4 read, rounded once.
    copies = jax.tree.leaves(packed.dense)
    assert [copy.dtype for copy in copies] == 2 * [jnp.bfloat16]


# Packings, and products: forward, again for remat, backward.
@pytest.mark.parametrize(
    ("activation", "kernels"), [("relu2", 2 + 3), ("swiglu", 3 + 2 + 2 + 1)]
)
def test_a_training_step_of_two_layers_lowers_for_hopper(
    monkeypatch, activation, kernels
):
    """With the kernels themselves, which only a GPU can run."""
    jax.clear_caches()  # of traces made with the emulated ones
    hopper.see_device(monkeypatch)
    monkeypatch.setattr(tuning, "LEAST_FLOPS", 0)

    def step(weights, scales, x):
        def loss(weights):
            packed = pack_ffn(
                *weights[-2:],
                w_gate=weights[0] if activation == "swiglu" else None,
                sparsity=WEIGHTS,
                scales=scales,
                dtype=x.dtype,
            )
            op = gated_ffn if activation == "swiglu" else ffn

            @jax.checkpoint
            def layer(x, both):
                weights, packed = both
                return op(x, *weights, sparsity=WEIGHTS, packed=packed), None

            y, _ = jax.lax.scan(layer, x, (weights, packed))
            return jnp.sum(y.astype(jnp.float32) ** 2)

        return jax.value_and_grad(loss)(weights)

    x, weights, scales = operands(gated=activation == "swiglu")
    stacked = [jnp.stack([w, w]) for w in weights]
    arguments = stacked, jnp.stack([scales, scales]), x
    traced = jax.jit(step).trace(*arguments)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == kernels


@pytest.mark.parametrize("skip_blocks", [True, False])
@pytest.mark.parametrize("neurons", [64, 32])
def test_experts_of_whole_blocks_are_packed_for_the_kernel(calls, neurons, skip_blocks):
    """W1 for all neurons at once, where no block is skipped."""
    _, weights, scales = operands()
    experts = weights[0].shape[1] // neurons
    sparsity = FFNSparsity(
        weights=NM(2, 4),
        activations=VNM(8, 2, 4 * experts),
        skip_blocks=skip_blocks,
        weight_gradients="expert_columns",
    )
    packed = pack_ffn(*weights, sparsity=sparsity, scales=scales, dtype=jnp.bfloat16)
    down = neurons == 64
    up = down or not skip_blocks
    assert isinstance(packed.up, Packed if up else Compressed)
    assert isinstance(packed.down, Packed if down else Compressed)
    assert calls == ["compress"] * (up + down)


def test_the_public_operation_takes_packed_weights_and_is_exact(calls):
    x, (w_up, _), scales = operands()
    packed = pack_ffn(
        w_up, w_up.T, sparsity=WEIGHTS, scales=scales, dtype=jnp.bfloat16
    ).up
    assert explain_sparse_matmul(x, packed).backend == "mosaic_sm90"

    def loss(x, packed, backend):
        y = sparse_matmul(x, packed, backend=backend)
        return jnp.sum(jnp.sin(y.astype(jnp.float32)))

    gradients = [
        jax.grad(loss, argnums=(0, 1), allow_int=True)(x, packed, backend)
        for backend in (None, "reference")
    ]
    (dx, dw), (want_dx, want_dw) = gradients
    np.testing.assert_array_equal(dx, want_dx)
    np.testing.assert_array_equal(dw.values, want_dw.values)
    assert dw.values.shape == packed.values.shape


# On a GPU, with the kernels themselves.


@pytest.mark.gpu
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("tokens", [1, 300, 1024])
def test_an_ffn_on_a_gpu_is_that_of_the_reference(monkeypatch, gated, tokens):
    monkeypatch.setattr(tuning, "LEAST_FLOPS", 0)
    keys = jax.random.split(jax.random.key(0), 5)
    d_model, d_hidden = 256, 1088
    x, dy = (
        jax.random.normal(key, (tokens, d_model), jnp.bfloat16) for key in keys[:2]
    )
    into = [jax.random.normal(key, (d_model, d_hidden)) / 16 for key in keys[2:4]]
    weights = [
        *into[: 1 + gated],
        jax.random.normal(keys[4], (d_hidden, d_model)) / 32,
    ]
    scales = jnp.linspace(1.2, 1.6, len(weights))
    op = gated_ffn if gated else ffn

    @partial(jax.jit, static_argnums=0)
    def step(backend, x, weights, dy):
        run = partial(op, sparsity=WEIGHTS, scales=scales, backend=backend)
        y, pull_back = jax.vjp(run, x, *weights)
        return y, pull_back(dy)

    got, again = step(None, x, weights, dy), step(None, x, weights, dy)
    expected = step("reference", x, weights, dy)
    assert "mosaic_gpu" in step.lower(None, x, weights, dy).as_text()
    for ours, repeated, theirs in zip(
        *(jax.tree.leaves(tree) for tree in (got, again, expected)), strict=True
    ):
        np.testing.assert_array_equal(ours, repeated)
        ours, theirs = (np.asarray(a, np.float64) for a in (ours, theirs))
        # As on the emulated kernels: bfloat16's roundings in a row.
        assert np.linalg.norm(ours - theirs) <= 2**-7 * np.linalg.norm(theirs)
