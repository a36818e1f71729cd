"""Runs of an arm on a dense curve that is known in closed form, and the rows that
experiments/equal_loss.py makes of them."""

import json
from dataclasses import replace

from experiments.equal_loss import Config, main
from sparsejax.config import PhaseConfig
from sparsejax.feed_forward.sparsity import FFNSparsity
from sparsejax.sparsity.patterns import NM
from tests.support.files.synthetic_runs import DENSE, Synthetic, write_comparison

BUDGETS = (100, 300, 1000)
TWO_FOUR = FFNSparsity(weights=NM(2, 4), activations=NM(2, 4))


def loss(tokens: float) -> float:
    """The loss of the dense model after so many tokens."""
    return 0.9 + 0.4 * (tokens / 1e5) ** -0.3


def tokens_of(steps: float) -> float:
    return steps * DENSE.tokens_per_step


def dense_runs(**changes) -> list[Synthetic]:
    """A tenth of a second a step."""
    return [
        Synthetic(
            name=f"dense-{steps}",
            arm="dense",
            config=replace(DENSE, steps=steps),
            loss=loss(tokens_of(steps)),
            seconds=0.1 * steps,
            **changes,
        )
        for steps in BUDGETS
    ]


def sparse_config(steps: int, share: float):
    schedule = (
        PhaseConfig(name="sparse", share=share, sparsity=TWO_FOUR),
        PhaseConfig(name="dense"),
    )
    return replace(DENSE, steps=steps).with_schedule(schedule)


def rows_of(folder, runs, *arguments: str, **settings) -> dict[tuple[str, int], dict]:
    write_comparison(folder, runs, baseline=f"dense-{BUDGETS[0]}")
    results = folder / "rows.jsonl"
    config = Config(folder=folder, results=results, **settings)
    main(config, "the command")
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    return {(row["arm"], row["tokens"] // DENSE.tokens_per_step): row for row in rows}
