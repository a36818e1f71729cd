"""GEMMs grouped over experts: every row meets the weights of its own expert only.

Rows come sorted by expert and padded to tiles of `v` rows (`dispatch.Dispatch`), so a
tile has one expert. Group sizes are data, shapes are not: no recompilation.
"""

from dataclasses import replace
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from sparsejax.annotations import check_value
from sparsejax.dtypes import accumulation_dtype
from sparsejax.ops import grouped_loops, sparse_matmul, tokamax_matmul
from sparsejax.ops.backend import (
    Backend,
    Implementation,
    Implementations,
    choose_backend,
    current_device,
    dense_of_each_set,
)
from sparsejax.ops.dense_matmul import dense_matmul
from sparsejax.ops.gemm_spec import GemmSpec
from sparsejax.ops.kernels.base import ExpertRows, KernelSet


def grouped_matmul(
    rows: Float[Array, "rows k"],
    weights: Float[Array, "experts k n"],
    tile_expert: Int[Array, " tiles"],
    used_tiles: Int[Array, ""],
    *,
    out_dtype: jnp.dtype | None = None,
    backend: Backend | None = None,
) -> Float[Array, "rows n"]:
    """Returns `out[r] = rows[r] @ weights[expert of r]`, with zeros beyond the used
    tiles.

    Accumulated in float32, rounded once. The expert of a row is that of its tile,
    `tile_expert[r // v]` with `v = rows / tiles`.

    Args:
      rows: sorted by expert. Padding rows must be finite numbers: what they give is to
        be ignored, but the gradient of `weights` contains them, multiplied by a
        gradient that is zero.
      weights: one matrix per expert.
      tile_expert: expert of each tile, non-decreasing.
      used_tiles: tiles that hold any row; the others are not computed.
      out_dtype: dtype of the result; None for the dtype of `rows`.
      backend: None for the fastest that can; a name runs or raises.
    Raises:
      ValueError: the shapes do not fit.
      NotImplementedError: the named backend cannot run this GEMM; says why.
    """
    how = backend, jnp.dtype(rows.dtype if out_dtype is None else out_dtype)
    return _grouped_matmul(how, rows, weights, tile_expert, used_tiles)


def grouped_outer(
    lhs: Float[Array, "rows m"],
    rhs: Float[Array, "rows n"],
    tile_expert: Int[Array, " tiles"],
    used_tiles: Int[Array, ""],
    experts: int,
    *,
    expert_axis: Literal[0, 1] = 0,
    backend: Backend | None = None,
) -> Float[Array, "_ _ _"]:
    """Returns `out[e] = lhs[rows of e].T @ rhs[rows of e]` in float32: a ragged
    reduction.

    It is the weight gradient of `grouped_matmul`. Padding rows must be zero in `lhs` or
    in `rhs` (and finite in the other). Experts without rows give zeros.

    Args:
      lhs, rhs: rows sorted by expert, as in `grouped_matmul`.
      tile_expert: expert of each tile, non-decreasing.
      used_tiles: tiles that hold any row; the others add nothing.
      experts: number of experts, the size of the result's expert axis.
      expert_axis: 0 for (experts, m, n), 1 for (m, experts, n), as the experts' columns
        of one weight lie in memory.
      backend: None for the fastest that can; a name runs or raises.
    Raises:
      ValueError: the shapes do not fit, or `expert_axis` is neither 0 nor 1.
      NotImplementedError: the named backend cannot run this GEMM; says why.
    """
    check_value("expert_axis", expert_axis, Literal[0, 1])
    if lhs.shape[0] != rhs.shape[0]:
        raise ValueError(
            f"lhs has {lhs.shape[0]} rows and rhs {rhs.shape[0]}; both come from one "
            f"dispatch and must be equal"
        )
    spec = GemmSpec(
        name="lhs^T @ rhs",
        tokens=lhs.shape[0],
        d_in=lhs.shape[1],
        d_out=rhs.shape[1],
        dtype=str(lhs.dtype),
        experts=experts,
        group_tile=grouped_loops.tile_rows(lhs.shape[0], tile_expert),
        is_weight_gradient=True,
        device=current_device(),
    )
    decision = choose_backend(spec, backend, outer_implementations())
    return outer_implementations()[decision.backend].run(
        lhs, rhs, tile_expert, used_tiles, experts, expert_axis
    )


