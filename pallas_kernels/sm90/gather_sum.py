"""Sums of rows chosen by index, as experts take and give back their tokens' rows.

    out_i = sum_j x[index_ij]

Memory-bound: a row is read for each index and written once, 16 bytes a thread.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith
from jaxtyping import Array, Float, Int

from pallas_kernels.sm90.threads import packed16x2, prune_2to4
from pallas_kernels.sm90.threads.prune_2to4 import constant

ENTRIES = 8
"""The number of 16-bit entries that one access reads."""
THREADS = 128
IN_FLIGHT = 8
"""The number of accesses that a thread starts before it uses the first result."""


def why_unsupported(d: int, dtype: str) -> str | None:
    """Returns why rows of size d cannot be summed, or None where they can."""
    if d % ENTRIES or not d:
        return f"d={d} is not a multiple of {ENTRIES}"
    if dtype not in ("bfloat16", "float16"):
        return f"sums bfloat16 and float16, not {dtype}"
    return None


def gather_sum(
    x: Float[Array, "rows d"], index: Int[Array, "out_rows choices"]
) -> Float[Array, "out_rows d"]:
    """Returns out_i = sum_j x[index_ij], summed in float32 in the order of j and
    rounded once.

    An index outside [0, rows) adds nothing; a row of out all of whose indices lie
    outside is zero.

    Raises:
      ValueError: d is not a multiple of 8, or the dtype not of 16 bits.
    """
    d = x.shape[1]
    if reason := why_unsupported(d, str(x.dtype)):
        raise ValueError(f"rows of x {x.dtype}{x.shape} cannot be summed: {reason}")
    rows, choices = index.shape
    together = _rows_together(d)
    return plgpu.kernel(
        partial(_kernel, together=together),
        out_type=jax.ShapeDtypeStruct((rows, d), x.dtype),
        grid=(math.ceil(rows / together),),
        grid_names=("block",),
        kernel_name="sum_rows" if choices > 1 else "gather_rows",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup
        ),
    )(x, index.astype(jnp.int32))


def _rows_together(d: int) -> int:
    """Returns how many rows a block has: as many as give every thread whole accesses,
    and several of them in flight."""
    fewest = THREADS * ENTRIES // math.gcd(d, THREADS * ENTRIES)
    return fewest * math.ceil(IN_FLIGHT * THREADS * ENTRIES / (d * fewest))


def _kernel(x_gmem, index_gmem, out_gmem, *, together: int) -> None:
    first_row = lax.axis_index("block") * together

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WG_SPLAT, *[plgpu.RefType()] * 3))
    def run(_, first_row, x, index, out):
        _sum(first_row.registers.item(), together, x, index, out)

    run(first_row, x_gmem, index_gmem, out_gmem)


def _sum(
    first_row: ir.Value, together: int, x: ir.Value, index: ir.Value, out: ir.Value
) -> None:
    """Computes the part of one thread of a block: every 128th access to the block's
    rows."""
    rows, d = ir.MemRefType(out.type).shape
    thread = prune_2to4.thread()
    places = range(together * d // (THREADS * ENTRIES))
    for start in range(0, len(places), IN_FLIGHT):
        found = []
        for place in places[start : start + IN_FLIGHT]:
            access = arith.addi(thread, constant(THREADS * place))
            row = arith.addi(first_row, arith.divui(access, constant(d // ENTRIES)))
            # What is beyond the last row writes that one, and the same into it.
            row = arith.minui(row, constant(rows - 1))
            column = arith.remui(access, constant(d // ENTRIES))
            column = arith.muli(column, constant(ENTRIES))
            found.append((row, column, _chosen(x, index, row, column)))
        for row, column, words in found:
            prune_2to4.store(
                out, row, column, _summed(words, prune_2to4.element_type(x))
            )


def _chosen(
    x: ir.Value, index: ir.Value, row: ir.Value, column: ir.Value
) -> list[list[ir.Value]]:
    """Returns the words that a thread reads for each choice j, two entries to a word,
    zeros where the index chooses no row."""
    _, choices = ir.MemRefType(index.type).shape
    rows, _ = ir.MemRefType(x.type).shape
    words: list[list[ir.Value]] = []
    for choice in range(choices):
        (chosen,) = prune_2to4.load(index, row, constant(choice), 1)
        exists = arith.cmpi(arith.CmpIPredicate.ult, chosen, constant(rows))
        place = arith.select(exists, chosen, constant(0))
        loaded = prune_2to4.load_pairs(x, place, column, ENTRIES // 2)
        words.append([arith.select(exists, word, constant(0)) for word in loaded])
    return words


def _summed(words: list[list[ir.Value]], dtype: ir.Type) -> list[ir.Value]:
    """Returns the sums over the choices, word by word. The bits of a single choice are
    returned as they are."""
    if len(words) == 1:
        return words[0]
    sums = []
    for of_choices in zip(*words, strict=True):
        (lower, upper), *others = (
            packed16x2.to_float32(word, dtype) for word in of_choices
        )
        for other_lower, other_upper in others:
            lower = arith.addf(lower, other_lower)
            upper = arith.addf(upper, other_upper)
        sums.append(packed16x2.rounded(lower, upper, dtype))
    return sums
