"""Comparison files: named runs over shared settings, each with a list of seeds.

seeds = [0, 1]               # each is a run's seed and data.seed
baseline = "dense"           # default: the first of the runs
[base]                       # settings of all runs, named as in config.json
preset = "tiny"
steps = 800
[runs.dense]                 # settings that a run has besides, or instead
recipe = "dense"
[runs.long-sparse-phase]
seeds = [0]                  # default: all of them
phases.sparse_share = 0.8
[runs.dense-longer]
branch = "dense@400"         # begins with that checkpoint of another run, of its seed
steps = 1200                 # (without "@400": with the last one)
arm = "dense"                # the arm that it belongs to in equal_loss.py, together
                             # with runs of other lengths (default: its own name)
"""

import re
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from sparsejax.config import RECIPES, TrainConfig
from sparsejax.config.config_file import (
    FORMER_RECIPES,
    check_branchable,
    from_json,
    to_json,
)
from sparsejax.config.presets import PRESETS
from sparsejax.config.schedule import phases
from sparsejax.training.branch import Branch


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One run of a comparison."""

    name: str
    seed: int
    config: TrainConfig
    trunk: str | None = None
    """The name of the run that this one is a branch of; None where it is no branch."""
    begin: int = 0
    """The number of steps that its trunk has done where it begins."""
    arm: str | None = None
    """The arm that the run belongs to, together with runs of other lengths; None: its
    own name."""

    @property
    def place(self) -> str:
        """The path of the run's folder inside that of the comparison."""
        return f"{self.name}/seed-{self.seed}"

    def branch_in(self, folder: Path) -> Branch | None:
        """Returns the checkpoint that the run begins with, where the comparison is in
        `folder`; None where it is no branch."""
        if self.trunk is None:
            return None
        return Branch(folder / self.trunk / f"seed-{self.seed}", self.begin)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Runs that are compared with the baseline of the same seed."""

    name: str
    baseline: str
    trials: tuple[Trial, ...]
    """The runs, seed after seed; the baseline first, and every branch behind its
    trunk."""

    def listing(self, before: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the content of comparison.json, which `plot_comparison` and
        `finished_runs` read: the runs of this comparison, and those that `before`, its
        present content, has besides: `only` may have left them out this time."""
        folders = {
            name: list(places) for name, places in before.get("runs", {}).items()
        }
        for trial in self.trials:
            places = folders.setdefault(trial.name, [])
            if trial.place not in places:
                places.append(trial.place)
        arms = {trial.name: trial.arm or trial.name for trial in self.trials}
        return {
            "baseline": self.baseline,
            "runs": folders,
            "arms": before.get("arms", {}) | arms,
        }

    def only(self, runs: Collection[str], seeds: Collection[int]) -> "Comparison":
        """Returns the comparison of some runs with some seeds: also of those that they
        branch from, and of the baseline with these seeds. None given: all.

        Raises:
          ValueError: a run or a seed is none of the comparison's, or a run has none of
            these seeds.
        """
        known_runs = dict.fromkeys(trial.name for trial in self.trials)
        known_seeds = dict.fromkeys(trial.seed for trial in self.trials)
        for name, given, known in (
            ("only", runs, known_runs),
            ("seeds", seeds, known_seeds),
        ):
            if unknown := [value for value in given if value not in known]:
                raise ValueError(
                    f"{name}={unknown[0]!r} is none of the comparison's; choose from "
                    f"{', '.join(map(str, known))}"
                )
        taken = {self.baseline, *(runs or known_runs)}
        # Every branch stands behind its trunk.
        for trial in reversed(self.trials):
            if trial.name in taken and trial.trunk is not None:
                taken.add(trial.trunk)
        seeds = seeds or known_seeds
        trials = [t for t in self.trials if t.name in taken and t.seed in seeds]
        for run in runs:
            if run not in [trial.name for trial in trials]:
                own = [str(trial.seed) for trial in self.trials if trial.name == run]
                raise ValueError(
                    f"only={run!r} has the seeds {', '.join(own)} and none of seeds="
                    f"{list(seeds)}; give one of its own or leave the run out"
                )
        return replace(self, trials=tuple(trials))


def read_comparison(path: Path) -> Comparison:
    """Returns the comparison in a TOML file.

    Raises:
      ValueError: names the file, and the entry in it that is wrong.
    """
    if not path.is_file():
        raise ValueError(
            f"there is no comparison {path}; give a TOML file of runs, as those in "
            f"experiments/comparisons"
        )
    try:
        return _comparison(path.stem, tomllib.loads(path.read_text(encoding="utf-8")))
    except (ValueError, OSError, RecursionError) as error:
        raise ValueError(f"{path} does not hold a comparison: {error}") from error


