"""The transformer: causality, the scan against a loop, remat, dtypes, sampling."""

import dataclasses
import re
from functools import partial

import chex
import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from sparsejax.config import ModelConfig
from sparsejax.feed_forward.sparsity import DENSE, FFNSparsity
from sparsejax.models.ffn_state import WeightsAsRead
from sparsejax.models.sparse_ffn import SparseFFN, sparse_ffns
from sparsejax.models.transformer import Transformer, cross_entropy
from sparsejax.routing.routers import (
    ActivationEnergy,
    ActivationEnergyFP8,
    NearestCentre,
    Router,
    TokenHash,
)
from sparsejax.sparsity.patterns import NM, VNM
from sparsejax.switches.switching import set_sparsity
from sparsejax.training.micro_batches import loss_and_gradient
from tests.support.devices.flash_attention import pretend_cudnn

TINY = ModelConfig(
    vocab_size=61, d_model=16, layers=2, heads=2, kv_heads=1, d_hidden=64
)
VENOM = VNM(4, 2, 16)
SPARSITIES = {
    "dense": DENSE,
    "weights": FFNSparsity(weights=NM(2, 4)),
    "two_four": FFNSparsity(weights=NM(2, 4), activations=NM(2, 4)),
    "no_mask_reuse": FFNSparsity(activations=NM(2, 4), mask_reuse=False),
    "token_sparsity": FFNSparsity(activations=NM(2, 4), token_sparsity="mvue"),
    "nearest_centre": FFNSparsity(weights=NM(2, 4), activations=VENOM),
    "token_hash": FFNSparsity(activations=VENOM, router=TokenHash()),
    "activation_energy": FFNSparsity(
        activations=VENOM, router=ActivationEnergy(), experts_per_token=2
    ),
    "activation_energy_fp8": FFNSparsity(
        activations=VENOM,
        router=ActivationEnergyFP8(),
        experts_per_token=2,
        skip_blocks=True,
        weight_gradients="expert_columns",
    ),
    "skip_blocks": FFNSparsity(
        weights=NM(2, 4),
        activations=VENOM,
        skip_blocks=True,
        weight_gradients="expert_columns",
    ),
}


def transformer(config: ModelConfig = TINY, sparsity=DENSE, seed: int = 0):
    return Transformer(config, sparsity=sparsity, rngs=nnx.Rngs(seed))


def some_tokens(*shape: int, seed: int = 0) -> jax.Array:
    generator = np.random.default_rng(seed)
    return jnp.asarray(generator.integers(0, TINY.vocab_size, shape), jnp.int32)


@pytest.mark.parametrize("name", SPARSITIES)
def test_no_gradient_and_no_value_comes_from_a_later_token(name):
    model = transformer(sparsity=SPARSITIES[name])
    # All different, so that each position owns a row of the embedding's gradient.
    tokens = jnp.asarray(np.random.default_rng(0).permutation(61)[None, :9], jnp.int32)
    at, key = 4, jax.random.key(0)
    weight = jnp.asarray(np.random.default_rng(1).normal(size=61), jnp.float32)

    @nnx.jit
    def logits_and_grad(model, tokens):
        def score(model):
            logits = model(tokens, key=key)[0]
            return jnp.vdot(logits[at], weight), logits

        (_, logits), grads = nnx.value_and_grad(score, has_aux=True)(model)
        return logits, grads["embedding"][...]

    logits, grad = logits_and_grad(model, tokens)
    by_position = np.abs(np.asarray(grad)[np.asarray(tokens[0])]).max(-1)
    assert np.all(by_position[: at + 1] > 0)
    np.testing.assert_array_equal(by_position[at + 1 :], 0)
    # Masks and routing have no gradient: values have to be looked at as well. Other
    # tokens behind `at` change how rows are sorted, hence not bit for bit.
    changed = tokens.at[0, at + 1 :].set(tokens[0, ::-1][: tokens.shape[1] - at - 1])
    after, _ = logits_and_grad(model, changed)
    np.testing.assert_allclose(after[: at + 1], logits[: at + 1], rtol=1e-5, atol=1e-5)
    assert np.abs(after[at + 1 :] - logits[at + 1 :]).max() > 0.1


