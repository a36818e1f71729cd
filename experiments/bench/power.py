"""The SM clock and the power of a GPU while something runs on it."""

import os
import statistics
import subprocess
import threading
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Self

QUERY = ["nvidia-smi", "--query-gpu=clocks.sm,power.draw.instant"]
FORMAT = ["--format=csv,noheader,nounits", "-lms", "20"]

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
    20 ms in the background, inside a `with`; reading changes nothing. Without
    nvidia-smi there is nothing to read."""

    def __init__(self) -> None:
        self._samples: list[tuple[float, float, float]] = []
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        # An index or a name, as nvidia-smi takes them; the order of both is the same
        # with CUDA_DEVICE_ORDER=PCI_BUS_ID, and among equal GPUs.
        first, *_ = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")
        try:
            self._process = subprocess.Popen(
                [*QUERY, f"--id={first}", *FORMAT], stdout=subprocess.PIPE, text=True
            )
        except FileNotFoundError:
            return self
        threading.Thread(target=self._read, args=(self._process,), daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

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

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            try:
                clock, watts = (float(field) for field in line.split(","))
            except ValueError:  # "[N/A]", or a line cut at the end
                continue
            self._samples.append((time.perf_counter(), clock, watts))
