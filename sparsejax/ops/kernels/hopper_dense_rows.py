"""The part of Hopper's kernels whose operands are both dense: rows of experts by their
experts' weights, and the energies of experts."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.device import Device
from pallas_kernels.sm90 import dense_over_rows, dense_rows, expert_energies
from sparsejax.ops.gemm_spec import GemmSpec
from sparsejax.ops.kernels.base import ExpertRows
from sparsejax.ops.kernels.hopper_lookups import (
    one_by_one,
    over_joined_rows,
    rows_by_expert,
    tile_rows,
    used,
)


@dataclass(frozen=True)
class HopperDenseRows:
    """The methods of `base.KernelSet` that multiply dense operands, for a GPU of
    compute capability 9.0."""

    device: Device

    def why_no_dense_weight_gradient(self, gemm: GemmSpec) -> str | None:
        # One of d_in and d_out counts the neurons of all experts.
        sizes = [gemm.d_in, gemm.d_out, gemm.expert_features or gemm.d_out]
        return dense_over_rows.why_unsupported(sizes, gemm.group_tile, gemm.dtype)

    def why_no_dense_rows(self, gemm: GemmSpec) -> str | None:
        sizes = sorted(set(gemm.widths_of_expert))
        return dense_rows.why_unsupported(sizes, gemm.group_tile, gemm.dtype)

    def why_no_squared_relu(self, gemm: GemmSpec) -> str | None:
        if gemm.tokens % gemm.group_tile:
            return f"{gemm.tokens} tokens are no whole tiles of {gemm.group_tile}"
        sizes = sorted({gemm.d_in, gemm.d_out})
        return dense_rows.why_unsupported(sizes, gemm.group_tile, gemm.dtype)

    def why_no_joined_rows(self, gemm: GemmSpec) -> str | None:
        return dense_rows.why_not_joined(gemm.expert_features)

    def why_no_expert_energies(self, d_in: int, features: int) -> str | None:
        return expert_energies.why_unsupported(d_in, features)

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
        how = {"expert_axis": expert_axis, "b_k_major": k_major, "out_dtype": out_dtype}
        return self._dense_rows(**how)(x, w, *used(rows))

    def dense_rows_squared_relu(
        self,
        x: Float[Array, "rows k"],
        w: Float[Array, "_ _ _"],
        rows: ExpertRows,
        *,
        expert_axis: int,
        k_major: bool,
    ) -> Float[Array, "rows n"]:
        how = {"expert_axis": expert_axis, "b_k_major": k_major}
        return self._dense_rows(activation=squared_relu, **how)(x, w, *used(rows))

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
        how = {"expert_axis": expert_axis, "b_k_major": k_major}
        return self._dense_rows(combine=gradient_at, **how)(dy, w, *used(rows), a)

    def _dense_rows(self, **options: Any) -> Callable[..., Any]:
        """Returns the kernel of `dense_rows` as a function of x, the weights, what
        `used` returns, and the matrix that the epilogue reads, if any."""
        count = self.device.count_multiprocessors()
        return one_by_one(rows_by_expert, multiprocessors=count, **options)

    def dense_expert_weight_gradient(
        self,
        lhs: Float[Array, "rows m"],
        rhs: Float[Array, "rows n"],
        ends: Int[Array, " experts"],
        *,
        group_tile: int,
        expert_axis: int,
    ) -> Float[Array, "_ _ _"]:
        run = one_by_one(
            dense_over_rows.dense_over_rows,
            group_tile=group_tile,
            expert_axis=expert_axis,
            multiprocessors=self.device.count_multiprocessors(),
        )
        return run(lhs, rhs, ends)

    def joined_weight_gradient(
        self,
        lhs: Float[Array, "rows m"],
        rhs: Float[Array, "rows n"],
        rows: ExpertRows,
        *,
        joined: Literal["lhs", "rhs"],
        expert_axis: int,
    ) -> Float[Array, "_ _ _"]:
        run = one_by_one(
            over_joined_rows,
            parts=rows.tile_expert.shape[1],
            operand="a" if joined == "lhs" else "b",
            group_tile=tile_rows(rows),
            expert_axis=expert_axis,
            multiprocessors=self.device.count_multiprocessors(),
        )
        return run(lhs, rhs, rows.ends, rows.places)

    def expert_energies(
        self,
        x: Float[Array, "tokens d_in"],
        w_transposed: Float[Array, "neurons d_in"],
        *,
        experts: int,
    ) -> Float[Array, "tokens experts"]:
        run = one_by_one(
            expert_energies.expert_energies,
            experts=experts,
            multiprocessors=self.device.count_multiprocessors(),
        )
        return run(x, w_transposed)


def squared_relu(y_up: jax.Array) -> jax.Array:
    """Returns A = relu(Y1)^2."""
    return jnp.square(jnp.maximum(y_up, 0.0))


def gradient_at(da: jax.Array, a: jax.Array) -> jax.Array:
    """Returns dY1 = dA 2 sqrt(A)."""
    return da * 2 * jnp.sqrt(a)
