"""Runs of the scripts in the process of a test."""

import pytest

from sparsejax.tuning import timing


@pytest.fixture(autouse=True)
def timed_briefly(monkeypatch):
    """Benchmarks whose figures no test looks at."""
    monkeypatch.setattr(timing, "SECONDS", 0.002)
    monkeypatch.setattr(timing, "SETTLE_SECONDS", 0.0)
