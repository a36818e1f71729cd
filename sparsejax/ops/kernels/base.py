"""What a kind of GPU with sparse tensor cores offers an FFN.

A `KernelSet` says which GEMMs it can run and how long they take, packs 2:4 operands in
its own order, and multiplies them. Operands that it has packed carry its layout, and it
refuses those of another. Nothing here is differentiated: an FFN's backward is written
out. `d` stands for d_model, `features` for the neurons that an activation has a column
for: all of them, or those of one expert where a row is a (token, expert) pair.
"""

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from sparsejax.ops.backend import GemmSpec, Times
from sparsejax.sparsity.packed import Packed


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class ExpertRows:
    """The rows of a `dispatch.Dispatch`, as kernels look them up: sorted by expert,
    each expert's filled up to whole tiles."""

    tile_expert: Int[Array, " tiles"]
    """The expert of each tile of rows / tiles rows, not decreasing."""
    used_tiles: Int[Array, ""]
    """How many tiles hold any row. What a result holds beyond them is not defined."""
    ends: Int[Array, " experts"]
    """The first tile after each expert's own."""
    row_token: Int[Array, " rows"]
    """The token of each row, -1 for a row that fills up a tile."""
    experts: int = field(metadata={"static": True})


class ResidualRows(NamedTuple):
    """The features that stay dense along the tokens: what 2:4 drops of them goes into
    second, residual rows, below those of all features, so that the sum of both is
    exact."""

    slots: Int[Array, " features"]
    """A feature's residual row, or -1; each row belongs to exactly one feature. With
    experts, one expert's features after the other's, each with its own rows."""
    rows: int
    """How many residual rows there are, of each expert; a multiple of 64."""


class KeptActivations(NamedTuple):
    """A = relu(Y1)^2, of four neighbouring features the two largest kept."""

    a: Packed
    """(tokens, features)."""
    counts: Int[Array, "_ features"]
    """Kept entries that are not zero, of each 16 rows that follow each other; uint8."""


class KeptGatedActivations(NamedTuple):
    """A = relu(G)^2 * U, of four neighbouring features the two with the largest |A|."""

    a: Packed
    hidden: Packed
    """relu(G), at the positions of A."""
    up: Packed
    """U, at the positions of A."""
    counts: Int[Array, "_ features"]
    """Kept entries of A that are not zero, of each 16 rows that follow each other;
    uint8."""


class OverTokens(NamedTuple):
    """A and the gradients before the activation, transposed: (features, tokens), 2:4
    along the tokens; below them the residual rows of features that stay dense."""

    a: Packed
    gradients: tuple[Packed, ...]


