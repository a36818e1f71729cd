"""The architecture of `transformers` that a model has; config.json, out and in.

relu2    ArceeForCausalLM   down(relu(up(x))^2)
swiglu   LlamaForCausalLM   down(silu(gate(x)) * up(x))
reglu2   LlamaForCausalLM   down(relu(gate(x))^2 * up(x)), with hidden_act "relu2"

All else is the same in both: pre-norm by RMS, grouped-query attention without biases,
rotary positions with pairs half a head apart.
"""

from collections.abc import Mapping
from typing import Any, Literal

from sparsejax.config import ModelConfig
from sparsejax.feed_forward.activation import ActivationName

WeightDtype = Literal["float32", "bfloat16"]
"""The dtypes in which weights are stored."""

ARCHITECTURES = {
    "relu2": ("arcee", "ArceeForCausalLM", "relu2"),
    "swiglu": ("llama", "LlamaForCausalLM", "silu"),
    "reglu2": ("llama", "LlamaForCausalLM", "relu2"),
}
"""For each activation the model_type, the class and the hidden_act in
`transformers`."""


def huggingface_config(
    model: ModelConfig, *, sequence_length: int, dtype: WeightDtype
) -> dict[str, Any]:
    """Returns the config.json of a model for `transformers`.

    The rotary base stands in it twice, as versions 4 and 5 of `transformers` name it.
    No token begins or ends a text: our corpora have none that does, and the defaults of
    `transformers` would be tokens of another vocabulary.

    Args:
      model: its sizes and activation.
      sequence_length: tokens that it was trained on at a time.
      dtype: of the stored weights.
    """
    model_type, architecture, hidden_act = ARCHITECTURES[model.activation]
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": model.vocab_size,
        "hidden_size": model.d_model,
        "intermediate_size": model.d_hidden,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "hidden_act": hidden_act,
        "max_position_embeddings": sequence_length,
        "rms_norm_eps": model.norm_epsilon,
        "rope_theta": model.rope_base,
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rope_base},
        "tie_word_embeddings": model.tie_embeddings,
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": model.d_model**-0.5,
        "use_cache": True,
        "torch_dtype": dtype,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }


READ = {"llama": "silu", "arcee": "relu2", "mistral": "silu"}
"""The architectures that are read, and the hidden_act that a config.json without one
means. Mistral's is Llama's with attention that may be limited to a window."""
WHY_NOT = {
    "qwen2": "its queries, keys and values have biases, and our attention has none",
    "qwen3": "it normalises queries and keys, which our attention does not",
    "gemma": "its norms scale by 1 + w and its embeddings are scaled, ours are not",
}
"""For each model_type that is refused the reason."""


REQUIRED = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
)
"""Sizes without which a config.json is refused: `transformers` has defaults for them,
which are those of one model."""


def model_config_of(settings: Mapping[str, Any], whose: str) -> ModelConfig:
    """Returns the sizes of the model that a config.json of `transformers` describes.

    Args:
      settings: what config.json holds.
      whose: the folder, for messages.
    Raises:
      ValueError: our transformer cannot hold the model; says what is in the way.
    """
    model_type = settings.get("model_type")
    if model_type not in READ:
        reason = WHY_NOT.get(str(model_type), "only those are read")
        raise ValueError(
            f"{whose} holds model_type={model_type!r}, none of {', '.join(READ)}: "
            f"{reason}; give a folder of one of these"
        )
    _refuse_what_is_different(settings, whose)
    activation = _activation(settings, whose)
    missing = [name for name in REQUIRED if name not in settings]
    if model_type == "mistral" and "num_key_value_heads" not in settings:
        missing.append("num_key_value_heads")  # would be 8
    if missing:
        raise ValueError(f"{whose}/config.json lacks {missing[0]}; add it")
    heads = settings["num_attention_heads"]
    rope = settings.get("rope_parameters") or {}
    return ModelConfig(
        vocab_size=settings["vocab_size"],
        d_model=settings["hidden_size"],
        layers=settings["num_hidden_layers"],
        heads=heads,
        kv_heads=settings.get("num_key_value_heads") or heads,
        d_hidden=settings["intermediate_size"],
        activation=activation,
        tie_embeddings=settings.get("tie_word_embeddings", False),
        rope_base=rope.get("rope_theta", settings.get("rope_theta", 10_000.0)),
        norm_epsilon=settings.get(
            "rms_norm_eps", 1e-5 if model_type == "arcee" else 1e-6
        ),
    )


def _refuse_what_is_different(settings: Mapping[str, Any], whose: str) -> None:
    """Raises ValueError where config.json says that the model computes something that
    our transformer does not, besides its activation."""
    for name in ("attention_bias", "mlp_bias"):
        if settings.get(name):
            raise ValueError(
                f"{whose} has {name}=true, and our transformer has no biases; give a "
                f"model without them"
            )
    rope = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise ValueError(
            f"{whose} has rotary positions of rope_type={kind!r}, and ours are not "
            f"rescaled; give a model with rope_type 'default', such as the one before "
            f"its context was extended"
        )
    if settings.get("partial_rotary_factor", 1) != 1:
        raise ValueError(
            f"{whose} has partial_rotary_factor={settings['partial_rotary_factor']}, "
            f"and ours rotate whole heads; give a model that does"
        )
    # What a config.json of Mistral leaves out is a window of 4096.
    left_out = 4096 if settings["model_type"] == "mistral" else None
    if settings.get("sliding_window", left_out) is not None:
        raise ValueError(
            f"{whose} limits attention to a sliding_window, and ours sees all tokens "
            f"before; give a model whose sliding_window is null"
        )
    heads, width = settings.get("num_attention_heads"), settings.get("hidden_size")
    size = settings.get("head_dim")
    if heads and width and size and size * heads != width:
        raise ValueError(
            f"{whose} has head_dim={size} and num_attention_heads={heads}, and ours "
            f"share hidden_size={width} among the heads; give a model in which "
            f"head_dim x num_attention_heads is hidden_size"
        )


def _activation(settings: Mapping[str, Any], whose: str) -> ActivationName:
    """Returns our name of the FFN; raises ValueError where there is none."""
    model_type = settings["model_type"]
    hidden_act = settings.get("hidden_act", READ[model_type])
    gate = "an FFN without a gate" if model_type == "arcee" else "a gated FFN"
    known: dict[str, ActivationName] = {"relu2": "relu2"}
    if model_type != "arcee":
        known = {"silu": "swiglu", "relu2": "reglu2"}
    if hidden_act not in known:
        raise ValueError(
            f"{whose} has {gate} with hidden_act={hidden_act!r}, and ours have "
            f"{' or '.join(known)}; give a model with one of these"
        )
    return known[hidden_act]
