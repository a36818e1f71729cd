"""The figure of experiments/equal_loss.py: losses against seconds, and R_best."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sparsejax.reports.loss_figure import missing_matplotlib, pyplot

type Row = Mapping[str, Any]
"""A row of experiments/equal_loss.py."""
type Ends = Sequence[tuple[Any, str]]
"""Lines that were drawn, each with the text of its label."""

MOST_LINES = 6
"""The most lines in the figure: more cannot be told apart."""
LOWEST_SHOWN = 0.7
"""The bottom of the half with R_best, as a share of the lowest one."""
BESIDE = 1.03
"""The ratio of the places of two arms with as many tokens per parameter."""
TICK_APART = 1.3
"""The least ratio of two tokens per parameter that both have a label."""


def plot_equal_loss(folder: Path, rows: Sequence[Row], reference: str) -> str:
    """Draws equal_loss.png in the folder of a comparison; returns a line that says what
    happened.

    On the left are the losses, without the effects of seeds, against the seconds of
    steps; where those were not measured, against what FLOPs or predictions and speeds
    say of them, as a share of the longest dense run's. On the right is R_best, the
    seconds to a loss over those of the dense arm that needs the fewest, against tokens
    per parameter, with its interval, cut off far below all arms, or a triangle where it
    is only the least that it can be, from which a line leads to what it likely is, and
    hollow where the loss of that dense arm was extrapolated; arms stand a little beside
    each other. Each arm is a line that is labelled, at most six with the dense model's:
    those with sparse steps first, then those with the lowest R. A loss that the dense
    model never has is on the left where all seconds were measured, and one that no
    other dense arm has is not on the right.

    Args:
      folder: the folder of the comparison.
      rows: the rows of experiments/equal_loss.py.
      reference: the arm of the dense model.
    """
    plt = pyplot()
    if plt is None:
        return missing_matplotlib("equal_loss.png")
    shown, left_out = _arms(rows, reference)
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    losses = _draw_losses(left, shown, reference)
    colours = {arm: line.get_color() for line, arm in losses}
    ratios = _draw_ratios(right, shown, colours)
    _label_lengths(right, sorted({row["tokens_per_parameter"] for row in rows}))
    for axes in (left, right):
        axes.margins(x=0.08)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(folder.name)
    figure.canvas.draw()  # The layout says where the points lie.
    _label_ends(left, losses)
    _label_ends(right, ratios)
    figure.savefig(folder / "equal_loss.png", dpi=120)
    plt.close(figure)
    of = f"; without {', '.join(left_out)}" if left_out else ""
    return f"figure: {folder / 'equal_loss.png'}{of}"


def _arms(
    rows: Sequence[Row], reference: str
) -> tuple[dict[str, list[Row]], list[str]]:
    """Returns the rows of each arm that is drawn, the dense model's first, and the arms
    for which there is no room."""
    lines: dict[str, list[Row]] = {}
    all_measured = all(row["measured"] for row in rows)
    for row in rows:
        has_a_place = all_measured or row["dense_tokens"] is not None
        if has_a_place and row["R"] is not None and math.isfinite(row["R"]):
            lines.setdefault(row["arm"], []).append(row)
    dense = {reference: lines.pop(reference)} if reference in lines else {}
    order = lambda arm: (
        not any(row["sparse_share"] for row in lines[arm]),
        lines[arm][-1]["R"],
    )
    drawn = sorted(lines, key=order)[: MOST_LINES - 1]
    left_out = [arm for arm in lines if arm not in drawn]
    return dense | {arm: lines[arm] for arm in drawn}, left_out


def _draw_losses(axes: Any, shown: Mapping[str, list[Row]], reference: str) -> Ends:
    """Draws the losses of all arms against seconds, the dense model in black."""
    all_rows = [row for of in shown.values() for row in of]
    longest = max((row["tokens"] for row in shown.get(reference, [])), default=1)
    at, label = _time_axis(all_rows, longest)
    ends = []
    for arm, of in shown.items():
        colour = {"color": "black"} if arm == reference else {}
        ordered = sorted(of, key=at)
        losses = [row["adjusted_loss"] for row in ordered]
        (line,) = axes.plot(
            list(map(at, ordered)), losses, "o-", markersize=4, **colour
        )
        ends.append((line, arm))
    axes.set_xlabel(label)
    axes.set_ylabel("final loss less seeds' effects, nats per token")
    return ends


def _time_axis(rows: Sequence[Row], longest: int) -> tuple[Callable[[Row], float], str]:
    """Returns a function of a row, its place on the axis of seconds, and that axis'
    label; `longest` is the number of tokens of the longest dense run."""
    if all(row["measured"] for row in rows):
        return lambda row: row["seconds"], "seconds of training steps"
    return (
        lambda row: row["R"] * row["dense_tokens"] / longest,
        "seconds, not measured,\nover those of the longest dense run",
    )


def _draw_ratios(
    axes: Any, shown: Mapping[str, list[Row]], colours: Mapping[str, Any]
) -> Ends:
    """Draws R_best of all arms that have it against tokens per parameter."""
    measured = {arm: all(row["measured"] for row in of) for arm, of in shown.items()}
    all_compared: list[Row] = []
    ends = []
    for place, (arm, of) in enumerate(shown.items()):
        compared = [row for row in of if row["R_best"] is not None]
        if not compared:
            continue
        beside = BESIDE ** (place - len(shown) / 2)
        line = _draw_ratios_of(axes, compared, beside, colours[arm])
        how = "measured" if measured[arm] else "not measured"
        is_mixed = len(set(measured.values())) > 1
        ends.append((line, f"{arm}, {how}" if is_mixed else arm))
        all_compared += compared
    axes.axhline(1.0, color="black", linestyle="--", linewidth=1)
    marks = {
        "triangle: at least, and up to what is likely": "best_is_least",
        "hollow: extrapolated": "best_extrapolated",
    }
    used = [text for text, of in marks.items() if any(row[of] for row in all_compared)]
    below = ["tokens per parameter of the dense model", "; ".join(used)]
    axes.set_xlabel("\n".join(filter(None, below)))
    seconds = "seconds" if any(measured.values()) else "seconds, not measured,"
    axes.set_ylabel(f"R_best, {seconds} to the loss /\nthose of the best dense arm")
    if all_compared:
        lowest = min(row["R_best"] for row in all_compared)
        axes.set_ylim(bottom=LOWEST_SHOWN * lowest)
    return ends


def _draw_ratios_of(
    axes: Any, compared: Sequence[Row], beside: float, colour: Any
) -> Any:
    """Draws R_best of the rows of one arm, whose places are moved by a factor, and
    returns its line."""
    places = [beside * row["tokens_per_parameter"] for row in compared]
    ratios = [row["R_best"] for row in compared]
    intervals = None
    if all(row["R_best_low"] is not None for row in compared):
        intervals = [
            [max(0.0, row["R_best"] - row["R_best_low"]) for row in compared],
            [max(0.0, row["R_best_high"] - row["R_best"]) for row in compared],
        ]
    mark = "^" if any(row["best_is_least"] for row in compared) else "o"
    look = {"fmt": f"{mark}-", "markersize": 4, "color": colour}
    (line, *_) = axes.errorbar(places, ratios, intervals, **look)
    hollow = {"facecolors": "white", "edgecolors": colour}
    for row, x in zip(compared, places, strict=True):
        if row["best_extrapolated"]:
            axes.scatter([x], [row["R_best"]], 16, marker=mark, zorder=3, **hollow)
        if row["best_is_least"]:
            likely = (row["R_best"], row["R_best_likely"])
            axes.plot([x, x], likely, color=colour)
    return line


def _label_lengths(axes: Any, lengths: Sequence[float]) -> None:
    """Labels the tokens per parameter that are far enough from each other, which are
    sorted."""
    if not lengths:
        return
    axes.set_xscale("log")
    axes.set_xlim(lengths[0] / 1.5, lengths[-1] * 1.5)
    ticks = [lengths[0]]
    for length in lengths[1:]:
        if length > TICK_APART * ticks[-1]:
            ticks.append(length)
    axes.set_xticks(ticks, [f"{length:.3g}" for length in ticks], minor=False)
    axes.set_xticks([], minor=True)


LABEL_HEIGHT = 13
"""The height of a label in points, with what is left free above it."""
MARK_RADIUS = 3
"""What the mark of a point takes to each side, in points."""


def _label_ends(axes: Any, lines_and_texts: Ends) -> None:
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
