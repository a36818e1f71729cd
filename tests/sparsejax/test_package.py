"""The package as a whole: it imports where it is not installed, and has one version."""

import os
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import numpy as np

import sparsejax

LOOK = """
from importlib.metadata import PackageNotFoundError, version
import sparsejax
try:
    version("sparsejax")
except PackageNotFoundError:
    print(sparsejax.__file__, sparsejax.__version__)
"""


def test_a_checkout_that_is_not_installed_imports(tmp_path):
    package, tree = Path(sparsejax.__file__).parent, tmp_path / "tree"
    ignore = shutil.ignore_patterns("__pycache__")
    for name in ("sparsejax", "pallas_kernels"):
        shutil.copytree(package.parent / name, tree / name, ignore=ignore)
    # All that is installed but the package: neither its metadata nor the file that puts
    # this checkout on the path.
    dependencies = tmp_path / "dependencies"
    dependencies.mkdir()
    for installed in Path(np.__file__).parent.parent.iterdir():
        if "sparsejax" not in installed.name:
            (dependencies / installed.name).symlink_to(installed)
    ended = subprocess.run(
        [sys.executable, "-S", "-c", LOOK],  # -S: no other place for what is installed
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": f"{tree}{os.pathsep}{dependencies}"},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    expected = [str(tree / "sparsejax" / "__init__.py"), sparsejax.__version__]
    assert ended.stdout.split() == expected


def test_the_version_is_the_installed_one():
    assert sparsejax.__version__ == version("sparsejax")