@pytest.mark.parametrize(
    ("name", "packed"), [("dense", False), ("weights", False), ("weights", True)]
)
def test_the_scan_is_a_loop_over_the_blocks(name, packed):
    model = transformer(sparsity=SPARSITIES[name])
    if packed:
        for ffn in sparse_ffns(model):
            ffn.as_read = WeightsAsRead(ffn.weights_as_read())
    tokens = some_tokens(2, 7)
    logits, captured = model(tokens, capture_ffn_inputs=True)
    graph, stacked = nnx.split(model.blocks)
    x = model.embedding[...][tokens]
    for i in range(TINY.layers):
        block = nnx.merge(graph, jax.tree.map(lambda v, i=i: v[i], stacked))
        x, ffn_input = block(x, token_ids=tokens)
        np.testing.assert_allclose(captured[i], ffn_input, rtol=1e-4, atol=1e-5)
    expected = model.final_norm(x) @ model.head[...]
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-5)


def test_blocks_start_different_and_with_scaled_residual_branches():
    config = dataclasses.replace(TINY, layers=8, d_model=32, d_hidden=128)
    blocks = nnx.jit(lambda: transformer(config))().blocks
    w_down, w_out = blocks.ffn.w_down[...], blocks.attention.w_out[...]
    assert w_down.shape == (8, 128, 32)
    assert float(jnp.abs(w_down[0] - w_down[1]).max()) > 0
    np.testing.assert_allclose(w_down.std(), (128 * 16) ** -0.5, rtol=0.03)
    np.testing.assert_allclose(w_out.std(), (32 * 16) ** -0.5, rtol=0.05)


@pytest.mark.parametrize("remat", ["none", "dots", "full"])
@pytest.mark.parametrize(
    ("router", "skipped_energy"),
    [
        (NearestCentre(), None),
        (ActivationEnergy(), None),
        (ActivationEnergyFP8(), None),
        (ActivationEnergy(), 0.05),
        (ActivationEnergyFP8(), 0.05),
    ],
)
def test_experts_are_chosen_once_whatever_is_recomputed(
    router, skipped_energy, remat, monkeypatch
):
    chosen = []
    choose = Router.of_scores

    def counting(router, scores, *how):
        best = choose(router, scores, *how)
        seen = lambda of: chosen.append(1) or of
        return jax.pure_callback(seen, jax.typeof(best), best)

    monkeypatch.setattr(Router, "of_scores", counting)
    sparsity = FFNSparsity(
        activations=VNM(8, 4, 16),
        skip_blocks=router.before_up,
        router=router,
        weight_gradients="expert_columns",
        skipped_energy=skipped_energy,
    )
    config = dataclasses.replace(TINY, layers=1, remat=remat, scan_layers=False)
    model = Transformer(config, sparsity=sparsity, rngs=nnx.Rngs(0))
    tokens = jax.random.randint(jax.random.key(0), (2, 9), 0, config.vocab_size)
    step = nnx.jit(partial(loss_and_gradient, cross_entropy))
    jax.block_until_ready(step(model, tokens[None]))
    jax.effects_barrier()
    assert len(chosen) == config.layers


@pytest.mark.parametrize(
    "name", ["dense", "activation_energy", "activation_energy_fp8"]
)
def test_remat_and_unrolling_change_neither_loss_nor_gradients(name):
    tokens = some_tokens(2, 9)

    def results(remat="none", scan_layers=True):
        config = dataclasses.replace(TINY, remat=remat, scan_layers=scan_layers)
        model = transformer(config, SPARSITIES[name])
        run = nnx.jit(nnx.value_and_grad(cross_entropy)).lower(model, tokens)
        if name == "dense":
            # Nothing else is looped over, forward and backward.
            assert run.as_text().count("stablehlo.while") == 2 * scan_layers
        return jax.tree.leaves(run.compile()(model, tokens))

    usual = results()
    for remat, scan_layers in (
        ("full", True),
        ("dots", True),
        ("none", False),
        ("full", False),
    ):
        chex.assert_trees_all_close(
            results(remat, scan_layers), usual, rtol=1e-4, atol=1e-6
        )


def test_what_is_recomputed_is_not_merged_with_the_forward():
    """Without a loop barriers are against that; the body of a loop needs none."""
    tokens = some_tokens(2, 9)

    def lowered(remat, scan_layers=False):
        sizes = {"layers": 1, "remat": remat, "scan_layers": scan_layers}
        model = transformer(dataclasses.replace(TINY, **sizes))
        return nnx.jit(nnx.value_and_grad(cross_entropy)).lower(model, tokens)

    none, dots, full = (
        lowered(remat).compile().as_text().count(" dot(")
        for remat in ("none", "dots", "full")
    )
    assert none < dots < full
    for remat in ("dots", "full"):
        assert "optimization_barrier" not in lowered(remat, True).as_text()


