"""A function in a process of its own: its result, its errors, its end."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from experiments.own_process import Terminated, in_own_process


def where(text: str, *, times: int) -> tuple[int, str]:
    return os.getpid(), times * text


def test_returns_what_the_function_returns_in_another_process():
    process, text = in_own_process(where, "ab", times=2)
    assert text == "abab" and process != os.getpid()
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


def fail(reason: str) -> None:
    raise ValueError(reason)


def test_raises_what_the_function_raises():
    with pytest.raises(ValueError, match="no such preset"):
        in_own_process(fail, "no such preset")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_process_that_dies_is_told_apart():
    with pytest.raises(ChildProcessError, match=r"which ran die, has died; was it k"):
        in_own_process(die)


def wait_for_sigterm(ready: Path, *, handled: bool) -> str:
    arrived = []
    if handled:
        signal.signal(signal.SIGTERM, lambda *_: arrived.append("stopped"))
    ready.touch()
    while not arrived:
        time.sleep(0.01)
    return arrived[0]


@pytest.mark.parametrize("handled", [True, False])
def test_sigterm_reaches_the_function(handled, tmp_path):
    ready = tmp_path / "ready"

    def terminate():
        while not ready.exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    threading.Thread(target=terminate).start()
    if handled:
        assert in_own_process(wait_for_sigterm, ready, handled=True) == "stopped"
    else:
        with pytest.raises(Terminated):
            in_own_process(wait_for_sigterm, ready, handled=False)
    assert signal.getsignal(signal.SIGTERM) == before
