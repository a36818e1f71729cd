"""The six GEMMs: every combination against the masked dense oracle."""

from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ffn_oracle import ffn_oracle
from sparsejax.ops.ffn import ffn
from sparsejax.ops.ffn_spec import FFNSparsity
from sparsejax.ops.token_sparsity import fixed_token_order
from sparsejax.patterns import NM, VNM

TOKENS, D_MODEL, D_HIDDEN = 37, 8, 128
TWO_FOUR = NM(2, 4)
SCALES = (1.5, 1.25)

# In float64 library and oracle take the same decisions, and differ by rounding only:
# sums of at most 128 products of numbers near 1, each rounded at 1e-16.
TOLERANCE = 1e-11


def all_sparsities():
    """Every combination that FFNSparsity accepts, the stochastic estimators aside."""
    options = {
        "weights": (None, TWO_FOUR),
        "activations": (None, TWO_FOUR, VNM(8, 2, 16)),
        "router": ("nearest_centre", "token_hash", "true_mass"),
        "experts_per_token": (1, 2),
        "skip_blocks": (False, True),
        "mask_reuse": (True, False),
        "weight_gradients": ("dense", "expert_columns"),
        "token_sparsity": (None, "magnitude"),
        "permute_tokens": (True, False),
    }
    for values in product(*options.values()):
        chosen = dict(zip(options, values, strict=True))
        venom = isinstance(chosen["activations"], VNM)
        if not venom and (chosen["router"], chosen["experts_per_token"]) != (
            "nearest_centre",
            1,
        ):
            continue
        # before GEMM 1 the op only sees expert_index, whichever router made it
        if chosen["router"] == "token_hash":
            continue
        if chosen["token_sparsity"] is None and not chosen["permute_tokens"]:
            continue
        if chosen["activations"] is None and not chosen["mask_reuse"]:
            continue
        try:
            yield FFNSparsity(**chosen)
        except ValueError:
            continue


def name_of(s: FFNSparsity) -> str:
    parts = [
        "w24" if s.weights else "w-dense",
        {None: "a-dense", TWO_FOUR: "a24"}.get(s.activations, "venom"),
        f"{s.router}-{s.experts_per_token}" if s.experts else "",
        "skip" if s.skip_blocks else "",
        "" if s.mask_reuse else "no-reuse",
        s.weight_gradients,
        s.token_sparsity or "",
        "" if s.permute_tokens else "in-order",
    ]
    return "_".join(part for part in parts if part)


def make_inputs(seed=0, tokens=TOKENS, dtype=np.float64):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(tokens, D_MODEL))
    w_up = rng.normal(size=(D_MODEL, D_HIDDEN)) / np.sqrt(D_MODEL)
    w_down = rng.normal(size=(D_HIDDEN, D_MODEL)) / np.sqrt(D_HIDDEN)
    dy = rng.normal(size=(tokens, D_MODEL))
    return tuple(a.astype(dtype) for a in (x, w_up, w_down, dy))


def make_experts(sparsity, seed=1, tokens=TOKENS):
    """g distinct experts per token, expert 2 left without any token."""
    if not sparsity.experts or sparsity.router == "true_mass":
        return None
    rng = np.random.default_rng(seed)
    usable = [e for e in range(sparsity.experts) if e != 2]
    count = sparsity.experts_per_token
    return np.stack([rng.permutation(usable)[:count] for _ in range(tokens)])


def value_and_gradients(sparsity, x, w_up, w_down, dy, experts, backend=None, key=None):
    def run(x, w_up, w_down):
        return ffn(
            x,
            w_up,
            w_down,
            sparsity=sparsity,
            scales=jnp.array(SCALES, x.dtype) if sparsity.weights else None,
            expert_index=None if experts is None else jnp.asarray(experts, jnp.int32),
            key=key,
            backend=backend,
        )

    y, pull_back = jax.vjp(run, *(jnp.asarray(a) for a in (x, w_up, w_down)))
    return y, *pull_back(jnp.asarray(dy, y.dtype))


def oracle(sparsity, x, w_up, w_down, dy, experts):
    order = np.arange(len(x))
    if sparsity.permute_tokens:
        order = fixed_token_order(len(x))
    return ffn_oracle(
        x,
        w_up,
        w_down,
        dy,
        sparsity=sparsity,
        scales=SCALES,
        expert_index=experts,
        token_order=order,
    )


@pytest.mark.parametrize("sparsity", all_sparsities(), ids=name_of)
def test_matches_oracle(sparsity):
    inputs, experts = make_inputs(), make_experts(sparsity)
    with jax.enable_x64(True):
        got = jax.jit(value_and_gradients, static_argnums=0)(sparsity, *inputs, experts)
        expected = oracle(sparsity, *inputs, experts)
        for ours, theirs in zip(got, expected, strict=True):
            assert ours.dtype == jnp.float64
            np.testing.assert_allclose(ours, theirs, rtol=TOLERANCE, atol=TOLERANCE)
