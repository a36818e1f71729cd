"""GEMMs of a 2:4 weight whose result is 2:4 activations, or their gradient, at once.

    keep_features    A = relu(X W1)^2, of four features the two largest
    backward         dY1 = (dY W2^T) 2 sqrt(A), where A has its entries

The kernel of `sparse_matmul` with another epilogue: instead of an epilogue tile of C,
64 features of 64 tokens, it writes what `activations` would make of it, to the bit.
Nothing dense of size tokens by features is in memory. With experts a row meets its own
expert's weight, as in `grouped_matmul`.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith
from jaxtyping import Array, Float, Int, UInt8, UInt32

from pallas_kernels.sm90 import mosaic_internals
from pallas_kernels.sm90.gemm.epilogue import OUT_TRANSFORMS, store_epi_tile
from pallas_kernels.sm90.sparse_matmul import Epilogue, check_operands, launch
from pallas_kernels.sm90.sparse_matmul_configs import (
    LINE_BYTES,
    Config,
    Shape,
    default_config,
    why_invalid,
)
from pallas_kernels.sm90.threads import (
    activation_gradients,
    activation_threads,
    prune_2to4,
)
from pallas_kernels.sm90.threads.prune_2to4 import TILE, constant


class Experts(NamedTuple):
    """The experts of a GEMM, which say whose weight a row of X meets."""

    tile_expert: Int[Array, " tiles"]
    """The expert of each group tile of rows / tiles rows, int32."""
    used_tiles: Int[Array, ""]
    """The number of group tiles that have rows; the result is undefined in all
    others."""
    count: int
    """The number of experts; their weights lie one below the other."""


def keep_features(
    values: Float[Array, "features half_k"],
    metadata: UInt32[Array, "row_blocks k_blocks 128"],
    x: Float[Array, "tokens k"],
    experts: Experts | None = None,
    *,
    config_for: Callable[[Shape], Config] | None = None,
    multiprocessors: int,
) -> tuple[
    Float[Array, "tokens half_features"],
    UInt32[Array, "token_blocks feature_blocks 128"],
    UInt8[Array, "token_sixteenths features"],
]:
    """Returns what `activations.keep_features` makes of Y1 = X W^T.

    Y1 is rounded to X's dtype, in registers.

    Args:
      values, metadata: W (features, k), 2:4 along k, as `sparsejax.sparsity.packed`
        orders it. With experts, the weights of all of them; the features of the result
        are those of one.
      x: the rows of X, with experts sorted by expert.
      experts: whose weight a row meets; None for a single weight.
      config_for: chooses the config of the shape; None for `default_config`.
      multiprocessors: their number in the GPU that will run the kernel.
    Raises:
      ValueError: shapes do not fit, or the config cannot run them; says why.
    """
    shape = _shape(values, metadata, x, experts)
    blocks = pl.cdiv(shape.n, TILE)
    a, words, nonzeros = _launch(
        shape,
        config_for,
        _keep_features,
        [
            jax.ShapeDtypeStruct((shape.n, shape.m // 2), x.dtype),
            jax.ShapeDtypeStruct((blocks, shape.m // TILE, 128), jnp.uint32),
            jax.ShapeDtypeStruct((4 * blocks, shape.m), jnp.uint8),
        ],
        [values, metadata, x],
        [],
        experts,
        multiprocessors,
    )
    return a, words, nonzeros


def backward(
    values: Float[Array, "features half_k"],
    metadata: UInt32[Array, "row_blocks k_blocks 128"],
    dy: Float[Array, "tokens k"],
    a_values: Float[Array, "tokens half_features"],
    a_metadata: UInt32[Array, "token_blocks feature_blocks 128"],
    experts: Experts | None = None,
    *,
    config_for: Callable[[Shape], Config] | None = None,
    multiprocessors: int,
) -> Float[Array, "tokens half_features"]:
    """Returns what `activations.backward` makes of dA = dY W^T.

    dA is rounded to dY's dtype, in registers.

    Args:
      values, metadata, experts, config_for, multiprocessors: see `keep_features`.
      dy: the rows of dY, with experts sorted by expert.
      a_values, a_metadata: A, 2:4 along the features.
    Raises:
      ValueError: shapes do not fit, or the config cannot run them; says why.
    """
    shape = _shape(values, metadata, dy, experts)
    sizes = (shape.n, shape.m // 2), (pl.cdiv(shape.n, TILE), shape.m // TILE, 128)
    if (a_values.shape, a_metadata.shape) != sizes or a_values.dtype != dy.dtype:
        raise ValueError(
            f"A {a_values.dtype}{a_values.shape} with words {a_metadata.shape} is not "
            f"the {dy.dtype}{sizes[0]} with words {sizes[1]} of {shape.n} tokens and "
            f"{shape.m} features"
        )
    (out,) = _launch(
        shape,
        config_for,
        _backward,
        [jax.ShapeDtypeStruct(a_values.shape, dy.dtype)],
        [values, metadata, dy],
        [a_values, a_metadata],
        experts,
        multiprocessors,
    )
    return out


def _shape(values, metadata, x, experts: Experts | None) -> Shape:
    (tokens, k), rows = x.shape, values.shape[0]
    check_operands(values, metadata, x, k)
    count, tiles = 1, 0
    if experts is not None:
        count, tiles = experts.count, experts.tile_expert.size
    if rows % (TILE * count) or (tiles and tokens % tiles):
        raise ValueError(
            f"{rows} rows of W are not {count} experts of equally many, a multiple of "
            f"{TILE}, or {tokens} rows of X not {tiles} group tiles"
        )
    return Shape(
        m=rows // count,
        n=tokens,
        k=k,
        dtype=str(x.dtype),
        experts=count,
        group_tile=tokens // tiles if tiles else 0,
        packed_out=True,
    )


def _launch(
    shape: Shape,
    config_for: Callable[[Shape], Config] | None,
    pack: Callable[..., None],
    out_type: list[jax.ShapeDtypeStruct],
    operands: Sequence[jax.Array],
    inputs: Sequence[jax.Array],
    experts: Experts | None,
    multiprocessors: int,
) -> Sequence[jax.Array]:
    if config_for is None:
        config_for = partial(default_config, multiprocessors=multiprocessors)
    config = config_for(shape)
    if reason := why_invalid(config, shape):
        raise ValueError(f"no 2:4 GEMM of {shape} with {config}: {reason}")
    lookups = []
    if experts is not None:
        used = experts.used_tiles.astype(jnp.int32).reshape(1)
        lookups = [experts.tile_expert.astype(jnp.int32), used]
    return launch(
        shape,
        config,
        out_type,
        *operands,
        *inputs,
        *lookups,
        multiprocessors=multiprocessors,
        epilogue=_epilogue(pack),
        inputs=len(inputs),
    )


def _epilogue(pack: Callable[..., None]) -> Epilogue:
    """Returns an epilogue that has every thread run `pack`, which stores the tile into
    shared memory and packs from there."""

    def run(shape: Shape, epi_tile, smem, inputs, outputs, origin) -> None:
        arrays, scalar = [*inputs, *outputs], plgpu.Layout.WG_SPLAT

        @plgpu.inline_mgpu(
            arg_types=(
                plgpu.Layout.WGMMA_TRANSPOSED,
                plgpu.RefType(OUT_TRANSFORMS),
                scalar,
                scalar,
                *[plgpu.RefType()] * len(arrays),
            )
        )
        def packed(_, epi_tile, ref, row, column, *arrays):
            feature, token = (of.registers.item() for of in (row, column))
            store = partial(store_epi_tile, epi_tile, ref, transpose=True)
            pack(shape, ref, store, feature, token, *arrays)

        transposed = plgpu.layout_cast(epi_tile, plgpu.Layout.WGMMA_TRANSPOSED)
        packed(transposed, smem, *origin, *arrays)

    return run


# What one thread does. An epilogue tile may lie beyond the matrix, wholly or with its
# last tokens.


def _keep_features(shape, ref, store, feature, token, *outputs) -> None:
    place, in_bounds, rows = _place(shape, feature, token)
    store()
    mosaic_internals.warpgroup_barrier()
    with mosaic_internals.when(in_bounds):
        activation_threads.keep_features(place, rows, [ref], outputs)


def _backward(shape, ref, store, feature, token, values, metadata, dy) -> None:
    place, in_bounds, rows = _place(shape, feature, token)
    # A is on its way while the tile is stored.
    kept = activation_threads.load_kept(place, rows, [values], metadata)
    store()
    mosaic_internals.warpgroup_barrier()
    with mosaic_internals.when(in_bounds):
        activation_threads.gradients_at(
            activation_gradients.squared, place, rows, ref, kept, [dy]
        )


class _Row(NamedTuple):
    """A row of an epilogue tile that a thread works on; each thread has two."""

    index: ir.Value
    """The index of the row that is written; the last one where the matrix has no such
    row."""
    exists: ir.Value
    """Whether the matrix has the row."""
    in_tile: ir.Value
    """The index of the row in the epilogue tile, 0 to 63."""

    def load_pairs(self, ref: ir.Value) -> list[ir.Value]:
        """Returns the thread's 16 features, two to a word, from the tile in shared
        memory: lines of 64 features whose eighths are swizzled by the line."""
        line = arith.muli(self.in_tile, constant(TILE))
        swizzle = arith.andi(self.in_tile, constant(LINE_BYTES // 16 - 1))
        first = arith.divui(
            prune_2to4.metadata_columns(prune_2to4.thread()), constant(8)
        )
        words = []
        for i in range(2):
            eighth = arith.xori(arith.addi(first, constant(i)), swizzle)
            start = arith.addi(line, arith.muli(eighth, constant(8)))
            words += prune_2to4.load_pairs(ref, None, start, 4)
        return words


def _place(
    shape: Shape, feature: ir.Value, token: ir.Value
) -> tuple[activation_threads.Place, ir.Value, list[_Row]]:
    """Returns (tile, in_bounds, rows) of the epilogue tile that begins at a feature and
    a token: which tile of 64 by 64 it is, whether it lies in the matrix, and the
    thread's two rows. Tiles outside the matrix map to tile 0 and are masked."""
    in_bounds = arith.andi(
        prune_2to4.below(feature, shape.m), prune_2to4.below(token, shape.n)
    )
    block = [arith.divui(start, constant(TILE)) for start in (token, feature)]
    place = activation_threads.Place(
        *(arith.select(in_bounds, b, constant(0)) for b in block)
    )
    rows = []
    for half in range(2):
        own = arith.addi(
            prune_2to4.metadata_row(prune_2to4.thread()), constant(8 * half)
        )
        row = arith.addi(token, own)
        exists = arith.andi(in_bounds, prune_2to4.below(row, shape.n))
        row = arith.select(exists, row, constant(shape.n - 1))
        rows.append(_Row(row, exists, own))
    return place, in_bounds, rows