def _comparison(name: str, content: Mapping[str, Any]) -> Comparison:
    known = ("seeds", "baseline", "base", "runs")
    for key in content:
        if key not in known:
            raise ValueError(f"{key} is none of {', '.join(known)}")
    seeds, runs = _seeds("seeds", content.get("seeds")), content.get("runs")
    if not isinstance(runs, dict) or not runs:
        raise ValueError(f"runs={runs} must be tables, [runs.NAME], at least one")
    for run in runs:
        if not re.fullmatch(r"\w[\w.-]*", run):
            raise ValueError(
                f"the run {run!r} is to be a folder; name it with letters, digits, "
                f"'_', '-' and '.', the first of them no '.' or '-'"
            )
    baseline = content.get("baseline", next(iter(runs)))
    if baseline not in list(runs):
        raise ValueError(
            f"baseline={baseline!r} is none of the runs; give one of {', '.join(runs)}"
        )
    branches = {run: _branch(run, runs) for run in runs}
    in_order = _trunks_first(baseline, branches)
    own_seeds = {run: _own_seeds(run, runs[run], seeds) for run in runs}
    if own_seeds[baseline] != seeds:
        raise ValueError(
            f"runs.{baseline} is what all others are compared with and needs seeds "
            f"{seeds}; leave its own out"
        )
    trials: list[Trial] = []
    for seed in seeds:
        of_seed: dict[str, Trial] = {}
        for run in in_order:
            if seed in own_seeds[run]:
                config = _config(run, content.get("base", {}), runs[run], seed)
                trial = _trial(run, seed, config, branches[run], of_seed)
                of_seed[run] = replace(trial, arm=_arm(run, runs[run]))
        trials += of_seed.values()
    if len({trial.config.deterministic for trial in trials}) > 1:
        raise ValueError(
            "deterministic is a setting of the whole process, and differs between the "
            "runs; set it in base, or not at all"
        )
    return Comparison(name=name, baseline=baseline, trials=tuple(trials))


def _branch(run: str, runs: Mapping[str, Any]) -> Branch | None:
    """Returns the checkpoint that a run states as its beginning, with the name of the
    trunk in the place of its folder; None where it states none."""
    settings = runs[run]
    if not isinstance(settings, dict) or "branch" not in settings:
        return None
    stated = settings["branch"]
    branch = Branch.named(stated) if isinstance(stated, str) else None
    if branch is None or str(branch.folder) not in runs:
        raise ValueError(
            f"runs.{run}.branch={stated!r} must be another of the runs and a step, "
            f"such as {next(iter(runs))}@1000; there are {', '.join(runs)}"
        )
    return branch


def _arm(run: str, settings: Mapping[str, Any]) -> str | None:
    arm = settings.get("arm")
    if arm is not None and not (isinstance(arm, str) and arm.strip()):
        raise ValueError(
            f"runs.{run}.arm={arm!r} must be a name, which runs of other lengths share"
        )
    return arm


def _trunks_first(baseline: str, branches: Mapping[str, Branch | None]) -> list[str]:
    """Returns the names of the runs, the baseline as early as can be, and every branch
    behind its trunk.

    Raises:
      ValueError: a run would begin with a checkpoint of what it will become.
    """
    ordered: list[str] = []
    for run in sorted(branches, key=lambda run: run != baseline):
        way: list[str] = []
        on = run
        while on not in ordered:
            if on in way:
                raise ValueError(
                    f"runs.{run}.branch leads back to {on} ({' -> '.join([*way, on])});"
                    f" one of these runs has to begin by itself"
                )
            way.append(on)
            trunk = branches[on]
            if trunk is None:
                break
            on = str(trunk.folder)
        ordered += reversed(way)
    return ordered


def _trial(
    run: str,
    seed: int,
    config: TrainConfig,
    branch: Branch | None,
    before: Mapping[str, Trial],
) -> Trial:
    """Returns a run of one seed.

    Args:
      before: the runs of this seed that are trained before it, by name.
    Raises:
      ValueError: the run is a branch and its trunk is not trained with this seed, keeps
        no checkpoint of the step, or has settings that a branch has to share.
    """
    if branch is None:
        return Trial(name=run, seed=seed, config=config)
    name, place = str(branch.folder), f"runs.{run}, seed {seed}"
    if name not in before:
        raise ValueError(
            f"{place}: it branches from {name}, which is not trained with that seed; "
            f"give both the same seeds"
        )
    trunk = before[name].config
    begin = trunk.steps if branch.step is None else branch.step
    kept = kept_steps(trunk, before[name].begin)
    if begin not in kept:
        raise ValueError(
            f"{place}: {name} ends without a checkpoint of step {begin}; it keeps "
            f"{', '.join(map(str, kept))}; branch from one of them, or set "
            f"runs.{name}.keep_every and checkpoint_every to divisors of {begin}"
        )
    if begin >= config.steps:
        raise ValueError(
            f"{place}: steps={config.steps} leaves nothing to train after step {begin} "
            f"of {name}; set more steps, or branch from an earlier checkpoint"
        )
    try:
        check_branchable(trunk, config, Path(name))
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error
    return Trial(name=run, seed=seed, config=config, trunk=name, begin=begin)


