"""The command `sparsejax`: finds the subcommand, runs it, says what went wrong.

A subcommand is a module with `run(arguments)`, which does the work and raises what
cannot be done; it is registered in `COMMANDS`, and imported when it is called.
"""

import importlib
import logging
import sys
from collections.abc import Sequence

COMMANDS = {
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
    # Where reading a checkpoint fails orbax logs screens of what our one line says.
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    try:
        importlib.import_module(f"sparsejax.command.{name}").run(rest)
    except (ValueError, ImportError, NotImplementedError, OSError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


def main() -> None:
    """The entry point of the console script."""
    sys.exit(run(sys.argv[1:]))
