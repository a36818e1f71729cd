"""Every setting of a training run, as frozen dataclasses with the range of each."""

from dataclasses import dataclass, field, fields, replace
from functools import cache
from math import isqrt
from typing import Annotated, Any, Literal, get_args, get_type_hints

import tyro

from sparsejax.annotations import check_fields
from sparsejax.ops.backend import Backend
from sparsejax.ops.ffn_spec import (
    DENSE,
    FFNSparsity,
    RouterChoice,
    TokenSparsity,
)

FLOAT32_MAX = 3.4028234663852886e38


@dataclass(frozen=True, kw_only=True)
class Interval:
    """The numbers that a setting may be, between the bounds that are given."""

    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None

    def __contains__(self, value: float) -> bool:
        return (
            (self.least is None or value >= self.least)
            and (self.above is None or value > self.above)
            and (self.most is None or value <= self.most)
            and (self.below is None or value < self.below)
        )

    def __str__(self) -> str:
        bounds = {
            "at least": self.least,
            "above": self.above,
            "at most": self.most,
            "below": self.below,
        }
        stated = (f"{how} {n}" for how, n in bounds.items() if n is not None)
        return " and ".join(stated)


INT32_MAX = 2**31 - 1
Count = Annotated[int, Interval(least=1, most=INT32_MAX)]
CountOrNone = Annotated[int | None, Interval(least=1, most=INT32_MAX)]
CountOrZero = Annotated[int, Interval(least=0, most=INT32_MAX)]
Seed = Annotated[int, Interval(least=0, most=2**32 - 1)]
Share = Annotated[float, Interval(least=0, most=1)]
Positive = Annotated[float, Interval(above=0, most=FLOAT32_MAX)]
NotNegative = Annotated[float, Interval(least=0, most=FLOAT32_MAX)]
Decay = Annotated[float, Interval(least=0, below=1)]


def check_intervals(settings: Any, section: str = "") -> None:
    """Raises ValueError where a field annotated with an `Interval` lies outside it; a
    field that is None has no number.

    Args:
      settings: a dataclass.
      section: what precedes the field's name in its dotted name, with the dot.
    """
    for name, interval in _intervals(type(settings)).items():
        value = getattr(settings, name)
        if value is not None and value not in interval:
            raise ValueError(f"{section}{name}={value} must be {interval}")


