"""Figures of runs and of comparisons, drawn from what they wrote.

uv run experiments/plot.py runs/tiny-experts-20260101-120000
uv run experiments/plot.py runs/ablations
"""

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np

from experiments.comparing.finished_runs import side_by_side
from sparsejax.config.config_file import read_config
from sparsejax.reports.loss_figure import (
    missing_matplotlib,
    of_event,
    phase_spans,
    plot_run,
    pyplot,
    shades_of,
)
from sparsejax.reports.records import read_metrics, training_seconds
from sparsejax.terminal import console

LINES = ("-", "--", ":", "-.")


def plot_comparison(folder: Path) -> str:
    """Draws comparison.png in the folder of a comparison; returns a line that says what
    happened.

    It has the validation loss as the phase computes, on both sides of a switch, against
    tokens and against seconds of training; a colour for each run, a line for each seed.
    Below are the phases of each run's first seed. Runs that have not begun are left
    out.
    """
    plt = pyplot()
    if plt is None:
        return missing_matplotlib("comparison.png")
    listed = json.loads((folder / "comparison.json").read_text())["runs"]
    has_begun = lambda place: (folder / place / "config.json").is_file()
    begun = {name: list(filter(has_begun, places)) for name, places in listed.items()}
    runs = {name: places for name, places in begun.items() if places}
    strip = 0.25 * len(runs)
    figure, grid = plt.subplots(
        *(2, 2),
        sharex="col",
        sharey="row",
        figsize=(12, 8 + strip),
        gridspec_kw={"height_ratios": (8, strip)},
        layout="constrained",
    )
    colours = plt.get_cmap("tab10" if len(runs) <= 10 else "tab20")
    read = {place: read_metrics(folder / place) for of in runs.values() for place in of}
    shades = shades_of(kind for of in read.values() for kind, _, _ in phase_spans(of))
    for row, (name, places) in enumerate(runs.items()):
        for index, place in enumerate(places):
            records = read[place]
            curve = _validation_curve(records)
            config = read_config(folder / place / "config.json")
            for at, (losses, strips) in zip(
                _scales(records, config.tokens_per_step), grid.T, strict=True
            ):
                losses.plot(
                    [at(step) for step, _ in curve],
                    [loss for _, loss in curve],
                    color=colours(row % colours.N),
                    linestyle=LINES[index % len(LINES)],
                    marker=".",
                    linewidth=1,
                    label=name if index == 0 else None,
                )
                for kind, first, last in phase_spans(records) if index == 0 else ():
                    start, width = at(first), at(last) - at(first)
                    strips.barh(row, width, left=start, color=shades[kind], label=kind)
    (by_tokens, by_seconds), (phases, phases_by_seconds) = grid
    by_tokens.set_ylabel("validation loss, nats per token")
    by_tokens.legend(title="a line per seed")
    phases.set_yticks(range(len(runs)), labels=runs)
    phases.invert_yaxis()
    handles, labels = phases.get_legend_handles_labels()
    kinds = dict(zip(labels, handles, strict=True))
    by_seconds.legend(kinds.values(), kinds, title="phases, below")
    phases.set_xlabel("tokens")
    phases.xaxis.set_major_formatter("{x:,.0f}")
    phases.locator_params(axis="x", nbins=5)
    places = [folder / place for of in runs.values() for place in of]
    phases_by_seconds.set_xlabel(_seconds_label(places))
    figure.suptitle(folder.name)
    figure.savefig(folder / "comparison.png", dpi=120)
    plt.close(figure)
    return f"figure: {folder / 'comparison.png'}"


def _seconds_label(runs: Iterable[Path]) -> str:
    """Returns the label of the axis of seconds."""
    shared = any(side_by_side(run) > 1 for run in runs)
    return "seconds of training steps" + (", on a shared device" if shared else "")


def _validation_curve(records: list[dict]) -> list[tuple[int, float]]:
    """Returns the steps and losses of the validations; at a switch the step comes
    twice, with the loss before it and after."""
    points = [(r["step"], r["loss"]) for r in of_event(records, "validation")]
    points += [(r["step"], r["after"]) for r in of_event(records, "switch")]
    return sorted(points, key=lambda point: point[0])


def _scales(
    records: list[dict], tokens_per_step: int
) -> tuple[Callable[[int], float], Callable[[int], float]]:
    """Returns two functions of a step: its place on the axis of tokens, and on that of
    seconds."""
    seconds = training_seconds(records, tokens_per_step)
    known, values = list(seconds), list(seconds.values())
    return (
        lambda step: step * tokens_per_step,
        lambda step: float(np.interp(step, known, values)),
    )


def run(arguments: Sequence[str]) -> int:
    """Runs the command and returns its exit status."""
    try:
        for folder in map(Path, arguments):
            is_comparison = (folder / "comparison.json").is_file()
            print(plot_comparison(folder) if is_comparison else plot_run(folder))
    except (OSError, ValueError) as error:
        of = "give the folder of a run or of a comparison"
        return console.fail(error, f"{error}; {of}")
    return 0


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
