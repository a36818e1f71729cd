"""`wgmma.mma_async.sp`, Hopper's matrix instruction with a 2:4 operand.

The one place that emits it. For one warpgroup (128 threads),

    D (64, n) += A (64, k) B (k, n),    n a multiple of 8 up to 256

A is 2:4 along k and comes as its kept values (64, k / 2) and `metadata`; D is float32.
Source: PTX ISA, "Asynchronous warpgroup level matrix instructions".
"""

import importlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.experimental.mosaic.gpu import fragmented_array, mma_utils, utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm, vector

# The package has a function of the same name.
_wgmma = importlib.import_module("jax.experimental.mosaic.gpu.wgmma")

SWIZZLE_A = 128
"""Bytes of a row of A's values in shared memory: 128 columns of A, half of them
kept."""

SWIZZLE_B = 128
"""Bytes of a row of B in shared memory: 64 columns."""

FIRST_TWO = 0x44444444
"""Metadata of groups that keep their first two entries. Of the two positions in four
bits the second must be larger: no bits that the instruction knows are below 0100, and
so no word of metadata is below this one."""

_PTX_TYPES = {"bf16": "bf16", "f16": "f16"}


def sparse_wgmma(
    accumulator: fragmented_array.FragmentedArray,
    values: ir.Value,
    metadata: Sequence[fragmented_array.FragmentedArray],
    b: ir.Value,
    *,
    half: int,
    b_k_major: bool,
    beyond: bool = False,
) -> fragmented_array.FragmentedArray:
    """`accumulator + A B` over 64 columns of A; waits for the result.

    Args:
      accumulator: (m, n) float32 in the WGMMA layout, m a multiple of 64.
      values: A's kept values of 128 columns in shared memory, bfloat16 or float16,
        tiled (m / 8, 1, 8, 64) with `SWIZZLE_A`.
      metadata: of each 64 rows uint32 (128,), one word for each thread: see `packing`.
      b: in shared memory with `SWIZZLE_B`. K-major: n rows of 64, tiled
        (n / 8, 1, 8, 64); else 64 rows of n, tiled (8, n / 64, 8, 64).
      half: of the 128 columns of A, 0 or 1.
      b_k_major: whether k is the contiguous axis of b.
      beyond: whether A may have words of zeros, as a copy leaves them where it reaches
        beyond the metadata in memory. They are no metadata, and are replaced.
    """
    n = accumulator.shape[1]
    # Also keeps the compiler from moving accesses of the registers past this point.
    registers = _wgmma.WGMMAAccumulator.from_registers(accumulator)._value
    blocks = list(registers.registers.reshape(len(metadata), -1))
    (a_start, (_, (a_stride,))), (a_block_stride, _), _ = mma_utils.create_descriptor(
        values, swizzle=SWIZZLE_A, group_size=(64, 64), logical_k_major=False
    )
    if b_k_major:
        b = utils.memref_transpose(b, (1, 0, 3, 2))
    (b_start, (_, b_strides)), _, _ = mma_utils.create_descriptor(
        b,
        swizzle=SWIZZLE_B,
        group_size=(64, n),
        logical_k_major=True,
        mma_bytewidth_k=64,
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
                _advance(
                    a_start, block * a_block_stride + (2 * half + step) * a_stride
                ),
                _advance(b_start, step * b_strides[-1]),
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
    return fragmented_array.FragmentedArray(
        _registers=np.array(parts, dtype=object).reshape(registers.registers.shape),
        _layout=registers.layout,
        _is_signed=None,
    ).to_layout(fragmented_array.WGMMA_LAYOUT)


def _advance(descriptor: Any, offset_bytes: int) -> ir.Value:
    i64 = ir.IntegerType.get_signless(64)
    offset = utils.c(mma_utils.encode_addr(offset_bytes), i64)
    return _wgmma._llvm_add(descriptor, offset)


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
    """The n / 2 accumulator registers of a thread after one instruction."""
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
