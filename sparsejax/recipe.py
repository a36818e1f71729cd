"""The phases of a training run: how many steps, and how sparse."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from sparsejax.annotations import check_value
from sparsejax.config import RecipeConfig, RecipeName, TrainConfig
from sparsejax.ops.ffn_spec import DENSE, FFNSparsity, check_divisible
from sparsejax.patterns import NM, VNM


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Consecutive steps with one sparsity, and so with one compiled step."""

    kind: str
    """"warm-up", "sparse" or "dense"."""
    steps: int
    sparsity: FFNSparsity


def sparsity_of(recipe: RecipeName, settings: RecipeConfig) -> FFNSparsity:
    """The sparsity of the recipe's sparse phase.

    default: 2:4 weights in GEMMs 1 and 3, 2:4 activations in 2 and 4, the mixture that
    cost least in all our runs (experiments/LOG.md). paper: 2:4 weights and V:2:M
    activations, GEMMs 5 and 6 per expert (arXiv 2602.06183). activations: 2:4
    activations (arXiv 2503.16672). weights: 2:4 weights.

    Raises:
      ValueError: there is no such recipe, or its settings contradict each other.
    """
    check_value("recipe", recipe, RecipeName)
    if recipe == "dense":
        return DENSE
    if recipe == "weights":
        return FFNSparsity(weights=NM(2, 4))
    if recipe == "paper":
        sparsity = FFNSparsity(
            weights=NM(2, 4),
            activations=VNM(settings.block_rows, 2, 4 * settings.experts),
            router=settings.router,
            experts_per_token=settings.experts_per_token,
            skip_blocks=settings.skip_blocks,
            weight_gradients="expert_columns",
        )
    else:
        weights = NM(2, 4) if recipe == "default" else None
        sparsity = FFNSparsity(weights=weights, activations=NM(2, 4))
    return replace(
        sparsity,
        mask_reuse=settings.mask_reuse,
        token_sparsity=settings.token_sparsity,
        dense_features=settings.dense_features,
        permute_tokens=settings.permute_tokens,
    )


def phase_at(planned: Sequence[Phase], step: int) -> int:
    """The number of the phase that the step after `step` steps belongs to; of a run
    that is over, its last one."""
    ends = accumulate(phase.steps for phase in planned)
    return next((i for i, end in enumerate(ends) if step < end), len(planned) - 1)


def are_alike(left: Sequence[Phase], right: Sequence[Phase]) -> bool:
    """Whether both are the same phases, however long."""
    return [replace(of, steps=0) for of in left] == [
        replace(of, steps=0) for of in right
    ]


def steps_left(planned: Sequence[Phase], step: int) -> tuple[Phase, ...]:
    """The phases as long as what is left of each after `step` steps."""
    ends = accumulate(phase.steps for phase in planned)
    return tuple(
        replace(phase, steps=min(phase.steps, max(0, end - step)))
        for phase, end in zip(planned, ends, strict=True)
    )


def phases(config: TrainConfig) -> tuple[Phase, ...]:
    """The phases of a run, none of them empty: dense warm-up, sparse, dense tail.

    Raises:
      ValueError: the recipe's settings contradict each other, or its patterns do not
        divide the model's widths.
    """
    sparsity = sparsity_of(config.recipe, config.phases)
    if config.recipe == "dense":
        return (Phase(kind="dense", steps=config.steps, sparsity=DENSE),)
    warmup = round(config.phases.warmup_share * config.steps)
    sparse = round(config.phases.sparse_share * config.steps)
    sparse = min(sparse, config.steps - warmup)
    planned = (
        Phase(kind="warm-up", steps=warmup, sparsity=DENSE),
        Phase(kind="sparse", steps=sparse, sparsity=sparsity),
        Phase(kind="dense", steps=config.steps - warmup - sparse, sparsity=DENSE),
    )
    planned = tuple(phase for phase in planned if phase.steps)
    for phase in planned:
        check_divisible(config.model.d_model, config.model.d_hidden, phase.sparsity)
    return planned
