"""Weights under the names of `transformers`, in safetensors files, out and in.

A linear layer of PyTorch stores the transpose of ours, (d_out, d_in); the names are
those of Llama, which Arcee and Qwen share.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from flax import nnx

from sparsejax.annotations import fits
from sparsejax.config import ModelConfig
from sparsejax.interchange.json_files import read_object
from sparsejax.models.block_diagonal import stacked_dense_weight
from sparsejax.models.transformer import Transformer

type Names = tuple[str, ...]
"""Where a parameter lies in a model, or in a block, name by name."""


class Place(NamedTuple):
    """The place of a weight in `transformers`."""

    name: str
    transposed: bool = False


BLOCK: dict[Names, Place] = {
    ("attention_norm", "scale"): Place("input_layernorm.weight"),
    ("attention", "w_query"): Place("self_attn.q_proj.weight", transposed=True),
    ("attention", "w_key"): Place("self_attn.k_proj.weight", transposed=True),
    ("attention", "w_value"): Place("self_attn.v_proj.weight", transposed=True),
    ("attention", "w_out"): Place("self_attn.o_proj.weight", transposed=True),
    ("attention", "bias_query"): Place("self_attn.q_proj.bias"),
    ("attention", "bias_key"): Place("self_attn.k_proj.bias"),
    ("attention", "bias_value"): Place("self_attn.v_proj.bias"),
    ("attention", "query_norm", "scale"): Place("self_attn.q_norm.weight"),
    ("attention", "key_norm", "scale"): Place("self_attn.k_norm.weight"),
    ("ffn_norm", "scale"): Place("post_attention_layernorm.weight"),
    ("ffn", "w_gate"): Place("mlp.gate_proj.weight", transposed=True),
    ("ffn", "w_up"): Place("mlp.up_proj.weight", transposed=True),
    ("ffn", "w_down"): Place("mlp.down_proj.weight", transposed=True),
}
"""The place of each parameter of a block by its path there; the name follows
"model.layers.I."."""

OUTSIDE: dict[Names, Place] = {
    ("embedding",): Place("model.embed_tokens.weight"),
    ("final_norm", "scale"): Place("model.norm.weight"),
    ("head",): Place("lm_head.weight", transposed=True),
}
"""The place of each parameter outside of the blocks by its path in the model."""

INDEX = "model.safetensors.index.json"
SHARD_BYTES = 5 * 10**9
"""The most that a file of weights holds, unless a single matrix is larger."""


def huggingface_tensors(model: Transformer) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the float32 parameters of a model by their names in `transformers`;
    weights that are stored as blocks on a diagonal as whole ones, and of a model with
    tied embeddings no head, which `transformers` takes from the embedding."""
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    leaves = {
        tuple(entry.key for entry in path): leaf
        for path, leaf in jax.tree.leaves_with_path(params)
    }
    for path, place in OUTSIDE.items():
        if path in leaves:
            yield place.name, _stored(leaves[path], place)
    for path, place in BLOCK.items():
        stacked = leaves.get(("blocks", *path))
        if stacked is None:
            continue
        for layer, weight in enumerate(stacked_dense_weight(path[-1], stacked)):
            yield f"model.layers.{layer}.{place.name}", _stored(weight, place)


def _stored(weight: jax.Array, place: Place) -> np.ndarray:
    array = np.asarray(weight)
    return np.ascontiguousarray(array.T) if place.transposed else array


