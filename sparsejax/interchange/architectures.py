"""The architecture of `transformers` that a model has; config.json, out and in.

relu2    ArceeForCausalLM   down(relu(up(x))^2)
swiglu   LlamaForCausalLM   down(silu(gate(x)) * up(x))
reglu2   LlamaForCausalLM   down(relu(gate(x))^2 * up(x)), with hidden_act "relu2"

A gated model with biases of queries, keys and values is Qwen2ForCausalLM, and one that
normalises queries and keys, before they are rotated, Qwen3ForCausalLM. All else is the
same in all: pre-norm by RMS, grouped-query attention, rotary positions with pairs half
a head apart.
"""

from collections.abc import Mapping
from typing import Any, Literal

from sparsejax.annotations import fits, in_words
from sparsejax.config import ModelConfig
from sparsejax.feed_forward.activation import ActivationName

WeightDtype = Literal["float32", "bfloat16"]
"""The dtypes in which weights are stored."""

HIDDEN_ACTS = {"relu2": "relu2", "swiglu": "silu", "reglu2": "relu2"}
"""For each activation the hidden_act in `transformers`."""
CLASSES = {
    "arcee": "ArceeForCausalLM",
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
"""For each model_type that is written the class in `transformers`."""


def why_no_architecture(model: ModelConfig) -> str | None:
    """Returns why no architecture of `transformers` computes what a model does; None
    where one does."""
    if model.qk_norm and model.qkv_bias:
        return "qk_norm and qkv_bias together are in none; leave one of them out"
    for name in ("qk_norm", "qkv_bias"):
        if getattr(model, name) and not model.gated:
            return (
                f"{name} with activation='{model.activation}' is in none; take swiglu "
                f"or reglu2, or leave {name} out"
            )
    plain = not (model.qk_norm or model.qkv_bias)
    if plain and model.d_model % model.heads:
        return (
            f"d_model={model.d_model} that is no multiple of heads={model.heads} is "
            f"for qk_norm or qkv_bias alone; take other sizes, or one of these"
        )
    return None


def model_type_of(model: ModelConfig) -> str:
    """Returns the model_type that computes what a model does, a key of `CLASSES`.

    Raises:
      ValueError: no architecture of `transformers` computes it.
    """
    if (reason := why_no_architecture(model)) is not None:
        raise ValueError(
            f"no architecture of transformers is this model's: {reason} in a new run. "
            f"What this one has learned is not lost: its checkpoints hold all weights, "
            f"and model.safetensors in its folder the dense ones, under our names"
        )
    if model.qk_norm or model.qkv_bias:
        return "qwen3" if model.qk_norm else "qwen2"
    return "llama" if model.gated else "arcee"


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
    Raises:
      ValueError: no architecture of `transformers` computes what the model does.
    """
    model_type = model_type_of(model)
    is_qwen = model_type.startswith("qwen")
    return {
        "architectures": [CLASSES[model_type]],
        "model_type": model_type,
        "vocab_size": model.vocab_size,
        "hidden_size": model.d_model,
        "intermediate_size": model.d_hidden,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_width,
        "hidden_act": HIDDEN_ACTS[model.activation],
        "max_position_embeddings": sequence_length,
        "rms_norm_eps": model.norm_epsilon,
        "rope_theta": model.rope_base,
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rope_base},
        "tie_word_embeddings": model.tie_embeddings,
        **({"use_sliding_window": False} if is_qwen else {"mlp_bias": False}),
        **({} if model_type == "qwen2" else {"attention_bias": False}),
        "attention_dropout": 0.0,
        "initializer_range": model.d_model**-0.5,
        "use_cache": True,
        "torch_dtype": dtype,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }


READ = {
    "llama": "silu",
    "arcee": "relu2",
    "mistral": "silu",
    "qwen2": "silu",
    "qwen3": "silu",
}
"""The architectures that are read, and the hidden_act that a config.json without one
means. Mistral's is Llama's with attention that may be limited to a window."""
KV_HEADS_LEFT_OUT = {"mistral": 8, "qwen2": 32, "qwen3": 32}
"""The key heads that a config.json without `num_key_value_heads` means, where they are
not as many as the query heads."""
WHY_NOT = {
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


TYPES: dict[str, Any] = {
    "model_type": str,
    **dict.fromkeys((*REQUIRED, "max_position_embeddings"), int),
    **dict.fromkeys(("num_key_value_heads", "head_dim", "sliding_window"), int | None),
    "max_window_layers": int | None,
    "hidden_act": str,
    **dict.fromkeys(("rope_theta", "rms_norm_eps", "partial_rotary_factor"), float),
    **dict.fromkeys(("tie_word_embeddings", "use_sliding_window"), bool),
    **dict.fromkeys(("attention_bias", "mlp_bias"), bool | None),
    **dict.fromkeys(("rope_parameters", "rope_scaling"), dict | None),
    "layer_types": list | None,
}
"""The types of the settings that are read, each of which may be left out."""


def model_config_of(settings: Mapping[str, Any], whose: str) -> ModelConfig:
    """Returns the sizes of the model that a config.json of `transformers` describes.

    Args:
      settings: what config.json holds.
      whose: the folder, for messages.
    Raises:
      ValueError: our transformer cannot hold the model; says what is in the way.
    """
    _check_types(settings, whose)
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
    if model_type in KV_HEADS_LEFT_OUT and "num_key_value_heads" not in settings:
        missing.append("num_key_value_heads")
    if missing:
        raise ValueError(f"{whose}/config.json lacks {missing[0]}; add it")
    heads, width = settings["num_attention_heads"], settings["hidden_size"]
    head_dim = settings.get("head_dim", 128 if model_type == "qwen3" else None)
    rope = settings.get("rope_parameters") or {}
    return ModelConfig(
        vocab_size=settings["vocab_size"],
        d_model=width,
        layers=settings["num_hidden_layers"],
        heads=heads,
        kv_heads=settings.get("num_key_value_heads") or heads,
        head_dim=None if not head_dim or head_dim * heads == width else head_dim,
        qk_norm=model_type == "qwen3",
        qkv_bias=model_type == "qwen2",
        d_hidden=settings["intermediate_size"],
        activation=activation,
        tie_embeddings=settings.get("tie_word_embeddings", False),
        rope_base=rope.get("rope_theta", settings.get("rope_theta", 10_000.0)),
        norm_epsilon=settings.get(
            "rms_norm_eps", 1e-5 if model_type == "arcee" else 1e-6
        ),
    )


def _check_types(settings: Mapping[str, Any], whose: str) -> None:
    """Raises ValueError where a setting that is read has another type than
    `transformers` writes."""
    for name, annotation in TYPES.items():
        if name not in settings:
            continue
        value, is_size = settings[name], annotation is int
        if not fits(value, annotation) or (is_size and value < 1):
            least = " of 1 or more" if is_size else ""
            raise ValueError(
                f"{whose}/config.json has {name}={value!r:.80}, and it must be "
                f"{in_words(annotation)}{least}; mend it"
            )


def _refuse_what_is_different(settings: Mapping[str, Any], whose: str) -> None:
    """Raises ValueError where config.json says that the model computes something that
    our transformer does not, besides its activation."""
    for name in ("attention_bias", "mlp_bias"):
        if settings.get(name):
            raise ValueError(
                f"{whose} has {name}=true, and our transformer has biases of queries, "
                f"keys and values alone, as Qwen2 has; give a model without others"
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
    if _has_window(settings):
        raise ValueError(
            f"{whose} limits attention to a sliding_window, and ours sees all tokens "
            f"before; give a model whose sliding_window is null"
        )


def _has_window(settings: Mapping[str, Any]) -> bool:
    """Returns whether attention of some layer is limited to a window."""
    # What a config.json of these three leaves out is a window of 4096.
    left_out = None if settings["model_type"] in ("llama", "arcee") else 4096
    window = settings.get("sliding_window", left_out)
    if not settings["model_type"].startswith("qwen"):
        return window is not None
    if window is None or not settings.get("use_sliding_window", False):
        return False
    layers = settings.get("num_hidden_layers", 0)
    if (kinds := settings.get("layer_types")) is not None:
        return "sliding_attention" in kinds
    first = settings.get("max_window_layers", 28)
    return first is None or first < layers


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
