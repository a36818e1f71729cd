"""Figures of runs and of comparisons, drawn from what they wrote.

uv run experiments/plot.py runs/tiny-experts-20260101-120000
uv run experiments/plot.py runs/ablations
"""

import json
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

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
MOST_LINES = 6
"""The most lines in the figure of R: more cannot be told apart."""


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


LOWEST_SHOWN = 0.7
"""The bottom of the half with R_best, as a share of the lowest one."""
BESIDE = 1.03
"""The ratio of the places of two arms with as many tokens per parameter."""
TICK_APART = 1.3
"""The least ratio of two tokens per parameter that both have a label."""


def plot_equal_loss(
    folder: Path, rows: Sequence[Mapping[str, Any]], reference: str
) -> str:
    """Draws equal_loss.png in the folder of a comparison; returns a line that says what
    happened.

    On the left are the losses, without the effects of seeds, against the seconds of
    steps; where those were not measured, against what FLOPs and speeds say of them, as
    a share of the longest dense run's. On the right is R_best, the seconds to a loss
    over those of the dense arm that needs the fewest, against tokens per parameter,
    with its interval, cut off far below all arms, or a triangle where it is only the
    least that it can be, from which a line leads to what it likely is, and hollow where
    the loss of that dense arm was extrapolated;
    arms stand a little beside each other. Each arm is a line that
    is labelled, at most six with the dense model's: those with sparse steps first, then
    those with the lowest R. A loss that the dense model never has is on the
    left where all seconds were measured, and one that no other dense arm has is not on
    the right.

    Args:
      folder: the folder of the comparison.
      rows: the rows of experiments/equal_loss.py.
      reference: the arm of the dense model.
    """
    plt = pyplot()
    if plt is None:
        return missing_matplotlib("equal_loss.png")
    lines: dict[str, list[Mapping[str, Any]]] = {}
    all_measured = all(row["measured"] for row in rows)
    for row in rows:
        has_a_place = all_measured or row["dense_tokens"] is not None
        if has_a_place and row["R"] is not None and math.isfinite(row["R"]):
            lines.setdefault(row["arm"], []).append(row)
    dense = lines.pop(reference, [])
    order = lambda arm: (
        not any(row["sparse_share"] for row in lines[arm]),
        lines[arm][-1]["R"],
    )
    drawn = sorted(lines, key=order)[: MOST_LINES - 1]
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    shown = {reference: dense} if dense else {}
    shown |= {arm: lines[arm] for arm in drawn}
    all_rows = [row for points in shown.values() for row in points]
    ends: dict[Any, list[tuple[Any, str]]] = {left: [], right: []}
    at, label = _time_axis(all_rows, max((row["tokens"] for row in dense), default=1))
    shown_ratios: list[float] = []
    measured = {arm: all(row["measured"] for row in of) for arm, of in shown.items()}
    for place, (arm, points) in enumerate(shown.items()):
        is_dense = arm == reference
        color = {"color": "black"} if is_dense else {}
        ordered = sorted(points, key=at)
        losses = [row["adjusted_loss"] for row in ordered]
        (line,) = left.plot(list(map(at, ordered)), losses, "o-", markersize=4, **color)
        ends[left].append((line, arm))
        compared = [row for row in ordered if row["R_best"] is not None]
        mark = "^" if any(row["best_is_least"] for row in compared) else "o"
        if not compared:
            continue
        beside = BESIDE ** (place - len(shown) / 2)
        places = [beside * row["tokens_per_parameter"] for row in compared]
        ratios = [row["R_best"] for row in compared]
        intervals = None
        if all(row["R_best_low"] is not None for row in compared):
            intervals = [
                [max(0.0, row["R_best"] - row["R_best_low"]) for row in compared],
                [max(0.0, row["R_best_high"] - row["R_best"]) for row in compared],
            ]
        shown_ratios += ratios
        (line, *_) = right.errorbar(
            places,
            ratios,
            intervals,
            fmt=f"{mark}-",
            markersize=4,
            color=line.get_color(),
        )
        for row, x, ratio in zip(compared, places, ratios, strict=True):
            if row["best_extrapolated"]:
                look = {"facecolors": "white", "edgecolors": line.get_color()}
                right.scatter([x], [ratio], 16, marker=mark, zorder=3, **look)
            if row["best_is_least"]:
                likely = [ratio, row["R_best_likely"]]
                right.plot([x, x], likely, color=line.get_color())
                shown_ratios += likely
        how = "measured" if measured[arm] else "not measured"
        is_mixed = len(set(measured.values())) > 1
        ends[right].append((line, f"{arm}, {how}" if is_mixed else arm))
    left.set_xlabel(label)
    left.set_ylabel("final loss less seeds' effects, nats per token")
    right.axhline(1.0, color="black", linestyle="--", linewidth=1)
    lengths = sorted({row["tokens_per_parameter"] for row in rows})
    if lengths:
        right.set_xscale("log")
        right.set_xlim(lengths[0] / 1.5, lengths[-1] * 1.5)
        ticks = lengths[:1]
        for length in lengths[1:]:
            if length > TICK_APART * ticks[-1]:
                ticks.append(length)
        right.set_xticks(ticks, [f"{length:.3g}" for length in ticks], minor=False)
        right.set_xticks([], minor=True)
    compared = [row for row in all_rows if row["R_best"] is not None]
    marks = {
        "triangle: at least, and up to what is likely": "best_is_least",
        "hollow: extrapolated": "best_extrapolated",
    }
    used = [text for text, of in marks.items() if any(row[of] for row in compared)]
    lines_below = ["tokens per parameter of the dense model", "; ".join(used)]
    right.set_xlabel("\n".join(filter(None, lines_below)))
    seconds = "seconds" if any(measured.values()) else "seconds, not measured,"
    right.set_ylabel(f"R_best, {seconds} to the loss /\nthose of the best dense arm")
    if shown_ratios:
        right.set_ylim(bottom=LOWEST_SHOWN * min(shown_ratios))
    for axes in (left, right):
        axes.margins(x=0.08)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(folder.name)
    figure.canvas.draw()  # The layout says where the points lie.
    for axes, lines_and_texts in ends.items():
        _label_ends(axes, lines_and_texts)
    figure.savefig(folder / "equal_loss.png", dpi=120)
    plt.close(figure)
    left_out = [arm for arm in lines if arm not in drawn]
    of = f"; without {', '.join(left_out)}" if left_out else ""
    return f"figure: {folder / 'equal_loss.png'}{of}"


