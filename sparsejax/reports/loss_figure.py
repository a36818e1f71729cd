"""The figure of a run, drawn from its records."""

from collections.abc import Iterable
from itertools import cycle
from pathlib import Path
from typing import Any

from sparsejax.reports.records import Record, first_step, read_metrics

SHADES = {"warm-up": "#c8c8c8", "sparse": "#cfe8cf", "dense": "#eeeeee"}
"""The colour of each phase that a recipe has."""
OTHER_SHADES = ("#d6e4f5", "#f7e3c8", "#e6d9f0", "#d3ede9", "#f6d9dc", "#eceabf")
"""The colours of phases with other names, in the order in which the phases come."""


def plot_run(folder: Path) -> str:
    """Draws loss.png in the run folder; returns a line that says what happened.

    It has the training loss as a line, the validation loss as points, the phases
    shaded, and the unigram model's loss dashed.
    """
    plt = pyplot()
    if plt is None:
        return missing_matplotlib("loss.png")
    records = read_metrics(folder)
    steps = of_event(records, "step")
    validations = of_event(records, "validation")
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    spans = phase_spans(records)
    shades = shades_of(kind for kind, _, _ in spans)
    for kind, first, last in spans:
        axes.axvspan(first, last, color=shades[kind], alpha=0.6, linewidth=0)
        # Above the axes, where a name that is wider than its phase hides no curve.
        top = axes.get_xaxis_transform()
        middle = (first + last) / 2
        axes.text(middle, 1.01, kind, transform=top, ha="center", va="bottom")
    axes.plot(
        [r["step"] for r in steps],
        [r["loss"] for r in steps],
        color="tab:blue",
        linewidth=1,
        label="training",
    )
    axes.plot(
        [r["step"] for r in validations],
        [r["loss"] for r in validations],
        "o",
        color="tab:red",
        markersize=4,
        label="validation, as the phase computes",
    )
    unigram = [r["unigram_loss"] for r in records if r["event"] == "start"]
    if unigram:
        axes.axhline(unigram[0], color="gray", linestyle="--", label="unigram model")
    axes.set_xlabel("optimiser step")
    axes.set_ylabel("loss, nats per token")
    axes.set_title(folder.name, pad=22)
    axes.margins(x=0.01)
    axes.legend()
    figure.savefig(folder / "loss.png", dpi=120)
    plt.close(figure)
    return f"figure: {folder / 'loss.png'}"


def shades_of(kinds: Iterable[str]) -> dict[str, str]:
    """Returns a colour for each phase, by its name."""
    others = cycle(OTHER_SHADES)
    return {kind: SHADES.get(kind) or next(others) for kind in dict.fromkeys(kinds)}


def phase_spans(records: list[Record]) -> list[tuple[str, int, int]]:
    """Returns the kind, first and last step of each phase."""
    steps = of_event(records, "step")
    spans, first = [], first_step(records)
    for phase in sorted({r["phase"] for r in steps}):
        of_phase = [r for r in steps if r["phase"] == phase]
        last = of_phase[-1]["step"]
        spans.append((of_phase[0]["kind"], first, last))
        first = last
    return spans


def of_event(records: list[Record], event: str) -> list[Record]:
    return [record for record in records if record["event"] == event]


def pyplot() -> Any:
    """Returns matplotlib.pyplot with a backend that needs no screen, or None where it
    is not installed."""
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def missing_matplotlib(figure: str) -> str:
    return f"no {figure}: matplotlib is missing; run `uv sync --extra plots`"
