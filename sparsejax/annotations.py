"""The values that an annotation allows: types, `Literal`s, unions of both, and tuples
of any length whose entries are one of them.

Python keeps no caller to an annotation, and a choice that nothing knows falls through
the branches that know the others. Where a choice is given, it is checked here.
"""

from collections.abc import Mapping
from functools import cache
from numbers import Integral
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

MOST_SHOWN = 400
"""The most characters of a value that a message shows; of others it shows the type."""

PYTHON_NAMES = {
    int: "an int",
    float: "a float",
    str: "a str",
    bool: "True or False",
    NoneType: "None",
}


def check_value(name: str, value: Any, annotation: Any) -> None:
    """Raises ValueError where `value`, an argument `name`, is not what `annotation`
    allows; the message names everything that it allows."""
    if not fits(value, annotation):
        shown = repr(value)
        if len(shown) > MOST_SHOWN:  # a model, or an optimiser, in another's place
            shown = f"a {type(value).__name__}"
        raise ValueError(f"{name}={shown} must be {in_words(annotation)}")


def check_fields(settings: Any, section: str = "") -> None:
    """Raises ValueError where a field of a dataclass is not what its annotation allows;
    see `check_value`.

    Args:
      settings: a dataclass whose annotations are types, `Literal`s or unions of them,
        bare or `Annotated`.
      section: what precedes the field's name in its dotted name, with the dot.
    """
    for name, annotation in _annotations(type(settings)).items():
        check_value(section + name, getattr(settings, name), annotation)


def check_sizes(**sizes: Any) -> None:
    """Raises ValueError where a size, given by its name, is no integer of at least 1;
    those of NumPy are integers, True is not."""
    for name, size in sizes.items():
        if not isinstance(size, Integral) or isinstance(size, bool) or size < 1:
            raise ValueError(f"{name}={size!r} must be an int of at least 1")


def fits(value: Any, annotation: Any) -> bool:
    """Returns whether `annotation` allows `value`. True and False do not count as
    numbers, and an int counts as a float."""
    return any(_fits_one(value, kind) for kind in kinds_of(annotation))


def _fits_one(value: Any, kind: Any) -> bool:
    if get_origin(kind) is tuple:
        each, _ = get_args(kind)
        return isinstance(value, tuple) and all(fits(part, each) for part in value)
    if _is_literal(kind):
        return any(type(value) is type(c) and value == c for c in get_args(kind))
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, int | float if kind is float else kind)


def in_words(annotation: Any, names: Mapping[type, str] = PYTHON_NAMES) -> str:
    """Returns what `annotation` allows, for a message: the choices of all its
    `Literal`s, then its types.

    Args:
      names: what the types are called where the value comes from.
    """
    kinds = kinds_of(annotation)
    choices = [repr(c) for kind in kinds if _is_literal(kind) for c in get_args(kind)]
    words = [f"one of {', '.join(choices)}"] if choices else []
    for kind in kinds:
        if not _is_literal(kind):
            words.append(names.get(kind) or f"of type {kind.__name__}")
    return " or ".join(words)


def kinds_of(annotation: Any) -> tuple[Any, ...]:
    """Returns the types and `Literal`s that make up `annotation`, any one of which a
    value may be."""
    is_union = get_origin(annotation) in (Union, UnionType)
    return get_args(annotation) if is_union else (annotation,)


def _is_literal(kind: Any) -> bool:
    return get_origin(kind) is Literal


@cache
def _annotations(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)
