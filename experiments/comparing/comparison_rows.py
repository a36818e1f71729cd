"""The rows of a comparison: what each of its runs was, and what came of it."""

import math
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

from experiments.comparing.comparison_file import Comparison, Trial
from experiments.comparing.finished_runs import (
    PROVENANCE,
    read_records,
    read_sessions,
    side_by_side,
)
from sparsejax.config import TrainConfig
from sparsejax.config.config_file import changed_settings
from sparsejax.config.presets import PRESETS
from sparsejax.config.schedule import phases
from sparsejax.reports.records import first_step, training_seconds

AROUND_A_SWITCH = ("before", "before_unmasked", "after", "after_unmasked")


def rows_of(comparison: Comparison, ended: Sequence[Trial], folder: Path) -> list[dict]:
    """Returns the rows of the runs that have ended, as far as the baseline of their
    seed has, which may be a branch of another: the same whenever it is asked.

    Args:
      comparison: what is compared.
      ended: its runs that have ended.
      folder: the folder of the comparison.
    Raises:
      ValueError: a run has ended and lacks records of it.
    """
    losses = {trial: _losses(trial.config, folder / trial.place) for trial in ended}
    references = {
        trial.seed: own["loss"]
        for trial, own in losses.items()
        if trial.name == comparison.baseline
    }
    return [
        _row(comparison, trial, folder / trial.place, own, references[trial.seed])
        for trial, own in losses.items()
        if trial.seed in references
    ]


def _row(
    comparison: Comparison,
    trial: Trial,
    folder: Path,
    own: dict,
    reference: float | None,
) -> dict:
    """Returns the row of one run.

    Args:
      own: its `_losses`.
      reference: the last loss of the baseline; None where that has diverged.
    """
    config = trial.config
    settings = changed_settings(PRESETS[config.preset](), config)
    missing = None in (own["loss"], reference)
    beside = side_by_side(folder)
    # What a run says of its speed that had a share of the device means nothing.
    untimed = {"seconds": None, "side_by_side": beside} if beside > 1 else {}
    return {
        "comparison": comparison.name,
        "name": trial.name,
        "seed": trial.seed,
        "preset": config.preset,
        **({} if trial.trunk is None else {"branch": f"{trial.trunk}@{trial.begin}"}),
        "settings": {
            name: value
            for name, (_, value) in settings.items()
            if name not in ("seed", "data.seed")
        },
        **own,
        **untimed,
        "baseline": comparison.baseline,
        "to_baseline": None if missing else own["loss"] - reference,
        **_provenance(folder),
    }


def _losses(config: TrainConfig, folder: Path) -> dict:
    """Returns the validation losses, tokens and seconds of a run that has ended."""
    records = read_records(folder, config)
    validation = {r["step"]: r["loss"] for r in records if r["event"] == "validation"}
    switches = [r for r in records if r["event"] == "switch"]
    diverged = [r["at"] for r in records if r["event"] == "non_finite_loss"]
    planned = phases(config)
    ends = list(accumulate(phase.steps for phase in planned))
    own_ends = {end for end in ends if end > first_step(records)}
    if not diverged and not validation.keys() >= own_ends:
        raise ValueError(
            f"{folder} holds a run that has ended, but its metrics.jsonl lacks a "
            f"validation at step {', '.join(map(str, sorted(own_ends)))}; delete the "
            f"folder to train the run anew"
        )
    seconds = training_seconds(records, config.tokens_per_step)
    steps = max(seconds)
    return {
        "steps": steps,
        "validation": {
            phase.kind: validation[end]
            for phase, end in zip(planned, ends, strict=True)
            if end in validation
        },
        "switches": [
            # Earlier records did not say what was left; no run was a branch then.
            {"from": switch.get("from", planned[switch["phase"] - 1].kind)}
            | {"to": switch["to"]}
            | {name: switch[name] for name in ("step", *AROUND_A_SWITCH)}
            for switch in switches
        ],
        "loss": None if diverged else validation[config.steps],
        "diverged_at": diverged[0] if diverged else None,
        "tokens": steps * config.tokens_per_step,
        "seconds": None if math.isnan(seconds[steps]) else seconds[steps],
    }


def _provenance(folder: Path) -> dict[str, str | None]:
    """Returns the devices and versions that all sessions of the run had."""
    sessions = read_sessions(folder)
    values = {
        name: dict.fromkeys(session[name] for session in sessions)
        for name in PROVENANCE
    }
    return {
        name: ", ".join(filter(None, different)) or None
        for name, different in values.items()
    }
