"""Folders of a comparison whose runs nobody trained: losses, seconds and seeds as a
test wants them."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from sparsejax.config import DataConfig, ModelConfig, OptimizerConfig, TrainConfig
from sparsejax.config.config_file import to_json
from sparsejax.config.schedule import phases

DENSE = TrainConfig(
    recipe="dense",
    model=ModelConfig(d_model=64, layers=2, heads=2, kv_heads=2, d_hidden=256),
    data=DataConfig(sequence_length=64),
    optimizer=OptimizerConfig(schedule="wsd"),
    batch_size=16,
)
"""1,024 tokens a step."""


@dataclass(frozen=True, kw_only=True)
class Synthetic:
    """One run as its folder tells it."""

    name: str
    loss: float
    config: TrainConfig = DENSE
    arm: str | None = None
    seed: int = 0
    seconds: float = 100.0
    """The seconds of the run's own steps."""
    wall_seconds: float | None = None
    """The wall-clock seconds of the run; None as in runs of earlier versions."""
    side_by_side: int = 1
    device: str = "abacus"
    devices: int = 1
    batch_losses: Sequence[float] | None = None
    trunk: str | None = None
    begin: int = 0
    trunk_seconds: float = 0.0
    ended: bool = True


def ladder() -> list[Synthetic]:
    """Dense runs of three lengths, and a sparse one of each, of two seeds."""
    sparse = DENSE.with_recipe("two-four")
    return [
        Synthetic(
            name=f"{arm}-{steps}",
            arm=arm,
            config=replace(config, steps=steps),
            seed=seed,
            loss=0.9 + 0.4 * (share * steps) ** -0.3 + 1e-3 * seed,
        )
        for arm, config, share in (
            ("dense", DENSE, 1.0),
            ("two-of-eight", sparse, 0.9),
        )
        for steps in (100, 300, 1000)
        for seed in (0, 1)
    ]


def write_comparison(
    folder: Path, runs: Sequence[Synthetic], baseline: str | None = None
) -> Path:
    """Writes the runs, with `comparison.json`; returns the folder. The baseline is by
    default the first of them."""
    listing: dict[str, list[str]] = {}
    for run in runs:
        place = f"{run.name}/seed-{run.seed}"
        listing.setdefault(run.name, []).append(place)
        (folder / place).mkdir(parents=True)
        _write_run(folder / place, run)
    arms = {run.name: run.arm or run.name for run in runs}
    content = {"baseline": baseline or runs[0].name, "runs": listing, "arms": arms}
    (folder / "comparison.json").write_text(json.dumps(content))
    return folder


def _write_run(folder: Path, run: Synthetic) -> None:
    config = replace(run.config, seed=run.seed)
    (folder / "config.json").write_text(json.dumps(to_json(config)))
    session = {"device": run.device, "commit": "0123456", "jax": "0", "date": "today"}
    if run.devices > 1:
        session["devices"] = run.devices
    if run.side_by_side > 1:
        session["side_by_side"] = run.side_by_side
    (folder / "provenance.jsonl").write_text(json.dumps(session) + "\n")
    planned, steps = phases(config), config.steps
    end = {"step": steps, "phase": len(planned) - 1, "kind": planned[-1].kind}
    start = {"event": "start", "unigram_loss": 3.0, "phase": 0}
    start |= {"step": run.begin, "kind": planned[0].kind}
    if run.trunk is not None:
        origin = f"../../{run.trunk}/seed-{run.seed}"
        start["branch"] = {
            "run": origin,
            "step": run.begin,
            "seconds": run.trunk_seconds,
        }
    rate = (steps - run.begin) * config.tokens_per_step / run.seconds
    records: list[Mapping] = [start]
    if run.ended:
        records.append(
            end | {"event": "step", "loss": run.loss, "tokens_per_second": rate}
        )
        losses = {"batch_losses": run.batch_losses} if run.batch_losses else {}
        records.append(end | {"event": "validation", "loss": run.loss} | losses)
        if run.wall_seconds is not None:
            own = {"event": "checkpoint", "wall_seconds": run.wall_seconds}
            records.append(end | own)
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (folder / "metrics.jsonl").write_text(lines)


def step_record(step: int, phase: int, kind: str, **rate: float) -> dict:
    where = {"step": step, "phase": phase, "kind": kind}
    return {"event": "step", "loss": 1.0} | where | rate
