"""Settings as JSON: a run folder's config.json, and the settings that a resume may
change."""

import json
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass, replace
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

from sparsejax.annotations import fits, in_words, kinds_of
from sparsejax.config import (
    RECIPES,
    OptimizerConfig,
    PhaseConfig,
    RecipeConfig,
    RecipeName,
    TrainConfig,
)
from sparsejax.feed_forward.sparsity import DENSE, FFNSparsity
from sparsejax.routing import named_routers
from sparsejax.routing.routers import Router
from sparsejax.sparsity import patterns
from sparsejax.sparsity.patterns import NM, VNM, BlockDiagonal, Pattern

JSON_NAMES = {
    int: "an integer",
    float: "a finite number",
    str: "a string",
    bool: "true or false",
    NoneType: "null",
}


def to_json(config: TrainConfig) -> dict[str, Any]:
    """Returns the resolved settings as `to_plain` has them."""
    settings = to_plain(config)
    if not config.phases.schedule:
        settings["phases"]["sparsity"] = to_plain(config.sparsity)
    return settings


def to_plain(value: Any) -> Any:
    """Returns a dataclass of settings as nested plain values, as JSON has them, with
    patterns as "2:4" or "128:2:32" and routers by name; `from_plain` reads them."""
    if isinstance(value, Pattern | BlockDiagonal):
        return patterns.name_of(value)
    if isinstance(value, Router):
        return named_routers.name_of(value)
    if is_dataclass(value):
        return {f.name: to_plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, tuple):
        return [to_plain(each) for each in value]
    return value


def from_json(settings: Any) -> TrainConfig:
    """Returns the settings that `to_json` has written, and that may have been edited
    since.

    A setting that is not there has its default, as one has that a newer version of
    sparsejax added; the default of a setting in `phases.sparsity` is the recipe's.
    Nothing is converted, except an integer where a float is due.

    Raises:
      ValueError: names the dotted setting that this version does not know, or whose
        type or value is wrong.
    """
    settings = _on_its_recipe(_with_sparsity(_of_this_version(settings)))
    config = from_plain(TrainConfig, settings)
    return replace(config, phases=config.phases.relative_to(config.recipe))


FORMER_RECIPES: dict[str, RecipeName] = {"default": "two-four"}
"""Former names of recipes, and what they are called now."""

FORMER_SPARSE_SHARES = (0.5, 0.75)
"""The former defaults of `phases.sparse_share`."""


def _of_this_version(settings: Any) -> Any:
    """Returns settings of an earlier version with the present name of their recipe.
    Beside a schedule, which reads neither recipe nor shares, the earlier version wrote
    its defaults, in the place of which come those of this one."""
    if not isinstance(settings, Mapping):
        return settings
    recipe, phases = settings.get("recipe"), settings.get("phases")
    now = FORMER_RECIPES.get(recipe) if isinstance(recipe, str) else None
    if not (isinstance(phases, Mapping) and phases.get("schedule")):
        return {**settings, "recipe": now} if now else settings
    if phases.get("sparse_share") in FORMER_SPARSE_SHARES:
        phases = {**phases, "sparse_share": RecipeConfig.sparse_share}
    named = {"recipe": TrainConfig.recipe} if now else {}
    return {**settings, **named, "phases": phases}


def _on_its_recipe(settings: Any) -> Any:
    """Returns the settings with those that `phases.sparsity` leaves out filled in by
    the recipe."""
    phases = settings.get("phases") if isinstance(settings, Mapping) else None
    if not isinstance(phases, Mapping):
        return settings
    given, recipe = phases.get("sparsity"), settings.get("recipe", TrainConfig.recipe)
    if not isinstance(given, Mapping) or recipe not in list(RECIPES):
        return settings
    sparsity = to_plain(RECIPES[recipe]) | dict(given)
    return {**settings, "phases": {**phases, "sparsity": sparsity}}


FORMER_DEFAULTS = {"experts": 4, "block_rows": 128}
"""The defaults of two former settings of the phases that are one pattern now: V:2:M,
with V `block_rows` and M four times `experts`."""


