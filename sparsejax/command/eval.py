"""The loss of a model on held-out text, as perplexity and bits per byte too; or, with
--tasks, what it makes of tasks of lm-evaluation-harness (extra `eval`).

Of a run without --text: on the tokens that the run has held out, all of them. A run's
model computes as its phase does, sparse phases included:

    sparsejax eval runs/tiny-experts-20260101-120000
    sparsejax eval my-model --text 'corpus/**/*.txt' --windows 64
    sparsejax eval my-model --tasks next-word --tasks-folder tasks --limit 4
"""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import islice

import tyro
from rich.table import Table

from sparsejax.config.ranges import Count, CountOrNone, CountOrZero, check_intervals
from sparsejax.data.corpus import load_corpus
from sparsejax.data.held_out import every_window, tokens_of_text
from sparsejax.data.tokenizers import Tokens
from sparsejax.interchange.named_model import NamedModel, load_named_model
from sparsejax.reports.evaluation import evaluate
from sparsejax.terminal import console


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of `sparsejax eval`: a model, and which text it predicts, or which
    tasks it answers."""

    model: tyro.conf.Positional[str]
    """A run folder, RUN@STEP, or a Hugging Face folder."""
    text: str | None = None
    """Glob of text files, all of which are read. Default: what the run holds out."""
    sequence_length: CountOrNone = None
    """Tokens that the model sees at most. Default: as in training, or of a folder its
    max_position_embeddings."""
    batch_size: Count = 16
    """Sequences that are computed at once."""
    windows: CountOrNone = None
    """Only this many sequences, the first ones. Default: all."""
    tasks: tuple[str, ...] = ()
    """Tasks, groups or tags of lm-evaluation-harness instead of text. What they need of
    data is downloaded, unless they say that it lies here."""
    tasks_folder: str | None = None
    """A folder whose YAML files define tasks, which --tasks then finds too."""
    limit: CountOrNone = None
    """Only this many documents of each task, the first ones. Default: all."""
    fewshot: CountOrZero | None = None
    """Solved examples before each question. Default: as the task says."""
    tokenizer: str | None = None
    """Path of the model's tokenizer.json where it is not where the model says."""
    json: bool = False
    """Print one JSON object and nothing else."""

    def __post_init__(self) -> None:
        check_intervals(self)
        of_tasks = ("tasks_folder", "limit", "fewshot")
        for name in ("text", "windows") if self.tasks else of_tasks:
            if getattr(self, name) is not None:
                flag = name.replace("_", "-")
                what = "not for --tasks" if self.tasks else "for --tasks alone"
                raise ValueError(f"--{flag} is {what}; leave one of them out")


def run(arguments: Sequence[str]) -> None:
    """Prints how well the model predicts the held-out text, or answers the tasks.

    Raises:
      ValueError, ImportError, OSError: the model, its tokenizer or the text is not what
        it has to be.
    """
    options = tyro.cli(
        Options, args=arguments, description=__doc__, prog="sparsejax eval"
    )
    if options.tasks:
        _run_tasks(options)
        return
    named = load_named_model(options.model, options.tokenizer)
    described, parts = _held_out(options, named)
    length = options.sequence_length or named.sequence_length
    found = evaluate(
        named.model,
        islice(every_window(parts, length), options.windows),
        length=length,
        batch_size=options.batch_size,
        tokenizer=named.tokenizer,
    )
    if not math.isfinite(found.loss):
        raise ValueError(
            f"the loss of {options.model} on this text is {found.loss}: its logits are "
            f"not finite; its weights are damaged, give another checkpoint"
        )
    derived = {"perplexity": found.perplexity, "bits_per_byte": found.bits_per_byte}
    if options.json:
        values = asdict(found) | derived
        # JSON has no word for what is not finite, as the error of a single window.
        is_known = lambda value: value is not None and math.isfinite(value)
        printed = {name: of if is_known(of) else None for name, of in values.items()}
        print(json.dumps(printed))
        return
    console.say(f"data: {described}")
    console.say(
        f"loss {found.loss:.4f} +- {found.loss_error:.4f} nats per token, perplexity "
        f"{found.perplexity:.2f}, on {found.tokens:,} tokens in windows of {length:,}"
    )
    if found.bits_per_byte is not None:
        console.say(f"{found.bits_per_byte:.4f} bits per byte")
    console.say(f"next token right: {found.right:.1%}")


def _run_tasks(options: Options) -> None:
    # The package is an extra, and takes seconds to import.
    from sparsejax.reports.harness import HarnessModel, evaluate_tasks, rows_of

    named = load_named_model(options.model, options.tokenizer)
    if named.tokenizer is None:
        raise ValueError(
            f"{options.model} has no tokenizer, and tasks are text; give its "
            f"tokenizer.json with --tokenizer"
        )
    found = evaluate_tasks(
        HarnessModel(
            named.model,
            named.tokenizer,
            length=options.sequence_length or named.sequence_length,
            batch_size=options.batch_size,
            prefix_token=named.begin_token,
            end_tokens=named.end_tokens,
        ),
        options.tasks,
        folder=options.tasks_folder,
        limit=options.limit,
        fewshot=options.fewshot,
    )
    if options.json:
        print(json.dumps(found))
        return
    table = Table("task", "shots", "metric")
    for column in ("value", "+-"):
        table.add_column(column, justify="right")
    for row in rows_of(found):
        table.add_row(*row)
    console.STDOUT.print(table)


def _held_out(options: Options, named: NamedModel) -> tuple[str, Sequence[Tokens]]:
    """Returns what is read, in words, and the tokens of each array."""
    if options.text is not None:
        if named.tokenizer is None:
            raise ValueError(
                f"{options.model} has no tokenizer, and --text is text; give its "
                f"tokenizer.json with --tokenizer"
            )
        parts = tokens_of_text(options.text, named.tokenizer)
        return f"{len(parts)} files of {options.text}", parts
    if named.data is None or named.corpus is None:
        raise ValueError(
            f"{options.model} is no run, and holds no text out; give --text GLOB"
        )
    corpus = load_corpus(named.data, vocab_size=named.model.config.vocab_size)
    corpus.check_is_that_of(options.model, named.corpus)
    return corpus.description, corpus.validation
