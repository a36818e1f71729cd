"""The gradient over micro-batches: that of all tokens, weights compressed once."""

import re
from collections import Counter
from dataclasses import replace
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from sparsejax.config import ModelConfig
from sparsejax.feed_forward.operands import weights
from sparsejax.feed_forward.sparsity import DENSE, FFNSparsity
from sparsejax.models import attention, sparse_ffn
from sparsejax.models.sparse_ffn import SparseFFN
from sparsejax.models.transformer import Transformer, cross_entropy
from sparsejax.routing.routers import ActivationEnergy, ActivationEnergyFP8
from sparsejax.sparsity.patterns import NM, VNM
from sparsejax.switches.switching import switch
from sparsejax.training.micro_batches import loss_and_gradient

WEIGHTS = FFNSparsity(weights=NM(2, 4))
TWO_FOUR = FFNSparsity(weights=NM(2, 4), activations=NM(2, 4))
VENOM = FFNSparsity(weights=NM(2, 4), activations=VNM(4, 2, 16))
EXPERTS = FFNSparsity(
    activations=VNM(4, 4, 16),
    experts_per_token=2,
    router=ActivationEnergy(),
    weight_gradients="expert_columns",
)
ROUNDED = replace(EXPERTS, router=ActivationEnergyFP8(), skip_blocks=True)
D, F = 16, 64


def normal(*shape: int, seed: int = 0) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)


def mean_square(model, x):
    return jnp.mean((model(x) - jnp.tanh(x[:, ::-1])) ** 2)


@pytest.mark.parametrize("sparsity", [WEIGHTS, TWO_FOUR, VENOM, ROUNDED])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_packing_changes_no_bit(sparsity, dtype):
    layer = SparseFFN(D, F, sparsity=sparsity, dtype=dtype, rngs=nnx.Rngs(0))
    x = normal(9, D).astype(dtype)

    def loss_of(layer, x):
        return jnp.sum(layer(x).astype(jnp.float32) ** 2)

    plain = nnx.jit(nnx.value_and_grad(loss_of))(layer, x)
    packed = nnx.jit(partial(loss_and_gradient, loss_of))(layer, x[None])
    chex.assert_trees_all_equal(jax.tree.leaves(packed), jax.tree.leaves(plain))


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("sparsity", [DENSE, TWO_FOUR, VENOM])
def test_it_is_the_gradient_of_the_mean_over_all_tokens(sparsity, jitted):
    layer = SparseFFN(D, F, sparsity=sparsity, rngs=nnx.Rngs(0))
    x = normal(3, 8, D)
    run = partial(loss_and_gradient, mean_square)
    loss, gradient = (nnx.jit(run) if jitted else run)(layer, x)
    want, want_gradient = nnx.value_and_grad(mean_square)(layer, x.reshape(24, D))
    np.testing.assert_allclose(loss, want, rtol=1e-5)
    assert jax.tree.structure(gradient) == jax.tree.structure(want_gradient)
    chex.assert_trees_all_close(
        jax.tree.leaves(gradient), jax.tree.leaves(want_gradient), rtol=1e-4, atol=1e-6
    )


def test_weights_are_packed_once_for_all_micro_batches(monkeypatch):
    made, read = [], []
    pack, call = sparse_ffn.pack_ffn, sparse_ffn.ffn
    monkeypatch.setattr(
        sparse_ffn, "pack_ffn", lambda *a, **k: made.append(1) or pack(*a, **k)
    )
    monkeypatch.setattr(
        sparse_ffn, "ffn", lambda *a, **k: read.append(k["packed"]) or call(*a, **k)
    )
    layer = SparseFFN(D, F, sparsity=WEIGHTS, rngs=nnx.Rngs(0))
    loss_and_gradient(mean_square, layer, normal(5, 8, D))
    assert len(made) == 1
    assert read and None not in read
    # What was packed has gone with the call.
    assert layer.as_read is None
    layer(normal(8, D))
    assert read[-1] is None


