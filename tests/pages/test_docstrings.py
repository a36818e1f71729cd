"""Docstrings as the reference of the site shows them."""

import importlib.util
from pathlib import Path

import pytest

pytest.importorskip("griffe", reason="needs the group `docs`, which CI installs")
PATH = Path(__file__).parents[2] / "pages" / "docstrings.py"

DOCSTRING = """Returns x < y, where `x < y` is code.

    an equation <x, y>

Args:
  x, y: two numbers,
    finite ones.
  scale: a number.
Raises:
  ValueError: x is NaN."""


def test_sections_arguments_and_tags():
    spec = importlib.util.spec_from_file_location("docstrings", PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    import griffe

    text = module.as_google_has_it(DOCSTRING)
    prose, arguments, errors = griffe.parse(griffe.Docstring(text), "google")
    assert prose.value == (
        "Returns x &lt; y, where `x < y` is code.\n\n    an equation <x, y>"
    )
    described = {argument.name: argument.description for argument in arguments.value}
    two = "two numbers,\nfinite ones."
    assert described == {"x": two, "y": two, "scale": "a number."}
    assert [error.annotation for error in errors.value] == ["ValueError"]
