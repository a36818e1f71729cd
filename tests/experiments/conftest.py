"""Runs of the scripts in the process of a test."""

import pytest

from sparsejax.tuning import timing
from tests.support.whole_runs import quick_runs
from tests.support.wide_console import widen


@pytest.fixture(autouse=True)
def timed_briefly(monkeypatch):
    """Benchmarks whose figures no test looks at."""
    monkeypatch.setattr(timing, "SECONDS", 0.002)
    monkeypatch.setattr(timing, "SETTLE_SECONDS", 0.0)


@pytest.fixture(scope="module")
def quick():
    """Runs that print as on a wide terminal."""
    with quick_runs() as patch:
        widen(patch)
        yield
