"""Processes that find each other and exchange messages; pairs are in tests/faults."""

import jax
import pytest

from sparsejax.distributed import processes
from sparsejax.distributed.processes import Exchange, join


@pytest.fixture
def initialised(monkeypatch):
    """The arguments that `jax.distributed.initialize` got; it does nothing."""
    got = {}
    monkeypatch.setattr(jax.distributed, "initialize", got.update)
    for name in ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID"):
        monkeypatch.delenv(name, raising=False)
    return got


def test_the_environment_says_how_many_and_which(initialised, monkeypatch):
    monkeypatch.setenv("JAX_NUM_PROCESSES", "4")
    monkeypatch.setenv("JAX_PROCESS_ID", "3")
    join(heartbeat_seconds=7)
    assert initialised == {
        "num_processes": 4,
        "process_id": 3,
        "heartbeat_timeout_seconds": 7,
    }


def test_a_launcher_says_it_itself(initialised):
    join()
    assert initialised["num_processes"] is None is initialised["process_id"]


@pytest.mark.parametrize(
    ("count", "index", "message"),
    [
        ("two", "0", "JAX_NUM_PROCESSES='two' is not a number from 1"),
        ("0", "0", "JAX_NUM_PROCESSES='0' is not a number from 1"),
        ("2", "-1", "JAX_PROCESS_ID='-1' is not a number from 0"),
        ("2", "2", "JAX_PROCESS_ID=2 is not below JAX_NUM_PROCESSES=2"),
    ],
)
def test_nonsense_in_the_environment_is_named(
    count, index, message, initialised, monkeypatch
):
    monkeypatch.setenv("JAX_NUM_PROCESSES", count)
    monkeypatch.setenv("JAX_PROCESS_ID", index)
    with pytest.raises(ValueError, match=message):
        join()
    assert not initialised


def test_processes_that_do_not_find_each_other_are_told_how(monkeypatch):
    def fail(**_):
        raise RuntimeError("deadline exceeded")

    monkeypatch.setattr(jax.distributed, "initialize", fail)
    with pytest.raises(ValueError, match=r"deadline exceeded.*JAX_COORDINATOR_ADDRESS"):
        join()


def test_one_process_hears_itself():
    assert Exchange("test").gather("key", "text", timeout_seconds=1) == ["text"]


def test_several_processes_need_a_coordinator(monkeypatch):
    monkeypatch.setattr(processes.jax, "process_count", lambda: 2)
    with pytest.raises(RuntimeError, match=r"2 processes.*initialize was not called"):
        Exchange("test").gather("key", "text", timeout_seconds=1)
