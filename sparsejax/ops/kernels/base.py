"""The interface of a set of kernels: what a kind of GPU offers an FFN.

A `KernelSet` says which GEMMs it can run and how long they take, packs 2:4 operands in
its own order, and multiplies them. Operands that it has packed carry its layout, and it
refuses those of another. Nothing here is differentiated: an FFN's backward is written
out. `d` stands for d_model, `features` for the neurons that an activation has a column
for: all of them, or those of one expert where a row is a (token, expert) pair.
"""

from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from sparsejax.ops.gemm_spec import GemmSpec, Times
from sparsejax.sparsity.packed import Layout, Packed


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class ExpertRows:
    """The rows of a `dispatch.Dispatch`, as kernels look them up: sorted by expert,
    with each expert's rows padded to whole tiles. "Rows of sets" are those of an
    `expert_sets.RowsOfSets` in the same form: they are sorted by the set of a token's
    experts, and a row has the neurons of all g of them, one expert's after the
    other's."""

    tile_expert: Int[Array, " tiles"] | Int[Array, "tiles g"]
    """The expert of each tile, in non-decreasing order; with rows of sets the g experts
    of each tile. A tile has rows / tiles rows."""
    used_tiles: Int[Array, ""]
    """The number of tiles that hold any row. What a result holds beyond them is not
    defined."""
    ends: Int[Array, " experts"]
    """For each expert the tile after its last one; with rows of sets the index in
    `places` after its last one."""
    row_token: Int[Array, " rows"]
    """The token of each row; -1 for a padding row."""
    places: Int[Array, " places"] | None = None
    """With rows of sets, the tiles that hold rows of each expert, one expert's after
    the other's: tile * g + j stands for a tile whose j-th expert it is, from 0. None
    where a row has one expert."""
    experts: int = field(metadata={"static": True})


class ResidualRows(NamedTuple):
    """The residual rows of the dense features: the entries that 2:4 along the tokens
    drops of such a feature go into a second row, below the rows of all features, so
    that the sum of both rows is exact."""

    slots: Int[Array, " features"]
    """The residual row of each feature, or -1 where it has none; each row belongs to
    exactly one feature. With experts, the features of one expert follow those of the
    other, and each expert counts its own rows."""
    rows: int
    """The number of residual rows (with experts, of each expert), a multiple of 64."""


class KeptActivations(NamedTuple):
    """A = relu(Y1)^2 with two of every four neighbouring features kept, the largest
    ones."""

    a: Packed
    """A, (tokens, features), packed along the features."""
    counts: Int[Array, "_ features"]
    """For every 16 consecutive rows, how many kept entries of each feature are not
    zero; uint8."""


class KeptGatedActivations(NamedTuple):
    """A = relu(G)^2 * U with two of every four neighbouring features kept, those with
    the largest |A|."""

    a: Packed
    hidden: Packed
    """The values of relu(G) at the positions of A."""
    up: Packed
    """The values of U at the positions of A."""
    counts: Int[Array, "_ features"]
    """For every 16 consecutive rows, how many kept entries of A are not zero, for each
    feature; uint8."""


class OverTokens(NamedTuple):
    """A and the gradients before the activation, transposed to (features, tokens) and
    packed 2:4 along the tokens; the residual rows of dense features lie below."""

    a: Packed
    gradients: tuple[Packed, ...]


