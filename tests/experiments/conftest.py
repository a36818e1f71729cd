"""Runs of the scripts in the process of a test."""

import pytest

from tests.support.whole_runs import quick_runs
from tests.support.wide_console import widen


@pytest.fixture(scope="module")
def quick():
    """Runs that print as on a wide terminal."""
    with quick_runs() as patch:
        widen(patch)
        yield
