"""Clock and power: read while something runs, and absent where nothing can be read."""

import time
from itertools import count
from types import SimpleNamespace

import pytest

from experiments.bench import power as power_module
from experiments.bench.power import Draw, PowerSampler
from sparsejax.tuning.timing import time_queued


class FakeNvml:
    """NVML of two GPUs, every third reading of which fails in one way or the other."""

    NVML_CLOCK_SM, NVML_FI_DEV_POWER_INSTANT, NVML_SUCCESS = 1, 186, 0

    class NVMLError(Exception):
        pass

    def __init__(self, *, has_driver: bool = True) -> None:
        self.has_driver = has_driver
        self.is_open = False
        self.reading = count()

    def nvmlInit(self):
        if not self.has_driver:
            raise self.NVMLError
        self.is_open = True

    def nvmlShutdown(self):
        self.is_open = False

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetHandleByUUID(self, name: str) -> int:
        return {"GPU-first": 0, "GPU-second": 1}[name]

    def nvmlDeviceGetClockInfo(self, gpu: int, kind: int) -> int:
        assert self.is_open and kind == self.NVML_CLOCK_SM
        if next(self.reading) % 3 == 0:
            raise self.NVMLError
        return [300, 1410][gpu]

    def nvmlDeviceGetFieldValues(self, gpu: int, fields: list[int]) -> list:
        assert fields == [self.NVML_FI_DEV_POWER_INSTANT]
        if next(self.reading) % 4 == 0:
            value = SimpleNamespace(uiVal=0)
            return [SimpleNamespace(nvmlReturn=3, value=value)]
        return [SimpleNamespace(nvmlReturn=0, value=SimpleNamespace(uiVal=699_500))]


@pytest.mark.parametrize("visible", ["1,0", "GPU-second"])
def test_a_span_has_the_medians_of_what_was_read_of_the_own_gpu(visible, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    nvml = FakeNvml()
    monkeypatch.setattr(power_module, "nvml", nvml)
    with PowerSampler() as power:
        start = time.perf_counter()
        time.sleep(0.5)
        end = time.perf_counter()
    assert power.between(start, end) == Draw(clock_mhz=1410, watts=699.5)
    assert power.between(end + 10, end + 11) is None
    assert not nvml.is_open


@pytest.mark.parametrize("nvml", [None, FakeNvml(has_driver=False)])
def test_without_the_package_or_a_driver_nothing_is_read(nvml, monkeypatch):
    monkeypatch.setattr(power_module, "nvml", nvml)
    with PowerSampler() as power:
        assert power.between(0, time.perf_counter()) is None


def test_queued_calls_are_timed_one_by_one_and_their_spans_kept():
    calls = {"fast": lambda: time.sleep(0.001), "slow": lambda: time.sleep(0.02)}
    timings, spans = time_queued(
        calls, baseline="fast", rounds=3, seconds=0.02, settle_seconds=0.01
    )
    fast, slow = timings
    # A busy machine sleeps longer, never shorter.
    assert fast.ratio == 1.0 and slow.ratio > 1.5
    assert fast.time_ms >= 1 and slow.time_ms >= 20
    assert {name: len(found) for name, found in spans.items()} == {"fast": 3, "slow": 3}
    assert all(start < end for found in spans.values() for start, end in found)
