"""The parts of jax that the kernels need and that have no public name.

Mosaic GPU, which compiles Pallas kernels for Hopper, offers kernels an escape:
`plgpu.inline_mgpu` runs a function that builds MLIR itself. What such a function works
with lies in `jax.experimental.mosaic.gpu`, with no promise to stay. All of it that this
package uses is taken from there in this file, so that a new jax is checked in one
place; the rest of the package uses public Pallas (`pl`, `plgpu`) and MLIR's own
bindings (`jaxlib.mlir`).

Checked with jax 0.11.2, the version that the figures and the GPU tests were run with.
CI lowers every kernel on the newest jax that is allowed as well; what has moved there
shows here, as an ImportError or an AttributeError.
"""

import importlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
from jax.experimental.mosaic.gpu import fragmented_array, mma_utils, utils
from jaxlib.mlir import ir

# The package has a function of the same name.
_wgmma = importlib.import_module("jax.experimental.mosaic.gpu.wgmma")

FragmentedArray = fragmented_array.FragmentedArray
"""An array in the registers of a warpgroup: `registers`, an object array of MLIR values
that every thread has, and `layout`, which says whose registers hold which entry."""


# Values and addresses.


def constant(value: int, bits: int) -> ir.Value:
    """Returns an integer constant of `bits` bits, without a sign."""
    return utils.c(value, ir.IntegerType.get_signless(bits))


def bit_width(dtype: ir.Type) -> int:
    """Returns the number of bits of a number of an MLIR type."""
    return utils.bitwidth(dtype)


def pointer(ref: ir.Value) -> ir.Value:
    """Returns the address where a memref begins."""
    return utils.memref_ptr(ref)


def offset_pointer(address: ir.Value, offset_bytes: ir.Value) -> ir.Value:
    """Returns an address that lies `offset_bytes` further; the offset is an int64."""
    i8 = ir.IntegerType.get_signless(8)
    return utils.getelementptr(address, [offset_bytes], i8)


def transposed(ref: ir.Value, permutation: Sequence[int]) -> ir.Value:
    """Returns a memref of the same memory with its axes in another order."""
    return utils.memref_transpose(ref, permutation)


def unfolded(ref: ir.Value, axis: int, sizes: Sequence[int | None]) -> ir.Value:
    """Returns a memref of the same memory with one axis split into several; None stands
    for the size that is left."""
    return utils.memref_unfold(ref, axis, tuple(sizes))


# Threads.


def thread_index() -> ir.Value:
    """Returns the index of a thread in its block, int32."""
    return utils.thread_idx()


def shuffled(value: ir.Value, distance: int) -> ir.Value:
    """Returns the value of the thread of the same warp whose index differs in the bit
    `distance`, a power of two below 32."""
    return utils.shfl_bfly(value, distance)


def when(condition: ir.Value) -> AbstractContextManager[None]:
    """Opens a branch: what is built inside runs on the threads where the condition
    holds."""
    return utils.when(condition)


def warpgroup_barrier() -> None:
    """Waits until all 128 threads of the warpgroup have come here."""
    utils.warpgroup_barrier()


# Matrix instructions.


def descriptor(
    ref: ir.Value,
    *,
    swizzle: int,
    group_size: tuple[int, int],
    k_major: bool,
    bytes_along_k: int = 32,
) -> tuple[Any, Sequence[int], int]:
    """Returns the descriptor by which a matrix instruction reads a tiled operand in
    shared memory, and the strides of its groups.

    Args:
      ref: the operand, in tiles of 8 rows by one swizzled line.
      swizzle: bytes of a line.
      group_size: (rows, columns) that one instruction multiplies, the axis along k
        first if `k_major`, else last.
      k_major: whether k is the operand's first axis.
      bytes_along_k: the bytes of the operand that one instruction reads along k.
    Returns:
      the descriptor of the first group; the strides of groups along k, in bytes; and
      the stride of groups along the other axis, in bytes.
    """
    (start, (_, strides)), (group_stride, _), _ = mma_utils.create_descriptor(
        ref,
        swizzle=swizzle,
        group_size=group_size,
        logical_k_major=k_major,
        mma_bytewidth_k=bytes_along_k,
    )
    return start, strides, group_stride


def advanced(descriptor: Any, offset_bytes: int) -> ir.Value:
    """Returns the descriptor of an operand that lies `offset_bytes` further."""
    return _wgmma._llvm_add(
        descriptor, constant(mma_utils.encode_addr(offset_bytes), 64)
    )


def pinned(accumulator: FragmentedArray) -> FragmentedArray:
    """Returns an accumulator as matrix instructions take it. This also keeps the
    compiler from moving accesses of its registers past this point."""
    return _wgmma.WGMMAAccumulator.from_registers(accumulator)._value


def like_accumulator(
    registers: Sequence[ir.Value], like: FragmentedArray
) -> FragmentedArray:
    """Returns float32 registers as an array of the shape and layout of `like`, in the
    layout that Pallas has for accumulators."""
    array = np.array(registers, dtype=object).reshape(like.registers.shape)
    return FragmentedArray(
        _registers=array, _layout=like.layout, _is_signed=None
    ).to_layout(fragmented_array.WGMMA_LAYOUT)
