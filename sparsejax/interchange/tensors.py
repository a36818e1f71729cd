"""The weights of a model under the names of `transformers`, in safetensors files.

A linear layer of PyTorch stores the transpose of ours, (d_out, d_in); the names are
those of Llama, which Arcee shares.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from flax import nnx

from sparsejax.distributed.mesh import STACKED_BLOCKS
from sparsejax.models.block_diagonal import dense_weight
from sparsejax.models.transformer import Transformer
from sparsejax.training.growth import ENDS_OF_BRANCHES

type Names = tuple[str, ...]
"""Where a parameter lies in a model, or in a block, name by name."""


class Place(NamedTuple):
    """Where a weight stands in `transformers`."""

    name: str
    transposed: bool = False


BLOCK: dict[Names, Place] = {
    ("attention_norm", "scale"): Place("input_layernorm.weight"),
    ("attention", "w_query"): Place("self_attn.q_proj.weight", transposed=True),
    ("attention", "w_key"): Place("self_attn.k_proj.weight", transposed=True),
    ("attention", "w_value"): Place("self_attn.v_proj.weight", transposed=True),
    ("attention", "w_out"): Place("self_attn.o_proj.weight", transposed=True),
    ("ffn_norm", "scale"): Place("post_attention_layernorm.weight"),
    ("ffn", "w_gate"): Place("mlp.gate_proj.weight", transposed=True),
    ("ffn", "w_up"): Place("mlp.up_proj.weight", transposed=True),
    ("ffn", "w_down"): Place("mlp.down_proj.weight", transposed=True),
}
"""By path in a block; the name follows "model.layers.I."."""

OUTSIDE: dict[Names, Place] = {
    ("embedding",): Place("model.embed_tokens.weight"),
    ("final_norm", "scale"): Place("model.norm.weight"),
    ("head",): Place("lm_head.weight", transposed=True),
}
"""By path in the model, outside of the blocks."""

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
        if stacked.ndim == STACKED_BLOCKS:
            reads_residual = path[-1] not in ENDS_OF_BRANCHES
            stacked = dense_weight(stacked, reads_residual=reads_residual)
        for layer, weight in enumerate(stacked):
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
