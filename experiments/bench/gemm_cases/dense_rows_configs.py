"""The configs of the kernel `dense_rows` that are tried besides its default one."""

from pallas_kernels.sm90 import dense_rows
from pallas_kernels.sm90.gemm.dense_kernel import Config
from sparsejax.ops.kernels.registry import HOPPER

FASTEST_CONFIG = f"{HOPPER.name}, fastest config"
"""The name under which the row of the fastest of these configs is written."""

CONFIGS = (
    Config(stages=3),
    Config(),
    Config(cluster_axis="n", stages=3),
    Config(cluster_axis="n"),
    Config(cluster=1, stages=3),
    Config(cluster=1),
    Config(tile_n=128, cluster_axis="n", stages=5),
)
"""The configs that are tried."""


def fitting_configs(v: int, *, reads: bool = False) -> list[Config]:
    """Returns those of `CONFIGS` that can run group tiles of `v` rows; `reads` says
    whether the epilogue reads another matrix."""
    return [of for of in CONFIGS if dense_rows.why_invalid(of, v, reads=reads) is None]