@pytest.mark.parametrize(
    ("activation", "sparsity", "of_ffn"),
    [("relu2", DENSE, 2), ("swiglu", DENSE, 3), ("relu2", EXPERTS, 1)],
    ids=["relu2", "swiglu", "experts"],
)
def test_8_bit_weights_are_made_once_and_are_those_of_every_call(
    activation, sparsity, of_ffn, monkeypatch
):
    sizes = {"d_model": 16, "layers": 2, "heads": 2, "kv_heads": 1, "d_hidden": 32}
    config = ModelConfig(precision="fp8", activation=activation, **sizes)
    model = Transformer(config, sparsity=sparsity, rngs=nnx.Rngs(0))
    tokens = jax.random.randint(jax.random.key(0), (3, 2, 9), 0, 256)
    each = [nnx.value_and_grad(cross_entropy)(model, batch) for batch in tokens]
    wanted = jax.tree.map(lambda *of: sum(of) / 3, *each)
    made = []
    for module in (attention, weights):
        quantise = module.quantise_weight
        spy = lambda w, quantise=quantise: made.append(w.shape) or quantise(w)
        monkeypatch.setattr(module, "quantise_weight", spy)
    got = loss_and_gradient(cross_entropy, model, tokens)
    # All layers at once, and nothing inside of the loops over layers or batches.
    assert len(made) == 4 + of_ffn
    assert all(shape[0] == 2 for shape in made)
    chex.assert_trees_all_close(
        jax.tree.leaves(got), jax.tree.leaves(wanted), rtol=1e-4, atol=1e-6
    )


@pytest.mark.parametrize("scan_layers", [False, True])
@pytest.mark.parametrize("sparsity", [DENSE, TWO_FOUR])
def test_gradients_are_added_up_layer_by_layer_without_a_loop(scan_layers, sparsity):
    sizes = {"d_model": 16, "layers": 3, "heads": 2, "kv_heads": 1, "d_hidden": 48}
    config = ModelConfig(scan_layers=scan_layers, **sizes)
    model = Transformer(config, sparsity=sparsity, rngs=nnx.Rngs(0))
    tokens = jax.random.randint(jax.random.key(0), (2, 2, 9), 0, 256)
    each = [nnx.value_and_grad(cross_entropy)(model, batch) for batch in tokens]
    wanted = jax.tree.map(lambda *of: sum(of) / 2, *each)
    got = loss_and_gradient(cross_entropy, model, tokens)
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    chex.assert_trees_all_close(got, wanted, rtol=1e-4, atol=1e-6)
    graph, state = nnx.split(model)
    traced = jax.make_jaxpr(
        lambda state: loss_and_gradient(cross_entropy, nnx.merge(graph, state), tokens)
    )(state)
    (over_batches,) = (
        equation
        for equation in traced.jaxpr.eqns
        if equation.primitive.name == "scan" and equation.params["length"] == 2
    )
    added = Counter(out.aval.shape for out in over_batches.outvars)
    # W1 of three layers: one sum of all, or three.
    assert added[3, 16, 48] == (1 if scan_layers else 0)
    assert added[16, 48] == (0 if scan_layers else 3)


@pytest.mark.parametrize("scan_layers", [False, True])
@pytest.mark.parametrize("sparsity", [DENSE, TWO_FOUR, EXPERTS])
def test_each_layer_reads_arrays_of_its_own_without_a_loop(scan_layers, sparsity):
    """XLA would copy a layer's part of an array of all layers for its GEMMs, in every
    micro-batch."""
    config = ModelConfig(
        vocab_size=32,
        d_model=D,
        layers=3,
        heads=2,
        kv_heads=2,
        d_hidden=F,
        scan_layers=scan_layers,
        dtype="bfloat16",
    )
    model = Transformer(config, sparsity=sparsity, rngs=nnx.Rngs(0))
    tokens = jax.random.randint(jax.random.key(0), (2, 2, 9), 0, 32)
    step = nnx.jit(partial(loss_and_gradient, cross_entropy))
    compiled = step.lower(model, tokens).compile().as_text()
    of_all = re.findall(r"(?:bf16|u16|u8)\[3,(?:16|64|32|8),\d+\]", compiled)
    assert bool(of_all) == scan_layers


@pytest.mark.parametrize("count", [1, 2])
def test_an_embedding_that_is_the_head_has_a_sum_for_each_of_its_uses(count):
    sizes = {"d_model": 16, "layers": 1, "heads": 2, "kv_heads": 1, "d_hidden": 48}
    config = ModelConfig(tie_embeddings=True, vocab_size=40, **sizes)
    model = Transformer(config, rngs=nnx.Rngs(0))
    tokens = jax.random.randint(jax.random.key(0), (count, 2, 9), 0, 40)
    each = [nnx.value_and_grad(cross_entropy)(model, batch) for batch in tokens]
    wanted = jax.tree.map(lambda *of: sum(of) / count, *each)
    got = loss_and_gradient(cross_entropy, model, tokens)
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    chex.assert_trees_all_close(got, wanted, rtol=1e-4, atol=1e-6)
    graph, state = nnx.split(model)
    traced = jax.make_jaxpr(
        lambda state: loss_and_gradient(cross_entropy, nnx.merge(graph, state), tokens)
    )(state)
    added = Counter(
        out.aval.shape
        for equation in traced.jaxpr.eqns
        if equation.primitive is jax.lax.scan_p and equation.params["length"] == count
        for out in equation.outvars
    )
    if count > 1:
        assert added[40, 16] == 2
    assert model.embedding_as_head is None


