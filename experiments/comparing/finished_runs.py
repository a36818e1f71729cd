"""The runs of a comparison that have ended, as its tables and figures read them."""

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from sparsejax.config import ModelConfig, TrainConfig
from sparsejax.config.config_file import read_config
from sparsejax.config.schedule import Phase, model_of, phases, with_dense
from sparsejax.reports.records import (
    Record,
    records_until,
    training_seconds,
    wall_seconds,
)

PROVENANCE = ("device", "jax", "commit", "date")
"""What a session of a run says of where it was trained, beside the numbers of devices
and of runs at a time, where these are above 1."""


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """Consecutive steps of one model, some of them sparse."""

    steps: int
    model: ModelConfig
    sparse_share: float
    """The share of these steps that are sparse."""


@dataclass(frozen=True, kw_only=True)
class FinishedRun:
    """A run that was trained to its end, where its learning rate had come down."""

    name: str
    arm: str
    """The arm that the run belongs to, together with runs of other lengths and
    seeds."""
    seed: int
    config: TrainConfig
    loss: float
    """The last validation loss, in nats per token."""
    batch_losses: tuple[float, ...] = ()
    """The loss of each batch of that validation, in nats per token; empty where no
    record states it."""
    stretches: tuple[Stretch, ...]
    """All steps of the run, those of its trunk included."""
    seconds: float | None
    """The seconds that its steps took, those of its trunk included; None where they are
    not recorded, or where other runs had a share of the device."""
    wall_seconds: float | None = None
    """The wall-clock seconds up to the beginning of its last save, compilation,
    validation, clustering, saves and its trunk included; None where `seconds` is, or
    where no record states them."""
    side_by_side: int = 1
    """The number of runs that were trained at a time on its devices, or on those of its
    trunk."""
    device: str | None = None
    """The kind of the devices that it was trained on, and their number where there were
    several."""
    commit: str | None = None

    @property
    def tokens(self) -> int:
        """The number D of tokens that the run was trained on."""
        return self.config.steps * self.config.tokens_per_step

    @property
    def sparse_share(self) -> float:
        """The share q of the run's steps that are sparse."""
        sparse = sum(of.steps * of.sparse_share for of in self.stretches)
        return sparse / self.config.steps


def read_finished(folder: Path) -> tuple[list[FinishedRun], dict[str, str]]:
    """Returns the finished runs of the comparison in `folder`, in its order, and for
    the places of all other runs why they are not finished.

    Raises:
      ValueError: the folder holds no comparison; or the settings of a run cannot be
        read.
    """
    listing = folder / "comparison.json"
    if not listing.is_file():
        raise ValueError(
            f"{folder} holds no comparison: there is no {listing}; give the folder "
            f"that experiments/compare_recipes.py has written"
        )
    content = json.loads(listing.read_text())
    arms = content.get("arms", {})
    finished, others = [], {}
    for name, places in content["runs"].items():
        for place in places:
            own = folder / place
            why = why_unfinished(own)
            if why is None:
                finished.append(read_run(own, name, arms.get(name, name)))
            else:
                others[place] = why
    return finished, others


def baseline_arm(folder: Path) -> str:
    """Returns the arm that the baseline of the comparison in `folder` is a run of."""
    content = json.loads((folder / "comparison.json").read_text())
    return content.get("arms", {}).get(content["baseline"], content["baseline"])


def why_unfinished(folder: Path) -> str | None:
    """Returns why the run in `folder` has no final loss to compare; None where it has
    one."""
    if not (folder / "config.json").is_file():
        return "has not begun"
    config = read_config(folder / "config.json")
    optimizer = config.optimizer
    if optimizer.schedule == "wsd" and not optimizer.decay_share:
        return "is at a constant learning rate, and no completed cooldown"
    records = read_records(folder, config)
    if any(record["event"] == "non_finite_loss" for record in records):
        return "has diverged"
    if _last_validation(records, config) is None:
        return "has not ended"
    return None


