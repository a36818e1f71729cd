"""Signals that ask a run to stop."""

import signal
import threading

import pytest

from sparsejax.distributed.stop_signals import stop_signals


def test_sigint_asks_once_and_then_does_what_it_did():
    came: list[int] = []
    with stop_signals(came.append) as handled:
        assert handled
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
    assert came == [signal.SIGTERM, signal.SIGINT, signal.SIGTERM]
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_a_signal_that_is_ignored_stays_so():
    came: list[int] = []
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with stop_signals(came.append):
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN and not came
    finally:
        signal.signal(signal.SIGINT, before)


def test_beside_the_main_thread_the_host_handles_signals():
    handled = []

    def enter():
        with stop_signals(print) as here:
            handled.append(here)

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert handled == [False] and signal.getsignal(signal.SIGTERM) == before
