"""Predicts the steps that were measured, and says how far off each prediction is.

    uv run experiments/predict_step.py

It reads the rows of `experiments/bench/step.py` and `experiments/bench/mesh.py` that
are kept in `experiments/results/`, and the speeds at which runs of comparisons that are
kept there were trained, the newest of each kind. It predicts every step as `sparsejax
plan` does, from the data sheets' peaks, the shares of them that one of these steps has
reached, and the tables of kernel times. Rows whose sparsity has no name here (static
weights, and runs whose comparison the row does not name), those of sparse steps in
8-bit floats from before GEMM 1 was one of them, and those with a row for each expert of
a token where it has one row for all of them today, are left out and counted; so are
runs that shared a GPU, and phases whose steps differ among themselves.

It runs on a CPU in a few seconds. Expected: of 181 steps of one GPU half are within
1.7 %, and all but four within 11 %; 12 steps of `gpt-124m` on two GPUs are predicted 6
to 15 % too short, 18 of `llama-1b` on two and four between 4 % too long and 7 % too
short.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

import tyro

from experiments.bench.rows import append_rows
from experiments.bench.sparse_modes import (
    DENSE_STEP,
    config_of_run,
    sparse_modes,
    sparsities_of_runs,
)
from experiments.comparing.finished_runs import (
    phases_as_trained,
    read_records,
    read_sessions,
    side_by_side,
)
from pallas_kernels.device import Device
from sparsejax.config import (
    RECIPES,
    MeshConfig,
    ModelConfig,
    RecipeConfig,
    RecipeName,
    TrainConfig,
)
from sparsejax.config.config_file import FORMER_RECIPES, from_plain, read_config
from sparsejax.config.presets import PRESETS
from sparsejax.config.schedule import model_of
from sparsejax.cost_model import Links, PredictedStep, Speeds, predicted_step
from sparsejax.feed_forward.packing import rows_of_token
from sparsejax.feed_forward.sparsity import DENSE, FFNSparsity
from sparsejax.ops.backend import Decision
from sparsejax.reports.metrics import ffn_decisions
from sparsejax.routing.named_routers import named_router
from sparsejax.routing.routers import ActivationEnergy
from sparsejax.sparsity.patterns import VNM

RESULTS = Path(__file__).parent / "results"
LAST_OF_OTHER_GEMM_1 = "2026-11-25"
"""The last date of rows of sparse steps in `fp8` whose GEMM 1 was in bfloat16."""
LAST_OF_OTHER_ROWS = "2026-11-25"
"""The last date of runs whose tokens had a row for each of their experts."""
LAST_OF_ATTENTION_AGAIN = "2026-11-28"
"""The last date of steps whose backward computed attention and the rotations again with
remat "dots"."""
COMMITS_OF_ATTENTION_AGAIN = ("efeac6f+",)
"""The commits of such steps on that date; other steps of that date did not."""
LAST_OF_LARGE_SAMPLES = "2026-11-27"
"""The last date of steps whose FFNs looked at as many tokens in each micro-batch, or on
a mesh in each call of all its devices, as today in a whole step."""
LAST_OF_XLA_SQUARES = "2026-11-26"
"""The last date of runs whose dense FFNs had their squares from XLA on every GPU."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings: which measured rows are predicted."""

    since: str = "2026-11-22"
    """The date, YEAR-MONTH-DAY, of the first rows: earlier ones ran other kernels."""
    steps: Path = RESULTS / "bench_step.jsonl"
    """Rows of `experiments/bench/step.py`."""
    meshes: Path = RESULTS / "bench_mesh.jsonl"
    """Rows of `experiments/bench/mesh.py`."""
    comparisons: Path = RESULTS
    """Folder whose folders are comparisons that `experiments/compare_recipes.py` has
    trained."""
    results: Path | None = Path("runs/predict_step.jsonl")
    """File to which one JSON line per step is appended; None writes nothing."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A step that was measured, and what is needed to predict it."""

    name: str
    preset: str
    model: ModelConfig
    sparsity: FFNSparsity
    device: str
    mesh: MeshConfig
    sequence_length: int
    tokens_per_device: int
    micro_batches: int
    backend: Any
    date: str
    commit: str | None
    step_ms: float

    @property
    def kind(self) -> tuple:
        """What a newer row has to share with this one to take its place."""
        ran = (self.name, self.model, self.sparsity, self.micro_batches)
        return (*ran, self.device, self.mesh, self.backend)

    def decisions(self) -> tuple[Decision, ...]:
        """Returns what runs the GEMMs of the FFN today."""
        return ffn_decisions(
            self.model,
            self.sparsity,
            self.tokens_per_device,
            self.backend,
            mesh=MeshConfig(data=1, tensor=self.mesh.tensor),
            device=Device.named(self.device),
        )

    def predicted(self) -> PredictedStep:
        """Returns the predicted step."""
        step = self._predicted(self.model)
        if self.model.remat == "dots" and self._attention_ran_again():
            again = self._predicted(replace(self.model, remat="full"))
            whole = {"attention": again.attention, "elementwise": again.elementwise}
            step = replace(step, **whole)
        return step

    def _attention_ran_again(self) -> bool:
        if self.date == LAST_OF_ATTENTION_AGAIN:
            return self.commit in COMMITS_OF_ATTENTION_AGAIN
        return self.date < LAST_OF_ATTENTION_AGAIN

    def _predicted(self, model: ModelConfig) -> PredictedStep:
        speeds = Speeds.of(Device.named(self.device), model.dtype)
        assert speeds is not None, self.device
        return predicted_step(
            model,
            sequence_length=self.sequence_length,
            tokens_per_device=self.tokens_per_device,
            micro_batches=self.micro_batches,
            sparsity=self.sparsity,
            decisions=self.decisions(),
            speeds=speeds,
            mesh=self.mesh,
            links=Links(),
            share_of_step=1.0 if self.date <= LAST_OF_LARGE_SAMPLES else None,
        )


