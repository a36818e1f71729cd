"""GEMMs of a 2:4 weight whose result is 2:4 activations, or their gradient, at once.

    keep_features    A = relu(X W1)^2, of four features the two largest
    backward         dY1 = (dY W2^T) 2 sqrt(A), where A has its entries

The kernel of `sparse_matmul_sm90` with another epilogue: instead of a piece of C, 64
features of 64 tokens, what `activations_sm90` would make of it is written, to the bit.
Nothing dense of size tokens by features is in memory. With experts a row has its own
expert's weight, as in `grouped_matmul_sm90`.
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

from pallas_kernels import activation_gradients as gradients
from pallas_kernels import activation_threads as threads
from pallas_kernels import group_of_four as four
from pallas_kernels.group_of_four import TILE, constant
from pallas_kernels.result_pieces_sm90 import OUT_TRANSFORMS, store_piece
from pallas_kernels.sparse_matmul_configs import (
    LINE_BYTES,
    Config,
    Shape,
    default_config,
    why_invalid,
)
from pallas_kernels.sparse_matmul_sm90 import Epilogue, check_operands, launch


class Experts(NamedTuple):
    """Whose weight a row of X meets."""

    tile_expert: Int[Array, " tiles"]
    """The expert of each group tile, of rows / tiles rows."""
    used_tiles: Int[Array, ""]
    """How many have rows; what the others hold afterwards is not defined."""
    count: int
    """Their weights lie below each other."""


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
    """What `activations_sm90.keep_features` makes of Y1 = X W^T, rounded to X's dtype.

    Args:
      values, metadata: W (features, k), 2:4 along k: see `packing`; with experts all of
        theirs, and the features of the result are one's.
      config_for: chooses the config of the shape; None for `default_config`.
      multiprocessors: of the GPU that will run it.
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
    """What `activations_sm90.backward` makes of dA = dY W^T, rounded to dY's dtype.

    Args:
      a_values, a_metadata: A, 2:4 along the features.
    Otherwise as `keep_features`.
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
    """`pack`, in which every thread stores what it has read of the piece."""

    def run(shape: Shape, piece, smem, inputs, outputs, origin) -> None:
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
        def packed(_, piece, ref, row, column, *arrays):
            feature, token = (of.registers.item() for of in (row, column))
            store = partial(store_piece, piece, ref, transpose=True)
            pack(shape, ref, store, feature, token, *arrays)

        transposed = plgpu.layout_cast(piece, plgpu.Layout.WGMMA_TRANSPOSED)
        packed(transposed, smem, *origin, *arrays)

    return run


# One thread. A piece may lie beyond the matrix, wholly or with its last tokens.


def _keep_features(shape, ref, store, feature, token, *outputs) -> None:
    place, inside, rows = _piece(shape, feature, token)
    store()
    four.barrier()
    with four.when(inside):
        threads.keep_features(place, rows, [ref], outputs)


def _backward(shape, ref, store, feature, token, values, metadata, dy) -> None:
    place, inside, rows = _piece(shape, feature, token)
    # A is on its way while the piece is stored.
    kept = threads.load_kept(place, rows, [values], metadata)
    store()
    four.barrier()
    with four.when(inside):
        threads.gradients_at(gradients.squared, place, rows, ref, kept, [dy])


class _Row(NamedTuple):
    """One of a thread's rows of a piece."""

    index: ir.Value
    exists: ir.Value
    of_piece: ir.Value

    def load_pairs(self, ref: ir.Value) -> list[ir.Value]:
        """From the piece in shared memory: lines of 64 features whose eighths are
        swizzled by the line."""
        line = arith.muli(self.of_piece, constant(TILE))
        swizzle = arith.andi(self.of_piece, constant(LINE_BYTES // 16 - 1))
        first = arith.divui(four.metadata_columns(four.thread()), constant(8))
        words = []
        for i in range(2):
            eighth = arith.xori(arith.addi(first, constant(i)), swizzle)
            start = arith.addi(line, arith.muli(eighth, constant(8)))
            words += four.load_pairs(ref, None, start, 4)
        return words


def _piece(
    shape: Shape, feature: ir.Value, token: ir.Value
) -> tuple[threads.Place, ir.Value, list[_Row]]:
    """Its tile, the first one where it is beyond the matrix, which comes second; and a
    thread's rows."""
    inside = arith.andi(four.below(feature, shape.m), four.below(token, shape.n))
    block = [arith.divui(start, constant(TILE)) for start in (token, feature)]
    place = threads.Place(*(arith.select(inside, b, constant(0)) for b in block))
    rows = []
    for half in range(2):
        own = arith.addi(four.metadata_row(four.thread()), constant(8 * half))
        row = arith.addi(token, own)
        exists = arith.andi(inside, four.below(row, shape.n))
        row = arith.select(exists, row, constant(shape.n - 1))
        rows.append(_Row(row, exists, own))
    return place, inside, rows
