"""Runs tests/on_eight_devices, each file in a process with eight virtual devices."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.devices.xla_flags import EIGHT_DEVICES

ROOT = Path(__file__).parent.parent
FILES = sorted((ROOT / "tests" / "on_eight_devices").glob("test_*.py"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_on_eight_devices(file):
    flags = f"{os.environ.get('XLA_FLAGS', '')} {EIGHT_DEVICES}".strip()
    # Not the outer run's worker: pytest-xdist names it in the environment.
    environment = {k: v for k, v in os.environ.items() if "PYTEST" not in k}
    environment |= {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "0", "--durations=5", str(file)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stdout[-8000:] + ended.stderr[-2000:]
    # A file from which nothing is collected must not pass for one that passed.
    assert " passed" in ended.stdout
    print(ended.stdout)
