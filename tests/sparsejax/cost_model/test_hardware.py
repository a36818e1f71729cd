"""Links between GPUs, by hand."""

import pytest

from pallas_kernels.device import CPU, Device
from sparsejax.config import MeshConfig
from sparsejax.cost_model import Links, Speeds
from sparsejax.cost_model.communication import Exchanged

LINKS = Links(
    devices_per_host=8,
    nvlink_gb_per_s=300.0,
    network_gb_per_s=50.0,
    nvlink_latency_us=3.0,
    network_latency_us=10.0,
)


def exchanged(axis, kind, collectives=2):
    return Exchanged(
        purpose="gathered_weights",
        axis=axis,
        kind=kind,
        received=3 * 10**9,
        collectives=collectives,
    )


@pytest.mark.parametrize(
    ("mesh", "axis", "kind", "seconds"),
    [
        # Inside a host: 3 GB at 300 GB/s, seven hops of 3 us for each of two.
        ((1, 8, 1), "fsdp", "all-gather", 0.010 + 2 * 7 * 3e-6),
        # Tensor's eight fill the host, so replicas meet over one port of 50 GB/s: a
        # tree over four hosts has two levels, up and down.
        ((4, 1, 8), "data", "all-reduce", 0.060 + 2 * 2 * 2 * 10e-6),
        # Four of an axis in each of four hosts have four ports: 200 GB/s; of fifteen
        # hops three are between hosts.
        ((1, 16, 2), "fsdp", "reduce-scatter", 0.015 + 2 * (12 * 3e-6 + 3 * 10e-6)),
        # Eight ports would be 400 GB/s, more than NVLink inside the hosts.
        ((16, 1, 1), "data", "all-reduce", 0.010 + 2 * 2 * (7 * 3e-6 + 10e-6)),
    ],
)
def test_the_slowest_link_is_waited_for(mesh, axis, kind, seconds):
    data, fsdp, tensor = mesh
    on = MeshConfig(data=data, fsdp=fsdp, tensor=tensor)
    assert LINKS.seconds(exchanged(axis, kind), on) == pytest.approx(seconds)


def test_tensor_lies_innermost():
    mesh = MeshConfig(data=16, fsdp=2, tensor=2)
    shared = [LINKS.on_one_host(mesh, axis) for axis in ("tensor", "fsdp", "data")]
    assert shared == [2, 2, 2]
    larger = MeshConfig(data=1, fsdp=2, tensor=16)
    assert [LINKS.on_one_host(larger, axis) for axis in ("tensor", "fsdp")] == [8, 1]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"devices_per_host": 0}, "devices_per_host=0 is not 1 or more"),
        ({"network_gb_per_s": 0.0}, "network_gb_per_s=0.0 is not above 0"),
        ({"nvlink_gb_per_s": float("nan")}, "nvlink_gb_per_s=nan is not above 0"),
        ({"network_latency_us": -1.0}, "network_latency_us=-1.0 is below 0"),
    ],
)
def test_links_that_cannot_be_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        Links(**wrong)


def test_speeds_are_known_of_gpus_in_the_tables_alone():
    assert Speeds.of(CPU, "float32") is None
    assert Speeds.of(Device.named("NVIDIA H800"), "bfloat16") is None
    h100, h200 = (
        Speeds.of(Device.named(kind), "bfloat16")
        for kind in ("NVIDIA H100 80GB HBM3", "NVIDIA H200")
    )
    assert h100.gemm_flops_per_s == h200.gemm_flops_per_s < 989.4e12
    ratio = h200.memory_bytes_per_s / h100.memory_bytes_per_s
    # An H100 reaches more of its memory's bandwidth, which is less.
    assert ratio == pytest.approx(4.8 * 0.616 / (3.35 * 0.83))
