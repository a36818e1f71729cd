"""Runs tests/on_eight_devices in processes with eight virtual devices."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.devices.xla_flags import EIGHT_DEVICES

ROOT = Path(__file__).parent.parent
FILES = sorted((ROOT / "tests" / "on_eight_devices").glob("test_*.py"))
# Every process imports and collects for some seconds of its own, and what one file has
# traced the next one finds: two, for the workers of a machine of two cores.
HALVES = FILES[0::2], FILES[1::2]


@pytest.mark.parametrize("files", HALVES, ids=["odd", "even"])
def test_on_eight_devices(files):
    flags = f"{os.environ.get('XLA_FLAGS', '')} {EIGHT_DEVICES}".strip()
    # Not the outer run's worker: pytest-xdist names it in the environment.
    environment = {k: v for k, v in os.environ.items() if "PYTEST" not in k}
    environment |= {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-rp", "--durations=9"]
    ended = subprocess.run(
        [*command, *map(str, files)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stdout[-8000:] + ended.stderr[-2000:]
    # A file from which nothing is collected must not pass for one that passed.
    for file in files:
        assert f"PASSED {file.relative_to(ROOT)}::" in ended.stdout, file
    print(ended.stdout)
