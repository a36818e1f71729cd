"""A Hugging Face folder, or another run, as the start of a run: its model, weights and
tokenizer."""

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from sparsejax.annotations import fits
from sparsejax.checkpoints.checkpoint_folder import check_there, named_checkpoint
from sparsejax.config import ModelConfig, TrainConfig
from sparsejax.config.schedule import Phase
from sparsejax.data.tokenizers import ByteTokenizer
from sparsejax.interchange.architectures import model_config_of
from sparsejax.interchange.json_files import read_object
from sparsejax.interchange.tensors import Names, read_parameters, weight_files
from sparsejax.interchange.trained_model import (
    TrainedSettings,
    as_dense,
    load_trained_model,
    trained_settings,
)
from sparsejax.models.transformer import Transformer

HOW_COMPUTED = ("dtype", "precision", "logits_of_loss", "remat", "scan_layers")
"""Settings of a model that say how it is computed, and not what it is."""
RELUFIED_WARMUP = 0.2
"""The least share of the steps, where no other is given, that a run is dense first
whose weights were trained for another activation."""


@dataclass(frozen=True)
class Pretrained:
    """A model of `transformers` in a folder, which a run begins with."""

    folder: Path
    model: ModelConfig
    """The sizes and the activation of the model. The settings of `HOW_COMPUTED` have
    their defaults."""
    sequence_length: int
    """Tokens that the model can see at once (max_position_embeddings)."""
    relufied: bool = field(default=False, kw_only=True)
    """Whether squared ReLU takes the place of SiLU in the gate, with which the weights
    were trained: `with_relu`."""

    @classmethod
    def read(cls, folder: str | os.PathLike[str]) -> "Pretrained":
        """Reads config.json, or what a checkpoint says where `folder` is a run folder
        or RUN@STEP, and no weights.

        Raises:
          ValueError: there is neither, or our transformer cannot hold the model.
        """
        run, step = named_checkpoint(os.fspath(folder))
        folder = Path(folder)
        if (run / "checkpoints").is_dir():
            return PretrainedRun.of_run(run, step)
        if step is not None:
            raise ValueError(
                f"{run} is no run, and has no checkpoint of step {step}; leave @{step} "
                f"out"
            )
        check_there(folder)
        path = folder / "config.json"
        if not path.exists():
            raise ValueError(
                f"{folder} is neither a run folder, which has a folder checkpoints, "
                f"nor a Hugging Face folder, which has a config.json; give one of "
                f"them, a run also as RUN@STEP with the number of a step"
            )
        try:
            settings = read_object(path)
        except ValueError as error:
            raise ValueError(f"{folder} is no Hugging Face folder: {error}") from error
        if "model_type" not in settings:
            raise ValueError(
                f"{path} is no config.json of transformers, and {folder} has no "
                f"checkpoints; give a Hugging Face folder, or a run folder"
            )
        model = model_config_of(settings, str(folder))
        return cls(folder, model, settings.get("max_position_embeddings", 2048))

    @property
    def tokenizer(self) -> str | None:
        """The path of the folder's tokenizer.json; None where that is the one of bytes,
        which is built in, and where there is none."""
        path = self.folder / "tokenizer.json"
        if not path.is_file():
            return None
        is_bytes = read_object(path) == json.loads(ByteTokenizer().to_json())
        return None if is_bytes else str(path)

    def end_tokens(self) -> tuple[int, ...]:
        """Returns the ids that end a text, as generation_config.json says, or without
        one config.json; none where neither names any."""
        return self._special_tokens("eos_token_id")

    def begin_token(self) -> int | None:
        """Returns the id that begins a text, by the same files; None where neither
        names one."""
        return next(iter(self._special_tokens("bos_token_id")), None)

    def _special_tokens(self, setting: str) -> tuple[int, ...]:
        for name in ("generation_config.json", "config.json"):
            path = self.folder / name
            if path.is_file():
                given = read_object(path).get(setting)
                ids = given if isinstance(given, list) else [given]
                if given is None:
                    return ()
                if not all(
                    fits(of, int) and 0 <= of < self.model.vocab_size for of in ids
                ):
                    raise ValueError(
                        f"{path} has {setting}={given!r}, and ids of tokens are "
                        f"integers from 0 to {self.model.vocab_size - 1}; mend it"
                    )
                return tuple(ids)
        return ()

    def with_relu(self) -> Self:
        """Returns the same weights in another function: a model gated by SiLU goes on
        gated by squared ReLU ("reglu2"), which leaves zeros, so that 2:4 and V:N:M
        activations become possible. Its loss jumps, and is to be trained back.

        Raises:
          ValueError: the model's gate is not SiLU.
        """
        if self.model.activation != "swiglu":
            raise ValueError(
                f"--relufy puts squared ReLU in the place of SiLU, and {self.folder} "
                f"has activation='{self.model.activation}'; leave --relufy out, or "
                f"give a model with a gate of SiLU (hidden_act 'silu')"
            )
        return replace(
            self, model=replace(self.model, activation="reglu2"), relufied=True
        )

    def settings(self, start: TrainConfig) -> TrainConfig:
        """Returns the settings `start` with the folder's model and tokenizer. Where the
        model is gated, a recipe's penalty on skipped neurons, which gated FFNs cannot
        have, is left out. Of weights that were trained for another activation, at least
        `RELUFIED_WARMUP` of the steps are dense before the sparse ones, which are so
        many fewer.

        Raises:
          ValueError: the recipe does not fit the model.
        """
        computed = {name: getattr(start.model, name) for name in HOW_COMPUTED}
        recipe = start.phases
        is_gated = self.model.activation != "relu2"
        if is_gated and not (recipe.schedule or recipe.sparsity):
            own = replace(start.sparsity, skipped_energy=None)
            recipe = replace(recipe, sparsity=own).relative_to(start.recipe)
        if self.relufied and not recipe.schedule:
            warmup = max(recipe.warmup_share, RELUFIED_WARMUP)
            later = warmup - recipe.warmup_share
            sparse = max(round(recipe.sparse_share - later, 6), 0.0)
            recipe = replace(recipe, warmup_share=warmup, sparse_share=sparse)
        return replace(
            start,
            phases=recipe,
            model=replace(self.model, **computed),
            data=replace(start.data, tokenizer=self.tokenizer),
        )

    def check_fits(self, model: ModelConfig) -> None:
        """Raises ValueError where a run's model is another one than the folder's."""
        for setting in fields(ModelConfig):
            name = setting.name
            # Whether a width is given, or follows from others, is all the same.
            width = "head_width" if name == "head_dim" else name
            theirs, ours = getattr(self.model, width), getattr(model, width)
            if name not in HOW_COMPUTED and theirs != ours:
                raise ValueError(
                    f"model.{name}={ours!r} is not that of {self.folder}, whose "
                    f"weights are for {theirs!r}; leave it out, or begin without the "
                    f"folder"
                )

    def check_phases(self, planned: Sequence[Phase]) -> None:
        """Raises ValueError where the phases of a run do not begin with a dense one,
        and the model computes another function than the weights were trained for."""
        first = planned[0]
        if self.relufied and not (first.is_dense and first.static_weights is None):
            raise ValueError(
                f"--relufy begins with a function that the weights of {self.folder} "
                f"were not trained for, and the phase {first.kind!r} is sparse from "
                f"the first step; give a dense one before it: --phases.warmup-share "
                f"{RELUFIED_WARMUP}, or in a schedule a first phase without sparsity"
            )

    def in_words(self) -> str:
        """Returns whose weights these are, and what is computed with them."""
        function = ", squared ReLU in the place of SiLU" if self.relufied else ""
        return f"{self.folder}{function}"

    def parameters(self) -> dict[Names, np.ndarray]:
        """Returns the weights: see `tensors.read_parameters`."""
        return read_parameters(self.folder, self.model)

    def load(self, dtype: Literal["float32", "bfloat16"] = "float32") -> Transformer:
        """Returns the model with its weights, dense, on the first device.

        Args:
          dtype: what it computes in; the weights are float32.
        Raises:
          ValueError, ImportError: as `parameters`.
        """
        config = replace(self.model, dtype=dtype)
        built = nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))
        graph, params, buffers = nnx.split(built, nnx.Param, ...)
        given = self.parameters()
        names = lambda path: tuple(of.key for of in path if hasattr(of, "key"))
        params = jax.tree.map_with_path(
            lambda path, _: jnp.asarray(given[names(path)]), params
        )
        # What a dense model holds and does not read: the scales of 2:4 weights.
        buffers = jax.tree.map(lambda of: jnp.ones(of.shape, of.dtype), buffers)
        return nnx.merge(graph, params, buffers)

    def origin(self, run: Path) -> dict[str, Any]:
        """Returns what the checkpoints of the run in the folder `run` say of where it
        began: the way from there to this folder, and the SHA-256 of its weights."""
        digest = hashlib.sha256()
        for path in weight_files(self.folder):
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        return self._origin(run, digest.hexdigest())

    def _origin(self, run: Path, digest: str) -> dict[str, Any]:
        origin = {"folder": self.path_from(run), "sha256": digest}
        return origin | ({"relufied": True} if self.relufied else {})

    def check_begun(self, origin: dict[str, Any] | None, run: Path) -> None:
        """Raises ValueError where the run in the folder `run`, whose checkpoints say
        `origin`, did not begin with this folder. No weights are read."""
        began = "anew"
        if origin is not None:
            relufied = origin.get("relufied", False)
            if (origin["folder"], relufied) == (self.path_from(run), self.relufied):
                return
            began = f"with {origin['folder']}{' and --relufy' if relufied else ''}"
        raise ValueError(
            f"{run} holds a run that began {began}, not with {self.in_words()}; go on "
            f"with it by --resume, or choose another run folder"
        )

    def path_from(self, run: Path) -> str:
        """Returns the way to this folder from that of a run."""
        return os.path.relpath(self.folder.resolve(), run.resolve())


