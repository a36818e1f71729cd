"""A function in a process of its own: its result, its errors, its end."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from sparsejax.distributed.own_process import SideBySide, Terminated, in_own_process


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
    with pytest.raises(ValueError, match="no such preset") as caught:
        in_own_process(fail, "no such preset")
    (note,) = caught.value.__notes__
    assert "raise ValueError(reason)" in note


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_process_that_dies_is_told_apart():
    with pytest.raises(ChildProcessError, match=r"ran die, has died \(status -9\)"):
        in_own_process(die)


PARENT = """
from pathlib import Path
from sparsejax.distributed.own_process import in_own_process
from tests.sparsejax.distributed.test_own_process import wait_for_sigterm
if __name__ == "__main__":
    in_own_process(wait_for_sigterm, Path({ready!r}), handled={handled})
"""


@pytest.mark.parametrize("handled", [True, False])
def test_it_ends_with_the_process_that_called_it(handled, tmp_path):
    ready, program = tmp_path / "ready", tmp_path / "parent.py"
    program.write_text(PARENT.format(ready=str(ready), handled=handled))
    root = str(Path(__file__).parents[3])
    parent = subprocess.Popen(
        [sys.executable, str(program)],
        env=os.environ | {"PYTHONPATH": root},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    until(ready.exists)
    parent.kill()
    # Both have the other end of the pipe.
    assert parent.communicate(timeout=60)[0] == b""
    process = int(ready.read_text())

    def has_ended() -> bool:
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            return True
        # Nobody may be there to ask for its status.
        return "Z" in Path(f"/proc/{process}/stat").read_text().split(")")[1]

    until(has_ended)


def until(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def wait_for_sigterm(ready: Path, *, handled: bool) -> str:
    arrived = []
    if handled:
        signal.signal(signal.SIGTERM, lambda *_: arrived.append("stopped"))
    ready.with_suffix(".new").write_text(str(os.getpid()))
    ready.with_suffix(".new").rename(ready)
    while not arrived:
        time.sleep(0.01)
    return arrived[0]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("handled", [True, False])
def test_a_signal_to_stop_reaches_the_function_as_sigterm(handled, number, tmp_path):
    ready = tmp_path / "ready"

    def stop():
        until(ready.exists)
        # A terminal sends Ctrl-C to both.
        if number == signal.SIGINT:
            os.kill(int(ready.read_text()), number)
        os.kill(os.getpid(), number)

    before = signal.getsignal(number)
    threading.Thread(target=stop).start()
    if handled:
        assert in_own_process(wait_for_sigterm, ready, handled=True) == "stopped"
    else:
        with pytest.raises(Terminated):
            in_own_process(wait_for_sigterm, ready, handled=False)
    assert signal.getsignal(number) == before


def meet(own: Path, other: Path) -> str:
    """Ends when the other one has come as well."""
    own.touch()
    until(other.exists)
    return own.name


def test_functions_run_at_the_same_time_and_end_one_by_one(tmp_path):
    a, b = tmp_path / "a", tmp_path / "b"
    ended = {}
    with SideBySide[int, str]() as calls:
        calls.start(1, meet, a, b)
        calls.start(2, meet, b, a)
        calls.start(3, fail, "no such preset")
        calls.start(4, die)
        assert len(calls) == 4
        while len(calls):
            key, ended[key] = calls.first_ended()
    assert (ended[1], ended[2]) == ("a", "b")
    assert isinstance(ended[3], ValueError) and "no such preset" in str(ended[3])
    assert isinstance(ended[4], ChildProcessError) and "status -9" in str(ended[4])


def test_sigterm_reaches_all_that_run(tmp_path):
    ready = [tmp_path / name for name in ("handled", "not")]

    def terminate():
        until(lambda: all(path.exists() for path in ready))
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    threading.Thread(target=terminate).start()
    with SideBySide[str, str]() as calls:
        calls.start("handled", wait_and_handle, ready[0])
        calls.start("not", wait_and_die, ready[1])
        ended = dict(calls.first_ended() for _ in range(2))
        assert calls.terminated
    assert ended["handled"] == "stopped"
    assert isinstance(ended["not"], Terminated)
    assert signal.getsignal(signal.SIGTERM) == before


def wait_and_handle(ready: Path) -> str:
    return wait_for_sigterm(ready, handled=True)


def wait_and_die(ready: Path) -> str:
    return wait_for_sigterm(ready, handled=False)