def kept_steps(config: TrainConfig, begin: int = 0) -> list[int]:
    """Returns the steps of the checkpoints that a run leaves when it has ended, by the
    keep policy of `sparsejax.checkpoints.checkpoint`; of a branch, which has one of the
    step that it begins with, from `begin` on."""
    ends = accumulate(phase.steps for phase in phases(config))
    for_good = {step for step in ends if step > begin}
    every, keep_every = config.checkpoint_every, config.keep_every
    between = range(every, config.steps, every) if every else ()
    written = for_good | {step for step in between if step > begin}
    written |= {begin} if begin else set()
    newest = sorted(written)[-config.keep_checkpoints :]
    multiples = {step for step in written if keep_every and step % keep_every == 0}
    return sorted(for_good | multiples | set(newest))


def _seeds(place: str, seeds: Any) -> list[int]:
    if not (
        isinstance(seeds, list)
        and seeds
        and all(type(seed) is int for seed in seeds)
        and len(set(seeds)) == len(seeds)
    ):
        raise ValueError(
            f"{place}={seeds} must be a list of different integers, such as [0, 1]"
        )
    return seeds


def _own_seeds(run: str, settings: Any, seeds: list[int]) -> list[int]:
    """Returns the seeds of a run, in the order of the comparison's seeds."""
    if not isinstance(settings, dict) or "seeds" not in settings:
        return seeds
    own = _seeds(f"runs.{run}.seeds", settings["seeds"])
    if unknown := sorted(set(own) - set(seeds)):
        raise ValueError(
            f"runs.{run}.seeds has {unknown[0]}, which the baseline has not been "
            f"trained with; take one of {seeds}"
        )
    return [seed for seed in seeds if seed in own]


def _config(run: str, base: Any, changes: Any, seed: int) -> TrainConfig:
    for place, settings in (("base", base), (f"runs.{run}", changes)):
        if not isinstance(settings, dict):
            raise ValueError(f"{place}={settings!r} must be a table of settings")
        data = settings.get("data")
        if "seed" in settings or (isinstance(data, dict) and "seed" in data):
            raise ValueError(
                f"{place} sets a seed, which every run takes from seeds; leave it out"
            )
    try:
        others = ("seeds", "branch", "arm")
        own = {name: value for name, value in changes.items() if name not in others}
        settings = _overlaid(base, own)
        if "recipe" not in own and _has_schedule(own):
            # The run's own phases stand in place of the recipe of all runs.
            settings.pop("recipe", None)
        preset = settings.get("preset")
        default = PRESETS[preset]() if preset in list(PRESETS) else TrainConfig()
        recipe = settings.get("recipe", default.recipe)
        if recipe in list(FORMER_RECIPES):
            recipe = FORMER_RECIPES[recipe]
        if recipe != default.recipe and recipe in list(RECIPES):
            default = default.with_recipe(recipe)
        start = to_json(default)
        if _has_schedule(settings):
            # Of the preset's recipe nothing would be read.
            start = to_json(default.with_schedule(()))
            start["phases"]["sparsity"] = None
        seeded = _overlaid(start, {"seed": seed, "data": {"seed": seed}})
        config = from_json(_overlaid(seeded, settings))
        phases(config)
    except ValueError as error:
        raise ValueError(f"runs.{run}, seed {seed}: {error}") from error
    return config


def _has_schedule(settings: Mapping[str, Any]) -> bool:
    phases_of_it = settings.get("phases")
    return isinstance(phases_of_it, dict) and bool(phases_of_it.get("schedule"))


def _overlaid(settings: Mapping[str, Any], changes: Mapping[str, Any]) -> dict:
    """Returns nested settings with those in `changes` in the place of their own."""
    result = dict(settings)
    for name, value in changes.items():
        before = result.get(name)
        nested = isinstance(before, dict)
        if name in result and nested != isinstance(value, dict):
            kind = "a table of settings" if nested else "no table"
            raise ValueError(f"setting {name}={value!r} must be {kind}")
        result[name] = _overlaid(before, value) if nested else value
    return result
