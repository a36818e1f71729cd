"""The facts that are known of devices: the table, what a `jax.Device` says, dense
peaks."""

from types import SimpleNamespace

import jax
import pytest

from pallas_kernels.device import (
    CPU,
    DENSE_PEAK_TFLOPS,
    GIB,
    KNOWN,
    Device,
    dense_peak_tflops,
)


@pytest.mark.parametrize(
    ("kind", "multiprocessors", "gib"),
    [
        ("NVIDIA H100 80GB HBM3", 132, 80),
        ("NVIDIA H100 PCIe", 114, 80),
        ("NVIDIA H100 NVL", 132, 94),
        ("NVIDIA H200", 132, 141),
        ("NVIDIA H20", 78, 96),
    ],
)
def test_hoppers_that_are_not_there_are_read_from_the_table(kind, multiprocessors, gib):
    device = Device.named(kind)
    assert device.is_hopper and device.why_not_hopper() is None
    assert device.count_multiprocessors() == multiprocessors
    assert device.memory_bytes == gib * GIB
    assert (device.platform, device.kind) == ("gpu", kind)


def test_what_the_table_does_not_have_is_refused_with_what_it_has():
    with pytest.raises(ValueError, match="'H100'; take one of 'NVIDIA H100 80GB HBM3'"):
        Device.named("H100")
    assert list(KNOWN) == [device.kind for device in KNOWN.values()]


@pytest.mark.parametrize("kind", ["NVIDIA A100-SXM4-80GB", "NVIDIA B200"])
def test_other_gpus_are_no_hoppers(kind):
    why = f"needs a Hopper GPU, not {kind}"
    assert Device.named(kind).why_not_hopper() == why


def gpu(**facts) -> SimpleNamespace:
    told = {
        "platform": "gpu",
        "device_kind": "NVIDIA H100 of tomorrow",
        "compute_capability": "9.0",
        "core_count": 140,
        "memory_stats": lambda: {"bytes_limit": 7 * GIB},
    }
    return SimpleNamespace(**told | facts)


def test_a_gpu_is_asked_and_its_name_decides_nothing():
    device = Device.of(gpu())
    assert device == Device(
        platform="gpu",
        kind="NVIDIA H100 of tomorrow",
        compute_capability="9.0",
        multiprocessors=140,
        memory_bytes=7 * GIB,
    )
    assert device.is_hopper
    blackwell = gpu(device_kind="NVIDIA H200 in name", compute_capability="10.0")
    assert "not NVIDIA H200 in name" in Device.of(blackwell).why_not_hopper()
    assert Device.of(gpu(device_kind="NVIDIA H200")).multiprocessors == 140


def refuse():
    raise jax.errors.JaxRuntimeError("of another process")


def test_what_a_gpu_does_not_tell_is_taken_from_the_table_or_left_open():
    mute = gpu(core_count=None, compute_capability=None, memory_stats=refuse)
    unknown = Device.of(mute)
    assert (unknown.compute_capability, unknown.memory_bytes) == (None, None)
    mute.device_kind = "NVIDIA H20"
    assert Device.of(mute) == Device.named("NVIDIA H20")
    uncounted = Device.of(gpu(core_count=None))
    why = "how many multiprocessors NVIDIA H100 of tomorrow has is not known"
    assert uncounted.why_not_hopper() == why
    with pytest.raises(ValueError, match=why):
        uncounted.count_multiprocessors()


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="asks the CPU")
def test_a_cpu_has_none_of_what_a_gpu_has():
    assert Device.of(jax.devices()[0]) == CPU
    assert CPU.why_not_hopper() == "needs a Hopper GPU, not cpu"


@pytest.mark.parametrize(
    ("kind", "dtype", "expected"),
    [
        ("NVIDIA H200", "bfloat16", 989.4),
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989.4),
        ("NVIDIA H100 80GB HBM3", "float32", 494.7),
        ("NVIDIA H100 PCIe", "bfloat16", 756.0),
        ("NVIDIA H100 NVL", "bfloat16", 835.5),
        ("NVIDIA H200 NVL", "float32", 417.5),
        ("NVIDIA H20", "bfloat16", 148.0),
        ("NVIDIA A100-SXM4-80GB", "bfloat16", 312.0),
        ("NVIDIA A100-SXM4-80GB", "float32", 156.0),
    ],
)
def test_listed_devices_have_the_dense_peak_of_their_data_sheet(kind, dtype, expected):
    assert dense_peak_tflops(kind, dtype) == expected


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("NVIDIA GeForce RTX 4090", "bfloat16"),
        ("cpu", "float32"),
        ("NVIDIA H200", "int8"),
        ("NVIDIA H100 of tomorrow", "bfloat16"),
        ("NVIDIA H200 MIG 1g.18gb", "bfloat16"),
    ],
)
def test_what_is_not_in_the_table_has_no_peak(kind, dtype):
    assert dense_peak_tflops(kind, dtype) is None


def test_every_peak_is_of_a_known_device():
    assert set(DENSE_PEAK_TFLOPS) <= set(KNOWN)
