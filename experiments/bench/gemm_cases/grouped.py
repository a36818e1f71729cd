"""Dense GEMMs grouped over unequal groups of rows, one for each expert."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from experiments.bench.gemm_cases.comparison import (
    AnyConfig,
    Call,
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
from pallas_kernels.sm90 import dense_over_rows, dense_rows
from sparsejax.ops import grouped_matmul
from sparsejax.ops.backend import Backend, current_device
from sparsejax.ops.expert_rows import looked_up
from sparsejax.ops.kernels.registry import HOPPER, kernels_of
from sparsejax.routing.dispatch import gather_rows
from sparsejax.tuning.tune import compile_all

GROUPED_ERROR = 4e-3
"""The largest relative difference of two bfloat16 results that are rounded from float32
sums in two orders."""

CONTRACT_ROWS = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())),
    lhs_ragged_dimensions=[0],
    rhs_group_dimensions=[],
)


def compare_grouped(gemm: Number, size: Size, setting: Setting) -> Comparison:
    """Returns the comparison of one of GEMMs 1 to 5."""
    tokens, d_model, d_hidden, experts = size
    assert experts is not None
    rows, group_sizes, used_tiles = rows_of(size, setting)
    tiles, own = (rows.tile_expert, used_tiles), d_hidden // experts
    keys = jax.random.split(jax.random.key(0), 3)
    normal = partial(jax.random.normal, dtype=jnp.bfloat16)
    x = normal(keys[0], (tokens, d_model))
    as_float32 = {"preferred_element_type": jnp.float32}
    of_kernel: dict[str, tuple[Callable[..., Any], tuple]] = {}
    by_config: dict[AnyConfig, tuple[Callable[..., Any], tuple]] = {}
    backends: list[Backend] = ["xla"]

    if gemm != "5":
        # W1 (d, E, F / E) or W2 (E, F / E, d); GEMMs 3 and 4 read them transposed.
        axis, transposed = (1 if gemm in "14" else 0), gemm in "34"
        stored = (d_model, experts, own) if axis else (experts, own, d_model)
        w = normal(keys[2], stored)
        by_expert = jnp.moveaxis(w, axis, 0)
        by_expert = by_expert.swapaxes(1, 2) if transposed else by_expert
        lhs = x if gemm in "13" else normal(keys[1], (tokens, own))
        operands = gather_rows(lhs, rows), by_expert
        into = gemm in "13"
        widths = (d_model, d_hidden) if into else (d_hidden, d_model)
        whole = x if into else normal(keys[0], (tokens, d_hidden))
        dense = jnp.matmul, (whole, normal(keys[1], widths))

        def ragged(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
            out = lax.ragged_dot(lhs, rhs, group_sizes, **as_float32)
            return out.astype(lhs.dtype)

        def ours(backend: Backend, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
            return grouped_matmul.grouped_matmul(lhs, rhs, *tiles, backend=backend)

        why_not = dense_rows.why_unsupported((d_model, own), setting.v, str(lhs.dtype))
        kernels = kernels_of(current_device())
        if kernels is not None and why_not is None:
            as_stored = partial(
                kernels.dense_rows_matmul,
                expert_axis=axis,
                k_major=transposed,
            )
            of_kernel = {HOPPER.name: (as_stored, (operands[0], w, looked_up(rows)))}
            with_config = partial(
                dense_rows.dense_rows,
                expert_axis=axis,
                b_k_major=transposed,
                multiprocessors=current_device().count_multiprocessors(),
            )
            by_config = {
                config: (partial(with_config, config=config), (operands[0], w, *tiles))
                for config in fitting_configs(setting.v)
            }

    else:
        g = normal(keys[1], (tokens, d_hidden))
        dense = (lambda lhs, rhs: jnp.matmul(lhs.T, rhs, **as_float32)), (x, g)
        x_rows = gather_rows(x, rows)
        operands = x_rows, normal(keys[2], (len(x_rows), own))
        if current_device().is_hopper:
            backends.append(HOPPER.name)
            over_rows = partial(
                dense_over_rows.dense_over_rows,
                group_tile=setting.v,
                multiprocessors=current_device().count_multiprocessors(),
            )
            of_kernel = {
                f"{HOPPER.name}, {parts} parts of a share": (
                    partial(over_rows, parts_of_share=parts),
                    (*operands, looked_up(rows).ends),
                )
                for parts in (1, 2)
            }

        def ragged(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
            return lax.ragged_dot_general(
                lhs, rhs, group_sizes, CONTRACT_ROWS, **as_float32
            )

        def ours(backend: Backend, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
            return grouped_matmul.grouped_outer(
                lhs, rhs, *tiles, experts, backend=backend
            )

    runs: dict[Any, tuple[Callable[..., Any], tuple]] = {
        "dense": dense,
        "ragged_dot": (ragged, operands),
        **{backend: (partial(ours, backend), operands) for backend in backends},
        **of_kernel,
    }
    calls = compile_all(runs | by_config)
    written = slice(int(used_tiles) * setting.v if gemm != "5" else None)
    right = np.asarray(calls["ragged_dot"]()[written], np.float64)
    timed: dict[str, dict[AnyConfig, Call]] = {
        name: {None: calls[name]} for name in runs if name != "dense"
    }
    if by_config:
        timed[FASTEST_CONFIG] = {config: calls[config] for config in by_config}
    return Comparison(
        dense=calls["dense"],
        kernels=timed,
        check=near(right, GROUPED_ERROR, size),
        executed_flops=2 * tokens * d_model * own,
    )