def _spec(rows, weights, tile_expert, out_dtype: jnp.dtype) -> GemmSpec:
    if rows.shape[1] != weights.shape[1]:
        raise ValueError(
            f"rows have {rows.shape[1]} columns but the experts' weights "
            f"{weights.shape} contract {weights.shape[1]}"
        )
    return GemmSpec(
        name="rows @ weights[expert]",
        tokens=rows.shape[0],
        d_in=rows.shape[1],
        d_out=weights.shape[2],
        dtype=str(rows.dtype),
        experts=weights.shape[0],
        group_tile=grouped_loops.tile_rows(rows.shape[0], tile_expert),
        float32_out=out_dtype == jnp.float32 and rows.dtype != out_dtype,
        device=current_device(),
    )


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _grouped_matmul(how, rows, weights, tile_expert, used_tiles):
    named, out_dtype = how
    spec = _spec(rows, weights, tile_expert, out_dtype)
    run = implementations()[choose_backend(spec, named, implementations()).backend].run
    return run(rows, weights.astype(rows.dtype), tile_expert, used_tiles, out_dtype)


def _fwd(how, rows, weights, tile_expert, used_tiles):
    out = _grouped_matmul(how, rows, weights, tile_expert, used_tiles)
    return out, (rows, weights, tile_expert, used_tiles)


def _bwd(how, residuals, dout):
    named, _ = how
    rows, weights, tile_expert, used_tiles = residuals
    dout = dout.astype(rows.dtype)
    tiles = tile_expert, used_tiles
    # (rows, k) = (rows, n) @ (experts, n, k)
    transposed = weights.swapaxes(1, 2)
    drows = _grouped_matmul((named, jnp.dtype(rows.dtype)), dout, transposed, *tiles)
    # (experts, k, n) = (k, rows of the expert) @ (rows of the expert, n)
    dweights = grouped_outer(rows, dout, *tiles, weights.shape[0], backend=named)
    return drows, dweights.astype(weights.dtype), None, None


_grouped_matmul.defvjp(_fwd, _bwd)


def _matmul_xla(rows, weights, tile_expert, used_tiles, out_dtype):
    runs = {
        "cpu": grouped_loops.matmul_by_tiles,
        "tpu": grouped_loops.matmul_by_ragged_dot,
    }
    run = runs.get(current_device().platform, grouped_loops.matmul_by_chunks)
    return run(rows, weights, tile_expert, used_tiles, out_dtype)


def _outer_xla(lhs, rhs, tile_expert, used_tiles, experts, expert_axis):
    runs = {
        "cpu": grouped_loops.outer_by_tiles,
        "tpu": grouped_loops.outer_by_ragged_dot,
    }
    run = runs.get(current_device().platform, grouped_loops.outer_by_chunks)
    out = run(lhs, rhs, tile_expert, used_tiles, experts)
    return jnp.moveaxis(out, 0, expert_axis)


def _own(tile_expert, used_tiles, v: int, expert: int) -> jax.Array:
    """Returns (rows, 1) booleans that are True where a row belongs to a used tile of
    `expert`."""
    tiles = jnp.arange(tile_expert.shape[0])
    return jnp.repeat((tile_expert == expert) & (tiles < used_tiles), v)[:, None]


def _matmul_reference(rows, weights, tile_expert, used_tiles, out_dtype):
    v = grouped_loops.tile_rows(rows.shape[0], tile_expert)
    precision = lax.Precision.HIGHEST
    out = jnp.zeros((rows.shape[0], weights.shape[2]), out_dtype)
    for expert in range(weights.shape[0]):
        product = dense_matmul(
            rows, weights[expert], precision=precision, out_dtype=out_dtype
        )
        out = jnp.where(_own(tile_expert, used_tiles, v, expert), product, out)
    return out


def _outer_reference(lhs, rhs, tile_expert, used_tiles, experts, expert_axis):
    v = grouped_loops.tile_rows(lhs.shape[0], tile_expert)
    outs = []
    for expert in range(experts):
        own = jnp.where(_own(tile_expert, used_tiles, v, expert), lhs, 0)
        accumulate = accumulation_dtype(lhs.dtype)
        precision = lax.Precision.HIGHEST
        outs.append(dense_matmul(own.T, rhs, precision=precision, out_dtype=accumulate))
    return jnp.stack(outs, expert_axis)


def _describe(spec: GemmSpec) -> tuple[str, float]:
    experts = spec.experts or 1
    what, share = (
        f"grouped GEMM over {experts} experts",
        spec.experts_per_token / experts,
    )
    if spec.device.platform == "cpu":
        return f"{what}, a loop over row tiles", share
    if spec.device.platform == "tpu":
        return f"{what}, XLA's ragged dot", share
    size, share = grouped_loops.chunks_of(spec)
    return f"{what}, a loop over chunks of {size} rows", share


def _describe_reference(spec: GemmSpec) -> tuple[str, float]:
    return f"{spec.experts} dense GEMMs, each row's own one kept", 1.0