def _time_axis(
    rows: Sequence[Mapping[str, Any]], longest: int
) -> tuple[Callable[[Mapping[str, Any]], float], str]:
    """Returns a function of a row, its place on the axis of seconds, and that axis'
    label; `longest` is the number of tokens of the longest dense run."""
    if all(row["measured"] for row in rows):
        return lambda row: row["seconds"], "seconds of training steps"
    return (
        lambda row: row["R"] * row["dense_tokens"] / longest,
        "seconds, not measured,\nover those of the longest dense run",
    )


LABEL_HEIGHT = 13
"""The height of a label in points, with what is left free above it."""
MARK_RADIUS = 3
"""What the mark of a point takes to each side, in points."""


def _label_ends(axes: Any, lines_and_texts: Sequence[tuple[Any, str]]) -> None:
    """Writes the texts in a column right of the axes, each as near as there is room to
    the height of its line's last point, to which a thin line leads from it. All of the
    lines have been drawn, and no limit of the axes changes any more."""
    ends = [(line.get_xydata()[-1], line, text) for line, text in lines_and_texts]
    height = axes.get_window_extent().height
    least = LABEL_HEIGHT * axes.figure.dpi / 72 / height
    to_axes = axes.transData + axes.transAxes.inverted()
    heights = [to_axes.transform(point)[1] for point, _, _ in ends]
    order = sorted(range(len(ends)), key=lambda i: (heights[i], ends[i][2]))
    places = _apart([heights[i] for i in order], least)
    for i, place in zip(order, places, strict=True):
        point, line, text = ends[i]
        color = line.get_color()
        axes.annotate(
            text,
            point,
            xytext=(1.02, place),
            textcoords="axes fraction",
            color=color,
            va="center",
            arrowprops={
                "arrowstyle": "-",
                "color": color,
                "linewidth": 0.5,
                "relpos": (0, 0.5),
                "shrinkA": 0,
                "shrinkB": MARK_RADIUS,
            },
        )


def _apart(heights: Sequence[float], least: float) -> list[float]:
    """Returns heights in the same order that are at least `least` apart, near the given
    ones, which are sorted: those that are too near to each other spread around their
    mean."""
    groups: list[list[float]] = []

    def bottom(group: Sequence[float]) -> float:
        return sum(group) / len(group) - least * (len(group) - 1) / 2

    for height in heights:
        groups.append([height])
        while len(groups) > 1:
            before, last = groups[-2:]
            if bottom(last) - bottom(before) >= least * len(before):
                break
            groups[-2:] = [before + last]
    return [bottom(of) + least * i for of in groups for i in range(len(of))]


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
