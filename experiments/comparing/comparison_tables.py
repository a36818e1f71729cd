"""The two tables that a comparison ends with: losses by run, and means by name."""

import statistics
from collections.abc import Iterable, Sequence

from rich.table import Table


def losses_table(rows: Sequence[dict]) -> Table:
    """Returns a table with a row per run: the loss at the end of each phase and right
    after the switch."""
    table = Table(
        title="validation loss at the end of a phase -> right after the switch"
    )
    # In the order of the phases, as far as the runs have the same.
    left = dict.fromkeys(switch["from"] for row in rows for switch in row["switches"])
    table.add_column("run", overflow="fold")
    for name in ("seed", *left, "final", f"to {rows[0]['baseline']}"):
        table.add_column(name, justify="right")
    for row in rows:
        around = {
            switch["from"]: f"{switch['before']:.4f} -> {switch['after']:.4f}"
            for switch in row["switches"]
        }
        final = f"diverged at step {row['diverged_at']}"
        if row["loss"] is not None:
            final = f"{row['loss']:.4f}"
        cells = (around.get(kind, "") for kind in left)
        to_baseline = _signed(row["to_baseline"])
        table.add_row(row["name"], str(row["seed"]), *cells, final, to_baseline)
    return table


def means_table(rows: Sequence[dict]) -> Table:
    """Returns a table with a row per name: means over the seeds, and the largest minus
    the smallest value."""
    table = Table(title="mean over the seeds (spread: largest - smallest)")
    table.add_column("run", overflow="fold")
    baseline = rows[0]["baseline"]
    for name in ("final", "spread", f"to {baseline}", "spread", "tokens", "seconds"):
        table.add_column(name, justify="right")
    for name in dict.fromkeys(row["name"] for row in rows):
        of_name = [row for row in rows if row["name"] == name]
        final, final_spread = _mean_and_spread(row["loss"] for row in of_name)
        gap, gap_spread = _mean_and_spread(row["to_baseline"] for row in of_name)
        seconds, _ = _mean_and_spread(row["seconds"] for row in of_name)
        table.add_row(
            name,
            "diverged" if final is None else f"{final:.4f}",
            "" if final_spread is None else f"{final_spread:.4f}",
            _signed(gap),
            "" if gap_spread is None else f"{gap_spread:.4f}",
            f"{statistics.fmean(row['tokens'] for row in of_name):,.0f}",
            "" if seconds is None else f"{seconds:,.1f}",
        )
    return table


def _mean_and_spread(
    values: Iterable[float | None],
) -> tuple[float | None, float | None]:
    """Returns the mean and the largest minus the smallest value. Both are None where a
    value is missing, and the spread is None where there is a single value."""
    values = list(values)
    present = [value for value in values if value is not None]
    if len(present) < len(values):
        return None, None
    spread = max(present) - min(present) if len(present) > 1 else None
    return statistics.fmean(present), spread


def _signed(difference: float | None) -> str:
    return "" if difference is None else f"{difference:+.4f}"
