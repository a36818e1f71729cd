"""The facts about a GPU, as a plain value: those of a GPU that is there are asked for,
those of one that is not are looked up in a table. Of a TPU only its kind is read."""

from dataclasses import dataclass, replace
from typing import Any

GIB = 2**30

HOPPER = "9.0"
"""The compute capability of the GPUs that run `wgmma.mma_async.sp`."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """One kind of device, as all code that chooses a kernel reads it."""

    platform: str
    """The platform as in `jax.Device.platform`: "gpu", "tpu" or "cpu"."""
    kind: str
    """The model as in `jax.Device.device_kind`, for example "NVIDIA H200"."""
    compute_capability: str | None = None
    """The compute capability, such as "9.0"; None for a device that is no GPU of
    NVIDIA."""
    multiprocessors: int | None = None
    """The number of multiprocessors; None where it is not known."""
    memory_bytes: int | None = None
    """The bytes of memory that programs may allocate; for a GPU that is not there, all
    that it has; None where that is not known."""

    @classmethod
    def of(cls, device: Any) -> "Device":
        """Returns the facts that a `jax.Device` states. What its backend does not tell
        is read from the table under its kind, and is None where the table does not have
        it."""
        asked = cls(platform=device.platform, kind=device.device_kind)
        if device.platform != "gpu":  # its attributes of these names mean other things
            return asked
        known = KNOWN.get(device.device_kind, asked)
        capability = getattr(device, "compute_capability", None)
        count = getattr(device, "core_count", None)
        return replace(
            asked,
            compute_capability=capability or known.compute_capability,
            multiprocessors=count or known.multiprocessors,
            memory_bytes=_allocatable(device) or known.memory_bytes,
        )

    @classmethod
    def named(cls, kind: str) -> "Device":
        """Returns a GPU or TPU from the table; it need not be there.

        Raises:
          ValueError: the table does not have `kind`; lists what it has.
        """
        if kind not in KNOWN:
            raise ValueError(
                f"nothing is known of a device named {kind!r}; take one of "
                f"{', '.join(map(repr, KNOWN))}"
            )
        return KNOWN[kind]

    @property
    def is_hopper(self) -> bool:
        """Whether the device has Hopper's sparse tensor cores."""
        return self.compute_capability == HOPPER

    def why_not_hopper(self) -> str | None:
        """Returns why the device cannot run Hopper's kernels, which have to be cut up
        for its number of multiprocessors, or None where it can."""
        if not self.is_hopper:
            return f"needs a Hopper GPU, not {self.kind or self.platform}"
        if self.multiprocessors is None:
            return f"how many multiprocessors {self.kind} has is not known"
        return None

    def count_multiprocessors(self) -> int:
        """Returns the number of multiprocessors, for a kernel that is cut up for them.

        Raises:
          ValueError: the number is not known.
        """
        if self.multiprocessors is None:
            raise ValueError(
                f"how many multiprocessors {self.kind or self.platform} has is not "
                f"known, and a kernel is cut up for a number of them; trace it for a "
                f"GPU, or pass the number"
            )
        return self.multiprocessors


CPU = Device(platform="cpu", kind="cpu")


def _allocatable(device: Any) -> int | None:
    """Returns how many bytes the backend of a device may allocate; None where it does
    not say."""
    try:
        statistics = device.memory_stats()
    except (AttributeError, NotImplementedError, RuntimeError):
        return None  # of another process, or of a backend that does not count
    return (statistics or {}).get("bytes_limit")


def _gpu(
    kind: str, compute_capability: str, multiprocessors: int | None, gib: int
) -> Device:
    return Device(
        platform="gpu",
        kind=kind,
        compute_capability=compute_capability,
        multiprocessors=multiprocessors,
        memory_bytes=gib * GIB,
    )


# By the name that the driver gives them. Compute capability: NVIDIA's list "CUDA GPU
# Compute Capability". Multiprocessors: the whitepapers "NVIDIA H100 Tensor Core GPU
# Architecture" (H100 SXM5 132, PCIe 114; the H100 NVL, H200 and GH200 have the SXM5's
# 132) and "NVIDIA A100 Tensor Core GPU Architecture" (108); H800: DeepSeek-V3 technical
# report (arXiv 2412.19437); H20: what the press had from Geekbench's database. Memory:
# the data sheets, whose GB are the driver's GiB but for half a per cent that the driver
# keeps. TPUs: the kinds that JAX has; nothing else is read of them.
KNOWN = {
    device.kind: device
    for device in (
        _gpu("NVIDIA H100 80GB HBM3", HOPPER, 132, 80),
        _gpu("NVIDIA H100 PCIe", HOPPER, 114, 80),
        _gpu("NVIDIA H100 NVL", HOPPER, 132, 94),
        _gpu("NVIDIA H200", HOPPER, 132, 141),
        _gpu("NVIDIA H200 NVL", HOPPER, 132, 141),
        _gpu("NVIDIA H800", HOPPER, 132, 80),
        _gpu("NVIDIA H20", HOPPER, 78, 96),
        _gpu("NVIDIA GH200 480GB", HOPPER, 132, 96),
        _gpu("NVIDIA GH200 144G HBM3e", HOPPER, 132, 144),
        _gpu("NVIDIA A100-SXM4-40GB", "8.0", 108, 40),
        _gpu("NVIDIA A100-SXM4-80GB", "8.0", 108, 80),
        _gpu("NVIDIA A100-PCIE-40GB", "8.0", 108, 40),
        _gpu("NVIDIA A100 80GB PCIe", "8.0", 108, 80),
        _gpu("NVIDIA B200", "10.0", None, 180),
        *(
            Device(platform="tpu", kind=kind)
            for kind in ("TPU v5 lite", "TPU v5", "TPU v6 lite", "TPU7x")
        ),
    )
}

# TFLOP/s of dense GEMMs by NVIDIA's data sheets, at boost clock: bfloat16, and TF32,
# which JAX's default precision uses for float32 GEMMs. Where a data sheet has only
# figures "with sparsity", half of them.
_H100_SXM = {"bfloat16": 989.4, "float32": 494.7}
_NVL = {"bfloat16": 835.5, "float32": 417.5}
_A100 = {"bfloat16": 312.0, "float32": 156.0}
DENSE_PEAK_TFLOPS = {
    "NVIDIA H100 80GB HBM3": _H100_SXM,
    "NVIDIA H100 PCIe": {"bfloat16": 756.0, "float32": 378.0},
    "NVIDIA H100 NVL": _NVL,
    "NVIDIA H200": _H100_SXM,
    "NVIDIA H200 NVL": _NVL,
    "NVIDIA GH200 480GB": _H100_SXM,
    "NVIDIA GH200 144G HBM3e": _H100_SXM,
    "NVIDIA H20": {"bfloat16": 148.0, "float32": 74.0},
    "NVIDIA A100-SXM4-40GB": _A100,
    "NVIDIA A100-SXM4-80GB": _A100,
    "NVIDIA A100-PCIE-40GB": _A100,
    "NVIDIA A100 80GB PCIe": _A100,
    "NVIDIA B200": {"bfloat16": 2250.0},
}


def dense_peak_tflops(kind: str, dtype: str) -> float | None:
    """Returns the TFLOP/s of a dense GEMM by the data sheet of exactly this
    `Device.kind`; None for a kind that is not in the table, or a dtype that its data
    sheet leaves open."""
    return DENSE_PEAK_TFLOPS.get(kind, {}).get(dtype)
