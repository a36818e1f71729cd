"""What a module computes, found out by calling it, and what cannot be kept."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from sparsejax import VNM, ActivationEnergy, FFNSparsity
from sparsejax.interchange.sparsify import explain, sparsify
from tests.support.foreign_ffns import D, Gated, Plain

BY_EXPERT = FFNSparsity(activations=VNM(8, 2, 16), router=ActivationEnergy())


def clamped(h, limit):
    return nnx.silu(jnp.minimum(h, limit))


@pytest.mark.parametrize("limit", [7.0, 200.0])
def test_a_clamp_that_small_tokens_do_not_reach_is_refused(limit):
    module = Gated(nnx.Rngs(0), act=lambda h: clamped(h, limit))
    with pytest.raises(ValueError, match="its output is not that of swiglu or reglu2"):
        sparsify(module, [""])


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


class Float32Alone(Plain):
    def __call__(self, x):
        assert x.dtype == jnp.float32
        return super().__call__(x)


def test_a_module_that_refuses_bfloat16_is_an_ffn_of_float32():
    module, x = Float32Alone(nnx.Rngs(0)), jax.random.normal(jax.random.key(0), (5, D))
    before = module(x)
    sparsify(module, [""])
    np.testing.assert_allclose(module(x), before, rtol=1e-5, atol=1e-5)


class Refusing(Plain):
    """Takes no other number of tokens than 32."""

    def __call__(self, x):
        assert x.shape[-2] == 32, "x must have 32 tokens"
        return super().__call__(x)


def test_what_another_module_raises_is_its_reason():
    model = nnx.Sequential(Plain(nnx.Rngs(0)), Refusing(nnx.Rngs(1)))
    sparsify(model, ["layers/0"])
    (reason,) = [of for of in explain(model) if of.path == "layers/1"]
    assert "AssertionError: x must have 32 tokens" in str(reason)
    with pytest.raises(ValueError, match="layers/1, .* AssertionError: x must have 32"):
        sparsify(model, ["layers/1"])


def test_float16_is_refused_with_the_module_that_has_it():
    stored = Plain(nnx.Rngs(0), param_dtype=jnp.float16)
    with pytest.raises(ValueError, match="its parameters are float16: a SparseFFN"):
        sparsify(nnx.Sequential(stored), ["layers/0"])
    computed = Plain(nnx.Rngs(0), dtype=jnp.float16)
    with pytest.raises(ValueError, match="layers/0, .* it computes in float16: a Spa"):
        sparsify(nnx.Sequential(computed), ["layers/0"])
    with pytest.raises(ValueError, match="dtype=float16, and an FFN computes in"):
        sparsify(Plain(nnx.Rngs(0)), [""], dtype=jnp.float16)
