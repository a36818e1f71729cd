"""The sparse FFNs, and the steps, that benchmarks compare with dense ones, by name."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

from experiments.comparing.comparison_file import read_comparison
from sparsejax.config import PhaseConfig, PresetName, RecipeName, TrainConfig
from sparsejax.config.config_file import from_plain
from sparsejax.config.presets import PRESETS
from sparsejax.config.schedule import Phase, phases
from sparsejax.dtypes import Precision
from sparsejax.feed_forward.sparsity import DENSE, FFNSparsity
from sparsejax.routing.routers import (
    ActivationEnergy,
    ActivationEnergyFP8,
    TokenHash,
)
from sparsejax.sparsity.patterns import TWO_FOUR, VNM

DENSE_STEP = "dense"
DENSE_FP8_STEP = "dense, fp8"
"""The name of the dense step with 8-bit floats."""


def sparse_modes(*, experts: int, v: int) -> dict[str, FFNSparsity]:
    """Returns all sparse FFNs by name. "all six": every GEMM has a 2:4 operand, also
    the weight gradients. "dense inside": none has, and nothing is dropped inside an
    expert.

    Args:
      experts: E of the V:N:M modes: a token uses 1 of E, or 2 of 2 E.
      v: rows of a V:N:M block.
    """
    activations = FFNSparsity(activations=TWO_FOUR)
    along_tokens = replace(activations, token_sparsity="magnitude")
    masked = FFNSparsity(
        activations=VNM(v, 2, 4 * experts), weight_gradients="expert_columns"
    )
    by_energy = replace(masked, router=ActivationEnergy())
    two_of_twice = replace(
        by_energy, activations=VNM(v, 2, 8 * experts), experts_per_token=2
    )
    skip = replace(masked, skip_blocks=True)
    inside = VNM(v, 4, 4 * experts)
    in_fp8 = replace(skip, activations=inside, router=ActivationEnergyFP8())

    def all_six(sparsity: FFNSparsity) -> FFNSparsity:
        return replace(sparsity, weights=TWO_FOUR, token_sparsity="magnitude")

    return {
        "2:4 weights": FFNSparsity(weights=TWO_FOUR),
        "2:4 activations": activations,
        "2:4 activations along tokens": along_tokens,
        "2:4 weights and activations": replace(activations, weights=TWO_FOUR),
        "all six GEMMs 2:4": all_six(activations),
        "V:N:M, nearest centre": masked,
        "V:N:M, nearest centre, 2:4 weights": replace(masked, weights=TWO_FOUR),
        "skip_blocks": skip,
        "skip_blocks, 2:4 weights": replace(skip, weights=TWO_FOUR),
        "V:N:M, true mass, 1 of E": by_energy,
        "V:N:M, true mass, 2:4 weights": replace(by_energy, weights=TWO_FOUR),
        "V:N:M, true mass, 2 of 2E": two_of_twice,
        "V:N:M, nearest centre, all six": all_six(masked),
        "V:N:M, token hash, all six": all_six(replace(masked, router=TokenHash())),
        "V:N:M, true mass, all six": all_six(by_energy),
        "V:N:M, true mass, 2 of 2E, all six": all_six(two_of_twice),
        "skip_blocks, dense inside": replace(skip, activations=inside),
        "V:N:M, true mass, dense inside": replace(by_energy, activations=inside),
        "V:N:M, true mass, 2 of 2E, dense inside": replace(
            two_of_twice, activations=VNM(v, 4, 8 * experts)
        ),
        "skip_blocks by energies in fp8, dense inside": in_fp8,
        "skip_blocks by energies in fp8, 2 of 2E, dense inside": replace(
            in_fp8, activations=VNM(v, 4, 8 * experts), experts_per_token=2
        ),
        "skip_blocks, all six": all_six(skip),
        "skip_blocks, token hash, all six": all_six(replace(skip, router=TokenHash())),
    }


def choose(
    names: Collection[str], known: Mapping[str, FFNSparsity]
) -> dict[str, FFNSparsity]:
    """Returns the FFNs with the given names, in the order of `known`.

    Raises:
      ValueError: there is no FFN of a name.
    """
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"{unknown[0]!r} is no mode; choose from {', '.join(known)}")
    return {name: known[name] for name in known if name in names}


def config_of_run(comparison: Path | None, run: str) -> TrainConfig:
    """Returns the settings of a run in a comparison file.

    Raises:
      ValueError: there is no such run in the file, or no file.
    """
    if comparison is None:
        raise ValueError(f"{run!r} is a run of a comparison file; give comparison too")
    configs = _configs_of(comparison)
    if run not in configs:
        raise ValueError(
            f"{run!r} is no run of {comparison}; choose from {', '.join(configs)}"
        )
    return configs[run]


@cache
def _configs_of(comparison: Path) -> dict[str, TrainConfig]:
    """Returns the settings of all runs in a comparison file, by their names."""
    return {trial.name: trial.config for trial in read_comparison(comparison).trials}


def sparsities_of_runs(
    comparison: Path | None, runs: Collection[str]
) -> dict[str, FFNSparsity]:
    """Returns what the sparse phases of some runs in a comparison file compute, by the
    names of run and phase.

    Raises:
      ValueError: there is no such run in the file, a run has no sparse phase, or runs
        are named without a file.
    """
    sparse: dict[str, FFNSparsity] = {}
    for run in runs:
        of_run = {
            f"{run}, {phase.kind}": phase.sparsity
            for phase in phases(config_of_run(comparison, run))
            if not phase.is_dense
        }
        if not of_run:
            raise ValueError(f"runs={run!r} has no sparse phase; leave it out")
        sparse |= of_run
    return sparse


def steps_to_time(
    sparse: Mapping[str, FFNSparsity],
    *,
    preset: PresetName,
    recipes: Collection[RecipeName] = (),
    static_weights: Collection[str] = (),
    precisions: Collection[Precision] = (),
) -> dict[str, Phase]:
    """Returns the steps to time against the dense one, by name, in the order of the
    rows, each as a phase of a run.

    Args:
      sparse: sparsities by name.
      preset: the settings that recipes belong to.
      recipes: names of recipes, whose sparse phases follow.
      static_weights: patterns of static weights in all linear layers, which come last.
      precisions: precisions besides the compute dtype, in each of which the dense step
        and all others come once more, under a name that ends with it. Static weights
        do not.
    """
    phase_of = lambda name, sparsity: Phase(kind=name, steps=1, sparsity=sparsity)
    steps = {name: phase_of(name, sparsity) for name, sparsity in sparse.items()}
    steps |= {
        f"recipe {recipe}": phase
        for recipe in recipes
        for phase in phases(PRESETS[preset]().with_recipe(recipe))
        if phase.static_weights or not phase.is_dense
    }
    steps |= {
        f"{name}, {precision}": replace(phase, precision=precision)
        for precision in precisions
        for name, phase in ({DENSE_STEP: phase_of(DENSE_STEP, DENSE)} | steps).items()
        if phase.static_weights is None
    }
    for name in static_weights:
        static = from_plain(PhaseConfig, {"name": name, "static_weights": name})
        steps[f"static {name}"] = replace(
            phase_of(name, DENSE), static_weights=static.static_weights
        )
    return steps
