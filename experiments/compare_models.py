"""Compares the models of finished runs on held-out files: by domain, and on two tasks.

    uv run experiments/compare_models.py runs/dense/seed-0 runs/sparse/seed-0

Two models of one mean loss need not be equally good at everything. The files that the
runs have held out are read (`--text`: those of another text, that no run was trained
on), and for each model the table says

* the loss in nats per token on all files and by domain, the ending of a file's name or
  with `--domain folder` its first folder;
* how often the true next line is more probable, per byte, than three other lines of the
  same file;
* how often a token is predicted right inside an identifier that the model has seen
  before in its window, the identifier's first token aside.

Beside each figure stands the difference to the first model, with a 90 % interval from a
bootstrap over the files. RUN@STEP takes an earlier checkpoint than the latest; a model
computes as the phase of its checkpoint does. `--results` takes a row per figure.
"""

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import tyro
from rich.table import Table

from experiments.bench.rows import append_rows
from experiments.command_line import run_script
from experiments.comparing.model_tasks import (
    Domain,
    Measured,
    losses,
    next_line_choices,
    next_lines,
    repeated_identifiers,
    score_file,
)
from sparsejax.checkpoints.checkpoint_folder import named_checkpoint
from sparsejax.data.corpus import File, held_out_files, load_corpus
from sparsejax.data.files import text_files
from sparsejax.data.tokenizers import Tokenizer, load_tokenizer
from sparsejax.interchange.trained_model import TrainedModel, load_trained_model
from sparsejax.reports.provenance import commit
from sparsejax.terminal import console


@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of the comparison: which models, on which files."""

    runs: tyro.conf.Positional[tuple[str, ...]]
    """Run folders, or RUN@STEP; the first is what the others are compared with."""
    text: str | None = None
    """Glob of a text that no run was trained on, all of whose files are read. Default:
    the files that the runs have held out."""
    domain: Domain = "ending"
    """The part of a file's name that files of one domain have in common."""
    choices: int = 2000
    """Places at which the next line is chosen."""
    files: int = 1000
    """Files that are read at most, drawn from all."""
    seed: int = 0
    """Seed of what is drawn: files, places and lines, and the bootstrap."""
    results: Path = Path("runs/compare_models.jsonl")
    """File to which the rows are added."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One figure of one model."""

    model: str
    step: int
    task: str
    value: float
    unit: str
    to_first: float
    """The difference to the first model."""
    to_first_low: float
    to_first_high: float
    count: int
    """Tokens or places that the figure is a mean over."""
    files: int
    text: str
    seed: int
    command: str
    commit: str | None


def main(config: Config, command: str) -> list[Row]:
    """Prints the table, adds the rows to the file, and returns them.

    Raises:
      ValueError, ImportError: no run, runs whose models cannot be compared, or no file
        to compare them on.
    """
    if not config.runs:
        raise ValueError("no run to compare; give the folders of finished runs")
    models = [load_trained_model(*named_checkpoint(run)) for run in config.runs]
    check_comparable(models, config)
    first = models[0].config
    tokenizer = load_tokenizer(first.data.tokenizer)
    length = first.data.sequence_length
    generator = np.random.default_rng(config.seed)
    files = some_files(config, models[0], tokenizer, generator)
    choices = next_line_choices(files, tokenizer.decode, config.choices, generator)
    rows, of_first = [], {}
    for run, trained in zip(config.runs, models, strict=True):
        scored = [score_file(trained.model, of.tokens, length) for of in files]
        measured = {
            **{
                f"loss, {name}": of
                for name, of in losses(files, scored, config.domain).items()
            },
            "next line": next_lines(
                trained.model, choices, len(files), length, tokenizer
            ),
            "repeated identifier": repeated_identifiers(
                files, scored, length, tokenizer.decode
            ),
        }
        known = {task: of for task, of in measured.items() if of.counts.sum()}
        of_first = of_first or known
        for task, of in known.items():
            difference, low, high = _without_empty(of).to(
                _without_empty(of_first[task]), np.random.default_rng(config.seed)
            )
            rows.append(
                Row(
                    model=run,
                    step=trained.step,
                    task=task,
                    value=of.value,
                    unit="nats per token" if task.startswith("loss") else "share",
                    to_first=difference,
                    to_first_low=low,
                    to_first_high=high,
                    count=int(of.counts.sum()),
                    files=int((of.counts > 0).sum()),
                    text=config.text or first.data.text or "the standard library",
                    seed=config.seed,
                    command=command,
                    commit=commit(),
                )
            )
    console.STDOUT.print(table_of(rows, config.runs))
    append_rows(map(asdict, rows), config.results)
    return rows


