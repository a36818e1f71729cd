"""Clock and power: read while something runs, and absent where nothing can be read."""

import time

from experiments.bench.power import Draw, PowerSampler
from sparsejax.tuning.timing import time_queued

FAKE = """#!/bin/sh
case "$*" in *--id=1*) clock=1410 ;; *) clock=300 ;; esac
while :; do echo "$clock, 699.5"; echo "[N/A], 0"; sleep 0.01; done
"""


def test_a_span_has_the_medians_of_what_was_read_of_the_own_gpu(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    (tmp_path / "nvidia-smi").write_text(FAKE)
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with PowerSampler() as power:
        start = time.perf_counter()
        time.sleep(1.0)
        end = time.perf_counter()
    assert power.between(start, end) == Draw(clock_mhz=1410, watts=699.5)
    assert power.between(end + 10, end + 11) is None


def test_without_the_command_nothing_is_read(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
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
