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
from sparsejax.ops import sparse_matmul
from sparsejax.ops.backend import (
    Backend,
    GemmSpec,
    Implementation,
    Implementations,
    choose_backend,
    current_device,
    of_kernels,
)
from sparsejax.ops.dense_matmul import dense_matmul
from sparsejax.ops.kernels import registry
from sparsejax.ops.kernels.base import KernelSet


def grouped_matmul(
    rows: Float[Array, "rows k"],
    weights: Float[Array, "experts k n"],
    tile_expert: Int[Array, " tiles"],
    used_tiles: Int[Array, ""],
    *,
    backend: Backend | None = None,
) -> Float[Array, "rows n"]:
    """Returns `out[r] = rows[r] @ weights[expert of r]`, with zeros beyond the used
    tiles.

    Accumulated in float32, rounded once to the dtype of `rows`. The expert of a row is
    that of its tile, `tile_expert[r // v]` with `v = rows / tiles`.

    Args:
      rows: sorted by expert; padding rows may hold anything and give garbage rows.
      weights: one matrix per expert.
      tile_expert: expert of each tile, non-decreasing.
      used_tiles: tiles that hold any row; the others are not computed.
      backend: None for the fastest that can; a name runs or raises.
    Raises:
      ValueError: the shapes do not fit.
      NotImplementedError: the named backend cannot run this GEMM; says why.
    """
    spec = _spec(rows, weights, tile_expert)
    decision = choose_backend(spec, backend, implementations())
    return _grouped_matmul(decision.backend, rows, weights, tile_expert, used_tiles)


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
        group_tile=_tile_rows(lhs.shape[0], tile_expert),
        is_weight_gradient=True,
        device=current_device(),
    )
    decision = choose_backend(spec, backend, outer_implementations())
    return outer_implementations()[decision.backend].run(
        lhs, rhs, tile_expert, used_tiles, experts, expert_axis
    )


def _spec(rows, weights, tile_expert) -> GemmSpec:
    if rows.shape[1] != weights.shape[1]:
        raise ValueError(
            f"rows have {rows.shape[1]} columns but the experts' weights "
            f"{weights.shape} contract {weights.shape[1]}"
        )
    _tile_rows(rows.shape[0], tile_expert)
    return GemmSpec(
        name="rows @ weights[expert]",
        tokens=rows.shape[0],
        d_in=rows.shape[1],
        d_out=weights.shape[2],
        dtype=str(rows.dtype),
        experts=weights.shape[0],
        device=current_device(),
    )


def _tile_rows(rows: int, tile_expert: jax.Array) -> int:
    tiles = tile_expert.shape[0]
    if rows % tiles:
        raise ValueError(
            f"{rows} rows are not a whole number of {tiles} tiles; take both from one "
            f"dispatch.dispatch"
        )
    return rows // tiles


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _grouped_matmul(backend, rows, weights, tile_expert, used_tiles):
    run = implementations()[backend].run
    return run(rows, weights.astype(rows.dtype), tile_expert, used_tiles)


def _fwd(backend, rows, weights, tile_expert, used_tiles):
    out = _grouped_matmul(backend, rows, weights, tile_expert, used_tiles)
    return out, (rows, weights, tile_expert, used_tiles)


def _bwd(backend, residuals, dout):
    rows, weights, tile_expert, used_tiles = residuals
    # (rows, k) = (rows, n) @ (experts, n, k)
    transposed = weights.swapaxes(1, 2)
    drows = _grouped_matmul(backend, dout, transposed, tile_expert, used_tiles)
    # (experts, k, n) = (k, rows of the expert) @ (rows of the expert, n)
    run = outer_implementations()[backend].run
    dweights = run(rows, dout, tile_expert, used_tiles, weights.shape[0], 0)
    return drows, dweights.astype(weights.dtype), None, None


_grouped_matmul.defvjp(_fwd, _bwd)


def _tile_ranges(tile_expert, used_tiles, experts: int) -> tuple[jax.Array, jax.Array]:
    """Returns the first tile of each expert and the tile after its last one, both
    (experts,) int32."""
    used = jnp.arange(tile_expert.shape[0]) < used_tiles
    tiles = jnp.zeros(experts, jnp.int32).at[tile_expert].add(used.astype(jnp.int32))
    end = jnp.cumsum(tiles, dtype=jnp.int32)
    return end - tiles, end


