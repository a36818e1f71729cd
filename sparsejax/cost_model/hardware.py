"""The speeds that a predicted step rests on: of a GPU, of the links between GPUs, and
the shares of them that our own steps have reached.

Nothing here is measured on more than two GPUs. The shares are calibrated on one step,
`CALIBRATED_ON`, that of an H100's memory on another, and what narrow models lose on
those of `gpt-124m`; how far off other steps are stands in docs/many-gpus.md.
"""

from dataclasses import dataclass
from math import log2

from pallas_kernels.device import DENSE_PEAK_TFLOPS, Device
from sparsejax.config import MeshConfig
from sparsejax.cost_model.communication import Exchanged

CALIBRATED_ON = (
    "one dense step of llama-1b, one NVIDIA H200, 2 x 16,384 tokens, without a loop "
    "over layers, 2026-11-25 (experiments/results/bench_step.jsonl)"
)
"""The measured step that gives the shares below. Its GPU kernels took 400 ms in dense
GEMMs and 110 ms in attention; the step took 633 ms."""

GEMM_SHARE = 0.755
"""The share of the data sheet's dense peak that the step's dense GEMMs reached."""
ATTENTION_SHARE = 0.380
"""The share of that peak that attention's kernels reached, by the FLOPs of the causal
half, without what the backward computes again."""
MEMORY_SHARE = 0.616
"""The share of the data sheet's memory bandwidth at which everything else would have
moved the bytes of `step_time.elementwise_bytes`: gaps between kernels are in it."""
MEMORY_SHARE_OF = {"NVIDIA H100 80GB HBM3": 0.83}
"""`MEMORY_SHARE` of the GPUs that have one of their own, by name. The H100's is
calibrated on one dense step of `llama-1b` with 10 layers, which took 317 ms
(experiments/results/bench_step.jsonl, 2026-11-25)."""
CALIBRATED_WIDTH, CALIBRATED_HEAD = 2048, 128
"""The d_model and the head_dim of the step `CALIBRATED_ON`."""
NARROW_GEMM, NARROW_HEAD = 256, 128
"""The constants by which GEMMs and attention take longer per FLOP in narrower models:
in proportion to 1 + NARROW_GEMM / d_model and to 1 + NARROW_HEAD / head_dim. The reason
is assumed to be that a tile begins and ends once, however little it sums. They are the
best of five pairs that were tried on the measured steps of `gpt-124m`. Models and heads
wider than the calibrated ones are assumed to gain nothing."""
FP8_GAIN = 1.93
"""The speed of GEMMs of 8-bit floats over those of bfloat16: the same step with
`precision` "fp8" took 294 ms in GEMMs."""

SQUARES_SLOWER = 1.17
"""The time of GEMMs 1 and 3 of a dense FFN on kernels that square the activations, over
that of cuBLAS's, which do not: those of `llama-1b` took 82 ms for 70 on an H100."""

SLOWED_BESIDE = 1.0
"""The seconds by which computation takes longer for each second of the collectives that
run beside it, which take multiprocessors and memory. Steps of `llama-1b` on fsdp of two
and four H100s say 0.7 to 1.5."""

MEMORY_GB_PER_S = {
    "NVIDIA H100 80GB HBM3": 3350.0,
    "NVIDIA H100 PCIe": 2000.0,
    "NVIDIA H100 NVL": 3900.0,
    "NVIDIA H200": 4800.0,
    "NVIDIA H200 NVL": 4800.0,
    "NVIDIA H20": 4000.0,
    "NVIDIA GH200 480GB": 4000.0,
    "NVIDIA GH200 144G HBM3e": 4900.0,
    "NVIDIA A100-SXM4-40GB": 1555.0,
    "NVIDIA A100-SXM4-80GB": 2039.0,
    "NVIDIA A100-PCIE-40GB": 1555.0,
    "NVIDIA A100 80GB PCIe": 1935.0,
}
"""The memory bandwidth of each GPU, in GB/s, by NVIDIA's data sheets."""