def largest_divisor(number: int, *, most: int) -> int:
    """The largest divisor of a positive `number` that is at most `most`, a positive
    integer too."""
    small = [d for d in range(1, isqrt(number) + 1) if number % d == 0]
    return max(d for each in small for d in (each, number // each) if d <= most)


@cache
def _intervals(kind: type) -> dict[str, Interval]:
    hints = get_type_hints(kind, include_extras=True)
    return {
        name: extra
        for name, hint in hints.items()
        for extra in getattr(hint, "__metadata__", ())
        if isinstance(extra, Interval)
    }


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder-only transformer."""

    vocab_size: Count = 256
    d_model: Count = 128
    layers: Count = 4
    heads: Count = 2
    kv_heads: Count = 2
    """Key and value heads; fewer than `heads` is grouped-query attention."""
    d_hidden: Count = 512
    """F, neurons per FFN (of a gated one: per branch)."""
    activation: Literal["relu2", "swiglu", "reglu2"] = "relu2"
    """The FFN: W2 relu(W1 x)^2, or gated Wd (s(Wg x) * Wu x) with s silu ("swiglu") or
    relu^2 ("reglu2")."""
    tie_embeddings: bool = False
    rope_base: Positive = 10_000.0
    norm_epsilon: Positive = 1e-6
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Compute type; master weights and optimiser moments are always float32."""
    remat: Literal["none", "full", "dots"] = "none"
    """What a block recomputes in the backward: nothing, everything, or all but the
    outputs of the plain GEMMs."""
    scan_layers: bool = True
    """One block is compiled, and a loop runs it for every layer. False: the program has
    all layers one after the other; it takes longer to compile, and nothing is copied
    into and out of the loop's stacks."""

    @property
    def head_dim(self) -> int:
        return self.d_model // self.heads

    @property
    def gated(self) -> bool:
        """Whether the FFN has a third weight, Wg."""
        return self.activation != "relu2"

    def __post_init__(self) -> None:
        check_fields(self, "model.")
        check_intervals(self, "model.")
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
    shards: str | None = None
    """Instead of text, tokens: a folder, or a glob, of .bin and .npy files of uint16 or
    uint32 (nanoGPT, llm.c). Files named val are held out, files named test left out."""
    shard_dtype: Literal["uint16", "uint32"] = "uint16"
    """Of .bin files without a header; llm.c's header and .npy files say theirs."""
    tokenizer: str | None = None
    """Path of a Hugging Face tokenizer.json. None: bytes, vocabulary 256; for shards,
    ids are not turned into text."""
    sequence_length: Count = 128
    """Tokens the model sees per sequence (one more is read, for the targets)."""
    validation_share: Annotated[float, Interval(above=0, below=1)] = 0.05
    """Share of the files held out; a file is always on the same side. Not read where
    shards are named val."""
    seed: Seed = 0
    """Of the order of the training windows."""

    def __post_init__(self) -> None:
        check_fields(self, "data.")
        check_intervals(self, "data.")
        if self.text is not None and self.shards is not None:
            raise ValueError(
                f"data.text={self.text!r} and data.shards={self.shards!r} are both "
                f"set, and the tokens come from one of them; leave the other out"
            )


ScheduleName = Literal["cosine", "wsd"]


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW with linear warm-up and a schedule of the learning rate over all steps,
    phases or not."""

    peak_learning_rate: Positive = 3e-3
    schedule: ScheduleName = "cosine"
    """cosine: one cosine decay from the warm-up to the last step. wsd (warm-up, stable,
    decay): constant at the peak, and a decay over the last steps (arXiv 2405.18392)."""
    warmup_share: Share = 0.04
    """Share of the steps over which the learning rate rises from 0."""
    decay_share: Share = 0.2
    """Share of the steps, the last ones, over which schedule wsd decays; 0: it stays
    at the peak, as in a trunk that others branch from."""
    final_ratio: Share = 0.05
    """Learning rate after the last step / peak."""
    beta1: Decay = 0.9
    beta2: Decay = 0.95
    epsilon: Positive = 1e-8
    weight_decay: NotNegative = 0.1
    """Of matrices, embedding and head included; not of norm scales."""
    clip_norm: Positive = 1.0
    """Global norm that gradients are scaled down to."""

    def __post_init__(self) -> None:
        check_fields(self, "optimizer.")
        check_intervals(self, "optimizer.")
        if (
            self.schedule == "cosine"
            and self.decay_share != OptimizerConfig.decay_share
        ):
            raise ValueError(
                f"optimizer.decay_share={self.decay_share} has no meaning in schedule "
                f"'cosine', which decays from the warm-up to the last step; leave it "
                f"out or use --optimizer.schedule wsd"
            )
        if self.schedule == "wsd" and self.warmup_share + self.decay_share > 1:
            raise ValueError(
                f"optimizer.warmup_share={self.warmup_share} + decay_share="
                f"{self.decay_share} exceed 1; they are shares of the run's steps"
            )


@dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """How many devices each axis of the mesh has; their product is that of all devices.

    The batch is split over data and fsdp.
    """

    data: CountOrZero = 0
    """Replicas of the parameters. 0: all devices that fsdp and tensor leave."""
    fsdp: Count = 1
    """Devices that share one copy of parameters, moments and gradients, and gather a
    layer's weights where they are read."""
    tensor: Count = 1
    """Devices that share every token's work: heads, neurons, vocabulary."""

    def __post_init__(self) -> None:
        check_fields(self, "mesh.")
        check_intervals(self, "mesh.")

    @property
    def devices(self) -> int:
        """Of the whole mesh; 0 while `data` is left open."""
        return self.data * self.fsdp * self.tensor

    @property
    def token_shards(self) -> int:
        """Parts that the sequences of a batch, and so their tokens, are split into; 0
        while `data` is left open."""
        return self.data * self.fsdp

    def resolve(self, devices: int) -> "MeshConfig":
        """The mesh with `data` filled in, for this many devices.

        Raises:
          ValueError: the axes do not multiply to `devices`.
        """
        shared = self.fsdp * self.tensor
        data = self.data or devices // shared
        if data * shared != devices:
            raise ValueError(
                f"mesh.data={self.data} x mesh.fsdp={self.fsdp} x mesh.tensor="
                f"{self.tensor} is not the number of devices, {devices}; set axes that "
                f"multiply to {devices} (data=0 takes what is left)"
            )
        return replace(self, data=data)


RecipeName = Literal["default", "paper", "activations", "weights", "dense"]
SPARSE_ACTIVATIONS = ("default", "paper", "activations")
"""Recipes whose sparse phase has sparse activations."""
PresetName = Literal["tiny", "wide-200m", "gpt-124m", "llama-1b", "llama-7b"]


@dataclass(frozen=True, kw_only=True)
class Interleaved:
    """Steps of a phase that run with another sparsity than its others: each `steps`-th,
    counted from the first of the phase. Neurons keep their order and weights their
    scales. Without `sparsity` they are dense, on all neurons."""

    steps: Annotated[int, Interval(least=2, most=INT32_MAX)]
    sparsity: FFNSparsity = DENSE

    def __post_init__(self) -> None:
        check_fields(self, "every.")
        check_intervals(self, "every.")


@dataclass(frozen=True, kw_only=True)
class PhaseConfig:
    """One phase of a schedule: consecutive steps that are trained alike."""

    name: str
    """What records, tables and figures call it; unique in a schedule."""
    share: Annotated[float | None, Interval(above=0, most=1)] = None
    """Its share of the run's steps. None, in one phase of a schedule: what the others
    leave."""
    sparsity: FFNSparsity = DENSE
    """What is sparse in its steps and its validations."""
    every: Interleaved | None = None
    """Steps of the phase with another sparsity."""
    learning_rate_scale: Positive = 1.0
    """Multiplies the learning rate that the schedule of the optimiser gives."""

    def __post_init__(self) -> None:
        check_fields(self, "phases.schedule.")
        check_intervals(self, "phases.schedule.")
        if not self.name.strip() or not self.name.isprintable():
            raise ValueError(
                f"phases.schedule.name={self.name!r} must be a word or some, in one "
                f"line; records and figures tell phases by it"
            )
        experts = {s.experts for s in self.sparsities if s.experts}
        if len(experts) > 1:
            raise ValueError(
                f"phase {self.name!r} has steps with {min(experts)} experts and steps "
                f"with {max(experts)}, but its neurons lie in one order; give both the "
                f"same number of experts, or make two phases of it"
            )

    @property
    def sparsities(self) -> tuple[FFNSparsity, ...]:
        """The sparsity of its steps, and that of the steps in between, if any."""
        between = () if self.every is None else (self.every.sparsity,)
        return (self.sparsity, *between)


@dataclass(frozen=True, kw_only=True)
class RecipeConfig:
    """How long the phases are, and what the sparse one does beyond its recipe; or, as a
    schedule, which phases there are instead of the recipe's three."""

    warmup_share: Share = 0.05
    """Share of the steps that are dense before the sparse phase."""
    sparse_share: Share = 0.5
    """Share of the steps that are sparse; the rest is the dense tail."""
    experts: Annotated[int, Interval(least=1, most=16_384)] = 4
    """E of V:2:M with M = 4 E, two bytes in the compressed format ("paper")."""
    block_rows: Count = 128
    """V of V:2:M ("paper")."""
    experts_per_token: Count = 1
    """g of E ("paper")."""
    router: RouterChoice = "nearest_centre"
    """How a token chooses its experts ("paper")."""
    skip_blocks: bool = False
    """GEMM 1, too, computes only the neurons of a token's experts ("paper")."""
    token_sparsity: TokenSparsity | None = None
    """GEMMs 5 and 6 2:4 along tokens in the sparse phase (where activations are
    sparse)."""
    dense_features: Annotated[float, Interval(least=0, below=1)] = 0.05
    """With token_sparsity: share of the features, those with most non-zeros, that stay
    dense in GEMMs 5 and 6."""
    permute_tokens: bool = True
    """With token_sparsity: groups of four follow a fixed order, in which a group's
    tokens are a 64th of all apart."""
    mask_reuse: bool = True
    """The backward applies the forward's mask of the activations before anything else.
    Without it: an ablation."""
    recluster_every: CountOrZero = 0
    """Steps between warm-started new clusterings in the sparse phase; 0: never."""
    fold: bool = True
    """On leaving 2:4 weights, set W1 to beta S(W1), which the forward has used."""
    # Not a flag for each of its fields: the command line reads a file (--schedule).
    schedule: Annotated[
        tuple[PhaseConfig, ...], tyro.conf.Fixed, tyro.conf.Suppress
    ] = ()
    """The phases in their order. Empty: those of the recipe, dense, sparse, dense. With
    a schedule, of the other settings here `fold` and `recluster_every` are read."""

    def __post_init__(self) -> None:
        check_fields(self, "phases.")
        check_intervals(self, "phases.")
        if self.schedule:
            self._check_schedule()
        if self.warmup_share + self.sparse_share > 1:
            raise ValueError(
                f"phases.warmup_share={self.warmup_share} + sparse_share="
                f"{self.sparse_share} exceed 1; they are shares of the run's steps"
            )
        if self.experts_per_token > self.experts:
            raise ValueError(
                f"phases.experts_per_token={self.experts_per_token} exceeds experts="
                f"{self.experts}; a token has at most all of them"
            )
        for name in ("dense_features", "permute_tokens"):
            value, unset = getattr(self, name), getattr(RecipeConfig, name)
            if value != unset and self.token_sparsity is None:
                raise ValueError(
                    f"phases.{name}={value!r} has no meaning without "
                    f"phases.token_sparsity; leave it out or set that to one of "
                    f"{', '.join(map(repr, get_args(TokenSparsity)))}"
                )

    def _check_schedule(self) -> None:
        for field_ in fields(self):
            value = getattr(self, field_.name)
            if field_.name not in READ_WITH_SCHEDULE and value != field_.default:
                raise ValueError(
                    f"phases.{field_.name}={value!r} has no meaning beside "
                    f"phases.schedule, whose phases say that themselves; leave one of "
                    f"them out"
                )
        names = [phase.name for phase in self.schedule]
        if double := {name for name in names if names.count(name) > 1}:
            raise ValueError(
                f"phases.schedule has several phases named {sorted(double)[0]!r}; "
                f"records and figures tell them by their names, give each its own"
            )
        shares = [phase.share for phase in self.schedule]
        total, left = sum(filter(None, shares)), shares.count(None)
        if left > 1:
            raise ValueError(
                f"phases.schedule has {left} phases without a share of the steps; one "
                f"of them takes what is left, give the others theirs"
            )
        if total > 1 + 1e-9 or (not left and total < 1 - 1e-9):
            raise ValueError(
                f"the shares in phases.schedule sum to {total:g} and not to 1; change "
                f"one, or leave one out, which then is what the others leave"
            )


READ_WITH_SCHEDULE = ("schedule", "fold", "recluster_every")
"""Settings of the phases that a schedule leaves to all of them."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """One training run."""

    preset: PresetName = "tiny"
    """Sizes and settings to start from; every other flag overrides one of them."""
    recipe: RecipeName = "default"
    """default: 2:4 weights and activations in the middle of the run. paper: 2:4 weights
    and V:2:M activations (arXiv 2602.06183). activations: 2:4 activations only (arXiv
    2503.16672). weights: 2:4 weights only. dense: none. Not read with a schedule."""
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    phases: RecipeConfig = field(default_factory=RecipeConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    steps: Count = 1300
    """Optimiser steps."""
    batch_size: Count = 32
    """Sequences per optimiser step."""
    micro_batches: CountOrNone = None
    """Parts of a step whose gradients are accumulated; weights are packed once. None:
    as few as sequences_per_device allows on the mesh."""
    sequences_per_device: Count = 32
    """Sequences that a device has of a micro-batch, at most. Not read where
    micro_batches is a number."""
    backend: Backend | None = None
    """None: the best supported for each GEMM. A name runs everywhere or is refused."""
    seed: Seed = 0
    """Of the initial weights and of random estimators."""
    deterministic: bool = False
    """On a GPU: only kernels that repeat their bits, so that a resumed run does, at 0.8
    of the speed (gpt-124m on an H200). A CPU always repeats them."""
    log_every: Count = 10
    """Steps between lines in metrics.jsonl."""
    eval_every: CountOrZero = 100
    """Steps between validations and statistics of the FFNs; 0: at the switches only."""
    eval_batches: Count = 8
    """Batches of held-out sequences per validation, each as large as a micro-batch on
    one device; on any mesh the sequences are the same."""
    checkpoint_every: CountOrZero = 200
    """Steps between checkpoints; each switch and the end write one in any case. 0: only
    those."""
    keep_checkpoints: Count = 2
    """Newest checkpoints kept besides those of the switches."""
    keep_every: CountOrZero = 0
    """Checkpoints of a step that is a multiple of this are kept for good as well; a
    multiple of checkpoint_every. 0: none."""
    keep_slower: bool = False
    """A sparse phase whose steps are timed slower than dense ones is trained sparse all
    the same, as an experiment about its loss needs. Otherwise it is trained dense.
    Steps are timed by experiments/pretrain.py, on GPUs."""
    new_process_minutes: NotNegative = 20.0
    """A dense phase that will take as long or longer is trained in a new process if the
    one before ran on sparse tensor cores: its steps are about 4 % faster there
    (experiments/LOG.md, 2026-11-22), and starting takes about 40 seconds. By
    experiments/pretrain.py; 0: always."""
    sample_length: CountOrZero = 200
    """Tokens of the greedy sample at the end; 0: none."""
    plot: bool = True
    """Draw loss.png (extra "plots")."""

    def __post_init__(self) -> None:
        check_fields(self)
        check_intervals(self)
        if self.phases.schedule:
            self._check_schedule()
        else:
            self._check_recipe()
        if self.keep_every % (self.checkpoint_every or 1) or (
            self.keep_every and not self.checkpoint_every
        ):
            raise ValueError(
                f"keep_every={self.keep_every} is not a multiple of checkpoint_every="
                f"{self.checkpoint_every}: only what is written can be kept"
            )
        if self.batch_size % (self.micro_batches or 1):
            raise ValueError(
                f"batch_size={self.batch_size} is not a multiple of micro_batches="
                f"{self.micro_batches}; change one of them"
            )

    def _check_schedule(self) -> None:
        """What the sparsities of a schedule do not fit."""
        schedule, activation = self.phases.schedule, self.model.activation
        if self.recipe != TrainConfig.recipe:
            raise ValueError(
                f"recipe={self.recipe!r} has no meaning beside phases.schedule, which "
                f"says what each phase computes; leave one of them out"
            )
        for phase in schedule:
            for sparsity in phase.sparsities:
                if activation == "swiglu" and sparsity.activations is not None:
                    raise ValueError(
                        f"phase {phase.name!r} makes activations sparse, which "
                        f"model.activation='swiglu' cannot be (silu is nowhere zero); "
                        f"leave activations out, or use --model.activation reglu2 or "
                        f"relu2"
                    )
                if self.model.gated and sparsity.experts:
                    raise ValueError(
                        f"phase {phase.name!r} routes tokens to experts, which an FFN "
                        f"with model.activation={activation!r} does not have; give it "
                        f"activations 2:4, or use --model.activation relu2"
                    )
        experts = [s.experts for phase in schedule for s in phase.sparsities]
        if self.phases.recluster_every and not any(experts):
            raise ValueError(
                f"phases.recluster_every={self.phases.recluster_every} has no meaning "
                f"in a schedule without experts; leave it out"
            )

    def _check_recipe(self) -> None:
        """What the recipe does not read, and what its sparsity does not fit."""
        self._refuse_unread_settings()
        if self.model.activation == "swiglu" and self.recipe in SPARSE_ACTIVATIONS:
            raise ValueError(
                f"recipe={self.recipe!r} makes activations sparse, which "
                f"model.activation='swiglu' cannot be (silu is nowhere zero); use "
                f"--recipe weights or --model.activation reglu2 or relu2"
            )
        if self.model.gated and self.recipe == "paper":
            raise ValueError(
                f"recipe='paper' routes tokens to experts, which an FFN with "
                f"model.activation={self.model.activation!r} does not have; use "
                f"--recipe default or --model.activation relu2"
            )

    def _refuse_unread_settings(self) -> None:
        """A setting that the recipe does not read would be silently ignored."""
        of_paper = (
            "experts",
            "block_rows",
            "experts_per_token",
            "router",
            "skip_blocks",
            "recluster_every",
        )
        of_activations = (
            "token_sparsity",
            "dense_features",
            "permute_tokens",
            "mask_reuse",
        )
        read_by = dict.fromkeys(of_paper, ("paper",))
        read_by |= dict.fromkeys(of_activations, SPARSE_ACTIVATIONS)
        for name, recipes in read_by.items():
            value, unset = getattr(self.phases, name), getattr(RecipeConfig(), name)
            if value != unset and self.recipe not in recipes:
                raise ValueError(
                    f"phases.{name}={value!r} has no meaning in recipe "
                    f"{self.recipe!r}; leave it out or use --recipe "
                    f"{' or '.join(recipes)}"
                )

    def with_recipe(self, recipe: RecipeName) -> "TrainConfig":
        """The same with another recipe, whose phases are as long, and which has none of
        the settings that this one's sparse phase has beyond its recipe."""
        lengths = {
            name: getattr(self.phases, name)
            for name in ("warmup_share", "sparse_share", "fold")
        }
        return replace(self, recipe=recipe, phases=RecipeConfig(**lengths))

    def with_schedule(self, schedule: tuple[PhaseConfig, ...]) -> "TrainConfig":
        """Returns the settings with the phases of a schedule in place of a recipe's."""
        phases = RecipeConfig(schedule=schedule, fold=self.phases.fold)
        return replace(self, recipe=TrainConfig.recipe, phases=phases)

    @property
    def tokens_per_step(self) -> int:
        return self.batch_size * self.data.sequence_length

    @property
    def validation_batch_size(self) -> int:
        """Sequences of a validation batch: those of a micro-batch on one device."""
        return self.batch_size // self.micro_batches_on(MeshConfig(data=1))

    def micro_batches_on(self, mesh: MeshConfig) -> int:
        """The micro-batches of a step on a mesh whose `data` is set: as many as are
        named, else the fewest that leave each device `sequences_per_device` or less.

        Raises:
          ValueError: the mesh cannot share the sequences of a step equally, or those of
            each of the micro-batches that are named; says which number fits.
        """
        shards = mesh.token_shards
        axes = f"mesh.data x mesh.fsdp = {mesh.data} x {mesh.fsdp}"
        if self.batch_size % shards:
            raise ValueError(
                f"batch_size={self.batch_size} is not a multiple of {axes}, whose "
                f"devices share the sequences of a step equally; set --batch-size "
                f"{-(-self.batch_size // shards) * shards}, or change the mesh"
            )
        on_each = self.batch_size // shards
        most = self.sequences_per_device
        chosen = on_each // largest_divisor(on_each, most=most)
        if self.micro_batches is None:
            return chosen
        if on_each % self.micro_batches:
            fits = largest_divisor(on_each, most=self.micro_batches)
            raise ValueError(
                f"micro_batches={self.micro_batches} of batch_size={self.batch_size} "
                f"are of {self.batch_size // self.micro_batches} sequences, not a "
                f"multiple of {axes}; set --micro-batches {fits}, leave it out (then "
                f"it is {chosen}), or change the mesh"
            )
        return self.micro_batches
