"""The command `sparsejax` in the process of a test."""

from sparsejax.command import main


def run_train(arguments: list[str]) -> int:
    """The exit status of `sparsejax train ARGUMENTS`."""
    return main.run(["train", *arguments])