def main(config: Config) -> list[dict]:
    """Predicts, prints and records every step; returns the rows."""
    newest: dict[tuple, Measured] = {}
    left_out = 0
    sources = measured_steps(config), measured_meshes(config), measured_runs(config)
    for measured in chain.from_iterable(sources):
        if measured is None:
            left_out += 1
        else:
            newest[measured.kind] = measured
    rows = [_row(of) for of in newest.values()]
    _print(rows, left_out)
    append_rows(rows, config.results)
    return rows


def measured_steps(config: Config) -> Iterator[Measured | None]:
    """Yields the steps of one GPU; None for a row whose sparsity has no name here,
    whose run is in no comparison file any more, or whose GEMM 1 or rows of experts were
    others."""
    for row in _rows(config.steps, config.since):
        # Rows of before there was such a column ran the loop, in the compute dtype.
        scan = row.get("scan_layers")
        precision = row.get("precision") or "dtype"
        name = row["name"].removesuffix(f", {precision}")
        try:
            given = _settings_of(row)
            sparsity = _sparsity_by_name(name, row, given)
        except (OSError, ValueError):
            yield None
            continue
        if sparsity is None or row.get("static_weights"):
            yield None
            continue
        in_8_bits = precision != "dtype" and sparsity.up_is_dense
        if in_8_bits and not sparsity.is_dense and row["date"] <= LAST_OF_OTHER_GEMM_1:
            yield None
            continue
        measured = Measured(
            name=name,
            preset=row.get("model_of") or row["preset"],
            model=replace(
                given.model,
                layers=row["layers"],
                d_hidden=row.get("d_hidden") or given.model.d_hidden,
                kv_heads=row.get("kv_heads") or given.model.kv_heads,
                vocab_size=row.get("vocab_size") or given.model.vocab_size,
                remat=row["remat"],
                scan_layers=True if scan is None else scan,
                logits_of_loss=row.get("logits_of_loss") or "float32",
                precision=precision,
            ),
            sparsity=sparsity,
            device=row["device"],
            mesh=MeshConfig(data=1),
            sequence_length=given.data.sequence_length,
            tokens_per_device=row["tokens_per_micro_batch"],
            micro_batches=row["micro_batches"],
            backend=_backend_of_dense(row) if sparsity.is_dense else None,
            date=row["date"],
            commit=row.get("commit"),
            step_ms=row["step_ms"],
        )
        # Rows without the column had a row for each.
        rows = row.get("rows_of_token", sparsity.expert_choices)
        same = rows_of_token(sparsity, measured.decisions()) == rows
        yield measured if same else None


