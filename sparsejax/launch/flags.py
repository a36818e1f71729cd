"""Settings as flags: how a command line differs from a file of settings.

The sparsity of the sparse phase, `phases.sparsity` in a file, has the flags --phases.*.
Patterns are written as "2:4" and "128:2:32", routers by name, and a schedule is read
from a file. The settings themselves know nothing of command lines.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Annotated

import tyro
from tyro.constructors import (
    ConstructorRegistry,
    PrimitiveConstructorSpec,
    PrimitiveTypeInfo,
)

from sparsejax.config import PhaseConfig, RecipeConfig, RecipeName, TrainConfig
from sparsejax.feed_forward.sparsity import DENSE, FFNSparsity
from sparsejax.reports.profile import ProfiledSteps
from sparsejax.routing import named_routers
from sparsejax.routing.routers import Router
from sparsejax.sparsity.patterns import (
    NM,
    VNM,
    BlockDiagonal,
    Pattern,
    StaticPattern,
    name_of,
    named_pattern,
)

REGISTRY = ConstructorRegistry()
"""The rules by which those types of settings are read that tyro does not know."""


PATTERNS = {
    NM | None: "2:4|None",
    NM | VNM | None: "2:4|V:2:M|V:4:M|None",
    StaticPattern | None: "diagonal:G|N:4|None",
}
"""The types of settings that are a pattern or None, and how they are written."""


@REGISTRY.primitive_rule
def _pattern(
    info: PrimitiveTypeInfo,
) -> PrimitiveConstructorSpec[Pattern | BlockDiagonal | None] | None:
    """Returns how a pattern is read from "2:4", "128:2:32", "diagonal:4" or "None"."""
    if info.type not in PATTERNS:
        return None
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=PATTERNS[info.type],
        instance_from_str=lambda words: (
            None if words[0] == "None" else named_pattern(words[0])
        ),
        is_instance=lambda value: isinstance(value, Pattern | BlockDiagonal | None),
        str_from_instance=lambda pattern: [
            "None" if pattern is None else name_of(pattern)
        ],
    )


@REGISTRY.primitive_rule
def _router(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Router] | None:
    """Returns how a router is read from its name."""
    if info.type is not Router:
        return None
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="|".join(router.name for router in named_routers.ROUTERS),
        instance_from_str=lambda words: named_routers.named_router(words[0]),
        is_instance=lambda value: isinstance(value, Router),
        str_from_instance=lambda router: [router.name],
    )


@REGISTRY.primitive_rule
def _profiled_steps(
    info: PrimitiveTypeInfo,
) -> PrimitiveConstructorSpec[ProfiledSteps | None] | None:
    """Returns how the steps of a trace are read from "20:22" or "None"."""
    if info.type != ProfiledSteps | None:
        return None
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="FIRST:LAST|None",
        instance_from_str=lambda words: (
            None if words[0] == "None" else ProfiledSteps.named(words[0])
        ),
        is_instance=lambda value: isinstance(value, ProfiledSteps | None),
        str_from_instance=lambda steps: [
            "None" if steps is None else f"{steps.first}:{steps.last}"
        ],
    )


@dataclass(frozen=True, kw_only=True)
class PhaseFlags(RecipeConfig):
    """The phases of a run as a command line has them: a flag for each setting of the
    sparsity, which is the recipe's until one of them is given, and none for the
    schedule."""

    sparsity: Annotated[FFNSparsity, tyro.conf.arg(name="")]
    schedule: Annotated[
        tuple[PhaseConfig, ...], tyro.conf.Fixed, tyro.conf.Suppress
    ] = ()

    def __post_init__(self) -> None:
        # Beside a schedule a `RecipeConfig` has no sparsity at all, and flags have one
        # to begin with; `settings_of` sees to both.
        if not self.schedule:
            super().__post_init__()


def flags_of(phases: RecipeConfig, recipe: RecipeName) -> PhaseFlags:
    """Returns the phases of a run as flags."""
    own = {field.name: getattr(phases, field.name) for field in fields(RecipeConfig)}
    sparsity = DENSE if phases.schedule else phases.sparsity_of(recipe)
    return PhaseFlags(**own | {"sparsity": sparsity})


def settings_of(flags: RecipeConfig, recipe: RecipeName) -> RecipeConfig:
    """Returns the phases that flags, begun with `flags_of`, describe.

    Raises:
      ValueError: `RecipeConfig` refuses them.
    """
    own = {field.name: getattr(flags, field.name) for field in fields(RecipeConfig)}
    if flags.schedule and flags.sparsity == DENSE:
        own["sparsity"] = None
    return RecipeConfig(**own).relative_to(recipe)


def with_flags(config: TrainConfig) -> TrainConfig:
    """Returns the settings with their phases as flags, as a command line begins with
    them."""
    return replace(config, phases=flags_of(config.phases, config.recipe))


def without_flags(config: TrainConfig) -> TrainConfig:
    """Returns the settings that a command line begun with `with_flags` describes.

    Raises:
      ValueError: the settings refuse them.
    """
    return replace(config, phases=settings_of(config.phases, config.recipe))


def check_flags(arguments: Sequence[str]) -> None:
    """Raises ValueError for a flag of earlier versions, and says how its setting is
    written now."""
    for argument in arguments:
        flag = argument.split("=")[0].replace("_", "-")
        if flag in ("--phases.experts", "--phases.block-rows"):
            raise ValueError(
                f"{flag} is a part of the pattern: write --phases.activations V:2:M, "
                f"where M is four times the number of experts and V the rows of a "
                f"block, such as 128:2:32 for eight experts"
            )
