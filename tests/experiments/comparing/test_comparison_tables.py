"""The two tables that a comparison ends with."""

import pytest

from experiments.comparing.comparison_tables import losses_table, means_table
from sparsejax.terminal import console

pytestmark = pytest.mark.usefixtures("quick")


def row(name, seed, loss, **values) -> dict:
    given = {"name": name, "seed": seed, "loss": loss, "baseline": "a"}
    default = {"to_baseline": None, "switches": [], "tokens": 1000, "seconds": 10.0}
    return default | given | {"diverged_at": None} | values


def cells_of(table, capsys) -> list[list[str]]:
    console.STDOUT.print(table)
    lines = capsys.readouterr().out.splitlines()
    split = [line.replace("┃", "│").split("│")[1:-1] for line in lines]
    return [[cell.strip() for cell in cells] for cells in split if cells]


def test_the_table_shows_every_phase_and_switch(capsys):
    around = {"before": 2.25, "after": 2.5}
    switches = [
        {"from": "warm-up"} | around,
        {"from": "sparse", "before": 1.5, "after": 1.53125},
    ]
    rows = [
        row("a", 0, 1.25, to_baseline=0.0),
        row("b", 0, 1.3125, to_baseline=0.0625, switches=switches),
        row("c", 0, 1.125, to_baseline=-0.125, switches=switches[:1]),
        row("d", 0, None, diverged_at=7),
    ]
    assert cells_of(losses_table(rows), capsys) == [
        ["run", "seed", "warm-up", "sparse", "final", "to a"],
        ["a", "0", "", "", "1.2500", "+0.0000"],
        ["b", "0", "2.2500 -> 2.5000", "1.5000 -> 1.5312", "1.3125", "+0.0625"],
        ["c", "0", "2.2500 -> 2.5000", "", "1.1250", "-0.1250"],
        ["d", "0", "", "", "diverged at step 7", ""],
    ]


def test_means_are_over_seeds_and_spreads_from_smallest_to_largest(capsys):
    rows = [
        row("a", 0, 1.5, to_baseline=0.0, seconds=10.0),
        row("b", 0, 1.75, to_baseline=0.25, seconds=None),
        row("c", 0, 1.0, to_baseline=-0.5),
        row("a", 1, 1.25, to_baseline=0.0, seconds=13.0),
        row("b", 1, 1.375, to_baseline=0.125, tokens=2000),
        row("c", 1, None, diverged_at=3),
    ]
    assert cells_of(means_table(rows), capsys) == [
        ["run", "final", "spread", "to a", "spread", "tokens", "seconds"],
        ["a", "1.3750", "0.2500", "+0.0000", "0.0000", "1,000", "11.5"],
        ["b", "1.5625", "0.3750", "+0.1875", "0.1250", "1,500", ""],
        ["c", "diverged", "", "", "", "1,000", "10.0"],
    ]
    assert cells_of(means_table(rows[:1]), capsys)[1][1:5] == [
        "1.5000",
        "",
        "+0.0000",
        "",
    ]
