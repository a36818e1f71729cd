"""A Hugging Face folder as the start of a run: its model, weights and tokenizer."""

import hashlib
import json
import os
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from sparsejax.config import ModelConfig, TrainConfig
from sparsejax.data.tokenizers import ByteTokenizer
from sparsejax.interchange.architectures import model_config_of
from sparsejax.interchange.tensors import Names, read_parameters, weight_files
from sparsejax.models.transformer import Transformer

HOW_COMPUTED = ("dtype", "remat", "scan_layers")
"""Settings of a model that say how it is computed, and not what it is."""


@dataclass(frozen=True)
class Pretrained:
    """A model of `transformers` in a folder, which a run begins with."""

    folder: Path
    model: ModelConfig
    """The sizes and the activation of the model. The settings of `HOW_COMPUTED` have
    their defaults."""

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Reads config.json, and no weights.

        Raises:
          ValueError: there is none, or our transformer cannot hold the model.
        """
        path = folder / "config.json"
        try:
            settings = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(
                f"{folder} is no Hugging Face folder: {path} cannot be read ({error})"
            ) from error
        if not isinstance(settings, dict) or "model_type" not in settings:
            what = "is a run folder" if (folder / "checkpoints").is_dir() else "is none"
            raise ValueError(
                f"{path} is no config.json of transformers, and {folder} {what}; give "
                f"a Hugging Face folder, which `sparsejax export` makes of a run"
            )
        return cls(folder, model_config_of(settings, str(folder)))

    @property
    def tokenizer(self) -> str | None:
        """The path of the folder's tokenizer.json; None where that is the one of bytes,
        which is built in, and where there is none."""
        path = self.folder / "tokenizer.json"
        if not path.is_file():
            return None
        of_bytes = json.loads(ByteTokenizer().to_json())
        is_bytes = json.loads(path.read_text(encoding="utf-8")) == of_bytes
        return None if is_bytes else str(path)

    def settings(self, start: TrainConfig) -> TrainConfig:
        """Returns the settings `start` with the folder's model and tokenizer.

        Raises:
          ValueError: the recipe does not fit the model.
        """
        computed = {name: getattr(start.model, name) for name in HOW_COMPUTED}
        return replace(
            start,
            model=replace(self.model, **computed),
            data=replace(start.data, tokenizer=self.tokenizer),
        )

    def check_fits(self, model: ModelConfig) -> None:
        """Raises ValueError where a run's model is another one than the folder's."""
        for field in fields(ModelConfig):
            theirs, ours = getattr(self.model, field.name), getattr(model, field.name)
            if field.name not in HOW_COMPUTED and theirs != ours:
                raise ValueError(
                    f"model.{field.name}={ours!r} is not that of {self.folder}, whose "
                    f"weights are for {theirs!r}; leave it out, or begin without the "
                    f"folder"
                )

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
        return {"folder": self._from(run), "sha256": digest.hexdigest()}

    def check_begun(self, origin: dict[str, Any] | None, run: Path) -> None:
        """Raises ValueError where the run in the folder `run`, whose checkpoints say
        `origin`, did not begin with this folder. No weights are read."""
        if origin is None or origin["folder"] != self._from(run):
            began = "anew" if origin is None else f"with {origin['folder']}"
            raise ValueError(
                f"{run} holds a run that began {began}, not with {self.folder}; go on "
                f"with it by --resume, or choose another run folder"
            )

    def _from(self, run: Path) -> str:
        return os.path.relpath(self.folder.resolve(), run.resolve())
