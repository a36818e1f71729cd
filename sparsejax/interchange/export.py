"""A trained model as a folder that `transformers` and others load.

config.json               see `architectures`
model.safetensors         see `tensors`
tokenizer.json            what the model was trained with, bytes included
tokenizer_config.json
generation_config.json
README.md                 the model card, of a run
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from sparsejax.data.tokenizers import Tokenizer, load_tokenizer
from sparsejax.interchange.architectures import WeightDtype, huggingface_config
from sparsejax.interchange.model_card import model_card
from sparsejax.interchange.tensors import huggingface_tensors, write_tensors
from sparsejax.interchange.trained_model import (
    TrainedModel,
    as_dense,
    steps_without_masks,
)
from sparsejax.models.transformer import Transformer

NO_SPECIAL_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def export_huggingface(
    model: Transformer,
    folder: str | os.PathLike[str],
    *,
    sequence_length: int,
    tokenizer: Tokenizer | None = None,
    dtype: WeightDtype = "float32",
    card: str | None = None,
) -> None:
    """Writes a model as a Hugging Face folder, as a whole or not at all.

    `AutoModelForCausalLM.from_pretrained(folder)` then computes the same logits, up to
    rounding, and `AutoTokenizer.from_pretrained(folder)` the same ids; neither needs
    remote code. Every file is readable for all (mode 0644).

    Args:
      model: dense, or with 2:4 weights, which are folded (`as_dense`).
      folder: where it goes; must not exist yet, or be empty.
      sequence_length: tokens that the model was trained on at a time.
      tokenizer: what turned text into ids; None: the folder has none.
      dtype: of the stored weights; bfloat16 halves them, and rounds float32 masters.
      card: the text of README.md; None: there is none.
    Raises:
      ValueError: the folder holds something, the model has sparse activations, or the
        tokenizer has ids that the model has not.
      ImportError: safetensors is not installed.
      OSError: a file cannot be written.
    """
    target = Path(folder)
    check_unused(target)
    if tokenizer is not None and tokenizer.vocab_size > model.config.vocab_size:
        raise ValueError(
            f"the tokenizer {tokenizer.name} has {tokenizer.vocab_size} tokens, more "
            f"than the model's vocab_size={model.config.vocab_size}; give the one that "
            f"the model was trained with"
        )
    if not model.sparsity.is_dense:
        model = as_dense(model)
    tensors = {
        name: array.astype(jnp.dtype(dtype), copy=False)
        for name, array in huggingface_tensors(model)
    }
    config = huggingface_config(
        model.config, sequence_length=sequence_length, dtype=dtype
    )
    texts = {
        "config.json": _json(config),
        "generation_config.json": _json(NO_SPECIAL_TOKENS),
    }
    if tokenizer is not None:
        texts["tokenizer.json"] = tokenizer.to_json()
        texts["tokenizer_config.json"] = _json(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "model_max_length": sequence_length,
                "clean_up_tokenization_spaces": False,
                # Version 4 would hand a model token types, too, which has none.
                "model_input_names": ["input_ids", "attention_mask"],
            }
        )
    if card is not None:
        texts["README.md"] = card
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_name(f"{target.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir()
    try:
        write_tensors(tensors, unfinished)
        for name, text in texts.items():
            (unfinished / name).write_text(text, encoding="utf-8")
        for path in unfinished.iterdir():
            path.chmod(0o644)  # safetensors writes for the owner alone
        unfinished.replace(target)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def export_run(
    run: TrainedModel,
    folder: str | os.PathLike[str],
    *,
    tokenizer: str | None = None,
    dtype: WeightDtype = "float32",
    drop_activation_masks: bool = False,
) -> None:
    """Writes the model of a run as a Hugging Face folder, with a model card.

    Args:
      run: what `load_trained_model` returned.
      folder, dtype: as in `export_huggingface`.
      tokenizer: path of the tokenizer.json; None: the run's, bytes or a file, and of a
        run on shards without one none.
      drop_activation_masks: see `as_dense`. The card says what was done.
    Raises:
      ValueError, ImportError, OSError: as `export_huggingface`; or the tokenizer of the
        run is not where it was.
    """
    check_unused(Path(folder))
    try:
        dense = as_dense(run.model, drop_activation_masks=drop_activation_masks)
    except ValueError as error:
        if not (steps := steps_without_masks(run.folder)):
            raise
        others = ", ".join(f"{run.folder}@{step}" for step in steps)
        raise ValueError(f"{error}; or take a checkpoint without: {others}") from error
    of_run = run_tokenizer(run, tokenizer)
    words = None
    if of_run is not None:
        words = "bytes" if of_run.name == "bytes" else "text through `tokenizer.json`"
    export_huggingface(
        dense,
        folder,
        sequence_length=run.config.data.sequence_length,
        tokenizer=of_run,
        dtype=dtype,
        card=model_card(run, name=Path(folder).resolve().name, tokenizer=words),
    )


def run_tokenizer(run: TrainedModel, path: str | None = None) -> Tokenizer | None:
    """Returns the tokenizer at `path`, or without one that of the run: None where the
    run was trained on shards and names none.

    Raises:
      ValueError: there is no such file, or it is no tokenizer.json.
      ImportError: it needs the package `tokenizers`, which is not installed.
    """
    data = run.config.data
    path = data.tokenizer if path is None else path
    if path is None and data.shards is not None:
        return None
    if path is not None and not Path(path).is_file():
        raise ValueError(
            f"there is no tokenizer {path}, which {run.folder} was trained with; run "
            f"this where the run was begun, or say where it is now with --tokenizer"
        )
    return load_tokenizer(path)


def check_unused(folder: Path) -> None:
    """Raises ValueError where `folder` is there and is not an empty folder."""
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise ValueError(
            f"{folder} is there already; choose another folder, or delete it"
        )


def _json(values: dict[str, Any]) -> str:
    return json.dumps(values, indent=2) + "\n"
