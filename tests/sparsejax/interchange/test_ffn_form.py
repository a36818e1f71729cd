"""What a module computes, found out by calling it, and what cannot be kept."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from sparsejax import VNM, ActivationEnergy, FFNSparsity, switch
from sparsejax.interchange.sparsify import densify, sparsify
from tests.support.foreign_ffns import MODULES, D, Gated, Model, Plain

BY_EXPERT = FFNSparsity(activations=VNM(8, 2, 16), router=ActivationEnergy())


def clamped(h, limit):
    return nnx.silu(jnp.minimum(h, limit))


@pytest.mark.parametrize("limit", [7.0, 200.0])
def test_a_clamp_that_small_tokens_do_not_reach_is_refused(limit):
    module = Gated(nnx.Rngs(0), act=lambda h: clamped(h, limit))
    with pytest.raises(ValueError, match="its output is not that of swiglu or reglu2"):
        sparsify(module, [""])


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


@pytest.mark.parametrize(
    ("chosen", "of_params", "computes"),
    [
        (None, "bfloat16", "bfloat16"),
        ("float32", "bfloat16", "float32"),
    ],
)
def test_a_module_that_computes_in_the_dtype_of_x_keeps_one(
    chosen, of_params, computes
):
    module = Gated(nnx.Rngs(0), param_dtype=jnp.dtype(of_params))
    x = jax.random.normal(jax.random.key(0), (5, D), jnp.dtype(computes))
    before = module(x)
    assert before.dtype == computes
    sparsify(module, [""], dtype=chosen)
    after = module(x)
    assert after.dtype == computes
    np.testing.assert_allclose(
        after.astype(jnp.float32), before.astype(jnp.float32), rtol=0.05, atol=0.02
    )
    other = "float32" if computes == "bfloat16" else "bfloat16"
    with pytest.raises(ValueError, match=f"x has dtype {other}.* dtype='{other}'"):
        module(x.astype(other))


def test_a_rule_that_is_no_expression_is_named():
    with pytest.raises(ValueError, match=r"rule '\(layers' is no regular expression"):
        sparsify(Model(MODULES["two"]), ["(layers"])


class Float32Alone(Plain):
    def __call__(self, x):
        assert x.dtype == jnp.float32
        return super().__call__(x)


def test_a_module_that_refuses_bfloat16_is_an_ffn_of_float32():
    module, x = Float32Alone(nnx.Rngs(0)), jax.random.normal(jax.random.key(0), (5, D))
    before = module(x)
    sparsify(module, [""])
    np.testing.assert_allclose(module(x), before, rtol=1e-5, atol=1e-5)