@pytest.mark.parametrize("scan_layers", [True, False])
@pytest.mark.parametrize("qk_norm", [True, False])
def test_dots_keep_what_the_backward_of_attention_reads(
    qk_norm, scan_layers, monkeypatch
):
    """Neither attention nor the rotations run again; those of normalised queries do,
    for else both what is normalised and what is rotated would be kept."""
    pretend_cudnn(monkeypatch)
    tokens = some_tokens(2, 129)

    def counts(remat):
        sizes = dict(layers=2, d_model=16, heads=2, kv_heads=2, dtype="bfloat16")
        config = dataclasses.replace(
            TINY, **sizes, remat=remat, qk_norm=qk_norm, scan_layers=scan_layers
        )
        model = nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))
        grads = nnx.jit(nnx.grad(cross_entropy)).trace(model, tokens)
        text = grads.lower(lowering_platforms=("cuda",)).as_text()
        # In a loop a layer's operations stand once, whatever its trips.
        times = 1 if scan_layers else config.layers
        forwards = text.count("@__cudnn$fmhaSoftmax(")
        return forwards / times, len(re.findall(r"call @\w*flip", text)) / times

    assert counts("none") == (1, 4)
    assert counts("dots") == (1, 6 if qk_norm else 4)
    assert counts("full") == (2, 6)


def test_gradients_match_finite_differences_in_the_dense_model():
    model = transformer()
    tokens = some_tokens(1, 6)
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    @jax.jit
    def loss(params):
        return cross_entropy(nnx.merge(graph, params, rest), tokens)

    grads = jax.grad(loss)(params)
    direction = jax.tree.map(
        lambda g: g / jnp.sqrt(sum(jnp.vdot(x, x) for x in jax.tree.leaves(grads))),
        grads,
    )
    step = 2e-3
    moved = [
        loss(jax.tree.map(lambda p, u, s=s: p + s * u, params, direction))
        for s in (step, -step)
    ]
    slope = (moved[0] - moved[1]) / (2 * step)
    along = sum(
        jnp.vdot(g, u)
        for g, u in zip(jax.tree.leaves(grads), jax.tree.leaves(direction), strict=True)
    )
    # float32 losses of about 4 resolve 5e-7, their difference here is 0.05: 1e-5, and
    # the third derivative adds its step^2 (1 % at 1e-2, hence 0.05 % at 2e-3)
    np.testing.assert_allclose(slope, along, rtol=2e-3)


def test_cross_entropy_is_the_mean_surprise_of_the_next_token():
    model = transformer()
    tokens = some_tokens(2, 6)
    logits = np.asarray(model(tokens[:, :-1]), np.float64)
    surprise = []
    for batch in range(2):
        for t in range(5):
            p = np.exp(logits[batch, t] - logits[batch, t].max())
            surprise.append(-np.log(p[tokens[batch, t + 1]] / p.sum()))
    np.testing.assert_allclose(
        cross_entropy(model, tokens), np.mean(surprise), rtol=1e-5
    )


def test_a_tied_head_is_the_embedding():
    model = transformer(dataclasses.replace(TINY, tie_embeddings=True))
    assert model.head is None
    features, _ = model.features(some_tokens(1, 5))
    expected = np.asarray(features) @ np.asarray(model.embedding[...]).T
    np.testing.assert_allclose(model.logits(features), expected, rtol=1e-4, atol=1e-5)
    grads = nnx.jit(nnx.grad(cross_entropy))(model, some_tokens(1, 2))
    # as an input only the first token's row would move
    assert np.all(np.abs(grads["embedding"][...]).max(-1) > 0)


def test_the_three_gemms_of_the_head_read_bfloat16():
    vocabulary = 72  # no other size here
    config = dataclasses.replace(TINY, vocab_size=vocabulary, dtype="bfloat16")
    step = jax.make_jaxpr(nnx.grad(cross_entropy))(
        transformer(config), some_tokens(1, 4)
    )
    of_head = [
        equation.invars
        for equation in equations(step.jaxpr)
        if equation.primitive.name == "dot_general"
        and any(
            vocabulary in v.aval.shape for v in (*equation.invars, *equation.outvars)
        )
    ]
    assert len(of_head) == 3
    assert all(v.aval.dtype == jnp.bfloat16 for operands in of_head for v in operands)


