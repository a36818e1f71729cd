"""All names without a public one that the kernels take from jax are taken in one
file."""

import ast
import inspect
from pathlib import Path

import pytest

import pallas_kernels
from pallas_kernels.sm90 import mosaic_internals

PACKAGE = Path(pallas_kernels.__file__).parent
UNNAMED = ("jax._src", "jax.experimental.mosaic")
THE_ONE = Path(mosaic_internals.__file__)
OTHERS = sorted(path for path in PACKAGE.rglob("*.py") if path != THE_ONE)


def imported(path: Path) -> set[str]:
    """Returns the full names of all modules, and of what is imported from them."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def unnamed_parts(path: Path) -> set[str]:
    return {name for name in imported(path) if name.startswith(UNNAMED)}


@pytest.mark.parametrize("path", OTHERS, ids=lambda path: path.stem)
def test_no_other_file_imports_what_jax_may_move(path):
    assert unnamed_parts(path) == set()


def test_the_one_file_does():
    assert unnamed_parts(THE_ONE)


@pytest.mark.newest_jax
def test_jax_still_has_what_is_taken():
    """Most names are looked up when a kernel is built, not at the import."""
    source = ast.parse(inspect.getsource(mosaic_internals))
    modules = {"utils", "mma_utils", "fragmented_array", "_wgmma"}
    used = {
        (node.value.id, node.attr)
        for node in ast.walk(source)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id in modules
    }
    assert {module for module, _ in used} == modules
    for module, name in used:
        assert hasattr(getattr(mosaic_internals, module), name), f"{module}.{name}"