def measured_meshes(config: Config) -> Iterator[Measured | None]:
    """Yields the steps of several GPUs, and of one beside them; None for a row with
    static weights."""
    for row in _rows(config.meshes, config.since):
        if row.get("static_weights"):
            yield None
            continue
        preset = PRESETS[row["preset"]]()
        sparsity = _sparsity_of(row)
        axes, *_ = row["name"].partition(",")
        sizes = [int(word) for word in axes.split() if word.isdigit()]
        data, fsdp, tensor = sizes or (1, 1, 1)
        stage = row.get("zero_stage", 3)
        mesh = MeshConfig(data=data, fsdp=fsdp, tensor=tensor, zero_stage=stage)
        # Rows without these columns are of all layers in a loop, and two micro-batches.
        layers = row.get("layers", preset.model.layers)
        scan, micro_batches = row.get("scan_layers", True), row.get("micro_batches", 2)
        sequences = row["batch_size"] // micro_batches // mesh.token_shards
        skips = ", skip_blocks" if sparsity.skip_blocks else ""
        routed = f", {sparsity.router.name}" if sparsity.experts else ""
        yield Measured(
            name=f"{row['recipe']}{skips}{routed}, {row['name']}",
            preset=row["preset"],
            model=replace(preset.model, layers=layers, scan_layers=scan),
            sparsity=sparsity,
            device=row["device"],
            mesh=mesh,
            sequence_length=preset.data.sequence_length,
            tokens_per_device=sequences * preset.data.sequence_length,
            micro_batches=micro_batches,
            backend=row["backend"] or _backend_on(row["date"], sparsity),
            date=row["date"],
            commit=row.get("commit"),
            step_ms=row["step_ms"],
        )


def measured_runs(config: Config) -> Iterator[Measured | None]:
    """Yields the steps of the runs of comparisons, one for each phase, in the median of
    the speeds that a run has recorded; None for a phase whose steps are left out."""
    for listing in sorted(config.comparisons.glob("*/comparison.json")):
        runs = json.loads(listing.read_text())["runs"]
        for place in chain.from_iterable(runs.values()):
            folder = listing.parent / place
            sessions = read_sessions(folder)
            # Runs of before there was such a file are older than the kernels.
            if sessions and sessions[-1]["date"] >= config.since:
                yield from _phases_of(folder, sessions[-1], listing.parent.name)


def _phases_of(
    folder: Path, session: dict, comparison: str
) -> Iterator[Measured | None]:
    """Yields the steps of one run, the last of whose sessions is given."""
    given = read_config(folder / "config.json")
    records = read_records(folder, given)
    alone = side_by_side(folder) == 1 and session.get("devices", 1) == 1
    for index, phase in enumerate(phases_as_trained(given, records)):
        speeds = [
            record["tokens_per_second"]
            for record in records
            if record["phase"] == index and "tokens_per_second" in record
        ]
        other_rows = phase.sparsity.experts and session["date"] <= LAST_OF_OTHER_ROWS
        if not (speeds and alone and len(phase.sparsities) == 1) or other_rows:
            yield None
            continue
        micro_batches = given.micro_batches_on(MeshConfig(data=1))
        yield Measured(
            name=f"{'dense' if phase.sparsity.is_dense else phase.kind}, trained",
            preset=comparison,
            model=model_of(phase, given.model),
            sparsity=phase.sparsity,
            device=session["device"],
            mesh=MeshConfig(data=1),
            sequence_length=given.data.sequence_length,
            tokens_per_device=given.tokens_per_step // micro_batches,
            micro_batches=micro_batches,
            backend=_backend_on(session["date"], phase.sparsity),
            date=session["date"],
            commit=session.get("commit"),
            step_ms=1e3 * given.tokens_per_step / median(speeds),
        )


def _backend_of_dense(row: dict) -> str:
    """Returns what has run GEMMs 1 and 3 of a dense step of `bench/step.py`."""
    _, _, backend = row.get("gemms", ["1: xla"])[0].rpartition(": ")
    return backend


def _backend_on(date: str, sparsity: FFNSparsity) -> str | None:
    """Returns the backend of a step of that day, None for what is planned today."""
    return "xla" if sparsity.is_dense and date <= LAST_OF_XLA_SQUARES else None


def _settings_of(row: dict) -> TrainConfig:
    """Returns the settings whose model `bench/step.py` has timed: those of a run in a
    comparison file, or a preset's."""
    if run := row.get("model_of"):
        return config_of_run(_file_of(row), run)
    return PRESETS[row["preset"]]()


