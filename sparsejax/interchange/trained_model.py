"""The model of a run, from a checkpoint in its folder: to be exported or sampled.

Neither the run's data nor its optimiser is needed, and no moments are read.
"""

import json
import os
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
from flax import nnx

from sparsejax.checkpoints.checkpoint import Checkpoints
from sparsejax.checkpoints.checkpoint_folder import check_there
from sparsejax.config import ModelConfig, TrainConfig
from sparsejax.config.config_file import from_json
from sparsejax.config.schedule import Phase, model_of, phases, with_dense
from sparsejax.feed_forward.sparsity import DENSE, FFNSparsity
from sparsejax.models.transformer import Transformer, graph_on
from sparsejax.reports.records import Record, records_until
from sparsejax.sparsity.patterns import name_of
from sparsejax.switches.switching import switch


@dataclass(frozen=True, kw_only=True)
class TrainedModel:
    """A run's model as it was after some of its steps."""

    model: Transformer
    """Computes as the steps of its phase do; on one device."""
    config: TrainConfig
    """The run's settings. The model's own size is `model.config`, in a phase of a model
    that grows a smaller one."""
    folder: Path
    """The run folder."""
    step: int
    """Optimiser steps done."""
    phases: tuple[Phase, ...]
    """The run's phases as they were trained, or will be."""
    phase: Phase
    """The one that the model belongs to."""
    corpus: str
    """The fingerprint of the tokens that it was trained on."""

    @property
    def tokens(self) -> int:
        """The tokens that the model was trained on, those seen twice counted twice."""
        return self.step * self.config.tokens_per_step

    def records(self) -> list[Record]:
        """Returns the records of the run up to the model's step; none where the folder
        has no metrics.jsonl."""
        path = self.folder / "metrics.jsonl"
        if not path.is_file():
            return []
        kinds = [phase.kind for phase in self.phases]
        lines = records_until(path, self.step, kinds).splitlines()
        return [json.loads(line) for line in lines]


class _Weights(NamedTuple):
    """The part of a `TrainState` that a model is made of, under its names there."""

    params: nnx.State
    buffers: nnx.State


@dataclass(frozen=True, kw_only=True)
class TrainedSettings:
    """What a checkpoint of a run says of its model, without an array of it."""

    config: TrainConfig
    """The run's settings."""
    step: int
    """Optimiser steps done."""
    phases: tuple[Phase, ...]
    """The run's phases as they were trained, or will be."""
    phase: Phase
    """The one that the model belongs to."""
    checkpoint: Path
    """The folder of the checkpoint."""
    corpus: str
    """The fingerprint of the tokens that the run is trained on."""

    @property
    def model(self) -> ModelConfig:
        """The size of the model, in a phase of a model that grows a smaller one."""
        return model_of(self.phase, self.config.model)


def trained_settings(folder: Path, step: int | None = None) -> TrainedSettings:
    """Returns what the checkpoint of `step` in a run folder says, by default the
    latest.

    Raises:
      ValueError: the folder has no such checkpoint, or it is damaged.
    """
    with _checkpoints(folder) as checkpoints:
        return _settings_of(checkpoints, step)


def load_trained_model(
    folder: str | os.PathLike[str], step: int | None = None
) -> TrainedModel:
    """Returns the model in a run folder after `step` steps, by default in its latest
    checkpoint, on the first device.

    Raises:
      ValueError: the folder has no such checkpoint, or it is damaged.
    """
    folder = Path(folder)
    with _checkpoints(folder) as checkpoints:
        of = _settings_of(checkpoints, step)
        build = partial(_build, replace(of.config, model=of.model), of.phase.held)
        template: Any = jax.eval_shape(lambda: _weights_of(build()))
        checkpoints.check_intact(of.step)
        restored = checkpoints.restore(of.step, template=template, part=True)
    graph = graph_on(build, of.phase.sparsity)
    return TrainedModel(
        model=nnx.merge(graph, restored.state.params, restored.state.buffers),
        config=of.config,
        folder=folder,
        step=restored.step,
        phases=of.phases,
        phase=of.phase,
        corpus=of.corpus,
    )


def steps_without_masks(folder: Path) -> list[int]:
    """Returns the steps of the checkpoints in a run folder whose activations are not
    sparse, so that dense weights compute what their models do; not those that cannot be
    read. Raises ValueError where the folder has no checkpoints."""
    found = []
    with _checkpoints(folder) as checkpoints:
        for step in checkpoints.steps():
            with suppress(ValueError):
                if _settings_of(checkpoints, step).phase.sparsity.activations is None:
                    found.append(step)
    return found


def _checkpoints(folder: Path) -> Checkpoints:
    check_there(folder)
    if not (folder / "checkpoints").is_dir():
        raise ValueError(
            f"{folder} has no folder checkpoints; give the run folder of a run that "
            f"has saved one"
        )
    return Checkpoints(folder / "checkpoints", keep=None)


def _settings_of(checkpoints: Checkpoints, step: int | None) -> TrainedSettings:
    step = checkpoints.latest_step() if step is None else step
    metadata = checkpoints.metadata(step)
    assert step is not None  # else there is no metadata
    config = from_json(metadata["config"])
    # Checkpoints of before there was any are of runs that left no phase out.
    planned = with_dense(phases(config), metadata.get("run_dense", ()))
    return TrainedSettings(
        config=config,
        step=step,
        phases=planned,
        phase=planned[metadata["phase"]],
        checkpoint=checkpoints.path(step),
        corpus=metadata["corpus"],
    )


def as_dense(model: Transformer, *, drop_activation_masks: bool = False) -> Transformer:
    """Returns a dense model that computes what `model` does: where it has 2:4 weights,
    those that GEMM 1 has read take the place of the masters, W1 := beta S(W1).

    Args:
      drop_activation_masks: also of a model with sparse activations, none of which is
        left out then: the dense model is near to it, and computes something else.
    Raises:
      ValueError: activations are sparse, and their masks are not to be dropped: no
        weights make a dense network compute the same.
    """
    if model.sparsity.activations is not None and not drop_activation_masks:
        raise ValueError(
            f"the model has sparse activations "
            f"({name_of(model.sparsity.activations)}), and no dense weights compute "
            f"the same; go on with the run to a dense phase, or drop the masks "
            f"(--drop-activation-masks), which gives a model near to it"
        )
    dense = nnx.clone(model)
    switch(dense, None, DENSE, fold=True)
    return dense


def _build(config: TrainConfig, sparsity: FFNSparsity) -> Transformer:
    return Transformer(
        config.model, sparsity=sparsity, backend=config.backend, rngs=nnx.Rngs(0)
    )


def _weights_of(model: Transformer) -> _Weights:
    _, params, buffers = nnx.split(model, nnx.Param, ...)
    return _Weights(params=params, buffers=buffers)
