"""Runs the body of a kernel on CPU: every value is an array with an entry per thread.

Kernels that are written in MLIR through `prune_2to4` cannot be interpreted; here the
operations they build are NumPy's instead, on all 128 threads of a warpgroup at once. A
barrier has nothing to wait for. Accesses are checked for bounds and alignment.
"""

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from jaxlib.mlir.dialects import arith as real_arith

from pallas_kernels.sm90 import (
    activations,
    gather_sum,
    matmul_to_packed,
    mosaic_internals,
    prune_weight,
)
from pallas_kernels.sm90.threads import (
    activation_gradients,
    activation_threads,
    activation_tiles,
    over_tokens_threads,
    packed16x2,
    prune_2to4,
)

THREADS = 128
INTEGERS = {1: np.bool_, 8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
MODULES = (
    activation_gradients,
    activation_threads,
    activation_tiles,
    activations,
    gather_sum,
    matmul_to_packed,
    over_tokens_threads,
    packed16x2,
    prune_2to4,
    prune_weight,
)
PTX_TYPES = {ml_dtypes.bfloat16: "bf16", np.float16: "f16"}
DTYPES = {f"{name}x2": dtype for dtype, name in PTX_TYPES.items()}


class Lanes(np.ndarray):
    """An entry per thread."""

    @property
    def type(self):
        return self.dtype.type


class Memory:
    """A buffer in global or shared memory, or a part of one."""

    def __init__(self, array: np.ndarray, whole: np.ndarray | None = None) -> None:
        whole = array if whole is None else whole
        assert whole.flags.c_contiguous and array.strides[-1] == array.dtype.itemsize
        self.array = array
        self.bytes = whole.reshape(-1).view(np.uint8)
        self.start = array.ctypes.data - whole.ctypes.data

    @property
    def type(self):
        return self

    @property
    def shape(self):
        return self.array.shape

    @property
    def element_type(self):
        return self.array.dtype.type


def lanes(array) -> Lanes:
    return np.broadcast_to(np.asarray(array), (THREADS,)).view(Lanes)


def _signed(value) -> np.ndarray:
    return np.asarray(value).view({4: np.int32, 8: np.int64}[value.dtype.itemsize])


def _compare(predicate, left, right) -> Lanes:
    kind = real_arith.CmpIPredicate
    signed = {kind.sgt: np.greater, kind.slt: np.less}
    plain = {kind.eq: np.equal, kind.ne: np.not_equal, kind.ult: np.less}
    assert left.type == right.type, (left.type, right.type)
    if predicate in signed:
        return lanes(signed[predicate](_signed(left), _signed(right)))
    return lanes(plain[predicate](np.asarray(left), np.asarray(right)))


def _of_one_type(operation):
    def apply(left, right):
        assert left.type == right.type, (left.type, right.type)
        with np.errstate(over="ignore", invalid="ignore", under="ignore"):
            return lanes(operation(np.asarray(left), np.asarray(right)))

    return apply


def _convert(type_, value) -> Lanes:
    return lanes(np.asarray(value).astype(type_))


def _round(type_, value) -> Lanes:
    with np.errstate(over="ignore", under="ignore"):
        return _convert(type_, value)


def _select(condition, yes, no) -> Lanes:
    assert condition.type == np.bool_ and yes.type == no.type
    return lanes(np.where(np.asarray(condition), np.asarray(yes), np.asarray(no)))


ARITH = SimpleNamespace(
    CmpIPredicate=real_arith.CmpIPredicate,
    addi=_of_one_type(np.add),
    subi=_of_one_type(np.subtract),
    muli=_of_one_type(np.multiply),
    andi=_of_one_type(np.bitwise_and),
    ori=_of_one_type(np.bitwise_or),
    xori=_of_one_type(np.bitwise_xor),
    shli=_of_one_type(np.left_shift),
    shrui=_of_one_type(np.right_shift),
    divui=_of_one_type(np.floor_divide),
    remui=_of_one_type(np.remainder),
    minui=_of_one_type(np.minimum),
    addf=_of_one_type(np.add),
    subf=_of_one_type(np.subtract),
    mulf=_of_one_type(np.multiply),
    cmpi=_compare,
    select=_select,
    extui=_convert,
    trunci=_convert,
    extf=_convert,
    truncf=_round,
    bitcast=lambda type_, value: lanes(np.asarray(value).view(type_)),
)

IR = SimpleNamespace(
    Value=Lanes,
    F32Type=SimpleNamespace(get=lambda: np.float32),
    IntegerType=SimpleNamespace(get_signless=INTEGERS.__getitem__),
    MemRefType=lambda memory: memory,
)


class _Threads:
    """Returns which of the threads are active."""

    def __init__(self) -> None:
        self.active = np.ones(THREADS, bool)

    @contextlib.contextmanager
    def when(self, condition) -> Iterator[None]:
        before = self.active
        self.active = before & np.asarray(condition)
        yield
        self.active = before

    def bytes_of(
        self, memory: Memory, row, column, count: int, size: int
    ) -> np.ndarray:
        """(threads, count * size) addresses of an access that all can make at once."""
        start = memory.start + np.asarray(column).astype(np.int64) * (
            memory.array.dtype.itemsize
        )
        if row is not None:
            start += np.asarray(row).astype(np.int64) * memory.array.strides[0]
        assert (start[self.active] % (count * size) == 0).all(), "misaligned"
        addresses = start[:, None] + np.arange(count * size)
        inside = (addresses >= 0) & (addresses < memory.bytes.size)
        assert inside[self.active].all(), "out of bounds"
        return addresses

    def load(self, memory: Memory, row, column, count: int) -> list[Lanes]:
        dtype = memory.array.dtype
        # MLIR's integers have no sign.
        kind = INTEGERS[8 * dtype.itemsize] if dtype.kind == "i" else dtype
        return self._load(memory, row, column, count, np.dtype(kind))

    def load_pairs(self, memory: Memory, row, column, count: int) -> list[Lanes]:
        assert memory.array.dtype.itemsize == 2
        return self._load(memory, row, column, count, np.dtype(np.uint32))

    def _load(self, memory: Memory, row, column, count: int, kind) -> list[Lanes]:
        addresses = self.bytes_of(memory, row, column, count, kind.itemsize)
        found = np.zeros(addresses.shape, np.uint8)
        found[self.active] = memory.bytes[addresses[self.active]]
        loaded = found.view(kind)
        return [lanes(loaded[:, i]) for i in range(count)]

    def store_half(self, memory: Memory, index, upper, half) -> None:
        assert half.dtype == np.uint16 and memory.array.dtype == np.uint32
        halves = Memory(memory.array.view(np.uint16))
        self.store(halves, None, 2 * np.asarray(index) + np.asarray(upper), [half])

    def store(self, memory: Memory, row, column, words) -> None:
        size = words[0].dtype.itemsize
        addresses = self.bytes_of(memory, row, column, len(words), size)
        stored = np.stack([np.asarray(word) for word in words], axis=1).view(np.uint8)
        memory.bytes[addresses[self.active]] = stored[self.active]


def _bytes_of(low, high, selectors) -> Lanes:
    both = np.stack([np.asarray(low), np.asarray(high)], axis=1).view(np.uint8)
    result = np.zeros((THREADS, 4), np.uint8)
    for i in range(4):
        selector = np.asarray(selectors) >> (4 * i) & 15
        byte = both[np.arange(THREADS), selector & 7]
        sign = np.where(byte >> 7, 255, 0)
        result[:, i] = np.where(selector >> 3, sign, byte)
    return lanes(result.view(np.uint32)[:, 0])


def _relu(word, _, *, dtype) -> Lanes:
    x = np.asarray(word).reshape(-1, 1).view(dtype)
    nan = np.isnan(x.astype(np.float32))
    positive = np.where(np.signbit(x), 0, x.view(np.uint16))
    bits = np.where(nan, 0x7FFF, positive).astype(np.uint16)
    return lanes(bits.view(np.uint32)[:, 0])


def _by_half(operation):
    def apply(left, right, *, dtype) -> Lanes:
        halves = [np.asarray(w).reshape(-1, 1).view(dtype) for w in (left, right)]
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            exact = operation(*(half.astype(np.float32) for half in halves))
            rounded = exact.astype(dtype)
        bits = np.where(np.isnan(exact), 0x7FFF, rounded.view(np.uint16))
        return lanes(bits.astype(np.uint16).view(np.uint32)[:, 0])

    return apply


def _pair(upper, lower, *, dtype) -> Lanes:
    """Two float32, rounded."""
    with np.errstate(over="ignore", under="ignore"):
        both = np.stack([np.asarray(lower), np.asarray(upper)], axis=1).astype(dtype)
    return lanes(both.view(np.uint32)[:, 0])


def _square_root(value) -> Lanes:
    x = np.asarray(value)
    return lanes(np.sqrt(np.where(np.abs(x) < np.finfo(np.float32).tiny, 0, x)))


OF_HALVES = {
    "max": _relu,
    "mul": _by_half(np.multiply),
    "add": _by_half(np.add),
    "cvt": _pair,
}


def _instruction(name: str, *operands, result=None) -> Lanes:
    operation, *parts = name.split(".")
    of_float32 = operation in ("cvt", "sqrt")
    kind = np.float32 if of_float32 else np.uint32
    assert all(operand.type == kind for operand in operands)
    assert result is (np.float32 if operation == "sqrt" else None)
    if operation == "prmt":
        return _bytes_of(*operands)
    if operation == "sqrt":
        return _square_root(*operands)
    (dtype,) = (DTYPES[part] for part in parts if part in DTYPES)
    return OF_HALVES[operation](*operands, dtype=dtype)


def _constant(value: int, bits: int) -> Lanes:
    return lanes(np.array(value & ((1 << 64) - 1), np.uint64).astype(INTEGERS[bits]))


def _shuffle(value, distance: int) -> Lanes:
    return lanes(np.asarray(value)[np.arange(THREADS) ^ distance])


@contextlib.contextmanager
def emulated() -> Iterator[None]:
    """Inside, kernels' bodies take and return arrays; operands are `Memory`."""
    threads = _Threads()
    internals = {
        "constant": _constant,
        "thread_index": lambda: lanes(np.arange(THREADS, dtype=np.uint32)),
        "shuffled": _shuffle,
        "when": threads.when,
        "warpgroup_barrier": lambda: None,
    }
    with pytest.MonkeyPatch.context() as patch:
        for module in MODULES:
            patch.setattr(module, "arith", ARITH)
            patch.setattr(module, "ir", IR)
        patch.setattr(packed16x2, "_instruction", _instruction)
        patch.setattr(packed16x2, "_ptx_type", PTX_TYPES.__getitem__)
        for name in ("load", "load_pairs", "store", "store_half"):
            patch.setattr(prune_2to4, name, getattr(threads, name))
        for name, emulation in internals.items():
            patch.setattr(mosaic_internals, name, emulation)
        yield
