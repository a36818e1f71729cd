"""Values that an annotation allows, and how a message says so."""

from dataclasses import dataclass
from typing import Annotated, Literal

import jax.numpy as jnp
import numpy as np
import pytest

from sparsejax.annotations import check_fields, check_value, fits, in_words
from sparsejax.sparsity.patterns import NM, VNM

Colour = Literal["red", "blue"]


@pytest.mark.parametrize(
    ("annotation", "allowed", "refused"),
    [
        (Colour, ("red", "blue"), ("green", "Red", None, 1, ["red"], jnp.ones(2))),
        (Literal[0, 1], (0, 1), (2, True, 0.0, "0")),
        (Colour | None, ("red", None), ("None", False)),
        (Literal["green"] | Colour, ("green", "blue"), ("yellow",)),
        (int, (0, -3, 10**30), (True, 1.0, "1", None, np.int64(1))),
        (float, (0.5, 2, float("nan"), np.float64(1)), (True, "0.5", np.float32(1))),
        (bool, (True, False), (0, 1, "yes", None, np.bool_(True))),
        (str | None, ("", "a", None), (b"a", 0)),
        (NM | VNM | None, (NM(2, 4), VNM(1, 2, 4), None), ("2:4", (2, 4), NM)),
    ],
)
def test_a_value_fits_or_not(annotation, allowed, refused):
    for value in allowed:
        assert fits(value, annotation), value
        check_value("x", value, annotation)
    for value in refused:
        assert not fits(value, annotation), value
        with pytest.raises(ValueError, match="^x=.* must be "):
            check_value("x", value, annotation)


@pytest.mark.parametrize(
    ("annotation", "words"),
    [
        (Colour, "one of 'red', 'blue'"),
        (Literal["green"] | Colour | None, "one of 'green', 'red', 'blue' or None"),
        (int | str, "an int or a str"),
        (bool, "True or False"),
        (NM | None, "of type NM or None"),
    ],
)
def test_a_message_names_all_that_is_allowed(annotation, words):
    assert in_words(annotation) == words
    with pytest.raises(ValueError, match=f"^of=0.5 must be {words}$"):
        check_value("of", 0.5, annotation)


def test_other_sources_have_other_names_for_types():
    assert in_words(Colour | float, {float: "a number"}) == (
        "one of 'red', 'blue' or a number"
    )


@dataclass(frozen=True)
class Paint:
    colour: Colour = "red"
    coats: Annotated[int, "one or more"] = 1

    def __post_init__(self) -> None:
        check_fields(self, "paint.")


def test_every_field_is_checked_by_its_dotted_name():
    assert Paint("blue", 2).coats == 2
    with pytest.raises(
        ValueError, match=r"^paint\.colour='green' must be one of 'red'"
    ):
        Paint("green")
    with pytest.raises(ValueError, match=r"^paint\.coats=2\.0 must be an int$"):
        Paint(coats=2.0)


def test_of_a_long_value_the_type_is_said():
    with pytest.raises(ValueError, match="^x=a list must be an int$"):
        check_value("x", [0] * 1000, int)
    with pytest.raises(ValueError, match=r"^x=\[0, 0\] must be an int$"):
        check_value("x", [0, 0], int)