def _with_sparsity(settings: Any) -> Any:
    """Returns settings of an earlier version in the form of this one: the earlier
    version kept the sparsity of the sparse phase in `phases` itself.

    Raises:
      ValueError: a setting that has become a part of a pattern is no integer, or the
        recipe has no such pattern.
    """
    phases = settings.get("phases") if isinstance(settings, Mapping) else None
    if not isinstance(phases, Mapping):
        return settings
    defaults = to_plain(DENSE) | FORMER_DEFAULTS
    former = {name: phases[name] for name in phases if name in defaults}
    own = {name: value for name, value in phases.items() if name not in former}
    if former and own.get("sparsity") is not None:
        name = next(iter(former))
        place = "activations" if name in FORMER_DEFAULTS else name
        form = ', as in "128:2:32" for eight experts' if place != name else ""
        raise ValueError(
            f"setting phases.{name} has its place in phases.sparsity, and both are "
            f"given; write phases.sparsity.{place}{form}"
        )
    # What says no more than a default was in every config.json, whatever the recipe.
    said = {
        name: value
        for name, value in former.items()
        if type(value) is not type(defaults[name]) or value != defaults[name]
    }
    pattern = {name: said.pop(name) for name in FORMER_DEFAULTS if name in said}
    recipe = settings.get("recipe", TrainConfig.recipe)
    for name, value in pattern.items():
        if recipe != "paper":
            raise ValueError(
                f"phases.{name}={value!r} has no meaning in recipe {recipe!r}; leave "
                f"it out or use --recipe paper"
            )
        if type(value) is not int:
            raise ValueError(f"setting phases.{name}={value!r} must be an integer")
    if pattern:
        full = FORMER_DEFAULTS | pattern
        said["activations"] = f"{full['block_rows']}:2:{4 * full['experts']}"
    return {**settings, "phases": own | ({"sparsity": said} if said else {})}


def from_plain[T](kind: type[T], values: Any) -> T:
    """Returns a dataclass from nested plain values, as JSON has them.

    Raises:
      ValueError: names the dotted field that the dataclass does not have, or whose type
        or value is wrong.
    """
    return _typed(kind, values, "")


def read_config(path: Path) -> TrainConfig:
    """Returns the settings in a run's config.json.

    Raises:
      ValueError: names the file, and why it cannot be read or which setting is wrong.
    """
    try:
        return from_json(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, OSError, RecursionError) as error:
        raise ValueError(
            f"{path} does not hold the settings of a run: {error}"
        ) from error


@dataclass(frozen=True, kw_only=True)
class ScheduleFile:
    """The content of a file of phases."""

    phase: tuple[PhaseConfig, ...]


def read_schedule(path: Path) -> tuple[PhaseConfig, ...]:
    """Returns the phases in a file: tables [[phase]] of TOML with the settings of a
    `PhaseConfig`, or, in a .json file, an object with a list "phase" of such objects.

    Raises:
      ValueError: names the file, and why it cannot be read or which setting is wrong.
    """
    if not path.is_file():
        raise ValueError(
            f"there is no schedule {path}; give a file of phases, tables [[phase]] "
            f"with a name and a share of the steps"
        )
    parse = json.loads if path.suffix == ".json" else tomllib.loads
    try:
        content = parse(path.read_text(encoding="utf-8"))
        schedule = from_plain(ScheduleFile, content).phase
        if not schedule:
            raise ValueError("it has no phase, [[phase]]")
        schedule = RecipeConfig(schedule=schedule).schedule
        for phase in schedule:
            phase.check_all_is_read()
        return schedule
    except (ValueError, TypeError, OSError, RecursionError) as error:
        raise ValueError(f"{path} does not hold a schedule: {error}") from error


def _typed(hint: Any, value: Any, name: str) -> Any:
    """Returns `value`, read from JSON, as a value of the type `hint`; `name` is the
    setting's."""
    nested = [kind for kind in kinds_of(hint) if is_dataclass(kind)]
    if NM in nested:
        return _typed_pattern(hint, value, name)
    if hint is Router:
        return _typed_router(value, name)
    if value is None and NoneType in kinds_of(hint):
        return None
    if nested:
        return _typed_fields(nested[0], value, name)
    if get_origin(hint) is tuple:
        kind, _ = get_args(hint)
        if not isinstance(value, list | tuple):
            raise ValueError(f"setting {name}={value!r} must be a list")
        return tuple(_typed(kind, each, f"{name}[{i}]") for i, each in enumerate(value))
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if float in kinds_of(hint) and is_number:
        if abs(value) <= sys.float_info.max:
            return float(value)
    elif fits(value, hint):
        return value
    raise ValueError(f"setting {name}={value!r} must be {in_words(hint, JSON_NAMES)}")


def _typed_pattern(hint: Any, value: Any, name: str) -> Pattern | BlockDiagonal | None:
    """Returns the pattern, or None, of a setting whose type is a pattern; see
    `_typed`."""
    try:
        pattern = patterns.named_pattern(value) if isinstance(value, str) else value
    except ValueError as error:
        raise ValueError(f"setting {name}={value!r}: {error}") from error
    if not fits(pattern, hint):
        examples = {
            NM: "'2:4'",
            VNM: "'128:2:32', '128:4:32'",
            BlockDiagonal: "'diagonal:4'",
        }
        allowed = ", ".join(examples[of] for of in kinds_of(hint) if of in examples)
        raise ValueError(
            f"setting {name}={value!r} must be a pattern, such as {allowed}, or null "
            f"(in TOML, leave the line out)"
        )
    return pattern


