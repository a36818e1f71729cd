"""The signals that ask a run to stop: SIGTERM, and SIGINT, which is Ctrl-C."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

STOPS = (signal.SIGTERM, signal.SIGINT)


@contextmanager
def stop_signals(stop: Callable[[int], object]) -> Iterator[bool]:
    """Calls `stop` with the number of a SIGTERM or SIGINT that arrives inside, for
    SIGINT once, and not where it is ignored. Yields whether it does: only in the main
    thread, for elsewhere the host program handles signals."""
    if threading.current_thread() is not threading.main_thread():
        yield False
        return
    previous = {of: signal.getsignal(of) or signal.SIG_DFL for of in STOPS}

    def arrived(number: int, _: object) -> None:
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, previous[signal.SIGINT])
        stop(number)

    for of, handler in previous.items():
        if handler is not signal.SIG_IGN:
            signal.signal(of, arrived)
    try:
        yield True
    finally:
        for of, handler in previous.items():
            signal.signal(of, handler)
