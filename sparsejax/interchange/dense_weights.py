"""The dense weights of a trained model as a safetensors file, one entry a matrix.

Written at the end of every run that ends dense (`model.safetensors` in the run folder,
extra "hf"). Names and shapes, float32, activations times matrix:

    embedding (vocab, d_model)          head (d_model, vocab), unless it is tied
    blocks.I.attention.w_query, w_key, w_value, w_out (d_in, d_out)
    blocks.I.attention.bias_query, bias_key, bias_value (d_out,), with qkv_bias
    blocks.I.attention.query_norm.scale, key_norm.scale (head_dim,), with qk_norm
    blocks.I.ffn.w_up (d_model, d_hidden), w_down (d_hidden, d_model), w_gate if gated
    blocks.I.attention_norm.scale, blocks.I.ffn_norm.scale, final_norm.scale (d_model,)
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental.multihost_utils import process_allgather

from sparsejax.models.block_diagonal import stacked_dense_weight
from sparsejax.models.transformer import Transformer


def dense_weights(model: Transformer) -> dict[str, np.ndarray]:
    """Returns every trained parameter by name, float32: the stacked layers one by one,
    and weights that are stored as blocks on a diagonal as whole ones.

    All processes of a run call it together, and get the same.

    Raises:
      ValueError: the model's FFNs are sparse: a dense network with these weights would
        compute something else. `switching.switch` it to a dense one before.
    """
    if not model.sparsity.is_dense:
        raise ValueError(
            f"the model is sparse ({model.sparsity}); a dense network with its weights "
            f"computes something else: end the run with a dense phase, or switch the "
            f"model with switching.switch"
        )
    weights: dict[str, np.ndarray] = {}
    state = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    for path, leaf in jax.tree.leaves_with_path(state):
        names = [entry.key for entry in path]
        array = np.asarray(process_allgather(leaf, tiled=True))
        if names[0] != "blocks":
            weights[".".join(names)] = array
            continue
        stacked = stacked_dense_weight(names[-1], jnp.asarray(array))
        for index, layer in enumerate(np.asarray(stacked)):
            weights[".".join(["blocks", str(index), *names[1:]])] = layer
    return weights


def export(model: Transformer, path: Path) -> str:
    """Writes `dense_weights` to `path`; returns a line that says what happened.

    Raises:
      OSError: the file cannot be written.
    """
    if not model.sparsity.is_dense:
        return (
            f"no {path.name}: the run ended sparse; a dense phase at the end makes it"
        )
    try:
        from safetensors import SafetensorError
        from safetensors.numpy import save_file
    except ImportError:
        return f"no {path.name}: safetensors is missing; run `uv sync --extra hf`"
    weights = dense_weights(model)
    if jax.process_index() == 0:
        try:
            save_file(weights, path)
        except SafetensorError as error:  # what it makes of an OSError
            raise OSError(f"{path}: {error}") from error
    return f"dense weights: {path}"
