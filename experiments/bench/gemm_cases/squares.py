"""GEMMs 1 and 3 with a squared ReLU, or its gradient, before the result is written.

    A = relu(X W1)^2
    dY1 = (dY W2^T) 2 relu(Y1)

XLA's dense GEMM is followed by a pass over all F neurons. The kernel of `dense_rows`
has the pass in its epilogue, and reads A in the place of relu(Y1): of a dense FFN,
which is one expert with all neurons, or of one expert for each token.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from experiments.bench.expert_shares import drawn_shares, expert_shares, routed
from experiments.bench.gemm_cases.comparison import (
    Call,
    Comparison,
    Error,
    Number,
    Setting,
    Size,
)
from pallas_kernels.sm90 import dense_rows
from pallas_kernels.sm90.gemm.dense_kernel import Config
from sparsejax.ops.backend import current_device
from sparsejax.ops.kernels.hopper_dense_rows import gradient_at, squared_relu
from sparsejax.ops.kernels.registry import HOPPER
from sparsejax.routing.dispatch import gather_rows
from sparsejax.tuning.tune import compile_all

SQUARES_ERROR = 1e-2
"""The largest relative difference: results of XLA are rounded to bfloat16 before and
after the square."""

CONFIGS = tuple(
    Config(epi_at_once=at_once, begin_step=later, **tiles)
    for at_once in (False, True)
    for later in (0, 3)
    for tiles in (
        {"stages": 3},
        {"stages": 4},
        {"cluster_axis": "n", "stages": 3},
        {"cluster_axis": "n", "stages": 4},
        {"cluster": 1, "stages": 3},
        {"cluster": 1, "stages": 4},
        {"tile_n": 128, "cluster_axis": "n", "stages": 5},
    )
)
"""The configs that are tried besides the default one."""


def compare_squares(gemm: Number, size: Size, setting: Setting) -> Comparison:
    """Returns the comparison of GEMM 1 or 3. Raises ValueError where no kernel runs
    it."""
    tokens, d_model, d_hidden, experts = size
    assert experts is not None
    device, own = current_device(), d_hidden // experts
    why_not = dense_rows.why_unsupported((d_model, own), setting.v, "bfloat16")
    if not device.is_hopper:
        why_not = f"it needs a Hopper GPU, and this is {device.kind}"
    if why_not is not None:
        raise ValueError(f"no kernel squares the result at {size}: {why_not}")
    shares = drawn_shares(experts)
    if setting.share_of_first is not None:
        shares = expert_shares(experts, setting.share_of_first)
    rows = routed(tokens, shares, setting.v)
    group_sizes = -(-rows.group_sizes // setting.v) * setting.v
    used_tiles = jnp.sum(group_sizes) // setting.v
    normal = partial(jax.random.normal, dtype=jnp.bfloat16)
    keys = jax.random.split(jax.random.key(0), 4)
    x = normal(keys[0], (tokens, d_model))
    lhs = gather_rows(x, rows)
    # W1 (d, E, F / E), or W2 (E, F / E, d), which is read transposed.
    reads = gemm == "3"
    stored = (experts, own, d_model) if reads else (d_model, experts, own)
    w = normal(keys[1], stored) / d_model**0.5
    by_expert = w.swapaxes(1, 2) if reads else jnp.moveaxis(w, 1, 0)
    hidden = jnp.maximum(normal(keys[2], (len(lhs), own)), 0)
    whole = normal(keys[3], (d_model, d_hidden)) / d_model**0.5
    of_all = jnp.maximum(normal(keys[2], (tokens, d_hidden)), 0) if reads else None

    def after(product: jax.Array, hidden: jax.Array | None) -> jax.Array:
        if hidden is None:
            return squared_relu(product)
        return product * 2 * hidden

    def right(lhs: jax.Array, rhs: jax.Array, hidden: jax.Array | None) -> jax.Array:
        wide = lhs.astype(jnp.float32), rhs.astype(jnp.float32)
        precision = lax.Precision.HIGHEST
        return after(
            lax.ragged_dot(*wide, group_sizes, precision=precision),
            None if hidden is None else hidden.astype(jnp.float32),
        )

    def by_kernel(config: Config | None, *operands: jax.Array) -> jax.Array:
        *operands, a = operands
        other = dense_rows.OtherRows(a, gradient_at)
        return dense_rows.dense_rows(
            *operands,
            expert_axis=0 if reads else 1,
            b_k_major=reads,
            activation=None if reads else squared_relu,
            other=other if reads else None,
            config=config,
            multiprocessors=device.count_multiprocessors(),
        )

    operands = lhs, w, rows.tile_expert, used_tiles, jnp.square(hidden)
    configs = [
        config
        for config in CONFIGS
        if (reads or not config.begin_step)
        and dense_rows.why_invalid(config, setting.v, reads=reads) is None
    ]
    runs: dict[Any, tuple[Callable[..., Any], tuple]] = {
        config: (partial(by_kernel, config), operands) for config in (None, *configs)
    }
    calls = compile_all(
        {"dense": (lambda x, w, hidden: after(x @ w, hidden), (x, whole, of_all))}
        | runs
    )
    # Beyond the used tiles a kernel writes nothing.
    written = slice(int(used_tiles) * setting.v)
    expected = right(lhs, by_expert, hidden if reads else None)
    expected = np.asarray(expected[written], np.float64)

    def check(name: str, call: Call) -> Error:
        got = np.asarray(call()[written], np.float64)
        error = float(np.linalg.norm(got - expected) / np.linalg.norm(expected))
        assert error < SQUARES_ERROR, f"{name} at {size}: relative error {error}"
        return Error(error)

    return Comparison(
        dense=calls["dense"],
        kernels={
            HOPPER.name: {None: calls[None]},
            f"{HOPPER.name}, fastest config": {of: calls[of] for of in configs},
        },
        check=check,
        executed_flops=2 * tokens * d_model * own,
    )
