"""The model that a command names: that of a run, or of a Hugging Face folder."""

from dataclasses import dataclass

from sparsejax.checkpoints.checkpoint_folder import named_checkpoint
from sparsejax.config import DataConfig
from sparsejax.data.tokenizers import Tokenizer, load_tokenizer
from sparsejax.interchange.export import run_tokenizer
from sparsejax.interchange.pretrained import Pretrained
from sparsejax.interchange.trained_model import load_trained_model
from sparsejax.models.transformer import Transformer


@dataclass(frozen=True, kw_only=True)
class NamedModel:
    """A model with what was found beside its weights."""

    model: Transformer
    """On one device. A run's computes as its phase does."""
    tokenizer: Tokenizer | None
    """None where shards without a tokenizer were trained on, or a folder has none."""
    data: DataConfig | None
    """What a run was trained on; None of a Hugging Face folder."""
    corpus: str | None
    """The fingerprint of the tokens of `data`; None where that is."""
    sequence_length: int
    """Tokens that the model saw at once in training."""
    end_tokens: tuple[int, ...]
    """The ids that end a text: those that a folder names, else that of the
    tokenizer."""
    begin_token: int | None
    """The id that begins a text, where a folder names one."""


def load_named_model(name: str, tokenizer: str | None = None) -> NamedModel:
    """Returns the model of a run folder, RUN@STEP, or a Hugging Face folder.

    Args:
      name: the folder.
      tokenizer: path of the tokenizer.json, where it is not where the model says.
    Raises:
      ValueError, ImportError, OSError: it is neither, or its files are not what they
        have to be.
    """
    folder, step = named_checkpoint(name)
    if (folder / "checkpoints").is_dir():
        run = load_trained_model(folder, step)
        found = run_tokenizer(run, tokenizer)
        return NamedModel(
            model=run.model,
            tokenizer=found,
            end_tokens=_end_of(found),
            begin_token=None,
            data=run.config.data,
            corpus=run.corpus,
            sequence_length=run.config.data.sequence_length,
        )
    pretrained = Pretrained.read(folder)
    found = None
    if tokenizer is not None or (folder / "tokenizer.json").is_file():
        path = pretrained.tokenizer if tokenizer is None else tokenizer
        found = load_tokenizer(path)
    return NamedModel(
        model=pretrained.load(),
        tokenizer=found,
        end_tokens=pretrained.end_tokens() or _end_of(found),
        begin_token=pretrained.begin_token(),
        data=None,
        corpus=None,
        sequence_length=pretrained.sequence_length,
    )


def _end_of(tokenizer: Tokenizer | None) -> tuple[int, ...]:
    end = None if tokenizer is None else tokenizer.end_of_text
    return () if end is None else (end,)
