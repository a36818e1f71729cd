"""The command `sparsejax`: finds the subcommand, runs it, says what went wrong.

A subcommand is a module with `run(arguments)`, which does the work and raises what
cannot be done; it is registered in `COMMANDS`, and imported when it is called.
"""

import importlib
import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

import jax

from sparsejax.distributed.processes import ProcessLost
from sparsejax.terminal import console
from sparsejax.training.progress import NonFiniteLoss

COMMANDS = {
    "train": "a run: text to dense weights, with a sparse phase in its middle",
    "plan": "what a run would be and cost, without running it",
    "tune": "the GEMMs of a run timed on the GPU here, for this run and later ones",
    "explain": "what runs the six GEMMs of an FFN on a GPU, and why",
    "eval": "loss and bits per byte of a model on held-out text; tasks of a harness",
    "export": "the model of a run as a Hugging Face folder",
    "sample": "text from the model of a run or of a Hugging Face folder",
}
"""The subcommands by name, with what each does. The module of `name` is
`sparsejax.command.name`."""


def usage() -> str:
    """Returns what `sparsejax --help` says."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {does}" for name, does in COMMANDS.items()]
    return "\n".join(
        [
            "usage: sparsejax COMMAND ...",
            "",
            *lines,
            "",
            "sparsejax COMMAND --help says what a command takes.",
        ]
    )


def run(arguments: Sequence[str]) -> int:
    """Runs a subcommand and returns the exit status: 1 where it could not do what it
    was asked for, 2 where there is no such subcommand."""
    name, *rest = arguments or ["--help"]
    if name in ("-h", "--help"):
        print(usage())
        return 0
    if name not in COMMANDS:
        print(f"sparsejax has no command {name!r}\n\n{usage()}", file=sys.stderr)
        return 2
    console.quiet_orbax()
    try:
        importlib.import_module(f"sparsejax.command.{name}").run(rest)
    except Exception as error:
        if isinstance(error, BrokenPipeError):
            # Nobody reads our output any more, and what is left of it would fail again
            # at the end of the process. Of a help enough was read; all else has failed.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            if {"-h", "--help"} & set(rest):
                return 0
        reason = reason_of(error, name)
        if reason is None:
            raise
        return console.fail(error, reason)
    return 0


EXPECTED = (
    ValueError,
    NotImplementedError,
    ImportError,
    OSError,
    NonFiniteLoss,
    ProcessLost,
)
"""The errors whose words are for the user; all others are mistakes of ours."""


def reason_of(error: Exception, command: str) -> str | None:
    """Returns the line that tells the user why a command failed; None where the error
    is none that the user could do anything about."""
    if isinstance(error, EXPECTED):
        return str(error)
    if not isinstance(error, MemoryError | jax.errors.JaxRuntimeError):
        return None
    reason = next(iter(str(error).splitlines()), "").rstrip(".")
    if not isinstance(error, MemoryError) and "out of memory" not in reason.lower():
        return None
    if command == "eval":
        return f"{reason}; a lower --batch-size or --sequence-length needs less"
    if command == "sample":
        return f"{reason}; fewer prompts or --tokens need less"
    return (
        f"{reason}; `sparsejax plan` says what a run needs, and fewer "
        f"--sequences-per-device (or more --micro-batches), --model.remat full or a "
        f"mesh of more devices need less"
    )


def leave(status: int) -> NoReturn:
    """Ends this process with an exit status. After an error it ends at once, without
    the wait for all to end together: the others must notice, and one of them may be
    waiting for this one."""
    if status != 0 and jax.distributed.is_initialized():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


def main() -> NoReturn:
    """The entry point of the console script."""
    # Ctrl-C ends it without a traceback. As an exception it could come in a function
    # that JAX calls from the garbage collector, where Python would only print it.
    # Where a shell has it ignored, as in the background of a script, it stays so.
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    leave(run(sys.argv[1:]))
