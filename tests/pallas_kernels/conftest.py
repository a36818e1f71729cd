"""A machine on which nobody has tuned anything."""

import pytest

from pallas_kernels import tuning, tuning_cache


@pytest.fixture
def no_tables(tmp_path, monkeypatch):
    """The package ships no table, and the user's cache folder is empty."""
    monkeypatch.setattr(tuning, "FOLDER", tmp_path / "tuned")
    monkeypatch.setattr(tuning, "_given", {})
    monkeypatch.setenv(tuning_cache.VARIABLE, str(tmp_path / "cache"))
    tuning.forget()
    yield
    tuning.forget()
