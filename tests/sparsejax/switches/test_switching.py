"""The effect of a switch on weights, betas, clusters and an optimiser's moments."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from sparsejax.config import ModelConfig
from sparsejax.feed_forward.sparsity import DENSE, FFNSparsity
from sparsejax.models.sparse_ffn import SparseFFN, sparse_ffns
from sparsejax.models.transformer import Transformer
from sparsejax.sparsity.patterns import NM, VNM
from sparsejax.switches.switching import (
    relabel_neurons,
    set_sparsity,
    switch,
    take_neurons,
)

TWO_FOUR = FFNSparsity(weights=NM(2, 4))
VENOM = FFNSparsity(
    weights=NM(2, 4), activations=VNM(8, 2, 16), weight_gradients="expert_columns"
)
CONFIG = ModelConfig(
    vocab_size=32, d_model=16, layers=2, heads=2, kv_heads=2, d_hidden=64
)


def make_model(sparsity=DENSE, config=CONFIG):
    return Transformer(config, sparsity=sparsity, rngs=nnx.Rngs(0))


def make_tokens(seed=0):
    return jax.random.randint(jax.random.key(seed), (3, 11), 0, CONFIG.vocab_size)


def test_fold_makes_leaving_two_four_weights_lossless():
    model, tokens = make_model(TWO_FOUR), make_tokens()
    before = model(tokens)
    switch(model, (), DENSE, fold=True)
    np.testing.assert_allclose(model(tokens), before, rtol=1e-4, atol=1e-5)
    unfolded = make_model(TWO_FOUR)
    switch(unfolded, (), DENSE, fold=False)
    assert np.abs(unfolded(tokens) - before).max() > 0.05


def test_fold_of_a_gated_ffn_is_lossless():
    config = replace(CONFIG, activation="swiglu")
    model, tokens = make_model(TWO_FOUR, config), make_tokens()
    before = model(tokens)
    switch(model, (), DENSE)
    np.testing.assert_allclose(model(tokens), before, rtol=1e-4, atol=1e-5)


def test_fold_leaves_w_down_alone():
    ffn = SparseFFN(16, 32, sparsity=TWO_FOUR, rngs=nnx.Rngs(1))
    w_up, w_down = np.asarray(ffn.w_up[...]), np.asarray(ffn.w_down[...])
    switch(ffn, (), DENSE)
    np.testing.assert_array_equal(ffn.w_down[...], w_down)
    assert (np.asarray(ffn.w_up[...]) == 0).mean() == pytest.approx(0.5)
    assert not np.array_equal(ffn.w_up[...], w_up)


def test_entering_two_four_weights_computes_beta_of_the_present_weights():
    ffn = SparseFFN(16, 32, rngs=nnx.Rngs(1))
    ffn.w_up[...] = jnp.abs(ffn.w_up[...]) + 1
    stale = np.asarray(ffn.scales[...])
    switch(ffn, (), TWO_FOUR)
    fresh = SparseFFN(16, 32, rngs=nnx.Rngs(1))
    fresh.w_up[...] = ffn.w_up[...]
    fresh.refresh_scales()
    np.testing.assert_array_equal(ffn.scales[...], fresh.scales[...])
    assert not np.allclose(stale, ffn.scales[...])


def test_beta_stays_frozen_while_weights_stay_sparse():
    ffn = SparseFFN(16, 32, sparsity=TWO_FOUR, rngs=nnx.Rngs(1))
    frozen = np.asarray(ffn.scales[...])
    ffn.w_up[...] = 2 + jnp.abs(ffn.w_up[...])
    switch(ffn, (), replace(TWO_FOUR, activations=NM(2, 4)))
    np.testing.assert_array_equal(ffn.scales[...], frozen)


def test_clustering_relabels_weights_and_moments_alike():
    model, tokens = make_model(), make_tokens()
    params = jax.tree.map(jnp.copy, nnx.state(model, nnx.Param))
    optimizer = optax.adam(1e-3)
    moments = optimizer.init(params)
    # moments that name their own neuron: a copy of the weights
    moments = (moments[0]._replace(mu=params, nu=params), *moments[1:])
    dense_before = model(tokens)
    moments = switch(model, moments, VENOM)
    relabelled = nnx.state(model, nnx.Param)
    for moment in (moments[0].mu, moments[0].nu):
        jax.tree.map(np.testing.assert_array_equal, moment, relabelled)
    ours, theirs = params["blocks"]["ffn"]["w_up"], relabelled["blocks"]["ffn"]["w_up"]
    assert not np.array_equal(ours[...], theirs[...])
    switch(model, (), DENSE, fold=False)
    np.testing.assert_allclose(model(tokens), dense_before, rtol=1e-4, atol=1e-5)


def test_neurons_that_a_router_left_apart_are_grouped_for_one_that_wants_it():
    control, directly = (SparseFFN(16, 64, rngs=nnx.Rngs(1)) for _ in range(2))
    apart = replace(VENOM, weights=None, router="same_experts")
    grouped = replace(apart, router="nearest_centre")
    first = np.asarray(control.w_up[...])
    switch(control, None, apart)
    np.testing.assert_array_equal(control.w_up[...], first)
    with pytest.raises(ValueError, match="have to be clustered and renumbered"):
        set_sparsity(control, grouped)
    switch(control, None, grouped)
    switch(directly, None, grouped)
    assert not np.array_equal(control.w_up[...], first)
    np.testing.assert_array_equal(control.w_up[...], directly.w_up[...])
    # Back and forth between routers that want them grouped they stay.
    switch(control, None, replace(grouped, router="token_hash"))
    np.testing.assert_array_equal(control.w_up[...], directly.w_up[...])


def test_each_layer_gets_its_own_order():
    order = jnp.array([[1, 0, 2, 3], [3, 2, 1, 0]])
    w_up = jnp.arange(2 * 3 * 4.0).reshape(2, 3, 4)
    w_down = w_up.swapaxes(1, 2)
    up, down = take_neurons(w_up, order, -1), take_neurons(w_down, order, -2)
    for layer in range(2):
        for new, old in enumerate(order[layer].tolist()):
            np.testing.assert_array_equal(up[layer, :, new], w_up[layer, :, old])
            np.testing.assert_array_equal(down[layer, new], w_down[layer, old])


def test_switch_between_expert_counts_clusters_anew():
    ffn = SparseFFN(16, 64, sparsity=VENOM, rngs=nnx.Rngs(1))
    switch(ffn, (), replace(VENOM, activations=VNM(8, 2, 32)))
    assert ffn.router_state is not None
    assert ffn.router_state["centres"].shape == (8, 16)
    w_up = np.asarray(ffn.w_up[...])
    unit = w_up / np.linalg.norm(w_up, axis=0)
    centre = unit[:, :8].mean(axis=1)
    centre /= np.linalg.norm(centre)
    first = ffn.router_state["centres"][0]
    np.testing.assert_allclose(first, centre, rtol=1e-5, atol=1e-6)


def test_the_inside_of_the_experts_changes_without_clustering_anew():
    model, tokens = make_model(VENOM), make_tokens()
    before = nnx.state(model, nnx.Param)
    before = jax.tree.map(np.asarray, before)
    inside = replace(VENOM, activations=VNM(8, 4, 16))
    switch(model, (), inside)
    assert {ffn.sparsity for ffn in sparse_ffns(model)} == {inside}
    jax.tree.map(np.testing.assert_array_equal, before, nnx.state(model, nnx.Param))
    dense_inside = model(tokens)
    switch(model, (), VENOM)
    assert np.abs(model(tokens) - dense_inside).max() > 1e-3


class Encoder(nnx.Module):
    """An FFN, and one in a module of its own under the same name."""

    def __init__(self, rngs):
        self.ffn = SparseFFN(16, 64, rngs=rngs)


class Nested(nnx.Module):
    def __init__(self, rngs):
        self.ffn = SparseFFN(16, 64, rngs=rngs)
        self.encoder = Encoder(rngs)
        self.w_up = nnx.Param(jnp.linspace(-1, 1, 16 * 64).reshape(16, 64))

    def __call__(self, x):
        return self.encoder.ffn(self.ffn(x)) @ self.w_up[...]


def state_of(*things):
    """All arrays, copied."""
    return jax.tree.map(jnp.copy, [nnx.state(thing) for thing in things])


def assert_same(state, other):
    jax.tree.map(np.testing.assert_array_equal, state, other)


@pytest.mark.parametrize("kind", ["optax state", "optimizer", "pure dict"])
def test_moments_of_nested_ffns_follow_their_own_neurons_once(kind):
    model = Nested(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    params = jax.tree.map(jnp.copy, nnx.state(model, nnx.Param))
    if kind == "optimizer":
        # moments that name their own neuron: copies of the weights
        for moment in ("mu", "nu"):
            copies = getattr(optimizer.opt_state[0], moment)
            jax.tree.map(
                lambda moment, param: moment.set_value(jnp.copy(param.get_value())),
                copies,
                params,
                is_leaf=lambda leaf: isinstance(leaf, nnx.Variable),
            )
        assert switch(model, optimizer, VENOM) is optimizer
        moved = nnx.to_pure_dict(nnx.state(optimizer))["opt_state"][0]
        moments = [moved["mu"], moved["nu"]]
    else:
        named = nnx.to_pure_dict(params) if kind == "pure dict" else params
        state = optax.adam(1e-3).init(named)
        state = (state[0]._replace(mu=named, nu=named), *state[1:])
        state = switch(model, state, VENOM)
        moments = [state[0].mu, state[0].nu]
    relabelled = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    for moment in moments:
        if isinstance(moment, nnx.State):
            moment = nnx.to_pure_dict(moment)
        assert_same(moment, relabelled)
    for old, new in (
        (params["ffn"]["w_up"][...], model.ffn.w_up[...]),
        (params["encoder"]["ffn"]["w_up"][...], model.encoder.ffn.w_up[...]),
    ):
        assert not np.array_equal(old, new)
        np.testing.assert_array_equal(np.sort(old, axis=1), np.sort(new, axis=1))
    # A parameter of the same name that is no FFN's stays.
    np.testing.assert_array_equal(model.w_up[...], params["w_up"][...])


def test_the_next_step_is_that_of_the_renumbered_optimiser():
    x = jax.random.normal(jax.random.key(3), (64, 16))

    def trained(switched: bool):
        model = Nested(nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
        loss_of = lambda model: jnp.mean(model(x) ** 2)
        for step in range(4):
            if step == 2 and switched:
                # in and out again: the function is as before, neurons are renumbered
                switch(model, optimizer, VENOM, fold=False)
                switch(model, optimizer, DENSE, fold=False)
            optimizer.update(model, nnx.grad(loss_of)(model))
        return model(x)

    # Sums over the neurons in another order; outputs of size 1.
    np.testing.assert_allclose(trained(True), trained(False), rtol=1e-4, atol=1e-4)


def test_factored_moments_follow_their_neurons():
    model = Nested(nnx.Rngs(0))
    params = nnx.state(model, nnx.Param)
    optimizer = optax.adafactor(1e-2, min_dim_size_to_factor=8)
    # squares of the weights, averaged along rows and columns
    _, state = optimizer.update(params, optimizer.init(params), params)
    state = switch(model, state, VENOM)
    relabelled = nnx.state(model, nnx.Param)
    _, fresh = optimizer.update(relabelled, optimizer.init(relabelled), relabelled)
    for own, expected in zip(
        jax.tree.leaves(state), jax.tree.leaves(fresh), strict=True
    ):
        np.testing.assert_allclose(own, expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("leaf", "message"),
    [
        # eight-bit moments in blocks, a preconditioner, all moments in one vector
        ({"ffn": {"w_up": jnp.zeros((4, 256))}}, "ffn.w_up.*shape.*does not say where"),
        ({"ffn": {"w_up": jnp.zeros((64, 64))}}, "ffn.w_up.*shape.*does not say where"),
        ({"mu": jnp.zeros(5000)}, "mu.*belongs to no parameter"),
    ],
)
def test_moments_that_cannot_be_permuted_are_refused_and_nothing_has_changed(
    leaf, message
):
    model = Nested(nnx.Rngs(0))
    before = state_of(model)
    with pytest.raises(ValueError, match=f"{message}.*optimizer=None"):
        switch(model, leaf, VENOM)
    assert_same(state_of(model), before)
    assert {ffn.sparsity for ffn in sparse_ffns(model)} == {DENSE}


def test_moments_of_a_square_weight_that_lost_an_axis_are_refused():
    ffn = SparseFFN(64, 64, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="does not say where"):
        switch(ffn, {"w_up": jnp.zeros(64)}, VENOM)


def test_a_sparsity_that_one_ffn_cannot_have_changes_none():
    model = nnx.List(
        [SparseFFN(16, 64, rngs=nnx.Rngs(0)), SparseFFN(16, 40, rngs=nnx.Rngs(1))]
    )
    before = state_of(model)
    for change in (switch, lambda model, _, sparsity: set_sparsity(model, sparsity)):
        with pytest.raises(ValueError, match="d_hidden=40 is not a multiple"):
            change(model, (), VENOM)
    assert_same(state_of(model), before)


def test_a_switch_touches_only_the_ffns_that_change():
    model = nnx.List([SparseFFN(16, 64, rngs=nnx.Rngs(i)) for i in range(2)])
    first, second = model
    switch(first, (), TWO_FOUR)
    # weights that have moved since: their frozen betas have not
    first.w_up[...] = jnp.abs(first.w_up[...]) + 1
    second.w_up[...] = jnp.abs(second.w_up[...]) + 1
    frozen, stale = np.asarray(first.scales[...]), np.asarray(second.scales[...])
    switch(model, (), TWO_FOUR)
    np.testing.assert_array_equal(first.scales[...], frozen)
    assert not np.allclose(second.scales[...], stale)
    switch(first, (), VENOM)
    clustered = state_of(first)
    switch(model, (), VENOM)
    assert_same(state_of(first), clustered)


@pytest.mark.parametrize(
    "act",
    [
        lambda model: switch(model, (), TWO_FOUR),
        lambda model: switch(model, (), DENSE),
        lambda model: set_sparsity(model, DENSE),
        lambda model: relabel_neurons(model, ()),
    ],
)
def test_a_model_without_a_sparse_ffn_is_refused(act):
    with pytest.raises(ValueError, match="SparseFFN"):
        act(nnx.Linear(4, 4, rngs=nnx.Rngs(0)))


def test_set_sparsity_enters_two_four_weights_as_a_switch_does():
    ours, theirs = (SparseFFN(16, 64, rngs=nnx.Rngs(0)) for _ in range(2))
    for ffn in (ours, theirs):
        ffn.w_up[...] = ffn.w_up[...] ** 3
    set_sparsity(ours, TWO_FOUR)
    switch(theirs, None, TWO_FOUR)
    assert_same(state_of(ours), state_of(theirs))
    assert ours.sparsity == theirs.sparsity == TWO_FOUR


def test_set_sparsity_refuses_to_renumber_neurons_behind_an_optimisers_back():
    model = Nested(nnx.Rngs(0))
    before = state_of(model)
    with pytest.raises(ValueError, match=r"renumbered.*switch\(model, optimizer"):
        set_sparsity(model, VENOM)
    assert_same(state_of(model), before)
    # From experts to as many experts nothing is renumbered.
    switch(model, None, VENOM)
    set_sparsity(model, replace(VENOM, weights=None))
    assert model.ffn.sparsity.weights is None


def test_relabelling_takes_the_ffns_that_have_experts():
    model = Nested(nnx.Rngs(0))
    with pytest.raises(ValueError, match="has experts"):
        relabel_neurons(model, ())
    switch(model.encoder, (), VENOM)
    before = state_of(model.ffn)
    model.encoder.ffn.w_up[...] = model.encoder.ffn.w_up[...][:, ::-1]
    moments = {"encoder": {"ffn": {"w_up": model.encoder.ffn.w_up[...]}}}
    moments = relabel_neurons(model, moments)
    assert_same(state_of(model.ffn), before)
    np.testing.assert_array_equal(
        moments["encoder"]["ffn"]["w_up"], model.encoder.ffn.w_up[...]
    )


def test_a_switch_runs_under_jit():
    model, traced = Nested(nnx.Rngs(0)), Nested(nnx.Rngs(0))
    optimizers = [
        nnx.Optimizer(of, optax.adam(1e-2), wrt=nnx.Param) for of in (model, traced)
    ]
    switch(model, optimizers[0], VENOM)
    nnx.jit(lambda *both: switch(*both, VENOM) and None)(traced, optimizers[1])
    for own, expected in zip(
        jax.tree.leaves(state_of(traced, optimizers[1])),
        jax.tree.leaves(state_of(model, optimizers[0])),
        strict=True,
    ):
        np.testing.assert_allclose(own, expected, rtol=1e-6)


class Stack(nnx.Module):
    def __init__(self, **options):
        make = lambda seed: SparseFFN(16, 64, rngs=nnx.Rngs(seed), **options)
        self.layers = nnx.List([make(0), make(1)])


@pytest.mark.parametrize("as_state", [False, True])
def test_the_state_of_a_larger_model_is_refused_and_nothing_has_changed(as_state):
    model = Stack()
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    given = optax.adam(1e-3).init(nnx.state(model, nnx.Param))
    before = nnx.to_pure_dict(nnx.state(model))
    with pytest.raises(ValueError, match=r"moments of layers\.0\.w_\w+ and of layers"):
        switch(model.layers[0], given if as_state else optimizer, VENOM)
    jax.tree.map(
        np.testing.assert_array_equal, nnx.to_pure_dict(nnx.state(model)), before
    )
    assert model.layers[0].sparsity == DENSE
    # What was given to the optimiser may have the model in some place of its own.
    inner = optax.adam(1e-3).init({"inner": nnx.state(model, nnx.Param)})
    switch(model, inner, VENOM)
    assert model.layers[1].sparsity == VENOM


def test_a_state_without_fields_may_be_a_tuple_and_no_dictionary():
    ffn = SparseFFN(16, 64, rngs=nnx.Rngs(0))
    numbers = jax.tree.map(
        lambda w: jnp.arange(float(w.size)).reshape(w.shape),
        nnx.to_pure_dict(nnx.state(ffn, nnx.Param)),
    )
    with pytest.raises(ValueError, match="has to name them by fields"):
        switch(ffn, {"first": numbers, "second": numbers}, VENOM)
    first, second = switch(ffn, (numbers, numbers), VENOM)
    jax.tree.map(np.testing.assert_array_equal, first, second)
    order = (np.asarray(first["w_up"])[0] % 64).astype(int)
    np.testing.assert_array_equal(first["w_down"], numbers["w_down"][order])
    assert sorted(order) == list(range(64)) != order.tolist()


def test_an_array_for_each_axis_follows_its_neurons():
    """SM3 keeps two of them below the path of a weight."""
    ffn = SparseFFN(16, 64, rngs=nnx.Rngs(0))
    accumulate = optax.scale_by_sm3()
    params = nnx.state(ffn, nnx.Param)
    params = jax.tree.map(jnp.copy, params)
    state = accumulate.init(params)
    number = lambda x: jnp.arange(64.0) if x.shape == (64,) else x
    after = switch(ffn, jax.tree.map(number, state), VENOM)
    # The columns of W1 say in which order the neurons are now.
    order = [
        int(np.flatnonzero((np.asarray(params["w_up"][...]).T == column).all(1))[0])
        for column in np.asarray(ffn.w_up[...]).T
    ]
    np.testing.assert_array_equal(after.mu["w_up"].get_value()[1], order)
    np.testing.assert_array_equal(after.mu["w_down"].get_value()[0], order)
    assert sorted(order) == list(range(64)) != order


def test_an_ffn_without_trained_weights_enters_experts():
    class Frozen(nnx.Variable):
        pass

    ffn = SparseFFN(16, 64, rngs=nnx.Rngs(0))
    ffn.w_up, ffn.w_down = Frozen(ffn.w_up[...]), Frozen(ffn.w_down[...])
    x = jax.random.normal(jax.random.key(0), (5, 16))
    y = ffn(x)
    switch(ffn, None, VENOM)
    set_sparsity(ffn, DENSE)
    np.testing.assert_allclose(ffn(x), y, rtol=1e-5, atol=1e-5)
