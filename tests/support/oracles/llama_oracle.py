"""Llama, Arcee and Qwen in NumPy, float64, from their published equations and a folder
alone.

Sources: arXiv 2302.13971 (Llama), 2104.09864 (rotary positions), 2305.13245 (grouped
queries), 1910.07467 (RMS norm), 2407.10671 (Qwen2: biases of queries, keys and values),
2505.09388 (Qwen3: queries and keys normalised head by head); the Arcee
Foundation Model has an FFN without a gate.
Knows nothing of sparsejax: names and sizes are those of the folder.
"""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

ACTIVATIONS = {
    "silu": lambda x: x / (1 + np.exp(-x)),
    "relu2": lambda x: np.maximum(x, 0) ** 2,
}


def read_folder(folder: Path) -> tuple[dict, dict[str, np.ndarray]]:
    """The config, and the weights of all files in float64."""
    config = json.loads((folder / "config.json").read_text())
    weights = {}
    for path in sorted(folder.glob("*.safetensors")):
        weights |= {name: w.astype(np.float64) for name, w in load_file(path).items()}
    return config, weights


def logits(folder: Path, tokens: np.ndarray) -> np.ndarray:
    """Logits (sequence, vocabulary) of one sequence."""
    config, weights = read_folder(folder)
    x = weights["model.embed_tokens.weight"][tokens]
    for layer in range(config["num_hidden_layers"]):
        of = lambda name, kind="weight", i=layer: weights[
            f"model.layers.{i}.{name}.{kind}"
        ]
        x = x + _attention(_norm(x, of("input_layernorm"), config), of, config)
        x = x + _ffn(_norm(x, of("post_attention_layernorm"), config), of, config)
    head = weights.get("lm_head.weight")
    if config["tie_word_embeddings"]:
        assert head is None
        head = weights["model.embed_tokens.weight"]
    return _norm(x, weights["model.norm.weight"], config) @ head.T


def _norm(x, scale, config):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + config["rms_norm_eps"]) * scale


def _ffn(x, of, config):
    act = ACTIVATIONS[config["hidden_act"]]
    up = x @ of("mlp.up_proj").T
    if config["model_type"] == "arcee":
        return act(up) @ of("mlp.down_proj").T
    assert config["model_type"] in ("llama", "qwen2", "qwen3")
    return (act(x @ of("mlp.gate_proj").T) * up) @ of("mlp.down_proj").T


def _attention(x, of, config):
    size, heads = config["head_dim"], config["num_attention_heads"]
    shared = heads // config["num_key_value_heads"]
    q, k, v = (x @ of(f"self_attn.{name}_proj").T for name in "qkv")
    if config["model_type"] == "qwen2":
        q, k, v = (
            y + of(f"self_attn.{name}_proj", "bias")
            for y, name in zip((q, k, v), "qkv", strict=True)
        )
    normed = lambda y, name: y
    if config["model_type"] == "qwen3":
        normed = lambda y, name: _norm(y, of(f"self_attn.{name}_norm"), config)
    head_of = lambda y, i: y[:, i * size : (i + 1) * size]
    outs = []
    for head in range(heads):
        query = _rotate(normed(head_of(q, head), "q"), config)
        key = _rotate(normed(head_of(k, head // shared), "k"), config)
        scores = query @ key.T / size**0.5
        scores[np.triu_indices(len(x), 1)] = -np.inf
        share = np.exp(scores - scores.max(1, keepdims=True))
        share /= share.sum(1, keepdims=True)
        outs.append(share @ head_of(v, head // shared))
    return np.concatenate(outs, axis=1) @ of("self_attn.o_proj").T


def _rotate(x, config):
    half = x.shape[1] // 2
    base = config["rope_parameters"]["rope_theta"]
    assert base == config["rope_theta"]
    frequency = base ** (-np.arange(half) / half)
    turn = np.exp(1j * np.arange(len(x))[:, None] * frequency)
    turned = (x[:, :half] + 1j * x[:, half:]) * turn
    return np.concatenate([turned.real, turned.imag], axis=1)
