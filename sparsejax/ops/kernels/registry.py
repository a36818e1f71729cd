"""The sets of kernels that GPUs offer an FFN, each with one line here.

A set is loaded only where its GPU is there or planned for, so that a process on a CPU
imports no kernel. What a set has to offer is `base.KernelSet`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from pallas_kernels.device import Device
from sparsejax.ops.kernels.base import KernelSet

KernelSetName = Literal["mosaic_sm90"]
"""The names of the sets, which users give as `backend`."""


@dataclass(frozen=True, kw_only=True)
class Registered:
    """A set of kernels that is registered, and loaded only when it is needed."""

    name: KernelSetName
    why_unavailable: Callable[[Device], str | None]
    """Returns why a device can run none of the set's kernels, or None where it can."""
    load: Callable[[Device], KernelSet]
    """Returns the set for a device that can run it."""


def _load_hopper(device: Device) -> KernelSet:
    from sparsejax.ops.kernels.hopper import HopperKernels

    return HopperKernels(device)


HOPPER = Registered(
    name="mosaic_sm90",
    why_unavailable=Device.why_not_hopper,
    load=_load_hopper,
)

REGISTERED: tuple[Registered, ...] = (HOPPER,)
"""All registered sets, the one to be preferred first."""


def names() -> tuple[KernelSetName, ...]:
    """Returns the names of all sets, in the order of preference."""
    return tuple(each.name for each in REGISTERED)


def name_for(device: Device) -> KernelSetName | None:
    """Returns the name of the set that `kernels_of` would load for `device`, without
    loading it; None where no set runs there."""
    runs = (each.name for each in REGISTERED if each.why_unavailable(device) is None)
    return next(runs, None)


def kernels_of(device: Device, name: str | None = None) -> KernelSet | None:
    """Returns the set of a name, or the preferred one where it is None, of those that
    run on `device`; None where none does."""
    for each in REGISTERED:
        if name in (None, each.name) and each.why_unavailable(device) is None:
            return each.load(device)
    return None


def why_none(device: Device) -> str:
    """Returns why no set runs on `device`."""
    reasons = (f"{each.name} {each.why_unavailable(device)}" for each in REGISTERED)
    return "; ".join(reasons)
