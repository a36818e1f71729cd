"""GEMMs 1 and 3 with a squared ReLU, or its gradient, before the result is written.

    A = relu(X W1)^2
    dY1 = (dY W2^T) 2 relu(Y1)

XLA's dense GEMM is followed by a pass over all F neurons. The kernel of `dense_rows`
has the pass in its epilogue, and reads A in the place of relu(Y1): of a dense FFN,
which is one expert with all neurons, or of one expert for each token.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from experiments.bench.gemm_cases.comparison import (
    Comparison,
    Number,
    Setting,
    Size,
    near,
    rows_of,
)
from experiments.bench.gemm_cases.dense_rows_configs import (
    FASTEST_CONFIG,
    fitting_configs,
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


class _Operands(NamedTuple):
    """The random operands of GEMM 1 or GEMM 3, and the kernel's call on them."""

    lhs: jax.Array
    """X or dY: (tokens, d), bfloat16, as the other operands."""
    stored: jax.Array
    """W1 (d, E, F / E), or W2 (E, F / E, d)."""
    hidden: jax.Array | None
    """relu(Y1) of each row's own expert, (rows, F / E), which GEMM 3 reads; None for
    GEMM 1."""

    @property
    def by_expert(self) -> jax.Array:
        """The weights as (E, d, F / E)."""
        if self.hidden is None:
            return jnp.moveaxis(self.stored, 1, 0)
        return self.stored.swapaxes(1, 2)

    def run(self, config: Config | None, *arrays: jax.Array) -> jax.Array:
        """Returns the kernel's result for rows, weights, the lookups of the rows, and
        for GEMM 3 A."""
        lhs, stored, tile_expert, used_tiles, *others = arrays
        a = others[0] if others else None
        return dense_rows.dense_rows(
            lhs,
            stored,
            tile_expert,
            used_tiles,
            expert_axis=1 if a is None else 0,
            b_k_major=a is not None,
            activation=squared_relu if a is None else None,
            other=None if a is None else dense_rows.OtherRows(a, gradient_at),
            config=config,
            multiprocessors=current_device().count_multiprocessors(),
        )


def _operands(gemm: Number, size: Size, rows: int) -> _Operands:
    tokens, d_model, d_hidden, experts = size
    assert experts is not None
    own, keys = d_hidden // experts, jax.random.split(jax.random.key(0), 3)
    normal = partial(jax.random.normal, dtype=jnp.bfloat16)
    is_first = gemm == "1"
    stored = (d_model, experts, own) if is_first else (experts, own, d_model)
    return _Operands(
        normal(keys[0], (tokens, d_model)),
        normal(keys[1], stored) / d_model**0.5,
        None if is_first else jnp.maximum(normal(keys[2], (rows, own)), 0),
    )


def _after(product: jax.Array, hidden: jax.Array | None) -> jax.Array:
    """Returns A of Y1, or dY1 of dA and relu(Y1)."""
    return squared_relu(product) if hidden is None else product * 2 * hidden


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
    rows, group_sizes, used_tiles = rows_of(size, setting)
    of = _operands(gemm, size, len(rows.tile_expert) * setting.v)
    lhs, hidden = gather_rows(of.lhs, rows), of.hidden
    arrays = lhs, of.stored, rows.tile_expert, used_tiles
    if hidden is not None:
        arrays = *arrays, jnp.square(hidden)
    configs = fitting_configs(setting.v, reads=hidden is not None)
    tried = {HOPPER.name: [None], FASTEST_CONFIG: configs}
    runs: dict[Any, tuple[Callable[..., Any], tuple]] = {
        config: (partial(of.run, config), arrays)
        for configs in tried.values()
        for config in configs
    }
    whole = jax.random.normal(jax.random.key(1), (d_model, d_hidden), jnp.bfloat16)
    of_all = None if hidden is None else jnp.ones((tokens, d_hidden), jnp.bfloat16)
    runs["dense"] = lambda x, w, hidden: _after(x @ w, hidden), (of.lhs, whole, of_all)
    calls = compile_all(runs)
    written = slice(int(used_tiles) * setting.v)
    wide = lhs.astype(jnp.float32), of.by_expert.astype(jnp.float32)
    product = lax.ragged_dot(*wide, group_sizes, precision=lax.Precision.HIGHEST)
    expected = np.asarray(_after(product, hidden)[written], np.float64)

    return Comparison(
        dense=calls["dense"],
        kernels={
            name: {config: calls[config] for config in configs}
            for name, configs in tried.items()
        },
        check=near(expected, SQUARES_ERROR, size),
        executed_flops=2 * tokens * d_model * own,
    )