def write_tensors(
    tensors: Mapping[str, np.ndarray], folder: Path, *, shard_bytes: int = SHARD_BYTES
) -> list[str]:
    """Writes model.safetensors, or where that is larger than `shard_bytes` several
    files and their index, and returns their names.

    Raises:
      ImportError: safetensors is not installed.
      OSError: a file cannot be written.
    """
    save_file, error_of_it = _safetensors()
    shards: list[dict[str, np.ndarray]] = [{}]
    held = 0
    for name, array in tensors.items():
        if shards[-1] and held + array.nbytes > shard_bytes:
            shards.append({})
            held = 0
        shards[-1][name] = array
        held += array.nbytes
    count = len(shards)
    names = ["model.safetensors"]
    if count > 1:
        names = [f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]
    for name, shard in zip(names, shards, strict=True):
        try:
            # transformers 4 refuses files that do not say whose layout they have.
            save_file(shard, folder / name, metadata={"format": "pt"})
        except error_of_it as error:  # what it makes of an OSError
            raise OSError(f"{folder / name}: {error}") from error
    if count == 1:
        return names
    lies_in = {
        tensor: name
        for name, shard in zip(names, shards, strict=True)
        for tensor in shard
    }
    total = sum(array.nbytes for array in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": lies_in}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return [*names, INDEX]


def _safetensors():
    """Returns what writes a file, and the error that it raises."""
    try:
        from safetensors import SafetensorError
        from safetensors.numpy import save_file
    except ImportError as error:
        raise ImportError(
            "weights are written by the `safetensors` package; run `uv sync --extra "
            "hf` or `pip install 'sparsejax[hf]'`"
        ) from error
    return save_file, SafetensorError


def read_parameters(folder: Path, config: ModelConfig) -> dict[Names, np.ndarray]:
    """Returns the parameters of a model from a Hugging Face folder, float32, by their
    path in a `Transformer`; those of the blocks are stacked, (layers, ...).

    Raises:
      ValueError: a weight is missing, has another shape, is one that the model has no
        place for, or a file cannot be read.
      ImportError: safetensors is not installed.
    """
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise ImportError(
            "weights are read by the `safetensors` package; run `uv sync --extra hf` "
            "or `pip install 'sparsejax[hf]'`"
        ) from error
    paths = weight_files(folder)
    with ExitStack() as opened:
        try:
            files = [opened.enter_context(safe_open(p, "np")) for p in paths]
        except (SafetensorError, OSError) as error:
            raise ValueError(
                f"the weights in {folder} cannot be read ({error}); copy them anew"
            ) from error
        lies_in = {name: file for file in files for name in file.keys()}
        shapes = _shapes(config)
        expected = _expected_names(config)
        _refuse_strangers(folder, set(lies_in) - expected, config)
        if missing := sorted(expected - set(lies_in)):
            raise ValueError(
                f"{folder} has no weight {missing[0]}, which its config.json asks for; "
                f"copy it anew"
            )

        def read(name: str, names: Names, place: Place) -> np.ndarray:
            array = lies_in[name].get_tensor(name)
            array = np.asarray(array.T if place.transposed else array, np.float32)
            if array.shape != shapes[names]:
                raise ValueError(
                    f"{name} of {folder} has the shape {array.shape}, as our "
                    f"{'.'.join(names)}, and config.json asks for {shapes[names]}; "
                    f"the two do not belong together"
                )
            return array

        found = {
            names: read(place.name, names, place)
            for names, place in OUTSIDE.items()
            if names in shapes
        }
        for names, place in BLOCK.items():
            own = ("blocks", *names)
            if own in shapes:
                layers = [
                    read(f"model.layers.{layer}.{place.name}", own, place)
                    for layer in range(config.layers)
                ]
                found[own] = np.stack(layers)
    return found


def weight_files(folder: Path) -> list[Path]:
    """Returns the files that hold the weights of a Hugging Face folder.

    Raises:
      ValueError: there are none in safetensors.
    """
    index = folder / INDEX
    if index.is_file():
        files = read_object(index).get("weight_map")
        if not isinstance(files, dict) or not all(fits(f, str) for f in files.values()):
            raise ValueError(
                f"{index} has weight_map={files!r:.80}, and an index of weights has "
                f"the file of each weight there; save the model again"
            )
        return [folder / name for name in sorted(set(files.values()))]
    if not (folder / "model.safetensors").is_file():
        raise ValueError(
            f"{folder} has no model.safetensors; save the model with `save_pretrained` "
            f"of transformers, which writes one"
        )
    return [folder / "model.safetensors"]


def _shapes(config: ModelConfig) -> dict[Names, tuple[int, ...]]:
    """Returns the shape of each parameter by path, of one layer in the blocks."""
    model = nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    shapes = {}
    for path, leaf in jax.tree.leaves_with_path(params):
        names = tuple(entry.key for entry in path)
        shapes[names] = leaf.shape[1:] if names[0] == "blocks" else leaf.shape
    return shapes


def _expected_names(config: ModelConfig) -> set[str]:
    shapes = _shapes(config)
    outside = {place.name for names, place in OUTSIDE.items() if names in shapes}
    return outside | {
        f"model.layers.{layer}.{place.name}"
        for names, place in BLOCK.items()
        if ("blocks", *names) in shapes
        for layer in range(config.layers)
    }


def _refuse_strangers(folder: Path, names: set[str], config: ModelConfig) -> None:
    """Raises ValueError for weights that the model has no place for."""
    # What is computed, or said a second time.
    tied = {"lm_head.weight"} if config.tie_embeddings else set()
    strangers = sorted(n for n in names - tied if not n.endswith("rotary_emb.inv_freq"))
    if strangers:
        raise ValueError(
            f"{folder} has the weight {strangers[0]}, for which its config.json gives "
            f"our transformer no place; give a model without it"
        )