FORMER_EXPERTS = replace(
    RECIPES["experts"], router=ActivationEnergy(), skip_blocks=False
)
"""The sparsity of the recipe experts in rows that do not say theirs: they are of before
it chose by 8-bit floats."""


def _sparsity_by_name(name: str, row: dict, given: TrainConfig) -> FFNSparsity | None:
    """Returns what a step of `bench/step.py` has computed, or None where the row does
    not say so and no step has that name today."""
    if "sparsity" in row:
        return from_plain(FFNSparsity, row["sparsity"])
    experts, v = row.get("experts") or 4, row.get("v") or 128
    known = {DENSE_STEP: DENSE} | sparse_modes(experts=experts, v=v)
    known |= {f"recipe {of}": given.with_recipe(of).sparsity for of in RECIPES}
    known["recipe experts"] = FORMER_EXPERTS
    known |= {
        f"recipe {of}": known[f"recipe {now}"] for of, now in FORMER_RECIPES.items()
    }
    if name not in known and row.get("comparison"):
        run = name.partition(", ")[0]
        known |= sparsities_of_runs(_file_of(row), (run,))
    return known.get(name)


def _file_of(row: dict) -> Path:
    return Path(__file__).parent / "comparisons" / f"{row['comparison']}.toml"


def _sparsity_of(row: dict) -> FFNSparsity:
    """Returns the sparsity of the step that `bench/mesh.py` has timed."""
    recipe: RecipeName = FORMER_RECIPES.get(row["recipe"], row["recipe"])
    phases = row["phases"]
    if RECIPES[recipe].is_dense:
        return DENSE
    if "sparsity" in phases:
        return from_plain(RecipeConfig, phases).sparsity or RECIPES[recipe]
    return replace(
        RECIPES[recipe],
        activations=VNM(phases["block_rows"], 2, 4 * phases["experts"]),
        experts_per_token=phases["experts_per_token"],
        router=named_router(phases["router"]),
        skip_blocks=phases["skip_blocks"],
        token_sparsity=phases["token_sparsity"],
    )


def _rows(file: Path, since: str) -> Iterator[dict]:
    with file.open() as lines:
        rows = [json.loads(line) for line in lines]
    yield from (row for row in rows if row["date"] >= since)


def _row(measured: Measured) -> dict:
    step = measured.predicted()
    return {
        "name": measured.name,
        "preset": measured.preset,
        "layers": measured.model.layers,
        "d_hidden": measured.model.d_hidden,
        "remat": measured.model.remat,
        "micro_batches": measured.micro_batches,
        "scan_layers": measured.model.scan_layers,
        "precision": measured.model.precision,
        "device": measured.device,
        "devices": measured.mesh.devices,
        "measured_ms": measured.step_ms,
        "measured_on": measured.date,
        "predicted_ms": 1e3 * step.total,
        "predicted_exposed_ms": 1e3 * step.exposed,
        "error": 1e3 * step.total / measured.step_ms - 1,
    }


def _print(rows: list[dict], left_out: int) -> None:
    for row in rows:
        loop = "" if row["remat"] == "none" else f", remat {row['remat']}"
        loop += ", loop over layers" if row["scan_layers"] else ""
        parts = f", {row['micro_batches']} micro-batch"
        parts += "es" if row["micro_batches"] > 1 else ""
        fp8 = "" if row["precision"] == "dtype" else f", {row['precision']}"
        gpu = row["device"].removeprefix("NVIDIA ").split()[0]
        print(
            f"{row['error']:>+7.1%}  measured {row['measured_ms']:>7,.1f} ms, "
            f"predicted {row['predicted_ms']:>7,.1f} ms  {row['devices']} {gpu}, "
            f"{row['preset']}, {row['layers']} layers, {row['name']}{fp8}{parts}{loop}"
        )
    for devices in sorted({row["devices"] for row in rows}):
        errors = [abs(row["error"]) for row in rows if row["devices"] == devices]
        print(
            f"{len(errors)} steps of {devices} GPU(s): half are off by "
            f"{median(errors):.1%} or less, the worst by {max(errors):.1%}"
        )
    print(f"{left_out} steps were left out")


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__, prog="experiments/predict_step.py"))
