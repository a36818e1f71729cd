"""The FFN's GEMMs with a 2:4 operand, each by itself: their operands are random and lie
as in memory.

`C = A B` of the kernel is, with A the sparse operand,

    1, 3   Y1^T = S(W1)^T X^T     written as Y1 (T, F)
    2      Y = A W2               A 2:4 along F
    4      dX = dY1 W1^T          dY1 2:4 along F, W1 stored as (d, F)
    5      dW1^T = dY1^T X        dY1 2:4 along T, written as dW1 (d, F), float32
    6      dW2 = A^T dY           A 2:4 along T, float32

In 5 and 6 the dense features have a residual row below all others, and so a result
apart; the dense GEMM has each row once.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.tuned_gemm import Shape, TunedGemm
from sparsejax.feed_forward.operands import packed_activations
from sparsejax.feed_forward.operands.packed_activations import Activations, TokenGroups
from sparsejax.feed_forward.sparsity import FFNSparsity
from sparsejax.feed_forward.tiles import dense_feature_count
from sparsejax.ops.backend import current_device
from sparsejax.ops.kernels.registry import names
from sparsejax.ops.kernels.tunable import Config, TunableKernels, tunable_kernels_of
from sparsejax.ops.sparse_matmul import pack_weight
from sparsejax.sparsity.compressed import decompress
from sparsejax.sparsity.packed import Packed, in_blocks, unpack

Gemm = Literal["1", "2", "4", "5", "6"]

DENSE_FEATURES = 0.05
"""The share of features that stay dense in GEMMs 5 and 6 with packing: the recipe's."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One GEMM, its operands, and how its sparse operand is made."""

    gemm: Gemm
    tokens: int
    d_model: int
    d_hidden: int
    tuned: TunedGemm
    """The key under which the tables hold the GEMM's times."""
    source: Any
    """The array or arrays that are packed: W, Y1, dA, or A by token."""
    copied: jax.Array
    """The numbers in `source`; packing is compared with a copy of them."""
    packed: Packed
    """The sparse operand A (m, k), packed."""
    residual_rows: int
    """The number of A's last rows that are residual: second rows of dense features."""
    masked: jax.Array
    """A with zeros in place of what is dropped, as it lies in memory: (m, k), or (k, m)
    where k counts tokens."""
    masked_once: jax.Array
    """The array `masked` without residual rows, which a dense GEMM multiplies."""
    b: jax.Array
    pack: Callable[[Any], Packed]
    pack_and_multiply: Callable[[Any, jax.Array], jax.Array]
    """Does to `source` and `b` everything that a training step does; for GEMMs 5 and 6
    with the features that stay dense."""

    @property
    def shape(self) -> Shape:
        """The kernel's view of the GEMM."""
        return self.tuned.shape()

    def sparse(self, config: Config, packed: Packed, b: jax.Array) -> Any:
        """Returns the result of the kernel alone; for GEMMs 5 and 6 the product of A's
        residual rows comes second, by itself."""
        kernels, transpose_out = kernels_here(config), self.shape.transpose_out
        if self.gemm in ("5", "6"):
            return kernels.weight_gradient(
                packed, b, transpose_out=transpose_out, residual_rows=self.residual_rows
            )
        return kernels.matmul(
            packed,
            b,
            b_k_major=self.shape.b_k_major,
            transpose_out=transpose_out,
            out_dtype=self._out_dtype,
        )

    def whole(self, results: Any) -> jax.Array:
        """Returns C for all rows of A as one matrix."""
        if self.gemm not in ("5", "6"):
            return results
        if not self.residual_rows:
            return results[0]
        return jnp.concatenate(results, axis=int(self.shape.transpose_out))

    def dense(self, masked: jax.Array, b: jax.Array) -> jax.Array:
        """Returns the result of the library's dense GEMM."""
        factors = self._factors(masked, b)
        return jnp.matmul(*factors, preferred_element_type=self._out_dtype)

    def exact(self, rows: slice) -> jax.Array:
        """Returns rows of C in float32, as C is written, those of A's residual rows
        included."""
        lhs, rhs = self._factors(self.masked, self.b)
        lhs, rhs = lhs[rows].astype(jnp.float32), rhs.astype(jnp.float32)
        return jnp.matmul(lhs, rhs, precision="highest")

    def _factors(self, masked: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
        a = masked.T if self.gemm in ("5", "6") else masked
        b = b.T if self.shape.b_k_major else b
        return (b.T, a.T) if self.shape.transpose_out else (a, b)

    @property
    def _out_dtype(self) -> jnp.dtype:
        return jnp.dtype("float32" if self.shape.float32_out else self.shape.dtype)


def make_problem(
    gemm: Gemm,
    tokens: int,
    d_model: int,
    d_hidden: int,
    *,
    dense_share: float | None = None,
    float32_out: bool = False,
) -> Problem:
    """Returns a GEMM with random operands of a size.

    Args:
      gemm: the number of the GEMM.
      tokens, d_model, d_hidden: the sizes of the FFN.
      dense_share: the share of features that stay dense in GEMMs 5 and 6; None for
        `DENSE_FEATURES`.
      float32_out: whether GEMM 4 writes float32, to be added to another product.
    Raises:
      ValueError: no kernel runs this size; says why.
    """
    dense_share = DENSE_FEATURES if dense_share is None else dense_share
    tuned = _tuned_gemm(gemm, tokens, d_model, d_hidden, dense_share)
    if gemm == "4":
        tuned = replace(tuned, float32_out=float32_out)
    reason = kernels_here().why_no_kernel(tuned, features=d_hidden)
    if reason is not None:
        raise ValueError(
            f"GEMM {gemm} of T,d,F {tokens},{d_model},{d_hidden} has no 2:4 kernel: "
            f"{reason}"
        )
    shape = tuned.shape()
    keys = jax.random.split(jax.random.key(0), 3)
    stored_b = (shape.n, shape.k) if shape.b_k_major else (shape.k, shape.n)
    b = jax.random.normal(keys[0], stored_b, shape.dtype)
    if gemm == "1":
        source = copied = jax.random.normal(keys[1], (d_hidden, d_model))
        scale = jnp.full((1, 1), 1.483)
        pack = partial(pack_weight, scale=scale, axis=-1, dtype=jnp.dtype(shape.dtype))
    else:
        source = copied = jax.random.normal(keys[1], (tokens, d_hidden), shape.dtype)
        kept = jax.jit(_keep_features)(source)
        pack = _activations
        if gemm == "4":
            pack = partial(_gradient, kept.a)
        elif gemm in ("5", "6"):
            pack = partial(_over_tokens, dense_share=dense_share)
            source, copied = kept, kept.a.values
    packed = jax.jit(pack)(source)
    masked = decompress(unpack(packed))
    if gemm in ("5", "6"):
        masked = masked.T.copy()
    residual_rows = shape.m - d_hidden if gemm in ("5", "6") else 0
    return Problem(
        gemm=gemm,
        tokens=tokens,
        d_model=d_model,
        d_hidden=d_hidden,
        tuned=tuned,
        source=source,
        copied=copied,
        packed=packed,
        residual_rows=residual_rows,
        masked=masked,
        masked_once=masked[:, :d_hidden] if residual_rows else masked,
        b=b,
        pack=pack,
        pack_and_multiply=partial(_pack_and_multiply, tuned, gemm, dense_share, pack),
    )


def _tuned_gemm(
    gemm: Gemm, tokens: int, d_model: int, d_hidden: int, dense_share: float
) -> TunedGemm:
    if gemm == "1":
        return TunedGemm(tokens=tokens, d_in=d_model, d_out=d_hidden)
    if gemm in ("2", "4"):
        return TunedGemm(
            sparse_operand="input",
            tokens=tokens,
            d_in=d_hidden,
            d_out=d_model,
            weight_transposed=gemm == "4",
        )
    rows = d_hidden + in_blocks(dense_feature_count(d_hidden, dense_share))
    of_output = gemm == "5"
    return TunedGemm(
        is_weight_gradient=True,
        sparse_operand="gradient" if of_output else "input",
        tokens=in_blocks(tokens),
        d_in=d_model if of_output else rows,
        d_out=rows if of_output else d_model,
    )


def errors(problem: Problem, candidate: jax.Array) -> tuple[float, float, float]:
    """Returns three errors relative to float32: that of the candidate, the largest that
    counts as right, and that of the dense GEMM.

    They are taken over all rows, some at a time: in float32 the product is large. An
    error is right up to a tenth above the dense GEMM's; where both accumulate and store
    float32, both are exact.
    """
    results = candidate, problem.dense(problem.masked, problem.b)
    squares = np.zeros(3)
    for start in range(0, len(candidate), 2048):
        rows = slice(start, start + 2048)
        exact = problem.exact(rows)
        parts = [exact, *(got[rows].astype(jnp.float32) - exact for got in results)]
        squares += [float(jnp.sum(part**2)) for part in parts]
    ours, dense = np.sqrt(squares[1:] / squares[0])
    bound = max(1.1 * dense, 1e-5 * problem.shape.float32_out)
    return float(ours), float(bound), float(dense)


def kernels_here(config: Config | None = None) -> TunableKernels:
    """Returns the kernels of the current GPU; all GEMMs take `config`, or where that is
    None each its own.

    Raises:
      ValueError: no set of kernels with configs runs on this device.
    """
    device = current_device()
    kernels = tunable_kernels_of(device)
    if kernels is None:
        raise ValueError(
            f"no kernel of {device.kind} has configs to compare; use a GPU that the "
            f"kernels {' or '.join(names())} are for"
        )
    return kernels if config is None else kernels.with_config(config)


def _keep_features(y_up: jax.Array) -> Activations:
    kept = kernels_here().keep_features(y_up, None, by_token=False)
    return packed_activations.counted(kept)


def _activations(y_up: jax.Array) -> Packed:
    return _keep_features(y_up).a


def _gradient(a: Packed, da: jax.Array) -> Packed:
    return kernels_here().activation_gradient(da, a, None, by_token=False)


def _over_tokens(kept: Activations, *, dense_share: float) -> Packed:
    groups = _groups(kept, dense_share)
    return kernels_here().keep_tokens(
        kept.a, groups.residual, by_segments=groups.by_segments
    )


def _groups(kept: Activations, dense_share: float) -> TokenGroups:
    sparsity = FFNSparsity(dense_features=dense_share)
    return packed_activations.token_groups(sparsity, len(kept.a.values), kept.nonzeros)


def _pack_and_multiply(
    tuned: TunedGemm, gemm: Gemm, dense_share: float, pack, source, b
) -> jax.Array:
    kernels = kernels_here()
    if gemm in ("5", "6"):
        groups, packed = _groups(source, dense_share), pack(source)
        if gemm == "5":
            return packed_activations.weight_gradient_up(kernels, groups, b, packed)
        return packed_activations.weight_gradient_down(kernels, groups, packed, b)
    shape = tuned.shape()
    return kernels.matmul(
        pack(source),
        b,
        b_k_major=shape.b_k_major,
        transpose_out=shape.transpose_out,
    )
