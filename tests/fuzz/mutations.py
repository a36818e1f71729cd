"""Damage: of bytes, of JSON values, of names."""

from typing import Any

from numpy.random import Generator

HUGE = 10**400
ODD_TEXTS = (
    "",
    " ",
    "0",
    "1e3",
    "null",
    "nan",
    "None",
    "--steps",
    "paper",
    "swiglu",
    "reglu2",
    "bfloat16",
    "ü 漢 \U0001f4a5",
    "line\nbreak",
    "\x00",
    "\ud800",
    "\udcff",
    "[/red]",
    "{}",
    "%s",
    "../..",
    "*",
    "a" * 5000,
)
ODD_NUMBERS = (
    0,
    -1,
    1,
    2,
    3,
    7,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**32,
    2**63,
    -(10**30),
    HUGE,
    0.0,
    -0.0,
    0.5,
    1.0,
    1.5,
    1e-320,
    3.5e38,
    1e308,
    float("nan"),
    float("inf"),
    float("-inf"),
)
ODD_VALUES = (
    None,
    True,
    False,
    [],
    [1],
    [[[]]],
    {},
    {"": None},
    *ODD_TEXTS,
    *ODD_NUMBERS,
)


def one_of(generator: Generator, choices: Any) -> Any:
    """Returns an element of a sequence, whatever it holds."""
    return choices[int(generator.integers(len(choices)))]


def damaged(generator: Generator, content: bytes) -> bytes:
    """Bits flipped, bytes lost, added, doubled, or all of it replaced."""
    size = len(content)
    position = int(generator.integers(size + 1))
    match int(generator.integers(9)):
        case 0:
            return content[:position]
        case 1:
            return content + generator.bytes(int(generator.integers(1, 40)))
        case 2:
            return b""
        case 3:
            return content[:position] + b"\xff\xfe" + content[position:]
        case 4:
            end = position + int(generator.integers(1, 20))
            return content[:position] + content[end:]
        case 5:
            return content + content
        case 6:
            return one_of(generator, (generator.bytes(size), b"[" * 100_000))
        case _:
            changed = bytearray(content)
            for _ in range(int(generator.integers(1, 4)) if size else 0):
                bit = int(generator.integers(8 * size))
                changed[bit // 8] ^= 1 << bit % 8
            return bytes(changed)


def mutated_json(generator: Generator, value: Any, changes: int) -> Any:
    """A copy of JSON objects with so many changes somewhere in them."""
    places = [()] if not isinstance(value, dict) else list(_places(value, ()))
    for _ in range(changes):
        value = _changed(generator, value, one_of(generator, places))
    return value


def _places(value: dict, path: tuple) -> list[tuple]:
    """The paths of everything in nested objects."""
    found = []
    for key, entry in value.items():
        found.append((*path, key))
        if isinstance(entry, dict):
            found += _places(entry, (*path, key))
    return found


def _changed(generator: Generator, value: Any, path: tuple) -> Any:
    if not path:
        return one_of(generator, ODD_VALUES)
    if not isinstance(value, dict) or path[0] not in value:
        return value  # An earlier change took the place away.
    key, *rest = path
    if rest:
        return {**value, key: _changed(generator, value[key], tuple(rest))}
    match int(generator.integers(20)):
        case 0:
            return {name: entry for name, entry in value.items() if name != key}
        case 1:
            return {**value, one_of(generator, ODD_TEXTS): value[key]}
        case 2:
            return {**value, f"{key}_": value[key]}
        case 3:
            other = one_of(generator, list(value))
            return {**value, key: value[other], other: value[key]}
        case 4:
            return {**value, key: {key: value[key]}}
        case 5:
            return {**value, key: [value[key]]}
        case 6 | 7:
            return {**value, key: one_of(generator, ODD_VALUES)}
        case _:
            return {**value, key: plausible(generator, value[key])}


def plausible(generator: Generator, value: Any) -> Any:
    """Another value of the same type, often a valid one."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        factor = int(one_of(generator, (2, 3, 4, 8, 64)))
        choices = (value * factor, value // factor, value + 1, value - 1, factor)
        return one_of(generator, choices)
    if isinstance(value, float):
        return one_of(generator, (value * 2, value / 3, 1 - value, 0.0, 1.0, -value))
    return one_of(generator, ODD_VALUES)
