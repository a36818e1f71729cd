"""The table of dense peaks."""

import pytest

from pallas_kernels.device import dense_peak_tflops


@pytest.mark.parametrize(
    ("device_kind", "dtype", "expected"),
    [
        ("NVIDIA H200", "bfloat16", 989.4),
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989.4),
        ("NVIDIA H100 80GB HBM3", "float32", 494.7),
        ("NVIDIA A100-SXM4-80GB", "bfloat16", 312.0),
        ("NVIDIA A100-SXM4-80GB", "float32", 156.0),
    ],
)
def test_listed_devices_have_the_dense_peak_of_their_data_sheet(
    device_kind, dtype, expected
):
    assert dense_peak_tflops(device_kind, dtype) == expected


@pytest.mark.parametrize(
    ("device_kind", "dtype"),
    [
        ("NVIDIA GeForce RTX 4090", "bfloat16"),
        ("cpu", "float32"),
        ("NVIDIA H200", "int8"),
        ("NVIDIA H100 PCIe", "bfloat16"),
        ("NVIDIA H100 NVL", "bfloat16"),
    ],
)
def test_what_is_not_in_the_table_has_no_peak(device_kind, dtype):
    assert dense_peak_tflops(device_kind, dtype) is None
