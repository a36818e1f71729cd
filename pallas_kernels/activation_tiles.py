"""Tiles of 64 features that the kernels of 2:4 activations work on.

What may be packed, how a kernel is run on every tile, and where a tile is in memory.
"""

from functools import partial

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from pallas_kernels.group_of_four import TILE, constant

_SCALAR = plgpu.Layout.WG_SPLAT


def why_unsupported(features: int, dtype: str) -> str | None:
    """Why activations cannot be packed, whatever the number of tokens, or None."""
    if features % TILE or not features:
        return f"{features} features are not a multiple of {TILE}"
    if dtype not in ("bfloat16", "float16"):
        return f"packs activations in bfloat16 and float16, not {dtype}"
    return None


def check(features: int, dtype: jnp.dtype) -> None:
    """Raises ValueError where `why_unsupported` has a reason."""
    if reason := why_unsupported(features, str(dtype)):
        raise ValueError(reason)


def on_tiles(
    kernel,
    grid: tuple[int, int],
    out_type: tuple,
    *operands,
    name: str,
    scratch: tuple = (),
):
    """`kernel` on every tile: of 64 features, and of the tokens that it takes."""
    return plgpu.kernel(
        partial(_on_tile, kernel, len(operands) + len(out_type)),
        out_type=out_type,
        scratch_types=scratch,
        grid=grid,
        grid_names=("token_block", "feature_block"),
        kernel_name=f"activations_{name}",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup
        ),
    )(*operands)


def _on_tile(kernel, arrays: int, *refs) -> None:
    blocks = [lax.axis_index(name) for name in ("token_block", "feature_block")]
    scratch = [plgpu.RefType()] * (len(refs) - arrays)

    @plgpu.inline_mgpu(
        arg_types=(_SCALAR, _SCALAR, *[plgpu.RefType()] * arrays, *scratch)
    )
    def run(_, token_block, feature_block, *refs):
        kernel(token_block.registers.item(), feature_block.registers.item(), *refs)

    run(*blocks, *refs)


def half(column: ir.Value) -> ir.Value:
    """Where the kept value of two columns is."""
    return arith.divui(column, constant(2))


def tile_start(row_block: ir.Value, k_block: ir.Value, metadata: ir.Value) -> ir.Value:
    """Of the first word of a tile."""
    _, k_blocks, words = ir.MemRefType(metadata.type).shape
    tile = arith.addi(arith.muli(row_block, constant(k_blocks)), k_block)
    return arith.muli(tile, constant(words))


def words_of_row(metadata: ir.Value) -> int:
    """Of a row of tiles."""
    _, k_blocks, words = ir.MemRefType(metadata.type).shape
    return k_blocks * words
