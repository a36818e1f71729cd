"""Named settings to start a run from."""

from collections.abc import Callable

from sparsejax.config import (
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    PresetName,
    RecipeConfig,
    TrainConfig,
)


def tiny() -> TrainConfig:
    """Returns the settings of a model that trains in 3 to 13 minutes on two CPU cores:
    0.9 M parameters, tokens are bytes."""
    return TrainConfig()


def wide_200m() -> TrainConfig:
    """Returns the settings of a first run for a Hopper GPU, about two minutes on an
    H100: 0.2 B parameters, bytes, four layers of a width at which experts gain. The
    learning rate was the best of four for a dense run of this width and length with
    16,384 classes."""
    return TrainConfig(
        preset="wide-200m",
        model=ModelConfig(
            d_model=2048,
            layers=4,
            heads=16,
            kv_heads=16,
            d_hidden=8192,
            dtype="bfloat16",
            scan_layers=False,
        ),
        data=DataConfig(sequence_length=1024),
        optimizer=OptimizerConfig(
            peak_learning_rate=3e-4, schedule="cosine", warmup_share=0.05
        ),
        phases=RecipeConfig(warmup_share=0.1, sparse_share=0.7),
        steps=600,
        checkpoint_every=0,
    )


def gpt_124m() -> TrainConfig:
    """Returns the settings of GPT-2's smallest size with squared ReLU. Steps, batch and
    warm-up are those of arXiv 2404.01847; the learning rate and its course are ours,
    the rate four times theirs and not tuned."""
    return TrainConfig(
        preset="gpt-124m",
        model=ModelConfig(
            vocab_size=50_304,
            d_model=768,
            layers=12,
            heads=12,
            kv_heads=12,
            d_hidden=3072,
            tie_embeddings=True,
            dtype="bfloat16",
            scan_layers=False,
        ),
        data=DataConfig(sequence_length=1024),
        optimizer=OptimizerConfig(
            peak_learning_rate=6e-4, warmup_share=0.01, final_ratio=0.1
        ),
        steps=300_000,
        batch_size=512,
        sequences_per_device=32,
        eval_every=1000,
        checkpoint_every=1000,
    )


def llama_1b() -> TrainConfig:
    """Returns the settings of the probable 1B set-up of arXiv 2602.06183: Meta
    Lingua's, with squared ReLU. The recipe and the course of the learning rate are
    ours.

    F is 4 d_model and not the 8448 that would have exactly SwiGLU's parameters: 2, 4, 8
    or 16 experts are then whole blocks of 64 neurons, as sparse tensor cores need.
    """
    return TrainConfig(
        preset="llama-1b",
        model=ModelConfig(
            vocab_size=128_256,
            d_model=2048,
            layers=25,
            heads=16,
            kv_heads=16,
            d_hidden=8192,
            rope_base=500_000.0,
            dtype="bfloat16",
            scan_layers=False,
            remat="dots",
        ),
        data=DataConfig(sequence_length=4096),
        optimizer=OptimizerConfig(
            peak_learning_rate=3e-3,
            warmup_share=5000 / 60_000,
            final_ratio=1e-6,
            weight_decay=0.033,
        ),
        phases=RecipeConfig(warmup_share=1000 / 60_000),
        steps=60_000,
        batch_size=256,
        sequences_per_device=4,
        eval_every=1000,
        checkpoint_every=1000,
    )


def llama_7b() -> TrainConfig:
    """Returns the settings of the probable 7B set-up of arXiv 2602.06183: Meta
    Lingua's, with squared ReLU. The recipe and the course of the learning rate are
    ours.

    F is 4 d_model and not 16,512, as in `llama_1b`.
    """
    return TrainConfig(
        preset="llama-7b",
        model=ModelConfig(
            vocab_size=128_256,
            d_model=4096,
            layers=32,
            heads=32,
            kv_heads=32,
            d_hidden=16_384,
            rope_base=500_000.0,
            dtype="bfloat16",
            scan_layers=False,
            remat="dots",
        ),
        data=DataConfig(sequence_length=4096),
        optimizer=OptimizerConfig(
            peak_learning_rate=1e-3, warmup_share=2000 / 100_000, final_ratio=1e-6
        ),
        phases=RecipeConfig(warmup_share=1000 / 100_000),
        steps=100_000,
        batch_size=512,
        sequences_per_device=2,
        eval_every=1000,
        checkpoint_every=1000,
    )


PRESETS: dict[PresetName, Callable[[], TrainConfig]] = {
    "tiny": tiny,
    "wide-200m": wide_200m,
    "gpt-124m": gpt_124m,
    "llama-1b": llama_1b,
    "llama-7b": llama_7b,
}
