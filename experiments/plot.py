"""Figures of runs, drawn from what the runs wrote.

uv run experiments/plot.py runs/tiny-default-20260101-120000
"""

import json
import sys
from pathlib import Path

SHADES = {"warm-up": "#dddddd", "sparse": "#cfe8cf", "dense": "#eeeeee"}


def plot_run(folder: Path) -> str:
    """Draws loss.png in the run folder; returns a line that says what happened.

    Training loss as a line, validation loss as points, phases shaded, the unigram
    model's loss dashed.
    """
    try:
        import matplotlib
    except ImportError:
        return "no loss.png: matplotlib is missing; run `uv sync --extra plots`"
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    lines = (folder / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    steps = [r for r in records if r["event"] == "step"]
    validations = [r for r in records if r["event"] == "validation"]
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    _shade_phases(axes, steps)
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
    axes.set_title(folder.name)
    axes.legend()
    figure.savefig(folder / "loss.png", dpi=120)
    plt.close(figure)
    return f"figure: {folder / 'loss.png'}"


def _shade_phases(axes, steps: list[dict]) -> None:
    first = 0
    for phase in sorted({r["phase"] for r in steps}):
        of_phase = [r for r in steps if r["phase"] == phase]
        kind, last = of_phase[0]["kind"], of_phase[-1]["step"]
        axes.axvspan(first, last, color=SHADES[kind], alpha=0.6, linewidth=0)
        top = axes.get_xaxis_transform()
        middle = (first + last) / 2
        axes.text(middle, 0.97, kind, transform=top, ha="center", va="top")
        first = last


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        print(plot_run(Path(argument)))
