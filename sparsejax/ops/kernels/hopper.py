"""Hopper's sparse tensor cores: the one file that imports the kernels for them.

The kernels' sparse operand is their left one. Where it is our right one, a weight, both
are transposed, and so is the product that is written.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import (
    activation_tiles,
    activations_sm90,
    compress_sm90,
    dense_over_rows_sm90,
    grouped_matmul_sm90,
    matmul_to_packed_sm90,
    over_tokens_sm90,
    row_sums_sm90,
    sparse_matmul_sm90,
    tuning,
)
from pallas_kernels.device import Device
from pallas_kernels.sparse_matmul_configs import (
    Config,
    Shape,
    default_config,
    why_invalid,
    why_unsupported,
)
from sparsejax.ops.backend import GemmSpec, Times
from sparsejax.ops.kernels.base import (
    ExpertRows,
    KeptActivations,
    KeptGatedActivations,
    OverTokens,
    ResidualRows,
)
from sparsejax.ops.kernels.hopper_lookups import (
    experts_of,
    looking_up,
    lookups,
    one_by_one,
    over_tokens,
    slots,
    tile_rows,
    used,
)
from sparsejax.ops.kernels.hopper_shapes import all_neurons, residual_rows, shape_of
from sparsejax.ops.kernels.registry import HOPPER
from sparsejax.packing import WGMMA_ORDER, Packed
from sparsejax.patterns import TWO_FOUR


@dataclass(frozen=True)
class HopperKernels:
    """`base.KernelSet` for a GPU of compute capability 9.0."""

    device: Device
    fixed_config: Config | None = None
    """How every GEMM is cut up, where configs are compared; None: each as `tuning`
    knows it."""

    name = HOPPER.name
    layout = WGMMA_ORDER

    # What it can run.

    def why_unsupported(self, gemm: GemmSpec) -> str | None:
        if gemm.pattern != TWO_FOUR:
            return f"multiplies by 2:4 operands, not {gemm.pattern or 'dense ones'}"
        if gemm.why_not_packed is not None:
            return f"the activations are not packed: {gemm.why_not_packed}"
        if not gemm.sparse_weight:
            features = gemm.expert_features or all_neurons(gemm)
            if reason := activation_tiles.why_unsupported(features, gemm.dtype):
                return reason
        shape, count = shape_of(gemm), self.device.count_multiprocessors()
        return why_unsupported(shape) or why_invalid(
            default_config(shape, count), shape
        )

    def why_no_dense_weight_gradient(self, gemm: GemmSpec) -> str | None:
        # Of an FFN's GEMM, m or n counts the neurons of all experts.
        sizes = [gemm.m, gemm.n, gemm.expert_features or gemm.n]
        return dense_over_rows_sm90.why_unsupported(sizes, gemm.group_tile, gemm.dtype)

    def why_slower(self, gemm: GemmSpec) -> str | None:
        if gemm.experts is not None:
            # Also where the dense GEMM of all neurons is faster: without the kernel
            # that one does not run, but a loop over the experts.
            return None
        if not gemm.sparse_weight and self.times(gemm) is None:
            # Packing them costs time at every call, so that no rule can be trusted.
            return (
                "2:4 activations of this size have not been measured on this GPU, nor "
                "any smaller to estimate it from"
            )
        return tuning.why_slower(self.device, shape_of(gemm))

    def times(self, gemm: GemmSpec) -> Times | None:
        known = tuning.times(self.device, shape_of(gemm), gemm.experts_per_token)
        if known is None:
            return None
        source = None
        if known.estimated:
            at = known.entry.shape
            source = f"{at.m} x {at.n} x {at.k}" + (
                f" of {at.experts} experts" if gemm.experts is not None else ""
            )
        if known.measured_on is not None:
            source = f"{source} on {known.measured_on}"
        return Times(
            kernel_us=known.sparse_us,
            dense_us=known.dense_us,
            packing_us=known.pack_us,
            estimated_from=source,
            measured_on=known.measured_on,
            least_gain=known.least_gain,
        )

    def describe(self, gemm: GemmSpec) -> tuple[str, float]:
        operand = "weight" if gemm.sparse_weight else "activation"
        features = gemm.expert_features or all_neurons(gemm)
        share = 0.5 * (1 + residual_rows(gemm) / features)
        cores = f"the sparse tensor cores{self._cut_up_as_on(gemm)}"
        if gemm.experts is None:
            return f"2:4 {operand} on {cores}", share
        share *= gemm.experts_per_token / gemm.experts
        return f"2:4 {operand} of {gemm.experts} experts on {cores}", share

    def _cut_up_as_on(self, gemm: GemmSpec) -> str:
        """Where the kernel's config comes from, if from another GPU."""
        known = self.times(gemm)
        if known is None or known.measured_on is None:
            return ""
        return f", cut up as on {known.measured_on}"

    def why_not_packed(
        self, rows: int, k: int, dtype: str, out_dtype: jnp.dtype
    ) -> str | None:
        return compress_sm90.why_unsupported(rows, k, dtype, str(jnp.dtype(out_dtype)))

    def config_for(self, shape: Shape) -> Config:
        """How a GEMM's kernel is cut up: what was tuned, or the heuristic's."""
        return self.fixed_config or tuning.config_for(self.device, shape)

    # Packing.

    def pack_weight(
        self,
        w: Float[Array, "matrices _ _"],
        scales: Float[Array, " matrices"],
        *,
        axis: int,
        dtype: jnp.dtype,
    ) -> Packed:
        run = one_by_one(compress_sm90.compress, k_major=axis == -1, dtype=dtype)
        return self._packed(*run(w, scales))

    def keep_features(
        self, y_up: Float[Array, "_ _"], rows: ExpertRows | None, *, by_token: bool
    ) -> KeptActivations:
        run = one_by_one(
            looking_up,
            kernel=activations_sm90.keep_features,
            experts=experts_of(rows),
        )
        found = lookups(rows, by_token=True) if by_token else ()
        values, metadata, counts = run(found, y_up)
        return KeptActivations(self._packed(values, metadata), counts)

    def activation_gradient(
        self,
        da: Float[Array, "_ _"],
        a: Packed,
        rows: ExpertRows | None,
        *,
        by_token: bool,
    ) -> Packed:
        self._check(a)
        run = one_by_one(
            looking_up, kernel=activations_sm90.backward, experts=experts_of(rows)
        )
        found = lookups(rows, by_token=True) if by_token else ()
        return self._packed(run(found, da, a.values, a.metadata), a.metadata)

    def keep_gated_features(
        self, gate: Float[Array, "tokens features"], up: Float[Array, "tokens features"]
    ) -> KeptGatedActivations:
        run = one_by_one(activations_sm90.keep_gated_features)
        values, metadata, counts, hidden, kept_up = run(gate, up)
        a, hidden, kept = (self._packed(v, metadata) for v in (values, hidden, kept_up))
        return KeptGatedActivations(a, hidden, kept, counts)

    def gated_gradients(
        self, da: Float[Array, "tokens features"], hidden: Packed, up: Packed
    ) -> tuple[Packed, Packed]:
        self._check(hidden, up)
        run = one_by_one(activations_sm90.gated_backward)
        gradients = run(da, hidden.values, up.values, hidden.metadata)
        dgate, dup = (self._packed(values, hidden.metadata) for values in gradients)
        return dgate, dup

    def over_tokens(
        self,
        a: Packed,
        dy_up: Packed,
        rows: ExpertRows | None,
        residual: ResidualRows | None,
        *,
        by_segments: bool,
    ) -> OverTokens:
        self._check(a, dy_up)
        run = _over_tokens(
            over_tokens_sm90.keep_tokens_of_both, rows, residual, by_segments
        )
        operands = a.values, dy_up.values, dy_up.metadata
        found = run(lookups(rows, by_token=False), slots(residual), *operands)
        return self._over_tokens(found)

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
        self._check(a)
        run = _over_tokens(over_tokens_sm90.backward, rows, residual, by_segments)
        operands = da, a.values, a.metadata
        dy_up, *found = run(
            lookups(rows, by_token=by_token), slots(residual), *operands
        )
        return self._packed(dy_up, a.metadata), self._over_tokens(found)

    def gated_gradients_over_tokens(
        self,
        da: Float[Array, "tokens features"],
        hidden: Packed,
        up: Packed,
        residual: ResidualRows | None,
        *,
        by_segments: bool,
    ) -> tuple[tuple[Packed, Packed], OverTokens]:
        self._check(hidden, up)
        run = _over_tokens(over_tokens_sm90.gated_backward, None, residual, by_segments)
        operands = da, hidden.values, up.values, hidden.metadata
        dgate, dup, *found = run((), slots(residual), *operands)
        dgate, dup = (self._packed(v, hidden.metadata) for v in (dgate, dup))
        return (dgate, dup), self._over_tokens(found)

    def keep_tokens(
        self, x: Packed, residual: ResidualRows | None, *, by_segments: bool
    ) -> Packed:
        self._check(x)
        run = _over_tokens(over_tokens_sm90.keep_tokens, None, residual, by_segments)
        return self._packed(*run((), slots(residual), x.values, x.metadata))

    def _over_tokens(self, found: Any) -> OverTokens:
        a, *gradients = (self._packed(*matrix) for matrix in found)
        return OverTokens(a, tuple(gradients))

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
        out_dtype = jnp.dtype(b.dtype if out_dtype is None else out_dtype)
        return self._multiply(a, b, b_k_major, transpose_out, out_dtype, 0)

    def weight_gradient(
        self,
        a: Packed,
        b: Float[Array, "..."],
        *,
        transpose_out: bool,
        residual_rows: int,
    ) -> tuple[Float[Array, "_ _"], Float[Array, "_ _"] | None]:
        float32 = jnp.dtype(jnp.float32)
        found = self._multiply(a, b, False, transpose_out, float32, residual_rows)
        return found if residual_rows else (found, None)

    def _multiply(
        self,
        a: Packed,
        b: jax.Array,
        b_k_major: bool,
        transpose_out: bool,
        out_dtype: jnp.dtype,
        residual_rows: int,
    ) -> Any:
        self._check(a)
        run = one_by_one(
            _gemm,
            kernels=self,
            b_k_major=b_k_major,
            transpose_out=transpose_out,
            out_dtype=out_dtype,
            residual_rows=residual_rows,
        )
        return run(a.values.astype(b.dtype), a.metadata, b)

    def matmul_keep_features(
        self, x: Float[Array, "rows k"], weight: Packed, rows: ExpertRows | None
    ) -> KeptActivations:
        self._check(weight)
        run = self._to_packed(matmul_to_packed_sm90.keep_features, rows)
        w = weight.values.astype(x.dtype)
        values, metadata, counts = run(used(rows), w, weight.metadata, x)
        return KeptActivations(self._packed(values, metadata), counts)

    def matmul_activation_gradient(
        self,
        dy: Float[Array, "rows k"],
        weight: Packed,
        a: Packed,
        rows: ExpertRows | None,
    ) -> Packed:
        self._check(weight, a)
        run = self._to_packed(matmul_to_packed_sm90.backward, rows)
        w = weight.values.astype(dy.dtype)
        operands = w, weight.metadata, dy, a.values, a.metadata
        return self._packed(run(used(rows), *operands), a.metadata)

    def rows_by_expert_weight(
        self, x: Float[Array, "rows k"], weight: Packed, rows: ExpertRows
    ) -> Float[Array, "rows n"]:
        self._check(weight)
        run = self._grouped(grouped_matmul_sm90.sparse_weights, experts=rows.experts)
        return run(weight.values, weight.metadata, x, *used(rows))

    def expert_rows_matmul(
        self, a: Packed, b: Float[Array, "_ _ _"], rows: ExpertRows, *, b_k_major: bool
    ) -> Float[Array, "rows n"]:
        self._check(a)
        run = self._grouped(grouped_matmul_sm90.sparse_rows, b_k_major=b_k_major)
        return run(a.values, a.metadata, b, *used(rows))

    def expert_weight_gradient(
        self,
        a: Packed,
        b: Float[Array, "rows n"],
        rows: ExpertRows,
        *,
        transpose_out: bool,
        residual_rows: int,
    ) -> tuple[Float[Array, "_ _ _"], Float[Array, "_ _ _"] | None]:
        self._check(a)
        run = self._grouped(
            grouped_matmul_sm90.sparse_over_rows,
            group_tile=tile_rows(rows),
            transpose_out=transpose_out,
            rows_apart=residual_rows,
        )
        found = run(a.values, a.metadata, b, rows.ends)
        return found if residual_rows else (found, None)

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
            dense_over_rows_sm90.dense_over_rows,
            group_tile=group_tile,
            expert_axis=expert_axis,
            multiprocessors=self.device.count_multiprocessors(),
        )
        return run(lhs, rhs, ends)

    def _to_packed(
        self, kernel: Callable[..., Any], rows: ExpertRows | None
    ) -> Callable[..., Any]:
        """A kernel of `matmul_to_packed_sm90`, as a function of `used` and its
        operands."""
        return one_by_one(
            _to_packed, kernel=kernel, kernels=self, experts=experts_of(rows)
        )

    def _grouped(self, kernel: Callable[..., Any], **options: Any) -> Callable:
        """A kernel of `grouped_matmul_sm90`, as a function of its operands."""
        return one_by_one(_grouped, kernel=kernel, kernels=self, **options)

    # Rows.

    def sum_rows(
        self, x: Float[Array, "_ d"], index: Int[Array, "_ terms"]
    ) -> Float[Array, "_ d"]:
        return one_by_one(row_sums_sm90.sum_rows)(x, index)

    # What it has packed.

    def _packed(self, values: jax.Array, metadata: jax.Array) -> Packed:
        return Packed(values, metadata, self.layout)

    def _check(self, *operands: Packed) -> None:
        """Raises ValueError where an operand was packed in another order."""
        for operand in operands:
            if operand.layout != self.layout:
                raise ValueError(
                    f"an operand packed in the order {operand.layout!r} cannot be read "
                    f"by {self.name}, which reads {self.layout!r}; pack it for the "
                    f"device that multiplies it"
                )


