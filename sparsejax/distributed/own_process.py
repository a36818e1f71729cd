"""Calls of functions in processes of their own, one after the other or side by side."""

import os
import signal
import threading
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection, wait
from typing import Self, cast

from sparsejax.distributed.stop_signals import stop_signals


class Terminated(Exception):
    """SIGTERM or SIGINT came before the function that runs in its own process could see
    it."""


def in_own_process[**P, T](
    function: Callable[P, T], *arguments: P.args, **options: P.kwargs
) -> T:
    """Returns `function(*arguments, **options)`, run in a new process that ends with
    it.

    The process leaves nothing behind for what is called next: neither memory, nor
    compiled programs, nor the lower clock of a GPU whose sparse tensor cores have been
    used. SIGTERM and SIGINT (Ctrl-C) are passed on to it as SIGTERM, and it gets one
    when this process dies.

    Raises:
      Terminated: one of them ended it.
      ChildProcessError: it died of something else.
      Exception: what `function` raises.
    """
    call = _Call(function, arguments, options)
    with _stop_passed_on([call]) as arrived:
        call.start(arrived)
        return call.result(arrived)


class SideBySide[K, T]:
    """Functions that run at the same time, each in a process of its own and under a
    key. Use it as a context manager: inside, SIGTERM and SIGINT are passed on, and
    `terminated` has to be asked before another one is started."""

    def __init__(self) -> None:
        self._calls: dict[K, _Call[T]] = {}
        self._by_key = ExitStack()
        self._arrived: list[int] = []

    def __enter__(self) -> Self:
        passed_on = _stop_passed_on(self._calls.values())
        self._arrived = self._by_key.enter_context(passed_on)
        return self

    def __exit__(self, *_: object) -> None:
        for call in self._calls.values():
            call.process.terminate()
        for call in self._calls.values():
            call.process.join()
        self._by_key.close()

    def __len__(self) -> int:
        """Returns how many functions are running."""
        return len(self._calls)

    @property
    def terminated(self) -> bool:
        """Whether SIGTERM or SIGINT has come."""
        return bool(self._arrived)

    def start(self, key: K, function: Callable[..., T], *arguments: object) -> None:
        """Calls `function(*arguments)` in a new process."""
        call = self._calls[key] = _Call(function, arguments, {})
        call.start(self._arrived)

    def first_ended(self) -> tuple[K, T | Exception]:
        """Waits until one of the functions has ended; returns its key, and its result
        or the error that `in_own_process` would raise."""
        ended = wait([call.answers for call in self._calls.values()])
        key = next(key for key, of in self._calls.items() if of.answers in ended)
        call = self._calls.pop(key)
        try:
            return key, call.result(self._arrived)
        except Exception as error:
            return key, error


class _Call[T]:
    """A function in a process of its own."""

    def __init__(
        self, function: Callable[..., T], arguments: tuple, options: Mapping
    ) -> None:
        context = get_context("spawn")
        self.name = function.__name__
        self.answers, self._answer = context.Pipe(duplex=False)
        self.process = context.Process(
            target=_answer, args=(self._answer, function, arguments, options)
        )

    def start(self, arrived: Sequence[int]) -> None:
        """Starts the process; `arrived` is not empty once it is to stop."""
        self.process.start()
        self._answer.close()  # so that the process has the only one; its death is seen
        if arrived:
            self.process.terminate()

    def result(self, arrived: Sequence[int]) -> T:
        """Returns the function's result after the end of its process; raises as
        `in_own_process`."""
        succeeded, result = None, None
        with suppress(EOFError):
            succeeded, result = self.answers.recv()
        self.process.join()
        if succeeded is None:
            if arrived:
                raise Terminated
            raise ChildProcessError(
                f"process {self.process.pid}, which ran {self.name}, has died "
                f"(status {self.process.exitcode}); was it killed, or was memory short?"
            )
        if not succeeded:
            assert isinstance(result, Exception)
            raise result
        return cast(T, result)


def _answer(
    answer: Connection, function: Callable, arguments: tuple, options: Mapping
) -> None:
    # A terminal sends it to all its processes, and the parent passes it on.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        message = True, function(*arguments, **options)
    except Exception as error:  # the caller's, whatever it is
        error.add_note(f"in process {os.getpid()}:\n{traceback.format_exc()}")
        message = False, error
    with suppress(BrokenPipeError):  # nobody waits for it any more
        answer.send(message)


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)


@contextmanager
def _stop_passed_on(calls: Collection["_Call"]) -> Iterator[list[int]]:
    """Yields a list that is empty until SIGTERM or SIGINT (Ctrl-C) arrives; the
    processes of all calls get SIGTERM then."""
    arrived: list[int] = []

    def pass_on(number: int) -> None:
        arrived.append(number)
        for call in list(calls):
            if call.process.pid is not None:
                call.process.terminate()

    with stop_signals(pass_on):
        yield arrived
