"""Whole runs that tests stop and resume, and GPUs that they pretend."""

import pytest

from pallas_kernels import tuning
from sparsejax.training import train
from tests.support.devices import hopper
from tests.support.whole_runs import quick_runs, shared_run, undisturbed


@pytest.fixture(scope="module")
def quick_loop():
    """Runs in processes of their own are in test_train."""
    with quick_runs() as patch:
        patch.setattr(train, "Run", shared_run)
        yield


@pytest.fixture(scope="module")
def uninterrupted(quick_loop, text, tmp_path_factory):
    """By variant, a run that nothing disturbed."""
    return undisturbed(text, tmp_path_factory)


@pytest.fixture
def untuned(monkeypatch):
    """A GPU for which no tuning result is known."""
    monkeypatch.setattr(tuning, "entries", lambda kind: {})


@pytest.fixture
def calls(untuned, monkeypatch):
    """The kernels called from now, with their results computed plainly."""
    return hopper.pretend(monkeypatch)