@pytest.mark.parametrize("scan_layers", [False, True])
def test_a_gradient_is_placed_by_its_path_as_an_array_of_stacked_layers(scan_layers):
    sizes = {"d_model": 16, "layers": 3, "heads": 2, "kv_heads": 1, "d_hidden": 48}
    config = ModelConfig(tie_embeddings=True, scan_layers=scan_layers, **sizes)
    model = Transformer(config, rngs=nnx.Rngs(0))
    tokens = jax.random.randint(jax.random.key(0), (2, 2, 9), 0, 256)
    seen = {"adding": Counter(), "added": Counter()}

    def place(when, path, gradient):
        names = [entry.key for entry in path if hasattr(entry, "key")]
        seen[when]["/".join(map(str, names)), gradient.shape] += 1
        # Where it lies is nothing that a value tells; a factor is.
        return gradient if when == "adding" else 3 * gradient

    own = {"place": partial(place, "adding"), "place_sum": partial(place, "added")}
    _, got = loss_and_gradient(cross_entropy, model, tokens, **own)
    _, plain = loss_and_gradient(cross_entropy, model, tokens)
    wanted = jax.tree.map(lambda leaf: 3 * leaf, plain)
    chex.assert_trees_all_close(got, wanted, rtol=1e-5, atol=1e-7)
    w_up = ("blocks/ffn/w_up", (3 if scan_layers else 1, 16, 48))
    once = {w_up: 1 if scan_layers else 3, ("embedding", (256, 16)): 1}
    once |= {("embedding_as_head", (256, 16)): 1}
    for where, count in once.items():
        assert seen["added"][where] == count
        # Zeros before the loop, a gradient and a sum in it, and the sum behind it.
        assert seen["adding"][where] == 4 * count


@pytest.mark.parametrize("tied", [False, True])
def test_weights_are_rounded_to_bfloat16_outside_of_the_loop(tied):
    sizes = {"d_model": 16, "layers": 2, "heads": 2, "kv_heads": 1, "d_hidden": 48}
    config = ModelConfig(dtype="bfloat16", tie_embeddings=tied, **sizes)
    model = Transformer(config, rngs=nnx.Rngs(0))
    tokens = jax.random.randint(jax.random.key(0), (3, 2, 9), 0, 256)
    each = [nnx.value_and_grad(cross_entropy)(model, batch) for batch in tokens]
    run = nnx.jit(partial(loss_and_gradient, cross_entropy))
    wanted = jax.tree.map(lambda *of: sum(of) / 3, *each)
    # Sums of bfloat16 products in another order.
    chex.assert_trees_all_close(
        jax.tree.leaves(run(model, tokens)),
        jax.tree.leaves(wanted),
        rtol=2**-6,
        atol=2**-10,
    )
    graph, state = nnx.split(model)
    step = jax.make_jaxpr(
        lambda state, t: loss_and_gradient(cross_entropy, nnx.merge(graph, state), t)
    )(state, tokens)
    (over_batches,) = (e for e in step.eqns if e.primitive is jax.lax.scan_p)
    weights = {(2, 16, 16), (2, 16, 8), (2, 16, 48), (2, 48, 16), (16, 256)}
    weights |= {shape[1:] for shape in weights if len(shape) == 3} | {(256, 16)}

    def roundings(jaxpr):
        for equation in jaxpr.eqns:
            if equation.primitive is jax.lax.convert_element_type_p:
                before, after = equation.invars[0].aval, equation.outvars[0].aval
                down = before.dtype == jnp.float32 and after.dtype == jnp.bfloat16
                if down and before.shape in weights:
                    yield before.shape
            for inner in jax.extend.core.jaxprs_in_params(equation.params):
                yield from roundings(inner)

    assert list(roundings(over_batches.params["jaxpr"].jaxpr)) == []
    assert len(list(roundings(step.jaxpr))) == 4 + 2 + 1