def equations(jaxpr):
    """All of a jaxpr, those within others too."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            yield from equations(inner)


@pytest.mark.parametrize("activation", ["relu2", "swiglu", "reglu2"])
def test_bfloat16_computes_with_float32_masters_and_gradients(activation):
    config = dataclasses.replace(TINY, activation=activation)
    low = transformer(
        dataclasses.replace(config, dtype="bfloat16"), SPARSITIES["weights"]
    )
    high = transformer(config, SPARSITIES["weights"])
    tokens = some_tokens(2, 9)
    logits, captured = jax.eval_shape(lambda: low(tokens, capture_ffn_inputs=True))
    assert logits.dtype == jnp.float32
    assert captured.dtype == jnp.bfloat16
    assert captured.shape == (2, 2, 9, 16)
    loss, grads = nnx.jit(nnx.value_and_grad(cross_entropy))(low, tokens)
    assert all(g.dtype == jnp.float32 for g in jax.tree.leaves(grads))
    chex.assert_trees_all_equal_shapes_and_dtypes(grads, nnx.state(low, nnx.Param))
    # bfloat16 resolves 2^-8; two blocks of two branches add a few of those
    expected = nnx.jit(cross_entropy)(high, tokens)
    np.testing.assert_allclose(loss, expected, rtol=0.02)


def test_a_loss_may_read_logits_in_the_compute_dtype():
    config = dataclasses.replace(TINY, dtype="bfloat16", vocab_size=96)
    whole = transformer(config)
    narrow = transformer(dataclasses.replace(config, logits_of_loss="dtype"))
    tokens = some_tokens(2, 9)
    assert narrow(tokens).dtype == jnp.float32
    for model, dtype in ((whole, jnp.float32), (narrow, jnp.bfloat16)):
        step = jax.make_jaxpr(nnx.grad(cross_entropy))(model, tokens)
        shapes = {
            out.aval.dtype
            for equation in equations(step.jaxpr)
            for out in equation.outvars
            if equation.primitive is jax.lax.dot_general_p
            and out.aval.shape == (2, 8, 96)
        }
        assert shapes == {jnp.dtype(dtype)}
    of = nnx.jit(nnx.value_and_grad(cross_entropy))
    (loss, gradient), (expected, of_whole) = of(narrow, tokens), of(whole, tokens)
    assert loss.dtype == jnp.float32
    # Logits have eight bits, and so have gradients of them in both.
    np.testing.assert_allclose(loss, expected, atol=3e-3)
    leaves = map(jax.tree.leaves, (gradient, of_whole))
    for got, want in zip(*leaves, strict=True):
        assert jnp.linalg.norm(got - want) < 0.02 * jnp.linalg.norm(want)


def test_a_random_estimator_draws_anew_with_each_key_in_every_layer():
    model = transformer(sparsity=SPARSITIES["token_sparsity"])
    tokens = some_tokens(2, 9)
    grad = nnx.jit(nnx.grad(cross_entropy))
    first, again, other = (
        grad(model, tokens, jax.random.key(seed))["blocks"]["ffn"]["w_up"][...]
        for seed in (0, 0, 1)
    )
    np.testing.assert_array_equal(first, again)
    assert np.all(np.abs(first - other).max((1, 2)) > 0)


def test_sparsity_is_set_on_the_whole_stack():
    model = transformer()
    assert [type(ffn) for ffn in sparse_ffns(model)] == [SparseFFN]
    tokens = some_tokens(1, 6)
    loss = nnx.jit(cross_entropy)
    dense = loss(model, tokens)
    set_sparsity(model, SPARSITIES["two_four"])
    assert model.sparsity == SPARSITIES["two_four"]
    assert abs(float(loss(model, tokens) - dense)) > 1e-3
    set_sparsity(model, DENSE)
    np.testing.assert_array_equal(loss(model, tokens), dense)


def test_another_module_may_be_in_the_place_of_the_ffns():
    class Linear(nnx.Module):
        def __init__(self, rngs):
            shape = TINY.d_model, TINY.d_model
            self.w = nnx.Param(jax.random.normal(rngs.params(), shape))

        def __call__(self, x, *, token_ids=None, key=None):
            return x @ self.w[...]

    @nnx.split_rngs(splits=TINY.layers)
    @nnx.vmap
    def stacked(rngs):
        return Linear(rngs)

    model = transformer()
    before = model.blocks.ffn
    model.blocks.ffn = stacked(nnx.Rngs(3))
    tokens = some_tokens(2, 12)
    loss, gradient = nnx.value_and_grad(cross_entropy)(model, tokens)
    assert model.sparsity == DENSE and jnp.isfinite(loss)
    assert (jnp.abs(gradient.blocks.ffn.w[...]).max(axis=(1, 2)) > 0).all()
    model.blocks.ffn = before
    assert cross_entropy(model, tokens) != loss


BY_EXPERT = FFNSparsity(activations=VNM(4, 4, 16), router=ActivationEnergy())
