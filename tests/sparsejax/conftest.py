"""Whole runs of the training loop, for the tests that stop and resume them."""

import pytest

from sparsejax import loop
from tests.whole_runs import quick_runs, shared_run, undisturbed


@pytest.fixture(scope="module")
def quick_loop():
    """Runs in processes of their own are in test_pretrain."""
    with quick_runs() as patch:
        patch.setattr(loop, "Run", shared_run)
        yield


@pytest.fixture(scope="module")
def uninterrupted(quick_loop, text, tmp_path_factory):
    """By variant, a run that nothing disturbed."""
    return undisturbed(text, tmp_path_factory)
