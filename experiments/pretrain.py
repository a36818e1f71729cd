"""Pre-trains a transformer: dense warm-up, sparse feed-forward network, dense tail.

On a laptop or any machine (3 to 6 minutes on two CPU cores; bytes of the Python
standard library's source; validation loss about 1.1 nats per byte, unigram model 3.4):

    uv run experiments/pretrain.py

The same on a GPU, the method of arXiv 2602.06183, own text, a larger model:

    uv run --extra cuda experiments/pretrain.py --preset gpt-124m --recipe paper \\
        --data.text 'corpus/**/*.txt' --data.tokenizer tokenizer.json

What it would cost, without running it; and continuing a stopped run:

    uv run experiments/pretrain.py --preset llama-1b --dry-run
    uv run experiments/pretrain.py --resume runs/tiny-default-20260101-120000

The run folder receives config.json, metrics.jsonl, checkpoints/, loss.png and
model.safetensors, the dense weights.
"""

import argparse
import json
import os
import sys
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated

import jax.numpy as jnp
import numpy as np
import tyro

from experiments import console
from experiments.export import export
from experiments.plot import plot_run
from sparsejax.config import PRESETS, TrainConfig, check_resumable, from_json
from sparsejax.loop import NonFiniteLoss, Outcome, train
from sparsejax.model import greedy_sample


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to do with a configuration."""

    config: Annotated[TrainConfig, tyro.conf.arg(name="")]
    run_folder: Path | None = None
    """Where the run is written. Default: runs/PRESET-RECIPE-DATE-TIME."""
    resume: Path | None = None
    """Run folder of a stopped run: continue it, with its own settings."""
    dry_run: bool = False
    """Print the plan and stop: nothing is allocated or written."""


def main(config: TrainConfig, run_folder: Path | None = None) -> Outcome:
    """Trains `config` in `run_folder`, or continues the run that is in it."""
    if run_folder is None:
        now = datetime.now().strftime("%Y%m%d-%H%M%S")
        run_folder = Path("runs") / f"{config.preset}-{config.recipe}-{now}"
    console.announce(config)
    with console.progress(config) as observe:
        outcome = train(config, run_folder, observe=observe)
    if outcome.completed:
        console.summarise(read_metrics(run_folder))
        console.say(export(outcome.model, run_folder / "model.safetensors"))
    else:
        console.say(f"stopped by SIGTERM; go on with --resume {run_folder}")
    if outcome.completed and config.sample_length:
        window = config.data.sequence_length
        prompt = outcome.corpus.validation[: min(64, window)]
        ids = greedy_sample(
            outcome.model,
            jnp.asarray(prompt, jnp.int32),
            config.sample_length,
            window=window,
        )
        tokenizer = outcome.corpus.tokenizer
        continuation = tokenizer.decode(np.asarray(ids))
        console.show_sample(tokenizer.decode(prompt), continuation)
    if config.plot:
        console.say(plot_run(run_folder))
    console.say(f"run folder: {run_folder}")
    return outcome


def read_metrics(run_folder: Path) -> list[dict]:
    """The records of metrics.jsonl."""
    lines = (run_folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def parse(arguments: list[str]) -> Options:
    """The command line: a preset or a stopped run, then whatever overrides it.

    Raises:
      ValueError: --resume with another folder, or with a setting that may not change.
    """
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--preset", choices=list(PRESETS), default="tiny")
    first.add_argument("--resume", type=Path)
    start, _ = first.parse_known_args(arguments)
    default = PRESETS[start.preset]()
    if start.resume is not None:
        saved = start.resume / "config.json"
        if not saved.is_file():
            raise ValueError(
                f"--resume {start.resume}: there is no {saved}; give the run folder of "
                f"a stopped run"
            )
        default = from_json(json.loads(saved.read_text()))
    options = tyro.cli(
        Options,
        args=arguments,
        default=Options(config=default),
        description=__doc__,
        prog="experiments/pretrain.py",
    )
    if start.resume is not None:
        if options.run_folder is not None:
            raise ValueError(
                "--resume continues in its own folder; leave --run-folder out"
            )
        check_resumable(default, options.config, start.resume)
    return options


def run(arguments: list[str]) -> int:
    """The command: its exit status."""
    try:
        options = parse(arguments)
        if options.dry_run:
            console.announce(options.config, predicted=True)
            return 0
        if options.config.deterministic:
            # XLA reads it when the first array is made, which is later than this.
            flags = os.environ.get("XLA_FLAGS", "")
            os.environ["XLA_FLAGS"] = f"{flags} {console.DETERMINISTIC}".strip()
        main(options.config, options.resume or options.run_folder)
    except (
        ValueError,
        NotImplementedError,
        ImportError,
        OSError,
        NonFiniteLoss,
    ) as error:
        console.say(f"{type(error).__name__}: {error}", style="red", error=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