@dataclass(frozen=True, kw_only=True)
class Speeds:
    """The speeds at which one GPU is assumed to work."""

    gemm_flops_per_s: float
    """The FLOPs per second of dense GEMMs in the compute dtype, in a model as wide as
    the calibrated one or wider."""
    attention_flops_per_s: float
    """The FLOPs per second of attention, by those of the causal half, with such
    heads."""
    memory_bytes_per_s: float
    """The bytes per second of everything else."""

    def gemm_seconds(self, flops: float, d_model: int) -> float:
        """Returns the seconds of dense GEMMs in a model of that width."""
        slower = _slower(NARROW_GEMM, d_model, CALIBRATED_WIDTH)
        return slower * flops / self.gemm_flops_per_s

    def attention_seconds(self, flops: float, head_dim: int) -> float:
        """Returns the seconds of attention with heads of that width."""
        slower = _slower(NARROW_HEAD, head_dim, CALIBRATED_HEAD)
        return slower * flops / self.attention_flops_per_s

    @classmethod
    def of(cls, device: Device, dtype: str) -> "Speeds | None":
        """Returns the speeds of a GPU, the calibrated shares of its data sheet's; None
        for a device or a dtype that the tables do not have."""
        peak = DENSE_PEAK_TFLOPS.get(device.kind, {}).get(dtype)
        memory = MEMORY_GB_PER_S.get(device.kind)
        if peak is None or memory is None:
            return None
        share = MEMORY_SHARE_OF.get(device.kind, MEMORY_SHARE)
        return cls(
            gemm_flops_per_s=GEMM_SHARE * peak * 1e12,
            attention_flops_per_s=ATTENTION_SHARE * peak * 1e12,
            memory_bytes_per_s=share * memory * 1e9,
        )


def _slower(lost: int, width: int, calibrated: int) -> float:
    """Returns the time per FLOP at a width over that at the calibrated one."""
    return (1 + lost / min(width, calibrated)) / (1 + lost / calibrated)


def devices_along(mesh: MeshConfig, axis: str) -> int:
    """Returns the number of devices along an axis of a mesh with `data` set, "batch"
    being data and fsdp together."""
    return mesh.token_shards if axis == "batch" else getattr(mesh, axis)


@dataclass(frozen=True, kw_only=True)
class Links:
    """The links between GPUs, as assumed where nobody says otherwise.

    Sources: NVLink, and the latencies of a hop, are the constants by which NCCL itself
    predicts its collectives on Hopper (its sources, `src/graph/tuning.cc` and the
    symmetric kernels' table of bandwidths); the network is one port of 400 Gbit/s for
    each GPU, as a DGX H100 has. A network that is slower above the first switch is not
    modelled.
    """

    devices_per_host: int = 8
    """The number of GPUs of one host, which NVLink joins."""
    nvlink_gb_per_s: float = 360.0
    """The bandwidth of a GPU inside a host, in GB/s and in one direction, as
    collectives reach it."""
    network_gb_per_s: float = 50.0
    """The bandwidth between hosts for each GPU, in GB/s and in one direction."""
    nvlink_latency_us: float = 3.4
    """The microseconds of one hop of a collective inside a host."""
    network_latency_us: float = 14.0
    """The microseconds of one hop between hosts."""

    def __post_init__(self) -> None:
        if self.devices_per_host < 1:
            raise ValueError(
                f"devices_per_host={self.devices_per_host} is not 1 or more; give the "
                f"number of GPUs that a host has"
            )
        for name in ("nvlink_gb_per_s", "network_gb_per_s"):
            if not getattr(self, name) > 0:
                raise ValueError(
                    f"{name}={getattr(self, name)} is not above 0; give the bandwidth "
                    f"of a GPU's link in GB/s, in one direction"
                )
        for name in ("nvlink_latency_us", "network_latency_us"):
            if not getattr(self, name) >= 0:
                raise ValueError(
                    f"{name}={getattr(self, name)} is below 0; give the microseconds "
                    f"of one hop"
                )

    def on_one_host(self, mesh: MeshConfig, axis: str) -> int:
        """Returns how many devices of an axis share a host, "batch" being data and fsdp
        together. Devices are numbered along tensor first, then fsdp, then data, as
        `distributed.mesh.make_mesh` takes them."""
        inner = {"tensor": 1, "data": mesh.fsdp * mesh.tensor}
        fit = max(1, self.devices_per_host // inner.get(axis, mesh.tensor))
        return min(devices_along(mesh, axis), fit)

    def seconds(self, exchanged: Exchanged, mesh: MeshConfig) -> float:
        """Returns the seconds that collectives along one axis take, alone on the links.

        The bytes go around a ring. Between hosts the ring uses one network port for
        each of its devices in a host, and is never faster than NVLink. Each collective
        waits for its hops as well: n - 1 of them for a gather, a scatter or an
        exchange; for a sum twice those inside a host and twice those of a tree over the
        hosts.
        """
        together = self.on_one_host(mesh, exchanged.axis)
        devices = devices_along(mesh, exchanged.axis)
        hosts = -(-devices // together)
        rate = self.nvlink_gb_per_s
        if hosts > 1:
            rate = min(rate, together * self.network_gb_per_s)
        if exchanged.kind == "all-reduce":
            inside, between = 2 * (together - 1), 2 * log2(hosts)
        else:
            inside, between = devices - hosts, hosts - 1
        hops = inside * self.nvlink_latency_us + between * self.network_latency_us
        return exchanged.received / (1e9 * rate) + 1e-6 * hops * exchanged.collectives
