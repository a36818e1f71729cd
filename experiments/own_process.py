"""Calls a function in a process of its own."""

import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess


class Terminated(Exception):
    """SIGTERM came before the function could see it."""


def in_own_process[**P, T](
    function: Callable[P, T], *arguments: P.args, **options: P.kwargs
) -> T:
    """`function(*arguments, **options)`, in a new process that ends with it.

    Nothing of it is left for what is called next: memory, compiled programs, or the
    lower clock of a GPU whose sparse tensor cores have been used. SIGTERM is passed on
    to it, and it gets one when this process dies.

    Raises:
      Terminated: SIGTERM ended it.
      ChildProcessError: it died of something else.
      Exception: what `function` raises.
    """
    context = get_context("spawn")
    answers, answer = context.Pipe(duplex=False)
    process = context.Process(
        target=_answer, args=(answer, function, arguments, options)
    )
    with _sigterm_passed_on(process) as arrived:
        process.start()
        answer.close()  # so that the process has the only one, and its death is seen
        if arrived:
            process.terminate()
        succeeded, result = None, None
        with suppress(EOFError):
            succeeded, result = answers.recv()
        process.join()
    if succeeded is None:
        if arrived:
            raise Terminated
        raise ChildProcessError(
            f"process {process.pid}, which ran {function.__name__}, has died "
            f"(status {process.exitcode}); was it killed, or was memory short?"
        )
    if not succeeded:
        assert isinstance(result, Exception)
        raise result
    return result


def _answer(
    answer: Connection, function: Callable, arguments: tuple, options: Mapping
) -> None:
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
def _sigterm_passed_on(process: SpawnProcess) -> Iterator[list[int]]:
    """Yields a list that is empty until one arrives."""
    arrived: list[int] = []

    def pass_on(number: int, _: object) -> None:
        arrived.append(number)
        if process.pid is not None:
            process.terminate()

    previous = signal.signal(signal.SIGTERM, pass_on)
    try:
        yield arrived
    finally:
        signal.signal(signal.SIGTERM, previous)
