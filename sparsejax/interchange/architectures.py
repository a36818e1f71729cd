"""Which architecture of `transformers` a model is, and its config.json.

relu2    ArceeForCausalLM   down(relu(up(x))^2)
swiglu   LlamaForCausalLM   down(silu(gate(x)) * up(x))
reglu2   LlamaForCausalLM   down(relu(gate(x))^2 * up(x)), with hidden_act "relu2"

All else is the same in both: pre-norm by RMS, grouped-query attention without biases,
rotary positions with pairs half a head apart.
"""

from typing import Any, Literal

from sparsejax.config import ModelConfig

WeightDtype = Literal["float32", "bfloat16"]
"""How weights are stored."""

ARCHITECTURES = {
    "relu2": ("arcee", "ArceeForCausalLM", "relu2"),
    "swiglu": ("llama", "LlamaForCausalLM", "silu"),
    "reglu2": ("llama", "LlamaForCausalLM", "relu2"),
}
"""By activation: model_type, class and hidden_act in `transformers`."""


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
