"""Continues prompts with the model of a run or of a Hugging Face folder.

A run's model computes as its phase does, sparse phases included. RUN@STEP takes an
earlier checkpoint than the latest.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import tyro

from sparsejax.checkpoints.checkpoint_folder import named_checkpoint
from sparsejax.data.tokenizers import Tokenizer, load_tokenizer
from sparsejax.interchange.export import run_tokenizer
from sparsejax.interchange.pretrained import Pretrained
from sparsejax.models.generation import generate
from sparsejax.models.transformer import Transformer
from sparsejax.training.trained_model import load_trained_model


@dataclass(frozen=True)
class Options:
    """The options of `sparsejax sample`: a model, prompts, and how tokens are drawn."""

    model: tyro.conf.Positional[str]
    """A run folder, RUN@STEP, or a Hugging Face folder."""
    prompt: tuple[str, ...] = ("\n",)
    """Texts to continue, one or more; all together are one batch."""
    tokens: int = 100
    """Tokens to add to each."""
    temperature: float = 0.8
    """0: the most likely token each time."""
    top_p: float = 0.95
    """Only the most likely tokens of so much probability together are drawn."""
    seed: int = 0
    """The seed of the draws."""
    tokenizer: str | None = None
    """Path of the model's tokenizer.json where it is not where the model says."""


def run(arguments: Sequence[str]) -> None:
    """Prints each prompt with what the model adds to it.

    Raises:
      ValueError, ImportError, OSError: the model, its tokenizer or an option is not
        what it has to be.
    """
    options = tyro.cli(
        Options, args=arguments, description=__doc__, prog="sparsejax sample"
    )
    model, tokenizer = _load(options.model, options.tokenizer)
    prompts = [tokenizer.encode(text.encode()) for text in options.prompt]
    added = generate(
        model,
        prompts,
        options.tokens,
        temperature=options.temperature,
        top_p=options.top_p,
        vocab_size=min(tokenizer.vocab_size, model.config.vocab_size),
        seed=options.seed,
    )
    for prompt, tokens in zip(prompts, added, strict=True):
        print(tokenizer.decode(np.concatenate([prompt, tokens])))


def _load(name: str, tokenizer: str | None) -> tuple[Transformer, Tokenizer]:
    """Returns the model of a run or of a Hugging Face folder, and its tokenizer.

    Raises:
      ValueError: it is neither, or has no tokenizer.
    """
    folder, step = named_checkpoint(name)
    if (folder / "checkpoints").is_dir():
        run = load_trained_model(folder, step)
        found = run_tokenizer(run, tokenizer)
        if found is not None:
            return run.model, found
    else:
        pretrained = Pretrained.read(folder)
        if tokenizer is not None or (folder / "tokenizer.json").is_file():
            path = pretrained.tokenizer if tokenizer is None else tokenizer
            return pretrained.load(), load_tokenizer(path)
    raise ValueError(
        f"{folder} has no tokenizer, and a prompt is text; give its tokenizer.json "
        f"with --tokenizer"
    )
