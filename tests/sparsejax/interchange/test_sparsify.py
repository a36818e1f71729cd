"""Models that know nothing of `SparseFFN`, made sparse and back."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from sparsejax import (
    NM,
    VNM,
    ActivationEnergy,
    FFNSparsity,
    SparseFFN,
    loss_and_gradient,
    switch,
)
from sparsejax.interchange.sparsify import densify, explain, sparsify
from tests.support.foreign_ffns import (
    MODULES,
    D,
    F,
    Fused,
    Gated,
    Model,
    Plain,
    halves,
    relu2,
)

TWO_FOUR = FFNSparsity(weights=NM(2, 4))
BY_EXPERT = FFNSparsity(activations=VNM(8, 2, 16), router=ActivationEnergy())


ALL = [r"layers/\d"]
X = jax.random.normal(jax.random.key(3), (2, 8, D))


def parameters_of(model):
    """Returns copies of the parameters, which later changes do not reach."""
    return jax.tree.map(jnp.copy, nnx.state(model, nnx.Param))


def loss_of(model, x):
    return (model(x) ** 2).mean()


def distance(got, expected) -> float:
    """Returns the norm of the difference over the larger norm, 0 where both are."""
    norm = max(jnp.linalg.norm(got), jnp.linalg.norm(expected))
    return float(jnp.linalg.norm(got - expected) / max(norm, 1e-30))


@pytest.mark.parametrize("make", MODULES.values(), ids=MODULES)
def test_function_gradient_and_parameters_stay(make):
    model = Model(make)
    y, gradient = model(X), nnx.grad(loss_of)(model, X)
    params = parameters_of(model)
    explained = sparsify(model, ALL)
    assert [of.path for of in explained] == ["layers/0", "layers/1"]
    assert all(isinstance(layer, SparseFFN) for layer in model.layers)
    # The same sums, rounded in another order: 16 and 64 products.
    tolerance = 3e-2 if model.layers[0].dtype == jnp.bfloat16 else 1e-5
    assert distance(model(X), y) < tolerance
    own = nnx.grad(loss_of)(model, X)
    assert jax.tree.structure(own) == jax.tree.structure(gradient)
    for got, expected in zip(*map(jax.tree.leaves, (own, gradient)), strict=True):
        assert got.shape == expected.shape and got.dtype == expected.dtype
        assert distance(got, expected) < tolerance
    jax.tree.map(np.testing.assert_array_equal, parameters_of(model), params)


@pytest.mark.parametrize("make", MODULES.values(), ids=MODULES)
def test_a_module_gets_each_attribute_of_a_sparse_ffn_and_loses_them_again(make):
    model = Model(make)
    module = model.layers[0]
    before = dict(vars(module))
    sparsify(model, ALL)
    of_sparse_ffn = vars(SparseFFN(D, F, rngs=nnx.Rngs(0))).keys()
    kernels = {"w_up", "w_down", "w_gate"}
    added = {"form", "_original", "_replaced"}
    got = vars(module).keys() - (before.keys() - of_sparse_ffn)
    assert got - kernels == (of_sparse_ffn - kernels) | added
    for name in of_sparse_ffn:  # also the kernels, which are properties of its class
        getattr(module, name)
    densify(model)
    assert vars(module).keys() == before.keys()


def test_what_is_sparse_reads_the_modules_own_kernels():
    """A gated FFN of fused kernels with 2:4 weights against one with the same ones."""
    model = Model(MODULES["fused"])
    sparsify(model, ALL)
    layer = model.layers[0]
    like = SparseFFN(D, F, activation="swiglu", rngs=nnx.Rngs(1))
    gate, up = halves(layer.gate_up[...])
    like.w_gate[...], like.w_up[...] = gate, up
    like.w_down[...] = layer.down.kernel[...]
    for ffn in (layer, like):
        switch(ffn, None, TWO_FOUR)
    np.testing.assert_array_equal(layer.scales[...], like.scales[...])
    np.testing.assert_array_equal(layer(X), like(X))
    for ffn in (layer, like):  # folds the gate and the up projection
        switch(ffn, None, FFNSparsity())
    np.testing.assert_array_equal(layer.gate_up[...][:, :F], like.w_gate[...])
    np.testing.assert_array_equal(layer.gate_up[...][:, F:], like.w_up[...])


@pytest.mark.parametrize("kind", ["two", "transposed"])
def test_neurons_are_renumbered_where_they_lie_and_moments_with_them(kind):
    model = Model(MODULES[kind])
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    sparsify(model, ALL)
    y = model(X)
    # Moments that are the parameters stay so.
    params = parameters_of(model)
    adam = optimizer.opt_state[0]
    for moments in (adam.mu, adam.nu):
        nnx.update(moments, params)
    switch(model, optimizer, BY_EXPERT)
    switch(model, optimizer, FFNSparsity())
    renumbered = parameters_of(model)
    changed = jax.tree.map(lambda a, b: bool((a != b).any()), params, renumbered)
    assert sum(jax.tree.leaves(changed)) == 4  # two kernels of two layers
    for moments in (adam.mu, adam.nu):
        pairs = zip(*map(jax.tree.leaves, (moments, renumbered)), strict=True)
        for moment, param in pairs:
            np.testing.assert_array_equal(moment, param)
    # The same sums in another order.
    np.testing.assert_allclose(model(X), y, atol=1e-5)


FUSED = [name for name in MODULES if isinstance(Model(MODULES[name]).layers[0], Fused)]


@pytest.mark.parametrize("name", [*FUSED, "swiglu", "reglu2"])
def test_gate_and_up_are_renumbered_alike_where_they_are_one_kernel(name):
    """A token with all experts, dense inside, uses all neurons: entering such a phase
    keeps the function, if gate, up and down have their neurons in one order."""
    model = Model(MODULES[name])
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    sparsify(model, ALL)
    y, params = model(X), parameters_of(model)
    adam = optimizer.opt_state[0]
    for moments in (adam.mu, adam.nu):
        nnx.update(moments, params)
    every_expert = FFNSparsity(
        activations=VNM(8, 4, 16),
        experts_per_token=4,
        skip_blocks=True,
        weight_gradients="expert_columns",
    )
    switch(model, optimizer, every_expert)
    # The same sums in another order, in float32.
    assert distance(model(X), y) < 1e-5
    renumbered = parameters_of(model)
    changed = jax.tree.map(lambda a, b: bool((a != b).any()), params, renumbered)
    kernels = 2 if name in FUSED else 3
    assert sum(jax.tree.leaves(changed)) == 2 * kernels
    for moments in (adam.mu, adam.nu):
        pairs = zip(*map(jax.tree.leaves, (moments, renumbered)), strict=True)
        for moment, param in pairs:
            np.testing.assert_array_equal(moment, param)


def test_training_through_a_sparse_phase_and_back():
    model = Model(lambda rngs: Plain(rngs))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    attributes = [set(vars(layer)) for layer in model.layers]
    sparsify(model, ALL)

    @nnx.jit
    def step(model, optimizer, x):
        of = lambda model, x: ((model(x) - jnp.sin(3 * x[..., :5])) ** 2).mean()
        loss, gradient = loss_and_gradient(of, model, x)
        optimizer.update(model, gradient)
        return loss

    losses = []
    for sparsity in (
        FFNSparsity(),
        FFNSparsity(weights=NM(2, 4), activations=NM(2, 4)),
    ):
        switch(model, optimizer, sparsity)
        losses += [float(step(model, optimizer, X[None])) for _ in range(30)]
    assert losses[59] < losses[30] < losses[0]
    y = model(X)
    switch(model, optimizer, TWO_FOUR)
    with_weights = model(X)
    densify(model)
    assert [type(layer) for layer in model.layers] == [Plain, Plain]
    assert [set(vars(layer)) for layer in model.layers] == attributes
    # Folded, the dense model computes what the one with 2:4 weights did; the masks of
    # activations were no part of the weights.
    np.testing.assert_allclose(model(X), with_weights, atol=1e-5)
    assert (model(X) != y).any() and model.layers[0].activation is relu2
    with pytest.raises(ValueError, match="no module of the Model was changed by"):
        densify(model)


@pytest.mark.parametrize("axis", [0, 1])
def test_layers_that_are_stacked_are_found_and_called_one_at_a_time(axis):
    in_axis = nnx.StateAxes({nnx.Param: axis, ...: 0})

    class Stacked(nnx.Module):
        def __init__(self):
            make = nnx.vmap(lambda rngs: Gated(rngs), out_axes=in_axis)
            self.layers = nnx.split_rngs(splits=3)(make)(nnx.Rngs(0))

        def __call__(self, x):
            scan = nnx.scan(
                lambda x, layer: x + layer(x),
                in_axes=(nnx.Carry, in_axis),
                out_axes=nnx.Carry,
            )
            return scan(x, self.layers)

    model = Stacked()
    shapes = [jnp.shape(of) for of in jax.tree.leaves(nnx.state(model, nnx.Param))]
    assert all(shape[axis] == 3 for shape in shapes)
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    # So small that sums in another order differ by less than the tolerance below.
    x = X / 4
    y = model(x)
    (explained,) = sparsify(model, ["layers"])
    assert explained.reason.startswith("swiglu of parts.a.kernel, parts.b.kernel, ")
    assert model.layers.scales[...].shape == (3, 3)
    np.testing.assert_allclose(model(x), y, atol=1e-5)
    switch(model, None, TWO_FOUR)
    assert (model(x) != y).any()
    switch(model, None, FFNSparsity(), fold=False)
    # Renumbered neurons leave the dense function as it was, and so do moments that
    # went with them: here they are the weights themselves.
    weights = nnx.state(model, nnx.Param)
    before = list(map(np.asarray, jax.tree.leaves(weights)))
    nnx.update(optimizer.opt_state[0].mu, weights)
    switch(model, optimizer, FFNSparsity(activations=VNM(8, 4, 16)))
    switch(model, optimizer, FFNSparsity())
    np.testing.assert_allclose(model(x), y, atol=1e-5)
    moments = jax.tree.leaves(nnx.state(optimizer.opt_state[0].mu))
    renumbered = jax.tree.leaves(nnx.state(model, nnx.Param))
    for moment, weight in zip(moments, renumbered, strict=True):
        np.testing.assert_array_equal(moment, weight)
    assert [jnp.shape(of) for of in renumbered] == shapes
    assert any((a != b).any() for a, b in zip(before, renumbered, strict=True))


class Normed(Plain):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.norm = nnx.RMSNorm(D, rngs=rngs)


class Counting(Plain):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.seen = nnx.BatchStat(jnp.zeros(()))


REFUSED = {
    "bias": (
        lambda rngs: nnx.Sequential(
            nnx.Linear(D, F, rngs=rngs), nnx.Linear(F, D, rngs=rngs)
        ),
        r"layers/0, a Sequential, .*layers\.0\.bias \(64,\), .* neither biases nor",
    ),
    "norm": (Normed, r"norm\.scale \(16,\) is no kernel"),
    "gelu": (
        lambda rngs: Plain(rngs, activation=nnx.gelu),
        r"its output is not that of relu2 on its kernels \(the nearest, relu2, is off",
    ),
    "geglu": (
        lambda rngs: Gated(rngs, act=nnx.gelu),
        r"its output is not that of swiglu or reglu2",
    ),
    "dropout": (lambda rngs: Gated(rngs, rate=0.1), r"it has dropout at rate 0\.1"),
    "state": (Counting, r"it keeps state that is no parameter \(BatchStat\)"),
    "attention": (
        lambda rngs: nnx.MultiHeadAttention(2, D, use_bias=False, rngs=rngs),
        r"it has 4 kernels, and an FFN has two, three",
    ),
    "widths": (
        lambda rngs: nnx.Sequential(
            *(nnx.Linear(D, o, use_bias=False, rngs=rngs) for o in (F, 3 * F))
        ),
        r"kernels layers\.0\.kernel \(16, 64\), .* lead to no hidden layer and back",
    ),
    "call": (
        lambda rngs: NeedsMore(rngs),
        r"cannot be called with x \(1, 8, d_model\) alone \(d_model 16: TypeError",
    ),
}


class NeedsMore(Plain):
    def __call__(self, x, mode):
        return super().__call__(x)


@pytest.mark.parametrize(("make", "message"), REFUSED.values(), ids=REFUSED)
def test_what_is_no_such_ffn_is_refused_and_nothing_is_changed(make, message):
    model = Model(MODULES["two"])
    model.layers[0] = make(nnx.Rngs(0))
    types = [type(layer) for layer in model.layers]
    with pytest.raises(ValueError, match=message):
        sparsify(model, [r"layers/1", r"layers/0"])
    assert [type(layer) for layer in model.layers] == types


def test_a_module_is_called_as_the_caller_says():
    model = Model(NeedsMore)
    how = lambda module, x: module(x, "train")
    y = how(model.layers[0], X)
    sparsify(model, ALL, call=how)
    np.testing.assert_allclose(how(model.layers[0], X), y, atol=1e-5)


def test_rules_that_choose_nothing_or_the_wrong_thing_are_refused():
    model = Model(MODULES["two"])
    with pytest.raises(
        ValueError, match=r"rule 'layer' is the path of no module .*/wi"
    ):
        sparsify(model, ["layer"])
    sparsify(model, ["layers/0"])
    with pytest.raises(ValueError, match="layers/0 is a SparseFFN already"):
        sparsify(model, ALL)
    assert type(model.layers[1]) is Plain
    with pytest.raises(ValueError, match="layers/0 is traced, .* outside of it"):
        nnx.jit(lambda: sparsify(Model(MODULES["two"]), ALL))()
    shapes = nnx.eval_shape(lambda: Model(MODULES["two"]))
    with pytest.raises(ValueError, match="layers/0 has shapes and no weights"):
        sparsify(shapes, ALL)


def test_explanations_say_what_was_changed_and_why_the_rest_was_not():
    model = Model(MODULES["reglu2"])
    model.attention = nnx.MultiHeadAttention(2, D, use_bias=False, rngs=nnx.Rngs(0))
    model.built = SparseFFN(D, F, rngs=nnx.Rngs(0))
    sparsify(model, ["layers/0"])
    switch(model.layers[0], None, TWO_FOUR)
    found = {of.path: of for of in explain(model)}
    assert set(found) == {"layers/0", "layers/1", "attention", "built"}
    assert found["layers/0"].sparsity == TWO_FOUR and found["layers/0"].is_sparse_ffn
    assert found["layers/0"].reason == (
        "reglu2 of parts.a.kernel, parts.b.kernel, parts.c.kernel; d_model 16, "
        "d_hidden 64, float32"
    )
    assert found["layers/1"].reason.startswith("no rule has chosen it, though it could")
    assert not found["attention"].is_sparse_ffn
    assert found["attention"].reason.startswith("it has 4 kernels")
    assert found["built"].reason == "built as a SparseFFN"


def test_what_training_steps_would_observe_is_refused():
    """The model around may call its layers in a loop that drops it."""
    model = Plain(nnx.Rngs(0))
    sparsify(model, [""])
    observing = replace(BY_EXPERT, skipped_energy=0.05)
    with pytest.raises(ValueError, match="another model cannot keep penalty_strength"):
        switch(model, None, observing)


class Pair(nnx.Module):
    """Two FFNs; they may share a layer, or a kernel, or be one."""

    def __init__(self, shared):
        self.a, self.b = Plain(nnx.Rngs(0)), Plain(nnx.Rngs(1))
        if shared == "layer":
            self.b.wi = self.a.wi
        elif shared == "kernel":
            self.b.wo.kernel = self.a.wo.kernel
        elif shared == "all":
            self.b = self.a
        self.tied = self.a.wi.kernel if shared == "with the model" else None

    def __call__(self, x):
        return self.b(self.a(x) + x)


@pytest.mark.parametrize("rule", ["a", "b", "a|b"])
@pytest.mark.parametrize("shared", ["layer", "kernel"])
def test_parameters_that_two_modules_share_are_refused(shared, rule):
    model = Pair(shared)
    with pytest.raises(ValueError, match="it shares a parameter with [ab]"):
        sparsify(model, [rule])
    assert type(model.a) is type(model.b) is Plain


def test_a_parameter_that_the_model_holds_too_is_refused():
    with pytest.raises(ValueError, match="it shares a parameter with the model"):
        sparsify(Pair("with the model"), ["a"])


def test_one_module_in_two_places_keeps_its_function():
    model, x = Pair("all"), jax.random.normal(jax.random.key(0), (5, D))
    before = model(x)
    sparsify(model, "a")
    switch(model, None, BY_EXPERT)
    densify(model)
    np.testing.assert_allclose(model(x), before, rtol=1e-5, atol=1e-5)


def test_a_rule_that_is_no_expression_is_named():
    with pytest.raises(ValueError, match=r"rule '\(layers' is no regular expression"):
        sparsify(Model(MODULES["two"]), ["(layers"])
