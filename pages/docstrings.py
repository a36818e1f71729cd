"""Docstrings of this code as mkdocstrings reads them: a blank line before each section,
an entry for each argument, and no "<" that could begin a tag."""

import re

import griffe

SECTION = re.compile(r"(?<=[^\n])\n(?=(?:Args|Returns|Raises):\n)")
SEVERAL = re.compile(r"^( +)(\w+(?:, \w+)+)(:.*(?:\n\1 +.*)*)", re.MULTILINE)
CODE_OR_TAG = re.compile(r"(`[^`]*`|(?<=\n\n) {4}.*(?:\n {4}.*)*)|<")


def as_google_has_it(text: str) -> str:
    """Returns a docstring with a blank line before each of its sections, with the entry
    of "a, b: what they are." once for a and once for b, and with every "<" escaped that
    is no code."""
    text = CODE_OR_TAG.sub(lambda found: found[1] or "&lt;", text)
    each = lambda found: "\n".join(
        f"{found[1]}{name}{found[3]}" for name in found[2].split(", ")
    )
    return SEVERAL.sub(each, SECTION.sub("\n\n", text))


class Docstrings(griffe.Extension):
    """Rewrites every docstring before it is parsed."""

    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        """Rewrites the docstring of an object, where it has one."""
        if obj.docstring is not None:
            obj.docstring.value = as_google_has_it(obj.docstring.value)
