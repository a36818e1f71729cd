"""A GPU that was never tuned, and one that is pretended."""

import pytest

import hopper
from pallas_kernels import tuning


@pytest.fixture
def untuned(monkeypatch):
    monkeypatch.setattr(tuning, "entries", lambda kind: {})


@pytest.fixture
def calls(untuned, monkeypatch):
    """The kernels called from now, with their results computed plainly."""
    return hopper.pretend(monkeypatch)