def _without_empty(of: Measured) -> Measured:
    """Returns what was measured, of the files that have any of it alone."""
    some = of.counts > 0
    return Measured(of.sums[some], of.counts[some])


def check_comparable(models: Sequence[TrainedModel], config: Config) -> None:
    """Raises ValueError where the models do not read the same tokens, or where a file
    that one run has held out may be one that another was trained on."""
    first = models[0].config.data
    for trained in models:
        data = trained.config.data
        names = ["tokenizer", "sequence_length"]
        if config.text is None:
            names += ["text", "validation_share", "split_by", "drop_duplicates"]
        for name in names:
            own, expected = getattr(data, name), getattr(first, name)
            if own != expected:
                raise ValueError(
                    f"{trained.folder} has data.{name}={own!r} and {models[0].folder} "
                    f"has {expected!r}, so that their models cannot be compared on the "
                    f"files that the first has held out; compare runs of one text, or "
                    f"give --text of one that neither was trained on"
                )
        if config.text is None and trained.corpus != models[0].corpus:
            raise ValueError(
                f"{trained.folder} and {models[0].folder} were trained on different "
                f"tokens, though their settings name the same text, so that one may "
                f"have read what the other has held out; give --text of files that "
                f"neither was trained on"
            )


def some_files(
    config: Config,
    trained: TrainedModel,
    tokenizer: Tokenizer,
    generator: np.random.Generator,
) -> list[File]:
    """Returns up to `config.files` files of two tokens or more, drawn at random and in
    their order. Raises ValueError where there is none."""
    if config.text is None:
        data, vocab_size = trained.config.data, trained.config.model.vocab_size
        corpus = load_corpus(data, vocab_size=vocab_size)
        corpus.check_is_that_of(str(trained.folder), trained.corpus)
        found = held_out_files(data, vocab_size=vocab_size)
    else:
        of_text = text_files(config.text)
        found = [
            File(name, path, tokenizer.encode(path.read_bytes()))
            for name, path in zip(of_text.names, of_text.paths, strict=True)
        ]
    long = [file for file in found if file.tokens.size > 1]
    if not long:
        raise ValueError(
            f"none of the {len(found)} files has two tokens; give --text of others"
        )
    drawn = sorted(generator.permutation(len(long))[: config.files])
    return [long[index] for index in drawn]


def table_of(rows: Sequence[Row], runs: Sequence[str]) -> Table:
    """Returns the table that is printed: a line per task, a column per model."""
    table = Table(title=f"differences to {runs[0]}, with 90 % intervals")
    table.add_column("task")
    table.add_column("count", justify="right")
    for run in runs:
        table.add_column(run, justify="right")
    for task in dict.fromkeys(row.task for row in rows):
        own = [row for row in rows if row.task == task]
        cells = [f"{own[0].value:.4f}"]
        cells += [
            f"{row.value:.4f} ({row.to_first:+.4f}, {row.to_first_low:+.4f} to "
            f"{row.to_first_high:+.4f})"
            for row in own[1:]
        ]
        table.add_row(task, f"{own[0].count:,}", *cells)
    return table


def run(arguments: list[str]) -> int:
    """Runs the command and returns its exit status."""
    script = "experiments/compare_models.py"
    return run_script(main, Config, arguments, script=script, description=__doc__)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
