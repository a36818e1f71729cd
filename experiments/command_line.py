"""The command line of a script in this folder: its settings, its errors, its status."""

import shlex
from collections.abc import Callable, Sequence
from typing import Any

import tyro

from sparsejax.terminal import console


def run_script[Config](
    main: Callable[[Config, str], Any],
    settings: type[Config],
    arguments: Sequence[str],
    *,
    script: str,
    description: str | None,
) -> int:
    """Reads the settings of a script from its arguments, calls `main` with them and
    the command, and returns the exit status. A ValueError, ImportError or OSError is
    printed in one line.

    Args:
      main: the script's function of its settings and its command.
      settings: the dataclass of the settings.
      arguments: the words that follow the script's name.
      script: the path of the script in the repository.
      description: what the script's help says, its docstring.
    """
    console.quiet_orbax()
    config = tyro.cli(settings, args=arguments, description=description, prog=script)
    try:
        main(config, shlex.join([script, *arguments]))
    except (ValueError, ImportError, OSError) as error:
        return console.fail(error)
    return 0
