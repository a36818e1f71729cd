"""Every setting of a training run, as frozen dataclasses; named presets."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from sparsejax.ops.backend import Backend
from sparsejax.ops.ffn_spec import RouterChoice, TokenSparsity


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder-only transformer."""

    vocab_size: int = 256
    d_model: int = 128
    layers: int = 4
    heads: int = 2
    kv_heads: int = 2
    """Key and value heads; fewer than `heads` is grouped-query attention."""
    d_hidden: int = 512
    """F, neurons per FFN (for "swiglu": per branch)."""
    activation: Literal["relu2", "swiglu"] = "relu2"
    """The FFN: W2 relu(W1 x)^2, or Wd (silu(Wg x) * Wu x)."""
    tie_embeddings: bool = False
    rope_base: float = 10_000.0
    norm_epsilon: float = 1e-6
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Compute type; master weights and optimiser moments are always float32."""
    remat: Literal["none", "full", "dots"] = "none"
    """What a block recomputes in the backward: nothing, everything, or all but the
    outputs of the plain GEMMs."""

    @property
    def head_dim(self) -> int:
        return self.d_model // self.heads

    def __post_init__(self) -> None:
        if self.d_model % self.heads:
            raise ValueError(
                f"d_model={self.d_model} is not a multiple of heads={self.heads}; "
                f"change one of them"
            )
        if self.heads % self.kv_heads:
            raise ValueError(
                f"heads={self.heads} is not a multiple of kv_heads={self.kv_heads}; "
                f"grouped-query attention gives each key head the same number of "
                f"query heads"
            )
        if self.head_dim % 2:
            raise ValueError(
                f"head_dim={self.head_dim} (d_model / heads) is odd; rotary position "
                f"embedding rotates pairs"
            )


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where the tokens come from."""

    text: str | None = None
    """Glob of text files ("**" allowed). None: the Python standard library's source."""
    tokenizer: str | None = None
    """Path of a Hugging Face tokenizer.json. None: bytes, vocabulary 256."""
    sequence_length: int = 128
    """Tokens the model sees per sequence (one more is read, for the targets)."""
    validation_share: float = 0.05
    """Share of the files held out; a file is always on the same side."""
    seed: int = 0
    """Of the order of the training windows."""


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW with linear warm-up and one cosine decay over all steps, phases or not."""

    peak_learning_rate: float = 3e-3
    warmup_share: float = 0.04
    """Share of the steps over which the learning rate rises from 0."""
    final_ratio: float = 0.05
    """Learning rate after the last step / peak."""
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    weight_decay: float = 0.1
    """Of matrices, embedding and head included; not of norm scales."""
    clip_norm: float = 1.0
    """Global norm that gradients are scaled down to."""

    def __post_init__(self) -> None:
        for name in ("warmup_share", "final_ratio"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(
                    f"optimizer.{name}={getattr(self, name)} is not in [0, 1]; it is a "
                    f"share"
                )
        if self.clip_norm <= 0 or self.peak_learning_rate <= 0:
            raise ValueError(
                f"optimizer.clip_norm={self.clip_norm} and peak_learning_rate="
                f"{self.peak_learning_rate} must be positive"
            )


RecipeName = Literal["default", "paper", "weights", "dense"]
PresetName = Literal["tiny", "gpt-124m", "llama-1b", "llama-7b"]


@dataclass(frozen=True, kw_only=True)
class RecipeConfig:
    """How long the phases are, and what the sparse one does beyond its recipe."""

    warmup_share: float = 0.05
    """Share of the steps that are dense before the sparse phase."""
    sparse_share: float = 0.5
    """Share of the steps that are sparse; the rest is the dense tail."""
    experts: int = 4
    """E of V:2:M with M = 4 E ("paper")."""
    block_rows: int = 128
    """V of V:2:M ("paper")."""
    experts_per_token: int = 1
    """g of E ("paper")."""
    router: RouterChoice = "nearest_centre"
    """How a token chooses its experts ("paper")."""
    skip_blocks: bool = False
    """GEMMs 1 and 3 compute only the neurons of a token's experts ("paper")."""
    token_sparsity: TokenSparsity | None = None
    """GEMMs 5 and 6 2:4 along tokens in the sparse phase ("default" and "paper")."""
    recluster_every: int = 0
    """Steps between warm-started new clusterings in the sparse phase; 0: never."""
    fold: bool = True
    """On leaving 2:4 weights, set W1 to beta S(W1), which the forward has used."""

    def __post_init__(self) -> None:
        if self.warmup_share < 0 or self.sparse_share < 0:
            raise ValueError(
                f"phases.warmup_share={self.warmup_share} and sparse_share="
                f"{self.sparse_share} must not be negative"
            )
        if self.warmup_share + self.sparse_share > 1:
            raise ValueError(
                f"phases.warmup_share={self.warmup_share} + sparse_share="
                f"{self.sparse_share} exceed 1; they are shares of the run's steps"
            )
        if self.recluster_every < 0:
            raise ValueError(
                f"phases.recluster_every={self.recluster_every} is negative; 0 is never"
            )


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """One training run."""

    preset: PresetName = "tiny"
    """Sizes and settings to start from; every other flag overrides one of them."""
    recipe: RecipeName = "default"
    """default: 2:4 weights and activations in the middle of the run. paper: 2:4 weights
    and V:2:M activations (arXiv 2602.06183). weights: 2:4 weights only. dense: none."""
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    phases: RecipeConfig = field(default_factory=RecipeConfig)
    steps: int = 1300
    """Optimiser steps."""
    batch_size: int = 32
    """Sequences per optimiser step."""
    micro_batches: int = 1
    """Parts of a step whose gradients are accumulated; weights are packed once."""
    backend: Backend | None = None
    """None: the best supported for each GEMM. A name runs everywhere or is refused."""
    seed: int = 0
    """Of the initial weights and of random estimators."""
    deterministic: bool = False
    """On a GPU: only kernels that repeat their bits, so that a resumed run does, at 0.8
    of the speed (gpt-124m on an H200). A CPU always repeats them."""
    log_every: int = 10
    """Steps between lines in metrics.jsonl."""
    eval_every: int = 100
    """Steps between validations and statistics of the FFNs; 0: at the switches only."""
    eval_batches: int = 8
    """Batches of batch_size / micro_batches held-out sequences per validation."""
    checkpoint_every: int = 200
    """Steps between checkpoints; each switch and the end write one in any case. 0: only
    those."""
    keep_checkpoints: int = 2
    """Newest checkpoints kept besides those of the switches."""
    sample_length: int = 200
    """Tokens of the greedy sample at the end; 0: none."""
    plot: bool = True
    """Draw loss.png (extra "plots")."""

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "micro_batches", "log_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        for name in ("eval_every", "checkpoint_every", "sample_length"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} must not be negative")
        for name in ("eval_batches", "keep_checkpoints"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        self._refuse_unread_settings()
        if self.model.activation == "swiglu" and self.recipe in ("default", "paper"):
            raise ValueError(
                f"recipe={self.recipe!r} makes activations sparse, which "
                f"model.activation='swiglu' cannot be (silu is nowhere zero); use "
                f"--recipe weights or --model.activation relu2"
            )
        if self.batch_size % self.micro_batches:
            raise ValueError(
                f"batch_size={self.batch_size} is not a multiple of micro_batches="
                f"{self.micro_batches}; change one of them"
            )

    def _refuse_unread_settings(self) -> None:
        """A setting that the recipe does not read would be silently ignored."""
        read_by = {
            name: ("paper",)
            for name in (
                "experts",
                "block_rows",
                "experts_per_token",
                "router",
                "skip_blocks",
                "recluster_every",
            )
        } | {"token_sparsity": ("default", "paper")}
        for name, recipes in read_by.items():
            value, unset = getattr(self.phases, name), getattr(RecipeConfig(), name)
            if value != unset and self.recipe not in recipes:
                raise ValueError(
                    f"phases.{name}={value!r} has no meaning in recipe "
                    f"{self.recipe!r}; leave it out or use --recipe "
                    f"{' or '.join(recipes)}"
                )

    @property
    def tokens_per_step(self) -> int:
        return self.batch_size * self.data.sequence_length


def tiny() -> TrainConfig:
    """Four minutes on two CPU cores: 0.9 M parameters, bytes."""
    return TrainConfig()


def gpt_124m() -> TrainConfig:
    """GPT-2's smallest size with squared ReLU. Steps, batch and warm-up of arXiv
    2404.01847; the learning rate is ours, four times theirs, and not tuned."""
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
        ),
        data=DataConfig(sequence_length=1024),
        optimizer=OptimizerConfig(
            peak_learning_rate=6e-4, warmup_share=0.01, final_ratio=0.1
        ),
        steps=300_000,
        batch_size=512,
        micro_batches=16,
        eval_every=1000,
        checkpoint_every=1000,
    )


