"""The provenance of a figure: the commit that it comes from."""

import subprocess


def commit() -> str | None:
    """Returns the commit that was run, with "+" where files differ from it."""
    command = ["git", "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
