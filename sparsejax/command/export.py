"""Writes the model of a run as a Hugging Face folder.

`transformers` and whatever reads its folders load it without code of ours. RUN is the
folder of a finished or stopped run, whose latest checkpoint is taken, or RUN@STEP. 2:4
weights are folded into plain ones that compute the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from sparsejax.checkpoints.checkpoint_folder import named_checkpoint
from sparsejax.interchange.architectures import WeightDtype
from sparsejax.interchange.export import check_unused, export_run
from sparsejax.interchange.trained_model import load_trained_model


@dataclass(frozen=True)
class Options:
    """The options of `sparsejax export`: a run, a folder, and how it is written."""

    run: tyro.conf.Positional[str]
    """The run folder, or RUN@STEP."""
    folder: tyro.conf.Positional[Path]
    """The folder that the model goes into; it must not exist yet."""
    dtype: WeightDtype = "float32"
    """The dtype of the stored weights. bfloat16 halves the files and rounds the
    weights."""
    tokenizer: str | None = None
    """Path of the run's tokenizer.json where it is no longer where it was, or of the
    one that made the run's shards."""
    drop_activation_masks: bool = False
    """Export a run that stopped in a phase with sparse activations, too: as a dense
    model that leaves no activation out, which computes something else than the run
    did."""


def run(arguments: Sequence[str]) -> None:
    """Writes the folder that the arguments name, and says so.

    Raises:
      ValueError, ImportError, OSError: see `export_run` and `load_trained_model`.
    """
    options = tyro.cli(
        Options, args=arguments, description=__doc__, prog="sparsejax export"
    )
    check_unused(options.folder)
    trained = load_trained_model(*named_checkpoint(options.run))
    export_run(
        trained,
        options.folder,
        dtype=options.dtype,
        tokenizer=options.tokenizer,
        drop_activation_masks=options.drop_activation_masks,
    )
    print(f"the model of {trained.folder} after step {trained.step}: {options.folder}")
