"""The configurations of the sparse FFN under test, their inputs, and their runs."""

from itertools import product

import jax
import jax.numpy as jnp
import numpy as np

from sparsejax.feed_forward.ffn import ffn
from sparsejax.feed_forward.operands.token_sparsity import fixed_token_order
from sparsejax.feed_forward.sparsity import FFNSparsity
from sparsejax.routing.learned_energy import LearnedEnergy
from sparsejax.routing.named_routers import ROUTERS
from sparsejax.routing.routers import (
    NearestCentre,
    SameExperts,
    TokenHash,
)
from sparsejax.sparsity.patterns import NM, VNM
from tests.support.oracles.ffn_oracle import ffn_oracle

TOKENS, D_MODEL, D_HIDDEN = 37, 8, 128
TWO_FOUR = NM(2, 4)
SCALES = (1.5, 1.25)


def all_sparsities():
    """Every combination that FFNSparsity accepts, the stochastic estimators aside."""
    options = {
        "weights": (None, TWO_FOUR),
        "activations": (None, TWO_FOUR, VNM(8, 2, 16), VNM(8, 4, 16)),
        "router": ROUTERS,
        "experts_per_token": (1, 2),
        "skip_blocks": (False, True),
        "mask_reuse": (True, False),
        "weight_gradients": ("dense", "expert_columns"),
        "token_sparsity": (None, "magnitude"),
        "permute_tokens": (True, False),
        "exact_gradients": (False, True),
    }
    for values in product(*options.values()):
        chosen = dict(zip(options, values, strict=True))
        venom = isinstance(chosen["activations"], VNM)
        if not venom and (chosen["router"], chosen["experts_per_token"]) != (
            NearestCentre(),
            1,
        ):
            continue
        # before GEMM 1 the op only sees expert_index, whichever router made it
        if chosen["router"] in (TokenHash(), SameExperts(), LearnedEnergy()):
            continue
        if chosen["token_sparsity"] is None and not chosen["permute_tokens"]:
            continue
        # the order of tokens and rows does not depend on what is inside an expert
        if chosen["activations"] == VNM(8, 4, 16) and not (
            chosen["permute_tokens"]
            and chosen["token_sparsity"] == ("magnitude" if chosen["weights"] else None)
            and not (chosen["weights"] and chosen["experts_per_token"] == 2)
        ):
            continue
        if chosen["activations"] is None and not chosen["mask_reuse"]:
            continue
        # without 2:4 weights the setting changes nothing
        if chosen["weights"] is None and chosen["exact_gradients"]:
            continue
        try:
            yield FFNSparsity(**chosen)
        except ValueError:
            continue


def representative_sparsities():
    """Weights x activations x skip_blocks x token_sparsity, the rest at its default."""
    for s in all_sparsities():
        one_expert = (s.router, s.experts_per_token) == (NearestCentre(), 1)
        plain = s.mask_reuse and s.permute_tokens and not s.exact_gradients
        if one_expert and plain:
            yield s


def name_of(s: FFNSparsity) -> str:
    parts = [
        "w24" if s.weights else "w-dense",
        {None: "a-dense", TWO_FOUR: "a24", VNM(8, 4, 16): "inside"}.get(
            s.activations, "venom"
        ),
        f"{s.router.name}-{s.experts_per_token}" if s.experts else "",
        "skip" if s.skip_blocks else "",
        "" if s.mask_reuse else "no-reuse",
        s.weight_gradients,
        s.token_sparsity or "",
        "" if s.permute_tokens else "in-order",
        "exact" if s.exact_gradients else "",
    ]
    return "_".join(part for part in parts if part)


def make_inputs(seed=0, tokens=TOKENS):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(tokens, D_MODEL))
    w_up = rng.normal(size=(D_MODEL, D_HIDDEN)) / np.sqrt(D_MODEL)
    w_down = rng.normal(size=(D_HIDDEN, D_MODEL)) / np.sqrt(D_HIDDEN)
    dy = rng.normal(size=(tokens, D_MODEL))
    return x, w_up, w_down, dy


def make_experts(sparsity, seed=1, tokens=TOKENS):
    """g distinct experts per token, expert 2 left without any token."""
    if not sparsity.experts or sparsity.router.inside:
        return None
    rng = np.random.default_rng(seed)
    usable = [e for e in range(sparsity.experts) if e != 2]
    count = sparsity.experts_per_token
    return np.stack([rng.permutation(usable)[:count] for _ in range(tokens)])


def value_and_gradients(
    sparsity,
    x,
    w_up,
    w_down,
    dy,
    experts,
    *,
    scales=SCALES,
    packed=None,
    key=None,
    backend=None,
    precision="dtype",
):
    """(y, dx, dw_up, dw_down) of `ffn`."""

    def run(x, w_up, w_down):
        return ffn(
            x,
            w_up,
            w_down,
            sparsity=sparsity,
            scales=jnp.array(scales, w_up.dtype) if sparsity.weights else None,
            packed=packed,
            expert_index=None if experts is None else jnp.asarray(experts, jnp.int32),
            key=key,
            backend=backend,
            precision=precision,
        )

    y, pull_back = jax.vjp(run, *(jnp.asarray(a) for a in (x, w_up, w_down)))
    return y, *pull_back(jnp.asarray(dy, y.dtype))


jitted = jax.jit(
    value_and_gradients, static_argnums=0, static_argnames=("backend", "precision")
)


def oracle(sparsity, x, w_up, w_down, dy, experts, *, scales=SCALES, y_up=None):
    order = np.arange(len(x))
    if sparsity.permute_tokens:
        order = fixed_token_order(len(x))
    return ffn_oracle(
        x,
        w_up,
        w_down,
        dy,
        sparsity=sparsity,
        scales=scales,
        expert_index=experts,
        token_order=order,
        y_up=y_up,
    )