@dataclass(frozen=True)
class PretrainedRun(Pretrained):
    """The model of a run, which another run begins with: dense, as after a switch that
    leaves the run's phase. 2:4 weights are folded, and no activation is left out."""

    trained: TrainedSettings

    @classmethod
    def of_run(cls, folder: Path, step: int | None) -> Self:
        """Reads what the checkpoint of `step` says, by default the latest.

        Raises:
          ValueError: there is none, or its model is smaller than the run's, or its
            weights are static.
        """
        trained = trained_settings(folder, step)
        whole = trained.config.model
        if trained.model != whole or whole.static_weights is not None:
            raise ValueError(
                f"{folder} is at step {trained.step} in phase {trained.phase.kind!r}, "
                f"whose model is smaller than the run's or has static weights; take a "
                f"later checkpoint, or go on with it by --branch"
            )
        return cls(folder, whole, trained.config.data.sequence_length, trained)

    @property
    def tokenizer(self) -> str | None:
        """The path of the run's tokenizer.json; None for bytes, and where it was
        trained on shards without one."""
        return self.trained.config.data.tokenizer

    def _special_tokens(self, setting: str) -> tuple[int, ...]:
        """Returns no ids: a run names none."""
        return ()

    def parameters(self) -> dict[Names, np.ndarray]:
        """Returns the weights by their path in the model, float32.

        Raises:
          ValueError: the checkpoint is damaged.
        """
        dense = as_dense(self._model(), drop_activation_masks=True)
        state = nnx.to_pure_dict(nnx.state(dense, nnx.Param))
        return {
            tuple(entry.key for entry in path): np.asarray(leaf)
            for path, leaf in jax.tree.leaves_with_path(state)
        }

    def origin(self, run: Path) -> dict[str, Any]:
        """Returns what checkpoints say of where their run began: the way from there to
        this run's folder with the step, and the SHA-256 of the checkpoint's
        manifest."""
        manifest = (self.trained.checkpoint / "manifest.json").read_bytes()
        return self._origin(run, hashlib.sha256(manifest).hexdigest())

    def path_from(self, run: Path) -> str:
        return f"{super().path_from(run)}@{self.trained.step}"

    def _model(self) -> Transformer:
        return load_trained_model(self.folder, self.trained.step).model
