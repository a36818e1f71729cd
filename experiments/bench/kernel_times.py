"""The time of a call on the GPU, by kernel and by kind of kernel."""

import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path

import jax

KINDS = {
    "2:4 GEMM": ("sparse_matmul",),
    "2:4 packing": ("pack_weight", "activations_"),
    "attention": ("cudnn", "sdpa", "fmha", "flash"),
    "experts' dense GEMM": ("dense_rows", "dense_over_rows"),
    "experts' rows": ("gather_rows", "sum_rows"),
    "dense GEMM": ("gemm", "nvjet", "cublas", "cutlass", "xmma"),
    "copy": ("memcpy", "memset"),
}
"""The kinds of GPU kernels, each with parts of kernel names; a kernel is of the first
kind one of whose parts is in its name."""


def kernel_times(call: Callable[[], object]) -> dict[str, float]:
    """Returns the milliseconds that the GPU spends in the kernels of each name during a
    call, the longest first; empty without a GPU."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(call())
        (file,) = Path(folder).rglob("*.xplane.pb")
        data = jax.profiler.ProfileData.from_file(str(file))
    by_name: defaultdict[str, float] = defaultdict(float)
    for plane in data.planes:
        if not plane.name.startswith("/device:GPU"):
            continue
        for line in plane.lines:
            if line.name.startswith("Stream"):
                for event in line.events:
                    by_name[event.name] += event.duration_ns / 1e6
    return _longest_first(by_name)


def by_kind(ms_by_name: Mapping[str, float]) -> dict[str, float]:
    """Returns the times of kernels summed by kind; a kernel of no kind keeps its name
    where it takes more than a hundredth of the total."""
    total = sum(ms_by_name.values())
    kinds: defaultdict[str, float] = defaultdict(float)
    for name, ms in ms_by_name.items():
        own = [k for k, parts in KINDS.items() if any(p in name.lower() for p in parts)]
        rest = name if ms > total / 100 else "other kernels"
        kinds[own[0] if own else rest] += ms
    return _longest_first(kinds)


def _longest_first(times: Mapping[str, float]) -> dict[str, float]:
    return dict(sorted(times.items(), key=lambda item: item[1], reverse=True))