def read_run(folder: Path, name: str, arm: str) -> FinishedRun:
    """Returns the run in `folder`, which has to be finished: see `why_unfinished`."""
    config = read_config(folder / "config.json")
    records = read_records(folder, config)
    last = _last_validation(records, config)
    assert last is not None
    sessions = [of for each in _with_trunks(folder) for of in read_sessions(each)]
    at_once = side_by_side(folder)
    seconds = training_seconds(records, config.tokens_per_step).get(config.steps)
    known = seconds is not None and math.isfinite(seconds) and at_once == 1
    return FinishedRun(
        name=name,
        arm=arm,
        seed=config.seed,
        config=config,
        loss=last["loss"],
        batch_losses=tuple(last.get("batch_losses", ())),
        stretches=stretches(folder, config.steps),
        seconds=seconds if known else None,
        wall_seconds=wall_seconds(records, config.steps) if known else None,
        side_by_side=at_once,
        device=_all_of(map(_devices, sessions)),
        commit=_all_of(session.get("commit") for session in sessions),
    )


def read_records(folder: Path, config: TrainConfig) -> list[Record]:
    """Returns the records of a run, leaving out lines that are no whole record."""
    kinds = [phase.kind for phase in phases(config)]
    lines = records_until(folder / "metrics.jsonl", config.steps, kinds)
    return [json.loads(line) for line in lines.splitlines()]


def read_sessions(folder: Path) -> list[dict]:
    """Returns where a run was trained: one entry for each time that it was begun or
    gone on with."""
    noted = folder / "provenance.jsonl"
    lines = noted.read_text().splitlines() if noted.exists() else []
    return [json.loads(line) for line in lines]


def side_by_side(folder: Path) -> int:
    """Returns how many runs at most were trained at a time on the devices of a run, or
    on those of its trunk, whose seconds are part of its own."""
    sessions = (of for each in _with_trunks(folder) for of in read_sessions(each))
    return max((of.get("side_by_side", 1) for of in sessions), default=1)


def trunk_of(folder: Path, records: Sequence[Record]) -> tuple[Path, int] | None:
    """Returns the folder of the run that this one is a branch of, and the step that it
    begins with; None where it is no branch."""
    for record in records:
        if record["event"] == "start" and "branch" in record:
            origin = record["branch"]
            return (folder / origin["run"]).resolve(), origin["step"]
    return None


def stretches(folder: Path, steps: int) -> tuple[Stretch, ...]:
    """Returns the first `steps` steps of a run as they were trained, those of its trunk
    as the trunk trained them."""
    config = read_config(folder / "config.json")
    records = read_records(folder, config)
    trunk = trunk_of(folder, records)
    before, begin = (), 0
    if trunk is not None:
        begin = min(trunk[1], steps)
        before = stretches(trunk[0], begin)
    planned = phases_as_trained(config, records)
    own, end = [], 0
    for phase, end in zip(planned, accumulate(of.steps for of in planned), strict=True):
        count = min(end, steps) - max(end - phase.steps, begin)
        shares = zip(phase.shares, phase.sparsities, strict=True)
        sparse = sum(share for share, of in shares if not of.is_dense)
        if count > 0:
            model = model_of(phase, config.model)
            own.append(Stretch(steps=count, model=model, sparse_share=sparse))
    return (*before, *own)


def phases_as_trained(
    config: TrainConfig, records: Sequence[Record]
) -> tuple[Phase, ...]:
    """Returns the phases of a run, those that were timed and found slower than dense
    with all GEMMs dense, as they were trained."""
    run_dense = next((r["run_dense"] for r in records if "run_dense" in r), ())
    return with_dense(phases(config), run_dense)


def _with_trunks(folder: Path) -> Iterator[Path]:
    """Yields a run's folder, and the folders of its trunk, of the trunk's trunk, and so
    on."""
    yield folder
    config = read_config(folder / "config.json")
    trunk = trunk_of(folder, read_records(folder, config))
    if trunk is not None and (trunk[0] / "config.json").is_file():
        yield from _with_trunks(trunk[0])


def _last_validation(records: Sequence[Record], config: TrainConfig) -> Record | None:
    of_event = (r for r in records if r["event"] == "validation")
    return next((r for r in of_event if r["step"] == config.steps), None)


def _devices(session: dict) -> str | None:
    kind, count = session.get("device"), session.get("devices", 1)
    return kind if count == 1 or kind is None else f"{count} x {kind}"


def _all_of(values: Iterable[str | None]) -> str | None:
    return ", ".join(dict.fromkeys(filter(None, values))) or None