def _typed_router(value: Any, name: str) -> Router:
    """Returns the router of a setting whose type is a router; see `_typed`."""
    try:
        return named_routers.named_router(value)
    except ValueError as error:
        raise ValueError(f"setting {name}: {error}") from error


def _typed_fields(kind: Any, values: Any, name: str) -> Any:
    if not isinstance(values, Mapping):
        of = f"setting {name}={values!r}" if name else f"settings {values!r}"
        raise ValueError(f"{of} must be an object (JSON) or a table (TOML)")
    prefix = f"{name}." if name else ""
    hints = get_type_hints(kind)
    for field_name in values:
        if field_name not in hints:
            raise ValueError(
                f"setting {prefix}{field_name} is unknown to this version of "
                f"sparsejax; correct its name, or use the version that wrote it"
            )
    typed = {
        field_name: _typed(hints[field_name], value, prefix + field_name)
        for field_name, value in values.items()
    }
    required = [f.name for f in fields(kind) if _has_no_default(f)]
    if missing := [field_name for field_name in required if field_name not in typed]:
        raise ValueError(f"setting {prefix}{missing[0]} is missing; add it")
    try:
        return kind(**typed)
    except ValueError as error:
        # What lies in a list does not know its place.
        raise ValueError(f"{name}: {error}" if "[" in name else str(error)) from error


def _has_no_default(of: Field) -> bool:
    return of.default is MISSING and of.default_factory is MISSING


MAY_CHANGE = frozenset(
    {
        "log_every",
        "eval_every",
        "checkpoint_every",
        "keep_checkpoints",
        "keep_every",
        "new_process_minutes",
        "sample_length",
        "plot",
        "mesh.data",
        "mesh.fsdp",
        "mesh.tensor",
        "mesh.zero_stage",
        "steps",
        "data.text",
        "data.shards",
        "data.tokenizer",
    }
)
"""The dotted names of the settings that a resumed run may change. The mesh changes how
the training is computed and the steps how long it is. Data may have moved: a resume
compares the tokens, by the corpus's fingerprint. The other settings do not touch the
training."""


def check_resumable(before: TrainConfig, after: TrainConfig, folder: Path) -> None:
    """Raises ValueError where the run in `folder`, begun under the settings `before`,
    cannot go on under `after`."""
    for name, (old, new) in changed_settings(before, after).items():
        if name not in MAY_CHANGE:
            raise ValueError(
                f"{folder} holds a run whose {name} is {old!r} and cannot become "
                f"{new!r}; leave it out, or begin a run in another folder (a resumed "
                f"run may change {', '.join(sorted(MAY_CHANGE))})"
            )


MAY_DIFFER_IN_BRANCH = (
    MAY_CHANGE
    | {f"optimizer.{of.name}" for of in fields(OptimizerConfig) if of.name != "name"}
    | {f"phases.{field.name}" for field in fields(RecipeConfig)}
    | {f"phases.sparsity.{field.name}" for field in fields(FFNSparsity)}
    | {
        "recipe",
        "model.dtype",
        "model.precision",
        "model.remat",
        "micro_batches",
        "sequences_per_device",
        "backend",
        "deterministic",
        "eval_batches",
        "keep_slower",
    }
)
"""The dotted names of the settings that a branch may have other than its trunk: how
long it trains, how sparse, at which learning rate, and how that is computed. All others
say what the trunk's checkpoint is: sizes of the model and the function it computes, the
tokens, their order, and the seed, whose random key is in the state."""


def check_branchable(trunk: TrainConfig, branch: TrainConfig, folder: Path) -> None:
    """Raises ValueError where a run under the settings `branch` cannot begin with a
    checkpoint of the run in `folder`, trained under `trunk`."""
    for name, (old, new) in changed_settings(trunk, branch).items():
        if name not in MAY_DIFFER_IN_BRANCH:
            raise ValueError(
                f"{folder} holds a run whose {name} is {old!r}, and a branch of it "
                f"cannot have {new!r}; leave it out, or begin a run that is no branch "
                f"(a branch may have another number of steps, optimizer, recipe and "
                f"phases, but has its trunk's optimizer.name, whose moments it "
                f"takes over, model, tokens, order of the data and seed)"
            )


def changed_settings(before: TrainConfig, after: TrainConfig) -> dict[str, tuple]:
    """Returns the dotted names of the settings that differ, each with its value before
    and after."""

    def flatten(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
        flat = {}
        for name, value in settings.items():
            if isinstance(value, Mapping):
                flat |= flatten(value, f"{prefix}{name}.")
            else:
                flat[prefix + name] = value
        return flat

    old, new = flatten(to_json(before)), flatten(to_json(after))
    return {
        name: (old.get(name), new.get(name))
        for name in old | new
        if old.get(name) != new.get(name)
    }
