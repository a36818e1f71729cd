"""Accelerators without kernels of ours, as values, and as what tokamax asks about the
device that it is traced for."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import jax
import pytest
from jax.extend import backend
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from pallas_kernels.device import Device
from sparsejax.ops import tokamax_matmul
from tests.support.devices import hopper

A100 = hopper.A100
B200 = Device.named("NVIDIA B200")
TPU = Device(platform="tpu", kind="TPU v5 lite")
TRITON = "jax_triton", "triton"


def installed(patch: pytest.MonkeyPatch, *packages: str) -> None:
    """Lets tokamax find only `packages` of those that its implementations need."""
    found = lambda name: object() if name in packages else None
    patch.setattr(tokamax_matmul, "find_spec", found)


@contextmanager
def traced_for(device: Device) -> Iterator[None]:
    """Traces what runs inside for a device that is not here. tokamax asks JAX about it:
    for a GPU by the default device, for a TPU by the mesh."""
    like = SimpleNamespace(
        platform=device.platform,
        device_kind=device.kind,
        compute_capability=device.compute_capability,
    )
    kind = AbstractDevice(
        device_kind=device.kind, num_cores=1, platform=device.platform
    )
    jax.clear_caches()  # of traces made for the device that is here
    with pytest.MonkeyPatch.context() as patch:
        hopper.see_device(patch, device)
        if device.platform == "gpu":
            patch.setattr(backend, "get_default_device", lambda: like)
        with use_abstract_mesh(AbstractMesh((), (), abstract_device=kind)):
            yield
    jax.clear_caches()
