"""GEMMs grouped over experts by tokamax's ragged dot, on accelerators without kernels
of ours.

tokamax (extra `tokamax`) is imported when the first of its GEMMs is traced. Its
implementation is named at every call: left to itself it falls back to XLA's, which on a
GPU multiplies every row by the weights of all experts.
"""

import re
from importlib.util import find_spec
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.device import Device
from sparsejax.dtypes import accumulation_dtype
from sparsejax.ops import grouped_loops
from sparsejax.ops.backend import current_device
from sparsejax.ops.gemm_spec import GemmSpec

TokamaxImplementation = Literal["mosaic", "triton", "xla"]
"""tokamax's names of the implementations that are used here."""

_ROWS = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((1,), (1,)), ((), ())),
    lhs_ragged_dimensions=[0],
    rhs_group_dimensions=[0],
)
"""(rows, k) times (experts, k, n): each row by the matrix of its expert."""

SLOWER_ON_A_CPU = "XLA's loops over tiles are faster on a CPU"
"""The reason for which tokamax is not taken there unless it is named."""


def matmul(
    rows: Float[Array, "rows k"],
    weights: Float[Array, "experts k n"],
    tile_expert: Int[Array, " tiles"],
    used_tiles: Int[Array, ""],
    out_dtype: jnp.dtype,
) -> Float[Array, "rows n"]:
    """Returns `rows[r] @ weights[expert of r]` for each row r, with zeros beyond the
    used tiles; see `grouped_matmul.grouped_matmul`."""
    sizes = grouped_loops.group_sizes(rows, tile_expert, used_tiles, weights.shape[0])
    device, float32_out = current_device(), out_dtype == jnp.float32
    out = _ragged_dot(
        _implementation(device, float32_out=float32_out and rows.dtype != out_dtype),
        _padded(rows, device),
        weights,
        sizes,
        _ROWS,
        out_dtype,
    )[: rows.shape[0]]
    # Its kernels leave the rows that are in no group unwritten.
    return jnp.where(jnp.arange(rows.shape[0])[:, None] < jnp.sum(sizes), out, 0)


def outer(
    lhs: Float[Array, "rows m"],
    rhs: Float[Array, "rows n"],
    tile_expert: Int[Array, " tiles"],
    used_tiles: Int[Array, ""],
    experts: int,
    expert_axis: int,
) -> Float[Array, "_ _ _"]:
    """Returns `lhs[rows of e]^T @ rhs[rows of e]` for each expert e, in float32; see
    `grouped_matmul.grouped_outer`."""
    sizes = grouped_loops.group_sizes(lhs, tile_expert, used_tiles, experts)
    device = current_device()
    out = _ragged_dot(
        _implementation(device, of_weight=True),
        _padded(lhs, device),
        _padded(rhs, device),
        sizes,
        grouped_loops.OVER_ROWS,
        accumulation_dtype(lhs.dtype),
    )
    return jnp.moveaxis(out, 0, expert_axis)


def why_unsupported(spec: GemmSpec) -> str | None:
    """Returns why tokamax does not run a GEMM by expert, or None where it can."""
    device = spec.device
    if find_spec("tokamax") is None:
        needs = "needs the package tokamax; install sparsejax[tokamax]"
        slower = device.platform == "cpu"
        return f"{needs}, though {SLOWER_ON_A_CPU}" if slower else needs
    if device.platform == "cpu":
        return None
    kind = device.kind or device.platform
    if spec.dtype != "bfloat16":
        return f"is taken for bfloat16 on accelerators, not for {spec.dtype}"
    if device.platform == "tpu":
        return _why_not_on_tpu(spec)
    capability = _capability(device)
    if device.platform != "gpu" or capability < (8, 0):
        return f"needs an NVIDIA GPU from the A100 on, or a TPU, not {kind}"
    if _implementation_of(spec) == "triton":
        if find_spec("jax_triton") is None or find_spec("triton") is None:
            what = "weight gradient" if spec.is_weight_gradient else "GEMM"
            return (
                f"runs this {what} on {kind} by Triton alone, which is missing; "
                f"install sparsejax[tokamax-gpu]"
            )
        return None
    odd = [size for size in spec.widths_of_expert if size % 64]
    return f"a size of {odd[0]} is not a multiple of 64" if odd else None


def why_not_unasked(spec: GemmSpec) -> str | None:
    """Returns why tokamax is taken only where it is named, or None where it is the
    choice."""
    if spec.device.platform == "cpu":
        return SLOWER_ON_A_CPU
    if spec.device.is_hopper:
        return "Hopper has kernels of ours"
    return None


def describe(spec: GemmSpec) -> tuple[str, float]:
    """Returns what runs a GEMM, in words, and the share of the dense GEMM's FLOPs that
    it executes."""
    what = f"tokamax's ragged dot ({_implementation_of(spec)})"
    share = spec.experts_per_token / (spec.experts or 1)
    return f"{what} over {spec.experts} experts", share


def _implementation_of(spec: GemmSpec) -> TokamaxImplementation:
    return _implementation(
        spec.device,
        of_weight=spec.is_weight_gradient,
        float32_out=spec.float32_out,
    )


def _implementation(
    device: Device, *, of_weight: bool = False, float32_out: bool = False
) -> TokamaxImplementation:
    """Returns the name of tokamax's implementation for a GEMM on `device`.

    On TPUs its Mosaic kernels run all of them. Those for Blackwell (tokamax 0.0.17)
    have no weight gradient, and no float32 result that fits into shared memory; those
    for the A100 call what jax 0.11 does not have (`plgpu.store`). There it is Triton.

    Args:
      of_weight: whether the GEMM is a weight gradient.
      float32_out: whether the result is float32 though the operands are not.
    """
    if device.platform == "tpu":
        return "mosaic"
    if device.platform != "gpu":
        return "xla"
    blackwell = (10, 0) <= _capability(device) < (11, 0)
    return "mosaic" if blackwell and not (of_weight or float32_out) else "triton"


def _capability(device: Device) -> tuple[int, ...]:
    """Returns the compute capability in numbers, (0, 0) of what is no GPU of NVIDIA."""
    return tuple(map(int, (device.compute_capability or "0.0").split(".")))


def _why_not_on_tpu(spec: GemmSpec) -> str | None:
    generation = re.search(r"\d+", spec.device.kind)
    if generation is None or int(generation[0]) < 5:
        return f"needs a TPU v5 or newer, not {spec.device.kind}"
    small = min(spec.widths_of_expert)
    if small < 128:
        return f"a size of {small} is below the 128 of its kernel for TPUs"
    return None


def _padded(rows: jax.Array, device: Device) -> jax.Array:
    """Returns the rows with zeros below them, up to a number that every tile of
    tokamax's kernels divides: of rows on TPUs a power of two from 128 to 1024, or
    multiples of 1024; on GPUs multiples of 8."""
    count = rows.shape[0]
    multiple = 8 if device.platform == "gpu" else 1
    if device.platform == "tpu":
        multiple = min(1024, max(128, 1 << (count - 1).bit_length()))
    return jnp.pad(rows, ((0, -count % multiple), (0, 0)))


def _ragged_dot(
    implementation: TokamaxImplementation,
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    dimensions: lax.RaggedDotDimensionNumbers,
    out_dtype: jnp.dtype,
) -> jax.Array:
    import tokamax

    return tokamax.ragged_dot_general(
        lhs,
        rhs,
        group_sizes,
        dimensions,
        preferred_element_type=out_dtype,
        implementation=implementation,
    )
