"""What the GPUs that kernels are written for can do at most, with the source."""

DENSE_PEAK_TFLOPS = {
    # NVIDIA data sheets, SXM boards, bf16 tensor cores without sparsity, boost clock.
    ("H100", "bfloat16"): 989.4,
    ("H200", "bfloat16"): 989.4,
    ("A100", "bfloat16"): 312.0,
    # TF32, which JAX's default precision uses for float32 GEMMs on these GPUs.
    ("H100", "float32"): 494.7,
    ("H200", "float32"): 494.7,
    ("A100", "float32"): 156.0,
}


HOPPER = ("H100", "H200", "H800", "H20", "GH200")
"""Names of the GPUs of compute capability 9.0."""


def is_hopper(device_kind: str) -> bool:
    """Whether `wgmma.mma_async.sp` runs on it; `device_kind` as `jax.Device` has it."""
    words = device_kind.replace("-", " ").split()
    return any(word in HOPPER for word in words)


def dense_peak_tflops(device_kind: str, dtype: str) -> float | None:
    """TFLOP/s of a dense GEMM by the data sheet; None for a device not in the table.

    `device_kind` as `jax.Device.device_kind`, for example "NVIDIA H200".
    """
    if any(variant in device_kind for variant in ("PCIe", "NVL")):
        return None  # fewer units or lower clocks than the table's SXM boards
    for (gpu, of_dtype), peak in DENSE_PEAK_TFLOPS.items():
        if gpu in device_kind and dtype == of_dtype:
            return peak
    return None
