"""Gradients of 2:4 activations at their kept positions, as one thread computes them.

A word has two 16-bit numbers: two entries of a group, or of two groups. Everything here
builds MLIR, in the body of an `inline_mgpu` function.
"""

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from pallas_kernels import two_groups as two


def squared(da: ir.Value, a: ir.Value, dtype: ir.Type) -> list[ir.Value]:
    """dY1 = dA 2 relu(Y1), rounded once; relu(Y1) is the root of A, rounded to A's
    dtype, which is what was squared."""
    lower, upper = two.to_float32(a, dtype)
    hidden = two.rounded(two.square_root(lower), two.square_root(upper), dtype)
    return [two.product(da, two.sum_of(hidden, hidden, dtype), dtype)]


def gated(
    da: ir.Value, hidden: ir.Value, up: ir.Value, dtype: ir.Type
) -> list[ir.Value]:
    """dG = dA U 2 relu(G) and dU = dA relu(G)^2, rounded once: products of three
    numbers of 8 bits are exact in float32."""

    def of_one(da: ir.Value, hidden: ir.Value, up: ir.Value):
        of_hidden = arith.mulf(da, hidden)
        twice = arith.addf(of_hidden, of_hidden)
        return arith.mulf(twice, up), arith.mulf(of_hidden, hidden)

    words = (two.to_float32(word, dtype) for word in (da, hidden, up))
    lower, upper = (of_one(*halves) for halves in zip(*words, strict=True))
    return [two.rounded(*both, dtype) for both in zip(lower, upper, strict=True)]