_TOKAMAX = Implementation(
    run=tokamax_matmul.matmul,
    why_unsupported=tokamax_matmul.why_unsupported,
    describe=tokamax_matmul.describe,
    why_slower=tokamax_matmul.why_not_unasked,
)

# Sparse tensor cores.


def _outer_on(
    kernel_set: KernelSet, lhs, rhs, tile_expert, used_tiles, experts, expert_axis
) -> jax.Array:
    _, ends = grouped_loops.tile_ranges(tile_expert, used_tiles, experts)
    return kernel_set.dense_expert_weight_gradient(
        lhs,
        rhs,
        ends,
        group_tile=grouped_loops.tile_rows(lhs.shape[0], tile_expert),
        expert_axis=expert_axis,
    )


def _matmul_on(
    kernel_set: KernelSet, rows, weights, tile_expert, used_tiles, out_dtype
) -> jax.Array:
    _, ends = grouped_loops.tile_ranges(tile_expert, used_tiles, weights.shape[0])
    tokens = jnp.arange(rows.shape[0], dtype=jnp.int32)
    looked_up = ExpertRows(
        tile_expert=tile_expert,
        used_tiles=used_tiles,
        ends=ends,
        row_token=tokens,
        experts=weights.shape[0],
    )
    product = kernel_set.dense_rows_matmul(
        rows, weights, looked_up, expert_axis=0, k_major=False, out_dtype=out_dtype
    )
    written = tokens < used_tiles * grouped_loops.tile_rows(rows.shape[0], tile_expert)
    return jnp.where(written[:, None], product, 0)


def _describe_dense_rows(spec: GemmSpec) -> tuple[str, float]:
    share = spec.experts_per_token / (spec.experts or 1)
    what = f"dense rows by the weights of {spec.experts} experts"
    return f"{what} on the tensor cores", share


def _dense_rows_on_kernels() -> dict[Backend, Implementation]:
    return dense_of_each_set(
        _matmul_on,
        why_unsupported=lambda found, s: found.why_no_dense_rows(s),
        describe=_describe_dense_rows,
    )


def _describe_outer(spec: GemmSpec) -> tuple[str, float]:
    share = spec.experts_per_token / (spec.experts or 1)
    what = "dense GEMM" + " over the masked activation" * (spec.pattern is not None)
    return f"{what} of each of {spec.experts} experts on the tensor cores", share


def _dense_outer_on_kernels() -> dict[Backend, Implementation]:
    return dense_of_each_set(
        _outer_on,
        why_unsupported=lambda found, s: found.why_no_dense_weight_gradient(s),
        describe=_describe_outer,
    )


def why_slower_than_dense(spec: GemmSpec) -> str | None:
    """Returns why XLA takes no less time for a GEMM by expert than for the dense one of
    all neurons, by what was measured of its loop on GPUs; None where it may, and on
    other devices."""
    if spec.device.platform != "gpu":
        return None
    size, share = grouped_loops.chunks_of(spec)
    if share * grouped_loops.CHUNK_COST < 1:
        return None
    return (
        f"XLA's loop over chunks of {size} rows executes {share:.0%} of the dense "
        f"FLOPs, and took up to {grouped_loops.CHUNK_COST} times as long for each "
        f"(H200)"
    )


def sparse_implementations() -> Implementations:
    """Returns the implementations of a GEMM by expert with a 2:4 operand, by backend.
    Where rows or weights are packed for a set of kernels, an FFN calls these kernels
    itself."""
    return {**implementations(), **sparse_matmul.on_kernels()}


def implementations() -> Implementations:
    """Returns the implementations of `grouped_matmul`, by backend."""
    return {
        **_dense_rows_on_kernels(),
        "reference": Implementation(
            run=_matmul_reference,
            why_unsupported=lambda spec: None,
            describe=_describe_reference,
        ),
        "tokamax": _TOKAMAX,
        "xla": Implementation(
            run=_matmul_xla, why_unsupported=lambda spec: None, describe=_describe
        ),
    }


def outer_implementations() -> Implementations:
    """Returns the implementations of `grouped_outer`, the dense weight gradient by
    expert, by backend."""
    return {
        **_dense_outer_on_kernels(),
        "reference": Implementation(
            run=_outer_reference,
            why_unsupported=lambda spec: None,
            describe=_describe_reference,
        ),
        "tokamax": replace(_TOKAMAX, run=tokamax_matmul.outer),
        "xla": Implementation(
            run=_outer_xla, why_unsupported=lambda spec: None, describe=_describe
        ),
    }


def sparse_outer_implementations() -> Implementations:
    """Returns the implementations of a weight gradient by expert with an operand that
    is 2:4 along the rows, by backend."""
    return {**outer_implementations(), **sparse_matmul.on_kernels()}
