"""The code that a figure, or a run, comes from."""

import subprocess
from pathlib import Path


def commit() -> str | None:
    """Returns the commit of the checkout that this code lies in, with "+" where files
    differ from it; None where it lies in none, as when a wheel was installed."""
    here = Path(__file__)
    git = ["git", "-C", str(here.parent)]
    try:
        # An environment may lie in a checkout of something else.
        tracked = [*git, "ls-files", "--error-unmatch", here.name]
        subprocess.run(tracked, capture_output=True, check=True)
        describe = [*git, "describe", "--always", "--dirty=+", "--exclude=*"]
        done = subprocess.run(describe, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