class KernelSet(Protocol):
    """The kernels of one device. A set is hashable, and equal to another that compiles
    the same programs: it is a static argument of traced functions."""

    @property
    def layout(self) -> Layout:
        """The order in which the set packs operands: their `Packed.layout`."""
        ...

    # What it can run.

    def why_unsupported(self, gemm: GemmSpec) -> str | None:
        """Returns why the set cannot run a GEMM with a 2:4 operand, or None where it
        can."""
        ...

    def why_no_dense_weight_gradient(self, gemm: GemmSpec) -> str | None:
        """Returns why the set has no kernel for a weight gradient by expert whose
        operands are both dense, or None where it has one."""
        ...

    def why_no_dense_rows(self, gemm: GemmSpec) -> str | None:
        """Returns why the set has no kernel for a GEMM whose dense rows meet the dense
        weights of their experts, or None where it has one."""
        ...

    def why_no_squared_relu(self, gemm: GemmSpec) -> str | None:
        """Returns why the set has no kernel for GEMM 1 or 3 of a dense FFN that applies
        the squared ReLU, or its gradient, before it writes, or None where it has
        one."""
        ...

    def why_no_joined_rows(self, gemm: GemmSpec) -> str | None:
        """Returns why the set, which can run a GEMM by expert with dense operands, has
        no kernel for rows with the neurons of several experts side by side, or None
        where it has one."""
        ...

    def why_no_expert_energies(self, d_in: int, features: int) -> str | None:
        """Returns why the set has no kernel for the energies of experts with so many
        `features`, their neurons, or None where it has one."""
        ...

    def why_slower(self, gemm: GemmSpec) -> str | None:
        """Returns why a GEMM that the set can run is not to be chosen unasked, or None
        where it may be."""
        ...

    def times(self, gemm: GemmSpec) -> Times | None:
        """Returns how long the GEMM takes on the set and how long the dense GEMM takes,
        or None where that is not known."""
        ...

    def describe(self, gemm: GemmSpec) -> tuple[str, float]:
        """Returns what runs a 2:4 GEMM, in words, and the share of the dense GEMM's
        FLOPs that it executes."""
        ...

    def why_not_packed(
        self, rows: int, k: int, dtype: str, out_dtype: jnp.dtype
    ) -> str | None:
        """Returns why `pack_weight` cannot pack a (rows, k) weight, or None where it
        can."""
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
        """Returns scale * S(W) of each matrix, S being the soft threshold, packed 2:4
        along `axis` (-1 or -2) with values in `dtype`: (matrices, rows, k), transposed
        where the axis is -2."""
        ...

    def keep_features(
        self, y_up: Float[Array, "_ _"], rows: ExpertRows | None, *, by_token: bool
    ) -> KeptActivations:
        """Returns A = relu(Y1)^2, 2:4 along the features and packed, from Y1.

        With `rows`, each row of A has the neurons of its expert. Y1 then has a row per
        token and a column per neuron of all experts where it is `by_token`, else it has
        the rows and columns of A.
        """
        ...

    def activation_gradient(
        self,
        da: Float[Array, "_ _"],
        a: Packed,
        rows: ExpertRows | None,
        *,
        by_token: bool,
    ) -> Packed:
        """Returns dY1 = dA 2 relu(Y1), packed at the positions of A. dA has the shape
        that Y1 has in `keep_features`."""
        ...

    def keep_gated_features(
        self, gate: Float[Array, "tokens features"], up: Float[Array, "tokens features"]
    ) -> KeptGatedActivations:
        """Returns A = relu(G)^2 * U, 2:4 along the features and packed, from G and
        U."""
        ...

    def gated_gradients(
        self, da: Float[Array, "tokens features"], hidden: Packed, up: Packed
    ) -> tuple[Packed, Packed]:
        """Returns dG = dA U 2 relu(G) and dU = dA relu(G)^2, packed at the positions of
        A."""
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
        """Returns A and dY1, which come 2:4 along the features, packed along the tokens
        as well. The four tokens of a group are consecutive, or, with `by_segments`, lie
        a 64th of all tokens apart."""
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
        """Returns the results of `activation_gradient` and of `over_tokens`, computed
        in one pass."""
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
        """Returns the results of `gated_gradients`, and A, dG and dU packed along the
        tokens, computed in one pass."""
        ...

    def keep_tokens(
        self, x: Packed, residual: ResidualRows | None, *, by_segments: bool
    ) -> Packed:
        """Returns one matrix, which comes 2:4 along the features, packed along the
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
        """Returns A B, accumulated in float32 and rounded once.

        Args:
          a: A (m, k), packed along k; its values are taken in the dtype of `b`.
          b: B, (n, k) if `b_k_major`, else (k, n), or in segments (64, k / 64, n): row
            i of B is then b[i % 64, i // 64].
          transpose_out: return (A B)^T, (n, m).
          out_dtype: dtype of the result; None for the dtype of `b`.
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
        """Returns A B in float32, of A (m, tokens), 2:4 along the tokens, and B
        (tokens, n), which may come in segments as in `matmul`; (A B)^T with
        `transpose_out`.

        The product of the last `residual_rows` rows of A comes second, by itself; it is
        None where there are none.
        """
        ...

    def matmul_keep_features(
        self, x: Float[Array, "rows k"], weight: Packed, rows: ExpertRows | None
    ) -> KeptActivations:
        """Returns `keep_features` of Y1 = `x @ weight^T`, equal to the bit, made in the
        GEMM's epilogue: Y1 is never written.

        With `rows`, each row of x is multiplied by the weight of its expert; `weight`
        then holds the experts' matrices one below the other.
        """
        ...

    def matmul_activation_gradient(
        self,
        dy: Float[Array, "rows k"],
        weight: Packed,
        a: Packed,
        rows: ExpertRows | None,
    ) -> Packed:
        """Returns `activation_gradient` of dA = `dy @ weight^T`, made in the GEMM's
        epilogue: dA is never written."""
        ...

    def rows_by_expert_weight(
        self, x: Float[Array, "rows k"], weight: Packed, rows: ExpertRows
    ) -> Float[Array, "rows n"]:
        """Returns `x[r] @ weight[expert of r]^T` for each row r; `weight` holds the
        experts' matrices one below the other."""
        ...

    def expert_rows_matmul(
        self, a: Packed, b: Float[Array, "_ _ _"], rows: ExpertRows, *, b_k_major: bool
    ) -> Float[Array, "rows n"]:
        """Returns `a[r] @ b[expert of r]` for each row r, with b (n, experts, k) if
        `b_k_major`, else (experts, k, n)."""
        ...

    def dense_rows_matmul(
        self,
        x: Float[Array, "rows k"],
        w: Float[Array, "_ _ _"],
        rows: ExpertRows,
        *,
        expert_axis: int,
        k_major: bool,
        out_dtype: jnp.dtype | None = None,
    ) -> Float[Array, "rows n"]:
        """Returns `x[r] @ w[expert of r]` for each row r of dense operands, accumulated
        in float32 and rounded once.

        With rows of sets, x may have the neurons of a row's g experts, g k columns: the
        result is then the sum of the products of all of them. Or it has k columns, as
        each expert's weight has rows: the result then has the products of the g
        experts side by side.

        Args:
          w: the weights of all experts as they lie in memory: (experts, k, n) with
            `expert_axis` 0, (k, experts, n) with 1; if `k_major` (experts, n, k) or (n,
            experts, k).
          out_dtype: float32 or the dtype of x, for which None stands.
        """
        ...

    def dense_rows_squared_relu(
        self,
        x: Float[Array, "rows k"],
        w: Float[Array, "_ _ _"],
        rows: ExpertRows,
        *,
        expert_axis: int,
        k_major: bool,
    ) -> Float[Array, "rows n"]:
        """Returns A = relu(Y1)^2 of the product Y1 that `dense_rows_matmul` computes,
        made in the GEMM's epilogue: Y1 is never written, nor rounded."""
        ...

    def dense_rows_activation_gradient(
        self,
        dy: Float[Array, "rows k"],
        w: Float[Array, "_ _ _"],
        a: Float[Array, "rows n"],
        rows: ExpertRows,
        *,
        expert_axis: int,
        k_major: bool,
    ) -> Float[Array, "rows n"]:
        """Returns dY1 = dA 2 sqrt(A) of the product dA that `dense_rows_matmul`
        computes, made in the GEMM's epilogue."""
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
        """Returns `a[:, rows of e] @ b[rows of e]` for each expert e, in float32; A (m,
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
        """Returns `lhs[rows of e]^T @ rhs[rows of e]` for each expert e, in float32, of
        two dense operands: (experts, m, n), or (m, experts, n) with `expert_axis` 1.
        `ends` is `ExpertRows.ends`, of tiles with `group_tile` rows."""
        ...

    def joined_weight_gradient(
        self,
        lhs: Float[Array, "rows m"],
        rhs: Float[Array, "rows n"],
        rows: ExpertRows,
        *,
        joined: Literal["lhs", "rhs"],
        expert_axis: int,
    ) -> Float[Array, "_ _ _"]:
        """Returns `lhs[rows of e]^T @ rhs[rows of e]` for each expert e of rows of
        sets, in float32, as `dense_expert_weight_gradient` does for rows of one expert
        each. The operand that `joined` names has the columns of g experts side by side,
        of which those of e are multiplied: its size in the result is that of one
        expert."""
        ...

    def expert_energies(
        self,
        x: Float[Array, "tokens d_in"],
        w_transposed: Float[Array, "neurons d_in"],
        *,
        experts: int,
    ) -> Float[Array, "tokens experts"]:
        """Returns `sum_f relu((x @ w)_f)^4` over the neurons f of each expert, float32,
        of operands in float8_e4m3fn, but for a factor that is the same for all."""
        ...

    # Rows.

    def sum_rows(
        self, x: Float[Array, "_ d"], index: Int[Array, "_ terms"]
    ) -> Float[Array, "_ d"]:
        """Returns for each row of `index` the sum of the rows of x that it names, taken
        in float32 and in the order of `index`; an index outside of x adds nothing."""
        ...
