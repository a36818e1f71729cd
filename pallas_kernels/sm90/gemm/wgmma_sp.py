"""`wgmma.mma_async.sp`, Hopper's matrix instruction with a 2:4 operand.

This is the one place that emits it. For one warpgroup (128 threads),

    D (64, n) += A (64, k) B (k, n),    n a multiple of 8 up to 256

A is 2:4 along k and comes as its kept values (64, k / 2) and `metadata`; D is float32.
Source: PTX ISA, "Asynchronous warpgroup level matrix instructions".
"""

from collections.abc import Sequence
from typing import Any

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm, vector

from pallas_kernels.sm90 import mosaic_internals
from pallas_kernels.sm90.mosaic_internals import FragmentedArray

SWIZZLE_A = 128
"""The bytes of a row of A's values in shared memory: 128 columns of A, half of them
kept."""

SWIZZLE_B = 128
"""The bytes of a row of B in shared memory: 64 columns."""

FIRST_TWO = 0x44444444
"""A word of metadata whose groups keep their first two entries. Of the two positions in
four bits the second must be larger: no bits that the instruction knows are below 0100,
and so no word of metadata is below this one."""

_PTX_TYPES = {"bf16": "bf16", "f16": "f16"}


def sparse_wgmma(
    accumulator: FragmentedArray,
    values: ir.Value,
    metadata: Sequence[FragmentedArray],
    b: ir.Value,
    *,
    half: int,
    b_k_major: bool,
    beyond: bool = False,
) -> FragmentedArray:
    """Returns `accumulator + A B` over 64 columns of A, and waits for the result.

    Args:
      accumulator: (m, n) float32 in the WGMMA layout, m a multiple of 64.
      values: A's kept values of 128 columns in shared memory, bfloat16 or float16,
        tiled (m / 8, 1, 8, 64) with `SWIZZLE_A`.
      metadata: for each 64 rows, uint32 (128,), one word for each thread; the order is
        that of `sparsejax.sparsity.packed`.
      b: B in shared memory with `SWIZZLE_B`. K-major: n rows of 64, tiled (n / 8, 1, 8,
        64); else 64 rows of n, tiled (8, n / 64, 8, 64).
      half: the half of the 128 columns of A that is multiplied, 0 or 1.
      b_k_major: whether k is the contiguous axis of b.
      beyond: whether A may have words of zeros, as a copy leaves them where it reaches
        beyond the metadata in memory. They are no metadata, and are replaced.
    """
    n = accumulator.shape[1]
    registers = mosaic_internals.pinned(accumulator)
    blocks: list[Any] = list(registers.registers.reshape(len(metadata), -1))
    a_start, (a_stride,), a_block_stride = mosaic_internals.descriptor(
        values, swizzle=SWIZZLE_A, group_size=(64, 64), k_major=False
    )
    if b_k_major:
        b = mosaic_internals.transposed(b, (1, 0, 3, 2))
    b_start, b_strides, _ = mosaic_internals.descriptor(
        b, swizzle=SWIZZLE_B, group_size=(64, n), k_major=True, bytes_along_k=64
    )
    element = ir.MemRefType(values.type).element_type
    words = [
        vector.extract(word.registers.item(), dynamic_position=[], static_position=[0])
        for word in metadata
    ]
    if beyond:
        words = [arith.maxui(word, _constant(FIRST_TWO)) for word in words]
    for step in range(2):  # an instruction takes 32 columns of A
        for block, word in enumerate(words):
            blocks[block] = _instruction(
                list(blocks[block]),
                mosaic_internals.advanced(
                    a_start, block * a_block_stride + (2 * half + step) * a_stride
                ),
                mosaic_internals.advanced(b_start, step * b_strides[-1]),
                word,
                n=n,
                ptx_type=_PTX_TYPES[str(element)],
                # Which threads of each four hold the metadata of these columns.
                selector=step,
                b_k_major=b_k_major,
            )
    nvvm.wgmma_commit_group_sync_aligned()
    # The running instruction reads the metadata register: it must not be left in
    # flight while the next word is loaded.
    nvvm.wgmma_wait_group_sync_aligned(0)
    parts = [part for block in blocks for part in block]
    return mosaic_internals.like_accumulator(parts, registers)


def _instruction(
    parts: list[ir.Value],
    a: ir.Value,
    b: ir.Value,
    metadata: ir.Value,
    *,
    n: int,
    ptx_type: str,
    selector: int,
    b_k_major: bool,
) -> list[ir.Value]:
    """Emits one instruction, and returns the n / 2 accumulator registers of a thread
    after it."""
    count = n // 2
    register = ir.VectorType.get((1,), ir.F32Type.get())
    names = [f"${i}" for i in range(2 * count + 9)]
    a_name, b_name, e_name, *immediates = names[2 * count :]
    select, scale_d, *signs_and_orders = immediates
    # scale-d as a predicate, then the signs of A and B, and whether they are MN-major.
    values = [selector, 1, 1, 1, 0, int(not b_k_major)]
    ptx = (
        f"{{ .reg .pred p; setp.ne.b32 p, {scale_d}, 0; "
        f"wgmma.mma_async.sp.sync.aligned.m64n{n}k32.f32.{ptx_type}.{ptx_type} "
        f"{{{','.join(names[:count])}}}, {a_name}, {b_name}, {e_name}, {select}, p, "
        f"{', '.join(signs_and_orders)}; }}\n"
    )
    # Accumulators in and out in the same registers, descriptors, metadata, constants.
    constraints = ["=f"] * count + [str(i) for i in range(count)]
    constraints += ["l", "l", "r"] + ["n"] * len(values)
    result: Any = llvm.inline_asm(
        llvm.StructType.get_literal([register] * count),
        [*parts, a, b, metadata, *map(_constant, values)],
        ptx,
        ",".join(constraints),
        asm_dialect=0,
        has_side_effects=True,
    )
    return [llvm.extractvalue(register, result, [i]) for i in range(count)]


def _constant(value: int) -> ir.Value:
    i32 = ir.IntegerType.get_signless(32)
    return llvm.ConstantOp(i32, ir.IntegerAttr.get(i32, value)).result
