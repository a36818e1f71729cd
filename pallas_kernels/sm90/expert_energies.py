"""The energies of experts from operands in 8-bit floats, on Hopper's tensor cores.

    energy[t, e] = sum over the neurons f of expert e of relu(2^-12 (A B^T)[t, f])^4

A are tokens and B the neurons' weights, float8_e4m3fn, each with its own scale, which
no token's order of its experts depends on. The product is summed in registers and never
written. Factor and scales are powers of two: with the factor no energy overflows.

The kernel is `gemm/dense_kernel.py`. A tile of columns lies within one expert, and its
sums are a partial result; an expert's are added behind the kernel, in their order.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from pallas_kernels.sm90.gemm.dense_kernel import (
    WARPGROUPS,
    Config,
    Epilogue,
    Operand,
    dense_kernel,
    launch,
)
from pallas_kernels.sm90.gemm.tile_scheduler import EveryTile
from pallas_kernels.sm90.sparse_matmul_configs import LINE_BYTES

FACTOR = 2.0**-12
"""The factor of the product: 448^2, the largest of one pair of numbers, times it is 49,
and the fourth power of a sum of 2^16 such pairs below the largest float32."""


def why_unsupported(k: int, features: int) -> str | None:
    """Returns why products over `k` numbers cannot be taken for experts of so many
    `features`, their neurons, or None where they can."""
    if k % LINE_BYTES or not k:
        return f"sums of {k} numbers are no whole lines of {LINE_BYTES} bytes"
    if features % 128 or not features:
        return f"{features} neurons of an expert are no multiple of 128"
    return None


def default_config(features: int) -> Config:
    """Returns the config for experts of so many neurons."""
    if features % 256:
        return Config(tile_n=128, cluster=2)
    return Config(cluster=2)


def expert_energies(
    a: Float[Array, "tokens k"],
    b: Float[Array, "n k"],
    *,
    experts: int,
    config: Config | None = None,
    multiprocessors: int,
) -> Float[Array, "tokens experts"]:
    """Returns the energies of all experts for each token, float32.

    Args:
      a, b: float8_e4m3fn; expert e has the rows of B from e n / experts.
      experts: the number of experts, a divisor of n.
      config: how the work is cut up; None for `default_config`. The bits depend on its
        `tile_n`.
      multiprocessors: their number in the GPU that will run the kernel.
    Raises:
      ValueError: shapes do not fit, or the kernel cannot run them; says why.
    """
    (tokens, k), (n, k_of_b) = a.shape, b.shape
    in_8_bits = {a.dtype, b.dtype} == {jnp.dtype(jnp.float8_e4m3fn)}
    if k != k_of_b or n % experts or not in_8_bits:
        raise ValueError(
            f"{a.dtype}{a.shape} and {b.dtype}{b.shape} do not fit {experts} experts: "
            f"both are float8_e4m3fn with equal k, and experts divide n"
        )
    features = n // experts
    reason = why_unsupported(k, features)
    if reason:
        raise ValueError(f"no energies of {a.shape} and {b.shape}: {reason}")
    config = config or default_config(features)
    if features % config.tile_n:
        raise ValueError(
            f"no energies of {a.shape} and {b.shape} with {config}: a tile of "
            f"{config.tile_n} columns does not divide the {features} of an expert"
        )
    if reason := config.why_too_large(_SLOTS):
        raise ValueError(f"no energies of {a.shape} and {b.shape}: {reason}")
    # Copies are of whole groups of eight rows.
    a = jnp.pad(a, ((0, -tokens % 8), (0, 0)))
    tiling = config.tiling(len(a), n)
    clusters = min(multiprocessors // config.cluster, tiling.rows * tiling.columns)
    # What a cluster's blocks have beyond the tokens and the neurons is written as well:
    # zeros.
    columns = tiling.columns * tiling.tile_n // config.tile_n
    parts = jax.ShapeDtypeStruct((columns, tiling.rows * tiling.tile_m), jnp.float32)
    sums = launch(
        partial(_kernel, config=config, clusters=clusters, n=n),
        (a, b),
        parts,
        config=config,
        clusters=clusters,
        name=f"expert_energies_{tokens}x{n}x{k}",
    )
    sums = sums[: n // config.tile_n, :tokens].reshape(experts, -1, tokens)
    return sums.sum(axis=1).T


_SLOTS = 1
"""The number of epilogue tiles that `dense_kernel` sets aside; none is used."""


def _kernel(a_gmem, b_gmem, sums_gmem, *, config: Config, clusters: int, n: int):
    tokens, k = a_gmem.shape
    own_rows = config.tile_m // WARPGROUPS

    def tile_of(size: int):
        return lambda task, start, step: (
            pl.ds(start, size),
            pl.ds(step * LINE_BYTES, LINE_BYTES),
        )

    def write(task, acc, origin, out_smem, filled) -> None:
        y = jnp.maximum(acc * FACTOR, 0.0)
        sums = jnp.sum(jnp.square(jnp.square(y)), axis=1)
        row, column = origin
        sums_gmem[column // config.tile_n, pl.ds(row, own_rows)] = sums

    dense_kernel(
        Operand(a_gmem, tile_of(config.tile_m), True),
        Operand(b_gmem, tile_of(config.tile_n), True),
        walk=EveryTile(config.tiling(tokens, n)),
        config=config,
        clusters=clusters,
        steps=k // LINE_BYTES,
        epilogue=Epilogue(None, write, _SLOTS, jnp.dtype(jnp.float32)),
    )