def _gemm(
    values: jax.Array,
    metadata: jax.Array,
    b: jax.Array,
    *,
    kernels: HopperKernels,
    b_k_major: bool,
    transpose_out: bool,
    out_dtype: jnp.dtype,
    residual_rows: int,
) -> Any:
    shape = Shape(
        m=values.shape[0],
        n=b.shape[0] if b_k_major else b.shape[-1],
        k=2 * values.shape[1],
        dtype=str(b.dtype),
        b_k_major=b_k_major,
        transpose_out=transpose_out,
        float32_out=out_dtype == jnp.float32,
    )
    return sparse_matmul_sm90.sparse_matmul(
        values,
        metadata,
        b,
        b_k_major=b_k_major,
        transpose_out=transpose_out,
        out_dtype=out_dtype,
        rows_apart=residual_rows,
        config=kernels.config_for(shape),
        multiprocessors=kernels.device.count_multiprocessors(),
    )


def _to_packed(
    found: tuple[jax.Array, ...],
    *operands: jax.Array,
    kernel: Callable[..., Any],
    kernels: HopperKernels,
    experts: int,
) -> Any:
    whose = (
        matmul_to_packed_sm90.Experts(found[0], found[1], experts) if found else None
    )
    return kernel(
        *operands,
        whose,
        config_for=kernels.config_for,
        multiprocessors=kernels.device.count_multiprocessors(),
    )


def _grouped(
    *operands: jax.Array,
    kernel: Callable[..., Any],
    kernels: HopperKernels,
    **options: Any,
) -> Any:
    return kernel(
        *operands,
        config_for=kernels.config_for,
        multiprocessors=kernels.device.count_multiprocessors(),
        **options,
    )


def _over_tokens(
    kernel: Callable[..., Any],
    rows: ExpertRows | None,
    residual: ResidualRows | None,
    by_segments: bool,
) -> Callable[..., Any]:
    return one_by_one(
        over_tokens,
        kernel=kernel,
        experts=experts_of(rows),
        residual_rows=0 if residual is None else residual.rows,
        by_segments=by_segments,
    )