def llama_1b() -> TrainConfig:
    """The probable 1B set-up of arXiv 2602.06183: Meta Lingua's, with squared ReLU."""
    return TrainConfig(
        preset="llama-1b",
        model=ModelConfig(
            vocab_size=128_256,
            d_model=2048,
            layers=25,
            heads=16,
            kv_heads=16,
            d_hidden=8448,
            rope_base=500_000.0,
            dtype="bfloat16",
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
        micro_batches=64,
        eval_every=1000,
        checkpoint_every=1000,
    )


def llama_7b() -> TrainConfig:
    """The probable 7B set-up of arXiv 2602.06183: Meta Lingua's, with squared ReLU."""
    return TrainConfig(
        preset="llama-7b",
        model=ModelConfig(
            vocab_size=128_256,
            d_model=4096,
            layers=32,
            heads=32,
            kv_heads=32,
            d_hidden=16_512,
            rope_base=500_000.0,
            dtype="bfloat16",
            remat="full",
        ),
        data=DataConfig(sequence_length=4096),
        optimizer=OptimizerConfig(
            peak_learning_rate=1e-3, warmup_share=2000 / 100_000, final_ratio=1e-6
        ),
        phases=RecipeConfig(warmup_share=1000 / 100_000),
        steps=100_000,
        batch_size=512,
        micro_batches=256,
        eval_every=1000,
        checkpoint_every=1000,
    )


PRESETS: dict[PresetName, Callable[[], TrainConfig]] = {
    "tiny": tiny,
    "gpt-124m": gpt_124m,
    "llama-1b": llama_1b,
    "llama-7b": llama_7b,
}


def to_json(config: TrainConfig) -> dict[str, Any]:
    """The resolved settings as nested plain values."""
    return asdict(config)


def from_json(settings: Mapping[str, Any]) -> TrainConfig:
    """The inverse of `to_json`.

    Raises:
      ValueError: a setting that this version does not know.
    """
    nested = {
        "model": ModelConfig,
        "data": DataConfig,
        "optimizer": OptimizerConfig,
        "phases": RecipeConfig,
    }

    def build(kind: type, values: Mapping[str, Any], where: str) -> Any:
        known = {f.name for f in fields(kind)}
        for name in values:
            if name not in known:
                raise ValueError(
                    f"setting {where}{name} is unknown to this version of sparsejax; "
                    f"resume with the version that wrote it"
                )
        built = {
            name: build(nested[name], value, f"{name}.") if name in nested else value
            for name, value in values.items()
        }
        return kind(**built)

    return build(TrainConfig, settings, "")


MAY_CHANGE = frozenset(
    {
        "log_every",
        "eval_every",
        "checkpoint_every",
        "keep_checkpoints",
        "sample_length",
        "plot",
    }
)
"""Settings that a resumed run may change: none of them touches the training."""


def check_resumable(before: TrainConfig, after: TrainConfig, folder: Path) -> None:
    """Raises ValueError where the run in `folder`, begun under the settings `before`,
    cannot go on under `after`."""
    for name, (old, new) in changed_settings(before, after).items():
        if name not in MAY_CHANGE:
            raise ValueError(
                f"{folder} holds a run whose {name} is {old!r} and cannot become "
                f"{new!r}; leave it out, or begin a run in another folder (a resumed "
                f"run may change {', '.join(sorted(MAY_CHANGE))})"
            )


def changed_settings(before: TrainConfig, after: TrainConfig) -> dict[str, tuple]:
    """Dotted names of the settings that differ, with both values."""

    def flatten(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
        flat = {}
        for name, value in settings.items():
            if isinstance(value, Mapping):
                flat |= flatten(value, f"{prefix}{name}.")
            else:
                flat[prefix + name] = value
        return flat

    old, new = flatten(to_json(before)), flatten(to_json(after))
    return {name: (old[name], new[name]) for name in old if old[name] != new[name]}
