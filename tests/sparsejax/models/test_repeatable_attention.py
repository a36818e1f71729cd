"""Calls of cuDNN's flash attention as they are lowered for a GPU that is not here."""

import re

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax._src.cudnn import fused_attention_stablehlo

from sparsejax.models.attention import Attention
from sparsejax.models.repeatable_attention import (
    ask_for_repeatable_gradients,
    bits_repeat,
)
from tests.support.devices.flash_attention import pretend_cudnn

SETTINGS = "create_dot_product_attention_backend_config_base"


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", False),
        ("--xla_gpu_autotune_level=0", False),
        ("--xla_gpu_deterministic_ops=true", True),
        ("--first --xla_gpu_deterministic_ops --last", True),
        ("--xla_gpu_exclude_nondeterministic_ops=1", True),
        ("--xla_gpu_deterministic_ops=false", False),
        ("--xla_gpu_deterministic_ops=true --xla_gpu_deterministic_ops=false", False),
        ("--xla_gpu_deterministic_ops_of_another_kind=true", False),
    ],
)
def test_bits_repeat_where_xla_is_asked_for_it(monkeypatch, flags, expected):
    monkeypatch.setenv("XLA_FLAGS", flags)
    assert bits_repeat() is expected


@pytest.mark.parametrize("flags", ["", "--xla_gpu_deterministic_ops=true"])
def test_every_call_says_whether_its_gradient_repeats_its_bits(monkeypatch, flags):
    """XLA itself says it of the first of equal calls alone."""
    pretend_cudnn(monkeypatch)
    _put_back(monkeypatch)
    monkeypatch.setenv("XLA_FLAGS", flags)
    first, second = (_attention(seed) for seed in range(2))

    def loss(x):
        return jnp.sum(second(first(x)).astype(jnp.float32))

    x = jax.ShapeDtypeStruct((2, 128, 128), jnp.bfloat16)
    lowered = jax.jit(jax.grad(loss)).trace(x).lower(lowering_platforms=("cuda",))
    calls = re.findall(r"@__cudnn\$fmhaSoftmax(?:Backward)?\(.*", lowered.as_text())
    assert len(calls) == 4
    said = ["force_deterministic" in call for call in calls]
    assert said == [bool(flags)] * 4


def _attention(seed: int) -> Attention:
    return Attention(128, 2, dtype=jnp.bfloat16, rngs=nnx.Rngs(seed))


def _put_back(monkeypatch) -> None:
    """Lets what is replaced in JAX be put back behind the test."""
    original = getattr(fused_attention_stablehlo, SETTINGS)
    monkeypatch.setattr(fused_attention_stablehlo, SETTINGS, original)
    ask_for_repeatable_gradients.cache_clear()
