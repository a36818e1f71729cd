"""The interface of a set of kernels that is tuned: which configs its GEMMs can take.

A config says how a kernel cuts a GEMM into tiles. It changes the time of the GEMM and
not its result, so that the fastest one is found by timing (`sparsejax.tuning`) and kept
in the tables of `pallas_kernels.tuning`, which so far hold configs of Hopper's class
alone. A set without configs need not offer this: it is then run as it is.
"""

from typing import Any, Protocol, Self, runtime_checkable

from pallas_kernels.device import Device
from pallas_kernels.tuned_gemm import TunedGemm
from sparsejax.ops.gemm_spec import GemmSpec
from sparsejax.ops.kernels.base import KernelSet
from sparsejax.ops.kernels.registry import kernels_of

Config = Any
"""A config of a set's kernels, which is hashable. Only the set and the tables read
it."""


@runtime_checkable
class TunableKernels(KernelSet, Protocol):
    """A `KernelSet` whose GEMMs with a 2:4 operand run in several configs."""

    def tuned_gemm(self, gemm: GemmSpec) -> TunedGemm:
        """Returns what the tables hold the times of a GEMM with a 2:4 operand by."""
        ...

    def why_no_kernel(self, gemm: TunedGemm, *, features: int) -> str | None:
        """Returns why no kernel computes a GEMM of the tables, or None where one does.
        `features` is the number of neurons (with experts, of each expert), without the
        residual rows that the sizes of a weight gradient include."""
        ...

    def configs(self, gemm: TunedGemm) -> list[Config]:
        """Returns the configs that a search for the fastest one tries; none where no
        kernel computes the GEMM."""
        ...

    def with_config(self, config: Config) -> Self:
        """Returns the same kernels, with every GEMM in one config."""
        ...


def tunable_kernels_of(device: Device) -> TunableKernels | None:
    """Returns the preferred set of those that run on `device`, or None where none does,
    or where its kernels have no configs."""
    kernels = kernels_of(device)
    return kernels if isinstance(kernels, TunableKernels) else None