class KernelSet(Protocol):
    """The kernels of one device. Hashable, and equal to another that compiles the same
    programs: it is a static argument of traced functions."""

    @property
    def name(self) -> str:
        """What users call it as a `backend`."""
        ...

    @property
    def layout(self) -> str:
        """The order of what it packs: `Packed.layout` of its operands."""
        ...

    # What it can run.

    def why_unsupported(self, gemm: GemmSpec) -> str | None:
        """Returns why it cannot run a GEMM with a 2:4 operand, or None."""
        ...

    def why_no_dense_weight_gradient(self, gemm: GemmSpec) -> str | None:
        """Returns why it has no kernel for a weight gradient that is dense by expert,
        or None."""
        ...

    def why_slower(self, gemm: GemmSpec) -> str | None:
        """Returns why a GEMM that it can run is not to be chosen unasked, or None."""
        ...

    def times(self, gemm: GemmSpec) -> Times | None:
        """Returns how long the GEMM takes, dense as well, where that is known."""
        ...

    def describe(self, gemm: GemmSpec) -> tuple[str, float]:
        """Returns what runs a 2:4 GEMM, in words, and the share of the dense GEMM's
        FLOPs that it executes."""
        ...

    def why_not_packed(
        self, rows: int, k: int, dtype: str, out_dtype: jnp.dtype
    ) -> str | None:
        """Returns why `pack_weight` cannot pack a (rows, k) weight, or None."""
        ...

    # Packing.

    def pack_weight(
        self,
        w: Float[Array, "matrices _ _"],
        scales: Float[Array, " matrices"],
        *,
        axis: int,
        dtype: jnp.dtype,
    ) -> Packed:
        """Returns the scale times soft threshold of each matrix, 2:4 along `axis` (-1
        or -2), in `dtype`: (matrices, rows, k), transposed where the axis is -2."""
        ...

    def keep_features(
        self, y_up: Float[Array, "_ _"], rows: ExpertRows | None, *, by_token: bool
    ) -> KeptActivations:
        """Returns a from Y1. With `rows` of each row its expert's features: Y1 has a
        row per token and all neurons where it is `by_token`, else it has these rows."""
        ...

    def activation_gradient(
        self,
        da: Float[Array, "_ _"],
        a: Packed,
        rows: ExpertRows | None,
        *,
        by_token: bool,
    ) -> Packed:
        """Returns dY1 = dA 2 relu(Y1) at the positions of A, from dA as `keep_features`
        takes Y1."""
        ...

    def keep_gated_features(
        self, gate: Float[Array, "tokens features"], up: Float[Array, "tokens features"]
    ) -> KeptGatedActivations:
        """Returns a from G and U."""
        ...

    def gated_gradients(
        self, da: Float[Array, "tokens features"], hidden: Packed, up: Packed
    ) -> tuple[Packed, Packed]:
        """Returns dG = dA U 2 relu(G) and dU = dA relu(G)^2 at the positions of A."""
        ...

    def over_tokens(
        self,
        a: Packed,
        dy_up: Packed,
        rows: ExpertRows | None,
        residual: ResidualRows | None,
        *,
        by_segments: bool,
    ) -> OverTokens:
        """Returns a and dY1, both 2:4 along the features, packed along the tokens as
        well. Four tokens of a group follow each other in the order in which they come,
        or, where they are taken `by_segments`, are a 64th of all apart."""
        ...

    def activation_gradient_over_tokens(
        self,
        da: Float[Array, "_ _"],
        a: Packed,
        rows: ExpertRows | None,
        residual: ResidualRows | None,
        *,
        by_token: bool,
        by_segments: bool,
    ) -> tuple[Packed, OverTokens]:
        """Does `activation_gradient` and `over_tokens` in one pass."""
        ...

    def gated_gradients_over_tokens(
        self,
        da: Float[Array, "tokens features"],
        hidden: Packed,
        up: Packed,
        residual: ResidualRows | None,
        *,
        by_segments: bool,
    ) -> tuple[tuple[Packed, Packed], OverTokens]:
        """Returns `gated_gradients`, and A, dG and dU over tokens, in one pass."""
        ...

    def keep_tokens(
        self, x: Packed, residual: ResidualRows | None, *, by_segments: bool
    ) -> Packed:
        """Returns one matrix that is 2:4 along the features, packed along the
        tokens."""
        ...

    # Multiplying.

    def matmul(
        self,
        a: Packed,
        b: Float[Array, "..."],
        *,
        b_k_major: bool,
        transpose_out: bool,
        out_dtype: jnp.dtype | None = None,
    ) -> Float[Array, "_ _"]:
        """Returns a B, accumulated in float32 and rounded once.

        Args:
          a: (m, k); its values are taken in the dtype of `b`.
          b: (n, k) if `b_k_major`, else (k, n), or in segments (64, k / 64, n): row i
            of B is then b[i % 64, i // 64].
          transpose_out: return (A B)^T, (n, m).
          out_dtype: None for the dtype of `b`.
        """
        ...

    def weight_gradient(
        self,
        a: Packed,
        b: Float[Array, "..."],
        *,
        transpose_out: bool,
        residual_rows: int,
    ) -> tuple[Float[Array, "_ _"], Float[Array, "_ _"] | None]:
        """Returns `matmul` in float32 of A (m, tokens), 2:4 along the tokens, and B
        (tokens, n) or in segments; the product of the last `residual_rows` rows of A
        apart, None where there are none."""
        ...

    def matmul_keep_features(
        self, x: Float[Array, "rows k"], weight: Packed, rows: ExpertRows | None
    ) -> KeptActivations:
        """Returns `keep_features` of `x @ weight^T`, to the bit, in the GEMM's
        epilogue: Y1 is not written. With `rows`, `weight` is that of the row's expert,
        all experts' weights lying below each other."""
        ...

    def matmul_activation_gradient(
        self,
        dy: Float[Array, "rows k"],
        weight: Packed,
        a: Packed,
        rows: ExpertRows | None,
    ) -> Packed:
        """Returns `activation_gradient` of `dy @ weight^T`, in the GEMM's epilogue: dA
        is not written."""
        ...

    def rows_by_expert_weight(
        self, x: Float[Array, "rows k"], weight: Packed, rows: ExpertRows
    ) -> Float[Array, "rows n"]:
        """Returns `x[r] @ weight[expert of r]^T`, experts' weights below each other."""
        ...

    def expert_rows_matmul(
        self, a: Packed, b: Float[Array, "_ _ _"], rows: ExpertRows, *, b_k_major: bool
    ) -> Float[Array, "rows n"]:
        """Returns `a[r] @ b[expert of r]`, b (n, experts, k) if `b_k_major`, else
        (experts, k, n)."""
        ...

    def expert_weight_gradient(
        self,
        a: Packed,
        b: Float[Array, "rows n"],
        rows: ExpertRows,
        *,
        transpose_out: bool,
        residual_rows: int,
    ) -> tuple[Float[Array, "_ _ _"], Float[Array, "_ _ _"] | None]:
        """Returns `a[:, rows of e] @ b[rows of e]` of each expert, in float32; A (m,
        rows) is 2:4 along the rows. The result is (experts, m, n), or (n, experts, m)
        if `transpose_out`; `residual_rows` is as in `weight_gradient`."""
        ...

    def dense_expert_weight_gradient(
        self,
        lhs: Float[Array, "rows m"],
        rhs: Float[Array, "rows n"],
        ends: Int[Array, " experts"],
        *,
        group_tile: int,
        expert_axis: int,
    ) -> Float[Array, "_ _ _"]:
        """Returns `lhs[rows of e]^T @ rhs[rows of e]` of each expert, both dense, in
        float32: (experts, m, n), or (m, experts, n) with `expert_axis` 1."""
        ...

    # Rows.

    def sum_rows(
        self, x: Float[Array, "_ d"], index: Int[Array, "_ terms"]
    ) -> Float[Array, "_ d"]:
        """Sums of rows of x, in float32 and in the order of `index`; an index outside
        of x adds nothing."""
        ...
