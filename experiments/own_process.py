"""Calls a function in a process of its own."""

import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import get_context


class Terminated(Exception):
    """SIGTERM came before the function could see it."""


def in_own_process[**P, T](
    function: Callable[P, T], *arguments: P.args, **options: P.kwargs
) -> T:
    """`function(*arguments, **options)`, in a new process that ends with it.

    Nothing of it is left for what is called next: memory, compiled programs, or the
    lower clock of a GPU whose sparse tensor cores have been used. SIGTERM is passed on
    to it.

    Raises:
      Terminated: SIGTERM ended it.
      ChildProcessError: it died of something else.
      Exception: what `function` raises.
    """
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        process = pool.submit(os.getpid).result()
        with _sigterm_passed_on(process) as arrived:
            try:
                return pool.submit(function, *arguments, **options).result()
            except BrokenProcessPool as error:
                if arrived:
                    raise Terminated from error
                raise ChildProcessError(
                    f"process {process}, which ran {function.__name__}, has died; was "
                    f"it killed, or was memory short?"
                ) from error


@contextmanager
def _sigterm_passed_on(process: int) -> Iterator[list[int]]:
    """Yields a list that is empty until one arrives."""
    arrived: list[int] = []

    def pass_on(number: int, _: object) -> None:
        arrived.append(number)
        os.kill(process, number)

    previous = signal.signal(signal.SIGTERM, pass_on)
    try:
        yield arrived
    finally:
        signal.signal(signal.SIGTERM, previous)
