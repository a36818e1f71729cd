"""Every setting of a training run."""

from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Literal

from sparsejax.annotations import check_fields
from sparsejax.config.data import DataConfig
from sparsejax.config.mesh import MeshConfig
from sparsejax.config.model import ModelConfig
from sparsejax.config.optimizer import OptimizerConfig
from sparsejax.config.phases import (
    STATIC_WEIGHTS,
    PhaseConfig,
    RecipeConfig,
    RecipeName,
)
from sparsejax.config.ranges import (
    Count,
    CountOrNone,
    CountOrZero,
    NotNegative,
    Seed,
    check_intervals,
    largest_divisor,
)
from sparsejax.feed_forward.sparsity import FFNSparsity
from sparsejax.ops.backend import Backend
from sparsejax.sparsity.patterns import NM, StaticPattern, name_of

PresetName = Literal["tiny", "wide-200m", "gpt-124m", "llama-1b", "llama-7b"]


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The settings of one training run."""

    preset: PresetName = "tiny"
    """Sizes and settings to start from; every other flag overrides one of them."""
    recipe: RecipeName = "experts"
    """The named schedule of what is sparse, and when. experts: V:4:M activations in its
    middle, two of eight experts of a token by their energy. two-four: 2:4 weights and
    activations. paper: 2:4 weights and V:2:M activations (arXiv 2602.06183).
    activations: 2:4 activations only (arXiv 2503.16672). weights: 2:4 weights only.
    s2d: all linear layers with static weights from the first step, a
    quarter of them by default (arXiv 2304.05511). dense: nothing. phases.sparsity and
    phases.static_weights change their settings. Not read with a schedule."""
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    phases: RecipeConfig = field(default_factory=RecipeConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    steps: Count = 1300
    """Optimiser steps."""
    batch_size: Count = 32
    """Number of sequences per optimiser step."""
    micro_batches: CountOrNone = None
    """Number of parts of a step whose gradients are accumulated; weights are packed
    once. None: as few as sequences_per_device allows on the mesh."""
    sequences_per_device: Count = 32
    """Most sequences of a micro-batch that one device takes. Not read where
    micro_batches is a number."""
    backend: Backend | None = None
    """The backend that runs the sparse GEMMs. None: the fastest that can, for each
    GEMM. A name runs all of them or is refused. A set of kernels that is named applies
    the squared ReLU of dense FFNs in their GEMMs, too, where it can."""
    seed: Seed = 0
    """The seed of the initial weights and of random estimators."""
    deterministic: bool = False
    """Whether a GPU runs only kernels that repeat their bits, so that a resumed run
    does too, at 0.8 of the speed (gpt-124m on an H200). A CPU always repeats them."""
    log_every: Count = 10
    """Steps between lines in metrics.jsonl."""
    eval_every: CountOrZero = 100
    """Steps between validations and statistics of the FFNs; 0: at the switches only."""
    eval_batches: Count = 8
    """Batches of held-out sequences per validation, each as large as a micro-batch on
    one device; on any mesh the sequences are the same."""
    checkpoint_every: CountOrZero = 200
    """Steps between checkpoints; each switch and the end write one in any case. 0:
    these alone."""
    keep_checkpoints: Count = 2
    """Number of newest checkpoints that are kept besides those of the switches."""
    keep_every: CountOrZero = 0
    """Steps between checkpoints that are kept for good as well; a multiple of
    checkpoint_every. 0: none."""
    keep_slower: bool = False
    """Whether a sparse phase whose steps are timed slower than dense ones is trained
    sparse all the same, as an experiment about its loss needs. Otherwise it is trained
    dense. Steps are timed by `sparsejax train`, on GPUs."""
    new_process_minutes: NotNegative = 20.0
    """Minutes from which on a dense phase is trained in a new process if the phase
    before it ran on sparse tensor cores: its steps are about 4 % faster there
    (experiments/LOG.md, 2026-11-22), and starting takes about 40 seconds. Done by
    `sparsejax train`; 0: always."""
    sample_length: CountOrZero = 200
    """Tokens of the greedy sample at the end; 0: none."""
    plot: bool = True
    """Whether loss.png is drawn at the end (needs the extra "plots")."""

    def __post_init__(self) -> None:
        check_fields(self)
        check_intervals(self)
        if self.phases.schedule:
            self._check_schedule()
        else:
            self._check_recipe()
        self._check_static_weights()
        sums_in_loop = self.mesh.zero_stage == 1 and self.model.scan_layers
        if self.mesh.fsdp > 1 and sums_in_loop:
            raise ValueError(
                "mesh.zero_stage=1 sums gradients once per step, but with "
                "model.scan_layers they are summed in each micro-batch, in the loop "
                "over layers, and whole; use --model.no-scan-layers, or "
                "--mesh.zero-stage 2"
            )
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
        """Raises ValueError where the phases of a schedule do not fit each other or the
        model."""
        schedule, activation = self.phases.schedule, self.model.activation
        if self.recipe != TrainConfig.recipe:
            raise ValueError(
                f"recipe={self.recipe!r} has no meaning beside phases.schedule, which "
                f"says what each phase computes; leave one of them out"
            )
        for phase in schedule:
            for sparsity in phase.sparsities:
                if activation == "swiglu" and sparsity.in_expert is not None:
                    raise ValueError(
                        f"phase {phase.name!r} makes activations 2:4, which "
                        f"model.activation='swiglu' cannot be (silu is nowhere zero); "
                        f"leave activations out, let them be dense inside experts, as "
                        f"in '128:4:32', or use --model.activation reglu2 or relu2, "
                        f"or with weights of --init-from --relufy"
                    )
        own = self.model.static_weights
        static = [phase.static_weights or own for phase in schedule]
        if any(after not in (before, None) for before, after in pairwise(static)):
            raise ValueError(
                f"the phases have static_weights={', '.join(map(_name_of, static))}, "
                f"one after the other; a model becomes dense once and stays so: give "
                f"the first phases one pattern, and leave it out of all others"
            )
        for name in ("d_hidden", "layers"):
            whole = getattr(self.model, name)
            sizes = [getattr(phase, name) or whole for phase in schedule]
            masked = {
                size
                for size, of in zip(sizes, static, strict=True)
                if isinstance(of, NM)
            }
            if len(masked) > 1:
                raise ValueError(
                    f"phases with static_weights as masks have {name}="
                    f"{', '.join(map(str, sorted(masked)))}: a larger matrix has other "
                    f"masks, and its weights would no longer be theirs; let the model "
                    f"grow as it becomes dense, or use blocks, as 'diagonal:4'"
                )
            if sizes != sorted(sizes) or sizes[-1] > whole:
                raise ValueError(
                    f"the phases have {name}={', '.join(map(str, sizes))}, one after "
                    f"the other, in a run with model.{name}={whole}; a model grows and "
                    f"does not shrink: let none be smaller than the one before it, "
                    f"nor larger than the model"
                )
        experts = [s.experts for phase in schedule for s in phase.sparsities]
        if self.phases.recluster_every and not any(experts):
            raise ValueError(
                f"phases.recluster_every={self.phases.recluster_every} has no meaning "
                f"in a schedule without experts; leave it out"
            )

    def _check_static_weights(self) -> None:
        """Raises ValueError where a model that has static weights throughout the run
        would be sparse in another way besides."""
        if self.model.static_weights is None:
            return
        sparsities = [self.sparsity]
        if self.phases.schedule:
            sparsities = [s for phase in self.phases.schedule for s in phase.sparsities]
        static = self.recipe in STATIC_WEIGHTS
        if static or not all(sparsity.is_dense for sparsity in sparsities):
            raise ValueError(
                f"model.static_weights={_name_of(self.model.static_weights)} holds in "
                f"all phases, and one of them is sparse in its own way; use --recipe "
                f"dense for weights that stay as they are, or leave it out (--recipe "
                f"s2d has static weights in its first phase alone)"
            )

    def _check_recipe(self) -> None:
        """Raises ValueError where the settings do not fit the recipe, or its sparsity
        does not fit the model."""
        self.phases.check_fits(self.recipe)
        sparsity, activation = self.sparsity, self.model.activation
        if activation != "relu2" and sparsity.skipped_energy is not None:
            raise ValueError(
                f"recipe={self.recipe!r} has a penalty on skipped neurons, skipped_"
                f"energy={sparsity.skipped_energy}, which FFNs with model.activation="
                f"{activation!r} cannot have; leave it out with --phases.skipped-"
                f"energy None, or use another --recipe or --model.activation relu2"
            )
        if activation == "swiglu" and sparsity.in_expert is not None:
            inside = " --phases.activations 128:4:16," if sparsity.experts else ""
            raise ValueError(
                f"recipe={self.recipe!r} makes activations 2:4, which "
                f"model.activation='swiglu' cannot be (silu is nowhere zero); use"
                f"{inside} --recipe weights or --model.activation reglu2 or relu2, "
                f"or with weights of --init-from --relufy"
            )

    @property
    def sparsity(self) -> FFNSparsity:
        """The sparsity of the recipe's sparse phase; not read with a schedule."""
        return self.phases.sparsity_of(self.recipe)

    def with_recipe(self, recipe: RecipeName) -> "TrainConfig":
        """Returns the settings with another recipe: its phases are as long as this
        recipe's, and no setting of this recipe's sparse phase is taken over."""
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
        """The number of sequences of a validation batch: as many as in a micro-batch on
        one device."""
        return self.batch_size // self.micro_batches_on(MeshConfig(data=1))

    def micro_batches_on(self, mesh: MeshConfig) -> int:
        """Returns the number of micro-batches of a step on a mesh whose `data` is set:
        `micro_batches` if that is a number, else the fewest that leave each device
        `sequences_per_device` or less.

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


def _name_of(pattern: StaticPattern | None) -> str:
    return "None" if pattern is None else repr(name_of(pattern))