def _matmul_by_tiles(rows, weights, tile_expert, used_tiles):
    """Multiplies every row by its expert's weights in a loop over the experts, and
    inside it over the expert's tiles.

    Time over the dense GEMM's on 2 cores, 4096 x 512 x 2048 in bfloat16, E = 4, here
    and in the weight gradient: `lax.ragged_dot` 0.61 and 1.44, this loop 0.19 and 0.26
    (experiments/bench/gemm.py).
    """
    v = _tile_rows(rows.shape[0], tile_expert)
    ranges = _tile_ranges(tile_expert, used_tiles, weights.shape[0])

    def expert(out, of_expert):
        weight, first, end = of_expert

        def tile(i, out):
            block = lax.dynamic_slice_in_dim(rows, i * v, v)
            product = dense_matmul(block, weight)
            return lax.dynamic_update_slice_in_dim(out, product, i * v, 0)

        return lax.fori_loop(first, end, tile, out), None

    out = jnp.zeros((rows.shape[0], weights.shape[2]), rows.dtype)
    return lax.scan(expert, out, (weights, *ranges))[0]


def _outer_by_tiles(lhs, rhs, tile_expert, used_tiles, experts):
    v = _tile_rows(lhs.shape[0], tile_expert)
    accumulate = accumulation_dtype(lhs.dtype)

    def expert(_, ends):
        first, end = ends

        def tile(i, out):
            a = lax.dynamic_slice_in_dim(lhs, i * v, v)
            b = lax.dynamic_slice_in_dim(rhs, i * v, v)
            return out + dense_matmul(a.T, b, out_dtype=accumulate)

        zeros = jnp.zeros((lhs.shape[1], rhs.shape[1]), accumulate)
        return None, lax.fori_loop(first, end, tile, zeros)

    return lax.scan(expert, None, _tile_ranges(tile_expert, used_tiles, experts))[1]


CHUNK_ROWS: int = 2048
"""The number of rows that one GEMM of the loop on a GPU multiplies. A larger chunk has
more rows that are not its expert's, a smaller one leaves the GPU idle. Time over the
dense GEMM's, for 512, 1024, 2048 rows, on an H200 in bfloat16 with E = 4: (16384 x 4096
x 16384) 0.95, 0.74, 0.76; (8192 x 2048 x 8192) 1.51, 1.21, 1.14
(experiments/bench/gemm.py)."""


