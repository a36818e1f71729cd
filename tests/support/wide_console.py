"""Consoles that print as on a wide terminal."""

import pytest
from rich.console import Console

from sparsejax.terminal import console


class Wide:
    """A console of 200 columns on whatever standard output is at the time."""

    is_terminal = False

    def __init__(self, *, stderr: bool) -> None:
        self.stderr = stderr

    def __getattr__(self, name):
        made = Console(highlight=False, stderr=self.stderr, width=200)
        return getattr(made, name)


def widen(patch: pytest.MonkeyPatch) -> None:
    """Tables of 200 columns, captured anew by each test."""
    patch.setattr(console, "STDOUT", Wide(stderr=False))
    patch.setattr(console, "STDERR", Wide(stderr=True))
