"""Gradients of 2:4 activations at their kept positions, as one thread computes them.

A word has two 16-bit numbers: two entries of a group, or of two groups. Everything here
builds MLIR, in the body of an `inline_mgpu` function.
"""

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from pallas_kernels.sm90.threads import packed16x2


def squared(da: ir.Value, a: ir.Value, dtype: ir.Type) -> list[ir.Value]:
    """Returns dY1 = dA 2 relu(Y1), rounded once. relu(Y1) is the root of A, rounded to
    A's dtype: exactly the number that was squared."""
    lower, upper = packed16x2.to_float32(a, dtype)
    hidden = packed16x2.rounded(
        packed16x2.square_root(lower), packed16x2.square_root(upper), dtype
    )
    return [packed16x2.product(da, packed16x2.sum_of(hidden, hidden, dtype), dtype)]


def gated(
    da: ir.Value, hidden: ir.Value, up: ir.Value, dtype: ir.Type
) -> list[ir.Value]:
    """Returns dG = dA U 2 relu(G) and dU = dA relu(G)^2, rounded once: products of
    three numbers of 8 bits are exact in float32."""

    def of_one(da: ir.Value, hidden: ir.Value, up: ir.Value):
        of_hidden = arith.mulf(da, hidden)
        twice = arith.addf(of_hidden, of_hidden)
        return arith.mulf(twice, up), arith.mulf(of_hidden, hidden)

    words = (packed16x2.to_float32(word, dtype) for word in (da, hidden, up))
    lower, upper = (of_one(*halves) for halves in zip(*words, strict=True))
    return [packed16x2.rounded(*both, dtype) for both in zip(lower, upper, strict=True)]