def _chunks(rows: int, v: int, tile_expert, used_tiles, experts: int):
    """Returns for each chunk its expert, its first row, and how many of its rows belong
    to the expert.

    There are as many chunks as any distribution over the experts needs, a static
    number, since a loop on a GPU waits for the host where its length is data. Unused
    chunks start at row `rows`.
    """
    size = min(CHUNK_ROWS, rows)
    first, end = _tile_ranges(tile_expert, used_tiles, experts)
    group = v * (end - first)
    last = jnp.cumsum(-(-group // size), dtype=jnp.int32)
    index = jnp.arange(rows // size + experts, dtype=jnp.int32)
    expert = jnp.sum(index[:, None] >= last[None, :], axis=1, dtype=jnp.int32)
    used = expert < experts
    expert = jnp.minimum(expert, experts - 1)
    offset = (index - (last - -(-group // size))[expert]) * size
    start = jnp.where(used, v * first[expert] + offset, rows)
    return expert, start, jnp.where(used, group[expert] - offset, 0)


def _matmul_by_chunks(rows, weights, tile_expert, used_tiles):
    """Multiplies every row by its expert's weights in one loop over chunks of rows,
    each chunk with the weights of one expert.

    On GPU XLA expands `lax.ragged_dot` into one dense GEMM over all experts, which
    took 1.13 to 1.31 times the dense GEMM that it was to replace (H200).
    """
    total = rows.shape[0]
    v, size = _tile_rows(total, tile_expert), min(CHUNK_ROWS, total)
    chunks = _chunks(total, v, tile_expert, used_tiles, weights.shape[0])
    padded = jnp.pad(rows, ((0, size), (0, 0)))

    def chunk(out, of_chunk):
        expert, start, _ = of_chunk
        block = lax.dynamic_slice_in_dim(padded, start, size)
        weight = lax.dynamic_index_in_dim(weights, expert, keepdims=False)
        product = dense_matmul(block, weight)
        # Rows behind the expert's own get a wrong product, and then their own: chunks
        # come in the order of their rows.
        return lax.dynamic_update_slice_in_dim(out, product, start, 0), None

    out = jnp.zeros((total + size, weights.shape[2]), rows.dtype)
    out = lax.scan(chunk, out, chunks)[0][:total]
    return jnp.where(jnp.arange(total)[:, None] < v * used_tiles, out, 0)


def _outer_by_chunks(lhs, rhs, tile_expert, used_tiles, experts):
    total = lhs.shape[0]
    v, size = _tile_rows(total, tile_expert), min(CHUNK_ROWS, total)
    chunks = _chunks(total, v, tile_expert, used_tiles, experts)
    lhs, rhs = (jnp.pad(x, ((0, size), (0, 0))) for x in (lhs, rhs))
    accumulate = accumulation_dtype(lhs.dtype)

    def chunk(out, of_chunk):
        expert, start, own = of_chunk
        a = lax.dynamic_slice_in_dim(lhs, start, size)
        b = lax.dynamic_slice_in_dim(rhs, start, size)
        a = jnp.where(jnp.arange(size)[:, None] < own, a, 0)
        b = jnp.where(jnp.arange(size)[:, None] < own, b, 0)
        product = dense_matmul(a.T, b, out_dtype=accumulate)
        return out.at[expert].add(product), None

    out = jnp.zeros((experts, lhs.shape[1], rhs.shape[1]), accumulate)
    return lax.scan(chunk, out, chunks)[0]


def _matmul_xla(rows, weights, tile_expert, used_tiles):
    run = _matmul_by_tiles if current_device().platform == "cpu" else _matmul_by_chunks
    return run(rows, weights, tile_expert, used_tiles)


def _outer_xla(lhs, rhs, tile_expert, used_tiles, experts, expert_axis):
    run = _outer_by_tiles if current_device().platform == "cpu" else _outer_by_chunks
    out = run(lhs, rhs, tile_expert, used_tiles, experts)
    return jnp.moveaxis(out, 0, expert_axis)


def _own(tile_expert, used_tiles, v: int, expert: int) -> jax.Array:
    """Returns (rows, 1) booleans that are True where a row belongs to a used tile of
    `expert`."""
    tiles = jnp.arange(tile_expert.shape[0])
    return jnp.repeat((tile_expert == expert) & (tiles < used_tiles), v)[:, None]


def _matmul_reference(rows, weights, tile_expert, used_tiles):
    v = _tile_rows(rows.shape[0], tile_expert)
    out = jnp.zeros((rows.shape[0], weights.shape[2]), rows.dtype)
    for expert in range(weights.shape[0]):
        product = dense_matmul(rows, weights[expert], precision=lax.Precision.HIGHEST)
        out = jnp.where(_own(tile_expert, used_tiles, v, expert), product, out)
    return out


def _outer_reference(lhs, rhs, tile_expert, used_tiles, experts, expert_axis):
    v = _tile_rows(lhs.shape[0], tile_expert)
    outs = []
    for expert in range(experts):
        own = jnp.where(_own(tile_expert, used_tiles, v, expert), lhs, 0)
        accumulate = accumulation_dtype(lhs.dtype)
        precision = lax.Precision.HIGHEST
        outs.append(dense_matmul(own.T, rhs, precision=precision, out_dtype=accumulate))
    return jnp.stack(outs, expert_axis)


def _describe(spec: GemmSpec) -> tuple[str, float]:
    experts = spec.experts or 1
    what = f"grouped GEMM over {experts} experts"
    if spec.device.platform == "cpu":
        share = spec.experts_per_token / experts
        return f"{what}, a loop over row tiles", share
    rows = spec.tokens * spec.experts_per_token
    size = min(CHUNK_ROWS, rows)
    share = (rows // size + experts) * size / (spec.tokens * experts)
    return f"{what}, a loop over chunks of {size} rows", share


def _describe_reference(spec: GemmSpec) -> tuple[str, float]:
    return f"{spec.experts} dense GEMMs, each row's own one kept", 1.0


# Sparse tensor cores.


def _outer_on(
    kernel_set: KernelSet, lhs, rhs, tile_expert, used_tiles, experts, expert_axis
) -> jax.Array:
    _, ends = _tile_ranges(tile_expert, used_tiles, experts)
    return kernel_set.dense_expert_weight_gradient(
        lhs,
        rhs,
        ends,
        group_tile=_tile_rows(lhs.shape[0], tile_expert),
        expert_axis=expert_axis,
    )


def _describe_outer(spec: GemmSpec) -> tuple[str, float]:
    share = spec.experts_per_token / (spec.experts or 1)
    what = "dense GEMM" + " over the masked activation" * (spec.pattern is not None)
    return f"{what} of each of {spec.experts} experts on the tensor cores", share


def _dense_outer_on_kernels() -> dict[Backend, Implementation]:
    return {
        each.name: replace(
            of_kernels(
                each,
                _outer_on,
                why_unsupported=lambda found, s: found.why_no_dense_weight_gradient(s),
            ),
            describe=_describe_outer,
            why_slower=lambda spec: None,
            times=lambda spec: None,
        )
        for each in registry.REGISTERED
    }


def implementations() -> Implementations:
    """Returns the implementations of `grouped_matmul`, by backend. Where rows or
    weights are packed for a set of kernels, an FFN calls these kernels itself."""
    return {
        **sparse_matmul.on_kernels(),
        "reference": Implementation(
            run=_matmul_reference,
            why_unsupported=lambda spec: None,
            describe=_describe_reference,
        ),
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
        "xla": Implementation(
            run=_outer_xla, why_unsupported=lambda spec: None, describe=_describe
        ),
    }


def sparse_outer_implementations() -> Implementations:
    """Returns the implementations of a weight gradient by expert with an operand that
    is 2:4 along the rows, by backend."""
    return {**outer_implementations(), **sparse_matmul.on_kernels()}