def test_a_loop_of_ones_own_trains_as_one_without_packing():
    x = normal(4, 16, D, seed=2)

    def trained(step_of):
        layer = SparseFFN(D, F, sparsity=WEIGHTS, rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(layer, optax.adam(1e-2), wrt=nnx.Param)

        @nnx.jit
        def step(layer, optimizer):
            loss, gradient = step_of(layer)
            optimizer.update(layer, gradient)
            return loss

        return [float(step(layer, optimizer)) for _ in range(30)], layer

    packed, of_packed = trained(lambda layer: loss_and_gradient(mean_square, layer, x))
    plain, of_plain = trained(
        lambda layer: nnx.value_and_grad(mean_square)(layer, x.reshape(64, D))
    )
    np.testing.assert_allclose(packed, plain, rtol=1e-4)
    assert plain[-1] < 0.7 * plain[0]
    # Other weights, put in from outside, are what the next call reads.
    nnx.update(of_packed, nnx.state(of_plain))
    np.testing.assert_array_equal(of_packed(x[0]), of_plain(x[0]))


class Noisy(nnx.Module):
    """An FFN behind a dropout, whose stream counts its draws."""

    def __init__(self, rngs):
        self.ffn = SparseFFN(D, F, sparsity=WEIGHTS, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.ffn(self.dropout(x))


@pytest.mark.parametrize("jitted", [False, True])
def test_other_state_goes_from_one_micro_batch_to_the_next(jitted):
    model, alone = Noisy(nnx.Rngs(0)), Noisy(nnx.Rngs(0))
    x = jnp.broadcast_to(normal(8, D), (3, 8, D))
    run = partial(loss_and_gradient, mean_square)
    loss, _ = (nnx.jit(run) if jitted else run)(model, x)
    losses = [mean_square(alone, each) for each in x]
    assert len(set(map(float, losses))) == 3
    np.testing.assert_allclose(loss, np.mean(losses), rtol=1e-5)
    # ... and so the draws after it are the next ones.
    np.testing.assert_allclose(model(x[0]), alone(x[0]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("count", [1, 3])
def test_other_arrays_come_back_from_every_micro_batch(count, jitted):
    layer, x = SparseFFN(D, F, sparsity=WEIGHTS, rngs=nnx.Rngs(0)), normal(count, 8, D)

    def with_output(layer, x):
        y = layer(x)
        return mean_square(layer, x), {"y": y, "largest": jnp.max(jnp.abs(y))}

    run = partial(loss_and_gradient, with_output, has_aux=True)
    (loss, aux), gradient = (nnx.jit(run) if jitted else run)(layer, x)
    expected = loss_and_gradient(mean_square, layer, x)
    chex.assert_trees_all_close((loss, gradient), expected, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(aux["y"], layer(x), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(aux["largest"], jnp.abs(aux["y"]).max((1, 2)))


@pytest.mark.parametrize(
    ("returned", "has_aux"), [((1.0, 2.0), False), (1.0, True), ((1.0, 2.0, 3.0), True)]
)
def test_a_pair_and_has_aux_belong_together(returned, has_aux):
    layer = SparseFFN(D, F, rngs=nnx.Rngs(0))
    of = lambda layer, x: jax.tree.map(lambda value: value * jnp.sum(x), returned)
    with pytest.raises(TypeError, match=rf"has_aux={has_aux}; return the loss alone"):
        loss_and_gradient(of, layer, normal(2, 8, D), has_aux=has_aux)


def test_a_switch_changes_what_the_next_call_packs():
    layer = SparseFFN(D, F, rngs=nnx.Rngs(0))
    x = normal(2, 8, D)
    dense, _ = loss_and_gradient(mean_square, layer, x)
    switch(layer, None, WEIGHTS)
    sparse, _ = loss_and_gradient(mean_square, layer, x)
    assert abs(float(dense - sparse)) > 1e-3
    np.testing.assert_allclose(sparse, mean_square(layer, x.reshape(16, D)), rtol=1e-5)


@pytest.mark.parametrize(
    "batches",
    [(), (jnp.zeros((2, 3)), jnp.zeros((3, 3))), (jnp.zeros((0, 3)),), (1.0,)],
)
def test_leading_axes_that_do_not_count_micro_batches_are_refused(batches):
    layer = SparseFFN(D, F, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="leading axis"):
        loss_and_gradient(mean_square, layer, *batches)
