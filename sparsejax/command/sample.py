"""Continues prompts with the model of a run or of a Hugging Face folder.

A run's model computes as its phase does, sparse phases included. RUN@STEP takes an
earlier checkpoint than the latest.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import tyro

from sparsejax.config.ranges import Count, Seed, check_intervals
from sparsejax.interchange.named_model import load_named_model
from sparsejax.models.generation import generate


@dataclass(frozen=True)
class Options:
    """The options of `sparsejax sample`: a model, prompts, and how tokens are drawn."""

    model: tyro.conf.Positional[str]
    """A run folder, RUN@STEP, or a Hugging Face folder."""
    prompt: tuple[str, ...] = ("\n",)
    """Texts to continue, one or more; all together are one batch."""
    tokens: Count = 100
    """Tokens to add to each."""
    temperature: float = 0.8
    """0: the most likely token each time."""
    top_p: float = 0.95
    """Only the most likely tokens of so much probability together are drawn."""
    seed: Seed = 0
    """The seed of the draws."""
    end: bool = True
    """Whether a text ends where the model draws the end-of-text token, of which nothing
    is printed. With --no-end all --tokens are drawn."""
    tokenizer: str | None = None
    """Path of the model's tokenizer.json where it is not where the model says."""

    def __post_init__(self) -> None:
        check_intervals(self)
        if not all(self.prompt):
            raise ValueError("--prompt '' is empty; give one character or more")


def run(arguments: Sequence[str]) -> None:
    """Prints each prompt with what the model adds to it. Where there are several, a
    line with its number stands above each.

    Raises:
      ValueError, ImportError, OSError: the model, its tokenizer or an option is not
        what it has to be.
    """
    options = tyro.cli(
        Options, args=arguments, description=__doc__, prog="sparsejax sample"
    )
    named = load_named_model(options.model, options.tokenizer)
    model, tokenizer = named.model, named.tokenizer
    if tokenizer is None:
        raise ValueError(
            f"{options.model} has no tokenizer, and a prompt is text; give its "
            f"tokenizer.json with --tokenizer"
        )
    ends = named.end_tokens if options.end else ()
    prompts = [tokenizer.encode(text.encode()) for text in options.prompt]
    added = generate(
        model,
        prompts,
        options.tokens,
        temperature=options.temperature,
        top_p=options.top_p,
        vocab_size=min(tokenizer.vocab_size, model.config.vocab_size),
        seed=options.seed,
        end_tokens=ends,
    )
    for number, (prompt, tokens) in enumerate(zip(prompts, added, strict=True), 1):
        if (at := np.flatnonzero(np.isin(tokens, ends))).size:
            tokens = tokens[: at[0]]
        if len(prompts) > 1:
            print(f"--- prompt {number} of {len(prompts)}")
        print(tokenizer.decode(np.concatenate([prompt, tokens])))
