"""Hopper's sparse tensor cores: which GEMMs they run, and those GEMMs.

With `hopper_packing.py`, which packs, and `hopper_dense_rows.py`, whose operands are
both dense, it alone calls the kernels. Their sparse operand is the left one. Where it
is our right one, a weight, both are transposed, and so is the product that is written.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import tuning
from pallas_kernels.sm90 import (
    gather_sum,
    grouped_matmul,
    matmul_to_packed,
    sparse_matmul,
)
from pallas_kernels.sm90.sparse_matmul_configs import (
    Config,
    Mode,
    Shape,
    default_config,
    why_invalid,
    why_unsupported,
)
from pallas_kernels.sm90.threads import activation_tiles
from pallas_kernels.tuned_gemm import TunedGemm
from sparsejax.ops.gemm_spec import GemmSpec, Times
from sparsejax.ops.kernels.base import ExpertRows, KeptActivations
from sparsejax.ops.kernels.hopper_dense_rows import HopperDenseRows
from sparsejax.ops.kernels.hopper_lookups import (
    experts_of,
    one_by_one,
    rows_in_one_call,
    tile_rows,
    used,
)
from sparsejax.ops.kernels.hopper_packing import HopperPacking
from sparsejax.ops.kernels.hopper_shapes import (
    all_neurons,
    residual_rows,
    tuned_gemm,
)
from sparsejax.sparsity.packed import Packed
from sparsejax.sparsity.patterns import TWO_FOUR


@dataclass(frozen=True)
class HopperKernels(HopperPacking, HopperDenseRows):
    """`tunable.TunableKernels` for a GPU of compute capability 9.0."""

    fixed_config: Config | None = None
    """The config that every GEMM's kernel takes, where configs are compared; None for
    the one that `tuning` knows of each GEMM."""

    # What it can run.

    def why_unsupported(self, gemm: GemmSpec) -> str | None:
        if gemm.pattern != TWO_FOUR:
            return f"multiplies by 2:4 operands, not {gemm.pattern or 'dense ones'}"
        if gemm.why_not_packed is not None:
            return f"the activations are not packed: {gemm.why_not_packed}"
        features = gemm.expert_features or all_neurons(gemm)
        return self.why_no_kernel(tuned_gemm(gemm), features=features)

    def why_no_kernel(self, gemm: TunedGemm, *, features: int) -> str | None:
        if gemm.sparse_operand != "weight":
            if reason := activation_tiles.why_unsupported(features, gemm.dtype):
                return reason
        shape, count = gemm.shape(), self.device.count_multiprocessors()
        return why_unsupported(shape) or why_invalid(
            default_config(shape, count), shape
        )

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
        return tuning.why_slower(self.device, tuned_gemm(gemm))

    def times(self, gemm: GemmSpec) -> Times | None:
        known = tuning.times(self.device, tuned_gemm(gemm), gemm.experts_per_token)
        if known is None:
            return None
        source = None
        if known.estimated:
            at = known.entry.gemm
            source = f"{at.tokens} tokens x {at.d_in} x {at.d_out}" + (
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
        """Returns words that name the GPU that the kernel's config was measured on, or
        "" where that is this one."""
        known = self.times(gemm)
        if known is None or known.measured_on is None:
            return ""
        return f", cut up as on {known.measured_on}"

    def config_for(self, shape: Shape) -> Config:
        """Returns the config that a GEMM's kernel takes: the tuned one, or else the
        heuristic's."""
        return self.fixed_config or tuning.config_for(self.device, shape)

    # Tuning.

    def tuned_gemm(self, gemm: GemmSpec) -> TunedGemm:
        return tuned_gemm(gemm)

    def configs(self, gemm: TunedGemm) -> list[Config]:
        return tuning.candidates(gemm.shape(), self.device.count_multiprocessors())

    def with_config(self, config: Config) -> Self:
        return replace(self, fixed_config=config)

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
        mode: Mode = "sparse_weight" if transpose_out else "sparse_activation"
        return self._multiply(mode, a, b, b_k_major, transpose_out, out_dtype, 0)

    def weight_gradient(
        self,
        a: Packed,
        b: Float[Array, "..."],
        *,
        transpose_out: bool,
        residual_rows: int,
    ) -> tuple[Float[Array, "_ _"], Float[Array, "_ _"] | None]:
        float32, mode = jnp.dtype(jnp.float32), "weight_gradient"
        found = self._multiply(mode, a, b, False, transpose_out, float32, residual_rows)
        return found if residual_rows else (found, None)

    def _multiply(
        self,
        mode: Mode,
        a: Packed,
        b: jax.Array,
        b_k_major: bool,
        transpose_out: bool,
        out_dtype: jnp.dtype,
        residual_rows: int,
    ) -> Any:
        self._check(a)
        # B and the product have a row for each token.
        by_token = b_k_major and mode == "sparse_weight"
        run = (rows_in_one_call if by_token else one_by_one)(
            _gemm,
            kernels=self,
            mode=mode,
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
        run = self._to_packed(matmul_to_packed.keep_features, rows)
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
        run = self._to_packed(matmul_to_packed.backward, rows)
        w = weight.values.astype(dy.dtype)
        operands = w, weight.metadata, dy, a.values, a.metadata
        return self._packed(run(used(rows), *operands), a.metadata)

    def rows_by_expert_weight(
        self, x: Float[Array, "rows k"], weight: Packed, rows: ExpertRows
    ) -> Float[Array, "rows n"]:
        self._check(weight)
        run = self._grouped(grouped_matmul.sparse_weights, experts=rows.experts)
        return run(weight.values, weight.metadata, x, *used(rows))

    def expert_rows_matmul(
        self, a: Packed, b: Float[Array, "_ _ _"], rows: ExpertRows, *, b_k_major: bool
    ) -> Float[Array, "rows n"]:
        self._check(a)
        run = self._grouped(grouped_matmul.sparse_rows, b_k_major=b_k_major)
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
            grouped_matmul.sparse_over_rows,
            group_tile=tile_rows(rows),
            transpose_out=transpose_out,
            split_rows=residual_rows,
        )
        found = run(a.values, a.metadata, b, rows.ends)
        return found if residual_rows else (found, None)

    def _to_packed(
        self, kernel: Callable[..., Any], rows: ExpertRows | None
    ) -> Callable[..., Any]:
        """Returns a kernel of `matmul_to_packed` as a function of what `used` returns
        and of the kernel's operands."""
        return one_by_one(
            _to_packed, kernel=kernel, kernels=self, experts=experts_of(rows)
        )

    def _grouped(self, kernel: Callable[..., Any], **options: Any) -> Callable:
        """Returns a kernel of `grouped_matmul` as a function of its operands."""
        return one_by_one(_grouped, kernel=kernel, kernels=self, **options)

    # Rows.

    def sum_rows(
        self, x: Float[Array, "_ d"], index: Int[Array, "_ terms"]
    ) -> Float[Array, "_ d"]:
        return one_by_one(gather_sum.gather_sum)(x, index)


def _gemm(
    values: jax.Array,
    metadata: jax.Array,
    b: jax.Array,
    *,
    kernels: HopperKernels,
    mode: Mode,
    b_k_major: bool,
    transpose_out: bool,
    out_dtype: jnp.dtype,
    residual_rows: int,
) -> Any:
    shape = Shape(
        m=values.shape[0],
        n=b.shape[0] if b_k_major else b.shape[-1],
        k=2 * values.shape[1],
        mode=mode,
        dtype=str(b.dtype),
        b_k_major=b_k_major,
        transpose_out=transpose_out,
        float32_out=out_dtype == jnp.float32,
    )
    return sparse_matmul.sparse_matmul(
        values,
        metadata,
        b,
        mode=mode,
        b_k_major=b_k_major,
        transpose_out=transpose_out,
        out_dtype=out_dtype,
        split_rows=residual_rows,
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
    whose = matmul_to_packed.Experts(found[0], found[1], experts) if found else None
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
