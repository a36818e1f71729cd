"""The SM clock and the power of a GPU while something runs on it, read through NVML.

`nvidia-ml-py` is in the dependency group `bench`, which `uv run` installs.
"""

import os
import statistics
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from types import TracebackType
from typing import Any, Self

nvml: Any = None
with suppress(ImportError):
    nvml = import_module("pynvml")

EVERY_SECONDS = 0.02

SETTLE_SECONDS = 0.03
"""The seconds at the start of a span that are left out: what is read then was measured
before it."""


@dataclass(frozen=True, kw_only=True)
class Draw:
    """The medians of clock and power over a span of time."""

    clock_mhz: float
    watts: float


class PowerSampler:
    """A reader of the clock and power of the first GPU that the process may use, every
    20 ms in the background, inside a `with`; reading changes nothing. Without NVML, or
    its Python package, there is nothing to read."""

    def __init__(self) -> None:
        self._samples: list[tuple[float, float, float]] = []
        self._ended = threading.Event()
        self._reader: threading.Thread | None = None

    def __enter__(self) -> Self:
        if nvml is None:
            return self
        try:
            nvml.nvmlInit()
            gpu = _first_gpu()
        except nvml.NVMLError:  # no driver, or no such GPU
            return self
        self._reader = threading.Thread(target=self._read, args=(gpu,))
        self._reader.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._reader is not None:
            self._ended.set()
            self._reader.join()
            nvml.nvmlShutdown()

    def between(self, start: float, end: float) -> Draw | None:
        """Returns the medians over a span, whose ends are seconds of
        `time.perf_counter`, or None where nothing was read in it."""
        inside = [s for s in self._samples if start + SETTLE_SECONDS <= s[0] <= end]
        if not inside:
            return None
        return Draw(
            clock_mhz=statistics.median(s[1] for s in inside),
            watts=statistics.median(s[2] for s in inside),
        )

    def _read(self, gpu: Any) -> None:
        while not self._ended.wait(EVERY_SECONDS):
            try:
                clock = nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM)
                # Of this moment: nvmlDeviceGetPowerUsage is a mean over a second.
                fields = [nvml.NVML_FI_DEV_POWER_INSTANT]
                (power,) = nvml.nvmlDeviceGetFieldValues(gpu, fields)
            except nvml.NVMLError:
                continue
            if power.nvmlReturn == nvml.NVML_SUCCESS:
                watts = power.value.uiVal / 1000
                self._samples.append((time.perf_counter(), clock, watts))


def _first_gpu() -> Any:
    """Returns NVML's handle of the first GPU of CUDA_VISIBLE_DEVICES, an index or a
    name. The order of both is the same with CUDA_DEVICE_ORDER=PCI_BUS_ID, and among
    equal GPUs."""
    first, *_ = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")
    if first.isdigit():
        return nvml.nvmlDeviceGetHandleByIndex(int(first))
    return nvml.nvmlDeviceGetHandleByUUID(first)
